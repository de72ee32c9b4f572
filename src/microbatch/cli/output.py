"""What a command prints and writes: one JSON document or text on standard output, and files checked beforehand."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from microbatch.curves.profile import SCHEMA_VERSION, Profile
from microbatch.errors import InvalidSettings

if TYPE_CHECKING:
    from microbatch.curves.explanation import Explanation

RAW_FORMS = (".json", ".csv")
"""What a profile can be written as before it is explained."""


class Result(Protocol):
    """Anything that a command answers with."""

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists and numbers."""


def print_json(document: Mapping[str, Any], *, one_line: bool = False) -> None:
    """One document on standard output. Values that are not numbers become null, as JSON knows no NaN.

    Args:
        document: what is printed, with the version of its form.
        one_line: for a reader that goes on to wait for more.
    """
    with_version = {"schema_version": SCHEMA_VERSION, **document}
    encoded = msgspec.json.encode(with_version)
    sys.stdout.write((encoded if one_line else msgspec.json.format(encoded, indent=2)).decode() + "\n")
    sys.stdout.flush()


def answer(result: Result, outputs: Sequence[Path], *, as_json: bool, beside: Mapping[str, Result | None] = {}) -> None:
    """Write a result to each file, then print it as text, or as JSON.

    Args:
        beside: what else was found, by its key in the JSON document; None is left out.
    """
    write(result, outputs)
    more = {key: each for key, each in beside.items() if each is not None}
    if as_json:
        print_json(result.to_json() | {key: each.to_json() for key, each in more.items()})
        return
    from microbatch.reporting.text import to_text

    print(to_text(result))
    for each in more.values():
        print(each)
    for path in outputs:
        print(f"Wrote {path}")


def no_piece_fits(explanation: Explanation) -> bool:
    """Whether a global batch was asked for that fits in no micro-batch of any size that is known."""
    return explanation.micro_batches is not None and explanation.micro_batches.chosen is None


def write(result: Result, outputs: Sequence[Path]) -> None:
    """Write a result to each file, in the form of its suffix."""
    if not outputs:
        return
    from microbatch.reporting.save import save

    for path in outputs:
        save(result, path)


def check_outputs(outputs: Sequence[Path]) -> None:
    """Refuse, before anything is measured, a file that could not be written at the end.

    Raises:
        InvalidSettings: an unknown suffix, a missing or read-only folder, or a folder where a file is meant.
    """
    for path in outputs:
        if path.is_dir():
            raise InvalidSettings(f"{path} is a folder.", f"Name a file, as in {path / 'report.html'}.")
        _check_suffix(path)
        if not path.parent.is_dir():
            raise InvalidSettings(f"The folder {path.parent} does not exist.", f"Create it: mkdir -p {path.parent}")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise InvalidSettings(f"{path} cannot be written.", "Choose another folder, or change its permissions.")


def check_folder(folder: Path) -> None:
    """Refuse, before anything is measured, a folder that could not be written to at the end; it need not exist yet.

    Raises:
        InvalidSettings: a file of that name, a missing folder above it, or a read-only one.
    """
    if folder.exists() and not folder.is_dir():
        raise InvalidSettings(f"{folder} is a file.", "Name a folder.")
    above = folder if folder.exists() else folder.parent
    if not above.is_dir():
        raise InvalidSettings(f"The folder {above} does not exist.", f"Create it: mkdir -p {above}")
    if not os.access(above, os.W_OK):
        raise InvalidSettings(f"{above} cannot be written.", "Choose another folder, or change its permissions.")


def keep_samples(profile: Profile, outputs: Sequence[Path]) -> None:
    """Write what was measured although nobody can explain it: the files among `outputs` that hold samples only."""
    from microbatch.reporting.save import save

    for path in outputs:
        if path.suffix.lower() in RAW_FORMS:
            save(profile, path)
            print(f"Wrote the samples to {path}", file=sys.stderr)


def _check_suffix(path: Path) -> None:
    from microbatch.reporting.save import FORMS

    if path.suffix.lower() not in FORMS:
        given = f"the suffix {path.suffix!r}" if path.suffix else "no suffix"
        raise InvalidSettings(f"{path} has {given}, which names no form.", f"Use one of {', '.join(FORMS)}.")
