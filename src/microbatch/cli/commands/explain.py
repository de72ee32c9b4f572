"""``microbatch explain``: what a saved profile or a plain CSV of times means."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from microbatch.cli.options import GEMM, as_json_option, global_batch_option, objective_options, out_option
from microbatch.cli.output import answer, check_outputs, no_piece_fits, print_json, write

if TYPE_CHECKING:
    from microbatch.curves.explanation import Explanation

STACK_NAMES = "triton|vllm|transformers|lightning|deepspeed"


@click.command(short_help="What a saved profile or a CSV means.")
@click.argument("curve")
@click.option("--device", metavar="NAME", help="The device it was measured on: a catalogue name or a TOML file.")
@click.option(
    "--gemm", type=GEMM, metavar="KxN", help="Shape of the weight, to tell tiles and waves apart, as in 4096x22016."
)
@global_batch_option
@objective_options
@click.option("--emit", metavar=STACK_NAMES, help="Print that stack's settings for the recommended size instead.")
@out_option
@as_json_option
def command(
    *,
    curve: str,
    device: str | None,
    gemm: tuple[int, int] | None,
    global_batch: int | None,
    objective: str,
    latency_target: float | None,
    emit: str | None,
    outputs: tuple[Path, ...],
    as_json: bool,
) -> int:
    """Name the sizes to use and to avoid from measured times, each with its cause where there is evidence.

    CURVE is a profile that microbatch saved (.json), or a CSV with the columns batch_size,seconds, one row per
    timed call; a size may come more than once. Exit status 1: no piece of the global batch fits.

    \b
    Example:
      microbatch explain mlp.json
      microbatch explain training.json --global-batch 128
      microbatch explain mlp.json --emit triton > config.pbtxt
      microbatch explain times.csv --device a100 --gemm 4096x22016 --latency-target 5ms
    """
    check_outputs(outputs)
    from microbatch.hardware.catalogue import load_device
    from microbatch.profiling.explain import explain

    spec = None if device is None else load_device(device)
    explanation = explain(
        curve, objective=objective, latency_target=latency_target, device=spec, gemm=gemm,
        global_batch_size=global_batch,
    )  # fmt: skip
    if emit is None:
        answer(explanation, outputs, as_json=as_json)
    else:
        _emit(explanation, emit, outputs, as_json=as_json)
    return 1 if no_piece_fits(explanation) else 0


def _emit(explanation: Explanation, stack: str, outputs: tuple[Path, ...], *, as_json: bool) -> None:
    from microbatch.profiling.settings import emit, sizes_of

    settings = emit(explanation, stack)
    write(explanation, outputs)
    if as_json:
        print_json({"stack": stack, "settings": settings, "batch_size": sizes_of(explanation)[0]})
    else:
        print(settings, end="")
