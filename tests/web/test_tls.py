"""TLS: a server that speaks it, and pairs of files that are refused before anything starts."""

from __future__ import annotations

import json
import shutil
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from microbatch.errors import InvalidSettings
from microbatch.web.tls import check_pair
from tests.web.running import process

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates of this test")


@dataclass(frozen=True)
class Pair:
    """A certificate for this machine, signed by itself, and its key."""

    certificate: Path
    key: Path


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Pair, Pair]:
    folder = tmp_path_factory.mktemp("tls")
    return _pair(folder, "one"), _pair(folder, "other")


def _pair(folder: Path, name: str) -> Pair:
    found = Pair(folder / f"{name}.pem", folder / f"{name}.key")
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost "
        "-addext subjectAltName=IP:127.0.0.1,DNS:localhost"
    )
    _run(*command.split(), "-keyout", str(found.key), "-out", str(found.certificate))
    return found


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=60)


def test_a_pair_that_fits_and_none_at_all_are_fine(pairs: tuple[Pair, Pair]) -> None:
    check_pair(pairs[0].certificate, pairs[0].key)
    check_pair(str(pairs[0].certificate), str(pairs[0].key))
    check_pair(None, None)


def test_what_makes_no_pair_is_refused(pairs: tuple[Pair, Pair], tmp_path: Path) -> None:
    one, other = pairs
    text, locked = tmp_path / "text.pem", tmp_path / "locked.key"
    text.write_text("not a certificate")
    _run("openssl", "ec", "-in", str(one.key), "-aes256", "-passout", "pass:secret", "-out", str(locked))
    for certificate, key, said in (
        (one.certificate, None, "Give both"),
        (None, one.key, "Give both"),
        (one.certificate, tmp_path / "none.key", "no file"),
        (one.certificate, other.key, "make no TLS"),
        (text, one.key, "make no TLS"),
        (one.certificate, locked, "without a password"),
    ):
        with pytest.raises(InvalidSettings, match=said):
            check_pair(certificate, key)


def test_a_locked_key_does_not_wait_at_the_terminal(pairs: tuple[Pair, Pair], tmp_path: Path) -> None:
    locked = tmp_path / "locked.key"
    _run("openssl", "ec", "-in", str(pairs[0].key), "-aes256", "-passout", "pass:secret", "-out", str(locked))
    code = f"from microbatch.web.tls import check_pair; check_pair({str(pairs[0].certificate)!r}, {str(locked)!r})"
    done = subprocess.run(
        [sys.executable, "-c", code], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False
    )
    assert "InvalidSettings" in done.stderr


SERVER = """
from microbatch.serving.engine.batcher import DynamicBatcher
from microbatch.web.application import application
from microbatch.web.server import serve
from tests.serving.functions import double

app = application({{"model": DynamicBatcher(double)}})
serve(app, port=0, certificate={certificate!r}, private_key={key!r}, started=print)
"""


@pytest.fixture(scope="module")
def secure(pairs: tuple[Pair, Pair]) -> Iterator[str]:
    """The URL of a server in a process of its own."""
    with process(SERVER.format(certificate=str(pairs[0].certificate), key=str(pairs[0].key))) as found:
        yield found.url


def test_requests_over_tls(secure: str, pairs: tuple[Pair, Pair]) -> None:
    assert secure.startswith("https://127.0.0.1:")
    trusted = ssl.create_default_context(cafile=str(pairs[0].certificate))
    request = urllib.request.Request(f"{secure}/predict", json.dumps(4).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30, context=trusted) as response:
        assert json.loads(response.read()) == {"result": 8}


def test_who_trusts_another_certificate_is_not_connected(secure: str, pairs: tuple[Pair, Pair]) -> None:
    other = ssl.create_default_context(cafile=str(pairs[1].certificate))
    with pytest.raises(OSError, match="certificate verify failed"):
        urllib.request.urlopen(f"{secure}/health", timeout=30, context=other)
