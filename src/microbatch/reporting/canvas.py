"""What every picture shares: its size, its style, logarithmic axes with readable ticks, and its forms as bytes.

Pictures are drawn on matplotlib's object-oriented `Figure` under an explicit style, so neither a user's own
matplotlibrc nor the state of pyplot can change them.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil, floor, log10
from typing import Literal

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

from microbatch.palette import PALETTES, Theme

Width = Literal["wide", "narrow"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sheet:
    """The room that a picture has: inches, the columns of its legend, and how many ticks fit along an axis."""

    inches: float
    legend_columns: int
    ticks: int
    font: float
    letters: int
    """Letters of a heading that fit on one line."""


SHEETS: dict[Width, Sheet] = {
    "wide": Sheet(inches=10.0, legend_columns=4, ticks=14, font=9.0, letters=120),
    "narrow": Sheet(inches=3.6, legend_columns=2, ticks=6, font=8.0, letters=46),
}

FONTS = ["DejaVu Sans"]
"""Laid out in the font that matplotlib brings along; it is wider than most, so that others fit as well."""

_PAGE_FONTS = "system-ui, 'DejaVu Sans', sans-serif"


@contextmanager
def style(width: Width, theme: Theme) -> Iterator[tuple[Sheet, dict[str, str]]]:
    """The sheet and the colours, with matplotlib set up for them."""
    sheet, colours = SHEETS[width], PALETTES[theme]
    settings = {
        "figure.facecolor": colours["background"], "axes.facecolor": colours["background"],
        "text.color": colours["text"], "axes.labelcolor": colours["muted"], "axes.edgecolor": colours["grid"],
        "xtick.color": colours["grid"], "ytick.color": colours["grid"], "xtick.labelcolor": colours["muted"],
        "ytick.labelcolor": colours["muted"], "grid.color": colours["grid"], "grid.linewidth": 0.6,
        "font.family": FONTS, "font.size": sheet.font, "text.parse_math": False, "text.usetex": False,
        "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True, "axes.grid": True,
        "hatch.linewidth": 0.5, "legend.frameon": False, "legend.handlelength": 2.4, "legend.fontsize": sheet.font,
        "legend.labelcolor": colours["text"], "path.simplify": True,
    }  # fmt: skip
    with mpl.rc_context(mpl.rcParamsDefault | settings):  # type: ignore[arg-type]
        yield sheet, colours


_STAMPS = {
    "svg": ("Date", "Creator", "Format", "Type"),
    "pdf": ("CreationDate", "Creator", "Producer"),
    "png": ("Software",),
}
"""What matplotlib would write into a file beside the picture."""


def image(figure: Figure, form: str) -> bytes:
    """The picture as ``png``, ``svg`` or ``pdf``: the same bytes for the same result, with text kept as text."""
    settings = {"svg.fonttype": "none", "svg.hashsalt": "microbatch", "pdf.fonttype": 42}
    stream = io.BytesIO()
    with mpl.rc_context(settings):  # type: ignore[arg-type]
        figure.savefig(stream, format=form, dpi=200, metadata=dict.fromkeys(_STAMPS[form]))
    return stream.getvalue()


def inline_svg(figure: Figure, name: str, *, variables: bool) -> str:
    """The picture as an ``<svg>`` element to stand inside a page, ids prefixed by ``name``.

    With ``variables`` each colour of the light set becomes ``var(--its-name)``, so that one picture serves both
    themes. Namespaces and the prologue are left out: HTML needs neither. Coordinates keep two decimals.
    """
    svg = image(figure, "svg").decode()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(
        r'<svg [^>]*viewBox="([^"]*)"[^>]*>', rf'<svg viewBox="\1" class="{name}" aria-hidden="true">', svg, count=1
    )
    svg = svg.replace("xlink:href", "href")
    svg = re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r"<(?:metadata>.*?</metadata|!--.*?--)>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"(?<=[ \"(,])-?\d+\.\d{3,}", _two_decimals, svg)
    svg = svg.replace("'DejaVu Sans'", _PAGE_FONTS)
    return _with_variables(svg) if variables else svg


def _two_decimals(match: re.Match[str]) -> str:
    return f"{float(match[0]):.2f}".rstrip("0").rstrip(".")


def _with_variables(svg: str) -> str:
    names = {colour: name for name, colour in PALETTES["light"].items()}
    return re.sub(r"#[0-9a-f]{6}\b", lambda match: f"var(--{names[match[0]]})" if match[0] in names else match[0], svg)


def log_axes(axes: Axes, horizontal: tuple[float, float], vertical: tuple[float, float]) -> None:
    """Logarithmic axes over the given ranges; nothing is drawn on the second axis of ticks."""
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(*horizontal)
    axes.set_ylim(*vertical)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())
    axes.tick_params(length=3, pad=4)


def label_ticks(axes: Axes, which: Literal["x", "y"], places: list[float], texts: list[str]) -> None:
    """Ticks at the places, with the texts."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(FixedLocator(places))
    axis.set_major_formatter(FixedFormatter(texts))


def size_ticks(low: float, high: float, most: int, fallback: tuple[int, ...]) -> list[float]:
    """Powers of two within the range, at most ``most`` of them evenly; the measured sizes when the range is small."""
    powers = [2.0**power for power in range(64) if low <= 2.0**power <= high]
    places = powers if len(powers) >= 3 else [float(size) for size in fallback if low <= size <= high]
    step = ceil(len(places) / most)
    return places[:: max(step, 1)]


def value_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round figures within the range: 1, 2 and 5 times powers of ten, or coarser, or finer when too few are inside."""
    decades = range(floor(log10(low)) - 1, ceil(log10(high)) + 1)
    for steps in ((1, 2, 5), (1,)):
        places = [step * 10.0**decade for decade in decades for step in steps if low <= step * 10.0**decade <= high]
        if 2 <= len(places) <= most:
            return places
    if len(places) > most:
        return places[:: ceil(len(places) / most)]
    return _linear_ticks(low, high)


def _linear_ticks(low: float, high: float) -> list[float]:
    """A narrow range: multiples of 1, 2 or 5 times a power of ten, three to six of them."""
    unit = 10.0 ** floor(log10(high - low))
    for step in (unit, unit / 2, unit / 5):
        places = [step * index for index in range(ceil(low / step), floor(high / step) + 1)]
        if len(places) >= 3:
            return places
    return places


def padded(values: list[float], share: float = 0.06) -> tuple[float, float]:
    """The range of the values with a margin on a logarithmic scale; a range of its own around one value."""
    low, high = min(values), max(values)
    margin = 1.5 if low == high else max((high / low) ** share, 1.05)
    return low / margin, high * margin
