"""Latency by percentile as a picture: a line for each run, on axes that show the tail."""

from __future__ import annotations

import textwrap
from itertools import cycle

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from microbatch.errors import InvalidSettings
from microbatch.palette import Theme
from microbatch.reporting.article_picture import STROKES
from microbatch.reporting.canvas import Width, label_ticks, log_axes, padded, style, value_ticks
from microbatch.units import format_seconds
from microbatch.web.load.result import LoadReport, Run
from microbatch.web.load.verdict import named

_TICKS = {2: "50 %", 10: "90 %", 100: "99 %", 1_000: "99.9 %", 10_000: "99.99 %", 100_000: "99.999 %"}
"""One request in so many is slower."""


def draw(report: LoadReport, *, width: Width = "wide", theme: Theme = "light", heading: bool = True) -> Figure:
    """The latency that each share of requests stays under.

    Raises:
        InvalidSettings: no run has an answer.
    """
    runs = [run for run in report.runs if run.histogram]
    if not runs:
        raise InvalidSettings("No request was answered, so there is nothing to draw.", "Write .json or .txt.")
    with style(width, theme) as (sheet, colours):
        figure = Figure(figsize=(sheet.inches, sheet.inches * (0.5 if width == "wide" else 1.1)), layout="constrained")
        axes = figure.subplots()
        curves = [curve_of(run) for run in runs]
        _scales(axes, report, curves)
        axes.set_xlabel("share of requests that are answered within", color=colours["muted"])
        for run, curve, stroke in zip(runs, curves, cycle(STROKES)):
            label = f"{named(run)}{' (void)' if run.void else ''}"
            axes.plot(*zip(*curve), color=colours[stroke.colour], linestyle=stroke.dash, linewidth=1.5, label=label)
        if report.target is not None:
            axes.axhline(report.target, color=colours["target"], linestyle=(0, (8, 3)), linewidth=1.2,
                         label=f"target {format_seconds(report.target)}")  # fmt: skip
        figure.legend(loc="outside lower left", ncols=sheet.legend_columns, columnspacing=1.4)
        if heading:
            title = textwrap.fill(report.verdict, sheet.letters)
            figure.suptitle(title, fontsize=sheet.font, x=0.01, ha="left")
    return figure


def curve_of(run: Run) -> list[tuple[float, float]]:
    """(one request in so many is slower than, seconds), ascending; the last is the slowest of all."""
    total = sum(count for _, count in run.histogram)
    seen, points = 0, []
    for edge, count in run.histogram:
        seen += count
        points.append((total / (total - seen + 0.5), min(edge, run.latency["max"] or edge)))
    first = points[0]
    return [(1.0, first[1]), *points]


def _scales(axes: Axes, report: LoadReport, curves: list[list[tuple[float, float]]]) -> None:
    seconds = [y for curve in curves for _, y in curve] + ([report.target] if report.target is not None else [])
    log_axes(axes, (1.0, max(20.0, *(x for curve in curves for x, _ in curve))), padded(seconds))
    places = value_ticks(*axes.get_ylim())
    label_ticks(axes, "y", places, [format_seconds(place) for place in places])
    shown = [place for place in _TICKS if place <= axes.get_xlim()[1]]
    label_ticks(axes, "x", [float(place) for place in shown], [_TICKS[place] for place in shown])
