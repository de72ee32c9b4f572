"""Simulated pipeline steps against real ones: costs of one short step predict every schedule's.

    PYTHONPATH=src:. python benchmarks/pipeline_reality.py [--part compute|waiting|all] [--rounds 5] [--rows 64]
        [--seconds 0.06] [--counts 4,8,16] [--out benchmarks/results/pipeline_reality.json]

A part that is run alone takes its place in what the file has of the other.

compute: two ranks, one thread each. The costs of stages and messages are read off a few steps with 4 micro-batches
under one schedule (interleaved, every second backward split, so that F, I, W and B are all seen). Later, in new
processes, every schedule that torch's runtime can run is stepped with 4, 8 and 16 micro-batches, all in turn in each
round; the median of the rounds is held against the simulation. A round in which more than 5 % of the processors' time
is stolen is run again.

waiting: four and eight ranks whose stages wait without using the processor, for planted times that differ from stage
to stage; only these are given to the simulation.

A step is timed from a barrier until the last rank has updated its weights.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import microbatch
from benchmarks.pipeline_blocks import RATE, Block, loss
from microbatch.errors import InvalidSchedule
from microbatch.measure.load import LoadWatch, read_cpu_times, shares
from microbatch.pipeline.costs import Costs
from microbatch.pipeline.costs_file import costs_json
from microbatch.pipeline.execution.launch import launch
from microbatch.pipeline.execution.measuring import timeline_of
from microbatch.pipeline.execution.pipeline import Pipeline
from microbatch.pipeline.measured import measured_costs
from microbatch.pipeline.mixed import mixed
from microbatch.pipeline.partition import even_bounds
from microbatch.pipeline.regroup import regroup
from microbatch.pipeline.schedule import Schedule
from microbatch.pipeline.schedules import SCHEDULES
from microbatch.pipeline.simulate import simulate
from microbatch.pipeline.timeline import Timeline
from microbatch.units import format_percent, format_seconds

MOST_STOLEN = 0.05
BARS = {"compute": 0.10, "waiting": 0.05}
MEASURED_AT, MEASURING_STEPS = 4, 5
CHUNKS = 2
"""Stages on each rank of the finest cut; schedules with one join them in pairs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One schedule at one number of micro-batches: seconds."""

    part: str
    ranks: int
    schedule: str
    count: int
    predicted: float
    samples: tuple[float, ...] = ()

    @property
    def measured(self) -> float:
        """The median."""
        return statistics.median(self.samples)

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted / self.measured - 1


def names(ranks: int, count: int) -> list[str]:
    """Every schedule with a backward that can be run with these sizes."""
    found = []
    for name in SCHEDULES:
        try:
            schedule = Schedule.of(name, ranks=ranks, num_micro_batches=count)
        except InvalidSchedule:
            continue
        if schedule.has_backward and not schedule.only_simulated and schedule.chunks in (1, CHUNKS):
            found.append(name)
    return found


# --- stages that compute


def computing(width: int = 512, blocks: int = 8) -> nn.Module:
    """Blocks in a row."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(blocks)))


# --- stages that wait


class _Waits(torch.autograd.Function):
    """Passes values on, and waits in its backward."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None


class Waiting(nn.Module):
    """Waits in forward, where the gradient of its input is made, and where that of its weight is made."""

    def __init__(self, forward: float, inputs: float, weights: float) -> None:
        super().__init__()
        self.seconds = forward, inputs, weights
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, values: Tensor) -> Tensor:
        """The values, scaled."""
        forward, inputs, weights = self.seconds
        time.sleep(forward)
        waits: Any = _Waits.apply
        result: Tensor = waits(values, inputs) * waits(self.weight, weights)
        return result


def planted(stages: int, seconds: float) -> Costs:
    """Unequal times; the first stage makes no gradient of its input."""
    share = [1 + 0.35 * ((3 * stage) % 4) / 3 for stage in range(stages)]
    inputs = [0.0, *(0.9 * seconds * part for part in share[1:])]
    return Costs(
        forward=[seconds * part for part in share], input_gradient=inputs,
        weight_gradient=[0.7 * seconds * part for part in share],
    )  # fmt: skip


def waiting(costs: Costs, stages: int) -> nn.Module:
    """A stage for each of the costs."""
    times = zip(*(costs.per_stage(name, stages).tolist() for name in ("forward", "input_gradient", "weight_gradient")))
    layers = [Waiting(*one) for one in times]
    layers[0].seconds = (*layers[0].seconds[:1], 0.0, layers[0].seconds[2])
    return nn.Sequential(*layers)


# --- what each rank does


def stepping(model: nn.Module, schedule: Schedule, batch: Tensor) -> Callable[[], tuple[float, Timeline]]:
    """One step at a time: its seconds on the slowest rank, and its timeline."""
    layers = sum(1 for _ in model.children())
    stages = [str(first) for first, _ in even_bounds(layers, schedule.stages)[1:]]  # the same cut for every schedule
    pipe = Pipeline(model, batch, stages=stages, schedule=schedule, num_micro_batches=schedule.num_micro_batches)
    step = microbatch.TrainStep(pipe, torch.optim.SGD(pipe.parameters(), lr=RATE), loss)

    def run() -> tuple[float, Timeline]:
        dist.barrier()
        began = time.perf_counter()
        step(batch)
        seconds = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        return float(seconds[0]), timeline_of(pipe)

    run()  # the first step meets, plans and allocates
    return run


def measure_costs(rows: int) -> Costs:
    """Of the finest cut, from one schedule at 4 micro-batches."""
    ranks = dist.get_world_size()
    schedule = mixed(Schedule.of("interleaved", ranks=ranks, num_micro_batches=MEASURED_AT, chunks=CHUNKS))
    run = stepping(computing(), schedule, torch.randn(rows * MEASURED_AT, 512))
    return measured_costs(*(run()[1] for _ in range(MEASURING_STEPS)))


def step_all(
    part: str, wanted: Sequence[tuple[str, int]], rounds: int, rows: int, seconds: float
) -> list[tuple[tuple[str, int], list[float], list[float]]]:
    """Seconds of each schedule in each round, and the share of the processors' time that was stolen."""
    ranks = dist.get_world_size()
    steps = {}
    for name, count in wanted:
        schedule = Schedule.of(name, ranks=ranks, num_micro_batches=count)
        torch.manual_seed(0)
        if part == "compute":
            model, batch = computing(), torch.randn(rows * count, 512)
        else:
            model, batch = waiting(planted(schedule.stages, seconds), schedule.stages), torch.randn(count, 8)
        steps[name, count] = stepping(model, schedule, batch)
    samples: dict[tuple[str, int], list[float]] = {key: [] for key in steps}
    stolen: dict[tuple[str, int], list[float]] = {key: [] for key in steps}
    for _ in range(rounds):
        for key, run in steps.items():
            while True:
                before = read_cpu_times()
                found = run()[0]
                steal = shares(before, read_cpu_times())[1] or 0.0
                told = torch.tensor([steal if part == "compute" else 0.0])
                dist.broadcast(told, 0)
                if float(told) <= MOST_STOLEN or len(stolen[key]) >= 4 * rounds:
                    break
                stolen[key].append(steal)
            samples[key].append(found)
    return [(key, samples[key], stolen[key]) for key in steps]


