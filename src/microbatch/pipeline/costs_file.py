"""Costs of stages in files: a saved run, or a CSV with a row per stage; both written here and read back."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import numpy as np

from microbatch.errors import InvalidCosts
from microbatch.pipeline.costs import PER_STAGE, Costs, costs_from_csv

_OF_A_STEP = ("pair", "pairs_apart", "per_message", "overlap", "global_clip")
LARGEST_FILE = 64 * 2**20
FORM = "Give what microbatch pipeline wrote (.json), or a CSV with a row per stage and a column forward."


def read_costs(path: str | Path) -> Costs:
    """Costs from a run that `microbatch pipeline` saved as JSON, or from a CSV.

    Raises:
        InvalidCosts: no such file, or neither of them.
    """
    source = Path(path)
    if source.suffix.lower() != ".json":
        return costs_from_csv(source)
    if not source.is_file():
        raise InvalidCosts(f"There is no file {source}.", FORM)
    import msgspec

    try:
        if source.stat().st_size > LARGEST_FILE:
            raise InvalidCosts(f"{source} has {source.stat().st_size} bytes, more than {LARGEST_FILE}.", FORM)
        document = msgspec.json.decode(source.read_bytes())
    except (msgspec.DecodeError, UnicodeDecodeError, OSError) as error:
        raise InvalidCosts(f"{source} cannot be read: {error}.", FORM) from None
    held = document.get("costs", document) if isinstance(document, dict) else None
    if not isinstance(held, dict) or "forward" not in held:
        raise InvalidCosts(f"{source} holds no costs of stages.", FORM)
    known = {name: held[name] for name in (*PER_STAGE, "message", *_OF_A_STEP) if held.get(name) is not None}
    return _checked(source, known)


def _checked(source: Path, known: dict[str, Any]) -> Costs:
    for name, value in known.items():
        values = value if isinstance(value, list) else [value]
        wanted = (bool,) if name in ("pairs_apart", "overlap", "global_clip") else (int, float)
        if not all(isinstance(each, wanted) for each in values):
            raise InvalidCosts(f"{source}: {name} is {value!r}.", "Write seconds, as in 0.012.")
    return Costs(**known)


def costs_json(costs: Costs, stages: int) -> dict[str, Any]:
    """Plain numbers, one per stage, that `read_costs` reads."""
    given = [name for name in PER_STAGE if getattr(costs, name) is not None]
    document: dict[str, Any] = {name: costs.per_stage(name, stages).tolist() for name in given}
    document["message"] = costs.links(stages).tolist()
    return document | {name: getattr(costs, name) for name in _OF_A_STEP}


def costs_csv(costs: Costs, stages: int) -> str:
    """The text of a CSV that `read_costs` reads: a row per stage, what a message costs in each of them."""
    rows = {name: costs.per_stage(name, stages) for name in PER_STAGE if getattr(costs, name) is not None}
    rows["message"] = np.append(costs.links(stages), 0.0)
    rows["per_message"] = np.full(stages, costs.per_message)
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(("stage", *rows))
    writer.writerows((stage, *(repr(float(values[stage])) for values in rows.values())) for stage in range(stages))
    return stream.getvalue()
