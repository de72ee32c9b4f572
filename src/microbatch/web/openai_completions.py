"""OpenAI's API for completions, ``POST /v1/completions``: text that goes on from a prompt.

Requests and answers are those of https://platform.openai.com/docs/api-reference/completions, with the members that
vLLM has beside them; see `microbatch.web.openai_sampling`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from microbatch.web.openai_answers import Head, ids_of, operation, usage_document
from microbatch.web.openai_errors import InvalidMember, openai_form
from microbatch.web.openai_inputs import schema_of, values_of
from microbatch.web.openai_logprobs import for_completions, for_prompts
from microbatch.web.openai_models import text_engine_for
from microbatch.web.openai_sampling import Sampled, Top, read, sampling, whole
from microbatch.web.openai_streams import Prompt, generations, streamed
from microbatch.web.request import Request
from microbatch.web.response import Response, json_response
from microbatch.web.routes import Route
from microbatch.web.text_engine import TextEngine, text_engines

if TYPE_CHECKING:
    from microbatch.llm.results import Completion, Generation, Piece, TokenLogprob
    from microbatch.web.application import Application

MAX_TOKENS = 16
"""Generated where a request does not say, as OpenAI has it."""


class CompletionRequest(Sampled, kw_only=True):
    """The body of a request.

    Attributes:
        prompt: a text, texts, token ids, or lists of token ids.
        echo: the answer begins with the prompt.
        logprobs: so many likely tokens at each place, and the one that was chosen.
    """

    prompt: str | list[Any]
    echo: bool | None = None
    logprobs: Top | None = None

    @property
    def scored(self) -> int | None:
        """Likely tokens to tell of the prompt: with an echo those of the answer."""
        return self.logprobs if self.prompt_logprobs is None and self.echo else self.prompt_logprobs


async def completions(request: Request) -> Response:
    """Answers to each prompt."""
    asked = await read(request, CompletionRequest)
    name, engine = text_engine_for(request, asked.model)
    prompts = _prompts(asked.prompt)
    params = sampling(
        asked, engine.limits.vocab_size, max_tokens=MAX_TOKENS if asked.max_tokens is None else asked.max_tokens,
        logprobs=asked.logprobs, prompt_logprobs=asked.scored,
    )  # fmt: skip
    head = Head.new("cmpl", "text_completion", name)
    if asked.stream:
        written = _Stream(asked, head, engine, prompts)
        return await streamed(
            engine, prompts, params, request.options, "prompt", first=(), write=written.write, last=written.last
        )
    answers = await generations(engine, prompts, params, request.options, "prompt")
    choices = [
        choice for place, answer in enumerate(answers) for choice in _choices(asked, engine, prompts, place, answer)
    ]
    return json_response(head.document(choices) | {"usage": usage_document(answer.usage for answer in answers)})


def _prompts(given: str | list[Any]) -> list[Prompt]:
    """Texts, or lists of token ids, whose range the engine checks.

    Raises:
        InvalidMember: neither.
    """
    return [value if isinstance(value, str) else _ids(value) for value in values_of(given, "prompt")]


def _ids(given: Sequence[Any]) -> list[int]:
    ids = [whole(each) for each in given]
    if any(type(each) is not int for each in ids):
        raise InvalidMember("prompt", "A list in the prompt holds what is no token id.", "Send whole numbers.")
    return ids


def _choices(
    asked: CompletionRequest, engine: TextEngine, prompts: Sequence[Prompt], place: int, answer: Generation
) -> Iterator[dict[str, Any]]:
    """The answers to one prompt."""
    echo = _echoed(engine, prompts[place]) if asked.echo else ""
    for each in answer.completions:
        yield {
            "index": place * len(answer.completions) + each.index,
            "text": echo + each.text,
            "logprobs": _logprobs(asked, engine, answer, each),
            "finish_reason": each.finish_reason,
            "stop_reason": each.stop_reason,
            "prompt_logprobs": for_prompts(answer.prompt_logprobs if asked.prompt_logprobs is not None else None),
        } | ids_of(asked, answer.prompt_token_ids, each.token_ids)  # fmt: skip


def _logprobs(
    asked: CompletionRequest, engine: TextEngine, answer: Generation, completion: Completion
) -> dict[str, Any] | None:
    if asked.logprobs is None:
        return None
    tokens: list[TokenLogprob | None] = [*(completion.logprobs or ())]
    if not asked.echo:
        return for_completions(tokens)
    first = engine.tokenizer.token_text(answer.prompt_token_ids[0])
    return for_completions([*(answer.prompt_logprobs or ()), *tokens], first=first)


def _echoed(engine: TextEngine, prompt: Prompt) -> str:
    return prompt if isinstance(prompt, str) else engine.tokenizer.text_of(prompt, skip_special=False)


class _Stream:
    """The documents of one streamed answer.

    Characters are counted for each of its choices, since OpenAI's log-probabilities say where in the text they are.
    """

    def __init__(self, asked: CompletionRequest, head: Head, engine: TextEngine, prompts: Sequence[Prompt]) -> None:
        if asked.echo and asked.logprobs is not None:
            raise InvalidMember(
                "echo", "echo with logprobs is not offered for a stream.", "Leave one of the three out."
            )
        self._asked, self._head, self._engine, self._prompts = asked, head, engine, prompts
        self._offsets: dict[int, int] = {}
        self._usages: dict[int, Any] = {}

    def write(self, place: int, piece: Piece) -> list[dict[str, Any]]:
        """A piece; one that says nothing yet is left out."""
        asked, echo = self._asked, ""
        index = place * (asked.n or 1) + piece.index
        if piece.usage is not None:
            self._usages[place] = piece.usage
        first = index not in self._offsets
        if first:
            echo = _echoed(self._engine, self._prompts[place]) if asked.echo else ""
            self._offsets[index] = len(echo)
        logprobs = None
        if piece.logprobs is not None:
            logprobs = for_completions(piece.logprobs, self._offsets[index])
        self._offsets[index] += len(piece.text)
        if not (echo or piece.text or piece.logprobs or piece.finish_reason or asked.return_token_ids):
            return []
        choice: dict[str, Any] = {
            "index": index, "text": echo + piece.text, "logprobs": logprobs, "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }  # fmt: skip
        if piece.prompt_logprobs is not None:
            choice["prompt_logprobs"] = for_prompts(piece.prompt_logprobs)
        return [self._head.chunk([choice | ids_of(asked, piece.prompt_token_ids, piece.token_ids)], asked)]

    def last(self) -> list[dict[str, Any]]:
        """The tokens counted, where that was asked for."""
        return self._head.closing(list(self._usages.values()), self._asked)


def _operation(application: Application) -> dict[str, Any] | None:
    engines = text_engines(application.engines)
    if not engines:
        return None
    vocabulary = min(engine.limits.vocab_size for engine in engines.values())
    token = {"type": "integer", "minimum": 0, "maximum": vocabulary - 1}
    prompt = schema_of({"type": "array", "items": token, "minItems": 1})
    return operation(
        "createCompletion", "Text that goes on from a prompt", CompletionRequest, engines, {"prompt": prompt}
    )


ROUTES = (Route("POST", "/v1/completions", completions, _operation, error_body=openai_form),)
