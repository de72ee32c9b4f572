"""The article's plots as pictures: the curves of one section on logarithmic axes, each ridge marked."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from microbatch.errors import InvalidSettings
from microbatch.palette import Theme
from microbatch.profiling.article import Section
from microbatch.profiling.article_curve import Curve
from microbatch.reporting.canvas import (
    SHEETS,
    Sheet,
    Width,
    label_ticks,
    log_axes,
    padded,
    size_ticks,
    style,
    value_ticks,
)
from microbatch.reporting.marks import write_title
from microbatch.reporting.picture import tick_text
from microbatch.units import format_number, format_seconds

WIDE = 6.0
"""Inches from which several panels stand side by side."""
MOST_MARKS = 20

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """One set of axes: its heading, and its curves with their strokes."""

    title: str
    curves: tuple[tuple[Curve, Stroke], ...]


def draw_section(section: Section, *, width: Width = "wide", theme: Theme = "light", heading: bool = True) -> Figure:
    """One picture with every curve of a section and, on each, a diamond at its ridge.

    Curves that were computed for another device stand in panels of their own beside (narrow: below) the measured
    ones, on the same scales.

    Args:
        width: ``wide`` is for a page or a paper, ``narrow`` for a telephone or one column.
        theme: colours on white or on near black.
        heading: write the section's title above; a page that says it itself leaves it out.

    Raises:
        InvalidSettings: no curve of the section was measured.
    """
    panels = _panels(section)
    if not panels[0].curves:
        raise InvalidSettings(f"No curve of {section.title!r} was measured.", "Run it again on a quieter machine.")
    with style(width, theme) as (sheet, colours):
        figure = Figure(figsize=(sheet.inches, _height(width, len(panels))), layout="constrained")
        shape = (1, len(panels)) if width == "wide" else (len(panels), 1)
        grid = figure.subplots(*shape, sharex=True, sharey=True, squeeze=False).ravel()
        ranges = _ranges(section, panels)
        for axes, panel in zip(grid, panels, strict=True):
            _panel(axes, section, panel, ranges, sheet, colours)
            axes.label_outer()
        figure.legend(
            *_legend(panels, colours), loc="outside lower left", ncols=_legend_columns(sheet, panels), columnspacing=1.4
        )
        if heading:
            figure.suptitle(textwrap.fill(section.title, sheet.letters), fontsize=sheet.font, x=0.01, ha="left")
    return figure


def _height(width: Width, panels: int) -> float:
    sheet = SHEETS[width]
    return sheet.inches * (0.5 if width == "wide" else 1.3 if panels == 1 else 0.4 + 0.9 * panels)


def _panels(section: Section) -> tuple[Panel, ...]:
    """What was measured, then one for each device and dtype that was computed; a curve keeps its stroke."""
    quantity = _QUANTITIES[section.quantity]
    strokes = {curve.label: stroke for curve, stroke in zip(section.curves, STROKES)}

    def panel(title: str, curves: tuple[Curve, ...]) -> Panel:
        return Panel(title=title, curves=tuple((curve, strokes[curve.label]) for curve in curves if curve.seconds))

    if not section.predictions:
        return (panel(quantity, section.curves),)
    computed = (panel(f"computed, {one.place}", one.curves) for one in section.predictions)
    return (panel(f"{quantity}: measured here", section.curves), *computed)


def _legend(panels: tuple[Panel, ...], colours: dict[str, str]) -> tuple[list[Line2D], list[str]]:
    """One entry per curve of the measured panel; where there are several panels the table names the ridges."""
    name = curve_label if len(panels) == 1 else (lambda curve: str(curve.label))
    entries = {name(curve): stroke for curve, stroke in panels[0].curves}
    return [_sample(stroke, colours) for stroke in entries.values()], list(entries)


def _sample(stroke: Stroke, colours: dict[str, str]) -> Line2D:
    return Line2D(
        [],
        [],
        color=colours[stroke.colour],
        linestyle=stroke.dash,  # type: ignore[arg-type]
        linewidth=1.4,
        marker=stroke.mark,
        markersize=3.5,
    )


def _legend_columns(sheet: Sheet, panels: tuple[Panel, ...]) -> int:
    """The labels of a single panel name their ridge, so they are long."""
    return max(sheet.legend_columns - (len(panels) == 1), 1)


def _values(section: Section, curve: Curve) -> dict[int, float]:
    return curve.seconds if section.quantity == "seconds" else curve.gains


def _ranges(section: Section, panels: tuple[Panel, ...]) -> tuple[list[int], list[float]]:
    """Every size and every value of all panels, since they share their scales."""
    values = [_values(section, curve) for panel in panels for curve, _ in panel.curves]
    return sorted({size for curve in values for size in curve}), [y for curve in values for y in curve.values()]


def _panel(
    axes: Axes, section: Section, panel: Panel, ranges: tuple[list[int], list[float]], sheet: Sheet,
    colours: dict[str, str],
) -> None:  # fmt: skip
    sizes, values = ranges
    log_axes(axes, padded([float(size) for size in sizes], 0.04), padded(values))
    places = value_ticks(*axes.get_ylim())
    text = format_seconds if section.quantity == "seconds" else tick_text
    label_ticks(axes, "y", places, [text(place) for place in places])
    most = sheet.ticks if len(section.predictions) == 0 or sheet.inches < WIDE else 5
    places = size_ticks(*axes.get_xlim(), most, tuple(sizes))
    label_ticks(axes, "x", places, [tick_text(place, whole=True) for place in places])
    axes.set_xlabel("batch size", color=colours["muted"])
    for curve, stroke in panel.curves:
        _line(axes, curve, _values(section, curve), stroke, colours)
    write_title(axes, panel.title, colours, sheet)


def _line(axes: Axes, curve: Curve, values: dict[int, float], stroke: Stroke, colours: dict[str, str]) -> None:
    sizes, heights = list(values), list(values.values())
    colour = colours[stroke.colour]
    axes.plot(
        sizes, heights, color=colour, linestyle=stroke.dash, linewidth=1.4, marker=stroke.mark, markersize=3.5,
        markevery=_every(sizes), zorder=2,
    )  # fmt: skip
    if curve.ridge is not None and sizes[0] <= curve.ridge <= sizes[-1]:
        height = float(np.exp(np.interp(np.log(curve.ridge), np.log(sizes), np.log(heights))))
        axes.plot(
            [curve.ridge], [height], linestyle="", marker="D", markersize=8, markeredgewidth=1.6,
            markeredgecolor=colour, markerfacecolor=colours["background"], zorder=3,
        )  # fmt: skip


def _every(sizes: list[int]) -> int:
    """A computed curve has many sizes: not each gets its mark."""
    return max(1, len(sizes) // MOST_MARKS)


def curve_label(curve: Curve) -> str:
    """The curve's name with its ridge, and overhead-bound where the knee says nothing about memory."""
    ridge = f"ridge {format_number(curve.ridge)}" if curve.ridge is not None else "no ridge"
    bound = ", overhead-bound" if curve.overhead_bound else ""
    return f"{curve.label}: {ridge}{bound}"
