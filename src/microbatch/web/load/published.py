"""What a server says about itself in OpenAPI: which path takes requests, and an example of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

OPENAPI = "/openapi.json"
PREDICT = "/predict"
EMBEDDINGS = "/v1/embeddings"

_DEEPEST = 20
"""References and schemas inside each other; a document that goes deeper goes in a circle."""


def path_of(document: Any) -> str | None:
    """The path to ask where a URL names none: the only one that takes a body, else the first ``/predict...``."""
    paths = document.get("paths") if isinstance(document, Mapping) else None
    takers = [str(path) for path, item in (paths or {}).items() if _takes_body(item) and "{" not in path]
    predicting = [path for path in takers if path.startswith(PREDICT)]
    return next(iter(predicting or takers), None)


def example_of(document: Any, path: str) -> Any:
    """A body that the document gives as an example of ``POST path``, or one made from its schema; None without."""
    if not isinstance(document, Mapping):
        return None
    operation = _get(document, "paths", path.split("?")[0], "post")
    content = _get(_resolved(document, _get(operation, "requestBody")), "content", "application/json")
    given = _given(document, content)
    return given if given is not None else _from_schema(document, _get(content, "schema"), _DEEPEST)


def body_of_item(item: Any, path: str, example: Any) -> Any:
    """The JSON document that asks `path` about one item."""
    if path.split("?")[0].endswith(EMBEDDINGS):
        model = example.get("model") if isinstance(example, Mapping) else None
        return {"input": item} | ({"model": model} if model else {})
    return {"item": item}


def _takes_body(item: Any) -> bool:
    return isinstance(_get(item, "post", "requestBody"), Mapping)


def _given(document: Any, content: Any) -> Any:
    """``example`` or the first of ``examples``, beside the schema or inside of it."""
    for place in (content, _resolved(document, _get(content, "schema"))):
        if _get(place, "example") is not None:
            return _get(place, "example")
        examples = _get(place, "examples")
        if isinstance(examples, Mapping) and examples:
            return _get(_resolved(document, next(iter(examples.values()))), "value")
        if isinstance(examples, list) and examples:
            return examples[0]
    return None


def _from_schema(document: Any, schema: Any, depth: int) -> Any:
    """The plainest value of a schema; None where it does not tell one."""
    schema = _resolved(document, schema)
    if depth == 0 or not isinstance(schema, Mapping):
        return None
    for key in ("const", "default", "example"):
        if key in schema:
            return schema[key]
    for key in ("enum", "examples"):
        if schema.get(key):
            return schema[key][0]
    for key in ("oneOf", "anyOf", "allOf"):
        for choice in schema.get(key) or ():
            if (value := _from_schema(document, choice, depth - 1)) is not None:
                return value
    make = _MADE.get(str(schema.get("type")))
    return make(document, schema, depth) if make else None


def _object(document: Any, schema: Mapping[str, Any], depth: int) -> Any:
    wanted = schema.get("required") or ()
    parts = {name: _from_schema(document, _get(schema, "properties", name), depth - 1) for name in wanted}
    return None if not parts or None in parts.values() else parts


def _array(document: Any, schema: Mapping[str, Any], depth: int) -> Any:
    part = _from_schema(document, schema.get("items"), depth - 1)
    return None if part is None else [part] * max(int(schema.get("minItems", 1)), 1)


_MADE: dict[str, Callable[[Any, Mapping[str, Any], int], Any]] = {
    "object": _object,
    "array": _array,
    "number": lambda _document, schema, _depth: float(schema.get("minimum", 0.0)),
    "integer": lambda _document, schema, _depth: int(schema.get("minimum", 0)),
    "string": lambda _document, schema, _depth: "x" * max(int(schema.get("minLength", 1)), 1),
    "boolean": lambda _document, _schema, _depth: True,
}


def _resolved(document: Any, part: Any) -> Any:
    """What a ``$ref`` into the same document stands for."""
    for _ in range(_DEEPEST):
        reference = _get(part, "$ref")
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return part
        part = _get(document, *reference[2:].split("/"))
    return None


def _get(part: Any, *keys: str) -> Any:
    """What lies there; None where a step is missing."""
    for key in keys:
        part = part.get(key) if isinstance(part, Mapping) else None
    return part
