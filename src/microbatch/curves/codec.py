"""Saved curves: our own JSON, and the plain CSV ``batch_size,seconds`` of someone else. Never executes a file."""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

from microbatch.curves.profile import SCHEMA_VERSION, Point, Profile
from microbatch.errors import InvalidProfile

LARGEST_FILE = 256 * 2**20
"""Bytes; a profile of 200 sizes with 100 samples each takes less than 1 MB."""
COLUMNS = ("batch_size", "seconds")
FORM = "Give a profile saved by microbatch (.json) or a CSV with the columns batch_size,seconds."


def dump_profile(profile: Profile) -> bytes:
    """The JSON form; `load_profile` reads it back without loss."""
    import msgspec

    return msgspec.json.format(msgspec.json.encode(profile), indent=1)


def load_profile(source: str | Path | Profile) -> Profile:
    """A profile from a JSON document that any command printed or saved, from a CSV, or as it is.

    Raises:
        InvalidProfile: no such file, not readable, a wrong form, or values that cannot be times.
    """
    if isinstance(source, Profile):
        return source
    path = Path(source)
    content = _read(path)
    profile = _from_json(path, content) if content.lstrip()[:1] in (b"{", b"[") else _from_csv(path, content)
    return _checked(path, profile)


def _read(path: Path) -> bytes:
    if path.is_dir():
        raise InvalidProfile(f"{path} is a folder.", FORM)
    if not path.exists():
        raise InvalidProfile(f"There is no file {path}.", FORM)
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise InvalidProfile(f"{path} has {path.stat().st_size} bytes, more than {LARGEST_FILE}.", FORM)
        return path.read_bytes()
    except OSError as error:
        raise InvalidProfile(f"{path} cannot be read: {error.strerror}.", FORM) from None


def _from_json(path: Path, content: bytes) -> Profile:
    import msgspec

    try:
        profile = msgspec.json.decode(content, type=Profile)
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidProfile(f"{path} is not a saved profile: {error}.", FORM) from None
    if profile.schema_version > SCHEMA_VERSION:
        raise InvalidProfile(
            f"{path} has schema version {profile.schema_version}; this microbatch knows {SCHEMA_VERSION}.",
            "Update microbatch.",
        )
    return profile


def _from_csv(path: Path, content: bytes) -> Profile:
    try:
        lines = content.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise InvalidProfile(f"{path} is neither text nor a saved profile.", FORM) from None
    rows = [(i, row) for i, row in enumerate(csv.reader(lines), 1) if row and not row[0].lstrip().startswith("#")]
    if not rows:
        raise InvalidProfile(f"{path} is empty.", FORM)
    header = [name.strip().lower() for name in rows[0][1]]
    if not set(COLUMNS) <= set(header):
        raise InvalidProfile(f"{path} line {rows[0][0]} names the columns {', '.join(header)}.", FORM)
    columns = [header.index(name) for name in COLUMNS]
    samples: defaultdict[int, list[float]] = defaultdict(list)
    for line, row in rows[1:]:
        size, seconds = (row[column].strip() if column < len(row) else "" for column in columns)
        samples[_size(path, line, size)].append(_seconds(path, line, seconds))
    points = tuple(Point(batch_size=size, samples=tuple(times)) for size, times in samples.items())
    return Profile(points=points, source="csv", model=path.name)


def _size(path: Path, line: int, text: str) -> int:
    try:
        value = float(text)
    except ValueError:
        raise InvalidProfile(f"{path} line {line}: batch_size {text!r} is not a number.", FORM) from None
    if not (math.isfinite(value) and value == int(value) and value >= 1):
        raise InvalidProfile(f"{path} line {line}: batch_size {text} is not a whole number of 1 or more.", FORM)
    return int(value)


def _seconds(path: Path, line: int, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidProfile(f"{path} line {line}: seconds {text!r} is not a number.", FORM) from None


def _checked(path: Path, profile: Profile) -> Profile:
    """The profile with its points in order, if every value can be a size or a time."""
    if not profile.points:
        raise InvalidProfile(f"{path} holds no batch size.", FORM)
    sizes = profile.batch_sizes
    if len(set(sizes)) < len(sizes):
        twice = next(size for size in sizes if sizes.count(size) > 1)
        raise InvalidProfile(f"{path} holds batch size {twice} more than once.", "Merge its samples.")
    for point in profile.points:
        if point.batch_size < 1 or not point.samples:
            raise InvalidProfile(f"{path}: batch size {point.batch_size} with {len(point.samples)} samples.", FORM)
        for seconds in point.samples:
            if not (math.isfinite(seconds) and seconds > 0):
                raise InvalidProfile(
                    f"{path}: batch size {point.batch_size} took {seconds} seconds.", "Times must be above zero."
                )
        _check_updates(path, point)
    if not all(math.isfinite(seconds) and seconds >= 0 for seconds in profile.adding_samples):
        raise InvalidProfile(f"{path} adds gradients in {min(profile.adding_samples)} seconds.", FORM)
    if profile.source == "csv" and len(sizes) == 1:
        raise InvalidProfile(f"{path} holds one batch size, {sizes[0]}: no curve.", "Measure at least two.")
    return replace(profile, points=tuple(sorted(profile.points, key=lambda point: point.batch_size)))


def _check_updates(path: Path, point: Point) -> None:
    updates = point.update_samples
    if updates and len(updates) != len(point.samples):
        raise InvalidProfile(
            f"{path}: batch size {point.batch_size} has {len(point.samples)} samples, {len(updates)} of updates.", FORM
        )
    for update, sample in zip(updates, point.samples, strict=False):
        if not 0 <= update <= sample:
            raise InvalidProfile(
                f"{path}: batch size {point.batch_size} took {sample} seconds, and {update} of them to update.",
                "The update is a part of the whole.",
            )
