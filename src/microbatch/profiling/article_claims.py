"""What each plot of the article shows on this machine, judged from its measured curves. No figure is typed in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import log
from typing import Any

import msgspec

from microbatch.curves.cliffs import find_shape
from microbatch.curves.explanation import Explanation, Fit, Ridge
from microbatch.curves.levels import find_levels
from microbatch.curves.profile import ExpertLoad, Profile
from microbatch.curves.ridge import find_fit, find_ridge
from microbatch.errors import NoAnswer
from microbatch.profiling.explain import OVERHEAD_BOUND, explain
from microbatch.roofline.routing import expected_distinct_experts, zipf_probabilities
from microbatch.units import format_number, format_percent, format_seconds

SAME_KNEE = 2.0
"""Ridges within this factor of each other count as one knee: batches are tried in doublings."""
FLAT = 2.0
"""A curve is flat up to the last size that takes less than this many times as long as the smallest."""
HALF = 0.5
"""Growth of log time over log batch: below it more than half of every doubling is free, 1 is in proportion."""
UNEVEN = 1.1
"""Tokens of the busiest expert over the mean from which a batch is spread unevenly."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """One measured line of a plot.

    Attributes:
        label: its name in the plot.
        model: the MODEL that was measured.
        profile: the measurement; None where the machine gave none.
        explanation: what it means; None where it was too noisy to tell cliffs.
        seconds: level of the time of one call by batch size, outliers taken out.
        knee: the ridge with its interval, which is wide where the machine was noisy.
        fit: the smooth curve; None with too few sizes.
        overhead_bound: most of the fixed part is spent outside operators, so the knee says nothing about memory.
        routing: how the mixture-of-experts layers spread a batch of the same size in every curve of the plot.
        problem: why the profile or the explanation is missing.
    """

    label: str
    model: str
    profile: Profile | None = None
    explanation: Explanation | None = None
    seconds: dict[int, float] = field(default_factory=dict)
    knee: Ridge = field(default_factory=Ridge)
    fit: Fit | None = None
    overhead_bound: bool = False
    routing: tuple[ExpertLoad, ...] = ()
    problem: str = ""

    @property
    def ridge(self) -> float | None:
        """The batch where fixed and growing time are equal."""
        return self.knee.value

    @property
    def gains(self) -> dict[int, float]:
        """Items per second over those at the smallest size, by batch size."""
        seconds = self.seconds
        first = min(seconds, default=1)
        return {size: size / first * seconds[first] / taken for size, taken in seconds.items()}

    @property
    def gain(self) -> float:
        """How many times more items per second the best size gives than the smallest."""
        return max(self.gains.values())

    @property
    def flat_to(self) -> int:
        """The last size before the time first reaches `FLAT` times that of the smallest."""
        seconds = self.seconds
        first = min(seconds)
        slow = [size for size, taken in seconds.items() if taken >= FLAT * seconds[first]]
        return max(size for size in seconds if size < min(slow, default=max(seconds) + 1))

    def growth(self, low: float, high: float) -> float | None:
        """Slope of log time over log batch between the outermost measured sizes in [low, high]; 1 is in proportion."""
        inside = sorted(size for size in self.seconds if low <= size <= high)
        if len(inside) < 2:
            return None
        first, last = inside[0], inside[-1]
        return log(self.seconds[last] / self.seconds[first]) / log(last / first)


def read_curve(curve: Curve, profile: Profile) -> Curve:
    """The curve with what its measurement says.

    A knee and a gain need less than a cliff does: where the machine is too noisy to tell cliffs, they are still
    read, and the interval of the knee shows how well it is known.
    """
    levels = find_levels(profile.points)
    shape = find_shape(levels)
    fit, knee = find_fit(levels, shape), find_ridge(levels, shape)
    seconds = {point.batch_size: float(level) for point, level in zip(profile.points, levels.seconds, strict=True)}
    read = replace(
        curve,
        profile=profile,
        seconds=seconds,
        knee=knee,
        fit=fit,
        overhead_bound=knee.value is not None and _is_overhead(profile, fit),
    )
    try:
        return replace(read, explanation=explain(profile))
    except NoAnswer as error:
        return replace(read, problem=error.message)


def _is_overhead(profile: Profile, fit: Fit | None) -> bool:
    known = [point.overhead_seconds for point in profile.points if point.overhead_seconds is not None]
    return bool(known and fit) and min(known) > OVERHEAD_BOUND * (fit.fixed_seconds if fit else 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Whether a claim holds here (None: no answer), and the sentence that says so with the figures."""

    holds: bool | None
    sentence: str
    figures: dict[str, Any] = field(default_factory=dict)
    """The figures of the sentence, by name."""

    def to_json(self) -> dict[str, Any]:
        """Plain dicts and numbers."""
        result: dict[str, Any] = msgspec.to_builtins(self)
        return result


