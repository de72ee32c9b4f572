"""What the pictures show, read back from the figure itself."""

from __future__ import annotations

import itertools
from dataclasses import replace
from math import inf

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from microbatch.curves.explanation import Cliff, Explanation, Fit, Ridge
from microbatch.errors import InvalidSettings
from microbatch.palette import PALETTES, Theme
from microbatch.reporting.canvas import Width, image, inline_svg, size_ticks, value_ticks
from microbatch.reporting.marks import bands
from microbatch.reporting.memory_picture import draw_memory
from microbatch.reporting.picture import MOST_SAMPLES, draw, fitted_seconds
from tests.reporting import examples

WIDTHS: tuple[Width, ...] = ("wide", "narrow")
THEMES: tuple[Theme, ...] = ("light", "dark")


def overlaps(figure: Figure) -> list[tuple[str, str]]:
    """Pairs of visible texts whose boxes meet once the figure is laid out."""
    FigureCanvasAgg(figure)
    figure.draw_without_rendering()
    texts = [text for text in figure.findobj(Text) if isinstance(text, Text) and text.get_visible() and text.get_text()]
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts]
    return [(a, b) for (a, one), (b, two) in itertools.combinations(boxes, 2) if one.overlaps(two)]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["rich", "from_csv", "empty", "many_cliffs", "hostile"])
def test_no_text_overlaps(name: str, width: Width) -> None:
    assert overlaps(draw(getattr(examples, name)(), width=width)) == []


@pytest.mark.parametrize(("ridge", "chosen"), [(1.0, 1), (40.0, 32), (380.0, 392), (1000.0, 1024), (1000.0, 1)])
def test_labels_keep_apart_wherever_the_sizes_lie(ridge: float, chosen: int) -> None:
    explanation = examples.rich()
    recommended = replace(explanation.recommended, batch_size=chosen)
    found = Ridge(value=ridge, low=0.9 * ridge, high=1.1 * ridge)
    explanation = replace(explanation, recommended=recommended, ridge=found)
    for width in WIDTHS:
        assert overlaps(draw(explanation, width=width)) == []


def test_overlaps_are_seen() -> None:
    figure = draw(examples.rich())
    figure.text(0.5, 0.5, "one upon")
    figure.text(0.5, 0.5, "the other")
    assert overlaps(figure) == [("one upon", "the other")]


def legend(explanation: Explanation) -> list[str]:
    return [text.get_text() for text in draw(explanation).legends[0].get_texts()]


def test_legend_names_what_is_drawn() -> None:
    assert legend(examples.rich()) == [
        "measured, 90 % interval", "single calls", "fit", "compute roof", "bandwidth roof", "target 30 ms",
        "sizes to avoid",
    ]  # fmt: skip
    assert legend(examples.from_csv()) == ["measured", "fit", "sizes to avoid"]
    assert legend(examples.empty()) == ["measured", "target 30 ms"]


def test_overhead_is_drawn_only_where_it_is_near_the_times() -> None:
    explanation = examples.rich()
    points = tuple(replace(point, overhead_seconds=0.006) for point in explanation.profile.points)
    assert "overhead" in legend(replace(explanation, profile=replace(explanation.profile, points=points)))


def test_compute_roof_is_peak_over_flops_per_item() -> None:
    line = next(line for line in draw(examples.rich()).axes[0].lines if line.get_label() == "compute roof")
    assert np.asarray(line.get_ydata()) == pytest.approx(1.9e11 / 16.8e6)


def test_fit_at_every_exponent() -> None:
    def fit(p: float) -> Fit:
        return Fit(form="p-norm", p=p, fixed_seconds=3.0, seconds_per_item=1.0, rms=0.0)

    assert fitted_seconds(fit(1), 4) == pytest.approx(7)
    assert fitted_seconds(fit(2), 4) == pytest.approx(5)
    assert fitted_seconds(fit(inf), 4) == pytest.approx(4)
    assert fitted_seconds(fit(5000), 4) == pytest.approx(4)
    assert fitted_seconds(replace(fit(2), fixed_seconds=0.0), 4) == pytest.approx(4)


