"""``microbatch simulate``: bubble, memory and picture of a pipeline schedule."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from microbatch.cli.app import ANSWER_IS_NO, DONE
from microbatch.cli.options import as_json_option, out_option
from microbatch.cli.output import check_outputs, print_json, write
from microbatch.errors import DoesNotFit, InvalidQuantity, InvalidSettings
from microbatch.units import parse_bytes

if TYPE_CHECKING:
    from microbatch.pipeline.costs import Costs
    from microbatch.pipeline.schedule import Schedule
    from microbatch.pipeline.timeline import Timeline


_RANKS, _MICRO_BATCHES = 4, 8
"""Sizes where none are asked for."""


def _numbers(text: str) -> float | list[float]:
    """``"1"`` → 1.0; ``"1,2,1"`` → a number per stage."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        raise click.BadParameter(f"{text!r} is neither a number nor numbers with commas between them.") from None
    return values if len(values) > 1 else values[0]


def _limit(text: str) -> float | int:
    """``"4"`` → micro-batches on one rank's layers, a float; ``"40GB"`` → bytes, an int."""
    try:
        return float(text)
    except ValueError:
        pass
    try:
        return parse_bytes(text)
    except InvalidQuantity as error:
        raise click.BadParameter(str(error)) from error


def _cost(name: str, default: str | None, help_: str) -> Callable[[Any], Any]:
    return click.option(f"--{name}", type=_numbers, default=default, metavar="T[,T...]", help=help_)


@click.command(short_help="Bubble, memory and picture of a pipeline.")
@click.argument("schedule")
@click.option("--stages", type=int, metavar="P", help="Ranks in the pipeline.  [default: 4]")
@click.option("--micro-batches", type=int, metavar="M", help="Micro-batches in one step.  [default: 8]")
@click.option("--chunks", type=int, metavar="V", help="Stages on each rank, where a schedule can have several.")
@_cost("forward", "1", "Time of a forward, one number or one per stage.")
@_cost("input-gradient", "1", "Time of an input gradient.")
@_cost("weight-gradient", "1", "Time of a weight gradient.")
@_cost("message", "0", "Travel time to the next stage's rank, one number or one per link.")
@click.option("--per-message", type=float, default=0.0, help="Time of their own that a message costs both ranks.")
@click.option("--no-overlap", is_flag=True, help="Ranks wait while their messages travel.")
@_cost("optimizer", "0", "Time of a stage's update.")
@click.option("--global-clip", is_flag=True, help="All ranks wait for each other before their updates.")
@_cost("reduction", "0", "Time of the data-parallel reduction of a stage's gradients.")
@_cost("activation-bytes", None, "Bytes that a stage keeps of one micro-batch.")
@_cost("weight-bytes", "0", "Bytes of a stage's weights, gradients and optimizer state.")
@click.option(
    "--costs",
    "table",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Costs from a run saved by microbatch pipeline (.json), or a CSV with a row per stage: columns forward, "
    "input_gradient, weight_gradient, message and so on.",
)
@click.option(
    "--memory-limit", type=_limit, metavar="N", help="Micro-batches on one rank's layers, or bytes as in 40GB."
)
@click.option("--pairs-apart", is_flag=True, help="Run pairs (DualPipe) as two actions with messages of their own.")
@click.option("--actions", is_flag=True, help="With --json: every action with its start and end.")
@out_option
@as_json_option
def command(
    *,
    schedule: str,
    stages: int | None,
    micro_batches: int | None,
    chunks: int | None,
    table: Path | None,
    memory_limit: float | int | None,
    actions: bool,
    outputs: tuple[Path, ...],
    as_json: bool,
    **costs: Any,
) -> int:
    """Simulate a pipeline schedule: how long a step takes, who waits, what is held, and what would be better.

    SCHEDULE is gpipe, one_f_one_b, eager_one_f_one_b, interleaved, looped_bfs, zb_h1, zb_h2, zb_v, v_half, v_min,
    interleaved_zero_bubble, dualpipe, dualpipe_v, chimera, hanayo or forward_only; auto for the best order for these
    times and this limit; or a CSV with your own order: a row per rank with actions as 0F0, 0I0, 0W0, 0B0 (stage,
    kind, micro-batch).

    \b
    Example:
      microbatch simulate one_f_one_b --stages 4 --micro-batches 8
      microbatch simulate interleaved --stages 4 --micro-batches 16 --chunks 2 --message 0.1 --out timeline.svg
      microbatch simulate zb_h1 --stages 4 --micro-batches 8 --forward 1,1,1,1.4 --memory-limit 4 --json
      microbatch simulate auto --stages 4 --micro-batches 8 --forward 1,1,1,1.4 --memory-limit 4
      microbatch simulate my_order.csv
    """
    check_outputs(outputs)
    given = _costs(table, **costs)
    in_bytes = isinstance(memory_limit, int)
    limits: dict[str, Any] = {"memory_limit_bytes" if in_bytes else "memory_limit": memory_limit}
    if schedule == "auto":
        return _recommend(given, stages, micro_batches, chunks, limits, outputs, as_json=as_json)
    from microbatch.pipeline.simulate import simulate

    timeline = simulate(_schedule(schedule, stages, micro_batches, chunks), given, **limits)
    write(timeline, outputs)
    _say(timeline, outputs, as_json=as_json, actions=actions)
    return ANSWER_IS_NO if timeline.fits is False else DONE