Curves = Mapping[str, Curve]
"""Every curve measured so far, by label."""


def judge_mlp(curves: Curves, label: str) -> Verdict:
    """Nearly free below the ridge, in proportion above it."""
    curve = curves[label]
    if curve.ridge is None:
        return _no_answer(curve, curve.knee.reason or "it was not measured")
    sizes = sorted(curve.seconds)
    below, above = curve.growth(sizes[0], curve.ridge / 2), curve.growth(2 * curve.ridge, sizes[-1])
    if below is None or above is None:
        return _no_answer(curve, f"too few sizes lie on both sides of the ridge of {format_number(curve.ridge)}")
    return _verdict(
        below < HALF < above,
        f"the ridge is at {format_number(curve.ridge)}{_interval(curve)}; well below it a doubling of the batch takes "
        f"{format_number(2**below)} times as long, well above it {format_number(2**above)} times.",
        ridge=curve.ridge,
        doubling_below=2**below,
        doubling_above=2**above,
    )


def _interval(curve: Curve) -> str:
    low, high = curve.knee.low, curve.knee.high
    return f" ({format_number(low)} to {format_number(high)})" if low and high else ""


def judge_widths(curves: Curves, labels: tuple[str, ...]) -> Verdict:
    """One knee over all widths, and small nets flat to 512."""
    chosen = [curves[label] for label in labels]
    small = [curve for curve in chosen if curve.overhead_bound]
    large = [curve for curve in chosen if curve.ridge is not None and not curve.overhead_bound]
    if len(large) < 2:
        return Verdict(
            holds=None, sentence=f"No answer here: {len(large)} of {len(chosen)} widths show a ridge of their own."
        )
    ridges = [curve.ridge for curve in large if curve.ridge is not None]
    spread = max(ridges) / min(ridges)
    flat = {curve.label: curve.flat_to for curve in small}
    return _verdict(
        spread <= SAME_KNEE and all(size >= _ARTICLE_FLAT for size in flat.values()),
        f"the ridges of {_listed([curve.label for curve in large])} lie between {format_number(min(ridges))} and "
        f"{format_number(max(ridges))}, a factor of {format_number(spread)}; {_flat_sentence(flat)}",
        ridges={curve.label: curve.ridge for curve in large},
        spread=spread,
        overhead_bound_flat_to=flat,
    )


_ARTICLE_FLAT = 512
"""The size up to which small nets are said to stay flat: part of the claim, not a result."""


def _flat_sentence(flat: dict[str, int]) -> str:
    if not flat:
        return "no width is bound by overhead."
    parts = [f"{label} to {format_number(size)}" for label, size in flat.items()]
    return f"the overhead-bound ones stay under twice their time at the smallest size: {_listed(parts)}."


def judge_convolution(curves: Curves, mlp: str) -> Verdict:
    """Weights that are used at every position leave less to gain; a pooling layer has none."""
    dense, cnn, pool = curves[mlp], curves["cnn"], curves["pooling layer"]
    missing = _first_without_gain(dense, cnn, pool)
    if missing is not None:
        return missing
    return _verdict(
        cnn.gain < dense.gain and pool.gain < dense.gain,
        f"from the smallest to its best batch the MLP gains {_times(dense)} in items per second, the CNN "
        f"{_times(cnn)} and the pooling layer {_times(pool)}.",
        gains={curve.label: curve.gain for curve in (dense, cnn, pool)},
    )


def _first_without_gain(*curves: Curve) -> Verdict | None:
    """No answer, where a curve has too few sizes to gain anything."""
    missing = next((curve for curve in curves if len(curve.seconds) < _FEWEST_FOR_GAIN), None)
    return _no_answer(missing, "too few sizes were measured in the time") if missing is not None else None


