"""A prompt as token ids, checked. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from microbatch.errors import InvalidRequest
from microbatch.llm.sampling_params import check_token_ids
from microbatch.llm.tokenizer import Tokenizer

_REMEDY = "Give text, or a list of token ids."


def prompt_ids(prompt: str | Sequence[int], tokenizer: Tokenizer, vocab_size: int) -> tuple[int, ...]:
    """Token ids of a text, or those given.

    Args:
        prompt: text or token ids.
        tokenizer: of the model.
        vocab_size: of the model, which may have more ids than its tokenizer.

    Raises:
        InvalidRequest: an empty prompt, ids outside the vocabulary, or neither text nor ids.
    """
    ids: Sequence[int] = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    if not isinstance(ids, Sequence) or isinstance(ids, bytes | bytearray):
        raise InvalidRequest(f"A prompt of type {type(prompt).__name__} cannot be read.", _REMEDY)
    if not len(ids):
        raise InvalidRequest("The prompt is empty.", _REMEDY)
    check_token_ids(ids, vocab_size, "prompt")
    return tuple(ids)
