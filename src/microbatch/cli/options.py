"""What the values of options may be, and the options that several commands share."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from microbatch.errors import InvalidQuantity
from microbatch.units import parse_bytes, parse_seconds

Function = TypeVar("Function", bound=Callable[..., Any])
Value = TypeVar("Value")

OBJECTIVES = ("throughput", "balanced")


def reader(parse: Callable[[str], Value]) -> Callable[[str], Value]:
    """A parser of `units` as the type of an option: what it refuses becomes click's error, with the option's name."""

    def read(text: str) -> Value:
        try:
            return parse(text)
        except InvalidQuantity as error:
            raise click.BadParameter(str(error)) from error

    return read


def parse_gemm(text: str) -> tuple[int, int]:
    """``"4096x22016"`` → (4096, 22016): rows K and columns N of the weight.

    Raises:
        InvalidQuantity: not two positive whole numbers with an x between them.
    """
    match = re.fullmatch(r"([1-9]\d*)[x×]([1-9]\d*)", text.strip().lower())
    if match is None:
        raise InvalidQuantity(f"{text!r} is not a weight's shape KxN.", "Write it as in 4096x22016.")
    return int(match[1]), int(match[2])


def parse_lengths(text: str) -> tuple[int, ...]:
    """``"128,512,2048"`` → (128, 512, 2048).

    Raises:
        InvalidQuantity: not positive whole numbers with commas between them.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[1-9]\d{0,8}", part) for part in parts):
        raise InvalidQuantity(f"{text!r} is not a list of lengths.", "Write it as in 128,512,2048.")
    return tuple(int(part) for part in parts)


def length_of(mode: str, sequence: int | None, context: int | None) -> int | None:
    """The length that was asked for, by the name that belongs to the mode.

    Raises:
        UsageError: a context without decoding, or both names.
    """
    if context is not None and mode != "decode":
        raise click.UsageError(f"--context {context} needs --mode decode; with --mode {mode} give --sequence.")
    if context is not None and sequence is not None:
        raise click.UsageError("--context and --sequence say the same in --mode decode; give one of them.")
    return context if context is not None else sequence


DURATION = reader(parse_seconds)
BYTES = reader(parse_bytes)
GEMM = reader(parse_gemm)

as_json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document and nothing else; errors too."
)
out_option = click.option(
    "--out",
    "outputs",
    type=click.Path(path_type=Path),
    metavar="FILE",
    multiple=True,
    help="Write the report there; the suffix chooses the form (.html .png .svg .pdf .json .csv .txt). May be repeated.",
)


global_batch_option = click.option(
    "--global-batch",
    type=click.IntRange(min=1),
    metavar="N",
    help="With --mode training: items of one optimizer step; compares the micro-batch sizes that it can be cut into.",
)


def check_global_batch(global_batch: int | None, mode: str) -> None:
    """Refuse, before anything runs, a global batch where no step is trained.

    Raises:
        UsageError: another mode than training.
    """
    if global_batch is not None and mode != "training":
        raise click.UsageError(
            f"--global-batch {global_batch} is cut into micro-batches of one optimizer step; it needs --mode training, "
            f"not {mode}."
        )


def objective_options(function: Function) -> Function:
    """``--objective`` and ``--latency-target``: what "best" means."""
    target = click.option(
        "--latency-target",
        type=DURATION,
        metavar="DURATION",
        help="Highest throughput whose time per call stays under this, as in 50ms.",
    )
    objective = click.option(
        "--objective",
        type=click.Choice(OBJECTIVES),
        default=OBJECTIVES[0],
        show_default=True,
        help="throughput: the smallest size within 2 % of the best. balanced: the largest throughput per latency.",
    )
    return objective(target(function))