_FEWEST_FOR_GAIN = 3


def judge_decoder(curves: Curves, contexts: tuple[int, int]) -> Verdict:
    """With a cache batching pays, the less the longer the context; without one it pays little."""
    cached = [curves[f"cache, {context} tokens"] for context in contexts]
    again = [curves[f"no cache, {context} tokens"] for context in contexts]
    missing = _first_without_gain(*cached, *again)
    if missing is not None:
        return missing
    return _verdict(
        cached[0].gain > cached[1].gain and all(kept.gain > anew.gain for kept, anew in zip(cached, again)),
        f"with a cache batching gains {_times(cached[0])} in tokens per second at {contexts[0]} tokens of context and "
        f"{_times(cached[1])} at {contexts[1]}, without one {_times(again[0])} and {_times(again[1])}"
        f"{_marginal(cached, contexts)}.",
        gains={curve.label: curve.gain for curve in (*cached, *again)},
    )


def _marginal(cached: list[Curve], contexts: tuple[int, int]) -> str:
    fits = [curve.fit for curve in cached]
    if fits[0] is None or fits[1] is None:
        return ""
    short, long = (format_seconds(fit.seconds_per_item) for fit in fits if fit is not None)
    return f"; one more sequence takes {short} with {contexts[0]} tokens in its cache and {long} with {contexts[1]}"


def judge_moe(curves: Curves) -> Verdict:
    """Gates spread a batch unevenly; the planted gates beside them show what even and Zipf routing would be."""
    names = ("measured", "even", "Zipf")
    silent = next((curves[f"{name} routing"] for name in names if not curves[f"{name} routing"].routing), None)
    if silent is not None:
        return _no_answer(silent, "no routing was recorded")
    loads = {name: _least_even(curves[f"{name} routing"]) for name in names}
    own, zipf = loads["measured"], loads["Zipf"]
    expected = expected_distinct_experts(zipf_probabilities(len(zipf.tokens_per_expert), _top_k(zipf)), zipf.tokens)
    parts = [
        f"{name} routing wakes {load.distinct_experts}, its busiest has {format_number(load.load_factor)} times the "
        f"mean, and its layer {_lost(load)}"
        for name, load in loads.items()
    ]
    return _verdict(
        own.load_factor > UNEVEN,
        f"of {len(own.tokens_per_expert)} experts and {format_number(own.tokens)} tokens, {'; '.join(parts)}. "
        f"(The formula for Zipf routing expects {format_number(expected)} experts.)",
        routing={name: _figures(load) for name, load in loads.items()},
        expected_distinct_zipf=expected,
    )


def _least_even(curve: Curve) -> ExpertLoad:
    return max(curve.routing, key=lambda load: load.load_factor)


def _top_k(load: ExpertLoad) -> int:
    return round((sum(load.tokens_per_expert) + load.dropped) / load.tokens)


def time_lost(load: ExpertLoad) -> float | None:
    """Share by which a layer is slower than with the same tokens spread evenly; negative where it is faster."""
    return load.seconds / load.even_seconds - 1 if load.seconds and load.even_seconds else None


def _lost(load: ExpertLoad) -> str:
    lost = time_lost(load)
    if lost is None:
        return "was not timed"
    return f"is {format_percent(abs(lost))} {'slower' if lost >= 0 else 'faster'} than with even routing"


def _figures(load: ExpertLoad) -> dict[str, Any]:
    return {
        "tokens": load.tokens,
        "distinct_experts": load.distinct_experts,
        "experts": len(load.tokens_per_expert),
        "load_factor": load.load_factor,
        "time_lost": time_lost(load),
    }


def _verdict(holds: bool, sentence: str, **figures: Any) -> Verdict:
    return Verdict(holds=holds, sentence=f"{'Holds' if holds else 'Does not hold'} here: {sentence}", figures=figures)


def _no_answer(curve: Curve, why: str) -> Verdict:
    return Verdict(
        holds=None,
        sentence=f"No answer here, for {curve.label}: {(why if curve.seconds else curve.problem or why).rstrip('.')}.",
    )


def _times(curve: Curve) -> str:
    return f"{format_number(curve.gain)} times"


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
