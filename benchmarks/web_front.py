"""Which front: servers and routers side by side, 64 floats in and 10 out through an asyncio future.

    python benchmarks/web_front.py [--rounds 3] [--seconds 5] [--out benchmarks/results/web_front.json]

The server has one core and wrk (apt: wrk) another. Every round runs every front at each number of connections, in turn,
so that a slow minute hits all alike; the table shows medians over the rounds, the ratio within the rounds to bare ASGI
on uvicorn, and how busy wrk's core was: at 90 % or more a row is void, for then wrk was measured. `bare` is the least
that an ASGI application can be; `microbatch` is the whole application, with its checks, limits and watching for clients
that vanish, over an engine that answers at once; `microbatch serve` has the short way around ASGI beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import resource
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

CONNECTIONS = (1, 8, 32)
BASELINE = "uvicorn bare"
BUSIEST = 0.9
"""Share of wrk's core from which on wrk, not the server, may be the limit."""
BODY = json.dumps([0.5] * 64)
OUTPUT = [0.25] * 10
SCRIPT = f"""
wrk.method = "POST"
wrk.body = "{BODY}"
wrk.headers["Content-Type"] = "application/json"
"""
_decode, _encode = msgspec.json.Decoder(list[float]).decode, msgspec.json.Encoder().encode


async def answer(items: list[float]) -> list[float]:
    """The result through a future that the loop resolves in its next turn, as a batch's results come."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[list[float]] = loop.create_future()
    loop.call_soon(future.set_result, OUTPUT)
    assert len(items) == 64
    return await future


async def bare(scope: Any, receive: Any, send: Any) -> None:
    """An ASGI application with one route, no checks and no limits."""
    if scope["type"] != "http":
        return
    message = await receive()
    body = message["body"]
    while message.get("more_body"):
        message = await receive()
        body += message["body"]
    out = _encode({"result": await answer(_decode(body))})
    length = str(len(out)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", length)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": out})


def starlette() -> Any:
    """Starlette's router, request and response around the same work."""
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    async def predict(request: Request) -> Response:
        out = _encode({"result": await answer(_decode(await request.body()))})
        return Response(out, media_type="application/json")

    return Starlette(routes=[Route("/predict", predict, methods=["POST"])])


class Instant:
    """An engine that answers at once."""

    name, ready = "instant", True

    def start(self) -> None:
        """Nothing to warm."""

    async def submit(self, item: list[float], *, deadline: float | None = None, priority: int = 0) -> list[float]:  # noqa: ARG002
        """Ten numbers."""
        return await answer(item)

    async def submit_many(self, items: Sequence[Any], *, deadline: float | None = None, priority: int = 0) -> list[Any]:
        """Ten numbers each."""
        return [await self.submit(item, deadline=deadline, priority=priority) for item in items]

    def post(self, item: list[float], tell: Callable[[Any], None]) -> Callable[[], None]:
        """Ten numbers, told in the next turn of the loop: the short way of `microbatch serve`."""
        assert len(item) == 64
        asyncio.get_running_loop().call_soon(tell, OUTPUT)
        return self.start  # nothing to withdraw

    def metrics(self) -> None:
        """None are kept."""

    async def drain(self, timeout: float | None = None) -> None:
        """Nothing waits."""


def microbatch() -> Any:
    """The whole application."""
    from microbatch.web.application import application

    return application({"instant": Instant()})


def on_uvicorn(app: Callable[[], Any]) -> Callable[[int], None]:
    def run(port: int) -> None:
        import uvicorn

        uvicorn.run(
            app(), port=port, http="httptools", loop="uvloop", ws="none", lifespan="off", log_level="error",
            access_log=False, proxy_headers=False, server_header=False,
        )  # fmt: skip

    return run


def on_granian(app: str) -> Callable[[int], None]:
    def run(port: int) -> None:
        from granian import Granian
        from granian.constants import Interfaces, Loops

        Granian(
            f"benchmarks.web_front:{app}", port=port, interface=Interfaces.ASGINL, loop=Loops.uvloop, log_enabled=False,
            websockets=False, factory=app != "bare",
        ).serve()  # fmt: skip

    return run


def as_served(port: int) -> None:
    """The application as `microbatch serve` runs it, with bounded connections."""
    from microbatch.web.server import serve

    serve(microbatch(), port=port)


