"""Automatic stages against equal layer counts, on a model with a heavy head: does the gain that the costs promise come?

    PYTHONPATH=src:. python benchmarks/pipeline_partition.py [--ranks 2] [--micro-batches 16] [--rounds 7]
        [--rows 64] [--out benchmarks/results/pipeline_partition.json]

Each layer is timed in one process, forward and backward with one thread, while the other ranks do the same. The stages
cut by these costs and stages of equal layer counts then step in turn under 1F1B; the ratio of their medians is held
against the ratio of the two simulated steps. It comes near `Partition.gain`, the ratio of the slowest ranks, as the
number of micro-batches grows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import microbatch
from benchmarks.pipeline_blocks import RATE, Block, loss
from microbatch.measure.load import LoadWatch
from microbatch.pipeline.costs import Costs
from microbatch.pipeline.execution.launch import launch
from microbatch.pipeline.execution.pipeline import Pipeline
from microbatch.pipeline.partition import LayerCost, even_bounds
from microbatch.pipeline.schedule import Schedule
from microbatch.pipeline.simulate import simulate
from microbatch.units import format_percent

BAR, WIDTH, LAYERS, HEAD = 0.10, 512, 8, 16384
TIMES = 9


def heavy_head() -> nn.Module:
    """Layers, and a head of some times their work."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(WIDTH) for _ in range(LAYERS)), nn.Linear(WIDTH, HEAD))


def layer_seconds(rows: int) -> list[tuple[float, float]]:
    """Forward and backward of each layer, medians; the first needs no gradient of its input, the last has the loss."""
    found, layers = [], list(heavy_head().children())
    for number, layer in enumerate(layers):
        values = torch.randn(rows, WIDTH, requires_grad=number > 0)
        forwards, backwards = [], []
        for _ in range(TIMES):
            dist.barrier()
            began = time.perf_counter()
            output = loss(layer(values), None)[0] if layer is layers[-1] else layer(values)
            middle = time.perf_counter()
            output.backward(torch.ones_like(output))
            forwards.append(middle - began)
            backwards.append(time.perf_counter() - middle)
        found.append((statistics.median(forwards[1:]), statistics.median(backwards[1:])))
    return found


def compare(rows: int, count: int, rounds: int) -> dict[str, Any]:
    """Both cuts, in turn; every rank returns the same."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, layer_seconds(rows))
    times = every[0]
    ranks, batch = dist.get_world_size(), torch.randn(rows * count, WIDTH, generator=torch.Generator().manual_seed(1))
    layers = [LayerCost(name=str(number), seconds=sum(one)) for number, one in enumerate(times)]
    even = [str(first) for first, _ in even_bounds(len(layers), ranks)[1:]]
    pipes = {
        cut: Pipeline(heavy_head(), batch, schedule="one_f_one_b", num_micro_batches=count, costs=layers, stages=stages)
        for cut, stages in (("automatic", ranks), ("equal", even))
    }
    steps = {cut: microbatch.TrainStep(pipe, torch.optim.SGD(pipe.parameters(), lr=RATE), loss)
             for cut, pipe in pipes.items()}  # fmt: skip
    samples: dict[str, list[float]] = {cut: [] for cut in steps}
    for number in range(rounds + 1):
        for cut, step in steps.items():
            dist.barrier()
            began = time.perf_counter()
            step(batch)
            longest = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
            dist.all_reduce(longest, op=dist.ReduceOp.MAX)
            if number:
                samples[cut].append(float(longest[0]))
    return {
        "stages": {cut: [list(names) for names in pipe.stage_names] for cut, pipe in pipes.items()},
        "layer_seconds": times, "samples": samples, "gain": pipes["automatic"].partition.gain,
        "promised": promised(times, {cut: pipe.stage_names for cut, pipe in pipes.items()}, ranks, count),
    }  # fmt: skip


def promised(
    times: Sequence[tuple[float, float]], cuts: dict[str, Sequence[Sequence[str]]], ranks: int, count: int
) -> float:
    """The simulated step with equal layer counts over the one with automatic stages."""
    schedule, seconds = Schedule.of("one_f_one_b", ranks=ranks, num_micro_batches=count), {}
    for cut, stages in cuts.items():
        forward, backward = (
            [sum(times[int(name.split(".")[0])][kind] for name in names) for names in stages] for kind in (0, 1)
        )
        seconds[cut] = simulate(schedule, Costs(forward=forward, full_backward=backward)).makespan
    return seconds["equal"] / seconds["automatic"]


def main() -> int:
    """Run, print, write; 1 where the measured factor is further than the bar from the promised one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--out", type=Path)
    wanted = parser.parse_args()
    watch = LoadWatch("cpu")
    watch.start()
    found = launch(compare, wanted.ranks, wanted.rows, wanted.micro_batches, wanted.rounds, threads=1)[0]
    medians = {cut: statistics.median(times) for cut, times in found["samples"].items()}
    factor = medians["equal"] / medians["automatic"]
    for cut, names in found["stages"].items():
        print(f"{cut:10} {medians[cut] * 1e3:8.1f} ms  layers per stage {[len(one) for one in names]}")
    off = factor / found["promised"] - 1
    print(f"measured {factor:.2f} times as fast, promised {found['promised']:.2f} ({format_percent(abs(off))} off); "
          f"the slowest ranks alone {found['gain']:.2f}")  # fmt: skip
    if wanted.out:
        document = found | {"factor": factor, "error": off, "environment": asdict(watch.stop())}
        wanted.out.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if abs(off) > BAR else 0


if __name__ == "__main__":
    raise SystemExit(main())
