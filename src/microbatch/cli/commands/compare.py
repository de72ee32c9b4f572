"""``microbatch compare``: two profiles of one model, for a check in CI."""

from __future__ import annotations

from pathlib import Path

import click

from microbatch.cli.options import as_json_option, out_option
from microbatch.cli.output import answer, check_outputs


@click.command(short_help="What became slower or faster.")
@click.argument("before")
@click.argument("after")
@click.option(
    "--threshold",
    type=click.FloatRange(min=0, max=1, min_open=True, max_open=True),
    default=0.05,
    show_default=True,
    help="Least change that counts, as a share: 0.05 is 5 % slower.",
)
@out_option
@as_json_option
def command(*, before: str, after: str, threshold: float, outputs: tuple[Path, ...], as_json: bool) -> int:
    """Compare two saved profiles or CSVs, size by size; exit with 1 when AFTER is slower anywhere beyond chance.

    \b
    Example:
      microbatch compare main.json branch.json
    """
    check_outputs(outputs)
    from microbatch.profiling.compare import compare

    comparison = compare(before, after, threshold=threshold)
    answer(comparison, outputs, as_json=as_json)
    return 1 if comparison.regressions else 0
