"""Texts, or token ids that a client made itself, read into rows of token ids. Rust's tokenizers, no Python loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from msgspec import Meta
from numpy.typing import NDArray
from torch import Tensor

from microbatch.errors import InvalidBatch, InvalidModel, RequestTooLarge
from microbatch.models.json_file import json_of
from microbatch.models.tokenizer_file import read_tokenizer

Ids = NDArray[np.int64]

QUICK = 4096
"""Characters that are read faster than another thread can be asked to."""
LONGEST_TEXT = 10**6
"""Characters of a text that is read at all: what is cut off later takes its time as well."""
UNLIMITED = 10**6
"""Where a tokenizer's settings know no limit they hold a number like 1e30."""


@dataclass(frozen=True, slots=True)
class TextReader:
    """``reader(values) -> rows``: a row of token ids for each value, its exception where it is none.

    Attributes:
        tokenizer: of the package tokenizers, without padding, cutting at `longest`.
        longest: tokens that the model takes, those that the tokenizer adds among them.
        vocabulary: ids are below it.
        prefix: put before each text.
        lower: texts are written small first.
    """

    tokenizer: Any
    longest: int
    vocabulary: int
    prefix: str = ""
    lower: bool = False

    def __call__(self, values: Sequence[Any]) -> list[Any]:
        texts = [place for place, value in enumerate(values) if isinstance(value, str) and len(value) <= LONGEST_TEXT]
        taken = set(texts)
        rows = [None if place in taken else _attempt(self._ids, value) for place, value in enumerate(values)]
        for place, row in zip(texts, self._encoded([values[place] for place in texts])):
            rows[place] = row
        return rows

    @property
    def form(self) -> Any:
        """The type of a value, with its bounds as msgspec and OpenAPI know them."""
        token = Annotated[float, Meta(ge=0, le=self.vocabulary - 1, multiple_of=1)]  # 8.0 is as good as 8 in JSON
        ids = Annotated[list[token], Meta(min_length=1, max_length=self.longest)]
        return ids if self.tokenizer is None else Annotated[str, Meta(max_length=LONGEST_TEXT)] | ids

    def is_long(self, values: Sequence[Any]) -> bool:
        """Whether reading these may take a millisecond or more."""
        return sum(len(value) for value in values if isinstance(value, str | list)) > QUICK

    def _encoded(self, texts: list[str]) -> list[Any]:
        if not texts:
            return []
        try:
            if len(texts) == 1:
                return [_row(self.tokenizer.encode(self._prepared(texts[0])))]
            return [_row(found) for found in self.tokenizer.encode_batch_fast([self._prepared(t) for t in texts])]
        except Exception:  # one of them; each by itself says which
            return [_attempt(self._one, text) for text in texts]

    def _one(self, text: str) -> Ids:
        if self.tokenizer is None:
            raise InvalidBatch("This model takes token ids: there is no tokenizer beside it.", "Send a list of ids.")
        try:
            return _row(self.tokenizer.encode(self._prepared(text)))
        except InvalidBatch:
            raise
        except Exception as error:
            raise InvalidBatch(f"The text cannot be read: {error}.", "Send it as valid Unicode.") from None

    def _prepared(self, text: str) -> str:
        text = self.prefix + text if self.prefix else text
        return text.lower() if self.lower else text

    def _ids(self, value: Any) -> Ids:
        """Token ids of the model's own vocabulary, run as they are."""
        if isinstance(value, str):
            raise RequestTooLarge(f"The text has {len(value)} characters.", f"Send at most {LONGEST_TEXT}.")
        try:
            ids = np.asarray(value)
        except (ValueError, TypeError, OverflowError):
            ids = np.empty(0)
        if isinstance(value, bytes | dict) or ids.ndim != 1 or not ids.size or not _is_whole(ids):
            raise InvalidBatch(f"{_shown(value)} is neither a text nor a list of token ids.", "Send one of them.")
        if ids.size > self.longest:
            raise RequestTooLarge(f"{ids.size} token ids; the model takes {self.longest}.", "Cut them.")
        if ids.min() < 0 or ids.max() >= self.vocabulary:
            wrong = next(int(each) for each in ids if not 0 <= each < self.vocabulary)
            raise InvalidBatch(f"There is no token {wrong}.", f"Ids are from 0 to {self.vocabulary - 1}.")
        return ids.astype(np.int64)


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """Rows of token ids as one batch: ``{"input_ids": (n, longest), "attention_mask": (n, longest)}``.

    Attributes:
        value: what padding holds; the mask hides it.
        per_token: the model gives a row for each token: those of padding are taken out of the results.
    """

    value: int = 0
    per_token: bool = False

    def __call__(self, rows: list[Ids]) -> dict[str, Tensor]:
        longest = max(map(len, rows))
        ids = np.full((len(rows), longest), self.value, dtype=np.int64)
        mask = np.zeros((len(rows), longest), dtype=np.int64)
        for place, row in enumerate(rows):
            ids[place, : len(row)] = row
            mask[place, : len(row)] = 1
        return {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}

    def length(self, row: Ids) -> int:
        """Tokens of an item."""
        return len(row)


def cutting_tokenizer(folder: Path, longest: int) -> Any:
    """The tokenizer of a folder, cutting at `longest` tokens and padding nothing.

    Raises:
        InvalidModel: see `microbatch.models.tokenizer_file`; or so few tokens leave none for a text.
    """
    tokenizer = read_tokenizer(folder)
    if longest <= tokenizer.num_special_tokens_to_add(False):
        raise InvalidModel(f"{folder} takes {longest} tokens, which leaves none for a text.", "Check max_seq_length.")
    tokenizer.no_padding()
    tokenizer.enable_truncation(longest)
    return tokenizer


def longest_of(folder: Path, positions: int | None, own: int | None) -> int:
    """Tokens that a text is cut at: the folder's own `own`, else what tokenizer and positions allow.

    Raises:
        InvalidModel: more than the model has positions for.
    """
    told = json_of(folder / "tokenizer_config.json").get("model_max_length")
    limits = [n for n in (positions, told) if isinstance(n, int | float) and 0 < n < UNLIMITED]
    if own is None:
        return int(min(limits)) if limits else 512
    if positions is not None and own > positions:
        raise InvalidModel(f"{folder} asks for {own} tokens; the model has {positions} positions.", "Correct either.")
    return own


def _is_whole(numbers: NDArray[Any]) -> bool:
    kind = numbers.dtype.kind
    return kind in "iu" or (
        kind == "f" and bool(np.isfinite(numbers).all()) and bool((numbers == numbers.round()).all())
    )


def _row(encoding: Any) -> Ids:
    ids = np.array(encoding.ids, dtype=np.int64)
    if not ids.size:
        raise InvalidBatch("The text has no tokens.", "Send a text with words in it.")
    return ids


def _attempt(read: Any, value: Any) -> Any:
    try:
        return read(value)
    except Exception as error:
        return error


def _shown(value: Any) -> str:
    if isinstance(value, int | float | bool) or value is None:
        return repr(value)[:40]
    size = f" of {len(value)}" if isinstance(value, list | str | bytes | dict) else ""
    return f"A {type(value).__name__}{size}"


def padding_of(config: Any) -> int:
    """What padding holds: the model's own token for it, else 0; the mask hides either."""
    found = getattr(config, "pad_token_id", None)
    return found if isinstance(found, int) and found >= 0 else 0
