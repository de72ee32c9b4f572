"""OpenAI's API for embeddings: ``POST /v1/embeddings`` and ``GET /v1/models``, over engines that answer with vectors.

Requests and answers are those of https://platform.openai.com/docs/api-reference/embeddings; its Python client works
with ``base_url="http://127.0.0.1:8000/v1"``.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from microbatch.errors import InvalidOutput, InvalidRequest, UserError
from microbatch.web.engine import submit_many
from microbatch.web.request import Request
from microbatch.web.response import Response, json_response
from microbatch.web.routes import Route
from microbatch.web.statuses import Answer

if TYPE_CHECKING:
    from microbatch.web.application import Application

Vectors = NDArray[np.float32]

CODES = {401: "invalid_api_key", 404: "model_not_found", 429: "rate_limit_exceeded"}
"""OpenAI's words for some statuses; others have none."""

STARTED = int(time.time())
"""What OpenAI calls the time when a model was made."""


class EmbeddingRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a request.

    Attributes:
        input: a text, texts, token ids, or lists of token ids.
        model: the name of an engine.
        encoding_format: how vectors are written: numbers, or the bytes of little-endian float32 in base64.
        dimensions: keep only the first so many numbers of a vector, made of length 1 again.
        user: of the client; not used.
    """

    input: str | list[Any]
    model: str
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | float | None = None
    user: str | None = None


async def embeddings(request: Request) -> Response:
    """A vector for each input, or the error of the first one that has none."""
    asked = await request.json(EmbeddingRequest)
    name, engine = _engine(request, asked.model)
    dimensions = _dimensions(asked.dimensions, engine.embedding.dimensions)
    rows = _checked(await engine.read(_values(asked.input)))
    results = _checked(await submit_many(engine, rows, request.options))
    vectors = cut(_stacked(results), dimensions)
    tokens = sum(len(row) for row in rows)
    return json_response({
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": vector}
            for index, vector in enumerate(_written(vectors, asked.encoding_format))
        ],
        "model": name,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    })  # fmt: skip


async def models(request: Request) -> Response:
    """The engines that this API can be asked for."""
    return json_response({"object": "list", "data": [_model(name) for name in _names(request.application)]})


async def model(request: Request) -> Response:
    """One of them."""
    name, _ = _engine(request, request.parameters["model"])
    return json_response(_model(name))


def cut(vectors: Vectors, dimensions: int | None) -> Vectors:
    """The first so many numbers of each vector (rows, dimensions), at length 1; as they are where nothing is cut."""
    if dimensions is None or dimensions == vectors.shape[1]:
        return vectors
    shorter = vectors[:, :dimensions]
    lengths = np.linalg.norm(shorter, axis=1, keepdims=True)
    return np.asarray(shorter / np.where(lengths == 0, 1, lengths), dtype=np.float32)


def openai_form(answer: Answer) -> dict[str, dict[str, Any]]:
    """The document of an error, as OpenAI's clients read it."""
    kind = "invalid_request_error" if answer.status < 500 and answer.status != 429 else "server_error"
    message = f"{answer.message} {answer.remedy}".strip()
    if answer.status == 429:
        kind = "requests"
    return {"error": {"message": message, "type": kind, "param": None, "code": CODES.get(answer.status)}}


def _engine(request: Request, asked: str) -> tuple[str, Any]:
    """An engine whose answers are vectors of texts, with its name.

    Raises:
        InvalidRequest: there is none of that name, or it gives no vectors (404).
    """
    name, engine = request.engine(asked)
    if getattr(engine, "embedding", None) is None:
        others = _names(request.application)
        remedy = f"Name one of {', '.join(others)}." if others else f"Ask POST /predict/{name}."
        raise InvalidRequest(f"{name!r} gives no embeddings of texts.", remedy, status=404)
    return name, engine


def _dimensions(asked: float | None, most: int) -> int | None:
    """As many numbers of a vector as are asked for; 8.0 is as good as 8 in JSON.

    Raises:
        InvalidRequest: a vector has not so many.
    """
    if asked is None:
        return None
    if not 1 <= asked <= most or asked != int(asked):
        raise InvalidRequest(f"A vector has {most} dimensions, not {asked}.", f"Ask for 1 to {most}.")
    return int(asked)


def _names(application: Application) -> list[str]:
    return [name for name, engine in application.engines.items() if getattr(engine, "embedding", None) is not None]


def _values(given: str | list[Any]) -> list[Any]:
    """One value for each vector: a text or a list of token ids.

    Raises:
        InvalidRequest: neither.
    """
    if isinstance(given, str):
        return [given]
    if not given:
        raise InvalidRequest("The input is an empty list.", "Send a text, or several.")
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in given):
        return [given]
    if all(isinstance(value, str) for value in given) or all(isinstance(value, list) for value in given):
        return given
    raise InvalidRequest(
        "The input is neither a text, nor texts, nor token ids, nor lists of token ids.", "Send one of them, unmixed."
    )


