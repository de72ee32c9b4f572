"""Checkpoints side by side in one folder, each complete or not there: written beside, synced, renamed. No torch.

A checkpoint is a folder ``000017-step-1200``: the tensors in safetensors files, everything else in ``state.json``, and
the size and CRC-32 of all of these in ``files.json``. It is written under a name with a leading dot and gets its own by
one rename, which a file system does wholly or not at all, after all of it has reached the disk.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

STATE, FILES = "state.json", "files.json"

_NAME = re.compile(r"(\d{6,})-step-\d+")
_BLOCK = 1 << 22


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in a folder, the newest first: the one that was written last."""
    if not folder.is_dir():
        return []
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def is_checkpoint(path: Path) -> bool:
    """Whether a path is one checkpoint, and not a folder of them."""
    return (path / FILES).is_file() or (path / STATE).is_file()


def start_draft(folder: Path, steps: int) -> Path:
    """An empty folder to write the next checkpoint into; what killed runs left unfinished goes."""
    folder.mkdir(parents=True, exist_ok=True)
    for unfinished in folder.glob(".*.part"):
        shutil.rmtree(unfinished)
    newest = checkpoints(folder)
    number = int(newest[0].name.split("-")[0]) + 1 if newest else 1
    draft = folder / f".{number:06d}-step-{steps}.part"
    draft.mkdir()
    return draft


def finish_draft(draft: Path, sums: Mapping[str, list[int]], keep: int) -> Path:
    """The draft becomes the newest checkpoint, and older ones than the last `keep` go.

    Args:
        draft: with all its files written and synced.
        sums: their checksums, see `checksum`.
        keep: how many checkpoints stay, this one included.
    """
    write_json(draft / FILES, dict(sums))
    sync(draft / FILES)
    sync(draft)
    path = draft.with_name(draft.name.removeprefix(".").removesuffix(".part"))
    draft.rename(path)
    sync(path.parent)
    for old in checkpoints(path.parent)[keep:]:
        doomed = old.with_name(f".{old.name}.part")  # so that half of it is never taken for a checkpoint
        old.rename(doomed)
        shutil.rmtree(doomed)
    return path


def write_json(path: Path, value: Any) -> None:
    """A document in one line."""
    path.write_text(json.dumps(value, separators=(",", ":")), encoding="utf-8")


def sync(path: Path) -> None:
    """What was written to a file, or the names in a folder, has reached the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum(path: Path) -> list[int]:
    """Bytes and CRC-32 of a file."""
    crc, size = 0, 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            crc, size = zlib.crc32(block, crc), size + len(block)
    return [size, crc]


def damage(path: Path, part: int = 0, parts: int = 1) -> str | None:
    """What is wrong with a checkpoint, in one sentence; None when it is as it was written.

    Args:
        path: the checkpoint.
        part: every `parts`-th file is read, beginning with this one, so that ranks share the work.
        parts: see `part`.
    """
    try:
        sums: dict[str, list[int]] = json.loads((path / FILES).read_text(encoding="utf-8"))
        if STATE not in sums:
            return f"{path / FILES} lists no {STATE}"
        for name in sorted(sums)[part::parts]:
            found, expected = checksum(path / Path(name).name), sums[name]
            if found != expected:
                return f"{path / name} has {found[0]} bytes with CRC {found[1]}, not {expected[0]} with {expected[1]}"
    except (OSError, ValueError, TypeError, LookupError) as error:
        return f"{path} cannot be read ({type(error).__name__}: {error})"
    return None
