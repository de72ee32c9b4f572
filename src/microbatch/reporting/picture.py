"""The curve as a picture: throughput above, time per call below, on logarithmic axes over the batch size."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from math import inf, isinf
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path

from microbatch.curves.explanation import Explanation, Fit
from microbatch.curves.profile import Point, Profile
from microbatch.palette import Theme
from microbatch.reporting import marks, wording
from microbatch.reporting.beside_picture import draw_measured, measured_places
from microbatch.reporting.canvas import Sheet, Width, label_ticks, log_axes, padded, size_ticks, style, value_ticks
from microbatch.units import format_seconds

MOST_MARKERS = 150
"""With more sizes than this, intervals become a band and points a line."""

MOST_SAMPLES = 3000
"""Raw samples drawn in one picture; with more, each size shows as many, spread evenly over its sorted times."""


def draw(explanation: Explanation, *, width: Width = "wide", theme: Theme = "light", heading: bool = True) -> Figure:
    """Two panels: items per second under the roofs of the device, and seconds per call with every raw sample.

    Args:
        width: ``wide`` is for a page or a paper, ``narrow`` for a telephone or one column.
        theme: colours on white or on near black.
        heading: say above the picture what was measured; a page that says so itself leaves it out.
    """
    with style(width, theme) as (sheet, colours):
        height = sheet.inches * (0.62 if width == "wide" else 1.75)
        figure = Figure(figsize=(sheet.inches, height), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(1.15, 1))
        _throughput_panel(above, explanation, colours)
        _time_panel(below, explanation, colours, sheet)
        title = f"{wording.unit_of(explanation.profile)} per second"
        marks.mark_sizes([above, below], explanation, colours, title, sheet)
        marks.write_title(below, "time per call", colours, sheet)
        _legend(figure, [above, below], explanation, colours, sheet)
        if heading:
            write_heading(figure, explanation.profile, sheet)
    return figure


def write_heading(figure: Figure, profile: Profile, sheet: Sheet) -> None:
    """What was measured, above the picture, on at most two lines."""
    text = textwrap.fill(wording.title(profile), sheet.letters, max_lines=2, placeholder=" …")
    figure.suptitle(text, fontsize=sheet.font, x=0.01, ha="left")


def fitted_seconds(fit: Fit, batch_size: float) -> float:
    """t(b) = (fixed^p + (c·b)^p)^(1/p), written so that no power overflows; p = ∞ is the larger of the two."""
    small, large = sorted((fit.fixed_seconds, fit.seconds_per_item * batch_size))
    if large <= 0 or isinf(fit.p):
        return large
    return large * float((1 + (small / large) ** fit.p) ** (1 / fit.p))


def _throughput_panel(axes: Axes, explanation: Explanation, colours: dict[str, str]) -> None:
    sizes = [point.batch_size for point in explanation.points]
    rates = [point.throughput for point in explanation.points]
    roofs = _roofs(explanation.profile)
    beside = measured_places(explanation, lambda size, seconds: size / seconds)
    every = (
        rates
        + [rate for _, rate in beside]
        + [rate for _, curve, *_ in roofs for rate in curve[1] if rate < 8 * max(rates)]
    )
    log_axes(axes, padded([float(size) for size in sizes], 0.04), padded(every, 0.08))
    marks.shade_zones(axes, explanation, colours)
    for name, curve, colour, dashes, thickness in roofs:
        axes.plot(*curve, color=colours[colour], linestyle=dashes, linewidth=thickness, label=name, zorder=1.8)
    _fit_line(axes, explanation, colours, lambda size, seconds: size / seconds)
    ends = [
        (point.batch_size / (point.high or inf), point.batch_size / (point.low or inf)) for point in explanation.points
    ]
    _curve(axes, explanation, rates, [end if end[0] and end[1] else None for end in ends], colours)
    draw_measured(axes, explanation, beside, colours["beside"])
    places = value_ticks(*axes.get_ylim())
    label_ticks(axes, "y", places, [tick_text(place) for place in places])


def _time_panel(axes: Axes, explanation: Explanation, colours: dict[str, str], sheet: Sheet) -> None:
    sizes = [point.batch_size for point in explanation.points]
    times = [point.seconds for point in explanation.points]
    overheads = _overheads(explanation.profile, min(times) / 8)
    target = explanation.latency_target
    beside = measured_places(explanation, lambda _, seconds: seconds)
    near = [time for _, time in (*overheads, *beside)] + ([target] if target else [])
    dots = _samples(explanation.profile)
    log_axes(axes, axes.get_xlim(), padded(times + near + [time for _, time in dots], 0.06))
    marks.shade_zones(axes, explanation, colours)
    if dots:
        axes.add_patch(_dots(dots, colours["samples"]))
        axes.plot([], [], linestyle="", marker=".", markersize=5, color=colours["samples"], label="single calls")
    _fit_line(axes, explanation, colours, lambda _, seconds: seconds)
    if overheads:
        axes.plot(*zip(*overheads), color=colours["overhead"], linestyle=(0, (3, 1, 1, 1, 1, 1)), linewidth=1.2,
                  label="overhead", zorder=1.8)  # fmt: skip
    if target:
        axes.axhline(
            target,
            color=colours["target"],
            linestyle=(0, (8, 3)),
            linewidth=1.2,
            label=f"target {format_seconds(target)}",
        )
    _curve(
        axes, explanation, times, [(p.low, p.high) if p.low and p.high else None for p in explanation.points], colours
    )
    draw_measured(axes, explanation, beside, colours["beside"])
    places = value_ticks(*axes.get_ylim())
    label_ticks(axes, "y", places, [format_seconds(place) for place in places])
    places = size_ticks(*axes.get_xlim(), sheet.ticks, tuple(sizes))
    label_ticks(axes, "x", places, [tick_text(place, whole=True) for place in places])
    axes.set_xlabel(f"batch size, {wording.unit_of(explanation.profile)}", color=colours["muted"])


def _fit_line(
    axes: Axes, explanation: Explanation, colours: dict[str, str], value: Callable[[float, float], float]
) -> None:
    """The smooth fit over the measured sizes, as ``value(batch size, seconds)``."""
    if explanation.fit is None:
        return
    sizes = explanation.profile.batch_sizes
    grid = [float(size) for size in np.geomspace(sizes[0], sizes[-1], 120)]
    fitted = [value(size, fitted_seconds(explanation.fit, size)) for size in grid]
    axes.plot(grid, fitted, color=colours["fit"], linestyle=(0, (1, 1.4)), linewidth=1.5, label="fit", zorder=2)


def _curve(
    axes: Axes,
    explanation: Explanation,
    values: list[float],
    ends: list[tuple[float, float] | None],
    colours: dict[str, str],
) -> None:
    """The measured values with their intervals, and the recommended one as a large diamond."""
    sizes = [point.batch_size for point in explanation.points]
    many = len(sizes) > MOST_MARKERS
    bars = [(size, *end) for size, end in zip(sizes, ends, strict=True) if end]
    if bars:
        at, low, high = (list(column) for column in zip(*bars, strict=True))
        if many:
            axes.fill_between(at, low, high, color=colours["data"], alpha=0.25, linewidth=0, zorder=2.4)
        else:
            axes.vlines(at, low, high, color=colours["data"], linewidth=1.1, zorder=2.4)
    known = "computed" if explanation.profile.source == "predicted" else "measured"
    label = f"{known}, 90 % interval" if bars else known
    axes.plot(
        sizes,
        values,
        color=colours["data"],
        linewidth=0.9,
        marker="" if many else "o",
        markersize=3.2,
        label=label,
        zorder=2.5,
    )
    chosen = sizes.index(explanation.recommended.batch_size)
    axes.plot([sizes[chosen]], [values[chosen]], linestyle="", marker="D", markersize=7, color=colours["use"],
              markeredgecolor=colours["background"], markeredgewidth=1.2, zorder=3)  # fmt: skip


def _overheads(profile: Profile, least: float) -> list[tuple[int, float]]:
    """Time in which no operator ran; empty when all of it lies so far below the calls that it would flatten them."""
    known = [(point.batch_size, point.overhead_seconds) for point in profile.points if point.overhead_seconds]
    return known if known and max(seconds for _, seconds in known) >= least else []


Roof = tuple[str, tuple[list[int], list[float]], str, object, float]


def _roofs(profile: Profile) -> list[Roof]:
    """The most items per second that the device's arithmetic and its memory allow, at each size with a count."""
    points, peaks = profile.points, profile.peaks
    compute = [(p.batch_size, p.batch_size * peaks.flops / p.flops) for p in points if peaks.flops and p.flops]
    memory = [
        (p.batch_size, p.batch_size * peaks.bandwidth / p.moved_bytes)
        for p in points
        if peaks.bandwidth and p.moved_bytes
    ]
    named = (
        ("compute roof", compute, "compute_roof", "-", 1.6),
        ("bandwidth roof", memory, "bandwidth_roof", (0, (6, 2, 1, 2)), 1.4),
    )
    return [
        (name, ([size for size, _ in curve], [rate for _, rate in curve]), colour, dashes, thickness)
        for name, curve, colour, dashes, thickness in named
        if curve
    ]


