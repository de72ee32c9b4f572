"""``/openapi.json``: the OpenAPI 3.1 document, made from the table of routes, so that it says what is served."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from microbatch import __version__
from microbatch.web.request import Request
from microbatch.web.response import Response, json_response
from microbatch.web.routes import Route
from microbatch.web.statuses import Answer, own_form

if TYPE_CHECKING:
    from microbatch.web.application import Application

ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}, "remedy": {"type": "string"}},
            "required": ["type", "message", "remedy"],
        }
    },
    "required": ["error"],
}
EVERYWHERE = {405: "Another method than those there are."}
WITH_KEYS = {401: "No key, or an unknown one."}
WITH_A_NAME = {404: "There is nothing of that name."}
WITH_A_BODY = {
    400: "The body, an item or a header cannot be read.",
    406: "The result cannot be had in the form that is accepted.",
    408: "The body did not come in time.",
    413: "The body is too large, or has more items than the queue takes.",
    415: "The form of the body is not known.",
    429: "The queue is full. Retry-After says when there is room.",
    500: "The function or model failed.",
    503: "The server is about to stop, or has lost its workers.",
    504: "The deadline passed.",
}
RETRY_AFTER = {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer", "minimum": 1}}}


def document(app: Application) -> dict[str, Any]:
    """The whole document."""
    paths: dict[str, dict[str, Any]] = {}
    for row in app.routes:
        for path, operation in _described(row, app).items():
            paths.setdefault(path, {})[row.method.lower()] = _with_errors(operation, row, app)
    components: dict[str, Any] = {"schemas": {"Error": ERROR_SCHEMA} | _item_schemas(app)}
    if app.keyed:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": app.title, "version": __version__},
        "paths": paths,
        "components": components,
    }


def _described(row: Route, app: Application) -> dict[str, dict[str, Any]]:
    described = row.operation(app) or {}
    by_path = all(name.startswith("/") for name in described)
    return described if by_path else {row.path: described}


async def openapi(request: Request) -> Response:
    """``GET /openapi.json``."""
    return json_response(document(request.application))


def _item_schemas(app: Application) -> dict[str, Any]:
    return {name: schema for form in app.forms.values() for name, schema in form.components.items()}


def _with_errors(operation: dict[str, Any], row: Route, app: Application) -> dict[str, Any]:
    """An operation with the errors that its kind of route can have, unless it describes them itself."""
    wanted = dict(EVERYWHERE)
    if row.method == "POST":
        wanted |= WITH_A_BODY
    if row.parameter is not None:
        wanted |= WITH_A_NAME
    protected = app.keyed and not row.open
    if protected:
        wanted |= WITH_KEYS
    schema = _error_schema(row)
    errors = {str(status): _error(status, text, schema) for status, text in sorted(wanted.items())}
    return (
        operation | {"responses": errors | operation["responses"]} | ({"security": [{"key": []}]} if protected else {})
    )


def _error_schema(row: Route) -> dict[str, Any]:
    """Of the errors of a route: ours, or those of the API that it speaks."""
    if row.error_body is own_form:
        return {"$ref": "#/components/schemas/Error"}
    members = row.error_body(Answer(500, "Error", ""))["error"]
    error = {"type": "object", "required": list(members)}
    return {"type": "object", "properties": {"error": error}, "required": ["error"]}


def _error(status: int, description: str, schema: dict[str, Any]) -> dict[str, Any]:
    content = {"application/json": {"schema": schema}}
    response: dict[str, Any] = {"description": description, "content": content}
    return response | ({"headers": RETRY_AFTER} if status == 429 else {})


def _operation(_: Application) -> dict[str, Any]:
    content = {"application/json": {"schema": {"type": "object"}}}
    return {
        "summary": "This document",
        "operationId": "openapi",
        "responses": {"200": {"description": "OpenAPI 3.1.", "content": content}},
    }


ROUTES = (Route("GET", "/openapi.json", openapi, _operation),)
