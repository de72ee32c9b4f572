"""What it costs to look at a server: CPU time of a request with nobody looking, and with each way to look.

    python benchmarks/observing.py [--requests 3000] [--rounds 15] [--out benchmarks/results/observing.json]

Requests go through the ASGI application in one process, eight at a time, without sockets, to a function that does
nothing: all that is measured is what this library does for a request. CPU time of the whole process, so that what else
runs on the machine counts little; kinds in turn, ratios to "nobody" within a round.

- live: an event of the live page for each second of requests at 1,000 per second, that is one per 1,000 requests.
- metrics: as many pages of ``/metrics``; Prometheus asks every 15 seconds or so.
- traces unsampled, traces: spans of requests and batches, none and all of them recorded, without sending them.

Bars: live and metrics at most 3 %, and one look of either at most 3 ms. Traces have none: who asks for them pays.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON

from microbatch.serving.decisions.metrics import KEPT
from microbatch.serving.engine.batcher import DynamicBatcher
from microbatch.web.application import Application, application
from microbatch.web.live import Live
from microbatch.web.metrics import exposition
from microbatch.web.tracing import traced

CLIENTS = 8
LOOK_EVERY = 1000
"""Requests."""
SCOPE = {
    "type": "http", "method": "POST", "path": "/predict", "query_string": b"",
    "headers": [(b"content-type", b"application/json"), (b"content-length", b"1")],
}  # fmt: skip


def echo(items: list[int]) -> list[int]:
    return items


async def ask(app: Any) -> None:
    """One request."""
    body = iter([{"type": "http.request", "body": b"1", "more_body": False}])
    status = 0

    async def receive() -> Any:
        found = next(body, None)
        if found is None:  # a client that stays
            await asyncio.Event().wait()
        return found

    async def send(message: Any) -> None:
        nonlocal status
        status = message.get("status", status)

    await app(dict(SCOPE), receive, send)
    assert status == 200, status


async def seconds_for(app: Any, requests: int, look: Callable[[], object]) -> float:
    """CPU time of a request."""
    left = requests

    async def client() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            number = left
            await ask(app)
            if number % LOOK_EVERY == 0:
                look()

    await asyncio.gather(*(ask(app) for _ in range(100)))
    start = time.process_time()
    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return (time.process_time() - start) / requests


def kind(name: str, engine: DynamicBatcher) -> tuple[Any, Callable[[], object]]:
    """An application and what is done at each look."""
    engine.watch(None)
    app: Application = application({"echo": engine})
    if name == "live":
        moments = iter(range(10**9))
        live = Live(app.engines, clock=lambda: float(next(moments)))
        return app, live.event
    if name == "metrics":
        return app, lambda: exposition(app.engines, "", app.answers)
    if name.startswith("traces"):
        sampler = ALWAYS_OFF if name.endswith("unsampled") else ALWAYS_ON
        return traced(app, TracerProvider(sampler=sampler)), lambda: None
    return app, lambda: None


KINDS = ("nobody", "live", "metrics", "traces unsampled", "traces")


def measure(requests: int, rounds: int) -> dict[str, Any]:
    """All kinds in turn; the order is turned round each time."""
    seconds: dict[str, list[float]] = {name: [] for name in KINDS}
    with DynamicBatcher(echo, name="echo", examples=[1]) as engine:
        for number in range(rounds):
            for name in KINDS[:: 1 if number % 2 else -1]:
                app, look = kind(name, engine)
                seconds[name].append(asyncio.run(seconds_for(app, requests, look)))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    ratios = {
        name: statistics.median(a / b for a, b in zip(values, seconds["nobody"])) for name, values in seconds.items()
    }
    kept = {
        "live": ratios["live"] <= 1.03,
        "metrics": ratios["metrics"] <= 1.03,
    }
    looks = {name: seconds_of_a_look(name) for name in ("live", "metrics")}
    kept |= {name: kept[name] and each <= 3e-3 for name, each in looks.items()}
    return {
        "cpu_seconds_per_request": medians, "ratios": ratios, "cpu_seconds_per_look": looks, "kept": kept,
        "rounds": seconds,
    }  # fmt: skip


def seconds_of_a_look(name: str, looks: int = 200) -> float:
    """CPU time of one look at an engine that remembers as many launches as it can."""
    with DynamicBatcher(echo, name="echo", examples=[1]) as engine:
        for _ in range(KEPT):
            engine.call(1)
        _, look = kind(name, engine)
        start = time.process_time()
        for _ in range(looks):
            look()
        return (time.process_time() - start) / looks


def main() -> None:
    """Measure, print, and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    found = measure(arguments.requests, arguments.rounds)
    for name in KINDS:
        more = found["kept"].get(name)
        verdict = "" if more is None else "   within its bar" if more else "   ABOVE ITS BAR"
        print(f"{name:<18}{1e6 * found['cpu_seconds_per_request'][name]:8.1f} us {found['ratios'][name]:6.3f}{verdict}")
    for name, seconds in found["cpu_seconds_per_look"].items():
        print(f"one look, {name:<8}{1e3 * seconds:8.2f} ms")
    if arguments.out is not None:
        document = {"machine": platform.processor() or platform.machine(), "python": platform.python_version(), **found}
        arguments.out.write_text(json.dumps(document, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