FRONTS: dict[str, Callable[[int], None]] = {
    BASELINE: on_uvicorn(lambda: bare),
    "uvicorn starlette": on_uvicorn(starlette),
    "uvicorn microbatch": on_uvicorn(microbatch),
    "microbatch serve": as_served,
    "granian bare": on_granian("bare"),
    "granian starlette": on_granian("starlette"),
}


def started(front: str, core: int) -> tuple[subprocess.Popen[bytes], int]:
    """A front in a process of its own on one core, once it accepts connections."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    root = Path(__file__).resolve().parent.parent
    process = subprocess.Popen(
        [sys.executable, __file__, "--serve", front, "--port", str(port)],
        env=os.environ | {"PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"},
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),  # noqa: PLW1509 - there is one thread
        start_new_session=True,
    )
    for _ in range(600):
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return process, port
        except OSError:
            time.sleep(0.05)
    raise RuntimeError(f"{front} did not start")


def measure(port: int, connections: int, seconds: float, core: int, script: Path) -> dict[str, float]:
    """One run of wrk: requests a second, latencies in seconds, the share of its core that it used."""
    before, clock = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        [
            "wrk", "--latency", "-t1", f"-c{connections}", f"-d{seconds:.0f}s", "-s", str(script),
            f"http://127.0.0.1:{port}/predict",
        ],
        capture_output=True, text=True, check=True, preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )  # fmt: skip
    took, after = time.perf_counter() - clock, resource.getrusage(resource.RUSAGE_CHILDREN)
    if "Non-2xx" in done.stdout or "Socket errors" in done.stdout:
        raise RuntimeError(done.stdout)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    found = {name: _seconds(done.stdout, place) for name, place in (("p50", "50%"), ("p99", "99%"))}
    rate = re.search(r"Requests/sec:\s+([\d.]+)", done.stdout)
    assert rate is not None
    return {"rate": float(rate[1]), "client_cpu": used / took, **found}


def _seconds(text: str, place: str) -> float:
    match = re.search(rf"^\s+{place}\s+([\d.]+)(us|ms|s)$", text, re.MULTILINE)
    assert match is not None
    return float(match[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[match[2]]


def one_round(fronts: Sequence[str], seconds: float, cores: tuple[int, int], script: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for front in fronts:
        process, port = started(front, cores[0])
        try:
            measure(port, 8, 1, cores[1], script)  # warm
            found[front] = {str(count): measure(port, count, seconds, cores[1], script) for count in CONNECTIONS}
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return found


def table(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians by front and connections, and the ratio to the baseline within each round."""
    found: dict[str, Any] = {}
    for front in rounds[0]:
        found[front] = {}
        for count in map(str, CONNECTIONS):
            rows = [each[front][count] for each in rounds]
            row = {name: statistics.median(each[name] for each in rows) for name in rows[0]}
            row["ratio"] = statistics.median(
                each[front][count]["rate"] / each[BASELINE][count]["rate"] for each in rounds
            )
            row["void"] = max(each["client_cpu"] for each in rows) >= BUSIEST
            found[front][count] = row
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--fronts", nargs="+", choices=sorted(FRONTS), default=list(FRONTS))
    parser.add_argument("--serve", choices=sorted(FRONTS), help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        FRONTS[given.serve](given.port)
        return
    if shutil.which("wrk") is None:
        sys.exit("wrk is not installed; apt-get install wrk")
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        sys.exit("the server and wrk need a core each; this process may use one")
    fronts = list(dict.fromkeys([BASELINE, *given.fronts]))
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "post.lua"
        script.write_text(SCRIPT, encoding="utf-8")
        for number in range(given.rounds):
            print(f"round {number + 1} of {given.rounds}", flush=True)
            rounds.append(one_round(fronts, given.seconds, (cores[0], cores[1]), script))
    found = table(rounds)
    for front, rows in found.items():
        cells = [
            f"{count:>2}: {row['rate']:7.0f}/s ({row['ratio']:.2f}) p99 {1e3 * row['p99']:.2f} ms,"
            f" wrk {row['client_cpu']:.0%}"
            f"{' VOID' if row['void'] else ''}"
            for count, row in rows.items()
        ]
        print(f"{front:20} " + "; ".join(cells))
    if given.out:
        packages = ("uvicorn", "uvloop", "httptools", "starlette", "granian", "msgspec")
        document = {
            "median": found, "rounds": rounds, "seconds": given.seconds, "machine": platform.platform(),
            "python": platform.python_version(), "versions": {name: version(name) for name in packages},
            "load": os.getloadavg(),
        }  # fmt: skip
        given.out.write_text(json.dumps(document, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
