"""A generator in a process of its own on one core."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peer_generators.protocol import Request
from benchmarks.peer_generators.table import Peer, Setting
from benchmarks.peer_servers.environments import environment
from benchmarks.peer_servers.running import MARK, ONE_THREAD, QUIET, ROOT, cpu_seconds, processes

PATIENCE = 900.0
"""Seconds for a start, conversion of the model included, and for an answer."""
CORE = 0
REQUIREMENTS = Path(__file__).resolve().parent / "requirements"


class Failed(Exception):
    """It ended or was silent; with the end of what it said."""


class Child:
    """A running generator."""

    def __init__(self, peer: Peer, setting: Setting, folder: Path, dtype: str) -> None:
        """
        Raises:
            Failed: it did not start.
            subprocess.CalledProcessError: its environment could not be made.
        """
        self._mark = uuid.uuid4().hex
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed with this object
        command = [str(interpreter(peer)), "-m", f"benchmarks.peer_generators.{peer.module}"]
        paths = f"{ROOT / 'src'}{os.pathsep}{ROOT}" if peer.environment is None else str(ROOT)
        self._process = subprocess.Popen(
            ["taskset", "-c", str(CORE), *command, str(folder), dtype, json.dumps(setting.values)],
            cwd=ROOT, env=os.environ | ONE_THREAD | QUIET | {"PYTHONPATH": paths, MARK: self._mark},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, start_new_session=True, bufsize=0,
        )  # fmt: skip
        self._read()

    def generate(self, requests: Sequence[Request]) -> dict[str, Any]:
        """Outputs, and the wall and CPU-seconds that they took, those of all its processes together."""
        line = json.dumps({"requests": requests}).encode() + b"\n"
        before, start = self._cpu(), time.perf_counter()
        outputs = self._ask(line)["outputs"]
        wall, cpu = time.perf_counter() - start, self._cpu() - before
        for output, (_, tokens) in zip(outputs, requests, strict=True):
            if len(output) != tokens:
                raise Failed(f"{len(output)} tokens where {tokens} were asked for")
        return {"wall": wall, "cpu": cpu, "tokens": sum(map(len, outputs)), "outputs": outputs}

    def margins(self, asked: Sequence[tuple[list[int], int, int]]) -> list[float]:
        """See `transformers_generate`."""
        found: list[float] = self._ask(json.dumps({"margins": asked}).encode() + b"\n")["margins"]
        return found

    def close(self) -> None:
        """End it, and whatever it started."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pid in processes(self._mark):
            os.kill(pid, 9)

    def _cpu(self) -> float:
        return sum(map(cpu_seconds, processes(self._mark)))

    def _ask(self, line: bytes) -> Any:
        assert self._process.stdin is not None
        try:
            while line:  # a pipe takes a part at a time
                line = line[self._process.stdin.write(line) :]
        except BrokenPipeError:
            pass  # `_read` says why
        return self._read()

    def _read(self) -> Any:
        """The next line, or why none came."""
        assert self._process.stdout is not None
        found, end = b"", time.monotonic() + PATIENCE
        while not found.endswith(b"\n"):
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, end - time.monotonic()))
            part = self._process.stdout.read(1 << 20) if ready else b""
            if not part:
                self.close()
                self._said.seek(0)
                raise Failed(self._said.read()[-1500:].decode(errors="replace") or "it said nothing")
            found += part
        return json.loads(found)


def interpreter(peer: Peer) -> Path:
    """That a peer runs in; its environment is made where it is missing."""
    if peer.environment is None:
        return Path(sys.executable)
    return environment(peer.environment, REQUIREMENTS, complete=True)
