"""Bytes that a call keeps alive, from its operators: for models too large to run on fake tensors. No torch.

Fixed are the weights (in training also gradients and optimizer state). With the batch grow

    inference:  keys and values of the cache, and the inputs and outputs of the operator with the most of them, since
                what layers before it made is freed;
    training:   what every forward operator writes, which the backward pass reads again.

Temporaries inside kernels, what a framework keeps for itself and fragmentation are left to the margin.
"""

from __future__ import annotations

from microbatch.curves.profile import MemoryCurve
from microbatch.roofline.training import state_bytes
from microbatch.work.operators import Operator, Work

MARGIN = 0.1
"""Share of the memory that is kept free; serving systems ship the same 0.9 (vLLM, gpu_memory_utilization)."""
FAR = 4096
"""The peak is a maximum of straight lines, so its slope is read where the steepest has won."""


def memory_of_work(
    work: Work,
    limit: int,
    limit_source: str,
    *,
    sequence: float = 1.0,
    optimizer: str | None = None,
    margin: float = MARGIN,
) -> MemoryCurve:
    """Fixed part and slope, and the largest batch that fits.

    Args:
        work: one device's.
        limit: bytes of one device's memory.
        limit_source: where that figure comes from.
        sequence: length, in decoding the context.
        optimizer: of a training step; None in other modes.
        margin: share of the limit that is kept free.
    """
    parts = {"weights": work.weight_bytes, **(state_bytes(work, optimizer) if optimizer else {})}
    slope = growing_bytes(work, FAR + 1, sequence) - growing_bytes(work, FAR, sequence)
    return fitted(parts, slope, limit=limit, limit_source=limit_source, margin=margin)


def fitted(
    parts: dict[str, int], slope: float, *, limit: int, limit_source: str, margin: float, fixed: int | None = None
) -> MemoryCurve:
    """A curve with the largest batch that its limit allows; in a prediction that is also the one called to fit."""
    fixed = sum(parts.values()) if fixed is None else fixed
    room = limit * (1 - margin) - fixed
    largest = int(room // slope) if slope > 0 and room > 0 else (0 if room <= 0 else None)
    return MemoryCurve(
        fixed_bytes=fixed, bytes_per_item=slope, limit_bytes=limit, limit_source=limit_source, margin=margin,
        predicted_largest=largest, largest_that_fits=largest, parts=parts,
    )  # fmt: skip


def growing_bytes(work: Work, batch: float, sequence: float) -> float:
    """Cache and activations at one batch."""
    cache = work.cache_bytes(batch, sequence)
    if work.mode == "training":
        return cache + sum(o.repeat * o.written_bytes(batch, sequence) for o in work.operators if not o.backward)
    return cache + max((_touched(o, work, batch, sequence) for o in work.operators), default=0.0)


def _touched(operator: Operator, work: Work, batch: float, sequence: float) -> float:
    """Inputs and outputs; the cache that attention reads while decoding is counted by itself."""
    if operator.kind == "communication":
        return 0.0
    written = operator.written_bytes(batch, sequence)
    if work.mode == "decode" and operator.kind == "attention":
        return 2 * written
    return operator.read_bytes(batch, sequence) + written
