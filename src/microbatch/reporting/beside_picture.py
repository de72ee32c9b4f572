"""A measurement drawn into the picture of a prediction: hollow squares beside the computed line."""

from __future__ import annotations

from collections.abc import Callable

from matplotlib.axes import Axes

from microbatch.curves.explanation import Explanation
from microbatch.reporting.wording import short


def measured_places(explanation: Explanation, value: Callable[[int, float], float]) -> list[tuple[int, float]]:
    """(batch size, value(batch size, measured seconds)); empty without a measurement beside."""
    found = explanation.beside
    return [(p.batch_size, value(p.batch_size, p.measured)) for p in found.points] if found else []


def draw_measured(axes: Axes, explanation: Explanation, places: list[tuple[int, float]], colour: str) -> None:
    """The measured sizes, without a line: what lies between them was not measured."""
    if not places or explanation.beside is None:
        return
    device = short(explanation.beside.device, 28)
    label = f"measured on {device}" if device else "measured"
    axes.plot(*zip(*places), linestyle="", marker="s", markersize=4.6, markerfacecolor="none", markeredgecolor=colour,
              markeredgewidth=1.1, label=label, zorder=2.7)  # fmt: skip
