"""What a prediction knows beside its curve: ridges, steps, the limits of decoding, the optimizer. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from microbatch.curves.prediction import DecodeLimits, OptimizerShare, Prediction, Step
from microbatch.curves.profile import Point
from microbatch.hardware.device_spec import DeviceSpec
from microbatch.profiling.predict_clock import Clock, Settings
from microbatch.profiling.predict_sizes import rising_pairs
from microbatch.roofline.balance import full_ridge_of, weights_ridge_of
from microbatch.roofline.decode import context_limit, decode_work_of, half_batch, saturated_throughput
from microbatch.roofline.steps import Moment, explain_rise
from microbatch.work.operators import Work

BOUND_BY_OPTIMIZER = 0.5


def predict_limits(
    whole: Work, clock: Clock, settings: Settings, points: Sequence[Point], memory_method: str
) -> Prediction:
    spec, sequence = clock.spec, clock.sequence
    own = clock.work
    return Prediction(
        device=spec.name,
        devices=settings.devices,
        sequence=settings.sequence,
        weight_dtype=settings.weight_dtype or whole.dtype,
        ridge_weights=weights_ridge_of(own, spec, sequence=sequence),
        ridge_with_activations=full_ridge_of(own, spec, sequence=sequence),
        steps=_steps(clock, [point.batch_size for point in points]),
        decode=_decode(whole, spec, settings),
        optimizer=_optimizer(clock, settings, points) if own.mode == "training" else None,
        memory_method=memory_method,
        fitted=bool(spec.constants),
    )


def _steps(clock: Clock, sizes: Sequence[int]) -> tuple[Step, ...]:
    pairs = rising_pairs(sizes, clock.seconds)
    rises = [explain_rise(clock.work, clock.spec, _moment(clock, low), _moment(clock, high)) for low, high in pairs]
    return tuple(
        Step(from_size=low, batch_size=high, cause=rise.cause, evidence=rise.evidence, layer=rise.layer)
        for (low, high), rise in zip(pairs, rises, strict=True)
    )


def _moment(clock: Clock, size: int) -> Moment:
    return Moment(size=size, sequence=clock.sequence, call=clock.call(size))


def _decode(whole: Work, spec: DeviceSpec, settings: Settings) -> DecodeLimits | None:
    if whole.mode != "decode":
        return None
    numbers = decode_work_of(whole)
    if numbers is None:
        return DecodeLimits(context=settings.sequence, reason="The cache does not grow evenly with the context.")
    limit, context = context_limit(numbers, spec, whole.dtype), settings.sequence or 1
    reason = "" if limit else "Attention itself is compute-bound: more context never makes memory bind."
    bound = saturated_throughput(numbers, spec, context)
    return DecodeLimits(
        context=settings.sequence,
        context_limit=limit,
        half_batch=half_batch(numbers, context),
        saturated_throughput=bound * settings.devices if bound else None,
        cache_bytes_per_token=numbers.cache_bytes_per_token,
        active_parameters=numbers.active_parameters,
        reason=reason if numbers.cache_bytes_per_token else "The cache does not grow with the context.",
    )


def update_seconds(clock: Clock, size: int, settings: Settings) -> float:
    """Seconds of the optimizer's step in one call; adding up gradients belongs to each piece."""
    times = zip(clock.work.operators, clock.call(size).operators, strict=True)
    return sum(o.repeat * t.seconds for o, t in times if o.kind == "optimizer" and o.name == settings.optimizer)


def _optimizer(clock: Clock, settings: Settings, points: Sequence[Point]) -> OptimizerShare:
    first = points[0].batch_size
    times = zip(clock.work.operators, clock.call(first).operators, strict=True)
    seconds = sum(o.repeat * t.seconds for o, t in times if o.kind == "optimizer")
    bound = [point.batch_size for point in points if seconds > BOUND_BY_OPTIMIZER * point.samples[0]]
    return OptimizerShare(
        name=settings.optimizer, accumulation=settings.accumulation, seconds=seconds,
        bound_up_to=bound[-1] if bound else None,
    )  # fmt: skip
