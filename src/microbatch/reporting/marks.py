"""The sizes that a picture points at: the one to use, the ridge, the zones to avoid."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, log, sqrt
from typing import Literal

from matplotlib.axes import Axes

from microbatch.curves.explanation import Cliff, Explanation, Ridge
from microbatch.reporting import wording
from microbatch.reporting.canvas import Sheet
from microbatch.units import format_number


def shade_zones(axes: Axes, explanation: Explanation, colours: dict[str, str]) -> None:
    """A hatched band for each cliff, from the edge before its first slow size to the edge after its last."""
    for first, last in bands(explanation):
        axes.axvspan(first, last, facecolor=colours["avoid"], alpha=0.13, linewidth=0, zorder=0.5)
        axes.axvspan(first, last, facecolor="none", edgecolor=colours["avoid"], hatch="////", linewidth=0, zorder=0.6)


def bands(explanation: Explanation) -> list[tuple[float, float]]:
    """Zones to avoid with overlapping ones joined; each ends half-way (in ratio) to the measured neighbours."""
    joined: list[tuple[float, float]] = []
    for first, last in sorted(_band(cliff, explanation.profile.batch_sizes) for cliff in explanation.cliffs):
        if joined and first <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(last, joined[-1][1]))
        else:
            joined.append((first, last))
    return joined


def _band(cliff: Cliff, measured: tuple[int, ...]) -> tuple[float, float]:
    after = min((size for size in measured if size > cliff.to_size), default=cliff.to_size)
    return sqrt(cliff.from_size * cliff.batch_size), sqrt(cliff.to_size * after)


def mark_sizes(panels: list[Axes], explanation: Explanation, colours: dict[str, str], title: str, sheet: Sheet) -> None:
    """Upright lines through all panels for the size to use and the ridge; title and labels above the first panel."""
    chosen = explanation.recommended.batch_size
    for axes in panels:
        # The halo keeps a gap open where zones to avoid end close by on both sides.
        axes.axvline(chosen, color=colours["background"], linewidth=7, zorder=0.8)
        axes.axvline(chosen, color=colours["use"], linewidth=1.2, zorder=1.6)
    labels = [_place(panels[0], chosen, f"use {format_number(chosen)}", colours["use"])]
    if ridge_is_visible(panels[0], explanation):
        _draw_ridge(panels, explanation.ridge, colours)
        text = _ridge_text(explanation.ridge)
        labels.insert(0, _place(panels[0], explanation.ridge.value or 1, text, colours["ridge"]))
    heading = Label(place=0.0, side="left", text=title, colour=colours["text"])
    for row, label in stacked([heading, *labels], sheet):
        _write(panels[0], label, row, sheet, bold=label.colour != colours["ridge"])


def write_title(axes: Axes, title: str, colours: dict[str, str], sheet: Sheet) -> None:
    """The title of a panel that has no labels above it."""
    _write(axes, Label(place=0.0, side="left", text=title, colour=colours["text"]), 0, sheet, bold=True)


def ridge_is_visible(axes: Axes, explanation: Explanation) -> bool:
    """True when the ridge lies within the sizes that the picture shows."""
    left, right = axes.get_xlim()
    return left <= (explanation.ridge.value or inf) <= right


def _draw_ridge(panels: list[Axes], found: Ridge, colours: dict[str, str]) -> None:
    left, right = panels[0].get_xlim()
    for axes in panels:
        axes.axvline(found.value or 1, color=colours["ridge"], linewidth=1.1, linestyle=(0, (5, 2)), zorder=1.5)
        if found.low and found.high:
            low, high = max(found.low, left), min(found.high, right)
            axes.axvspan(low, high, facecolor=colours["ridge"], alpha=0.16, linewidth=0, zorder=0.7)


def _ridge_text(found: Ridge) -> str:
    interval = f" ({wording.sizes(round(found.low), round(found.high))})" if found.low and found.high else ""
    return f"ridge {wording.rounded(found.value or 1)}{interval}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Label:
    """A text above a panel: its place from 0 at the left to 1 at the right, and the side of it that stands there."""

    place: float
    side: Literal["left", "center", "right"]
    text: str
    colour: str

    def extent(self, sheet: Sheet) -> tuple[float, float]:
        """Left and right end, in widths of the panel. DejaVu Sans Bold takes about 0.7 of its size for a letter."""
        width = 0.7 * sheet.font * len(self.text) / (0.8 * 72 * sheet.inches)
        start = self.place - {"left": 0.0, "center": width / 2, "right": width}[self.side]
        return start, start + width


def _place(axes: Axes, size: float, text: str, colour: str) -> Label:
    """A label at a size, leaning inwards near the edges."""
    left, right = axes.get_xlim()
    place = log(size / left) / log(right / left)
    side: Literal["left", "center", "right"] = "left" if place < 0.3 else "right" if place > 0.7 else "center"
    return Label(place=place, side=side, text=text, colour=colour)


def stacked(labels: list[Label], sheet: Sheet) -> list[tuple[int, Label]]:
    """Each label with its line, counted upwards from 0: the lowest on which it meets no label before it."""
    rows: list[tuple[int, Label]] = []
    for label in labels:
        taken = {row for row, other in rows if _meet(label.extent(sheet), other.extent(sheet))}
        rows.append((next(row for row in range(len(labels)) if row not in taken), label))
    return rows


def _meet(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one[0] < other[1] + 0.02 and other[0] < one[1] + 0.02


def _write(axes: Axes, label: Label, row: int, sheet: Sheet, *, bold: bool) -> None:
    axes.annotate(
        label.text, xy=(label.place, 1), xycoords="axes fraction", xytext=(0, 5 + row * 1.45 * sheet.font),
        textcoords="offset points", ha=label.side, va="bottom", color=label.colour, fontsize=sheet.font,
        fontweight="bold" if bold else "normal", annotation_clip=False,
    )  # fmt: skip
