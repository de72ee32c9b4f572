"""An explanation as one HTML file that opens offline, and its short form for notebooks."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from importlib.resources import files
from urllib.parse import quote

import msgspec
from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from microbatch import __version__
from microbatch.curves.explanation import Explanation
from microbatch.palette import PALETTES
from microbatch.reporting import micro_batches, prediction_wording, wording, zone_wording
from microbatch.reporting.canvas import inline_svg
from microbatch.reporting.memory_picture import draw_memory, has_memory
from microbatch.reporting.picture import draw
from microbatch.reporting.surface_picture import draw_surface
from microbatch.reporting.tables import about_sizes, about_the_cut, about_the_run
from microbatch.reporting.text import to_text
from microbatch.reporting.wording import Fact
from microbatch.units import format_percent

MOST_BYTES = 1_000_000
"""A page is never larger; when the raw samples do not fit they stay out, and the page says so."""

_PLAIN = ":,[]{}()+*;=@!$?_"
"""Characters of JSON that a data address takes as they are; the rest is written as %XX."""

GLOSSARY = (
    ("ridge", "The batch at which the time that does not grow with it (reading the weights, overhead) equals the time "
     "that does. Below it more items are nearly free, above it the time grows with them."),
    ("best trade-off", "The size with the most throughput for its latency, which lies at the ridge."),
    ("90 % of best from", "The smallest size that reaches 90 % of the best throughput."),
    ("size to avoid", "From it on the time per item is at least 5 % higher than just before, repeatably: a cliff."),
    ("pad to", "A larger size that takes less time; fill the batch up with rows that you throw away."),
    ("compute roof", "The most items per second that the arithmetic of the device allows."),
    ("bandwidth roof", "The most items per second if every operator reads and writes its data once from memory."),
    ("overhead", "Time of a call in which no operator runs: Python, launches, synchronisation."),
    ("90 % interval", "Where the median time lies, given the samples; nothing is known without repeats."),
    ("context limit", "Tokens in the cache beyond which reading keys and values takes longer than computing, whatever "
     "the batch."),
    ("half-way batch", "The batch that reaches half of the tokens per second that reading the cache allows."),
    ("noise", "How far a single call strays from the time of its size."),
    ("fit", "The smooth curve t(b) = ((fixed)^p + (per item × b)^p)^(1/p) with the cliffs taken out."),
)  # fmt: skip


def to_html(explanation: Explanation) -> str:
    """One page with text, tables and pictures as inline SVG, in light and dark, for narrow and wide screens.

    It holds no script and no address, and at most `MOST_BYTES`. The raw samples are inside as a file to save.
    """
    data = quote(msgspec.json.encode(explanation.to_json()), safe=_PLAIN)
    parts = _parts(explanation)
    page = _template().render(parts, data=data)
    return page if len(page.encode()) <= MOST_BYTES else _template().render(parts, data="")


def to_notebook(explanation: Explanation) -> str:
    """A short form for one cell of a notebook: the summary as text and the curve as inline SVG on white."""
    name = "m" + hashlib.sha256(repr(explanation).encode()).hexdigest()[:10]
    svg = inline_svg(draw(explanation, heading=False), name, variables=False)
    text = Markup('<pre style="white-space: pre-wrap; line-height: 1.5">{}</pre>').format(to_text(explanation))
    return f'<div style="max-width: 1000px">{text}<div style="background: #ffffff; padding: 8px">{svg}</div></div>'


@lru_cache(maxsize=1)
def _template() -> Template:
    source = files("microbatch.reporting").joinpath("page.html.jinja").read_text(encoding="utf-8")
    return Environment(autoescape=True, undefined=StrictUndefined, finalize=_keep_percent).from_string(source)


def _keep_percent(value: object) -> object:
    """A line never breaks between a number and its percent sign."""
    return value.replace(" %", "\u00a0%") if type(value) is str else value


def _parts(explanation: Explanation) -> dict[str, object]:
    chosen, profile = explanation.recommended, explanation.profile
    return {
        "version": __version__,
        "light": PALETTES["light"],
        "dark": PALETTES["dark"],
        "batch_size": chosen.batch_size,
        "subject": wording.title(profile),
        **_advice(explanation),
        "facts": _cards(explanation),
        "has_zones": bool(explanation.cliffs),
        "zones": zone_wording.zones(explanation),
        "binding": wording.binding(explanation),
        "about_the_cut": about_the_cut(explanation),
        "curve": _figures(explanation, "curve"),
        "findings": prediction_wording.lines(explanation),
        "surface": _figures(explanation, "surface") if profile.surface else "",
        "memory_curve": _figures(explanation, "memory") if has_memory(profile) else "",
        "utilisation": wording.clean(explanation.utilisation),
        "about_sizes": about_sizes(explanation),
        "about_the_run": about_the_run(explanation),
        "notes": wording.notes(explanation),
        "glossary": GLOSSARY,
    }


def _advice(explanation: Explanation) -> dict[str, str]:
    """The first lines: how to cut the global batch where there is one, else the batch to use."""
    if (found := explanation.micro_batches) is not None:
        return {
            "headline": micro_batches.headline(explanation, found),
            "outcome": micro_batches.outcome(explanation, found),
            "reason": micro_batches.reason(found),
        }
    chosen = explanation.recommended
    return {
        "headline": wording.headline(explanation),
        "outcome": wording.outcome(explanation),
        "reason": f"Chosen for {chosen.objective}. {wording.clean(chosen.reason)}",
    }


def _cards(explanation: Explanation) -> list[Fact]:
    cards = [
        Fact(label=fact.label.rstrip(":"), value=fact.value, hint=fact.hint)
        for fact in (*wording.facts(explanation), *prediction_wording.facts(explanation))
    ]
    if explanation.micro_batches is not None:
        cards.insert(0, micro_batches.trained_whole(explanation))
    if explanation.profile.source == "predicted":
        return [*cards, Fact(label="confidence", value=explanation.recommended.confidence, hint="computed, not run")]
    known = "unknown" if explanation.noise is None else format_percent(explanation.noise)
    why = "" if explanation.noise is not None else f"{wording.noise(explanation)}, "
    return [*cards, Fact(label="noise", value=known, hint=f"{why}confidence {explanation.recommended.confidence}")]


def _figures(explanation: Explanation, what: str) -> Markup:
    """The wide and the narrow picture; the style sheet shows the one that fits and colours it."""
    picture = {"curve": draw, "memory": draw_memory, "surface": draw_surface}[what]
    wide = inline_svg(picture(explanation, width="wide", heading=False), f"{what}-wide", variables=True)
    narrow = inline_svg(picture(explanation, width="narrow", heading=False), f"{what}-narrow", variables=True)
    return Markup(f'<div class="wide">{wide}</div><div class="narrow">{narrow}</div>')
