"""``microbatch load`` from the outside: what it prints, what it refuses, and that it always ends."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from microbatch.cli.app import run
from tests.web.scripted import Answer, Scripted, reply, scripted

BODY = ["--body", "[1]"]
SHORT = ["--requests", "20", "--warmup", "0"]


def at_once(number: int, request: bytes) -> tuple[float, bytes]:
    return 0.0, reply()


def command(url: str, *words: str) -> int:
    return run(["load", url, *words])


@pytest.fixture
def server() -> Iterator[Scripted]:
    with scripted(at_once) as server:
        yield server


def error_line(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of an error."""
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1
    assert "Traceback" not in printed.err
    return printed.err


def test_a_sentence_and_a_table(server: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(server.url, "--clients", "2", "--target", "10s", *SHORT, *BODY) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(("2 clients get ", "Void: "))
    assert lines[1].startswith(server.url)
    assert lines[2].split()[:3] == ["load", "requests", "answers/s"]
    assert lines[3].split()[:3] == ["2", "clients", "20"]


def test_several_rates_are_a_table(server: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(server.url, "--rate", "200,400", *SHORT, *BODY) == 0
    rows = [line.split()[0] for line in capsys.readouterr().out.splitlines()[3:5]]
    assert rows == ["200/s", "400/s"]


def test_json_for_machines(server: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(server.url, "--rate", "200", "--duration", "500ms", "--warmup", "0", "--json", *BODY) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["errors"] == {}
    assert document["requests"] == pytest.approx(100, rel=0.5)
    assert document["goodput"] is None
    assert document["client_cpu"] > 0
    assert document["latency"]["p50"] <= document["latency"]["p99"] <= document["latency"]["max"]


def test_reports_are_written(server: Scripted, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [str(tmp_path / f"load.{form}") for form in ("html", "svg", "json", "csv", "txt")]
    assert command(server.url, *SHORT, *BODY, *(word for name in names for word in ("--out", name))) == 0
    assert all(Path(name).stat().st_size for name in names)


def test_a_key_a_header_and_a_deadline_are_sent(server: Scripted, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret\n")
    words = ["--api-key-file", str(tmp_path / "key"), "--header", "X-Tenant: blue", "--deadline", "50ms"]
    assert command(server.url, *SHORT, *BODY, *words) == 0
    for line in (b"Authorization: Bearer secret", b"X-Tenant: blue", b"Microbatch-Deadline: 0.05"):
        assert all(line in request for request in server.requests)


def test_items_are_sent_in_turn(server: Scripted, tmp_path: Path) -> None:
    (tmp_path / "items.jsonl").write_text('"a"\n"bb"\n')
    assert command(server.url, "--clients", "1", *SHORT, "--items-file", str(tmp_path / "items.jsonl")) == 0
    bodies = [request.split(b"\r\n\r\n")[1] for request in server.requests if request.startswith(b"POST")]
    assert bodies[1:5] == [b'{"item":"a"}', b'{"item":"bb"}'] * 2


def test_a_file_of_times(server: Scripted, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "times.csv").write_text("seconds\n" + "\n".join(str(k / 50) for k in range(10)))
    assert command(server.url, "--traffic", str(tmp_path / "times.csv"), "--json", *BODY) == 0
    assert json.loads(capsys.readouterr().out)["requests"] == 10


def published(number: int, request: bytes) -> tuple[float, bytes]:
    """A server that says what it takes, and takes nothing else."""
    takes = {"content": {"application/json": {"example": [0.5, 1.5]}}}
    document = {"paths": {"/predict/mlp": {"post": {"requestBody": takes}}}}
    if request.startswith(b"GET /openapi.json "):
        return 0.0, reply(200, json.dumps(document).encode())
    right = request.startswith(b"POST /predict/mlp ") and request.endswith(b"[0.5,1.5]")
    return 0.0, reply(200 if right else 400)


def test_path_and_body_come_from_what_the_server_publishes(capsys: pytest.CaptureFixture[str]) -> None:
    with scripted(published) as server:
        assert command(server.url.removesuffix("/predict"), "--json", *SHORT) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["url"].endswith("/predict/mlp")
    assert document["errors"] == {}


def test_a_server_that_publishes_nothing_needs_a_body(capsys: pytest.CaptureFixture[str]) -> None:
    with scripted(lambda number, request: (0.0, reply(404))) as server:
        assert command(server.url) == 2
    assert "Give --body, --body-file or --items-file." in error_line(capsys)


@pytest.mark.parametrize(
    ("status", "said"),
    [(401, "--api-key-file"), (403, "--api-key-file"), (404, "path"), (405, "--method"), (415, "Type")],
)
def test_what_every_request_would_be_refused_for_is_said_once(
    status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    body = b'{"error": {"type": "X", "message": "Not for you."}}'
    with scripted(lambda number, request: (0.0, reply(status, body))) as server:
        assert command(server.url, *BODY) == 2
        assert len(server.requests) == 1
    line = error_line(capsys)
    assert str(status) in line and "Not for you" in line and said in line


def test_a_server_that_answers_nothing_well_is_a_no(capsys: pytest.CaptureFixture[str]) -> None:
    with scripted(lambda number, request: (0.0, reply(500, b"broken"))) as server:
        assert command(server.url, *SHORT, *BODY) == 1
    assert "500 (broken)" in capsys.readouterr().out


Talk = Callable[[socket.socket], None]


@contextmanager
def listening(talk: Talk) -> Iterator[str]:
    """Something that takes connections and is no server of HTTP."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def take() -> None:
            with suppress(OSError):
                while True:
                    talk(listener.accept()[0])

        thread = threading.Thread(target=take, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/predict"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(10)


def greet(taken: socket.socket) -> None:
    with taken:
        taken.sendall(b"220 mail.example ESMTP\r\n")
        taken.recv(1000)


def hang_up(taken: socket.socket) -> None:
    with taken:
        taken.recv(1000)


KEPT: list[socket.socket] = []


@pytest.mark.parametrize(("talk", "said"), [(greet, "does not speak HTTP"), (hang_up, "closes the connection"),
                                            (KEPT.append, "does not answer")])  # fmt: skip
def test_what_is_no_server_of_http_is_one_line(talk: Talk, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with listening(talk) as url:
        assert command(url, *BODY, "--timeout", "500ms") == 2
    assert said in error_line(capsys)
    while KEPT:
        KEPT.pop().close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def test_nobody_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(f"127.0.0.1:{free_port()}", *BODY) == 2
    assert "Nobody listens" in error_line(capsys)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["http://example.com"], "--allow-remote"),
        (["http://no-such-host.invalid", "--allow-remote", *BODY], "no-such-host.invalid"),
        (["ftp://localhost"], "no URL"),
        (["localhost", "--clients", "0"], "--clients"),
        (["localhost", "--rate", "0"], "--rate"),
        (["localhost", "--rate", "5,fast"], "--rate"),
        (["localhost", "--clients", "2", "--rate", "5"], "closed loop"),
        (["localhost", "--duration", "10"], "--duration"),
        (["localhost", "--ramp", "--rate", "1,2"], "ramp"),
        (["localhost", "--traffic", "poison", "--rate", "5"], "poison"),
        (["localhost", "--body", "[1]", "--body-file", "x"], "--body and --body-file"),
        (["localhost", "--items-file", "no-such-file.jsonl"], "no-such-file.jsonl"),
        (["localhost", "--header", "nonsense"], "header"),
        (["localhost", "--out", "report.docx"], ".docx"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["load", *words]) == 2
    assert said in error_line(capsys)


def test_a_wrong_file_of_times_is_told_before_the_server_is_asked(
    server: Scripted, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "times.csv").write_text("when\n1\nsoon\n")
    assert command(server.url, "--traffic", str(tmp_path / "times.csv"), *BODY) == 2
    assert "'soon'" in error_line(capsys)
    assert server.requests == []


def process(words: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "microbatch", "load", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 (no threads there)
    )  # fmt: skip


def interrupted(words: list[str], seen: threading.Event) -> tuple[int, str, str]:
    """What a run prints that is interrupted as soon as its requests arrive."""
    with process(words) as child:
        try:
            assert seen.wait(60), "no request came"
            child.send_signal(signal.SIGINT)
            out, err = child.communicate(timeout=30)
        finally:
            child.kill()
    return child.returncode, out, err


def counting(seen: threading.Event, enough: int) -> Answer:
    def answer(number: int, request: bytes) -> tuple[float, bytes]:
        if number >= enough:
            seen.set()
        return 0.0, reply()

    return answer


@pytest.mark.parametrize("asked", [["--clients", "2"], ["--rate", "100"]])
def test_ctrl_c_prints_what_was_measured(asked: list[str]) -> None:
    seen = threading.Event()
    with scripted(counting(seen, 50)) as server:
        words = [server.url, *asked, "--duration", "10min", "--warmup", "0", "--json", *BODY]
        status, out, err = interrupted(words, seen)
    assert (status, err) == (130, "")
    document = json.loads(out)
    assert document["interrupted"] is True
    assert document["requests"] >= 10
    assert document["throughput"] > 0


def test_no_torch_and_no_matplotlib_are_loaded(server: Scripted) -> None:
    code = (
        f"import sys; from microbatch.cli.app import run; status = run(['load', {server.url!r}, *{[*SHORT, *BODY]!r}]);"
        "print(status, [m for m in ('torch', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "0 []"
