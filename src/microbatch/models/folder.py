"""What a Hugging Face folder says about its model, read without running anything from it."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from microbatch.errors import InvalidModel
from microbatch.models.json_file import json_of
from microbatch.models.pickles import SUFFIXES

INSTALL = "Install it: pip install 'microbatch[llm]'."


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder with config.json.

    Attributes:
        path: the folder.
        settings: config.json, without what would lead to code in the folder.
        model_type: as in "llama".
        has_weights: whether there are safetensors.
        notes: what was left out, one sentence each.
    """

    path: Path
    settings: dict[str, Any]
    model_type: str
    has_weights: bool
    notes: tuple[str, ...]


def read_folder(path: Path, known: list[str]) -> Folder:
    """Reads config.json and looks at the names of the other files.

    Args:
        known: the model types that the installed transformers has.

    Raises:
        InvalidModel: no config.json, one that is no JSON object, or that names no model type or an unknown one.
    """
    settings = _settings(path)
    model_type = _model_type(path, settings, known)
    code = settings.pop("auto_map", None)
    notes = [] if code is None else [_code_note(path, model_type)]
    files = {file.suffix for file in path.iterdir() if file.is_file()}
    has_weights = bool(_safetensors(path))
    if not has_weights and files & set(SUFFIXES):
        notes.append(f"{path} has its weights only as a pickle, which is not opened: the weights are random.")
    return Folder(path, settings, model_type, has_weights, tuple(notes))


def _settings(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    if not file.is_file():
        raise _no_config(path)
    return json_of(file)


def _no_config(path: Path) -> InvalidModel:
    pickles = sorted(file.name for file in path.iterdir() if file.suffix in SUFFIXES)
    inner = sorted(file.parent.name for file in path.glob("*/config.json"))
    if pickles:
        return InvalidModel(
            f"The folder {path} has no config.json, only a pickle ({pickles[0]}), which can run any code hidden in it.",
            "Write a function that builds the model and loads its weights, and name it as file.py:callable.",
        )
    remedy = f"Did you mean {path / inner[0]}?" if inner else "Name the folder of one model, with its config.json."
    return InvalidModel(f"The folder {path} has no config.json.", remedy)


def _model_type(path: Path, settings: dict[str, Any], known: list[str]) -> str:
    model_type = settings.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise InvalidModel(
            f"{path / 'config.json'} names no model_type.", 'Add the model\'s own, as in "model_type": "llama".'
        )
    if model_type in known:
        return model_type
    if "auto_map" in settings:
        raise InvalidModel(
            f"The model type {model_type!r} of {path} is code in that folder, and code from a folder is never run.",
            "Read it, then write a function that builds the model, and name it as file.py:callable.",
        )
    close = get_close_matches(model_type, known, n=3)
    raise InvalidModel(
        f"transformers knows no model type {model_type!r}.",
        f"Did you mean {' or '.join(close)}?" if close else "Install a newer transformers, or use file.py:callable.",
    )


def _code_note(path: Path, model_type: str) -> str:
    return f"{path} brings code of its own, which is not run: the {model_type} of transformers is used."


def _safetensors(path: Path) -> list[Path]:
    """The files that transformers would load: one, or those of an index."""
    return [path / name for name in ("model.safetensors", "model.safetensors.index.json") if (path / name).is_file()]
