"""Load over TLS: a trusted certificate, one that is not, and a server without any."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

from microbatch.cli.app import run
from tests.web.scripted import reply, scripted

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate of these tests")

ASKED = ["--body", "[1]", "--clients", "2", "--requests", "20", "--warmup", "0"]


def at_once(number: int, request: bytes) -> tuple[float, bytes]:
    return 0.0, reply()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of this machine, with its key in the same file."""
    path = tmp_path_factory.mktemp("tls") / "pair.pem"
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost "
        f"-addext subjectAltName=IP:127.0.0.1,DNS:localhost -keyout {path}.key -out {path}"
    )
    subprocess.run(command.split(), check=True, capture_output=True, timeout=60)
    path.write_text(path.read_text() + Path(f"{path}.key").read_text())
    return path


@pytest.fixture
def secure(certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


def test_a_trusted_certificate(
    secure: ssl.SSLContext, certificate: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with scripted(at_once, tls=secure) as server:
        assert run(["load", server.url, *ASKED]) == 0
    assert len(server.requests) == 21  # one to try


def test_one_that_is_not_trusted_is_one_line(secure: ssl.SSLContext, capsys: pytest.CaptureFixture[str]) -> None:
    with scripted(at_once, tls=secure) as server:
        assert run(["load", server.url, *ASKED]) == 2
    error = capsys.readouterr().err
    assert "SSL_CERT_FILE" in error and error.count("\n") == 1


def test_a_server_without_tls_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with scripted(at_once) as server:
        assert run(["load", server.url.replace("http:", "https:"), *ASKED, "--timeout", "2s"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
