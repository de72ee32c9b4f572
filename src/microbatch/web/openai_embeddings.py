"""OpenAI's API for embeddings, ``POST /v1/embeddings``, over engines that answer with vectors.

Requests and answers are those of https://platform.openai.com/docs/api-reference/embeddings; its Python client works
with ``base_url="http://127.0.0.1:8000/v1"``.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from microbatch.errors import InvalidOutput, InvalidRequest, UserError
from microbatch.web.engine import submit_many
from microbatch.web.openai_errors import openai_form
from microbatch.web.openai_inputs import schema_of, values_of
from microbatch.web.openai_models import engine_for, names_of, no_such_model, success
from microbatch.web.request import Request
from microbatch.web.response import Response, json_response
from microbatch.web.routes import Route

if TYPE_CHECKING:
    from microbatch.web.application import Application

Vectors = NDArray[np.float32]
VECTORS = "embeddings of texts"
"""What is asked for here; see `microbatch.web.openai_models.OFFERS`."""


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
    name, engine = engine_for(request, asked.model, VECTORS)
    dimensions = _dimensions(asked.dimensions, engine.embedding.dimensions)
    rows = _checked(await engine.read(values_of(asked.input, "input")))
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


def cut(vectors: Vectors, dimensions: int | None) -> Vectors:
    """The first so many numbers of each vector (rows, dimensions), at length 1; as they are where nothing is cut."""
    if dimensions is None or dimensions == vectors.shape[1]:
        return vectors
    shorter = vectors[:, :dimensions]
    lengths = np.linalg.norm(shorter, axis=1, keepdims=True)
    return np.asarray(shorter / np.where(lengths == 0, 1, lengths), dtype=np.float32)


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


_COUNT = {"type": "integer", "minimum": 0}


def _embeddings_operation(application: Application) -> dict[str, Any] | None:
    names = names_of(application, VECTORS)
    if not names:
        return None
    known = [application.engines[name].embedding for name in names]
    token = {"type": "integer", "minimum": 0, "maximum": min(each.vocabulary for each in known) - 1}
    longest = min(each.longest for each in known)
    ids = {"type": "array", "items": token, "minItems": 1, "maxItems": longest}
    asked = {
        "input": schema_of(ids),
        "model": {"type": "string", "enum": names},
        "encoding_format": {"type": "string", "enum": ["float", "base64"], "default": "float"},
        "dimensions": {"type": ["integer", "null"], "minimum": 1, "maximum": min(each.dimensions for each in known)},
        "user": {"type": ["string", "null"]},
    }
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
        "responses": {"200": success("One vector for each input.", answer), "404": no_such_model(VECTORS)},
    }


ROUTES = (Route("POST", "/v1/embeddings", embeddings, _embeddings_operation, error_body=openai_form),)