# --- together


def predicted(costs: Costs, given: int, name: str, ranks: int, count: int) -> float:
    """Seconds of a step."""
    schedule = Schedule.of(name, ranks=ranks, num_micro_batches=count)
    return simulate(schedule, regroup(costs, given, schedule.stages)).makespan_with_optimizer


def compute(rounds: int, rows: int, counts: Sequence[int]) -> tuple[list[Row], dict[str, Any]]:
    """Two ranks that compute."""
    costs = launch(measure_costs, 2, rows, threads=1)[0]
    found, repeated = [], 0
    for count in counts:  # processes of their own, so that memory stays small
        wanted = [(name, count) for name in names(2, count)]
        for (name, number), samples, stolen in launch(step_all, 2, "compute", wanted, rounds, rows, 0.0, threads=1)[0]:
            value = predicted(costs, 2 * CHUNKS, name, 2, number)
            repeated += len(stolen)
            found.append(Row(part="compute", ranks=2, schedule=name, count=number, predicted=value,
                             samples=tuple(samples)))  # fmt: skip
    return found, {"costs": costs_json(costs, 2 * CHUNKS), "repeated": repeated}


def wait(rounds: int, seconds: float, counts: Sequence[int]) -> list[Row]:
    """Four and eight ranks that wait."""
    found = []
    for ranks in (4, 8):
        wanted = [(name, count) for count in counts for name in names(ranks, count)]
        for (name, count), samples, _ in launch(step_all, ranks, "waiting", wanted, rounds, 0, seconds, threads=1)[0]:
            schedule = Schedule.of(name, ranks=ranks, num_micro_batches=count)
            value = simulate(schedule, planted(schedule.stages, seconds)).makespan
            found.append(Row(part="waiting", ranks=ranks, schedule=name, count=count, predicted=value,
                             samples=tuple(samples)))  # fmt: skip
    return found


def write(path: Path, rows: Sequence[Row], more: dict[str, Any], environment: dict[str, Any]) -> None:
    """The rows of the parts that were run, beside those that the file has of others."""
    before = json.loads(path.read_text()) if path.exists() else {"rows": [], "environment": {}}
    parts = {row.part for row in rows}
    kept = [row for row in before["rows"] if row["part"] not in parts]
    own = [asdict(row) | {"measured": row.measured, "error": row.error} for row in rows]
    where = before["environment"] | dict.fromkeys(sorted(parts), environment)
    document = before | {"rows": [*kept, *own], **more, "environment": where}
    path.write_text(json.dumps(document, indent=1) + "\n")


def main() -> int:
    """Run, print the table, write it; 1 where a row is off by more than its bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("compute", "waiting", "all"), default="all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=64, help="of a micro-batch")
    parser.add_argument("--seconds", type=float, default=0.06, help="that a stage waits in its forward, at least")
    parser.add_argument("--counts", default="4,8,16")
    parser.add_argument("--out", type=Path)
    wanted = parser.parse_args()
    counts = [int(count) for count in wanted.counts.split(",")]
    watch = LoadWatch("cpu")
    watch.start()
    rows: list[Row] = []
    more: dict[str, Any] = {}
    if wanted.part != "waiting":
        rows, more = compute(wanted.rounds, wanted.rows, counts)
    if wanted.part != "compute":
        rows += wait(wanted.rounds, wanted.seconds, [8])
    for row in rows:
        print(
            f"{row.part:8} p={row.ranks} m={row.count:<3} {row.schedule:24} "
            f"predicted {format_seconds(row.predicted):>9}  measured {format_seconds(row.measured):>9}  "
            f"{100 * row.error:+6.1f} %"
        )
    off = [row for row in rows if abs(row.error) > BARS[row.part]]
    for part, bar in BARS.items():
        errors = [abs(row.error) for row in rows if row.part == part]
        if errors:
            within = sum(error <= bar for error in errors)
            print(
                f"{part}: {within} of {len(errors)} within {format_percent(bar)}, "
                f"the worst {format_percent(max(errors))}"
            )
    if wanted.out:
        write(wanted.out, rows, more, asdict(watch.stop()))
    return 1 if off else 0


if __name__ == "__main__":
    raise SystemExit(main())
