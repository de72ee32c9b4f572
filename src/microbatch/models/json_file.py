"""The JSON files of a model's folder, read without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from microbatch.errors import InvalidModel


def json_of(file: Path) -> dict[str, Any]:
    """The object in a JSON file; an empty one where there is no such file.

    Raises:
        InvalidModel: it is no JSON object.
    """
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InvalidModel(f"{file} is no JSON: {error}.", "Download or write it again.") from error
    if not isinstance(found, dict):
        raise InvalidModel(f"{file} holds a {type(found).__name__}, not an object.", "Download or write it again.")
    return found
