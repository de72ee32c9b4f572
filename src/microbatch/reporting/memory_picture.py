"""Memory over the batch size as a picture: what was measured, the predicted line, and the limit."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from microbatch.curves.explanation import Explanation
from microbatch.curves.profile import MemoryCurve, Profile
from microbatch.errors import InvalidSettings
from microbatch.palette import Theme
from microbatch.reporting import wording
from microbatch.reporting.canvas import Sheet, Width, label_ticks, log_axes, padded, size_ticks, style, value_ticks
from microbatch.reporting.marks import write_title
from microbatch.reporting.picture import tick_text, write_heading
from microbatch.units import format_bytes


def has_memory(profile: Profile) -> bool:
    """True when there is anything to draw."""
    return profile.memory is not None or any(point.peak_bytes for point in profile.points)


def draw_memory(
    explanation: Explanation, *, width: Width = "wide", theme: Theme = "light", heading: bool = True
) -> Figure:
    """Peak bytes by batch size, on logarithmic axes.

    Raises:
        InvalidSettings: the profile has no memory figures.
    """
    profile = explanation.profile
    if not has_memory(profile):
        raise InvalidSettings("This profile has no memory figures to draw.", "Measure it with microbatch profile.")
    with style(width, theme) as (sheet, colours):
        figure = Figure(figsize=(sheet.inches, sheet.inches * (0.36 if width == "wide" else 1.0)), layout="constrained")
        axes = figure.subplots()
        _limits(axes, explanation)
        if profile.memory:
            _lines(axes, profile.memory, colours)
        _points(axes, explanation, colours)
        _ticks(axes, explanation, sheet)
        write_title(axes, "peak memory", colours, sheet)
        figure.legend(loc="outside lower left", ncols=sheet.legend_columns, columnspacing=1.4)
        if heading:
            write_heading(figure, profile, sheet)
    return figure


def _measured(profile: Profile) -> list[tuple[int, int]]:
    return [(point.batch_size, point.peak_bytes) for point in profile.points if point.peak_bytes]


def _limits(axes: Axes, explanation: Explanation) -> None:
    profile, memory = explanation.profile, explanation.profile.memory
    sizes = [float(size) for size in profile.batch_sizes]
    values = [float(peak) for _, peak in _measured(profile)]
    if memory:
        sizes += [float(memory.predicted_largest)] if memory.predicted_largest else []
        values += [memory.limit_bytes * 1.1, predicted_bytes(memory, sizes[0])]
    log_axes(axes, padded(sizes, 0.04), padded(values, 0.08))


def predicted_bytes(memory: MemoryCurve, batch_size: float) -> float:
    """peak(b) = fixed + slope·b"""
    return memory.fixed_bytes + memory.bytes_per_item * batch_size


def _lines(axes: Axes, memory: MemoryCurve, colours: dict[str, str]) -> None:
    grid = np.geomspace(*axes.get_xlim(), 120)
    line = [predicted_bytes(memory, size) for size in grid]
    axes.plot(grid, line, color=colours["fit"], linestyle=(0, (1, 1.4)), linewidth=1.5, label="predicted", zorder=2)
    limit = f"limit {format_bytes(memory.limit_bytes)}"
    axes.axhline(memory.limit_bytes, color=colours["target"], linestyle=(0, (8, 3)), linewidth=1.2, label=limit)
    if memory.margin:
        usable = memory.limit_bytes * (1 - memory.margin)
        label = f"less {memory.margin:.0%} kept free".replace("%", " %")
        axes.axhline(usable, color=colours["target"], linestyle=(0, (1, 2)), linewidth=1.2, label=label)


def _points(axes: Axes, explanation: Explanation, colours: dict[str, str]) -> None:
    measured = _measured(explanation.profile)
    if measured:
        axes.plot(
            *zip(*measured),
            color=colours["data"],
            linewidth=0.9,
            marker="o",
            markersize=3.2,
            label="measured",
            zorder=2.5,
        )
    chosen = explanation.recommended.batch_size
    peak = wording.peak_bytes(explanation.profile, chosen)
    if peak:
        axes.plot([chosen], [peak], linestyle="", marker="D", markersize=7, color=colours["use"], zorder=3,
                  markeredgecolor=colours["background"], markeredgewidth=1.2, label=f"use {chosen}")  # fmt: skip


def _ticks(axes: Axes, explanation: Explanation, sheet: Sheet) -> None:
    places = value_ticks(*axes.get_ylim())
    label_ticks(axes, "y", places, [format_bytes(place) for place in places])
    places = size_ticks(*axes.get_xlim(), sheet.ticks, explanation.profile.batch_sizes)
    label_ticks(axes, "x", places, [tick_text(place, whole=True) for place in places])
    axes.set_xlabel(f"batch size, {wording.unit_of(explanation.profile)}")
