"""Explanations built by hand: a rich one, one from a bare CSV, and one in which everything that may be null is."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace
from functools import cache

from microbatch.curves.explanation import Binding, Cliff, Drop, Explanation, Fit, Padding, Recommendation, Ridge
from microbatch.curves.profile import (
    Environment,
    ExpertLoad,
    Failure,
    Layer,
    MemoryCurve,
    Peaks,
    Point,
    Profile,
)  # fmt: skip

HOSTILE = "</script><script>alert(1)</script> $x_2$ \x1b[31m\x00 " + "long" * 60
"""A model's name that tries to leave its place: markup, mathematics, terminal codes, no end."""

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 80, 96, 112, 128, 129, 136, 160, 168, 192, 224, 256, 257, 288, 320,
         352, 384, 392, 448, 512, 640, 768, 1024)  # fmt: skip
WEIGHTS = 8 * 4 * 1024 * 1024
STEPS = {129: 1.31, 257: 1.17}
"""Sizes at which the planted curve jumps, and by how much; the first jump is over again at 168."""


def rich() -> Explanation:
    """Cliffs, memory, layers, routing, a latency target, every table filled."""
    profile = rich_profile()
    chosen = profile.points[profile.batch_sizes.index(392)]
    seconds = statistics.median(chosen.samples)
    return Explanation(
        profile=profile,
        recommended=Recommendation(
            batch_size=392, objective="throughput",
            reason="The smallest size within 2 % of the best throughput, outside the zones to avoid.",
            limited_by="saturated", measured=True, seconds=seconds, throughput=392 / seconds, share_of_best=0.98,
            confidence="high",
        ),
        balanced=112, b90=256, latency_target=0.03, largest_within_target=128, largest_that_fits=1024,
        ridge=Ridge(value=108.6, low=101.2, high=117.9, predicted_weights=97.0),
        fit=Fit(form="p-norm", p=1.3, fixed_seconds=0.0136, seconds_per_item=0.000125, rms=0.03),
        bound="compute", cliffs=rich_cliffs(),
        drops=(Drop(batch_size=168, from_size=160, ratio=0.9, cause="kernel_switch", evidence="time falls"),),
        padding=(Padding(batch_size=136, pad_to=168, saves=0.06),), period=128, noise=0.018,
        points=tuple(_binding(point, profile.peaks) for point in profile.points),
        utilisation="From 1 to 96 the weights' way from memory binds, so that items are nearly free. Above, arithmetic "
        "binds and the time grows with the batch. A driver's utilisation percentage is busy time, not work.",
        warnings=("Other processes used 12 % of the processor during the run.",),
    )  # fmt: skip


def rich_cliffs() -> tuple[Cliff, ...]:
    return (
        Cliff(
            batch_size=129, from_size=128, to_size=160, ratio=1.31, excess=1.30, excess_low=1.27, excess_high=1.33,
            cause="wave", evidence="86 -> 172 tiles on 108 multiprocessors; 108 run at once", pad_to=168,
        ),
        Cliff(
            batch_size=257, from_size=256, to_size=288, ratio=1.17, excess=1.165, excess_low=1.12, excess_high=1.2,
            evidence="Times alone do not tell the cause; name the device and the shape",
        ),
    )  # fmt: skip


def rich_profile(repeats: int = 9, sizes: tuple[int, ...] = SIZES) -> Profile:
    """A planted curve with lognormal noise of 2 %."""
    noise = random.Random(7)
    points = tuple(_point(size, repeats, noise) for size in sizes)
    layers = [
        Layer(
            name=f"layers.{index}.{part}", kind=kind, parameter_bytes=WEIGHTS // 16 if kind == "Linear" else 0,
            flops_per_item=2e6 if kind == "Linear" else 1e3, activation_bytes_per_item=8192.0,
            seconds=(0.0008, 0.0061) if kind == "Linear" else (0.0001, 0.0004),
        )
        for index in range(4)
        for part, kind in (("up", "Linear"), ("act", "GELU"))
    ]  # fmt: skip
    return Profile(
        points=points, model="mlp:depth=8,width=1024", mode="inference", dtype="fp32",
        peaks=Peaks(flops=1.9e11, bandwidth=3.1e9, source="measured here", cache_bytes=33_000_000),
        memory=MemoryCurve(
            fixed_bytes=WEIGHTS, bytes_per_item=65536.0, limit_bytes=200_000_000, limit_source="cgroup limit",
            margin=0.1, predicted_largest=2230, largest_that_fits=1024, parts={"weights": WEIGHTS, "buffers": 4096},
        ),
        layers=tuple(layers), layer_batch_sizes=(1, 392),
        routing=(
            ExpertLoad(layer="layers.1.moe", batch_size=392, tokens=392, dropped=3,
                       tokens_per_expert=(190, 80, 40, 30, 20, 16, 16, 0), seconds=0.004, even_seconds=0.0031),
        ),
        failures=(Failure(batch_size=4096, kind="over_budget", text="needs 302 MB, 180 MB are left"),),
        uncounted=("aten::_scaled_dot_product",), weight_bytes=WEIGHTS, compile_count=2, compile_seconds=3.2,
        timed_rows=61_000, wall_seconds=58.1, stopped_by="saturated",
        environment=Environment(
            device="Intel Xeon 8375C", threads=2, cores=2, memory_bytes=8_000_000_000, load_before=0.3, load_after=1.9,
            busy_elsewhere=0.12, steal=0.004, clock_hz=(2.9e9, 3.4e9, 3.4e9), throttled=False,
            versions={"torch": "2.13.0", "python": "3.11.9"}, settings={"torch.compile": "off"},
        ),
    )  # fmt: skip


