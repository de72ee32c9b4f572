"""A request under way and its sequences: what is known of each, and when one ends. No torch, no clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from microbatch.llm.kv_blocks import Found
from microbatch.llm.sampling import Choosing, answer_seed
from microbatch.llm.scheduler import SequenceView

if TYPE_CHECKING:
    from microbatch.llm.delivery import Reply
    from microbatch.llm.detokenize import Detokenizer
    from microbatch.llm.sampling import Chosen
    from microbatch.llm.sampling_params import SamplingParams
    from microbatch.llm.stop import StopFilter

STOP, LENGTH = "stop", "length"
"""Finish reasons."""


@dataclass(slots=True, eq=False)
class Request:
    """One prompt and the answers to it.

    Attributes:
        prompt_ids: tokens of the prompt.
        params: how to choose tokens.
        max_tokens: most tokens of an answer, within the context.
        ends: ids that end an answer: the model's own, unless they are to be ignored.
        seed: of the request; each answer's own follows from it and its index.
        reply: who is told.
        arrived, deadline: by the engine's clock; no deadline is infinity.
        priority: larger goes first.
        tenant: whose it is.
        sequences: its answers; those after the first come when the prompt has been computed.
        cached_tokens: of the prompt, found in the cache when it was first opened; None before.
        prompt_scores: of the prompt's tokens from the second on, where they were asked for.
        settled: whether it has been answered, or nobody wants the answer.
    """

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    ends: frozenset[int]
    seed: int
    reply: Reply
    arrived: float
    deadline: float
    priority: int = 0
    tenant: str = ""
    sequences: list[Sequence] = field(default_factory=list)
    cached_tokens: int | None = None
    prompt_scores: list[Chosen] = field(default_factory=list)
    settled: bool = False

    @property
    def finished(self) -> bool:
        """Whether every answer is complete."""
        return len(self.sequences) == self.params.n and all(each.finish_reason for each in self.sequences)

    @property
    def scores_wanted(self) -> bool:
        """Whether there are tokens of the prompt whose probabilities are still to be computed."""
        return self.params.prompt_logprobs is not None and len(self.prompt_scores) < len(self.prompt_ids) - 1


@dataclass(slots=True)
class StopText:
    """The text of a sequence that may end at a stop string: such text is made as the tokens come."""

    detokenizer: Detokenizer
    filter: StopFilter

    def push(self, token_id: int, *, early: bool) -> tuple[str, str | None]:
        """Text that is certain by now, and the stop string that ends it, if one does; `early` is too soon to end."""
        text = self.detokenizer.push(token_id)
        return (text, None) if early else self.filter.push(text)

    def finish(self) -> tuple[str, str | None]:
        """The rest; it may hold a stop string as well."""
        text, matched = self.filter.push(self.detokenizer.finish())
        return (text, matched) if matched is not None else (text + self.filter.finish(), None)


class Sequence:
    """One answer under way.

    Attributes:
        key: in the pool and for the scheduler.
        index: which of the `n` answers.
        ids: of the prompt and the answer so far.
        output_ids: of the answer alone.
        scores: what was chosen, where probabilities are wanted.
        computed: tokens whose keys and values are in the cache.
        committed: blocks of them that others can find.
        found: what the prefix cache would give, while it waits.
        opened: whether it has a table of blocks.
        text: released so far, where stop strings are looked for; else the reader makes it from the tokens.
        first_at, last_at: when its first and its last token came; None before.
        started_at: when it was first computed.
    """

    __slots__ = (
        "choosing", "committed", "computed", "finish_reason", "first_at", "found", "ids", "index", "key", "last_at",
        "opened", "output_ids", "preempted", "request", "scores", "skipped", "started_at", "stop_reason", "stop_text",
        "text", "view",
    )  # fmt: skip

    def __init__(self, key: int, index: int, request: Request, stop_text: StopText | None) -> None:
        self.key, self.index, self.request, self.stop_text = key, index, request, stop_text
        self.ids: list[int] = list(request.prompt_ids)
        self.output_ids: list[int] = []
        self.scores: list[Chosen] = []
        self.text: list[str] = []
        self.computed = self.committed = self.skipped = self.preempted = 0
        self.found = Found(0, 0)
        self.opened = False
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.started_at: float | None = None
        self.first_at: float | None = None
        self.last_at: float | None = None
        suppressed = tuple({*request.ends, *request.params.stop_token_ids}) if request.params.min_tokens else ()
        self.choosing = Choosing(
            params=request.params, prompt_ids=request.prompt_ids, output_ids=self.output_ids,
            seed=answer_seed(request.seed, index), allowed_eos=suppressed,
        )  # fmt: skip
        self.view: SequenceView | None = None

    def add(self, chosen: Chosen) -> str:
        """One more token; the text that is certain now, where it is made here. `finish_reason` says whether it ends."""
        token_id = chosen.token_id
        self.ids.append(token_id)
        self.output_ids.append(token_id)
        if self.request.params.logprobs is not None:
            self.scores.append(chosen)
        self._end_by_token(token_id)
        text = "" if self.stop_text is None else self._more_text(token_id)
        if self.finish_reason is None and len(self.output_ids) >= self.request.max_tokens:
            self.finish_reason = LENGTH
            if self.stop_text is not None:
                text += self._last_text()
        if text:
            self.text.append(text)
        return text

    def _end_by_token(self, token_id: int) -> None:
        request = self.request
        if len(self.output_ids) <= request.params.min_tokens:
            return
        if token_id in request.ends:
            self.finish_reason = STOP
        elif token_id in request.params.stop_token_ids:
            self.finish_reason, self.stop_reason = STOP, token_id

    def _more_text(self, token_id: int) -> str:
        assert self.stop_text is not None
        if hides_last(self.request.params, self.finish_reason, self.stop_reason):
            return self._last_text()
        early = len(self.output_ids) <= self.request.params.min_tokens
        text, matched = self.stop_text.push(token_id, early=early)
        if matched is not None:
            self.finish_reason, self.stop_reason = STOP, matched
        elif self.finish_reason is not None:
            text += self._last_text()
        return text

    def _last_text(self) -> str:
        assert self.stop_text is not None
        text, matched = self.stop_text.finish()
        if matched is not None:
            self.finish_reason, self.stop_reason = STOP, matched
        return text


def hides_last(params: SamplingParams, finish_reason: str | None, stop_reason: str | int | None) -> bool:
    """Whether the text leaves out the last token: the one that ended it, unless it is a stop token to be shown."""
    if finish_reason != STOP or isinstance(stop_reason, str):
        return False
    return stop_reason is None or not params.include_stop_in_output
