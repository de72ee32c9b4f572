"""Pickles, by name or by content: they can run any code while they are read, so they are refused unread."""

from __future__ import annotations

import zipfile
from pathlib import Path

from microbatch.errors import InvalidModel
from microbatch.models.loaded import Loaded

SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib")
"""Names that pickles usually bear."""


def is_pickle(text: str) -> bool:
    """Whether the text names a pickle: by its suffix, or a file that is one whatever its name."""
    path = Path(text)
    if path.is_dir():
        return False
    return text.lower().endswith(SUFFIXES) or (path.is_file() and (_begins_as_pickle(path) or _holds_pickle(path)))


def refuse_pickle(text: str) -> Loaded:
    """
    Raises:
        InvalidModel: always.
    """
    raise InvalidModel(
        f"{text} is a pickle, and loading one can run any code that is hidden in it.",
        "Write a function that builds the model and loads its weights, and name it as file.py:callable.",
    )


def _begins_as_pickle(path: Path) -> bool:
    """PROTO and a version, with which protocols 2 to 5 begin (pickletools)."""
    with path.open("rb") as file:
        start = file.read(2)
    return len(start) == _START and start[0] == _PROTO and start[1] in range(2, 6)


def _holds_pickle(path: Path) -> bool:
    """What torch.save and torch.jit.save write: a zip with data.pkl in its one folder."""
    if not zipfile.is_zipfile(path):
        return False
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            # A cut-off archive ends with one that it holds; such a zip does not begin where the file does.
            whole = bool(entries) and min(entry.header_offset for entry in entries) == 0
            names = archive.namelist()
            return whole and any(name.count("/") == 1 and name.endswith("/data.pkl") for name in names)
    except zipfile.BadZipFile:
        return False


_PROTO, _START = 0x80, 2
