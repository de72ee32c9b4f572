"""What binds at one size: compute, memory or overhead, from achieved rates and the device's peaks."""

from __future__ import annotations

from microbatch.curves.explanation import Binding
from microbatch.curves.profile import Peaks, Point

OVERHEAD_BINDS = 0.5
"""A call that spends half of its time outside all operators is bound by overhead, whatever the rates inside."""
LOW_UTILISATION = 0.35
"""Below this share of both peaks neither rate explains the time."""
CLEAR_LEAD = 1.3


def bind(
    point: Point, peaks: Peaks, *, seconds: float, interval: tuple[float, float] | None, fitted_seconds: float | None
) -> Binding:
    """A point with its achieved share of the peaks; None and an empty bound where the peaks are unknown."""
    compute = _share(point.flops, seconds, peaks.flops)
    bandwidth = _share(point.moved_bytes, seconds, peaks.bandwidth)
    overhead = None if point.overhead_seconds is None else min(point.overhead_seconds / seconds, 1.0)
    return Binding(
        batch_size=point.batch_size,
        seconds=seconds,
        low=interval[0] if interval else None,
        high=interval[1] if interval else None,
        fitted_seconds=fitted_seconds,
        compute_utilisation=compute,
        bandwidth_utilisation=bandwidth,
        overhead_share=overhead,
        bound=_bound(compute, bandwidth, overhead),
    )


def _share(work: float | None, seconds: float, peak: float | None) -> float | None:
    return None if work is None or not peak else work / seconds / peak


def _bound(compute: float | None, bandwidth: float | None, overhead: float | None) -> str:
    if overhead is not None and overhead >= OVERHEAD_BINDS:
        return "overhead"
    if compute is None or bandwidth is None:
        return ""
    if max(compute, bandwidth) < LOW_UTILISATION:
        return "mixed"
    if compute >= CLEAR_LEAD * bandwidth:
        return "compute"
    return "memory" if bandwidth >= CLEAR_LEAD * compute else "mixed"
