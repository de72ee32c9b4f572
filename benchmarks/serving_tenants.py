"""What tenants cost, and what they are worth: the queue alone, a flood beside a quiet tenant, and models on one CPU.

    python benchmarks/serving_tenants.py [--seconds 10] [--rounds 5] [--out benchmarks/results/serving_tenants.json]

- queue: seconds for an item in and out of the queue, with nobody's requests, one tenant, two and a hundred, beside
  a plain sorted list as the queue was before there were tenants; medians over the rounds, in turn. Bar: nobody's
  requests cost at most 5 % more than the list.
- flood: a server that can do so many requests a second, one tenant that sends five times that and another a twentieth;
  p50 and p99 of the second, with tenants, and with all as one. Bar: p99 at most three full batches.
- models: two MLPs on all cores, each asked by clients in a loop, with turns and without. Bar: with turns at least the
  throughput of without, and p99 no worse.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import time
from bisect import insort
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from microbatch.errors import Overloaded
from microbatch.serving.decisions.queue import Entry, Reply, RequestQueue
from microbatch.serving.decisions.traffic import poisson
from microbatch.serving.decisions.view import Waiting
from microbatch.serving.engine.batcher import DynamicBatcher
from microbatch.serving.engine.gate import share_cpu

BATCH, FLOOD_BATCH = 32, 8
ITEMS = 20_000
BATCH_SECONDS = 0.05
Found = dict[str, Any]


class PlainQueue:
    """A sorted list and nothing else, as long as there was one kind of request."""

    def __init__(self) -> None:
        self._sorted: list[tuple[tuple[float, int], Entry]] = []
        self._special = 0

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, entry: Entry) -> None:
        insort(self._sorted, (entry.order, entry), key=lambda pair: pair[0])
        self._special += _is_special(entry)

    def first(self, count: int) -> list[Waiting]:
        return [entry.facts for _, entry in self._sorted[:count]]

    def take(self, places: range) -> list[Entry]:
        taken = [self._sorted[place][1] for place in places]
        del self._sorted[: len(places)]
        self._special -= sum(map(_is_special, taken))
        return taken


def _is_special(entry: Entry) -> bool:
    facts = entry.facts
    return facts.cost != 1 or facts.length != 1 or facts.key is not None


def seconds_in_queue(queue: Any, names: list[str]) -> float:
    """For each item of some that come in groups of a batch and leave in batches."""
    entries = [Entry(None, Waiting(1.0, tenant=names[n % len(names)]), n, Reply(1)) for n in range(ITEMS)]
    start = time.perf_counter()
    for place in range(0, ITEMS, BATCH):
        for entry in entries[place : place + BATCH]:
            queue.add(entry)
        if len(queue) >= 4 * BATCH:
            queue.first(4 * BATCH)
            queue.take(range(BATCH))
    return (time.perf_counter() - start) / ITEMS


def queue(rounds: int) -> Found:
    kinds: dict[str, tuple[Callable[[], Any], list[str]]] = {
        "plain list": (PlainQueue, [""]),
        "nobody's": (lambda: RequestQueue(10**6), [""]),
        "one tenant": (lambda: RequestQueue(10**6), ["a"]),
        "two tenants": (lambda: RequestQueue(10**6), ["a", "b"]),
        "100 tenants": (lambda: RequestQueue(10**6), [str(number) for number in range(100)]),
    }
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(rounds):
        for name, (make, tenants) in kinds.items():
            seconds[name].append(seconds_in_queue(make(), tenants))
    ratio = statistics.median(a / b for a, b in zip(seconds["nobody's"], seconds["plain list"]))
    return {
        "seconds_per_item": {name: statistics.median(values) for name, values in seconds.items()},
        "ratio": ratio,
        "kept": ratio <= 1.05,
    }


def sleepy(items: list[int]) -> list[int]:
    time.sleep(BATCH_SECONDS)
    return items


async def _send(engine: DynamicBatcher, times: np.ndarray[Any, Any], tenant: str, latencies: list[float]) -> None:
    start = time.perf_counter()

    async def one(at: float) -> None:
        with suppress(Overloaded):
            await engine.submit(0, tenant=tenant)
            latencies.append(time.perf_counter() - start - at)

    async with asyncio.TaskGroup() as group:
        for at in times.tolist():
            await asyncio.sleep(max(0.0, start + at - time.perf_counter()))
            group.create_task(one(at))


async def flooded(seconds: float, *, named: bool) -> Found:
    rate = FLOOD_BATCH / BATCH_SECONDS
    latencies: dict[str, list[float]] = {"flood": [], "quiet": []}
    with DynamicBatcher(sleepy, max_batch_size=FLOOD_BATCH) as engine:
        async with asyncio.TaskGroup() as group:
            for number, (name, share) in enumerate((("flood", 5.0), ("quiet", 0.05))):
                times = poisson(share * rate, round(share * rate * seconds), number)
                group.create_task(_send(engine, times, name if named else "", latencies[name]))
    p50, p99 = np.percentile(latencies["quiet"] or [np.nan], (50, 99)).tolist()
    asked = round(0.05 * rate * seconds)
    return {"p50": p50, "p99": p99, "answered": len(latencies["quiet"]), "asked": asked}


def flood(seconds: float) -> Found:
    with_tenants = asyncio.run(flooded(seconds, named=True))
    as_one = asyncio.run(flooded(seconds, named=False))
    kept = with_tenants["p99"] <= 3 * BATCH_SECONDS and with_tenants["answered"] == with_tenants["asked"]
    return {"with_tenants": with_tenants, "as_one": as_one, "kept": kept}


def mlp(width: int) -> nn.Module:
    torch.manual_seed(0)
    hidden = [layer for _ in range(8) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(64, width), *hidden, nn.Linear(width, 10)).eval()


async def _clients(engine: DynamicBatcher, end: float, latencies: list[float]) -> None:
    async def client() -> None:
        item = torch.randn(64)
        while (start := time.perf_counter()) < end:
            await engine.submit(item)
            latencies.append(time.perf_counter() - start)

    await asyncio.gather(*(client() for _ in range(8)))


async def side_by_side(seconds: float, *, turns: bool) -> Found:
    engines = [DynamicBatcher(mlp(width), examples=[torch.randn(64)]).start() for width in (512, 1024)]
    if turns:
        share_cpu(engines)
    latencies: list[list[float]] = [[] for _ in engines]
    end = time.perf_counter() + seconds
    await asyncio.gather(*(_clients(engine, end, into) for engine, into in zip(engines, latencies)))
    for engine in engines:
        engine.close()
    return {
        "throughput": [len(each) / seconds for each in latencies],
        "p99": [float(np.percentile(each, 99)) for each in latencies],
    }


def models(seconds: float, rounds: int) -> Found:
    found: dict[str, list[Found]] = {"turns": [], "as they come": []}
    for _ in range(rounds):
        for name in found:
            found[name].append(asyncio.run(side_by_side(seconds, turns=name == "turns")))
    pairs = list(zip(found["turns"], found["as they come"]))
    ratio = statistics.median(sum(a["throughput"]) / sum(b["throughput"]) for a, b in pairs)
    p99 = statistics.median(max(a["p99"]) / max(b["p99"]) for a, b in pairs)
    return {"rounds": found, "throughput_ratio": ratio, "p99_ratio": p99, "kept": ratio >= 1.0 and p99 <= 1.0}


def measured(seconds: float, rounds: int) -> Iterator[tuple[str, Found]]:
    yield "queue", queue(rounds)
    yield "flood", flood(seconds)
    yield "models", models(seconds / 2, rounds)


def main() -> None:
    """Run all three and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found: Found = {"machine": platform.processor() or platform.machine(), "torch_threads": torch.get_num_threads()}
    for name, result in measured(options.seconds, options.rounds):
        found[name] = result
        shown = {key: value for key, value in result.items() if key != "rounds"}
        print(f"{name}: {json.dumps(shown)}")
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
