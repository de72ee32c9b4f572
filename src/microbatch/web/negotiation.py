"""Which form a body has and which one its answer gets, by ``Content-Type`` and ``Accept``."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from microbatch.errors import InvalidRequest
from microbatch.web.codecs import CODECS, Codec
from microbatch.web.request import media_type

NDJSON, SSE = "application/x-ndjson", "text/event-stream"
STREAMS = (NDJSON, SSE)
"""Forms in which results are sent one by one, each as soon as it is there."""

_BY_NAME = {name.encode(): codec for codec in CODECS for name in (codec.media_type, *codec.aliases)}


class Wire(NamedTuple):
    """Attributes:
    reads: the form of the body.
    writes: the form of the answer.
    stream: the form in which it is streamed; empty if it is not.
    """

    reads: Codec
    writes: Codec
    stream: str = ""


@lru_cache(maxsize=256)
def wire_of(content_type: bytes, accept: bytes) -> Wire:
    """The forms of a request and of its answer; the same for both unless the client asks for another.

    Raises:
        InvalidRequest: a form that is not known here (415), or none that the client would take (406).
    """
    reads = _BY_NAME.get(media_type(content_type))
    if reads is None:
        told = (
            f"The content type is {content_type.decode('latin-1')[:80]!r}."
            if content_type
            else "There is no content type."
        )
        raise InvalidRequest(
            told,
            f"Send one of {', '.join(codec.media_type for codec in CODECS)}.", status=415,
        )  # fmt: skip
    if not accept or accept == b"*/*":
        return Wire(reads, reads)
    for wanted in _by_preference(accept):
        if (wire := _wire(reads, wanted)) is not None:
            return wire
    raise InvalidRequest(
        f"None of {accept.decode('latin-1')[:80]!r} can be had here.",
        f"Accept one of {', '.join((*(codec.media_type for codec in CODECS), *STREAMS))}.", status=406,
    )  # fmt: skip


def _wire(reads: Codec, wanted: bytes) -> Wire | None:
    if wanted in (b"*/*", b"application/*"):
        return Wire(reads, reads)
    if (name := wanted.decode("latin-1")) in STREAMS:
        return Wire(reads, CODECS[0], name)
    codec = _BY_NAME.get(wanted)
    return None if codec is None else Wire(reads, codec)


def _by_preference(accept: bytes) -> list[bytes]:
    """The types of an ``Accept`` header, most wanted first; those with q=0 are left out (RFC 9110, 12.5.1)."""
    parts = [part.strip() for part in accept.split(b",") if part.strip()]
    weighed = [(_weight(part), media_type(part)) for part in parts]
    return [name for weight, name in sorted(weighed, key=lambda pair: -pair[0]) if weight > 0]


def _weight(part: bytes) -> float:
    for parameter in part.split(b";")[1:]:
        name, _, value = parameter.strip().partition(b"=")
        if name.strip().lower() == b"q":
            try:
                return float(value)
            except ValueError:
                return 0.0
    return 1.0
