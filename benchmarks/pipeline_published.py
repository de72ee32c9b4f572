"""Zero Bubble's published throughputs (arXiv 2401.10241, Tables 4 and 6), predicted from one row of each model.

    python benchmarks/pipeline_published.py [--table published-configs.csv]

The seconds of a micro-batch on one rank come from one 1F1B row of each model and table (ZB-1p where there is no 1F1B
row); all other rows of that model are simulated. How they split into F, I and W is the products of a transformer layer:
F sbh(24h + 4s), I sbh(24h + 8s), W 24sbh². Messages of 2bsh bytes go over NVLink inside a node of 8 and over InfiniBand
between nodes, at calculon's figures, and a rank waits for them, as Megatron's runtime does.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from microbatch.pipeline.costs import Costs
from microbatch.pipeline.schedule import Schedule
from microbatch.pipeline.simulate import simulate

NODE = 8
NVLINK, INFINIBAND = 300e9 * 0.65, 25e9 * 0.90
"""Byte/s; calculon's constants for an A100."""
NAMES = {"1F1B": "one_f_one_b", "1F1B-I": "interleaved", "ZB-1p": "zb_h1", "ZB-2p": "zb_h2", "ZB-V": "zb_v"}
_BASES = ("1F1B", "ZB-1p")
"""What a model is calibrated on, the first that it has a row of; of several rows the one with most micro-batches."""
SYNCHRONISED = ("1F1B", "1F1B-I")
"""The zero-bubble runtime validates its clipping afterwards, so that ranks need not end together."""


@dataclass(frozen=True, slots=True)
class Published:
    """One measured row."""

    model: str
    schedule: str
    ranks: int
    count: int
    chunks: int
    micro_batch: int
    hidden: int
    sequence: int
    seconds: float

    @property
    def group(self) -> tuple[str, int, int]:
        """Rows that one calibration serves: the same model, ranks and micro-batch."""
        return self.model, self.ranks, self.micro_batch


@dataclass(frozen=True, slots=True)
class Outcome:
    """A predicted row; ``error`` is predicted over measured throughput less 1."""

    row: Published
    predicted: float
    error: float


def read_rows(path: Path) -> list[Published]:
    """The rows of the Zero Bubble paper."""
    with path.open(encoding="utf-8", newline="") as stream:
        rows = [row for row in csv.DictReader(stream) if row["source"].startswith("Qi et al. 2023")]
    return [
        Published(
            model=row["params_b"], schedule=row["schedule"], ranks=int(row["pp"]), count=int(row["n_microbatches"]),
            chunks=int(row["vpp"] or 0) or (2 if row["schedule"] == "ZB-V" else 1), micro_batch=int(row["micro_batch"]),
            hidden=int(row["hidden"]), sequence=int(row["seq_len"]),
            seconds=int(row["global_batch"]) / (float(row["samples_per_s_per_gpu"]) * int(row["gpus"])),
        )
        for row in rows
    ]  # fmt: skip


def step_seconds(row: Published, work: float) -> float:
    """The step of a row whose rank works ``work`` seconds for one micro-batch."""
    h, s = row.hidden, row.sequence
    shares = (24 * h + 4 * s, 24 * h + 8 * s, 24 * h)
    F, I, W = (work * share / sum(shares) / row.chunks for share in shares)  # noqa: E741
    schedule = schedule_of(NAMES[row.schedule], row.ranks, row.count, row.chunks)
    travel = [
        2 * row.micro_batch * s * h / (NVLINK if one // NODE == two // NODE else INFINIBAND)
        for one, two in zip(schedule.placement, schedule.placement[1:])
    ]
    timeline = simulate(
        schedule, Costs(forward=F, input_gradient=I, weight_gradient=W, message=travel or 0.0, overlap=False)
    )
    return timeline.makespan if row.schedule in SYNCHRONISED else timeline.step_without_sync


def calibrated(row: Published) -> float:
    """The work of a micro-batch with which the row's step comes out as measured.

    A step is its work times a number, and messages, which are few per cent: each correction leaves few per cent of the
    error.
    """
    work = row.seconds / row.count
    for _ in range(12):
        work *= row.seconds / step_seconds(row, work)
    return work


@lru_cache(maxsize=64)
def schedule_of(name: str, ranks: int, count: int, chunks: int) -> Schedule:
    """A schedule, made once."""
    return Schedule.of(name, ranks=ranks, num_micro_batches=count, chunks=chunks)


def outcomes(rows: list[Published]) -> list[Outcome]:
    """Every row but those that were calibrated on."""
    groups: dict[tuple[str, int, int], list[Published]] = defaultdict(list)
    for row in rows:
        groups[row.group].append(row)
    found = []
    for members in groups.values():
        base = min(
            members, key=lambda row: (_BASES.index(row.schedule), -row.count) if row.schedule in _BASES else (9, 0)
        )
        work = calibrated(base)
        for row in members:
            if row is not base:
                predicted = step_seconds(row, work)
                found.append(Outcome(row, predicted, row.seconds / predicted - 1))
    return found


def mean_errors(found: list[Outcome]) -> dict[str, float]:
    """Mean of the absolute errors by schedule, and of all but 1F1B as ``others``."""
    by_name: dict[str, list[float]] = defaultdict(list)
    for outcome in found:
        by_name[outcome.row.schedule].append(abs(outcome.error))
        if outcome.row.schedule != "1F1B":
            by_name["others"].append(abs(outcome.error))
    return {name: sum(errors) / len(errors) for name, errors in by_name.items()}


def main() -> None:
    """Print every row and the means."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--table", type=Path)
    table = parser.parse_args().table or Path(os.environ.get("MICROBATCH_DATA", ".")) / "published-configs.csv"
    if not table.is_file():
        sys.exit(f"There is no table {table}: give --table, or set MICROBATCH_DATA to its folder.")
    found = outcomes(read_rows(table))
    print(
        f"{'model':>6} {'schedule':>9} {'p':>3} {'m':>4} {'v':>2} {'measured s':>11} {'predicted s':>12} {'error':>7}"
    )
    for outcome in found:
        row = outcome.row
        print(f"{row.model:>6} {row.schedule:>9} {row.ranks:>3} {row.count:>4} {row.chunks:>2} {row.seconds:>11.3f} "
              f"{outcome.predicted:>12.3f} {100 * outcome.error:>6.1f}%")  # fmt: skip
    for name, error in mean_errors(found).items():
        print(f"mean error {name}: {100 * error:.2f} %")


if __name__ == "__main__":
    main()
