"""What the answers of completions and chats have in common: their head, their tokens counted, their description."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from microbatch.web.negotiation import SSE
from microbatch.web.openai_models import no_such_model, success
from microbatch.web.openai_sampling import Sampled
from microbatch.web.predict_operation import PRIORITY_HEADER, TENANT_HEADER

if TYPE_CHECKING:
    from microbatch.llm.results import Usage


@dataclass(frozen=True, slots=True)
class Head:
    """What every document of an answer begins with.

    Attributes:
        id: of the answer.
        object: what OpenAI calls such a document.
        created: in seconds since 1970.
        model: that answered.
    """

    id: str
    object: str
    created: int
    model: str

    @classmethod
    def new(cls, prefix: str, name: str, model: str) -> Head:
        """Of an answer that begins now."""
        return cls(f"{prefix}-{uuid.uuid4().hex}", name, int(time.time()), model)

    def document(self, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """With some answers."""
        head = {"id": self.id, "object": self.object, "created": self.created, "model": self.model}
        return head | {"choices": list(choices)}

    def chunk(self, choices: Sequence[dict[str, Any]], asked: Sampled) -> dict[str, Any]:
        """One event of a stream; where the last one has the tokens counted, the others say that they have not."""
        return self.document(choices) | ({"usage": None} if _counts(asked) else {})

    def closing(self, usages: Iterable[Usage], asked: Sampled) -> list[dict[str, Any]]:
        """The last event of a stream, where it was asked for."""
        return [self.document(()) | {"usage": usage_document(usages)}] if _counts(asked) else []


def _counts(asked: Sampled) -> bool:
    return asked.stream_options is not None and asked.stream_options.include_usage


def usage_document(usages: Iterable[Usage]) -> dict[str, Any]:
    """Tokens of all prompts of a request together."""
    each = list(usages)
    prompt, completion = sum(one.prompt_tokens for one in each), sum(one.completion_tokens for one in each)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(one.cached_tokens for one in each)},
    }


def ids_of(asked: Sampled, prompt: Sequence[int] | None, answer: Sequence[int]) -> dict[str, Any]:
    """Token ids of a choice, where they are wanted; None for a prompt that an earlier piece told."""
    if not asked.return_token_ids:
        return {}
    told = {} if prompt is None else {"prompt_token_ids": list(prompt)}
    return told | {"token_ids": list(answer)}


def operation(
    identity: str,
    summary: str,
    form: type[Sampled],
    engines: Iterable[str],
    members: Mapping[str, Any],
) -> dict[str, Any]:
    """The OpenAPI operation of a route.

    Args:
        identity, summary: of the operation.
        form: of the body.
        engines: names that may be asked for.
        members: schemas that say more than the form does.
    """
    schema = schema_of_form(form)
    schema["properties"] |= {"model": {"type": "string", "enum": list(engines)}, **members}
    answer = {
        "id": {"type": "string"},
        "object": {"type": "string"},
        "created": {"type": "integer"},
        "model": {"type": "string"},
        "choices": {"type": "array", "items": {"type": "object", "required": ["index", "finish_reason"]}},
        "usage": {"type": "object", "required": ["prompt_tokens", "completion_tokens", "total_tokens"]},
    }
    found = success("The answers; as a stream, parts of them as server-sent events.", answer)
    found["content"][SSE] = {"schema": {}}
    return {
        "summary": summary,
        "operationId": identity,
        "parameters": [PRIORITY_HEADER, TENANT_HEADER],
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {"200": found, "404": no_such_model("text")},
    }


def schema_of_form(form: type[msgspec.Struct]) -> dict[str, Any]:
    """The JSON Schema of a struct, all in one piece."""
    schema: dict[str, Any] = _inlined(msgspec.json.schema(form))
    return schema


def _inlined(schema: Any, known: Mapping[str, Any] | None = None) -> Any:
    """A JSON Schema without references: each is used once."""
    if isinstance(schema, list):
        return [_inlined(each, known) for each in schema]
    if not isinstance(schema, dict):
        return schema
    known = schema.get("$defs", known)
    if "$ref" in schema:
        assert known is not None
        return _inlined(known[schema["$ref"].rpartition("/")[2]], known)
    return {name: _inlined(value, known) for name, value in schema.items() if name not in ("$defs", "title")}
