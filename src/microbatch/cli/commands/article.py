"""``microbatch article``: the experiment behind the project, measured on this machine."""

from __future__ import annotations

from pathlib import Path

import click

from microbatch.cli.options import DURATION, as_json_option
from microbatch.cli.output import check_folder, print_json
from microbatch.cli.progress import measuring


@click.command(short_help="The experiment behind the project, measured here.")
@click.option("--budget", type=DURATION, default="200s", show_default=True, metavar="DURATION", help="Time to measure.")
@click.option("--device", metavar="NAME_OR_FILE", help="Compute the same plots for this device, as in t4.")
@click.option("--torch-device", default="cpu", show_default=True, help="Where torch measures: cpu, cuda, cuda:1.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="For weights and inputs.")
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="Write the report and its samples there.")
@as_json_option
def command(*, budget: float, device: str | None, torch_device: str, seed: int, out: Path | None, as_json: bool) -> int:
    """Measure here what the article behind the project claims, and say for each plot whether the claim holds.

    With a device, each plot stands beside the same curves computed for it, in fp16 and fp32.

    \b
    Example:
      microbatch article --device t4 --out article
    """
    from microbatch.hardware.catalogue import load_device

    spec = load_device(device) if device is not None else None
    if out is not None:
        check_folder(out)
    from microbatch.profiling.article import run_article

    with measuring() as progress:
        article = run_article(budget=budget, progress=progress, device=torch_device, device_spec=spec, seed=seed)
    from microbatch.reporting.article_page import article_to_text, save_article

    written = save_article(article, out) if out is not None else ()
    if as_json:
        print_json(article.to_json())
        return 0
    print(article_to_text(article))
    for path in written:
        print(f"Wrote {path}")
    return 0