def _recommend(
    costs: Costs,
    stages: int | None,
    micro_batches: int | None,
    chunks: int | None,
    limits: dict[str, Any],
    outputs: tuple[Path, ...],
    *,
    as_json: bool,
) -> int:
    """The best order for these costs; 1 where nothing stays within the limit."""
    from microbatch.pipeline.recommend import recommend

    try:
        best = recommend(
            costs,
            ranks=_RANKS if stages is None else stages,
            num_micro_batches=_MICRO_BATCHES if micro_batches is None else micro_batches,
            chunks=None if chunks is None else (chunks,),
            **limits,
        )
    except DoesNotFit as error:
        if as_json:
            print_json(error.to_json())
        else:
            print(error)
        return ANSWER_IS_NO
    write(best.timeline, outputs)
    if as_json:
        print_json(best.to_json())
    else:
        print(best.reason)
        _say(best.timeline, outputs, as_json=False, actions=False)
    return DONE


def _schedule(name: str, stages: int | None, micro_batches: int | None, chunks: int | None) -> Schedule:
    from microbatch.pipeline.schedule import Schedule

    if not (name.lower().endswith(".csv") or Path(name).is_file()):
        ranks = _RANKS if stages is None else stages
        count = _MICRO_BATCHES if micro_batches is None else micro_batches
        return Schedule.of(name, ranks=ranks, num_micro_batches=count, chunks=chunks)
    order = Schedule.from_csv(name)
    for option, asked, held in (
        ("--stages", stages, order.ranks),
        ("--micro-batches", micro_batches, order.num_micro_batches),
        ("--chunks", chunks, order.chunks),
    ):
        if asked is not None and asked != held:
            raise InvalidSettings(f"{option} is {asked}, and {name} holds {held}.", f"Leave {option} out.")
    return order


def _costs(table: Path | None, **given: Any) -> Costs:
    from dataclasses import replace

    from microbatch.pipeline.costs import Costs
    from microbatch.pipeline.costs_file import read_costs

    costs = Costs(overlap=not given.pop("no_overlap"), **given)
    if table is None:
        return costs
    read = read_costs(table)
    return replace(
        read,
        per_message=costs.per_message or read.per_message,
        overlap=costs.overlap and read.overlap,
        global_clip=costs.global_clip or read.global_clip,
        pairs_apart=costs.pairs_apart or read.pairs_apart,
    )


def _say(timeline: Timeline, outputs: tuple[Path, ...], *, as_json: bool, actions: bool) -> None:
    if as_json:
        from microbatch.pipeline.recommend import alternatives

        print_json({**timeline.to_json(actions=actions), "alternatives": [a.to_json() for a in alternatives(timeline)]})
        return
    from microbatch.reporting.timeline_text import lines

    print("\n".join(lines(timeline)))
    for path in outputs:
        print(f"Wrote {path}")
