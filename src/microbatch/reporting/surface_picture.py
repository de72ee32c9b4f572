"""Sequence × batch as a heat map: colour is the share of each length's best throughput, framed: the batch to use."""

from __future__ import annotations

from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from microbatch.curves.explanation import Explanation
from microbatch.errors import InvalidSettings
from microbatch.palette import Theme
from microbatch.reporting import wording
from microbatch.reporting.canvas import Sheet, Width, style
from microbatch.reporting.marks import write_title
from microbatch.reporting.picture import tick_text, write_heading
from microbatch.reporting.surface import Grid, grid_of

COLOURS = "cividis"
"""Looks the same with and without colour blindness, and in grey (Nuñez et al., PLoS ONE 13(7), 2018)."""
ON_DARK, ON_LIGHT = "#fdfdfd", "#101316"
"""Colours of the figures in the cells; none of the palette's, since the cells keep their colours in a dark page."""
MOST_COLUMNS: dict[Width, int] = {"wide": 18, "narrow": 6}


def draw_surface(
    explanation: Explanation, *, width: Width = "wide", theme: Theme = "light", heading: bool = True
) -> Figure:
    """One cell for each sequence length and batch size, with its throughput; empty where memory ends.

    Raises:
        InvalidSettings: the profile has no surface.
    """
    profile = explanation.profile
    if not profile.surface:
        raise InvalidSettings("This profile has no surface to draw.", "Predict it with --surface 128,512,2048.")
    grid = _thinned(grid_of(profile.surface), MOST_COLUMNS[width])
    with style(width, theme) as (sheet, colours):
        rows = len(grid.sequences)
        figure = Figure(figsize=(sheet.inches, 1.35 + rows * (0.42 if width == "wide" else 0.4)), layout="constrained")
        axes = figure.subplots()
        _cells(axes, grid, sheet, colours)
        _ticks(axes, grid, explanation, colours)
        write_title(axes, f"{wording.unit_of(profile)} per second", colours, sheet)
        if heading:
            write_heading(figure, profile, sheet)
    return figure


def _thinned(grid: Grid, most: int) -> Grid:
    """Every batch to use stays; of the others so many that the figures in the cells do not meet."""
    best = {grid.batch_sizes.index(size) for size in grid.best}
    count = len(grid.batch_sizes)
    if count <= most:
        return grid
    order = sorted(range(count), key=lambda i: (i not in best, min((abs(i - j) for j in best), default=0)))
    kept = sorted(order[: max(most, len(best))])
    return Grid(
        sequences=grid.sequences,
        batch_sizes=tuple(grid.batch_sizes[i] for i in kept),
        throughput=tuple(tuple(row[i] for i in kept) for row in grid.throughput),
        best=grid.best,
    )


def _cells(axes: Axes, grid: Grid, sheet: Sheet, colours: dict[str, str]) -> None:
    table = np.array([[np.nan if value is None else value for value in row] for row in grid.throughput])
    share = np.ma.masked_invalid(table / np.nanmax(table, axis=1, keepdims=True))
    colour_map = mpl.colormaps[COLOURS]
    axes.pcolormesh(share, cmap=colour_map, vmin=0.0, vmax=1.0, edgecolors=colours["background"], linewidth=1.5)
    size = sheet.font - 1.5

    def is_best(row: int, column: int) -> bool:
        return grid.batch_sizes[column] == grid.best[row]

    for row, values in enumerate(grid.throughput):
        for column, value in enumerate(values):
            if value is not None:
                colour = ON_LIGHT if share[row, column] > 0.55 else ON_DARK
                weight = "bold" if is_best(row, column) else "normal"
                axes.text(column + 0.5, row + 0.5, tick_text(float(f"{value:.2g}")), ha="center", va="center",
                          color=colour, fontsize=size, fontweight=weight)  # fmt: skip
        column = grid.batch_sizes.index(grid.best[row])
        axes.add_patch(_frame(column, row, colours))


def _frame(column: int, row: int, colours: dict[str, str]) -> Rectangle:
    frame: dict[str, Any] = {"facecolor": "none", "edgecolor": colours["use"], "linewidth": 2.6, "zorder": 3}
    return Rectangle((column + 0.03, row + 0.03), 0.94, 0.94, **frame)


def _ticks(axes: Axes, grid: Grid, explanation: Explanation, colours: dict[str, str]) -> None:
    axes.grid(visible=False)
    axes.tick_params(length=0, pad=4)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.set_xticks(
        [i + 0.5 for i in range(len(grid.batch_sizes))], [tick_text(b, whole=True) for b in grid.batch_sizes]
    )
    axes.set_yticks([i + 0.5 for i in range(len(grid.sequences))], [tick_text(s, whole=True) for s in grid.sequences])
    name = "tokens in the cache" if explanation.profile.mode == "decode" else "sequence, tokens"
    axes.set_ylabel(name, color=colours["muted"])
    axes.set_xlabel(
        f"batch size, {wording.unit_of(explanation.profile)}; framed: the batch to use", color=colours["muted"]
    )
