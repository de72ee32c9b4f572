"""The article as text, page and folder; nothing external, every verdict and curve in it."""

from __future__ import annotations

import json
import math
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest

from microbatch.curves.explanation import Ridge
from microbatch.curves.profile import Environment, ExpertLoad, Point, Profile
from microbatch.errors import InvalidSettings
from microbatch.palette import PALETTES
from microbatch.profiling.article import Article, Prediction, Section
from microbatch.profiling.article_claims import Verdict
from microbatch.profiling.article_curve import Curve, read_curve
from microbatch.reporting.article_page import article_to_html, article_to_text, save_article
from microbatch.reporting.article_picture import STROKES, curve_label, draw_section
from microbatch.reporting.canvas import Width

SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)


def _curve(label: str, fixed: float, per_item: float, *, overhead: float = 0.0) -> Curve:
    rng = random.Random(label)
    points = tuple(
        Point(
            batch_size=size,
            samples=tuple((fixed + per_item * size) * math.exp(rng.gauss(0, 0.005)) for _ in range(7)),
            overhead_seconds=overhead * fixed,
        )
        for size in SIZES
    )
    environment = Environment(device="A quiet processor", threads=2, versions={"torch": "2.13.0"})
    profile = Profile(points=points, environment=environment)
    return read_curve(Curve(label=label, model="mlp"), profile)


LOAD = ExpertLoad(
    layer="0.layer", batch_size=8, tokens=8, tokens_per_expert=(6, 2, 0, 0), dropped=1, seconds=3.0, even_seconds=4.0
)


@pytest.fixture(scope="module")
def article() -> Article:
    curves = (
        _curve("wide", 4e-3, 1e-4),
        _curve("small", 1e-4, 1e-6, overhead=0.9),
        replace(_curve("restless", 1e-3, 1e-5), explanation=None, problem="One call varies by 30 %."),
        Curve(label="<noisy>", model="mlp", problem="The machine is too noisy."),
    )
    sections = (
        Section(
            key="first", title="Knees & <knees>", claim="There is one.", quantity="seconds", curves=curves,
            verdict=Verdict(holds=True, detail="40."),
        ),
        Section(
            key="second", title="Experts", claim="They are uneven.", quantity="gain",
            curves=(replace(curves[0], label="moe", routing=(LOAD,)),),
            verdict=Verdict(holds=False, detail="even."),
        ),
        Section(
            key="third", title="Nothing", claim="?", quantity="gain", curves=(curves[3],),
            verdict=Verdict(holds=None, detail="too noisy."),
        ),
    )  # fmt: skip
    return Article(sections=sections, budget=10, wall_seconds=12)


def test_text_says_each_claim_and_its_verdict(article: Article) -> None:
    text = article_to_text(article)
    for section in article.sections:
        assert section.claim in text and section.verdict.sentence in text
    assert "1 of 3 claims hold here" in text
    assert "<noisy>: The machine is too noisy." in text
    assert "1 of 4 curves are too noisy to tell cliffs. One call varies by 30 %." in text


def test_page_is_whole_and_needs_nothing_from_outside(article: Article) -> None:
    page = article_to_html(article)
    assert not re.search(r"https?://|src=|<script|@import", page)
    assert len(page.encode()) < 1_000_000
    assert "Knees &amp; &lt;knees&gt;" in page and "<knees>" not in page
    assert "A quiet processor, 2 threads, torch 2.13.0" in page
    assert page.count("<svg") == 4  # two sections with curves, wide and narrow
    for word in ("holds", "does not hold", "no answer", "2 of 4", "−25"):
        assert word in page


def test_ids_in_the_page_are_unique(article: Article) -> None:
    ids = re.findall(r'\bid="([^"]+)"', article_to_html(article))
    assert len(ids) == len(set(ids)) > 3


def test_legend_names_ridges_and_overhead(article: Article) -> None:
    wide, small, *_ = article.sections[0].curves
    assert curve_label(wide).startswith("wide: ridge 4") or curve_label(wide).startswith("wide: ridge 39")
    assert curve_label(small).endswith(", overhead-bound")
    assert curve_label(Curve(label="x", model="y")) == "x: no ridge"


