"""How one request wants its tokens chosen. Plain data, checked when it is made; loads no torch.

The words and their meanings are those of OpenAI's API and of vLLM::

    repetition_penalty r   logit / r where it is positive, logit × r else, once for every token of prompt and output
    frequency_penalty f    logit − f × (times the token stands in the output)
    presence_penalty p     logit − p where the token stands in the output
    temperature t          softmax(logits / t); 0 takes the largest logit
    min_p                  only tokens with at least min_p times the probability of the likeliest
    top_k                  only the k likeliest; those that tie with the last of them stay
    top_p                  only the fewest likeliest tokens that hold top_p of what is left; ties stay, too

in this order. `logit_bias` is added first; `logits_processors` are called before temperature.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from microbatch.errors import InvalidRequest

if TYPE_CHECKING:
    from torch import Tensor

    LogitsProcessor = Callable[[Sequence[int], Tensor], Tensor]
    """``f(ids of prompt and output, logits [vocabulary]) -> logits [vocabulary]``."""

MOST_LOGPROBS = 1000
"""Top tokens per position at most: each one is a line of the answer."""
LONGEST_STOP = 1000
"""Characters of a stop string: the end of the text is held against each of its beginnings at every token."""
MOST_ANSWERS = 128
"""To one prompt, as OpenAI has it: they run side by side."""
MOST_STOPS = 64
"""Stop strings, and stop tokens, at most: each is looked for at every token."""


@dataclass(frozen=True, slots=True)
class _Range:
    """What a number may be.

    Attributes:
        low, high: the bounds, both allowed unless `above`.
        whole: whether it must be an integer.
        above: `low` itself is refused.
        optional: None is allowed.
        remedy: the sentence that says what is meant.
    """

    low: float
    high: float
    remedy: str
    whole: bool = False
    above: bool = False
    optional: bool = False

    def allows(self, value: object) -> bool:
        """Whether `value` is such a number; booleans and NaN are none."""
        if value is None:
            return self.optional
        if isinstance(value, bool) or not isinstance(value, int if self.whole else int | float):
            return False
        return (self.low < value if self.above else self.low <= value) and value <= self.high


_FINITE = 1e30
"""What logits are divided by or added to: well within fp32, in which tokens are chosen."""
_RANGES: dict[str, _Range] = {
    "max_tokens": _Range(1, math.inf, "Give 1 or more, or None for as many as fit.", whole=True, optional=True),
    "min_tokens": _Range(0, math.inf, "Give 0 or more.", whole=True),
    "temperature": _Range(0, _FINITE, "Give 0 (the likeliest token) or more."),
    "top_p": _Range(0, 1, "Give more than 0 and at most 1; 1 keeps every token.", above=True),
    "top_k": _Range(0, math.inf, "Give 0 (every token) or more.", whole=True),
    "min_p": _Range(0, 1, "Give 0 (every token) to 1."),
    "repetition_penalty": _Range(1e-6, 1e6, "Give 0.000001 to 1,000,000; 1 changes nothing."),
    "presence_penalty": _Range(-2, 2, "Give -2 to 2, as OpenAI's API does."),
    "frequency_penalty": _Range(-2, 2, "Give -2 to 2, as OpenAI's API does."),
    "seed": _Range(-math.inf, math.inf, "Give a whole number, or None for one of the engine's.", True, optional=True),
    "n": _Range(1, MOST_ANSWERS, f"Give 1 to {MOST_ANSWERS}.", whole=True),
    "logprobs": _Range(0, MOST_LOGPROBS, f"Give 0 to {MOST_LOGPROBS}, or None for none.", True, optional=True),
    "prompt_logprobs": _Range(0, MOST_LOGPROBS, f"Give 0 to {MOST_LOGPROBS}, or None for none.", True, optional=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen, and when a sequence ends.

    Attributes:
        max_tokens: of the output at most; None: until the model's context is full.
        min_tokens: before so many neither the end of the text nor one of `stop_token_ids` is chosen.
        temperature: 0 takes the likeliest token; 1 the model's own distribution.
        top_p, top_k, min_p: which tokens may be chosen at all; see the head of this module.
        repetition_penalty, presence_penalty, frequency_penalty: as in the head of this module.
        logit_bias: what is added to the logits of some token ids; ``-100`` and less bans one.
        seed: the same seed, prompt and model give the same tokens, whatever else the engine runs.
        n: how many answers to the prompt.
        logprobs: how many of the likeliest tokens are told beside each chosen one; 0: only the chosen one.
        prompt_logprobs: the same for the tokens of the prompt.
        stop: texts before which the output ends; they may begin inside one token and end inside another.
        stop_token_ids: tokens that end the output.
        include_stop_in_output: whether the text or token that ended the output is part of it.
        ignore_eos: whether the model's own end of text is an ordinary token.
        logits_processors: functions of the ids so far (prompt and output) and the logits of the next token, called in
            order after bias and penalties and before temperature; each gives the logits that count.

    Raises:
        InvalidRequest: a value that is none of these, with the value and what is allowed.

    >>> SamplingParams(temperature=0.8, top_p=0.95, seed=7).max_tokens
    16
    """

    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_in_output: bool = False
    ignore_eos: bool = False
    logits_processors: tuple[LogitsProcessor, ...] = ()

    def __post_init__(self) -> None:
        for name, allowed in _RANGES.items():
            if not allowed.allows(getattr(self, name)):
                raise InvalidRequest(f"{name} is {getattr(self, name)!r}.", allowed.remedy)
        for name in ("include_stop_in_output", "ignore_eos"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(f"{name} is {getattr(self, name)!r}.", "Give true or false.")
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))
        object.__setattr__(self, "stop", _checked_stops(self.stop))
        object.__setattr__(self, "stop_token_ids", _checked_stop_ids(self.stop_token_ids))
        object.__setattr__(self, "logits_processors", _checked_processors(self.logits_processors))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens is {self.min_tokens} and max_tokens {self.max_tokens}.", "Lower min_tokens."
            )

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken, so that nothing is drawn."""
        return self.temperature == 0

    @property
    def edits_logits(self) -> bool:
        """Whether the model's logits are changed before a token is chosen; `min_tokens` is not asked here."""
        return bool(
            self.logit_bias
            or self.logits_processors
            or self.repetition_penalty != 1
            or self.presence_penalty
            or self.frequency_penalty
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data; a processor is told by its name."""
        values = {part.name: getattr(self, part.name) for part in fields(self)}
        values["logit_bias"] = {str(key): value for key, value in self.logit_bias.items()}
        values["stop"], values["stop_token_ids"] = list(self.stop), list(self.stop_token_ids)
        values["logits_processors"] = [getattr(f, "__qualname__", type(f).__name__) for f in self.logits_processors]
        return values


def check_token_ids(ids: Iterable[int], vocab_size: int, what: str) -> None:
    """Refuses ids that the model has no token for.

    Args:
        what: they are, as the error calls them: "prompt", "logit_bias".

    Raises:
        InvalidRequest: naming the first that is no whole number from 0 to below `vocab_size`.
    """
    for place, token_id in enumerate(ids):
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise InvalidRequest(
                f"{what}: item {place} is {token_id!r:.60}, not a token id.", "Give whole numbers, or the text itself."
            )
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"{what}: the token id {token_id} (item {place}) is outside the vocabulary of {vocab_size} tokens.",
                f"Ids go from 0 to {vocab_size - 1}: was the text tokenised for another model?",
            )


def check_params(params: SamplingParams, vocab_size: int) -> None:
    """Refuses parameters that name tokens the model does not have.

    Raises:
        InvalidRequest: an id of `logit_bias` or `stop_token_ids` is outside the vocabulary.
    """
    check_token_ids(params.logit_bias, vocab_size, "logit_bias")
    check_token_ids(params.stop_token_ids, vocab_size, "stop_token_ids")


def _checked_bias(bias: object) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise InvalidRequest(f"logit_bias is {bias!r:.60}.", "Give a mapping of token ids to numbers: {50256: -100}.")
    for token_id, value in bias.items():
        right = not isinstance(token_id, bool) and isinstance(token_id, int) and token_id >= 0
        if not right or isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _FINITE:
            raise InvalidRequest(
                f"logit_bias has {token_id!r:.60}: {value!r:.60}.", "Map token ids, 0 or more, to finite numbers."
            )
    return {token_id: float(value) for token_id, value in bias.items()}


def _checked_stops(stop: object) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stops, Sequence) or not all(isinstance(text, str) and text for text in stops):
        raise InvalidRequest(f"stop is {stop!r:.100}.", "Give texts that are not empty.")
    if longest := max([len(text) for text in stops if len(text) > LONGEST_STOP], default=0):
        raise InvalidRequest(f"stop has a text of {longest} characters.", f"Give {LONGEST_STOP} at most.")
    return tuple(_few(stops, "stop"))


def _checked_stop_ids(ids: object) -> tuple[int, ...]:
    right = isinstance(ids, Sequence) and not isinstance(ids, str)
    if not right or not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):  # type: ignore[attr-defined]
        raise InvalidRequest(f"stop_token_ids is {ids!r:.100}.", "Give token ids, 0 or more.")
    return tuple(_few(ids, "stop_token_ids"))  # type: ignore[arg-type]


def _few(values: Sequence[Any], name: str) -> Sequence[Any]:
    if len(values) > MOST_STOPS:
        raise InvalidRequest(f"{name} has {len(values)} entries.", f"Give {MOST_STOPS} at most.")
    return values


def _checked_processors(processors: object) -> tuple[LogitsProcessor, ...]:
    if not isinstance(processors, Sequence) or not all(callable(f) for f in processors):
        raise InvalidRequest(
            f"logits_processors is {processors!r:.100}.",
            "Give a tuple of functions of (ids, logits).",
        )
    return tuple(processors)
