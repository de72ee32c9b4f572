"""Servers under comparison are started, watched and ended as processes; nothing of them stays."""

from __future__ import annotations

import errno
import socket
import sys
import textwrap
import time

import pytest

from benchmarks.peer_servers.callables import MINILM, mlp
from benchmarks.peer_servers.items import ITEMS
from benchmarks.peer_servers.running import DidNotStart, ask, free_port, processes, serving

pytestmark = pytest.mark.alone

SERVER = """
import http.server, json, os, signal, subprocess, sys, time
CHILD = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", CHILD], start_new_session=True)   # as a cluster's daemons do
{stubborn}
class Answer(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        content = json.dumps({{"result": body}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
    def log_message(self, *_):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
"""


@pytest.mark.parametrize("stubborn", ["", "signal.signal(signal.SIGTERM, signal.SIG_IGN)"])
def test_everything_ends_even_what_left_the_group_and_what_ignores_the_signal(
    stubborn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.peer_servers.running.ENDING", 1.0)
    monkeypatch.setattr("benchmarks.peer_servers.running.TOLD", 2.0)
    port = free_port()
    command = [sys.executable, "-c", textwrap.dedent(SERVER.format(stubborn=stubborn)), str(port)]
    with serving(command, port, "/predict", [1, 2], core=None) as server:
        assert ask(port, "/predict", "text") == (200, {"result": "text"})
        assert len(processes(server.mark)) == 2
        before = server.cpu_seconds()
        assert before > 0 and server.idle_share(0.5) < 0.5
    assert processes(server.mark) == []
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) == errno.ECONNREFUSED


def test_a_server_that_ends_says_why() -> None:
    port, start = free_port(), time.monotonic()
    command = [sys.executable, "-c", "import sys; sys.exit('no model here')"]
    with pytest.raises(DidNotStart, match="no model here"), serving(command, port, "/predict", 1, core=None):
        pass
    assert time.monotonic() - start < 60


def test_the_callable_gives_an_item_the_same_answer_alone_and_beside_others() -> None:
    run, items = mlp(), ITEMS["mlp"]()[:5]
    assert len({len(item) for item in items}) == 1
    for item, together in zip(items, run(items)):
        assert run([item])[0] == pytest.approx(together, abs=1e-5) and len(together) == 10
    with pytest.raises(ValueError, match="length"):
        run([items[0], items[1][:-1]])


def test_texts_are_real_and_of_mixed_length() -> None:
    texts = ITEMS["minilm"]()
    lengths = sorted(map(len, texts))
    assert len(set(texts)) == len(texts) == 512 and lengths[50] < 60 and lengths[-50] > 500


@pytest.mark.skipif(not MINILM.exists(), reason="the model's package is not there")
def test_the_folder_of_the_model() -> None:
    assert (MINILM / "tokenizer.json").exists() and (MINILM / "model.safetensors").exists()