def test_bands_end_halfway_and_join() -> None:
    def cliff(first: int, before: int, last: int) -> Cliff:
        return Cliff(batch_size=first, from_size=before, to_size=last, ratio=1.3, excess=1.2)

    one, two = cliff(129, 128, 160), cliff(136, 129, 168)
    assert bands(replace(examples.rich(), cliffs=(one,))) == [pytest.approx((128.5, 163.95), abs=0.01)]
    assert bands(replace(examples.rich(), cliffs=(two, one))) == [pytest.approx((128.5, 179.6), abs=0.01)]


def test_many_samples_are_thinned_and_keep_their_ends() -> None:
    dots = next(patch for patch in draw(examples.large()).axes[1].patches if patch.get_gid() == "calls")
    times = {point.batch_size: point.samples for point in examples.large().profile.points}
    drawn = [(int(size), float(seconds)) for size, seconds in np.asarray(dots.get_path().vertices)[::2]]
    assert len(drawn) <= MOST_SAMPLES
    assert all((size, min(samples)) in drawn and (size, max(samples)) in drawn for size, samples in times.items())


@pytest.mark.parametrize(
    ("low", "high"), [(0.9, 1100), (3, 3.3), (0.013, 0.15), (1e-9, 1e3), (37, 58), (0.00001, 0.00002)]
)
def test_ticks_are_few_but_enough(low: float, high: float) -> None:
    assert 2 <= len(value_ticks(low, high)) <= 8
    assert all(low <= place <= high for place in value_ticks(low, high))


def test_size_ticks() -> None:
    assert size_ticks(0.9, 1100, 6, ()) == [1, 4, 16, 64, 256, 1024]
    assert size_ticks(90, 130, 6, (100, 110, 120)) == [100, 110, 120]


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_memory_picture(width: Width, theme: Theme) -> None:
    figure = draw_memory(examples.rich(), width=width, theme=theme)
    assert overlaps(figure) == []
    told = [text.get_text() for text in figure.legends[0].get_texts()]
    assert told == ["predicted", "limit 200 MB", "less 10 % kept free", "measured", "use 392"]


def test_memory_picture_needs_memory() -> None:
    with pytest.raises(InvalidSettings, match="no memory figures"):
        draw_memory(examples.from_csv())


def test_the_users_matplotlib_settings_change_nothing() -> None:
    plain = image(draw(examples.rich()), "svg")
    with mpl.rc_context({"font.size": 30, "axes.grid": False, "lines.linewidth": 9, "svg.fonttype": "path"}):
        assert image(draw(examples.rich()), "svg") == plain


@pytest.mark.parametrize(("form", "start"), [("png", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<?xml")])
def test_forms(form: str, start: bytes) -> None:
    assert image(draw(examples.rich()), form).startswith(start)


def test_inline_svg_has_no_address_and_its_own_ids() -> None:
    svg = inline_svg(draw(examples.rich()), "here", variables=True)
    assert svg.startswith("<svg viewBox")
    assert "http" not in svg
    assert 'id="here-' in svg and 'id="figure' not in svg
    assert "var(--use)" in svg
    assert not any(colour in svg for colour in PALETTES["light"].values())


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("name", ["text", "muted", "use", "ridge", "data"])
def test_text_colours_have_contrast(theme: Theme, name: str) -> None:
    for ground in ("background", "panel"):
        light, dark = sorted((luminance(PALETTES[theme][name]), luminance(PALETTES[theme][ground])), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5


@pytest.mark.parametrize("theme", THEMES)
def test_colours_of_a_set_are_all_different(theme: Theme) -> None:
    assert len(set(PALETTES[theme].values())) == len(PALETTES[theme])
