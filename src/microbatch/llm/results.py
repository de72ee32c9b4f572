"""What a caller gets: pieces while they come, or the whole generation. No torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from microbatch.notebook import notebook_form


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request.

    Attributes:
        prompt_tokens: of the prompt, counted once however many completions there are.
        completion_tokens: generated, in all completions together, the end-of-sequence token among them.
        cached_tokens: of the prompt, those whose keys and values were in the cache already.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Of prompt and completions."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class TopToken:
    """One of the most likely tokens at a place: its id, its text, its bytes and the logarithm of its probability."""

    token_id: int
    token: str
    bytes: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token with the logarithm of its probability, natural, before temperature and filters.

    Attributes:
        token_id, token, bytes: the token; its text alone may be part of a character, its bytes never lie.
        logprob: of this token.
        top: the most likely tokens of the place, the likeliest first, as many as were asked for.
    """

    token_id: int
    token: str
    bytes: bytes
    logprob: float
    top: tuple[TopToken, ...] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """What one step added to one completion.

    Attributes:
        index: which of the `n` completions.
        text: that is certain by now; may be empty, while a character or a stop string may still be completed.
        token_ids: the new tokens.
        logprobs: of the new tokens; None where they were not asked for.
        finish_reason: "stop" or "length" with the last piece of a completion, else None.
        stop_reason: the stop string or the stop token id that ended it; None for the model's own end.
        usage: with the last piece of the request.
        prompt_logprobs: with the first piece, where they were asked for; None for the first token of the prompt.
        prompt_token_ids: with the first piece of each completion, as in `Generation`.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    usage: Usage | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    prompt_token_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """One of the `n` answers to a prompt; see `Piece`."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """The answers to one prompt.

    Attributes:
        prompt_token_ids: the prompt, as it was given or made from text.
        completions: in the order of their index.
        prompt_logprobs: where they were asked for; None for the first token, which nothing predicts.
        usage: tokens.
    """

    prompt_token_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None
    usage: Usage

    @property
    def text(self) -> str:
        """Of the first completion."""
        return self.completions[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Of the first completion."""
        return self.completions[0].token_ids

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists and numbers; bytes of tokens as lists of numbers."""
        plain: dict[str, Any] = _plain(asdict(self))
        return plain

    def _repr_html_(self) -> str | None:
        return notebook_form(self)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, bytes | list | tuple):
        return [_plain(each) for each in value]
    return value
