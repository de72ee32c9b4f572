"""``microbatch pipeline``: a pipeline on this machine, measured beside its simulation."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from microbatch.cli.app import ANSWER_IS_NO, DONE
from microbatch.cli.options import as_json_option
from microbatch.cli.output import check_outputs, print_json, write
from microbatch.errors import InvalidSettings

if TYPE_CHECKING:
    from microbatch.pipeline.run_report import PipelineRun
    from microbatch.training.pipeline_run import Wanted

FORMS = (".json", ".csv", ".svg", ".html", ".txt")


@click.command(short_help="Run a pipeline on this machine.")
@click.argument("model")
@click.option(
    "--stages",
    type=click.IntRange(min=1),
    metavar="P",
    help="Ranks in the pipeline, each a process.  [default: 2, or as many as torchrun started]",
)
@click.option(
    "--schedule",
    default="auto",
    show_default=True,
    metavar="NAME",
    help="As microbatch simulate names them; auto; or a CSV with your own order.",
)
@click.option("--micro-batches", type=click.IntRange(min=1), metavar="M", help="In one step; chosen when left out.")
@click.option("--chunks", type=click.IntRange(min=1), metavar="V", help="Stages on each rank.")
@click.option("--batch-size", type=click.IntRange(min=1), metavar="N", help="Items of a step; 2 for each micro-batch.")
@click.option("--sequence", type=click.IntRange(min=1), metavar="N", help="Tokens of each item; the model's own.")
@click.option("--mode", type=click.Choice(("training", "inference")), default="training", show_default=True,
              help="Optimizer steps, or forwards alone.")  # fmt: skip
@click.option("--dtype", help="fp64, fp32, fp16 or bf16; the model's own when left out.")
@click.option("--steps", type=click.IntRange(min=1), default=5, show_default=True, help="Steps that are measured.")
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads of each rank; the cores shared out evenly.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="For weights and inputs.")
@click.option("--check", is_flag=True, help="Compare with one process; exit with 1 where the results differ.")
@click.option(
    "--out",
    "outputs",
    type=click.Path(path_type=Path),
    metavar="FILE",
    multiple=True,
    help="Write the run (.json), the costs of its stages (.csv), or the timeline (.svg .html .txt .trace.json). "
    "May be repeated.",
)
@as_json_option
def command(
    *,
    model: str,
    stages: int | None,
    schedule: str,
    micro_batches: int | None,
    chunks: int | None,
    batch_size: int | None,
    sequence: int | None,
    mode: str,
    dtype: str | None,
    steps: int,
    threads: int | None,
    seed: int,
    check: bool,
    outputs: tuple[Path, ...],
    as_json: bool,
) -> int:
    """Run MODEL as a pipeline of P processes on this machine: how long a step takes and how much of it ranks wait,
    measured beside simulated; memory of each rank; whether results equal one process; and what to change.

    MODEL is what microbatch profile takes. Under torchrun the ranks are torchrun's, and only the first one prints.
    What --out writes as .json or .csv is what microbatch simulate --costs reads.

    \b
    Example:
      microbatch pipeline mlp:depth=8,width=256 --stages 2 --check
      microbatch pipeline decoder --stages 2 --schedule interleaved --micro-batches 8 --out timeline.svg --out run.json
      microbatch pipeline my_model.py:build --stages 4 --mode inference --json
      torchrun --nproc-per-node 2 -m microbatch pipeline my_model.py:build
    """
    check_outputs(outputs)
    for path in outputs:
        if path.suffix.lower() not in FORMS:
            raise InvalidSettings(f"A run has no form {path.suffix}.", f"Use one of {', '.join(FORMS)}.")
    _check_order(schedule, stages, micro_batches, chunks)
    from microbatch.training.pipeline_run import Wanted

    wanted = Wanted(
        model=model, mode=mode, schedule=schedule, chunks=chunks, num_micro_batches=micro_batches,
        batch_size=batch_size, sequence=sequence, dtype=dtype, steps=steps, seed=seed, check=check,
    )  # fmt: skip
    run = _run(wanted, stages, threads)
    if int(os.environ.get("RANK", "0")) == 0:
        write(run, outputs)
        _say(run, outputs, as_json=as_json)
    return ANSWER_IS_NO if run.exact is not None and not run.exact.exact else DONE


def _check_order(schedule: str, stages: int | None, micro_batches: int | None, chunks: int | None) -> None:
    """What is wrong about a schedule, before a process is started.

    Raises:
        InvalidSchedule: no such schedule, sizes that it cannot have, or one that is only simulated.
    """
    from microbatch.errors import InvalidSchedule
    from microbatch.pipeline.schedule import Schedule

    if schedule == "auto":
        return
    ranks = stages or int(os.environ.get("WORLD_SIZE", "2"))
    if schedule.lower().endswith(".csv"):
        order = Schedule.from_csv(schedule)
    else:
        order = Schedule.of(schedule, ranks=ranks, num_micro_batches=micro_batches or 4 * ranks, chunks=chunks)
    if order.only_simulated:
        raise InvalidSchedule(f"{order.name} is only simulated. {order.only_simulated}", "Take another to run.")
    for option, asked, held in (
        ("--stages", stages, order.ranks), ("--micro-batches", micro_batches, order.num_micro_batches),
        ("--chunks", chunks, order.chunks),
    ):  # fmt: skip
        if asked is not None and asked != held:
            raise InvalidSettings(f"{option} is {asked}, and {schedule} has {held}.", f"Leave {option} out.")


def _run(wanted: Wanted, stages: int | None, threads: int | None) -> PipelineRun:
    """In processes of our own, or in those that torchrun started, of which this is one."""
    import torch

    from microbatch.pipeline.execution.launch import joined, launch, under_torchrun
    from microbatch.training.pipeline_run import run_pipeline

    if not under_torchrun():
        first: PipelineRun = launch(run_pipeline, stages or 2, wanted, threads=threads)[0]
        return first
    world = int(os.environ["WORLD_SIZE"])
    if stages is not None and stages != world:
        raise InvalidSettings(
            f"--stages is {stages}, and torchrun started {world} processes.",
            f"Leave --stages out, or start {stages} processes.",
        )
    if threads is not None:
        torch.set_num_threads(threads)
    with joined():
        return run_pipeline(wanted)


def _say(run: PipelineRun, outputs: tuple[Path, ...], *, as_json: bool) -> None:
    if as_json:
        print_json(run.to_json())
        return
    from microbatch.reporting.text import to_text

    print(to_text(run))
    for path in outputs:
        print(f"Wrote {path}")
