"""What the OpenAPI document says of the routes by which items are sent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from microbatch.web.codecs import CODECS
from microbatch.web.negotiation import NDJSON, SSE
from microbatch.web.options import MOST_PRIORITY, PRIORITY_PATTERN
from microbatch.web.tenants import LONGEST

if TYPE_CHECKING:
    from microbatch.web.application import Application

BINARY: dict[str, Any] = {"type": "string", "format": "binary"}

PRIORITY_HEADER: dict[str, Any] = {
    "name": "Microbatch-Priority",
    "in": "header",
    "description": f"A whole number from -{MOST_PRIORITY} to {MOST_PRIORITY}; larger goes first.",
    "schema": {"type": "string", "pattern": PRIORITY_PATTERN},
}
TENANT_HEADER: dict[str, Any] = {
    "name": "X-Tenant",
    "in": "header",
    "description": "Whose request it is, where its key does not say; tenants that wait are served alike.",
    "schema": {"type": "string", "maxLength": LONGEST, "pattern": "^([!-~]([ -~]*[!-~])?)?$"},
}
MANY_HEADER: dict[str, Any] = {
    "name": "Microbatch-Many",
    "in": "header",
    "description": "Whether the rows of a binary body are the items; JSON and MessagePack say it in the body.",
    "schema": {"type": "string", "enum": ["true", "false"]},
}


def predict_operation(app: Application) -> dict[str, Any] | None:
    """``POST /predict``, which only says whom it means where there is one engine."""
    if len(app.engines) > 1 or not app.forms:
        return None
    return _operation("predict", "Run one item, or many", next(iter(app.forms.values())).schema)


def predict_operation_by_name(app: Application) -> dict[str, Any]:
    """``POST /predict/{name}``: a path for each engine, since their items differ."""
    return {
        f"/predict/{name}": _operation(f"predict_{name}", f"Run one item of {name}, or many", form.schema)
        for name, form in app.forms.items()
    }


def _operation(identity: str, summary: str, item: dict[str, Any]) -> dict[str, Any]:
    return {
        "summary": summary,
        "description": (
            "The body is the item itself, or an envelope: an object with item or items. How items are batched changes"
            " nothing in what is sent back. The header Microbatch-Deadline gives seconds from now, after which the"
            " answer is 504: it is not listed as a parameter, since testers take a 504 that they asked for as a defect."
        ),
        "operationId": identity,
        "parameters": [PRIORITY_HEADER, TENANT_HEADER, MANY_HEADER],
        "requestBody": {"required": True, "content": _bodies(body_schema(item))},
        "responses": {"200": {"description": "The result, or results in order.", "content": _answers()}},
    }


def body_schema(item: dict[str, Any]) -> dict[str, Any]:
    """A document that is an item or an envelope; an object with ``item`` or ``items`` is always an envelope."""
    stream = {"stream": {"type": "boolean"}}
    several = {"type": "array", "description": "Each is checked by itself and has its own status."}
    return {
        "anyOf": [
            _envelope({"item": item} | stream, "item"),
            _envelope({"items": several} | stream, "items"),
            _bare(item),
        ]
    }


def _bare(item: dict[str, Any]) -> dict[str, Any]:
    if item.get("type", "object") != "object":
        return item
    return {"allOf": [item, {"not": {"anyOf": [_has("item"), _has("items")]}}]}


def _has(name: str) -> dict[str, Any]:
    return {"type": "object", "required": [name]}


def _envelope(members: dict[str, Any], required: str) -> dict[str, Any]:
    return {"type": "object", "properties": members, "required": [required], "additionalProperties": False}


def _bodies(document: dict[str, Any]) -> dict[str, Any]:
    return {codec.media_type: {"schema": document if codec is CODECS[0] else BINARY} for codec in CODECS}


def _answers() -> dict[str, Any]:
    failure = {"type": "object", "required": ["index", "status", "error"]}
    single = {"type": "object", "properties": {"result": {}}, "required": ["result"]}
    several = {
        "type": "object",
        "properties": {"results": {"type": "array"}, "errors": {"type": "array", "items": failure}},
        "required": ["results", "errors"],
    }
    documents = {"schema": {"anyOf": [single, several]}}
    bodies = {codec.media_type: documents if codec is CODECS[0] else {"schema": BINARY} for codec in CODECS}
    return bodies | {NDJSON: {"schema": {"type": "string"}}, SSE: {"schema": {"type": "string"}}}
