"""Content types and what is accepted, as RFC 9110 has them."""

from __future__ import annotations

import pytest

from microbatch.errors import InvalidRequest
from microbatch.web.negotiation import wire_of

TABLE = [
    ("application/json", "", "application/json", ""),
    ("Application/JSON; charset=utf-8", "", "application/json", ""),
    ("application/json", "application/x-npy", "application/x-npy", ""),
    ("application/json", "application/npy", "application/x-npy", ""),
    ("application/x-msgpack", "*/*", "application/msgpack", ""),
    ("application/json", "image/png, application/msgpack", "application/msgpack", ""),
    ("application/json", "application/msgpack;q=0.2, application/x-npy;q=0.3", "application/x-npy", ""),
    ("application/json", "application/msgpack;q=0.2, */*;q=0.1", "application/msgpack", ""),
    ("application/x-npy", "text/html,application/xhtml+xml,*/*;q=0.8", "application/x-npy", ""),
    ("application/json", "text/event-stream", "application/json", "text/event-stream"),
    ("application/x-npy", "application/x-ndjson", "application/json", "application/x-ndjson"),
    ("application/json", "application/msgpack;q=high, application/x-npy", "application/x-npy", ""),
]


@pytest.mark.parametrize(("content_type", "accept", "writes", "stream"), TABLE)
def test_the_form_most_wanted_is_sent(content_type: str, accept: str, writes: str, stream: str) -> None:
    wire = wire_of(content_type.encode(), accept.encode())
    assert (wire.writes.media_type, wire.stream) == (writes, stream)


@pytest.mark.parametrize("accept", ["image/*", "application/json;q=0", "*/*;q=0", "text/plain", "\xff"])
def test_nothing_else_is_sent(accept: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        wire_of(b"application/json", accept.encode("latin-1"))
    assert caught.value.status == 406
    assert "text/event-stream" in caught.value.remedy


@pytest.mark.parametrize("content_type", ["", "text/plain", "application/octet-stream", "application/python-pickle"])
def test_nothing_else_is_read(content_type: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        wire_of(content_type.encode(), b"")
    assert caught.value.status == 415
    assert "application/safetensors" in caught.value.remedy
