"""An article as text, as one HTML page that opens offline, and as a folder with its pictures and its data."""

from __future__ import annotations

from functools import lru_cache
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from microbatch import __version__
from microbatch.errors import InvalidSettings
from microbatch.palette import PALETTES
from microbatch.profiling.article import Article, Prediction, Section
from microbatch.profiling.article_claims import time_lost
from microbatch.profiling.article_curve import Curve
from microbatch.reporting.article_picture import draw_section, has_curves
from microbatch.reporting.canvas import image, inline_svg
from microbatch.reporting.save import pretty_json, write_whole
from microbatch.reporting.table import Table
from microbatch.units import format_number, format_percent, format_seconds

_MARKS = {True: "holds", False: "does not hold", None: "no answer"}


def article_to_text(article: Article) -> str:
    """Each claim and what this machine says to it."""
    lines = [line for section in article.sections for line in (section.title, *_spoken(section), "")]
    held = sum(section.verdict.holds is True for section in article.sections)
    lines.append(
        f"{held} of {len(article.sections)} claims hold here; measured in {format_seconds(article.wall_seconds)}."
    )
    return "\n".join(lines)


def _spoken(section: Section) -> list[str]:
    return [
        f"  Claim: {section.claim}",
        *(f"  {sentence}" for sentence in _sentences(section)),
        *(f"  Note: {note}" for note in _notes(section)),
    ]


def _sentences(section: Section) -> list[str]:
    """The verdict on what was measured, then those on what was computed."""
    return [section.verdict.sentence, *(one.verdict.sentence for one in section.predictions)]


def _notes(section: Section) -> list[str]:
    """Curves that are missing, each with its reason, and how many were too noisy for cliffs."""
    missing = [f"{curve.label}: {curve.problem}" for curve in section.curves if curve.profile is None]
    noisy = [curve for curve in section.curves if curve.profile is not None and curve.explanation is None]
    told = (
        f"{len(noisy)} of {len(section.curves)} curves are too noisy to tell cliffs. {noisy[0].problem}"
        if noisy
        else ""
    )
    return [*missing, *([told] if told else [])]


def article_to_html(article: Article) -> str:
    """One page with every plot as inline SVG, in light and dark, for narrow and wide screens; no external address."""
    return _template().render(
        version=__version__,
        light=PALETTES["light"],
        dark=PALETTES["dark"],
        took=format_seconds(article.wall_seconds),
        machine=_machine(article),
        sections=[_part(section) for section in article.sections],
    )


def save_article(article: Article, folder: Path) -> tuple[Path, ...]:
    """Writes article.html, article.json and each plot as SVG and PNG; makes the folder where it is missing.

    Raises:
        InvalidSettings: the folder cannot be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = error.strerror or str(error)
        raise InvalidSettings(f"The folder {str(folder)!r} cannot be made: {why}.", "Choose another.") from error
    contents = {
        "article.html": article_to_html(article).encode(),
        "article.json": pretty_json(article.to_json()),
    }
    for section in filter(has_curves, article.sections):
        figure = draw_section(section)
        contents |= {f"{section.key}.{form}": image(figure, form) for form in ("svg", "png")}
    for name, content in contents.items():
        write_whole(folder / name, content)
    return tuple(folder / name for name in contents)


def _part(section: Section) -> dict[str, object]:
    return {
        "key": section.key,
        "title": section.title,
        "claim": section.claim,
        "mark": _MARKS[section.verdict.holds],
        "sentence": section.verdict.sentence,
        "computed": [
            (_MARKS[one.verdict.holds].replace(" ", "-"), one.verdict.sentence) for one in section.predictions
        ],
        "figure": _figure(section) if has_curves(section) else "",
        "notes": _notes(section),
        "tables": [table for table in (_ridge_table(section), _routing_table(section)) if table is not None],
    }


def _ridge_table(section: Section) -> Table | None:
    """Ridges measured here beside those computed: by moving weights, by moving activations too, of the curve."""
    if not section.predictions:
        return None
    computed = [
        column
        for one in section.predictions
        for column in (f"{one.place}: weights", "with activations", "of the curve")
    ]
    rows = [
        (curve.label, _ridge(curve.ridge), *(cell for one in section.predictions for cell in _computed(one, index)))
        for index, curve in enumerate(section.curves)
    ]
    return Table(title="Ridges", columns=("curve", "measured here", *computed), rows=tuple(rows))


def _computed(prediction: Prediction, index: int) -> tuple[str, str, str]:
    curve = prediction.curves[index]
    ridge = curve.explanation.ridge if curve.explanation else curve.knee
    return _ridge(ridge.predicted_weights), _ridge(ridge.predicted_with_activations), _ridge(curve.ridge)


def _ridge(value: float | None) -> str:
    return "none" if value is None else format_number(value)


def _routing_table(section: Section) -> Table | None:
    rows = tuple(row for curve in section.curves for row in _routing_rows(curve))
    columns = ("curve", "layer", "tokens", "experts hit", "busiest over mean", "dropped", "lost to imbalance")
    return Table(title="Experts", columns=columns, rows=rows) if rows else None


def _figure(section: Section) -> Markup:
    wide, narrow = (
        inline_svg(draw_section(section, width=width, heading=False), f"{section.key}-{width}", variables=True)
        for width in ("wide", "narrow")
    )
    return Markup('<div class="wide">{}</div><div class="narrow">{}</div>').format(Markup(wide), Markup(narrow))


def _routing_rows(curve: Curve) -> list[tuple[str, ...]]:
    return [
        (
            curve.label,
            load.layer,
            format_number(load.tokens),
            f"{load.distinct_experts} of {len(load.tokens_per_expert)}",
            format_number(load.load_factor),
            format_number(load.dropped),
            "" if (lost := time_lost(load)) is None else f"{'−' if lost < 0 else ''}{format_percent(abs(lost))}",
        )
        for load in curve.routing
    ]


def _machine(article: Article) -> str:
    """Device, threads and torch of the first curve that was measured."""
    profiles = (curve.profile for section in article.sections for curve in section.curves)
    environment = next((profile.environment for profile in profiles if profile is not None), None)
    if environment is None:
        return "an unknown machine"
    threads = f", {environment.threads} threads" if environment.threads else ""
    torch = f", torch {environment.versions['torch']}" if "torch" in environment.versions else ""
    return f"{environment.device or 'an unnamed device'}{threads}{torch}"


@lru_cache(maxsize=1)
def _template() -> Template:
    source = files("microbatch.reporting").joinpath("article.html.jinja").read_text(encoding="utf-8")
    return Environment(autoescape=True, undefined=StrictUndefined).from_string(source)
