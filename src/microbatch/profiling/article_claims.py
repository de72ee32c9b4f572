"""What each plot of the article shows on this machine, judged from its measured curves. No figure is typed in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from microbatch.curves.profile import ExpertLoad
from microbatch.profiling.article_curve import Curve
from microbatch.roofline.routing import expected_distinct_experts, zipf_probabilities
from microbatch.units import format_number, format_percent, format_seconds

SAME_KNEE = 2.0
"""Ridges within this factor of each other count as one knee: batches are tried in doublings."""
HALF = 0.5
"""Growth of log time over log batch: below it more than half of every doubling is free, 1 is in proportion."""
UNEVEN = 1.1
"""Tokens of the busiest expert over the mean from which a batch is spread unevenly."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Whether a claim holds (None: no answer), and the sentence that says so with the figures.

    Attributes:
        detail: what was found, without the verdict itself.
        figures: the figures of the sentence, by name.
        where: the place that it was found for: here, or as in ``on t4 in fp16``.
    """

    holds: bool | None
    detail: str
    figures: dict[str, Any] = field(default_factory=dict)
    where: str = "here"

    @property
    def sentence(self) -> str:
        """``Holds here: the ridge is at 40.``"""
        return f"{_OPENINGS[self.holds]} {self.where}: {self.detail}"

    def to_json(self) -> dict[str, Any]:
        """Plain dicts and numbers."""
        figures: dict[str, Any] = msgspec.to_builtins(self.figures)
        return {"holds": self.holds, "sentence": self.sentence, "figures": figures}


_OPENINGS = {True: "Holds", False: "Does not hold", None: "No answer"}


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
        return Verdict(holds=None, detail=f"{len(large)} of {len(chosen)} widths show a ridge of their own.")
    ridges = {curve.label: curve.ridge for curve in large if curve.ridge is not None}
    spread = max(ridges.values()) / min(ridges.values())
    flat = {curve.label: curve.flat_to for curve in small}
    known = f"the ridges of {_listed(list(ridges))} lie between {format_number(min(ridges.values()))} and "
    known += f"{format_number(max(ridges.values()))}, a factor of {format_number(spread)}"
    if spread > SAME_KNEE >= _surest_spread(large):
        return Verdict(holds=None, detail=f"{known}, and their intervals are too wide to tell.")
    return _verdict(
        spread <= SAME_KNEE and all(size >= ARTICLE_FLAT for size in flat.values()),
        f"{known}; {_flat_sentence(flat)}",
        ridges=ridges,
        spread=spread,
        overhead_bound_flat_to=flat,
    )


ARTICLE_FLAT = 512
"""The size up to which small nets are said to stay flat: part of the claim, not a result."""


def _surest_spread(curves: list[Curve]) -> float:
    """The factor that lies between two ridges at least, by their intervals."""
    lows = [curve.knee.low or curve.ridge or 1 for curve in curves]
    highs = [curve.knee.high or curve.ridge or 1 for curve in curves]
    return max(lows) / min(highs)


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
        f"{name} routing wakes {load.distinct_experts}, and its busiest has {format_number(load.load_factor)} times "
        f"the mean{_lost(load) if name != 'even' else ''}"
        for name, load in loads.items()
    ]
    return _verdict(
        own.load_factor > UNEVEN,
        f"of {len(own.tokens_per_expert)} experts and {format_number(own.tokens)} tokens, {'; '.join(parts)}. "
        f"The formula for Zipf routing expects {format_number(expected)} experts{_doubt(loads['even'])}.",
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
        return ""
    return f", its layer {format_percent(abs(lost))} {'slower' if lost >= 0 else 'faster'} than with even routing"


def _doubt(even: ExpertLoad) -> str:
    """Even routing timed against itself shows how far these times can be trusted."""
    lost = time_lost(even)
    return "" if lost is None else f"; even routing against itself differs by {format_percent(abs(lost))}"


def _figures(load: ExpertLoad) -> dict[str, Any]:
    return {
        "tokens": load.tokens,
        "distinct_experts": load.distinct_experts,
        "experts": len(load.tokens_per_expert),
        "load_factor": load.load_factor,
        "time_lost": time_lost(load),
    }


def _verdict(holds: bool, detail: str, **figures: Any) -> Verdict:
    return Verdict(holds=holds, detail=detail, figures=figures)


def _no_answer(curve: Curve, why: str) -> Verdict:
    return Verdict(
        holds=None,
        detail=f"for {curve.label}, {(why if curve.seconds else curve.problem or why).rstrip('.')}.",
    )


def _times(curve: Curve) -> str:
    return f"{format_number(curve.gain)} times"


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
