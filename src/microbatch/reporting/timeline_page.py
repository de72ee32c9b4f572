"""A timeline as one HTML file that opens offline, and its short form for notebooks."""

from __future__ import annotations

from functools import lru_cache
from importlib.resources import files

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from microbatch import __version__
from microbatch.palette import PALETTES
from microbatch.pipeline.critical_path import what_to_change
from microbatch.pipeline.recommend import alternatives
from microbatch.pipeline.timeline import Timeline
from microbatch.reporting import timeline_picture as picture
from microbatch.reporting import timeline_wording as wording
from microbatch.units import format_number, format_percent

_MOST_TWICE = 3_000
"""Actions up to which a page holds a second picture, for narrow screens."""


def to_html(timeline: Timeline) -> str:
    """One page: the sentence, the figures, the lanes in a box that scrolls sideways, and what was compared."""
    narrow = len(timeline.schedule) <= _MOST_TWICE
    return _template().render(
        version=__version__, light=PALETTES["light"], dark=PALETTES["dark"], classes=Markup(picture.CLASSES),
        subject=wording.subject(timeline), headline=wording.headline(timeline), facts=wording.facts(timeline),
        notes=wording.notes(timeline), memory=picture.memory_note(timeline), patterns=Markup(picture.patterns()),
        legend=_legend(timeline), wide=_lanes(timeline, 1000), narrow=_lanes(timeline, 280) if narrow else "",
        changes=_changes(timeline), others=_others(timeline),
    )  # fmt: skip


def to_notebook(timeline: Timeline) -> str:
    """The standalone picture, which a cell shows."""
    return f'<div style="overflow-x: auto">{picture.standalone(timeline, least_width=820)}</div>'


@lru_cache(maxsize=1)
def _template() -> Template:
    source = files("microbatch.reporting").joinpath("timeline.html.jinja").read_text(encoding="utf-8")
    return Environment(autoescape=True, undefined=StrictUndefined).from_string(source)


def _legend(timeline: Timeline) -> Markup:
    words = picture.kinds_of(timeline)
    return Markup("".join(f'<span class="key">{picture.key(kind)}{word}</span>' for kind, word in words))


def _lanes(timeline: Timeline, least_width: float) -> Markup:
    frame = picture.frame_of(timeline, least_width)
    height = frame.height(timeline.schedule.ranks)
    names = f'<svg class="names" width="{picture.LABELS}" height="{height:.0f}">{picture.labels(timeline, frame)}</svg>'
    boxes = f'<svg width="{frame.width + 2:.0f}" height="{height:.0f}">{picture.lanes(timeline, frame)}</svg>'
    return Markup(
        f'{names}<div class="scroll" tabindex="0" role="region" aria-label="Time axis of every rank">{boxes}</div>'
    )


def _changes(timeline: Timeline) -> list[tuple[str, str, str]]:
    return [
        (change.what, f"{format_percent(change.shorter_by)} shorter", format_percent(change.share))
        for change in what_to_change(timeline.predicted)
    ]


def _others(timeline: Timeline) -> list[tuple[str, str, str, str]]:
    return [
        (
            wording.named(one, timeline),
            one.verdict,
            wording.time(timeline, one.seconds),
            format_number(one.peak_activations),
        )
        for one in alternatives(timeline.predicted)
    ]
