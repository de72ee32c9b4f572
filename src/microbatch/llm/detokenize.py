"""Text from tokens that come one by one. Loads no torch."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from microbatch.llm.tokenizer import Tokenizer

_LONGEST = 4
"""Bytes of a character in UTF-8, so tokens before one that may hold its beginning."""
_LOST = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """The text that each token of an answer adds, in whole characters.

    Bytes of a character whose rest is still to come wait; those that can become none are shown as U+FFFD at once. The
    pieces together are the text of all tokens at once.

    Args:
        tokenizer: whose tokens they are.
        prompt_ids: tokens before the answer: it goes on in the middle of a text, where a word keeps its leading space,
            and may complete a character that the prompt began.
        skip_special: special tokens have no text.
    """

    __slots__ = ("_begun", "_bytes", "_decoder", "_started")

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), skip_special: bool = True) -> None:
        self._bytes = tokenizer.bytes_shown if skip_special else tokenizer.bytes_of_token
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._started = bool(prompt_ids)
        for token_id in prompt_ids[-_LONGEST:]:
            self._decoder.decode(self._bytes(token_id))
        self._begun = bool(self._decoder.getstate()[0])

    def push(self, token_id: int) -> str:
        """The characters that are complete with this token."""
        added = self._bytes(token_id, first=not self._started)
        self._started = self._started or bool(self._bytes(token_id))  # a lone space in front has begun the text, unseen
        return self._shown(self._decoder.decode(added))

    def finish(self) -> str:
        """The rest: U+FFFD where the last character stayed incomplete."""
        return self._shown(self._decoder.decode(b"", final=True))

    def _shown(self, text: str) -> str:
        """Without the U+FFFD of a character that the prompt began and nobody completed."""
        if self._begun and text:
            self._begun = False
            return text.removeprefix(_LOST)
        return text
