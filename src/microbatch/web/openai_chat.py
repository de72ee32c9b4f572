"""OpenAI's API for chats, ``POST /v1/chat/completions``: the next message of a conversation.

Requests and answers are those of https://platform.openai.com/docs/api-reference/chat, with the members that vLLM has
beside them; see `microbatch.web.openai_sampling`. What a message says is text and nothing else: no member of it is run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from microbatch.web.openai_answers import Head, ids_of, operation, schema_of_form, usage_document
from microbatch.web.openai_errors import InvalidMember, openai_form
from microbatch.web.openai_logprobs import for_chats, for_prompts
from microbatch.web.openai_models import text_engine_for
from microbatch.web.openai_sampling import Count, Sampled, Top, converted, read, refuse_not_offered, sampling
from microbatch.web.openai_streams import generations, streamed
from microbatch.web.request import Request
from microbatch.web.response import Response, json_response
from microbatch.web.routes import Route
from microbatch.web.text_engine import text_engines

if TYPE_CHECKING:
    from microbatch.llm.results import Completion, Generation, Piece
    from microbatch.web.application import Application

SYSTEM, DEVELOPER = "system", "developer"
"""OpenAI's newer word for a system message; templates know only the older one."""

OF_A_MESSAGE: Mapping[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "reasoning": ("",),
    "reasoning_content": ("",),
    "refusal": ("",),
    "tool_call_id": (),
    "tool_calls": ([],),
}
"""Members of a message that are not offered, as in `NOT_OFFERED`; clients send answers back with all of them null."""
RESERVED = frozenset({"add_generation_prompt", "messages", "self", "tools"})
"""What `chat_template_kwargs` cannot set, since it has members of its own or none."""


class TextPart(msgspec.Struct, forbid_unknown_fields=True):
    """A part of a message; those that are no text are not offered."""

    type: Literal["text"]
    text: str


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """One message of a conversation.

    Attributes:
        role: who says it.
        content: what; null is nothing.
        name: of who says it, for templates that know it.
    """

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart] | None = None
    name: str | None = None

    def for_template(self) -> dict[str, str]:
        """As chat templates read it."""
        role = SYSTEM if self.role == DEVELOPER else self.role
        parts = self.content if isinstance(self.content, list) else [TextPart("text", self.content or "")]
        named = {} if self.name is None else {"name": self.name}
        return {"role": role, "content": "".join(part.text for part in parts), **named}