def _checked(results: Sequence[Any]) -> Sequence[Any]:
    """The results, if there is no error among them: this API has no answer for a part of a request.

    Raises:
        Exception: the first one, with its place where several were sent.
    """
    for place, result in enumerate(results):
        if isinstance(result, UserError) and len(results) > 1:
            raise type(result)(f"input[{place}]: {result.message}", result.remedy) from result
        if isinstance(result, BaseException):
            raise result
    return results


def _stacked(results: Sequence[Any]) -> Vectors:
    """Rows (requests, dimensions) in float32.

    Raises:
        InvalidOutput: a number in them is none, which JSON has no word for.
    """
    vectors = np.stack([np.asarray(result, dtype=np.float32) for result in results])
    if not np.isfinite(vectors).all():
        raise InvalidOutput("The model gave a number that is not finite.", "Load it in another dtype.")
    return vectors


def _written(vectors: Vectors, form: str) -> list[Any]:
    if form == "float":
        return list(vectors.tolist())
    return [base64.b64encode(vector.tobytes()).decode("ascii") for vector in np.ascontiguousarray(vectors, dtype="<f4")]


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": STARTED, "owned_by": "microbatch"}


_COUNT = {"type": "integer", "minimum": 0}
_MODEL = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "object": {"const": "model"},
        "created": _COUNT,
        "owned_by": {"type": "string"},
    },
    "required": ["id", "object", "created", "owned_by"],
}


_ERROR = {
    "type": "object",
    "properties": {"error": {"type": "object", "required": ["message", "type", "param", "code"]}},
    "required": ["error"],
}
_NO_SUCH_MODEL = {
    "description": "No model of that name gives embeddings.",
    "content": {"application/json": {"schema": _ERROR}},
}


def _embeddings_operation(application: Application) -> dict[str, Any] | None:
    names = _names(application)
    if not names:
        return None
    known = [application.engines[name].embedding for name in names]  # type: ignore[attr-defined]
    token = {"type": "integer", "minimum": 0, "maximum": min(each.vocabulary for each in known) - 1}
    longest = min(each.longest for each in known)
    ids = {"type": "array", "items": token, "minItems": 1, "maxItems": longest}
    asked = {
        "input": {"oneOf": [
            {"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}, ids,
            {"type": "array", "items": ids, "minItems": 1},
        ]},
        "model": {"type": "string", "enum": names},
        "encoding_format": {"type": "string", "enum": ["float", "base64"], "default": "float"},
        "dimensions": {"type": ["integer", "null"], "minimum": 1, "maximum": min(each.dimensions for each in known)},
        "user": {"type": ["string", "null"]},
    }  # fmt: skip
    embedding = {
        "type": "object",
        "properties": {
            "object": {"const": "embedding"},
            "index": _COUNT,
            "embedding": {"oneOf": [{"type": "array", "items": {"type": "number"}}, {"type": "string"}]},
        },
        "required": ["object", "index", "embedding"],
    }
    answer = {
        "object": {"const": "list"},
        "data": {"type": "array", "items": embedding},
        "model": {"type": "string"},
        "usage": {"type": "object", "properties": {"prompt_tokens": _COUNT, "total_tokens": _COUNT}},
    }
    body = {"type": "object", "properties": asked, "required": ["input", "model"], "additionalProperties": False}
    return {
        "summary": "Vectors of texts, as OpenAI's API has it",
        "operationId": "createEmbedding",
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {"200": _success("One vector for each input.", answer), "404": _NO_SUCH_MODEL},
    }


def _models_operation(application: Application) -> dict[str, Any] | None:
    if not _names(application):
        return None
    answer = {"object": {"const": "list"}, "data": {"type": "array", "items": _MODEL}}
    return {
        "summary": "The models of this API",
        "operationId": "listModels",
        "responses": {"200": _success("All of them.", answer)},
    }


def _model_operation(application: Application) -> dict[str, Any] | None:
    names = _names(application)
    if not names:
        return None
    where = {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "enum": names}}
    answer = {"content": {"application/json": {"schema": _MODEL}}, "description": "It is served here."}
    return {
        "summary": "One model of this API",
        "operationId": "retrieveModel",
        "parameters": [where],
        "responses": {"200": answer},
    }


def _success(description: str, members: dict[str, Any]) -> dict[str, Any]:
    schema = {"type": "object", "properties": members, "required": list(members)}
    return {"description": description, "content": {"application/json": {"schema": schema}}}


ROUTES = (
    Route("POST", "/v1/embeddings", embeddings, _embeddings_operation, error_body=openai_form),
    Route("GET", "/v1/models", models, _models_operation, error_body=openai_form),
    Route("GET", "/v1/models/{model}", model, _model_operation, error_body=openai_form),
)
