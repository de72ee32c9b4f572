"""The forms of a load report by suffix; matplotlib is loaded for pictures and pages only."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from microbatch.errors import InvalidSettings
from microbatch.reporting import load_text
from microbatch.web.load.result import LoadReport
from microbatch.web.load.verdict import named

if TYPE_CHECKING:
    from jinja2 import Template


def load_form(path: Path) -> Callable[[LoadReport], bytes]:
    """What writes the form that a file's name asks for.

    Raises:
        InvalidSettings: no suffix of a form.
    """
    write = FORMS.get(path.suffix.lower())
    if write is None:
        raise InvalidSettings(f"A load report has no form {path.suffix or 'without a suffix'}.",
                              f"Use {', '.join(FORMS)}.")  # fmt: skip
    return write


def to_html(report: LoadReport) -> str:
    """One page that opens offline: the sentence, the picture, the table."""
    from markupsafe import Markup

    from microbatch import __version__
    from microbatch.palette import PALETTES
    from microbatch.reporting.canvas import inline_svg
    from microbatch.reporting.load_picture import draw

    drawn = _is_drawn(report)
    wide, narrow = (
        Markup(inline_svg(draw(report, width=width, heading=False), width, variables=True)) if drawn else ""
        for width in ("wide", "narrow")
    )
    return _template().render(
        version=__version__, light=PALETTES["light"], dark=PALETTES["dark"], subject=load_text.subject(report),
        headline=report.verdict, wide=wide, narrow=narrow, table=load_text.table_of(report),
        notes=load_text.notes(report),
    )  # fmt: skip


def to_notebook(report: LoadReport) -> str:
    """The sentence and the picture, which a cell shows."""
    from markupsafe import escape

    from microbatch.reporting.canvas import inline_svg
    from microbatch.reporting.load_picture import draw

    picture = inline_svg(draw(report, heading=False), "load", variables=False) if _is_drawn(report) else ""
    return f"<p>{escape(report.verdict)}</p>{picture}"


def _is_drawn(report: LoadReport) -> bool:
    return any(run.histogram for run in report.runs)


@lru_cache(maxsize=1)
def _template() -> Template:
    from jinja2 import Environment, StrictUndefined

    source = files("microbatch.reporting").joinpath("load.html.jinja").read_text(encoding="utf-8")
    return Environment(autoescape=True, undefined=StrictUndefined).from_string(source)


def _json(report: LoadReport) -> bytes:
    from microbatch.reporting.save import pretty_json

    return pretty_json(report.to_json())


def _text(report: LoadReport) -> bytes:
    return ("\n".join(load_text.lines(report)) + "\n").encode()


def _html(report: LoadReport) -> bytes:
    return to_html(report).encode()


def _csv(report: LoadReport) -> bytes:
    """The histograms: ``load,seconds,requests``, a row for each bucket with its upper edge."""
    stream = io.StringIO()
    rows = csv.writer(stream, lineterminator="\n")
    rows.writerow(("load", "seconds", "requests"))
    rows.writerows((named(run), f"{edge:.6g}", count) for run in report.runs for edge, count in run.histogram)
    return stream.getvalue().encode()


def _picture(form: str) -> Callable[[LoadReport], bytes]:
    def write(report: LoadReport) -> bytes:
        from microbatch.reporting.canvas import image
        from microbatch.reporting.load_picture import draw

        return image(draw(report), form)

    return write


FORMS: dict[str, Callable[[LoadReport], bytes]] = {
    ".json": _json,
    ".html": _html,
    ".png": _picture("png"),
    ".svg": _picture("svg"),
    ".pdf": _picture("pdf"),
    ".txt": _text,
    ".csv": _csv,
}