def planted_seconds(batch_size: int) -> float:
    """The rich curve without noise."""
    smooth = float((0.0136**1.3 + (0.000125 * batch_size) ** 1.3) ** (1 / 1.3))
    raised = 1.0
    for edge, ratio in STEPS.items():
        if edge <= batch_size <= edge * 1.25:
            raised = ratio
    return smooth * raised


def _point(size: int, repeats: int, noise: random.Random) -> Point:
    samples = tuple(planted_seconds(size) * noise.lognormvariate(0, 0.02) for _ in range(repeats))
    return Point(
        batch_size=size, samples=samples, rounds=tuple(range(repeats)), first_call_seconds=samples[0] * 3,
        flops=16.8e6 * size, moved_bytes=WEIGHTS + 65536.0 * size, overhead_seconds=0.0011,
        peak_bytes=WEIGHTS + 66000 * size, predicted_peak_bytes=WEIGHTS + 65536 * size,
    )  # fmt: skip


def _binding(point: Point, peaks: Peaks) -> Binding:
    seconds = statistics.median(point.samples)
    ordered = sorted(point.samples)
    compute = point.flops / seconds / peaks.flops if point.flops and peaks.flops else None
    memory = point.moved_bytes / seconds / peaks.bandwidth if point.moved_bytes and peaks.bandwidth else None
    return Binding(
        batch_size=point.batch_size, seconds=seconds, low=ordered[1] if len(ordered) > 2 else None,
        high=ordered[-2] if len(ordered) > 2 else None, fitted_seconds=seconds, compute_utilisation=compute,
        bandwidth_utilisation=memory, overhead_share=0.0011 / seconds if compute else None,
        bound=("compute" if point.batch_size > 109 else "memory") if compute else "",
    )  # fmt: skip


def from_csv() -> Explanation:
    """One time for each size and nothing else, as in a table from a paper."""
    profile = Profile(
        points=tuple(Point(batch_size=size, samples=(planted_seconds(size),)) for size in SIZES), source="csv"
    )
    return replace(
        rich(), profile=profile, recommended=replace(rich().recommended, confidence="low"), noise=None,
        points=tuple(_binding(point, profile.peaks) for point in profile.points), bound="", latency_target=None,
        largest_within_target=None, largest_that_fits=None, ridge=Ridge(value=109.0), utilisation="",
        warnings=("Each size has one time, so that no interval can be given.",), padding=(), period=None,
        cliffs=tuple(replace(cliff, excess_low=None, excess_high=None) for cliff in rich_cliffs()),
    )  # fmt: skip


def empty() -> Explanation:
    """One size, one time, and null wherever null is allowed."""
    profile = Profile(points=(Point(batch_size=8, samples=(0.25,)),))
    return Explanation(
        profile=profile,
        recommended=Recommendation(
            batch_size=8, objective="latency",
            reason="Throughput still rises at the largest size tried: 8 was the limit given.", limited_by="range",
            measured=True, seconds=0.25, throughput=32.0, share_of_best=1.0, confidence="low",
        ),
        balanced=None, b90=None, latency_target=0.03, largest_within_target=None, largest_that_fits=None,
        ridge=Ridge(reason="one size cannot show a ridge."), fit=None, bound="", cliffs=(), drops=(), padding=(),
        period=None, noise=None, points=(Binding(batch_size=8, seconds=0.25, low=None, high=None),),
    )  # fmt: skip


def many_cliffs(count: int = 9) -> Explanation:
    """More zones to avoid than a summary can name."""
    base = rich_cliffs()[0]
    cliffs = tuple(
        replace(base, batch_size=size + 1, from_size=size, to_size=size + 8, excess=1.05 + 0.01 * index)
        for index, size in enumerate(range(64, 64 + 32 * count, 32))
    )
    return replace(rich(), cliffs=cliffs)


def large(count: int = 100, repeats: int = 50) -> Explanation:
    """The largest run that a page must hold with all of its samples."""
    return of_profile(rich_profile(repeats, tuple(range(8, 8 * count + 1, 8))))


def of_profile(profile: Profile) -> Explanation:
    """The rich explanation over another profile; it needs the size 392."""
    return replace(rich(), profile=profile, points=tuple(_binding(point, profile.peaks) for point in profile.points))


def hostile() -> Explanation:
    """Every text that a user or a model can choose is hostile."""
    explanation = rich()
    profile = explanation.profile
    layers = tuple(replace(layer, name=HOSTILE, kind=HOSTILE) for layer in profile.layers[:2])
    machine = replace(profile.environment, device=HOSTILE, versions={HOSTILE: HOSTILE})
    profile = replace(
        profile, model=HOSTILE, unit=HOSTILE[:60], layers=layers, environment=machine, warnings=(HOSTILE,)
    )
    return replace(explanation, profile=profile, utilisation=HOSTILE, warnings=(HOSTILE,))


@cache
def page_of(name: str) -> str:
    """The page of one of these examples, made once for all tests."""
    from microbatch.reporting.page import to_html

    explanation: Explanation = globals()[name]()
    return to_html(explanation)