def _samples(profile: Profile) -> list[tuple[int, float]]:
    """Raw samples as (batch size, seconds) where a size has several; thinned evenly when there are very many."""
    repeated = [point for point in profile.points if len(point.samples) > 1]
    most = max(MOST_SAMPLES // max(len(repeated), 1), 3)
    return [(point.batch_size, seconds) for point in repeated for seconds in _spread(point, most)]


def _dots(places: list[tuple[int, float]], colour: str) -> PathPatch:
    """All samples as one path of strokes without length: with round ends they are dots, at 30 bytes each in an SVG."""
    ends = [(size, seconds * longer) for size, seconds in places for longer in (1.0, 1.0002)]
    path = Path(ends, [Path.MOVETO, Path.LINETO] * len(places))
    path.should_simplify = False
    return PathPatch(path, facecolor="none", edgecolor=colour, linewidth=2, capstyle="round", zorder=1.2, gid="calls")


def _spread(point: Point, most: int) -> list[float]:
    ordered = sorted(point.samples)
    if len(ordered) <= most:
        return ordered
    return [ordered[round(index * (len(ordered) - 1) / (most - 1))] for index in range(most)]


_ORDER = ("measured", "computed", "single", "fit", "compute", "bandwidth", "overhead", "target", "sizes")


def _legend(
    figure: Figure, panels: list[Axes], explanation: Explanation, colours: dict[str, str], sheet: Sheet
) -> None:
    found: dict[str, Any] = {
        label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels())
    }
    if explanation.cliffs:
        tint = Patch(facecolor=colours["avoid"], alpha=0.13, linewidth=0)
        found["sizes to avoid"] = (tint, Patch(facecolor="none", edgecolor=colours["avoid"], hatch="////", linewidth=0))
    labels = sorted(found, key=lambda label: _ORDER.index(label.replace(",", " ").split()[0]))
    handles = [found[label] for label in labels]
    figure.legend(handles, labels, loc="outside lower left", ncols=sheet.legend_columns, columnspacing=1.4)


def tick_text(value: float, *, whole: bool = False) -> str:
    """12 000 → ``12k``: short enough for a tick. Batch sizes below 100 000 are written out."""
    if whole and value < 100_000:
        return f"{value:.0f}"
    for factor, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.4g}{letter}"
    return f"{value:.4g}"
