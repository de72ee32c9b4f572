"""What a request can rely on, tried in numbers: killed workers, deadlines, Retry-After, and the simulation beside it.

    python benchmarks/serving_faults.py [kills] [deadlines] [retry] [simulation] [--requests 10000] [--out FILE.json]

Without a name all four are run (some six minutes). Each prints its figure and whether it keeps its bar:

- kills: 10 000 requests from 50 clients while two worker processes are killed at random, 200 times: each request gets
  exactly one answer, right or `WorkerDied`.
- deadlines: a worker process busy for 3 s, 100 requests with a deadline of 0.5 s: answered at 0.5 s, p95 within 20 ms.
- retry: a full queue; `retry_after` against the time until the queue was really empty: within max(1 s, 20 %).
- simulation: the MLP profiled by the engine itself, then p50, p99 and the maximum rate simulated and measured: within
  10 %, 25 % and 10 %. Wants a quiet machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from microbatch.errors import DeadlineExceeded, Overloaded, WorkerDied
from microbatch.serving.decisions.dry_run import dry_run
from microbatch.serving.decisions.latency import Latency
from microbatch.serving.decisions.limits import Wishes
from microbatch.serving.decisions.traffic import poisson
from microbatch.serving.engine.batcher import DynamicBatcher
from microbatch.serving.engine.workers import InProcess

Found = dict[str, Any]


def double(items: list[Any]) -> list[Any]:
    time.sleep(1e-3)
    return [2 * item for item in items]


def sleep(items: list[float]) -> list[float]:
    time.sleep(max(items))
    return items


def processes_of(engine: DynamicBatcher) -> list[InProcess]:
    service = engine._service
    assert service is not None
    return [worker for worker in service.prepared.workers if isinstance(worker, InProcess)]


async def kills(requests: int) -> Found:
    engine = DynamicBatcher(double, processes=True, workers=2, max_batch_size=8, max_queue=requests).start()
    draw, answers = random.Random(0), dict[int, list[Any]]()
    points = sorted(draw.sample(range(requests), requests // 50))

    async def client(numbers: range) -> None:
        for number in numbers:
            try:
                answer = await engine.submit(number)
            except WorkerDied as error:
                answer = error
            answers.setdefault(number, []).append(answer)

    async def kill() -> None:
        for point in points:
            while len(answers) < point:
                await asyncio.sleep(1e-3)
            if (pid := draw.choice(processes_of(engine)).pid) is not None:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    killer = asyncio.create_task(kill())
    await asyncio.gather(*(client(range(start, requests, 50)) for start in range(50)))
    killer.cancel()
    metrics = engine.metrics()
    await engine.drain()
    died = sum(isinstance(found[0], WorkerDied) for found in answers.values())
    right = sum(found == [2 * number] for number, found in answers.items())
    good = right + died == requests == len(answers) and all(len(found) == 1 for found in answers.values())
    return {"requests": requests, "right": right, "died": died, "restarts": metrics.worker_restarts, "kept": good}


async def deadlines(_: int) -> Found:
    engine = DynamicBatcher(sleep, processes=True, max_batch_size=1).start()
    late: list[float] = []

    async def one() -> None:
        start = time.monotonic()
        try:
            await engine.submit(0.0, deadline=0.5)
        except DeadlineExceeded:
            late.append(time.monotonic() - start - 0.5)

    for _turn in range(2):
        busy = asyncio.create_task(engine.submit(3.0))
        await asyncio.sleep(0.2)
        tasks = []
        for _number in range(50):
            tasks.append(asyncio.create_task(one()))
            await asyncio.sleep(0.02)
        await asyncio.gather(busy, *tasks)
    await engine.drain()
    p95 = float(np.percentile(late, 95))
    return {"tries": len(late), "late_p95": p95, "late_max": max(late), "kept": len(late) == 100 and p95 <= 0.02}


async def retry(_: int) -> Found:
    def slow(items: list[float]) -> list[float]:
        time.sleep(0.05 + 0.005 * len(items))
        return items

    engine = DynamicBatcher(slow, max_batch_size=8, max_queue=400).start()
    await asyncio.to_thread(engine.map, np.ones(200).tolist())  # so that its latency has been seen
    told: list[tuple[float, float]] = []

    async def one() -> float:
        try:
            await engine.submit(1.0)
        except Overloaded as error:
            told.append((error.retry_after, time.monotonic()))
        return time.monotonic()

    ends = await asyncio.gather(*(one() for _ in range(450)))
    await engine.drain()
    after, refused = told[0]
    took = max(ends) - refused
    return {"refused": len(told), "told": after, "took": took, "kept": abs(after - took) <= max(1.0, 0.2 * took)}


async def simulation(requests: int) -> Found:
    import torch

    sys.path.append(str(Path(__file__).parents[1]))  # run as a file, only its own folder is known
    from benchmarks.serving_engine import mlp, opened

    torch.set_num_threads(1)
    engine = DynamicBatcher(mlp(8, 1024), examples=[torch.randn(64)], max_batch_size=32, max_queue=100_000).start()
    await asyncio.to_thread(engine.map, list(torch.randn(requests // 2, 64)))
    start = time.perf_counter()
    await asyncio.to_thread(engine.map, list(torch.randn(requests, 64)))
    rate = requests / (time.perf_counter() - start)
    rows: list[Found] = []
    for share in (0.3, 0.5, 0.8):
        found = await opened(engine.submit, share * rate, requests / rate)
        expected = simulated(engine, share * rate)
        rows.append({"share": share, "measured": found, "expected": expected})
    most = dry_run(Latency(dict(engine.metrics().curve)), Wishes(max_batch_size=32)).max_rate
    await engine.drain()
    kept = abs(most / rate - 1) <= 0.1 and all(
        abs(row["expected"]["p50"] / row["measured"]["p50"] - 1) <= 0.1
        and abs(row["expected"]["p99"] / row["measured"]["p99"] - 1) <= 0.25
        for row in rows
    )
    return {"max_rate": rate, "simulated_max_rate": most, "rows": rows, "kept": kept}


def simulated(engine: DynamicBatcher, rate: float) -> Found:
    """On the table as it stands, with the times of batches varying as those of the last launches did."""
    from microbatch.serving.decisions.simulate import simulate

    metrics, service = engine.metrics(), engine._service
    assert service is not None
    latency = Latency(dict(metrics.curve))
    ratios = [launch.seconds / latency.seconds(launch.cost) for launch in metrics.launches if launch.calls == 1]
    found = simulate(poisson(rate, 50_000, 1), latency, service.prepared.limits, ratios=ratios)
    return {"p50": found.p50, "p99": found.p99, "mean_batch": found.mean_batch}


CASES: dict[str, Callable[[int], Awaitable[Found]]] = {
    "kills": kills,
    "deadlines": deadlines,
    "retry": retry,
    "simulation": simulation,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[[], *CASES])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found = dict[str, Found]()
    for name in given.cases or CASES:
        found[name] = asyncio.run(CASES[name](given.requests))  # type: ignore[arg-type]  # all are coroutines
        print(f"{name}: {json.dumps(found[name])}", flush=True)
    if given.out:
        document = {"found": found, "machine": platform.platform(), "load": os.getloadavg()}
        given.out.write_text(json.dumps(document, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
