"""Small results that the commands are tested with."""

from __future__ import annotations

from microbatch.curves.explanation import Binding, Explanation, Recommendation, Ridge
from microbatch.curves.profile import Point, Profile


def a_profile() -> Profile:
    """Three sizes, three samples each."""
    points = tuple(Point(batch_size=b, samples=(t, t * 1.01, t * 1.02)) for b, t in ((1, 0.01), (2, 0.011), (4, 0.013)))
    return Profile(points=points, model="mlp", dtype="fp32")


def an_explanation() -> Explanation:
    """What that profile means."""
    profile = a_profile()
    recommended = Recommendation(
        batch_size=4,
        objective="throughput",
        reason="The largest size tried.",
        limited_by="range",
        measured=True,
        seconds=0.013,
        throughput=4 / 0.013,
        share_of_best=1.0,
        confidence="low",
    )
    points = tuple(
        Binding(batch_size=p.batch_size, seconds=p.samples[1], low=p.samples[0], high=p.samples[2])
        for p in profile.points
    )
    return Explanation(
        profile=profile,
        recommended=recommended,
        balanced=4,
        b90=4,
        latency_target=None,
        largest_within_target=None,
        largest_that_fits=None,
        ridge=Ridge(reason="three sizes are too few"),
        fit=None,
        bound="",
        cliffs=(),
        drops=(),
        padding=(),
        period=None,
        noise=float("nan"),
        points=points,
    )


CSV = "batch_size,seconds\n" + "".join(
    f"{b},{0.01 + 0.0002 * b + 0.00001 * (k % 3)}\n" for k in range(5) for b in (1, 2, 4, 8, 16, 32, 64, 96, 128, 192)
)
"""A smooth curve as somebody else would measure it."""
