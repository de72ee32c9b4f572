"""Whether the server lives, and whether it may be sent requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from microbatch.web.request import Request
from microbatch.web.response import Response, json_response
from microbatch.web.routes import Route

if TYPE_CHECKING:
    from microbatch.web.application import Application


async def health(request: Request) -> Response:
    """The event loop runs; a server that does not answer here is to be started again."""
    return json_response({"status": "ok", "engines": list(request.application.engines)})


async def ready(request: Request) -> Response:
    """Whether every engine takes requests; 503 while one starts, has lost its workers or is about to stop."""
    application = request.application
    engines = {name: engine.ready for name, engine in application.engines.items()}
    welcome = not application.stopping and all(engines.values())
    return json_response({"ready": welcome, "engines": engines}, 200 if welcome else 503)


def _health_operation(_: Application) -> dict[str, Any]:
    members = {"status": {"const": "ok"}, "engines": {"type": "array", "items": {"type": "string"}}}
    return {
        "summary": "Whether the server lives",
        "operationId": "health",
        "responses": {"200": _response("It does.", members)},
    }


def _ready_operation(_: Application) -> dict[str, Any]:
    members = {
        "ready": {"type": "boolean"},
        "engines": {"type": "object", "additionalProperties": {"type": "boolean"}},
    }
    return {
        "summary": "Whether every engine takes requests",
        "operationId": "ready",
        "responses": {"200": _response("All do.", members), "503": _response("Not now.", members)},
    }


def _response(description: str, members: dict[str, Any]) -> dict[str, Any]:
    schema = {"type": "object", "properties": members, "required": list(members)}
    return {"description": description, "content": {"application/json": {"schema": schema}}}


ROUTES = (
    Route("GET", "/health", health, _health_operation, open=True),
    Route("GET", "/ready", ready, _ready_operation, open=True),
)