def test_picture_draws_each_curve_and_a_diamond_on_its_ridge(article: Article) -> None:
    section = article.sections[0]
    axes = draw_section(section).axes[0]
    lines = axes.get_lines()
    assert [list(line.get_xdata()) for line in lines if len(line.get_xdata()) > 1] == [list(SIZES)] * 3  # type: ignore[arg-type]
    diamonds = [line for line in lines if line.get_marker() == "D"]
    ridges = [curve.ridge for curve in section.curves if curve.ridge]
    assert [line.get_xdata()[0] for line in diamonds] == ridges  # type: ignore[index]
    first = section.curves[0]
    assert first.ridge is not None
    height = diamonds[0].get_ydata()[0]  # type: ignore[index]
    assert height == pytest.approx(4e-3 + 1e-4 * first.ridge, rel=0.05)
    assert axes.get_xscale() == axes.get_yscale() == "log"


def test_gain_starts_at_one(article: Article) -> None:
    line = draw_section(article.sections[1], width="narrow", theme="dark").axes[0].get_lines()[0]
    assert line.get_ydata()[0] == pytest.approx(1)  # type: ignore[index]


def test_a_section_without_curves_has_no_picture(article: Article) -> None:
    with pytest.raises(InvalidSettings, match="Nothing"):
        draw_section(article.sections[2])


def test_strokes_are_told_apart_and_enough_for_every_plot() -> None:
    from microbatch.profiling.article_plots import PLOTS

    assert len({stroke.colour for stroke in STROKES}) == len(STROKES) == len({stroke.mark for stroke in STROKES})
    assert len({stroke.dash for stroke in STROKES}) == len(STROKES)
    assert all(stroke.colour in PALETTES["dark"] for stroke in STROKES)
    assert max(len(plot.trials) + len(plot.also) for plot in PLOTS) <= len(STROKES)


def test_folder_holds_page_data_and_pictures(article: Article, tmp_path: Path) -> None:
    written = save_article(article, tmp_path / "new" / "folder")
    names = {"article.html", "article.json", "first.svg", "first.png", "second.svg", "second.png"}
    assert {path.name for path in written} == {path.name for path in (tmp_path / "new" / "folder").iterdir()} == names
    document = json.loads((tmp_path / "new" / "folder" / "article.json").read_text())
    assert [section["holds"] for section in document["sections"]] == [True, False, None]
    assert document["sections"][1]["curves"][0]["routing"][0]["dropped"] == 1


def test_a_file_where_the_folder_should_be_is_named(article: Article, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(InvalidSettings, match="taken"):
        save_article(article, tmp_path / "taken")
    assert (tmp_path / "taken").read_text() == "mine"


@pytest.fixture(scope="module")
def beside(article: Article) -> Article:
    """The same with one prediction beside the first section."""
    first = article.sections[0]
    curves = tuple(
        replace(curve, explanation=None, knee=Ridge(value=200.0, predicted_weights=217.0)) for curve in first.curves
    )
    verdict = Verdict(holds=False, detail="200.", where="on t4 in fp16")
    prediction = Prediction(device="t4", dtype="fp16", verdict=verdict, curves=curves)
    return replace(article, sections=(replace(first, predictions=(prediction,)), *article.sections[1:]))


def test_a_prediction_stands_beside_the_measurement(beside: Article) -> None:
    page, text = article_to_html(beside), article_to_text(beside)
    assert "Does not hold on t4 in fp16: 200." in page and "Does not hold on t4 in fp16: 200." in text
    cells = re.findall(r"<t[dh][^>]*>([^<]*)</t[dh]>", page)
    start = cells.index("t4 in fp16: weights") - 2
    assert cells[start : start + 5] == [
        "curve", "measured here", "t4 in fp16: weights", "with activations", "of the curve",
    ]  # fmt: skip
    assert cells[start + 7 : start + 10] == ["217", "none", "200"]


@pytest.mark.parametrize("width", ["wide", "narrow"])
def test_panels_share_their_scales(beside: Article, width: Width) -> None:
    figure = draw_section(beside.sections[0], width=width)
    measured, computed = figure.axes
    assert measured.get_xlim() == computed.get_xlim() and measured.get_ylim() == computed.get_ylim()
    assert [text.get_text() for text in computed.texts] == ["computed, t4 in fp16"]
    figure.draw_without_rendering()
    assert (measured.get_position().x0 < computed.get_position().x0) == (width == "wide")
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == [curve.label for curve in beside.sections[0].curves if curve.seconds]
