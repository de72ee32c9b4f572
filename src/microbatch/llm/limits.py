"""What an engine keeps to. No torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What an engine keeps to.

    Attributes:
        vocab_size: token ids of the model.
        context: most tokens of prompt and answer together.
        num_blocks, block_size: of the cache.
        max_num_sequences, max_num_tokens: most of a step.
        notes: where these come from, one sentence each.
    """

    vocab_size: int
    context: int
    num_blocks: int
    block_size: int
    max_num_sequences: int
    max_num_tokens: int
    notes: tuple[str, ...]

    def most_tokens(self, prompt_tokens: int) -> int:
        """Of an answer to a prompt of that length; at least 1. The last token of all needs no place in the cache."""
        return max(1, min(self.context, self.num_blocks * self.block_size + 1) - prompt_tokens)

    def to_json(self) -> dict[str, Any]:
        """Plain numbers and texts."""
        return asdict(self)
