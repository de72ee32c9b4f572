"""The article's plots as pictures: the curves of one section on logarithmic axes, each ridge marked."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from microbatch.errors import InvalidSettings
from microbatch.profiling.article import Section
from microbatch.profiling.article_curve import Curve
from microbatch.reporting.canvas import Sheet, Width, label_ticks, log_axes, padded, size_ticks, style, value_ticks
from microbatch.reporting.marks import write_title
from microbatch.reporting.palette import Theme
from microbatch.reporting.picture import tick_text
from microbatch.units import format_number, format_seconds

_QUANTITIES = {"seconds": "time per call", "gain": "items per second, smallest batch = 1"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Stroke:
    """How one curve is drawn: a colour of the palette, a dash and a mark, so that a grey printer keeps it apart."""

    colour: str
    dash: str | tuple[int, tuple[float, ...]]
    mark: str


STROKES = (
    Stroke(colour="data", dash="-", mark="o"),
    Stroke(colour="avoid", dash=(0, (5, 2)), mark="s"),
    Stroke(colour="use", dash=(0, (1, 1.2)), mark="^"),
    Stroke(colour="ridge", dash=(0, (6, 2, 1, 2)), mark="v"),
    Stroke(colour="bandwidth_roof", dash=(0, (3, 1)), mark="P"),
    Stroke(colour="overhead", dash=(0, (8, 2)), mark="X"),
    Stroke(colour="compute_roof", dash=(0, (2, 2)), mark="*"),
)


def has_curves(section: Section) -> bool:
    """True when there is anything to draw."""
    return any(curve.seconds for curve in section.curves)


def draw_section(section: Section, *, width: Width = "wide", theme: Theme = "light", heading: bool = True) -> Figure:
    """One picture with every measured curve of a section and, on each, a diamond at its ridge.

    Args:
        width: ``wide`` is for a page or a paper, ``narrow`` for a telephone or one column.
        theme: colours on white or on near black.
        heading: write the section's title above; a page that says it itself leaves it out.

    Raises:
        InvalidSettings: no curve of the section was measured.
    """
    measured = [curve for curve in section.curves if curve.seconds]
    if not measured:
        raise InvalidSettings(f"No curve of {section.title!r} was measured.", "Run it again on a quieter machine.")
    with style(width, theme) as (sheet, colours):
        height = sheet.inches * (0.5 if width == "wide" else 1.3)
        figure = Figure(figsize=(sheet.inches, height), layout="constrained")
        axes = figure.subplots()
        _axes(axes, section, measured, sheet, colours)
        for curve, stroke in zip(measured, STROKES):
            _line(axes, curve, _values(section, curve), stroke, colours)
        write_title(axes, _QUANTITIES[section.quantity], colours, sheet)
        figure.legend(loc="outside lower left", ncols=_legend_columns(sheet), columnspacing=1.4)
        if heading:
            figure.suptitle(textwrap.fill(section.title, sheet.letters), fontsize=sheet.font, x=0.01, ha="left")
    return figure


def _legend_columns(sheet: Sheet) -> int:
    """The labels name their ridge, so they are long."""
    return max(sheet.legend_columns - 1, 1)


def _values(section: Section, curve: Curve) -> dict[int, float]:
    return curve.seconds if section.quantity == "seconds" else curve.gains


def _axes(axes: Axes, section: Section, measured: list[Curve], sheet: Sheet, colours: dict[str, str]) -> None:
    values = [_values(section, curve) for curve in measured]
    sizes = sorted({size for curve in values for size in curve})
    log_axes(axes, padded([float(size) for size in sizes], 0.04), padded([y for c in values for y in c.values()]))
    places = value_ticks(*axes.get_ylim())
    text = format_seconds if section.quantity == "seconds" else tick_text
    label_ticks(axes, "y", places, [text(place) for place in places])
    places = size_ticks(*axes.get_xlim(), sheet.ticks, tuple(sizes))
    label_ticks(axes, "x", places, [tick_text(place, whole=True) for place in places])
    axes.set_xlabel("batch size", color=colours["muted"])


def _line(axes: Axes, curve: Curve, values: dict[int, float], stroke: Stroke, colours: dict[str, str]) -> None:
    sizes, heights = list(values), list(values.values())
    colour = colours[stroke.colour]
    axes.plot(
        sizes, heights, color=colour, linestyle=stroke.dash, linewidth=1.4, marker=stroke.mark, markersize=3.5,
        label=curve_label(curve), zorder=2,
    )  # fmt: skip
    if curve.ridge is not None and sizes[0] <= curve.ridge <= sizes[-1]:
        height = float(np.exp(np.interp(np.log(curve.ridge), np.log(sizes), np.log(heights))))
        axes.plot(
            [curve.ridge], [height], linestyle="", marker="D", markersize=8, markeredgewidth=1.6,
            markeredgecolor=colour, markerfacecolor=colours["background"], zorder=3,
        )  # fmt: skip


def curve_label(curve: Curve) -> str:
    """The curve's name with its ridge, and overhead-bound where the knee says nothing about memory."""
    ridge = f"ridge {format_number(curve.ridge)}" if curve.ridge is not None else "no ridge"
    bound = ", overhead-bound" if curve.overhead_bound else ""
    return f"{curve.label}: {ridge}{bound}"
