"""The article's run with planted curves: every verdict follows from the data, both ways."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import count
from typing import Any

import pytest

from microbatch.curves.explanation import Ridge
from microbatch.curves.profile import ExpertLoad, Point, Profile
from microbatch.errors import InvalidSettings, TooNoisy
from microbatch.hardware.catalogue import load_device
from microbatch.hardware.device_spec import DeviceSpec
from microbatch.models.load import load_model
from microbatch.models.loaded import Loaded
from microbatch.profiling.article import Article, run_article, with_predictions
from microbatch.profiling.article_claims import judge_decoder, judge_mlp, judge_moe, judge_widths, time_lost
from microbatch.profiling.article_curve import Curve, read_curve
from microbatch.profiling.article_plots import CONTEXTS, PLOTS, WIDTHS, Trial

pytestmark = pytest.mark.alone

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


@cache
def _profile(fixed: float, per_item: float, *, overhead: float = 0.0, noise: float = 0.004) -> Profile:
    """t(b) = fixed + per_item·b with a little noise; `overhead` is the share of the fixed part."""
    rng = random.Random(1)
    points = tuple(
        Point(
            batch_size=size,
            samples=tuple((fixed + per_item * size) * math.exp(rng.gauss(0, noise)) for _ in range(9)),
            rounds=tuple(range(9)),
            overhead_seconds=overhead * fixed,
        )
        for size in SIZES
    )
    return Profile(points=points)


def _curve(label: str, fixed: float, per_item: float, *, overhead: float = 0.0) -> Curve:
    return read_curve(Curve(label=label, model="mlp"), _profile(fixed, per_item, overhead=overhead))


def _measure(shapes: Callable[[str], tuple[float, float]]) -> Callable[..., Profile]:
    """Stands in for `microbatch.profile`: a curve of the planted shape of each model."""

    def measure(model: object, example: object, *, name: str, progress: Any, **_: Any) -> Profile:
        progress(0.5, "timing")
        return _profile(*shapes(name))

    return measure


def _run(*, budget: float, measure: Callable[..., Profile], **settings: Any) -> Article:
    """The article on a machine without time: every reading of the clock is a millisecond later."""
    ticks = count()
    return run_article(budget=budget, measure=measure, clock=lambda: next(ticks) / 1000, **settings)


def _as_claimed(name: str) -> tuple[float, float]:
    """(fixed, per item): the ridge of every MLP at 40; the CNN, the pool and uncached decoding gain little."""
    if name.startswith("mlp"):
        return 4e-3, 1e-4
    if name.startswith("decoder"):
        per_item = {True: 1e-4, False: 4e-4}["context=32" in name]
        return (8e-3, per_item) if "cache=true" in name else (1e-4, 5e-3)
    return (4e-3, 1e-4) if name.startswith("moe") else (1e-4, 1e-3)


UNITS = {"cnn": "images", "pool": "images", "transformer": "sequences", "decoder": "sequences"}


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    """No time goes into large weights that nobody runs, nor into explaining the same planted curve again."""
    known: dict[int, Curve] = {}

    def read_once(curve: Curve, profile: Profile) -> Curve:
        if id(profile) not in known:
            known[id(profile)] = read_curve(curve, profile)
        return replace(known[id(profile)], label=curve.label, model=curve.model, routing=curve.routing)

    @cache
    def load_small(text: str) -> Loaded:
        name = text.partition(":")[0]
        small = load_model(text) if name == "moe" else load_model("mlp:depth=1,width=4")
        return replace(small, name=text, unit=UNITS.get(name, small.unit))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("microbatch.profiling.article.read_curve", read_once)
        patch.setattr("microbatch.models.load.load_model", load_small)
        yield


@pytest.fixture(scope="module")
def article(_quick: None) -> Article:
    """A run on a machine that behaves as claimed."""
    return _run(budget=10, measure=_measure(_as_claimed))


@pytest.mark.parametrize("trial", [trial for plot in PLOTS for trial in plot.trials], ids=lambda trial: trial.model)
def test_every_model_of_a_plot_can_be_built(trial: Trial) -> None:
    loaded = load_model(trial.model)
    assert loaded.unit == UNITS.get(trial.model.partition(":")[0], loaded.unit)


def test_every_plot_is_there_in_order_with_its_curves(article: Article) -> None:
    assert [section.key for section in article.sections] == ["mlp", "widths", "convolution", "decoder", "moe"]
    assert [len(section.curves) for section in article.sections] == [1, len(WIDTHS) + 1, 3, 2 * len(CONTEXTS), 3]
    assert article.budget == 10 and 0 < article.wall_seconds < 1


def test_verdicts_follow_the_planted_curves(article: Article) -> None:
    held = {section.key: section.verdict.holds for section in article.sections}
    assert held["mlp"] and held["widths"] and held["convolution"] and held["decoder"]
    for section in article.sections:
        assert section.verdict.sentence.startswith("Holds here: " if held[section.key] else "Does not hold here: ")
        assert section.verdict.figures


def test_verdicts_turn_with_the_data() -> None:
    turned = _run(budget=10, measure=_measure(lambda name: (1e-5, 1e-3) if "mlp" in name else (4e-3, 1e-5)))
    held = {section.key: section.verdict.holds for section in turned.sections}
    assert not held["convolution"] and not held["decoder"] and not held["mlp"]


def test_the_sentence_prints_what_was_planted(article: Article) -> None:
    figures = article.sections[0].verdict.figures
    assert figures["ridge"] == pytest.approx(40, rel=0.05)
    assert f"{figures['ridge']:.1f}" in article.sections[0].verdict.sentence
    # 4 ms + 0.1 ms·b: from b = 80 (twice the ridge) to 512 the slope of log t over log b
    inside = [size for size in SIZES if size >= 2 * figures["ridge"]]
    slope = math.log((4 + 0.1 * inside[-1]) / (4 + 0.1 * inside[0])) / math.log(inside[-1] / inside[0])
    assert figures["doubling_above"] == pytest.approx(2**slope, rel=0.02)


def test_gains_are_over_the_smallest_size(article: Article) -> None:
    gains = article.sections[2].verdict.figures["gains"]
    assert gains["MLP 8x1024"] == pytest.approx(512 * 4.1 / (4 + 51.2), rel=0.03)
    assert gains["cnn"] == pytest.approx(512 * 1.1 / (0.1 + 512), rel=0.03)


def test_the_budget_is_shared_out_and_the_settings_reach_the_measurement() -> None:
    asked: list[dict[str, Any]] = []

    def measure(model: object, example: object, **settings: Any) -> Profile:
        asked.append(settings)
        return _profile(*_as_claimed(settings["name"]))

    _run(budget=30, measure=measure, seed=7)
    assert sum(settings["budget"] for settings in asked) == pytest.approx(30, rel=1e-3)
    assert {settings["seed"] for settings in asked} == {7}
    assert [settings["name"] for settings in asked] == [trial.model for plot in PLOTS for trial in plot.trials]
    assert {settings["unit"] for settings in asked} == {"rows", "images", "sequences", "tokens"}


def test_curves_that_take_too_long_leave_less_for_the_others() -> None:
    now, asked = [0.0], list[tuple[float, float]]()

    def measure(model: object, example: object, *, name: str, budget: float, **_: Any) -> Profile:
        planned = next(t.share for plot in PLOTS for t in plot.trials if t.model == name)
        asked.append((budget, planned))
        now[0] += 1.5 * budget
        return _profile(*_as_claimed(name))

    article = run_article(budget=100, measure=measure, clock=lambda: now[0])
    per_share = [budget / planned for budget, planned in asked]
    assert per_share == sorted(per_share, reverse=True)
    assert per_share[-1] >= per_share[0] / 4 * 0.999
    assert 100 < article.wall_seconds < 125


def test_no_curve_is_begun_when_the_time_is_used_up() -> None:
    now = [0.0]

    def measure(model: object, example: object, *, name: str, **_: Any) -> Profile:
        now[0] += 60
        return _profile(*_as_claimed(name))

    article = run_article(budget=100, measure=measure, clock=lambda: now[0])
    assert article.wall_seconds == 120
    last = article.sections[-1]
    assert all(curve.profile is None and "100 s were used up" in curve.problem for curve in last.curves)
    assert article.sections[2].verdict.holds is None
    assert "were used up" in article.sections[2].verdict.sentence


def test_progress_runs_from_start_to_end_and_names_the_curve() -> None:
    seen: list[tuple[float, str]] = []
    _run(budget=10, measure=_measure(_as_claimed), progress=lambda done, text: seen.append((done, text)))
    shares = [done for done, _ in seen]
    assert shares == sorted(shares) and shares[0] == 0 and 0.9 < shares[-1] < 1
    assert seen[0][1].startswith("MLP 8x1024: ")


def test_a_noisy_machine_leaves_no_answer_and_the_rest_goes_on() -> None:
    def measure(model: object, example: object, *, name: str, **_: Any) -> Profile:
        if name.startswith(("mlp:depth=8,width=1024", "decoder")):
            raise TooNoisy("The machine is too noisy.", "Close other programs.")
        return _profile(*_as_claimed(name))

    article = _run(budget=10, measure=measure)
    held = {section.key: section.verdict.holds for section in article.sections}
    assert held["mlp"] is held["convolution"] is held["decoder"] is None
    assert held["widths"] is True
    assert "The machine is too noisy" in article.sections[0].verdict.sentence
    assert article.sections[0].curves[0].profile is None


def test_a_curve_too_noisy_to_explain_keeps_its_samples() -> None:
    def measure(model: object, example: object, *, name: str, **_: Any) -> Profile:
        return _profile(*_as_claimed(name), noise=0.6 if name == "cnn" else 0.004)

    section = _run(budget=10, measure=measure).sections[2]
    cnn = next(curve for curve in section.curves if curve.label == "cnn")
    assert cnn.explanation is None and cnn.profile is not None and cnn.problem
    assert set(cnn.seconds) == set(SIZES)


def test_a_knee_is_read_where_cliffs_cannot_be_told() -> None:
    curve = read_curve(Curve(label="x", model="mlp"), _profile(4e-3, 1e-4, noise=0.2))
    assert curve.explanation is None and "noise" in curve.problem
    assert curve.knee.low is not None and curve.knee.high is not None
    assert curve.knee.low < 40 < curve.knee.high and curve.knee.high / curve.knee.low > 1.2


def test_one_size_alone_says_nothing() -> None:
    single = Profile(points=_profile(1e-4, 5e-3).points[:1])

    def measure(model: object, example: object, *, name: str, **_: Any) -> Profile:
        whole = _profile(*_as_claimed(name))
        return single if "cache=false" in name else whole

    section = _run(budget=10, measure=measure).sections[3]
    assert section.verdict.holds is None and "too few sizes" in section.verdict.sentence


@pytest.mark.parametrize("budget", [0, -1, float("nan"), float("inf")])
def test_a_budget_that_is_none_is_refused(budget: float) -> None:
    with pytest.raises(InvalidSettings, match="budget"):
        run_article(budget=budget, measure=_measure(_as_claimed))


def test_labels_are_different_and_comparisons_were_measured_before() -> None:
    labels: list[str] = []
    for plot in PLOTS:
        assert set(plot.also) <= set(labels)
        labels += [trial.label for trial in plot.trials]
    assert len(set(labels)) == len(labels)


def test_routing_is_recorded_at_one_size_for_every_curve(article: Article) -> None:
    curves = article.sections[4].curves
    assert {load.tokens for curve in curves for load in curve.routing} == {64}
    even, zipf, measured = (curve.routing[0] for curve in curves)
    assert even.distinct_experts == 64 and even.load_factor == 1
    assert zipf.load_factor > measured.load_factor > even.load_factor
    assert article.sections[4].verdict.holds
    figures = article.sections[4].verdict.figures
    assert abs(figures["expected_distinct_zipf"] - zipf.distinct_experts) < 10


def _moe_curves(busiest: int) -> dict[str, Curve]:
    def load(*counts: int) -> tuple[ExpertLoad, ...]:
        return (ExpertLoad(layer="0", batch_size=8, tokens=8, tokens_per_expert=counts, seconds=3.0, even_seconds=2.0),)

    routings = {"even": load(2, 2, 2, 2), "Zipf": load(5, 2, 1, 0), "measured": load(busiest, 8 - busiest, 0, 0)}
    return {
        f"{name} routing": Curve(label=f"{name} routing", model="moe", routing=loads)
        for name, loads in routings.items()
    }


def test_moe_verdict_names_experts_load_and_time() -> None:
    verdict = judge_moe(_moe_curves(6))
    assert verdict.holds
    assert (
        "of 4 experts and 8 tokens, measured routing wakes 2, and its busiest has 3 times the mean" in verdict.sentence
    )
    assert verdict.sentence.count("its layer 50 % slower than with even routing") == 2
    assert verdict.sentence.endswith("even routing against itself differs by 50 %.")
    assert verdict.figures["routing"]["measured"]["time_lost"] == pytest.approx(0.5)


def test_moe_without_recorded_routing_has_no_answer() -> None:
    curves = _moe_curves(6) | {"Zipf routing": Curve(label="Zipf routing", model="moe")}
    assert judge_moe(curves).holds is None


def test_moe_even_gate_refutes_the_claim() -> None:
    curves = _moe_curves(6)
    curves["measured routing"] = Curve(label="measured routing", model="moe", routing=curves["even routing"].routing)
    assert judge_moe(curves).holds is False


def test_time_lost_may_be_a_gain_or_unknown() -> None:
    load = ExpertLoad(layer="", batch_size=1, tokens=1, tokens_per_expert=(1,), seconds=1.0, even_seconds=2.0)
    assert time_lost(load) == -0.5
    assert time_lost(ExpertLoad(layer="", batch_size=1, tokens=1, tokens_per_expert=(1,))) is None


@pytest.mark.parametrize(("ridges", "holds"), [((30, 40, 55), True), ((10, 40, 55), False)])
def test_one_knee_means_within_a_factor_of_two(ridges: tuple[float, ...], holds: bool) -> None:
    curves = {str(ridge): _curve(str(ridge), ridge * 1e-4, 1e-4) for ridge in ridges}
    verdict = judge_widths(curves, tuple(curves))
    assert verdict.holds is holds
    assert verdict.figures["spread"] == pytest.approx(max(ridges) / min(ridges), rel=0.1)


def test_ridges_that_noise_may_have_spread_give_no_answer() -> None:
    far, near = Curve(label="far", model="", knee=Ridge(value=50, low=20, high=90)), 15.0
    wide = {"near": Curve(label="near", model="", knee=Ridge(value=near, low=8, high=30)), "far": far}
    sure = {"near": Curve(label="near", model="", knee=Ridge(value=near, low=8, high=9)), "far": far}
    assert judge_widths(wide, ("near", "far")).holds is None
    assert judge_widths(sure, ("near", "far")).holds is False


@pytest.mark.parametrize(("per_item", "holds"), [(1e-6, True), (1e-4, False)])
def test_small_nets_are_judged_by_how_long_they_stay_flat(per_item: float, holds: bool) -> None:
    curves = {
        "small": _curve("small", 1e-3, per_item, overhead=0.9),
        "one": _curve("one", 4e-3, 1e-4),
        "two": _curve("two", 5e-3, 1e-4),
    }
    verdict = judge_widths(curves, tuple(curves))
    assert verdict.holds is holds
    assert set(verdict.figures["ridges"]) == {"one", "two"}
    flat = verdict.figures["overhead_bound_flat_to"]["small"]
    assert flat == (512 if holds else 8)
    assert "overhead-bound" in verdict.sentence


def test_too_few_ridges_give_no_answer() -> None:
    curves = {"one": _curve("one", 4e-3, 1e-4), "flat": _curve("flat", 1e-3, 1e-5, overhead=0.9)}
    assert judge_widths(curves, tuple(curves)).holds is None


@pytest.mark.parametrize(
    ("below", "above", "holds"), [(0.1, 0.9, True), (0.8, 0.9, False), (0.1, 0.3, False), (0.9, 0.1, False)]
)
def test_mlp_verdict_follows_the_growth_on_both_sides(below: float, above: float, holds: bool) -> None:
    """Time grows as batch to the power `below` up to 32, and to the power `above` beyond."""
    seconds = {size: min(size, 32) ** below * (max(size, 32) / 32) ** above for size in SIZES}
    verdict = judge_mlp({"x": Curve(label="x", model="", seconds=seconds, knee=Ridge(value=32))}, "x")
    assert verdict.holds is holds
    assert verdict.figures["doubling_below"] == pytest.approx(2**below)
    assert verdict.figures["doubling_above"] == pytest.approx(2**above)


@pytest.mark.parametrize(
    ("gains", "holds"),
    [((8, 4, 2, 1), True), ((4, 8, 2, 1), False), ((8, 4, 9, 1), False), ((8, 4, 2, 5), False)],
)
def test_decoder_verdict_compares_contexts_and_caches(gains: tuple[int, ...], holds: bool) -> None:
    labels = [f"{kind}, {context} tokens" for kind in ("cache", "no cache") for context in (10, 20)]
    curves = {
        label: Curve(label=label, model="", seconds={1: 1.0, 8: 8.0, 16: 16 / gain})
        for label, gain in zip(labels, gains, strict=True)
    }
    assert judge_decoder(curves, (10, 20)).holds is holds


def test_a_ridge_at_the_edge_gives_no_answer() -> None:
    curve = _curve("x", 4e-3, 4e-3 / 500)
    verdict = judge_mlp({curve.label: curve}, curve.label)
    assert verdict.holds is None


def test_a_smaller_time_per_call_counts_as_flat_only_until_it_doubles() -> None:
    curve = _curve("x", 1e-3, 1e-4)
    # 1.1 ms at 1; 2.2 ms is reached at 12.
    assert curve.flat_to == 8
    assert curve.growth(600, 900) is None


def test_the_document_holds_every_sample(article: Article) -> None:
    document = article.to_json()
    assert [section["holds"] for section in document["sections"]][:4] == [True] * 4
    curve = document["sections"][0]["curves"][0]
    assert len(curve["profile"]["points"][0]["samples"]) == 9
    assert document["schema_version"] == 1
    assert document["sections"][4]["curves"][0]["routing"][0]["tokens_per_expert"] == (2,) * 64


def _computed(model: str, spec: DeviceSpec, *, dtype: str, max_batch_size: int) -> Profile:
    """Stands in for `predict`: as claimed, twenty times faster in fp16; no noise, one time per size."""
    fixed, per_item = (x / {"fp16": 20, "fp32": 4}[dtype] for x in _as_claimed(model))
    points = tuple(Point(batch_size=size, samples=(fixed + per_item * size,)) for size in (*SIZES, 1024, 4096))
    return Profile(points=points, source="predicted", model=model, dtype=dtype)


def test_a_device_gets_the_same_plots_in_every_dtype_that_it_has(
    article: Article, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("microbatch.profiling.predict.predict", _computed)
    sections = with_predictions(article.sections, load_device("t4"))
    for section in sections:
        assert [(one.device, one.dtype) for one in section.predictions] == [("t4", "fp16"), ("t4", "fp32")]
        for one in section.predictions:
            assert [curve.label for curve in one.curves] == [curve.label for curve in section.curves]
            assert f"on t4 in {one.dtype}, as computed: " in one.verdict.sentence
    mlp = sections[0].predictions[0]
    assert mlp.verdict.holds and mlp.verdict.figures["ridge"] == pytest.approx(40, rel=0.05)
    assert mlp.curves[0].seconds[512] == pytest.approx((4e-3 + 512e-4) / 20)
    assert len(with_predictions(article.sections[:1], load_device("tpu-v5e"))[0].predictions) == 0
    document = Article(sections=sections, budget=1, wall_seconds=1).to_json()
    assert document["sections"][0]["predictions"][1]["dtype"] == "fp32"


def test_routing_is_taken_over_without_its_times(article: Article, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("microbatch.profiling.predict.predict", _computed)
    moe = with_predictions(article.sections, load_device("t4"))[-1]
    here, there = (section.figures["routing"]["measured"] for section in (moe.verdict, moe.predictions[0].verdict))
    assert there["distinct_experts"] == here["distinct_experts"] and there["time_lost"] is None
