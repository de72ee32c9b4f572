"""What a predicted profile knows beside its curve, as plain data: what it was computed for, and its steps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A rise of the time per item that the time model itself makes.

    Attributes:
        from_size, batch_size: the sizes on both sides; neighbours, so the edge is exact where they are one apart.
        cause: tile, wave, kernel_switch, overhead or unknown, as for a `Cliff`.
        evidence: one sentence from the time of the operator that rises most.
        layer: of that operator.
    """

    from_size: int
    batch_size: int
    cause: str
    evidence: str
    layer: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeLimits:
    """What decoding can reach on the device; None where there is no such limit.

    Attributes:
        context: tokens in the cache that the curve was computed for.
        context_limit: tokens beyond which no batch is compute-bound.
        half_batch: batch of half of the saturated throughput at `context`.
        saturated_throughput: tokens per second that no batch exceeds at `context`.
        cache_bytes_per_token: keys and values of one token of one sequence.
        active_parameters: parameters that one token uses.
        reason: why a limit is missing; empty when none is.
    """

    context: int | None = None
    context_limit: float | None = None
    half_batch: float | None = None
    saturated_throughput: float | None = None
    cache_bytes_per_token: float | None = None
    active_parameters: float | None = None
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerShare:
    """What the optimizer takes of a training step.

    Attributes:
        name: of the optimizer.
        accumulation: micro-batches in one step.
        seconds: its share of one micro-batch, adding up gradients included.
        bound_up_to: largest size of which the optimizer takes more than half of the time; None where there is none.
    """

    name: str
    accumulation: int
    seconds: float
    bound_up_to: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SurfacePoint:
    """One sequence length at one batch size; `fits` is None where the device's memory is not known."""

    sequence: int
    batch_size: int
    seconds: float
    throughput: float
    fits: bool | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What a curve was computed for.

    Attributes:
        device: name in the catalogue, or of the user's own file.
        devices: how many of them share the model, tensor parallel; times and bytes are those of one.
        sequence: length at which the curve holds; in decoding the context. None for a model without one.
        weight_dtype: dtype in which the weights are stored.
        ridge_weights, ridge_with_activations: batch where computing takes as long as moving, from the datasheet.
        steps: sizes where the time per item rises by 5 % or more.
        decode: limits of decoding; None in other modes.
        optimizer: None in other modes than training.
        memory_method: how the memory was found, in a sentence.
        fitted: the device's own file holds constants of the time model, so that it is more than its datasheet.
    """

    device: str
    devices: int = 1
    sequence: int | None = None
    weight_dtype: str = ""
    ridge_weights: float | None = None
    ridge_with_activations: float | None = None
    steps: tuple[Step, ...] = ()
    decode: DecodeLimits | None = None
    optimizer: OptimizerShare | None = None
    memory_method: str = ""
    fitted: bool = False
