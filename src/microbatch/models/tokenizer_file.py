"""The one way in which tokenizer.json of a folder is read. Loads no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from microbatch.errors import InvalidModel


def read_tokenizer(folder: Path) -> Any:
    """A `tokenizers.Tokenizer`.

    Raises:
        InvalidModel: the package is missing, or the folder has no tokenizer.json or a broken one.
    """
    file = folder / "tokenizer.json"
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise InvalidModel(
            f"{folder} needs the package tokenizers, which is not installed.",
            "Install it: pip install 'microbatch[llm]'.",
        ) from error
    if not file.is_file():
        raise InvalidModel(
            f"{folder} has no tokenizer.json.",
            "Write it: AutoTokenizer.from_pretrained(folder).save_pretrained(folder).",
        )
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:
        raise InvalidModel(f"{file} cannot be read: {error}.", "Download or write it again.") from error
