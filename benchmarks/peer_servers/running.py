"""A server in processes of its own on one core: started, watched and ended, with nothing left behind."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MARK = "PEER_RUN"
"""An environment variable by which all processes of a server are found, whatever group they have put themselves in."""
PATIENCE = 120.0
"""Seconds that a server may take until it answers."""
ENDING = 15.0
"""Seconds that it may take to end by itself."""
TOLD = 5.0
"""Seconds that its processes may take to end when each of them is told."""
ROOT = Path(__file__).resolve().parents[2]
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"), "1")
QUIET = {
    "TOKENIZERS_PARALLELISM": "false",
    "BENTOML_DO_NOT_TRACK": "True",
    "DO_NOT_TRACK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_OFFLINE": "1",
    "PYTHONWARNINGS": "ignore",
}
"""No figures about this run go anywhere, and nothing is asked of a network."""


@dataclass(frozen=True)
class Server:
    """A server that runs.

    Attributes:
        port: on loopback.
        mark: of its processes.
        leader: process id of the first of them.
    """

    port: int
    mark: str
    leader: int

    def cpu_seconds(self) -> float:
        """Of all its processes so far."""
        return sum(cpu_seconds(pid) for pid in processes(self.mark))

    def idle_share(self, seconds: float) -> float:
        """Share of a core that it uses while nobody asks."""
        before, start = self.cpu_seconds(), time.monotonic()
        time.sleep(seconds)
        return (self.cpu_seconds() - before) / (time.monotonic() - start)


class DidNotStart(Exception):
    """With the end of what it said."""


def free_port() -> int:
    """One that nobody listens at now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def serving(
    command: list[str], port: int, path: str, body: Any, *, core: int | None = 0, variables: Mapping[str, str] = {}
) -> Iterator[Server]:
    """A server that answers `body` at `path`; at the end all its processes are gone and its port is free.

    Args:
        command: to start it with.
        port: that it will listen at.
        path, body: what is asked until it answers with status 200.
        core: all its processes run there; None leaves that to the system.
        variables: further ones of the environment.

    Raises:
        DidNotStart: it ended, or did not answer in time.
    """
    mark = uuid.uuid4().hex
    pinned = command if core is None else ["taskset", "-c", str(core), *command]
    known = os.environ | ONE_THREAD | QUIET | {"PYTHONPATH": _paths(command)} | dict(variables) | {MARK: mark}
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            pinned, cwd=ROOT, env=known, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            _wait_until_ready(process, port, path, body, output)
            yield Server(port, mark, process.pid)
        finally:
            _end(process, mark, port)


def ask(port: int, path: str, body: Any, timeout: float = 60.0) -> tuple[int, Any]:
    """Status and document of one request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        content = response.read()
        with suppress(ValueError):
            return response.status, json.loads(content)
        return response.status, content.decode(errors="replace")
    finally:
        connection.close()


def processes(mark: str) -> list[int]:
    """Ids of all living processes that carry the mark."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def _paths(command: list[str]) -> str:
    """Peers see this folder, for the callable; only our own server sees the library."""
    return f"{ROOT / 'src'}{os.pathsep}{ROOT}" if "microbatch" in command else str(ROOT)


def cpu_seconds(pid: int) -> float:
    """Of a process so far; 0 where it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, path: str, body: Any, output: Any) -> None:
    end, said = time.monotonic() + PATIENCE, "no answer"
    while process.poll() is None and time.monotonic() < end:
        try:
            status, document = ask(port, path, body)
        except (OSError, http.client.HTTPException) as error:
            said = repr(error)
        else:
            if status == 200:
                return
            said = f"{status} {document!r}"[:500]
        time.sleep(0.1)
    output.seek(0)
    raise DidNotStart(f"{said}; its output ends: {output.read()[-1500:].decode(errors='replace')}")


def _end(process: subprocess.Popen[bytes], mark: str, port: int) -> None:
    """First the leader is asked, then its group told, then whatever still carries the mark."""
    with suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(ENDING)
    if not _gone(mark, 1.0):
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)
            if _gone(mark, TOLD):
                break
            for pid in processes(mark):
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
    with suppress(subprocess.TimeoutExpired):
        process.wait(TOLD)
    if not _gone(mark, TOLD):
        raise RuntimeError(f"processes {processes(mark)} of the server at port {port} do not end")


def _gone(mark: str, patience: float) -> bool:
    end = time.monotonic() + patience
    while processes(mark):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True
