"""The forms of a timeline by suffix; each loads what it needs, and none needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from microbatch.errors import InvalidSettings
from microbatch.pipeline.timeline import Timeline


def timeline_form(path: Path) -> Callable[[Timeline], bytes]:
    """What writes the form that a file's name asks for; the longest suffix decides, as in ``step.trace.json``.

    Raises:
        InvalidSettings: no suffix of a form.
    """
    name = path.name.lower()
    for suffix, write in FORMS.items():
        if name.endswith(suffix):
            return write
    raise InvalidSettings(f"A Timeline has no form {path.suffix or 'without a suffix'}.", f"Use {', '.join(FORMS)}.")


def _trace(timeline: Timeline) -> bytes:
    import msgspec

    from microbatch.reporting.timeline_trace import chrome_trace

    return msgspec.json.encode(chrome_trace(timeline))


def _json(timeline: Timeline) -> bytes:
    from microbatch.reporting.save import pretty_json

    return pretty_json(timeline.to_json(actions=True))


def _svg(timeline: Timeline) -> bytes:
    from microbatch.reporting.timeline_picture import standalone

    return standalone(timeline).encode()


def _html(timeline: Timeline) -> bytes:
    from microbatch.reporting.timeline_page import to_html

    return to_html(timeline).encode()


def _text(timeline: Timeline) -> bytes:
    from microbatch.reporting.timeline_text import lines

    return ("\n".join(lines(timeline)) + "\n").encode()


def _csv(timeline: Timeline) -> bytes:
    return timeline.schedule.to_csv().encode()


FORMS: dict[str, Callable[[Timeline], bytes]] = {
    ".trace.json": _trace,
    ".json": _json,
    ".svg": _svg,
    ".html": _html,
    ".txt": _text,
    ".csv": _csv,
}
"""``.trace.json`` opens in Perfetto and chrome://tracing; ``.csv`` is the order itself, which torch reads."""
