"""What is sent, and to whom: URLs, headers, bodies, and what a server publishes about itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from microbatch.errors import InvalidSettings
from microbatch.web.load.preflight import said
from microbatch.web.load.published import body_of_item, example_of, path_of
from microbatch.web.load.requests import (
    Body,
    Question,
    api_key_from,
    body_from,
    body_of_text,
    headers_from,
    items_from,
)
from microbatch.web.load.target import is_this_machine, target_of


@pytest.mark.parametrize(
    ("text", "origin", "path"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000", ""),
        ("localhost:81/a/b?c=d", "http://localhost:81", "/a/b?c=d"),
        ("http://localhost", "http://localhost:80", ""),
        ("https://[::1]:9/", "https://[::1]:9", "/"),
        ("http://127.9.9.9:1?x=y", "http://127.9.9.9:1", "/?x=y"),
        ("HTTP://0.0.0.0:8000/predict#there", "http://0.0.0.0:8000", "/predict"),
    ],
)
def test_urls(text: str, origin: str, path: str) -> None:
    target = target_of(text)
    assert (target.origin, target.path) == (origin, path)


@pytest.mark.parametrize(
    "text", ["", "http://", "ftp://localhost/x", "http://localhost:port/", "http://localhost:99999", "local host", "http://[::1",
             "http://localhost/\r\nX: y", "localhost/ä"]
)  # fmt: skip
def test_what_is_no_url_is_one_clear_error(text: str) -> None:
    with pytest.raises(InvalidSettings, match="no URL of HTTP"):
        target_of(text)


@pytest.mark.parametrize(
    "host", ["example.com", "10.0.0.1", "8.8.8.8", "127.0.0.1.example.com", "localhost.example.com", "2001:db8::1"]
)
def test_other_machines_need_a_word(host: str) -> None:
    assert not is_this_machine(host)
    url = f"http://[{host}]" if ":" in host else f"http://{host}"
    with pytest.raises(InvalidSettings, match="--allow-remote"):
        target_of(url)
    assert target_of(url, allow_remote=True).host == host


def test_a_password_in_a_url_is_refused() -> None:
    with pytest.raises(InvalidSettings, match="user"):
        target_of("http://me:secret@localhost")


def test_a_request_on_the_wire() -> None:
    target = target_of("127.0.0.1:8000/predict")
    question = Question(target=target, headers={"X-Tenant": "blue"}, bodies=(Body(b"[1]"), Body(b"", "")))
    one, empty = question.wire()
    head, body = one.split(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert lines[0] == b"POST /predict HTTP/1.1"
    assert set(lines) >= {
        b"Host: 127.0.0.1:8000",
        b"Content-Type: application/json",
        b"Content-Length: 3",
        b"X-Tenant: blue",
    }
    assert body == b"[1]"
    assert b"Content-Length: 0\r\n\r\n" in empty and b"Content-Type" not in empty


def test_a_users_header_wins() -> None:
    question = Question(target=target_of("localhost/x"), headers={"content-type": "text/plain"}, bodies=(Body(b"a"),))
    assert question.wire()[0].lower().count(b"content-type") == 1
    assert b"content-type: text/plain" in question.wire()[0]


def test_headers_and_key() -> None:
    assert headers_from(["A: b", "C:d:e "], "key") == {"Authorization": "Bearer key", "A": "b", "C": "d:e"}


@pytest.mark.parametrize("line", ["no colon", "bad name: x", "A: b\r\nC: d", ": x", "Content-Length: 3", "host: x"])
def test_what_is_no_header_is_one_clear_error(line: str) -> None:
    with pytest.raises(InvalidSettings, match="header"):
        headers_from([line])


def test_a_key_comes_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("\n secret \n")
    assert api_key_from(path) == "secret"
    path.write_text(" \n")
    with pytest.raises(InvalidSettings, match="empty"):
        api_key_from(path)
    with pytest.raises(InvalidSettings, match="cannot be read"):
        api_key_from(tmp_path / "none")


def test_bodies_know_their_type(tmp_path: Path) -> None:
    path = tmp_path / "item.npy"
    path.write_bytes(b"\x93NUMPY")
    assert body_from(path) == Body(b"\x93NUMPY", "application/x-npy")
    assert body_of_text("[1, 2]") == Body(b"[1, 2]")
    assert body_of_text("hello").content_type.startswith("text/plain")
    with pytest.raises(InvalidSettings, match="cannot be read"):
        body_from(tmp_path / "none")


def test_items_are_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "items.jsonl"
    path.write_text('"short"\n\n[1, 2]\n{"a": 1}\n')
    assert items_from(path) == ["short", [1, 2], {"a": 1}]
    path.write_text('"good"\nnot json\n')
    with pytest.raises(InvalidSettings, match="Line 2"):
        items_from(path)
    path.write_text("\n")
    with pytest.raises(InvalidSettings, match="no item"):
        items_from(path)


def test_the_body_around_an_item() -> None:
    assert body_of_item({"a": 1}, "/predict/mlp", None) == {"item": {"a": 1}}
    assert body_of_item("text", "/v1/embeddings", {"model": "m", "input": "x"}) == {"input": "text", "model": "m"}
    assert body_of_item("text", "/v1/embeddings?x=1", None) == {"input": "text"}


def openapi(content: Any, path: str = "/predict", **others: Any) -> dict[str, Any]:
    return {"paths": {path: {"post": {"requestBody": {"content": {"application/json": content}}}}}, **others}


TEXT = {"type": "string"}
SCHEMAS = {"schemas": {"Row": {"type": "array", "items": {"type": "number"}, "minItems": 3}}}


@pytest.mark.parametrize(
    ("document", "example"),
    [
        (openapi({"example": [1, 2]}), [1, 2]),
        (openapi({"examples": {"one": {"value": {"item": "a"}}}}), {"item": "a"}),
        (openapi({"schema": {"examples": ["text"]}}), "text"),
        (openapi({"schema": {"$ref": "#/components/schemas/Row"}}, components=SCHEMAS), [0.0, 0.0, 0.0]),
        (openapi({"schema": {"type": "object", "required": ["item"], "properties": {"item": TEXT}}}), {"item": "x"}),
        (openapi({"schema": {"anyOf": [{}, {"type": "integer", "minimum": 7}]}}), 7),
        (openapi({"schema": {}}), None),
        (openapi({"schema": {"$ref": "#/a"}}, a={"$ref": "#/a"}), None),
        (openapi({"schema": {"$ref": "#/a"}}, a={"type": "array", "items": {"$ref": "#/a"}}), None),
        (openapi({"example": 1}, path="/other"), None),
        ({}, None),
        ("no document", None),
    ],
)  # fmt: skip
def test_examples_from_what_a_server_publishes(document: Any, example: Any) -> None:
    assert example_of(document, "/predict") == example


def test_the_path_that_takes_requests() -> None:
    assert path_of(openapi({}, path="/v1/embeddings")) == "/v1/embeddings"
    both = {"paths": {**openapi({}, path="/v1/embeddings")["paths"], **openapi({}, path="/predict")["paths"]}}
    assert path_of(both) == "/predict"
    assert path_of({"paths": {"/health": {"get": {}}}}) is None
    assert path_of(openapi({}, path="/predict/{name}")) is None
    assert path_of(None) is None


def test_what_a_server_says_is_one_line() -> None:
    ours = msgspec.json.encode({"error": {"type": "Overloaded", "message": "The queue\nis full."}})
    assert said(ours) == "The queue is full."
    assert said(b'{"error": "plain"}') == "plain"
    assert said(b"<h1>\x1b[31mNot\tFound</h1>\n\n") == "<h1> [31mNot Found</h1>"
    assert len(said(b"x" * 5000)) == 160
