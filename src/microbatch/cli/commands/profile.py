"""``microbatch profile``: measure a model's curve on this machine and explain it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from microbatch.cli.decode_limits import limits_in_mode
from microbatch.cli.options import (
    BYTES,
    DURATION,
    as_json_option,
    check_global_batch,
    global_batch_option,
    length_of,
    objective_options,
    out_option,
)
from microbatch.cli.output import answer, check_outputs, keep_samples, no_piece_fits
from microbatch.cli.progress import measuring
from microbatch.errors import NoAnswer

if TYPE_CHECKING:
    from microbatch.models.loaded import Loaded

LENGTH = click.IntRange(min=1)
MODES = ("inference", "training", "prefill", "decode")


@click.command(short_help="Measure a model on this machine and explain it.")
@click.argument("model")
@click.option("--mode", type=click.Choice(MODES), default="inference", show_default=True, help="What is timed.")
@click.option(
    "--sequence", type=click.IntRange(min=1), metavar="N", help="Tokens of each item; the model's own when left out."
)
@click.option(
    "--context", type=click.IntRange(min=1), metavar="N", help="Tokens already in the cache, with --mode decode."
)
@click.option("--device", default="cpu", show_default=True, help="Where torch runs: cpu, cuda, cuda:1.")
@click.option("--dtype", help="fp32, tf32, fp16 or bf16; the model's own when left out.")
@click.option("--budget", type=DURATION, default="60s", show_default=True, metavar="DURATION", help="Time to measure.")
@click.option("--max-batch", type=click.IntRange(min=1), help="Try no larger batch than this.")
@click.option("--memory-limit", type=BYTES, metavar="BYTES", help="Stay under this, as in 8GB.")
@click.option("--batch-dimension", type=int, help="Which dimension of the inputs is the batch; found when left out.")
@click.option("--compile", "use_compile", is_flag=True, help="Measure the model under torch.compile.")
@global_batch_option
@objective_options
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="For weights, inputs and order.")
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads for torch.")
@out_option
@as_json_option
def command(
    *,
    model: str,
    mode: str,
    sequence: int | None,
    context: int | None,
    device: str,
    dtype: str | None,
    budget: float,
    max_batch: int | None,
    memory_limit: int | None,
    batch_dimension: int | None,
    use_compile: bool,
    global_batch: int | None,
    objective: str,
    latency_target: float | None,
    seed: int,
    threads: int | None,
    outputs: tuple[Path, ...],
    as_json: bool,
) -> int:
    """Measure time and memory by batch size on this machine; name the sizes to use and to avoid.

    MODEL is a built-in (mlp, cnn, transformer, decoder, moe, with settings as in mlp:depth=8,width=1024), a
    package.module:callable or file.py:callable that returns a model and an example input, a Hugging Face folder, a
    torch.export archive (.pt2), torchvision:NAME or timm:NAME. Decode tells a folder's batching limits too.

    \b
    Example:
      microbatch profile mlp:depth=8,width=1024 --out mlp.html --out mlp.json
      microbatch profile my_model.py:build --mode training --latency-target 50ms
      microbatch profile my_model.py:build --mode training --global-batch 128
      microbatch profile smollm2/ --mode decode --context 512
    """
    check_outputs(outputs)
    check_global_batch(global_batch, mode)
    length = length_of(mode, sequence, context)
    import torch

    from microbatch.curves.micro_batches import even_sizes
    from microbatch.models.load import load_model
    from microbatch.models.modes import in_mode
    from microbatch.profiling.explain import explain
    from microbatch.profiling.sweep import profile

    if threads is not None:
        torch.set_num_threads(threads)
    torch.manual_seed(seed)  # the weights of a built-in model and of a random input
    with measuring() as progress:
        loaded = in_mode(load_model(model, dtype=dtype), mode, length)
        measured = profile(
            loaded.model,
            _example(loaded),
            mode=mode,
            device=device,
            dtype=dtype,
            budget=budget,
            max_batch_size=max_batch if global_batch is None else min(max_batch or global_batch, global_batch),
            sizes=even_sizes(global_batch) if global_batch else (),
            memory_limit=memory_limit,
            batch_dimension=batch_dimension,
            compile=use_compile,
            loss=loaded.loss if mode == "training" else None,
            seed=seed,
            progress=progress,
            name=loaded.name,
            unit=loaded.unit,
            sequence=loaded.default_sequence,
        )
    measured = replace(measured, warnings=(*measured.warnings, *loaded.notes))
    try:
        explanation = explain(
            measured, objective=objective, latency_target=latency_target, global_batch_size=global_batch
        )
    except NoAnswer:
        keep_samples(measured, outputs)
        raise
    limits = limits_in_mode(mode, model, dtype, device, length, memory_limit, latency_target)
    answer(explanation, outputs, as_json=as_json, beside={"decode_limits": limits})
    return 1 if no_piece_fits(explanation) else 0


def _example(loaded: Loaded) -> Any:
    """The form that `profile` takes: positional inputs as a tuple, named ones as a dict; a function where rows are
    sent to experts by what they hold, so that no two of a batch are the same."""
    from microbatch.profiling.gather import first_router

    make = loaded.example_at
    if make is not None and first_router(loaded.model) is not None:
        return lambda batch_size: make(batch_size, None)
    return loaded.kwargs if loaded.kwargs and not loaded.args else loaded.args
