"""The loads, from the other core: wrk for closed loops, this library's own generator for open ones."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peer_servers.running import ROOT

BUSY = 0.9
"""Share of its core from which on a client measures itself."""
LUA = Path(__file__).resolve().parent / "bodies.lua"
CLIENT_CORE = 1

Row = dict[str, Any]


@dataclass(frozen=True)
class LoadKind:
    """One column of the tables.

    Attributes:
        name: of the column.
        clients: of a closed loop; 0 of an open one.
        share: of the best peer's capacity, for an open loop.
    """

    name: str
    clients: int = 0
    share: float = 0.0


CLOSED = (LoadKind("1 client", 1), LoadKind("8 clients", 8), LoadKind("32 clients", 32))
OPEN = (LoadKind("50 % of capacity", share=0.5), LoadKind("90 % of capacity", share=0.9))
LOADS = {kind.name: kind for kind in CLOSED + OPEN}


def measure(kind: LoadKind, url: str, bodies: Path, seconds: float, capacity: float) -> Row:
    """One row: answers per second, p50 and p99 in seconds, failures, how busy the client and the machine were."""
    before = _stolen()
    row = (
        wrk(url, bodies, kind.clients, seconds) if kind.clients else opened(url, bodies, kind.share * capacity, seconds)
    )
    after = _stolen()
    return row | {"stolen": _share(before, after), "load_average": os.getloadavg()[0], "at": round(time.time(), 1)}


def wrk(url: str, bodies: Path, clients: int, seconds: float) -> Row:
    """A closed loop."""
    command = [
        "taskset", "-c", str(CLIENT_CORE), "wrk", "-t1", f"-c{clients}", f"-d{max(1, round(seconds))}s", "--timeout",
        "30s", "--latency", "-s", str(LUA), url,
    ]  # fmt: skip
    document, cpu = _client(command, {"BODIES": str(bodies)}, lambda out: out.strip().splitlines()[-1])
    rate = (document["requests"] - document["status_errors"]) / document["seconds"]
    failed = document["status_errors"] + document["lost"]
    busy = cpu / document["seconds"]
    return {"rate": rate, "p50": document["p50"], "p99": document["p99"], "failed": failed, "client_cpu": busy,
            "void": "the client's core was busy" if busy > BUSY else ""}  # fmt: skip


def opened(url: str, bodies: Path, rate: float, seconds: float) -> Row:
    """Poisson arrivals, each timed from the moment it was due; a second before it is not counted."""
    command = [
        "taskset", "-c", str(CLIENT_CORE), sys.executable, "-m", "benchmarks.peer_servers.open_loop", url, str(bodies),
        str(rate), str(seconds),
    ]  # fmt: skip
    paths = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
    document, _ = _client(command, {"PYTHONPATH": paths}, lambda out: out)
    growth, requests = document["backlog_growth"] or 0, document["requests"]
    behind = growth > max(16, 0.05 * requests) or bool(document["errors"])
    return {"asked": rate, "rate": document["throughput"], "p50": document["latency"]["p50"],
            "p99": document["latency"]["p99"], "failed": sum(document["errors"].values()), "behind": behind,
            "client_cpu": document["client_cpu"], "void": document["void"] or ""}  # fmt: skip


def _client(command: list[str], variables: dict[str, str], read: Callable[[str], str]) -> tuple[Any, float]:
    """The client's document, and the processor seconds that it took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise RuntimeError(f"{command[3]} ended with {done.returncode}: {(done.stderr or done.stdout)[-800:]}")
    return json.loads(read(done.stdout)), after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _stolen() -> tuple[float, float]:
    """Ticks of all cores that another machine took, and all ticks."""
    fields = [float(part) for part in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return fields[7], sum(fields)


def _share(before: tuple[float, float], after: tuple[float, float]) -> float:
    total = after[1] - before[1]
    return (after[0] - before[0]) / total if total > 0 else 0.0
