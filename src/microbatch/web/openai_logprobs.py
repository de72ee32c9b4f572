"""Probabilities of tokens as OpenAI's API writes them: one form for completions, another one for chats."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from microbatch.llm.results import TokenLogprob, TopToken

LEAST = -9999.0
"""What stands for the logarithm of nothing, which JSON has no word for; vLLM writes the same."""


def for_completions(tokens: Iterable[TokenLogprob | None], offset: int = 0, first: str = "") -> dict[str, list[Any]]:
    """The four lists of a completion; see https://platform.openai.com/docs/api-reference/completions/object.

    Args:
        tokens: in order; None for the first one of a prompt, which nothing predicts.
        offset: characters of text before them.
        first: the text of that first one.
    """
    found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token in tokens:
        found["tokens"].append(first if token is None else written(token))
        found["token_logprobs"].append(None if token is None else _finite(token.logprob))
        found["top_logprobs"].append(None if token is None else _likely(token))
        found["text_offset"].append(offset)
        offset += len(first if token is None else token.token)
    return found


def _likely(token: TokenLogprob) -> dict[str, float]:
    """The most likely ones and the one that was chosen, the likeliest of each text."""
    likely: dict[str, float] = {}
    every: list[TokenLogprob | TopToken] = [*token.top, token]
    for each in every:
        likely.setdefault(written(each), _finite(each.logprob))
    return likely


def for_chats(tokens: Iterable[TokenLogprob]) -> dict[str, Any]:
    """The list of a chat; see https://platform.openai.com/docs/api-reference/chat/object."""
    content = [_in_chat(token) | {"top_logprobs": [_in_chat(each) for each in token.top]} for token in tokens]
    return {"content": content, "refusal": None}


def for_prompts(tokens: Sequence[TokenLogprob | None] | None) -> list[dict[str, Any] | None] | None:
    """Of the prompt's tokens, as vLLM writes them: by token id, with rank where it is known."""
    if tokens is None:
        return None
    return [None if token is None else _by_id(token) for token in tokens]


def _by_id(token: TokenLogprob) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {
        str(each.token_id): {"logprob": _finite(each.logprob), "rank": rank, "decoded_token": each.token}
        for rank, each in enumerate(token.top, 1)
    }
    own = {"logprob": _finite(token.logprob), "rank": None, "decoded_token": token.token}
    return {str(token.token_id): own} | found


def written(token: TokenLogprob | TopToken) -> str:
    """The text of a token; its bytes where it is only a part of a character, as OpenAI writes them."""
    if token.token and "\N{REPLACEMENT CHARACTER}" not in token.token:
        return token.token
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.bytes) if token.bytes else token.token


def _in_chat(token: TokenLogprob | TopToken) -> dict[str, Any]:
    return {"token": token.token, "logprob": _finite(token.logprob), "bytes": list(token.bytes)}


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)
