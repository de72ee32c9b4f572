"""``microbatch check``: is splitting this model's batch exact, and if not, which layer is to blame?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from microbatch.cli.options import as_json_option
from microbatch.cli.output import answer, check_outputs
from microbatch.cli.progress import measuring
from microbatch.errors import InvalidSettings

if TYPE_CHECKING:
    from microbatch.batch.exactness import ExactnessReport
    from microbatch.models.loaded import Loaded

MODES = ("both", "training", "inference")
FORMS = (".json", ".txt")
SHORT = 32
"""Tokens of each item, where the model lets one choose: mixing rows does not depend on the length."""


@click.command(short_help="Is splitting this model's batch exact?")
@click.argument("model")
@click.option("--mode", type=click.Choice(MODES), default=MODES[0], show_default=True, help="What is checked.")
@click.option(
    "--batch-size",
    type=click.IntRange(min=2),
    metavar="N",
    help="Rows in the batch; the example's own number when left out, but from 4 to 64.",
)
@click.option("--sequence", type=click.IntRange(min=1), metavar="N", help="Tokens of each item; few when left out.")
@click.option("--batch-dimension", type=int, help="Which dimension of the inputs is the batch; 0 when left out.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="For weights and inputs.")
@click.option(
    "--out",
    "outputs",
    type=click.Path(path_type=Path),
    metavar="FILE",
    multiple=True,
    help="Write the report there, as .json or .txt. May be repeated.",
)
@as_json_option
def command(
    *,
    model: str,
    mode: str,
    batch_size: int | None,
    sequence: int | None,
    batch_dimension: int | None,
    seed: int,
    outputs: tuple[Path, ...],
    as_json: bool,
) -> int:
    """Run MODEL on a batch and on its pieces, in float64; exit with 1 when a row's result depends on the other rows
    or on earlier pieces, and name the module that makes it so.

    MODEL is what `microbatch profile` takes: a built-in, a package.module:callable or file.py:callable, a Hugging
    Face folder, torchvision:NAME or timm:NAME.

    \b
    Example:
      microbatch check torchvision:resnet18
      microbatch check my_model.py:build --mode training --json
    """
    check_outputs(outputs)
    for path in outputs:
        if path.suffix.lower() not in FORMS:
            raise InvalidSettings(f"A check has no form {path.suffix}.", f"Use {' or '.join(FORMS)}.")
    import torch

    from microbatch.batch.exactness import joined
    from microbatch.models.load import load_model

    torch.manual_seed(seed)
    with measuring() as progress:
        loaded = load_model(model)
        reports = []
        for number, each in enumerate(MODES[1:] if mode == "both" else (mode,)):
            if progress is not None:
                progress(number / 2, f"checking {each}")
            reports.append(_check(loaded, each, batch_size, sequence, batch_dimension))
    report = joined(reports)
    answer(replace(report, notes=(*report.notes, *loaded.notes)), outputs, as_json=as_json)
    return 0 if report.exact else 1


def _check(
    loaded: Loaded, mode: str, batch_size: int | None, sequence: int | None, dimension: int | None
) -> ExactnessReport:
    from microbatch.batch.different_rows import example_batch
    from microbatch.batch.independence import check_independence
    from microbatch.models.modes import in_mode

    if sequence is None and loaded.default_sequence is not None and loaded.example_at is not None:
        sequence = min(SHORT, loaded.default_sequence)
    chosen = in_mode(loaded, mode, sequence)
    args, kwargs = example_batch(chosen, batch_size, dimension=dimension)
    loss = chosen.loss if mode == "training" else None

    positions = [f"args[{number}]" for number in range(len(args))]

    def apart(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(batch[name] for name in positions), {n: v for n, v in batch.items() if n not in positions}

    def forward(model: Any, batch: Any) -> Any:
        given, named = apart(batch)
        return model(*given, **named)

    def of_example(output: Any, batch: Any) -> Any:
        assert loss is not None
        given, named = apart(batch)
        return loss(output, ((given, named) if given else named) if named else given[0] if len(given) == 1 else given)

    return check_independence(
        chosen.model,
        dict(zip(positions, args, strict=True)) | kwargs,
        mode=mode,
        forward=forward,
        loss=None if loss is None else of_example,
        batch_dimension=dimension,
    )
