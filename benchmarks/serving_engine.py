"""The batching engine alone, in process: each policy beside no batching, on an MLP of depth 8 and width 1024.

    python benchmarks/serving_engine.py [--rounds 3] [--seconds 3] [--out benchmarks/results/serving_engine.json]

Loads: closed loops of 1, 8 and 32 clients, and Poisson arrivals at 250 a second, whose latency counts from the
scheduled arrival. Every round runs every server once under every load, in turn, so that a slow minute hits all alike;
the table shows medians over the rounds and ratios to no batching within the rounds. `same` is our default on the same
callable, `fast` with our linear layers. Idle is the share of a core that an engine uses with nothing to do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from microbatch.serving.decisions.traffic import poisson
from microbatch.serving.engine.batcher import DynamicBatcher

Ask = Callable[[Tensor], Awaitable[Any]]
LOADS: dict[str, tuple[str, float]] = {
    "1 client": ("closed", 1),
    "8 clients": ("closed", 8),
    "32 clients": ("closed", 32),
    "Poisson 250/s": ("open", 250.0),
}
BASELINE = "no batching"


def mlp(depth: int, width: int) -> nn.Module:
    torch.manual_seed(0)
    hidden = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(64, width), *hidden, nn.Linear(width, 10)).eval()


@contextmanager
def unbatched(model: nn.Module) -> Iterator[Ask]:
    """Each request runs by itself in one thread, as a plain web application would do."""

    def run(item: Tensor) -> Tensor:
        with torch.no_grad():
            result: Tensor = model(item.unsqueeze(0))[0]
        return result

    with ThreadPoolExecutor(1) as pool:

        async def ask(item: Tensor) -> Tensor:
            return await asyncio.get_running_loop().run_in_executor(pool, run, item)

        yield ask


@contextmanager
def batched(model: nn.Module, policy: str, *, fast: bool, delay: float | None = None) -> Iterator[Ask]:
    engine = DynamicBatcher(
        model, examples=[torch.randn(64)], policy=policy, max_batch_size=32, max_queue_delay=delay, fast=fast
    ).start()
    try:
        yield engine.submit
    finally:
        engine.close()


def servers(model: nn.Module) -> dict[str, Callable[[], AbstractContextManager[Ask]]]:
    return {
        BASELINE: lambda: unbatched(model),
        "same": lambda: batched(model, "marginal_gain", fast=False),
        "fast": lambda: batched(model, "marginal_gain", fast=True),
        "launch when free": lambda: batched(model, "launch_when_free", fast=False),
        "window 10 ms": lambda: batched(model, "fixed_window", fast=False, delay=0.01),
    }


async def closed(ask: Ask, clients: int, seconds: float) -> dict[str, float]:
    """Clients that ask again as soon as they are answered."""
    items, times = torch.randn(64, 64), list[float]()
    end = time.perf_counter() + seconds

    async def client(number: int) -> None:
        while (start := time.perf_counter()) < end:
            await ask(items[number % 64])
            times.append(time.perf_counter() - start)

    began = time.perf_counter()
    await asyncio.gather(*(client(number) for number in range(clients)))
    return summary(times, time.perf_counter() - began)


async def opened(ask: Ask, rate: float, seconds: float) -> dict[str, float]:
    """Requests at their times, whatever happened to those before."""
    items, times = torch.randn(64, 64), list[float]()
    arrivals = poisson(rate, max(1, round(rate * seconds)), seed=1).tolist()
    start = time.perf_counter()

    async def one(number: int, due: float) -> None:
        await ask(items[number % 64])
        times.append(time.perf_counter() - start - due)

    tasks = []
    for number, due in enumerate(arrivals):
        if (left := due - (time.perf_counter() - start)) > 0:
            await asyncio.sleep(left)
        tasks.append(asyncio.create_task(one(number, due)))
    await asyncio.gather(*tasks)
    return summary(times, time.perf_counter() - start)


def summary(times: list[float], seconds: float) -> dict[str, float]:
    p50, p99 = np.percentile(times, (50, 99)).tolist()
    return {"rate": len(times) / seconds, "p50": p50, "p99": p99}


def measure(make: Callable[[], AbstractContextManager[Ask]], load: str, seconds: float) -> dict[str, float]:
    kind, value = LOADS[load]
    with make() as ask:

        async def run() -> dict[str, float]:
            for _ in range(5):
                await ask(torch.randn(64))
            return await (closed(ask, int(value), seconds) if kind == "closed" else opened(ask, value, seconds))

        return asyncio.run(run())


def idle(model: nn.Module, seconds: float) -> float:
    """Share of a core of an engine that has served and now waits."""
    with batched(model, "marginal_gain", fast=False) as ask:
        asyncio.run(measure_once(ask))
        start, clock = time.process_time(), time.monotonic()
        time.sleep(seconds)
        return (time.process_time() - start) / (time.monotonic() - clock)


async def measure_once(ask: Ask) -> None:
    await ask(torch.randn(64))


def table(rounds: list[dict[str, dict[str, dict[str, float]]]]) -> dict[str, dict[str, dict[str, float]]]:
    """Medians by server and load, and the ratio to no batching."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for server in rounds[0]:
        found[server] = {}
        for load in LOADS:
            rows = [each[server][load] for each in rounds]
            row = {name: statistics.median(each[name] for each in rows) for name in rows[0]}
            ratios = [each[server][load]["rate"] / each[BASELINE][load]["rate"] for each in rounds]
            found[server][load] = row | {"ratio": statistics.median(ratios)}
    return found


def told(row: dict[str, float]) -> str:
    return f"{row['rate']:.0f}/s ({row['ratio']:.2f}) p50 {1e3 * row['p50']:.1f} p99 {1e3 * row['p99']:.1f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    model = mlp(given.depth, given.width)
    rounds = []
    for number in range(given.rounds):
        print(f"round {number + 1} of {given.rounds}", flush=True)
        rounds.append(
            {
                name: {load: measure(make, load, given.seconds) for load in LOADS}
                for name, make in servers(model).items()
            }
        )
    found = table(rounds)
    for server, loads in found.items():
        cells = [f"{load}: {told(row)}" for load, row in loads.items()]
        print(f"{server:18} " + "; ".join(cells))
    share = idle(model, max(1.0, given.seconds))
    print(f"idle: {100 * share:.2f} % of a core")
    if given.out:
        document = {
            "median": found, "rounds": rounds, "idle": share, "torch": torch.__version__,
            "machine": platform.platform(),
            "load": os.getloadavg(), "depth": given.depth, "width": given.width, "seconds": given.seconds,
        }  # fmt: skip
        given.out.write_text(json.dumps(document, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
