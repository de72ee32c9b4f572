"""``GET /v1/models``: the engines that can be asked by OpenAI's API, and how a request names one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from microbatch.errors import InvalidRequest
from microbatch.web.openai_errors import ERROR_SCHEMA, openai_form
from microbatch.web.request import Request
from microbatch.web.response import Response, json_response
from microbatch.web.routes import Route
from microbatch.web.text_engine import TextEngine, generates_text

if TYPE_CHECKING:
    from microbatch.web.application import Application

STARTED = int(time.time())
"""What OpenAI calls the time when a model was made."""


def gives_vectors(engine: Any) -> bool:
    """Whether the answers of an engine are vectors of texts."""
    return getattr(engine, "embedding", None) is not None


OFFERS: Mapping[str, Callable[[Any], bool]] = {"embeddings of texts": gives_vectors, "text": generates_text}
"""What an engine can give by this API."""


async def models(request: Request) -> Response:
    """The engines that this API can be asked for."""
    application = request.application
    return json_response({"object": "list", "data": [_card(application, name) for name in names_of(application)]})


async def model(request: Request) -> Response:
    """One of them."""
    name, engine = request.engine(request.parameters["model"])
    if not any(gives(engine) for gives in OFFERS.values()):
        raise _other(request.application, name, " or ".join(OFFERS), names_of(request.application))
    return json_response(_card(request.application, name))


def engine_for(request: Request, asked: str, what: str) -> tuple[str, Any]:
    """An engine that gives what is asked for, with its name.

    Args:
        request: whose application has engines.
        asked: the name.
        what: one of `OFFERS`.

    Raises:
        InvalidRequest: there is none of that name, or it does not give that (404).
    """
    name, engine = request.engine(asked)
    if not OFFERS[what](engine):
        raise _other(request.application, name, what, names_of(request.application, what))
    return name, engine


def text_engine_for(request: Request, asked: str) -> tuple[str, TextEngine]:
    """The same for text."""
    return engine_for(request, asked, "text")


def names_of(application: Application, what: str | None = None) -> list[str]:
    """The engines that give something, or anything, by this API."""
    asked = OFFERS.values() if what is None else [OFFERS[what]]
    return [name for name, engine in application.engines.items() if any(gives(engine) for gives in asked)]


def _other(application: Application, name: str, what: str, others: list[str]) -> InvalidRequest:
    if others:
        remedy = f"Name one of {', '.join(others)}."
    elif generates_text(application.engines[name]):
        remedy = "Ask POST /v1/completions."
    else:
        remedy = f"Ask POST /predict/{name}."
    return InvalidRequest(f"{name!r} gives no {what}.", remedy, status=404)


def _card(application: Application, name: str) -> dict[str, Any]:
    card = {"id": name, "object": "model", "created": STARTED, "owned_by": "microbatch"}
    engine = application.engines[name]
    return card | ({"max_model_len": engine.limits.context} if generates_text(engine) else {})


_MODEL = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "object": {"const": "model"},
        "created": {"type": "integer", "minimum": 0},
        "owned_by": {"type": "string"},
        "max_model_len": {"type": "integer", "minimum": 1},
    },
    "required": ["id", "object", "created", "owned_by"],
}


def no_such_model(what: str) -> dict[str, Any]:
    """The response of a route that is asked for another model, for the OpenAPI document."""
    return {
        "description": f"No model of that name gives {what}.",
        "content": {"application/json": {"schema": ERROR_SCHEMA}},
    }


def success(description: str, members: dict[str, Any]) -> dict[str, Any]:
    """A response with these members, for the OpenAPI document."""
    schema = {"type": "object", "properties": members, "required": list(members)}
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _models_operation(application: Application) -> dict[str, Any] | None:
    if not names_of(application):
        return None
    answer = {"object": {"const": "list"}, "data": {"type": "array", "items": _MODEL}}
    return {
        "summary": "The models of this API",
        "operationId": "listModels",
        "responses": {"200": success("All of them.", answer)},
    }


def _model_operation(application: Application) -> dict[str, Any] | None:
    names = names_of(application)
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


ROUTES = (
    Route("GET", "/v1/models", models, _models_operation, error_body=openai_form),
    Route("GET", "/v1/models/{model}", model, _model_operation, error_body=openai_form),
)
