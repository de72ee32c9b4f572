"""How predictions are shown: figures in the summary, the surface, a measurement drawn beside."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from microbatch.curves.beside import Beside, BesidePoint
from microbatch.curves.explanation import Explanation
from microbatch.curves.prediction import SurfacePoint
from microbatch.curves.profile import Profile
from microbatch.errors import InvalidSettings
from microbatch.profiling.beside import lay_beside
from microbatch.profiling.explain import explain
from microbatch.profiling.predict import predict
from microbatch.reporting.canvas import Width, inline_svg
from microbatch.reporting.page import to_html
from microbatch.reporting.picture import draw
from microbatch.reporting.surface import best_rows, grid_of
from microbatch.reporting.surface_picture import MOST_COLUMNS, draw_surface
from microbatch.reporting.tables import tables
from microbatch.reporting.text import to_details, to_text
from tests.reporting.test_picture import legend, overlaps
from tests.roofline import works
from tests.roofline.test_training import training_work

WIDTHS: tuple[Width, ...] = ("wide", "narrow")


@cache
def decoding() -> Explanation:
    return explain(
        predict(works.decoding(works.LLAMA_2_7B), works.plain("a100"), sequence=2048, surface=(128, 2048, 32768))
    )


@cache
def beside() -> Explanation:
    found = explain(predict(works.mlp(), works.plain("t4")))
    times = {size: found.point(size).seconds * (1.3 if size < 100 else 1.05) for size in (1, 2, 8, 64, 128, 256)}
    points = tuple(
        BesidePoint(batch_size=size, measured=t, predicted=found.point(size).seconds,
                    error=found.point(size).seconds / t - 1)
        for size, t in times.items()
    )  # fmt: skip
    return replace(
        found,
        beside=Beside(
            model="mlp", device="Intel Xeon Platinum 8481C", median_error=0.23, p90_error=0.231, bias=-0.23,
            points=points, findings=("Furthest off at 1, 23 % too fast.", "Every layer agrees."),
        ),
    )  # fmt: skip


def test_the_summary_tells_what_only_a_prediction_knows() -> None:
    text = to_text(decoding())
    assert "ridge by the datasheet 153 (no batch is compute-bound once activations move)" in text
    assert "context limit 169 tokens (beyond it no batch is compute-bound)" in text
    assert "half-way batch 13 (half of 1 900 tokens/s, the most at a context of 2 048)" in text.replace("\u202f", " ")
    assert "Best batch by context: " in text
    assert "largest that fits: 59" in text


def test_training_tells_the_optimizer() -> None:
    found = explain(predict(training_work(), works.plain("a100"), accumulation=1))
    assert "the step is bound by the optimizer" in to_text(found)
    found = explain(predict(training_work(), works.plain("a100"), accumulation=1000))
    assert "of each of 1" in to_text(found)


def test_a_measured_explanation_has_none_of_it() -> None:
    from tests.reporting import examples

    text = to_text(examples.rich())
    assert "datasheet" not in text
    assert "Beside" not in text


def test_the_measurement_is_told_with_its_reasons() -> None:
    text = to_text(beside())
    assert "off by 23 % at the median" in text
    assert "23 % too fast on the whole" in text
    assert "Every layer agrees." in text
    table = next(table for table in tables(beside()) if table.title == "Prediction beside measurement")
    assert [row[0] for row in table.rows] == ["1", "2", "8", "64", "128", "256"]
    assert table.rows[0][-1] == "-23 %"


def test_repeated_layers_stand_in_one_row_with_their_number() -> None:
    details = to_details(decoding())
    row = next(line for line in details.splitlines() if "layers.0.mlp.up" in line)
    assert " 32 " in row


@pytest.mark.parametrize("width", WIDTHS)
def test_no_text_overlaps(width: Width) -> None:
    assert overlaps(draw(beside(), width=width)) == []
    assert overlaps(draw(decoding(), width=width)) == []
    assert overlaps(draw_surface(decoding(), width=width)) == []


def test_measured_sizes_are_squares_without_a_line() -> None:
    assert "measured on Intel Xeon Platinum 8481C" in legend(beside())
    line = next(line for line in draw(beside()).axes[0].lines if str(line.get_label()).startswith("measured on"))
    assert (line.get_marker(), line.get_linestyle()) == ("s", "None")
    assert list(np.asarray(line.get_xdata())) == [1, 2, 8, 64, 128, 256]
    first = beside().beside
    assert first is not None
    assert np.asarray(line.get_ydata())[0] == pytest.approx(1 / first.points[0].measured)


def test_the_surface_is_a_grid_with_the_batch_to_use_in_each_row() -> None:
    surface = decoding().profile.surface
    grid = grid_of(surface)
    assert grid.sequences == (128, 2048, 32768)
    for row, best in zip(grid.throughput, grid.best, strict=True):
        known = [value for value in row if value is not None]
        assert row[grid.batch_sizes.index(best)] == pytest.approx(max(known), rel=0.02)
    assert None in grid.throughput[-1]


def test_of_sizes_that_do_not_fit_none_is_the_best() -> None:
    rows = [SurfacePoint(sequence=8, batch_size=b, seconds=1.0, throughput=float(b), fits=b <= 4) for b in (1, 2, 4, 8)]
    assert [row.batch_size for row in best_rows(rows)] == [4]


def test_a_narrow_surface_keeps_every_batch_to_use() -> None:
    axes = draw_surface(decoding(), width="narrow").axes[0]
    ticks = [text.get_text() for text in axes.get_xticklabels()]
    assert len(ticks) <= MOST_COLUMNS["narrow"]
    assert {str(size) for size in grid_of(decoding().profile.surface).best} <= set(ticks)


def test_the_cells_keep_their_colours_in_a_dark_page() -> None:
    svg = inline_svg(draw_surface(decoding()), "surface", variables=True)
    cells = svg.split('id="surface-')  # ids are prefixed, so that two pictures may stand in one page
    assert len(cells) > 1
    assert "var(--use)" in svg
    assert "#fdfdfd" in svg
    assert "#101316" in svg


def test_a_profile_without_a_surface_has_no_picture_of_one() -> None:
    with pytest.raises(InvalidSettings, match="no surface"):
        draw_surface(beside())
    assert "Sequence × batch" not in to_html(beside())


def test_the_page_shows_surface_and_measurement() -> None:
    page = to_html(decoding())
    assert page.count("<h2>Sequence × batch</h2>") == 2  # the picture and the table
    assert "context limit" in page
    page = to_html(beside())
    assert "<h2>Prediction beside measurement</h2>" in page
    assert "Every layer agrees." in page
    assert "computed, not run" in page


def test_the_whole_way_from_profile_to_page() -> None:
    told = lay_beside(explain(predict(works.mlp(), works.plain("t4"))), _measured())
    assert told.beside is not None
    assert to_html(told).count("<li>") > len(told.beside.findings)


def _measured() -> Profile:
    profile = beside().profile
    return replace(
        profile, source="measured", prediction=None,
        points=tuple(replace(p, samples=tuple(p.samples[0] * f for f in (1.1, 1.12, 1.11))) for p in profile.points),
    )  # fmt: skip
