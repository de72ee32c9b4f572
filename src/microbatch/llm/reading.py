"""From tokens to what is read, on the caller's side: text and probabilities cost the steps nothing. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from microbatch.llm.delivery import Emission
from microbatch.llm.detokenize import Detokenizer
from microbatch.llm.results import Completion, Generation, Piece, TokenLogprob, TopToken, Usage
from microbatch.llm.sequence import Request, hides_last
from microbatch.llm.sequence import Sequence as Answer
from microbatch.llm.tokenizer import Tokenizer

if TYPE_CHECKING:
    from microbatch.llm.sampling import Chosen


class Reader:
    """Makes the pieces of a stream."""

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        """
        Args:
            request: whose stream it is.
            tokenizer: of the engine.
        """
        self._request, self._tokenizer = request, tokenizer
        self._texts = [Detokenizer(tokenizer, request.prompt_ids) for _ in range(request.params.n)]
        self._unfinished = request.params.n
        self._tokens = 0
        self._begun: set[int] = set()

    def piece(self, emission: Emission) -> Piece:
        """What one step added."""
        self._tokens += 1
        self._unfinished -= emission.finish_reason is not None
        request, begins = self._request, emission.index not in self._begun
        self._begun.add(emission.index)
        logprobs = None if emission.chosen is None else (token_logprob(emission.chosen, self._tokenizer),)
        return Piece(
            index=emission.index,
            text=self._text(emission),
            token_ids=(emission.token_id,),
            logprobs=logprobs,
            finish_reason=emission.finish_reason,
            stop_reason=emission.stop_reason,
            usage=usage_of(request, self._tokens) if not self._unfinished else None,
            prompt_logprobs=prompt_logprobs(request, self._tokenizer) if self._tokens == 1 else None,
            prompt_token_ids=request.prompt_ids if begins else None,
        )

    def _text(self, emission: Emission) -> str:
        if emission.text is not None:
            return emission.text
        detokenizer, params = self._texts[emission.index], self._request.params
        hidden = hides_last(params, emission.finish_reason, emission.stop_reason)
        text = "" if hidden else detokenizer.push(emission.token_id)
        return text + detokenizer.finish() if emission.finish_reason is not None else text


def generation_of(request: Request, tokenizer: Tokenizer) -> Generation:
    """All of a request that is finished."""
    completions = tuple(_completion(answer, tokenizer) for answer in request.sequences)
    tokens = sum(len(each.token_ids) for each in completions)
    return Generation(request.prompt_ids, completions, prompt_logprobs(request, tokenizer), usage_of(request, tokens))


def _completion(answer: Answer, tokenizer: Tokenizer) -> Completion:
    wanted = answer.request.params.logprobs is not None
    return Completion(
        index=answer.index,
        text="".join(answer.text) if answer.stop_text is not None else _whole_text(answer, tokenizer),
        token_ids=tuple(answer.output_ids),
        logprobs=tuple(token_logprob(each, tokenizer) for each in answer.scores) if wanted else None,
        finish_reason=answer.finish_reason,
        stop_reason=answer.stop_reason,
    )


def _whole_text(answer: Answer, tokenizer: Tokenizer) -> str:
    hidden = hides_last(answer.request.params, answer.finish_reason, answer.stop_reason)
    detokenizer = Detokenizer(tokenizer, answer.request.prompt_ids)
    shown: Iterable[int] = answer.output_ids[:-1] if hidden else answer.output_ids
    return "".join([detokenizer.push(token_id) for token_id in shown]) + detokenizer.finish()


def usage_of(request: Request, tokens: int) -> Usage:
    """Tokens of a request whose answers have so many together."""
    return Usage(len(request.prompt_ids), tokens, request.cached_tokens or 0)


def prompt_logprobs(request: Request, tokenizer: Tokenizer) -> tuple[TokenLogprob | None, ...] | None:
    """Of the prompt's tokens; None for the first. None altogether where they were not asked for."""
    if request.params.prompt_logprobs is None:
        return None
    return (None, *(token_logprob(each, tokenizer) for each in request.prompt_scores))


def token_logprob(chosen: Chosen, tokenizer: Tokenizer) -> TokenLogprob:
    """A chosen token with its text and bytes, and those of the likeliest."""
    top = tuple(TopToken(*_named(token_id, tokenizer), logprob) for token_id, logprob in chosen.top)
    assert chosen.logprob is not None
    return TokenLogprob(*_named(chosen.token_id, tokenizer), chosen.logprob, top)


def _named(token_id: int, tokenizer: Tokenizer) -> tuple[int, str, bytes]:
    return token_id, tokenizer.token_text(token_id), tokenizer.bytes_of_token(token_id)