class ChatRequest(Sampled, kw_only=True):
    """The body of a request.

    Attributes:
        messages: of the conversation; each is a `Message`.
        max_completion_tokens: generated at most; OpenAI's newer word for max_tokens, and wins over it.
        logprobs: tell the probabilities of the tokens.
        top_logprobs: and of so many likely ones at each place.
        add_generation_prompt: end the prompt so that an answer begins.
        chat_template_kwargs: more that the template knows, such as enable_thinking.
    """

    messages: Annotated[list[Any], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Top | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


async def chat(request: Request) -> Response:
    """The next message, or several to choose from."""
    asked = await read(request, ChatRequest)
    name, engine = text_engine_for(request, asked.model)
    if asked.top_logprobs is not None and not asked.logprobs:
        raise InvalidMember("top_logprobs", "top_logprobs is only for logprobs.", "Send logprobs as true with it.")
    params = sampling(
        asked, engine.limits.vocab_size,
        max_tokens=asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens,
        logprobs=(asked.top_logprobs or 0) if asked.logprobs else None, prompt_logprobs=asked.prompt_logprobs,
    )  # fmt: skip
    prompts = [await asyncio.to_thread(engine.chat, _messages(asked.messages), **_arguments(asked))]
    if asked.stream:
        written = _Stream(asked, Head.new("chatcmpl", "chat.completion.chunk", name))
        return await streamed(
            engine, prompts, params, request.options, "messages",
            first=written.first(), write=written.write, last=written.last,
        )  # fmt: skip
    (answer,) = await generations(engine, prompts, params, request.options, "messages")
    choices = [_choice(asked, answer, each) for each in answer.completions]
    more = {"usage": usage_document([answer.usage]), "prompt_logprobs": for_prompts(answer.prompt_logprobs)}
    return json_response(Head.new("chatcmpl", "chat.completion", name).document(choices) | more)


def _messages(given: Sequence[Any]) -> list[dict[str, str]]:
    """Messages as chat templates read them.

    Raises:
        InvalidMember: one that is none, or has in it what is not offered.
    """
    for place, each in enumerate(given):
        if isinstance(each, dict):
            refuse_not_offered(each, OF_A_MESSAGE, f"messages[{place}].")
    return [
        converted(_offered(each), Message, f"messages[{place}].").for_template() for place, each in enumerate(given)
    ]


def _offered(message: Any) -> Any:
    if not isinstance(message, dict):
        return message
    return {name: value for name, value in message.items() if name not in OF_A_MESSAGE}


def _arguments(asked: ChatRequest) -> dict[str, Any]:
    """What the template is told besides the messages.

    Raises:
        InvalidMember: a name that is taken.
    """
    more = asked.chat_template_kwargs or {}
    if taken := sorted(RESERVED & more.keys()):
        raise InvalidMember(
            f"chat_template_kwargs.{taken[0]}", f"chat_template_kwargs cannot set {taken[0]}.", "Leave it out."
        )
    return more | {"add_generation_prompt": asked.add_generation_prompt is not False}


def _choice(asked: ChatRequest, answer: Generation, completion: Completion) -> dict[str, Any]:
    return {
        "index": completion.index,
        "message": {"role": "assistant", "content": completion.text, "refusal": None},
        "logprobs": None if completion.logprobs is None else for_chats(completion.logprobs),
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    } | ids_of(asked, answer.prompt_token_ids, completion.token_ids)


class _Stream:
    """The documents of one streamed answer."""

    def __init__(self, asked: ChatRequest, head: Head) -> None:
        self._asked, self._head = asked, head
        self._usages: list[Any] = []

    def first(self) -> list[dict[str, Any]]:
        """Who speaks, for each of the answers."""
        delta = {"role": "assistant", "content": ""}
        return [
            self._head.chunk([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}], self._asked)
            for index in range(self._asked.n or 1)
        ]

    def write(self, _: int, piece: Piece) -> list[dict[str, Any]]:
        """A piece; one that says nothing yet is left out."""
        asked = self._asked
        if piece.usage is not None:
            self._usages.append(piece.usage)
        if not (piece.text or piece.logprobs or piece.finish_reason or asked.return_token_ids):
            return []
        choice: dict[str, Any] = {
            "index": piece.index,
            "delta": {"content": piece.text} if piece.text else {},
            "logprobs": None if piece.logprobs is None else for_chats(piece.logprobs),
            "finish_reason": piece.finish_reason,
        } | ids_of(asked, piece.prompt_token_ids, piece.token_ids)
        if piece.finish_reason is not None:
            choice["stop_reason"] = piece.stop_reason
        more = {} if piece.prompt_logprobs is None else {"prompt_logprobs": for_prompts(piece.prompt_logprobs)}
        return [self._head.chunk([choice], asked) | more]

    def last(self) -> list[dict[str, Any]]:
        """The tokens counted, where that was asked for."""
        return self._head.closing(self._usages, self._asked)


def _operation(application: Application) -> dict[str, Any] | None:
    engines = text_engines(application.engines)
    if not engines:
        return None
    messages = {"type": "array", "items": schema_of_form(Message), "minItems": 1}
    return operation(
        "createChatCompletion", "The next message of a conversation", ChatRequest, engines, {"messages": messages}
    )


ROUTES = (Route("POST", "/v1/chat/completions", chat, _operation, error_body=openai_form),)
