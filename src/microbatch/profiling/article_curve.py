"""One measured curve of the article, and what it says: its gain, its knee, how long it stays flat."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import log

from microbatch.curves.cliffs import find_shape
from microbatch.curves.exact import exact_shape
from microbatch.curves.explanation import Explanation, Fit, Ridge
from microbatch.curves.levels import find_levels
from microbatch.curves.profile import ExpertLoad, Profile
from microbatch.curves.ridge import find_fit, find_ridge
from microbatch.errors import NoAnswer
from microbatch.profiling.explain import OVERHEAD_BOUND, explain

FLAT = 2.0
"""A curve is flat up to the last size that takes less than this many times as long as the smallest."""


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
    shape = exact_shape(levels) if profile.source == "predicted" else find_shape(levels)
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
