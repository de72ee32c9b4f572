"""``microbatch predict``: the curve of a model on a device that need not be here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from microbatch.cli.options import (
    BYTES,
    as_json_option,
    check_global_batch,
    global_batch_option,
    objective_options,
    out_option,
    parse_lengths,
    reader,
)
from microbatch.cli.output import answer, check_outputs, no_piece_fits
from microbatch.cli.progress import measuring
from microbatch.cli.quick import without_collecting

if TYPE_CHECKING:
    from microbatch.curves.explanation import Explanation
    from microbatch.curves.profile import Profile

MODES = ("inference", "training", "prefill", "decode")
LENGTHS = reader(parse_lengths)


@click.command(short_help="Compute the curve for a device that is not here.")
@click.argument("model")
@click.option("--device", required=True, metavar="NAME_OR_FILE", help="As in t4, my.toml, or 8xh200 for a node of 8.")
@click.option("--mode", type=click.Choice(MODES), default="inference", show_default=True, help="What one call does.")
@click.option("--dtype", help="Of the arithmetic: fp32 tf32 fp16 bf16 fp8 int8; the model's own when left out.")
@click.option("--weights-dtype", help="In which the weights are stored, as in int8 or int4; as --dtype when left out.")
@click.option("--sequence", type=LENGTHS, metavar="N[,N...]", help="Tokens of each item; several make a surface.")
@click.option("--context", type=LENGTHS, metavar="N[,N...]", help="Tokens already in the cache, with --mode decode.")
@click.option("--surface", type=LENGTHS, metavar="N,N...", help="Lengths for a table of sequence × batch.")
@click.option("--launches", type=click.Choice(("eager", "graph")), default="eager", show_default=True,
              help="A GPU's kernels: one by one by the host, or together as in CUDA graphs.")  # fmt: skip
@click.option("--max-batch", type=click.IntRange(min=1), help="Compute no larger batch than this.")
@click.option("--memory-limit", type=BYTES, metavar="BYTES", help="Of each device, as in 8GB; all it has by default.")
@click.option("--optimizer", default="adam", show_default=True, help="adam adamw sgd sgd-momentum lion, in training.")
@click.option("--accumulation", type=click.IntRange(min=1), default=1, show_default=True,
              help="Micro-batches in one optimizer step, in training.")  # fmt: skip
@click.option("--beside", type=click.Path(path_type=Path), metavar="PROFILE",
              help="A measured profile of the same model to lay beside the prediction.")  # fmt: skip
@global_batch_option
@objective_options
@out_option
@as_json_option
def command(
    *,
    model: str,
    device: str,
    mode: str,
    dtype: str | None,
    weights_dtype: str | None,
    sequence: tuple[int, ...] | None,
    context: tuple[int, ...] | None,
    surface: tuple[int, ...] | None,
    launches: str,
    max_batch: int | None,
    memory_limit: int | None,
    optimizer: str,
    accumulation: int,
    beside: Path | None,
    global_batch: int | None,
    objective: str,
    latency_target: float | None,
    outputs: tuple[Path, ...],
    as_json: bool,
) -> int:
    """Compute time and memory by batch size from a device's own figures; name the sizes to use and to avoid.

    MODEL is what `microbatch profile` takes; weights are not needed. Exit status 1: it does not fit.

    \b
    Example:
      microbatch predict mlp:depth=8,width=1024 --device t4 --dtype fp16
      microbatch predict llama-3-70b/ --device 8xh200 --mode decode --context 4096
      microbatch predict mlp --device h100 --mode training --global-batch 1024
      microbatch predict mlp --device mine.toml --beside mlp.json --out mlp.html
    """
    check_outputs(outputs)
    _check_cut(mode, accumulation, global_batch)
    lengths, table = _lengths(mode, sequence, context, surface)
    from microbatch.curves.codec import load_profile
    from microbatch.curves.micro_batches import even_sizes
    from microbatch.profiling.beside import lay_beside
    from microbatch.profiling.explain import explain
    from microbatch.profiling.predict import predict

    measured = load_profile(beside) if beside else None
    sizes = (*(measured.batch_sizes if measured else ()), *(even_sizes(global_batch) if global_batch else ()))
    with measuring(), without_collecting():
        profile = predict(
            model, device, mode=mode, dtype=dtype, weights_dtype=weights_dtype, sequence=lengths,
            launches=launches, max_batch_size=max_batch, memory_limit=memory_limit, optimizer=optimizer,
            accumulation=accumulation, surface=table, sizes=sizes,
            layer_sizes=measured.layer_batch_sizes if measured else (),
        )  # fmt: skip
    explanation = explain(profile, objective=objective, latency_target=latency_target, global_batch_size=global_batch)
    answer(lay_beside(explanation, measured) if measured else explanation, outputs, as_json=as_json)
    return 1 if _does_not_fit(explanation) or no_piece_fits(explanation) else 0


def _lengths(
    mode: str, sequence: tuple[int, ...] | None, context: tuple[int, ...] | None, surface: tuple[int, ...] | None
) -> tuple[int | None, tuple[int, ...]]:
    """The length of the curve, and those of the table."""
    if context and mode != "decode":
        raise click.UsageError(f"--context {context[0]} needs --mode decode; with --mode {mode} give --sequence.")
    if context and sequence:
        raise click.UsageError("--context and --sequence say the same in --mode decode; give one of them.")
    given = context or sequence or ()
    table = tuple(surface or (given if len(given) > 1 else ()))
    return (given[-1] if given else None), table


def _check_cut(mode: str, accumulation: int, global_batch: int | None) -> None:
    check_global_batch(global_batch, mode)
    if global_batch is not None and accumulation > 1:
        raise click.UsageError(
            f"--global-batch {global_batch} tries every number of micro-batches, --accumulation {accumulation} names "
            f"one; give one of them."
        )


def _does_not_fit(explanation: Explanation) -> bool:
    profile: Profile = explanation.profile
    return profile.memory is not None and profile.memory.largest_that_fits == 0
