"""``microbatch convert``: a GGUF model as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from microbatch.cli.options import as_json_option
from microbatch.cli.output import print_json
from microbatch.cli.progress import measuring

if TYPE_CHECKING:
    from microbatch.models.convert import Conversion

DTYPES = ("fp32", "fp16", "bf16")


@click.command(short_help="A GGUF model as a Hugging Face folder.")
@click.argument("source", metavar="FILE.gguf", type=click.Path(path_type=Path))
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    help="Of the weights written; the file's own when left out, and 16 bits for a quantised one.",
)
@as_json_option
def command(*, source: Path, folder: Path, dtype: str | None, as_json: bool) -> int:
    """Write a GGUF model as a folder with config.json, safetensors and tokenizer, which transformers and the other
    commands take.

    Quantised weights are turned back into numbers of 16 or 32 bits. The folder is written whole or not at all.

    \b
    Example:
      microbatch convert SmolLM2-135M.Q4_1.gguf smollm2
      microbatch profile smollm2 --mode decode
    """
    from microbatch.models.convert import convert

    with measuring() as progress:
        done = convert(source, folder, dtype=dtype, progress=progress)
    if as_json:
        print_json(done.to_json())
    else:
        print("\n".join(_lines(done)))
    return 0


def _lines(done: Conversion) -> list[str]:
    from microbatch.units import format_bytes

    types = ", ".join(done.quantisation)
    return [
        f"Wrote {done.path}: {done.architecture}, {done.parameters:,} parameters as {done.dtype}"
        f" ({format_bytes(done.bytes)}), from {types}.",
        f"Files: {', '.join(done.files)}",
        *done.notes,
    ]
