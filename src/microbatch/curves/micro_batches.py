"""A global batch in micro-batches: the time of a step by the size of its pieces. No torch, no clock.

N items in m pieces of b items, the last one perhaps smaller, take

    step = ⌊N/b⌋ · t(b) + t(N mod b) + (m − 1) · a + u

seconds: t is forward and backward of one piece, a the time in which the gradients of a further piece are added to those
before it, and u the optimizer's update, which runs once however many pieces there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from microbatch.sizes import BatchSizes


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """A global batch in pieces of one size.

    Attributes:
        micro_batch_size: items in every piece but perhaps the last.
        num_micro_batches: number of pieces, the smaller tail included.
        tail: items in the last piece where it is smaller than the others; else 0.
        step_seconds: forward and backward of every piece, and one update.
        low, high: its 90 % interval; None where the sizes have one time each.
        samples_per_second: items of the global batch per second.
        peak_bytes: most bytes alive at once, those of one piece beside weights, gradients and optimizer state; None
            where memory is not known.
        fits: whether that is within the limit less its margin; None where memory is not known.
        bound: what binds: memory, compute, overhead or mixed, as in a call of that size; optimizer where the update
            and the adding of gradients take more than half of the step; empty when unknown.
        measured: False where the time was read between those of two measured sizes.
        chosen: whether it is the one to use.
    """

    micro_batch_size: int
    num_micro_batches: int
    tail: int
    step_seconds: float
    low: float | None = None
    high: float | None = None
    samples_per_second: float
    peak_bytes: int | None = None
    fits: bool | None = None
    bound: str = ""
    measured: bool = True
    chosen: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatches:
    """A global batch in pieces of every size that is known, and the size to use.

    Attributes:
        global_batch_size: items in one optimizer step.
        rows: one for each size, ascending.
        limited_by: what keeps the pieces from being larger: batch (it is one piece), saturated, memory, budget, range;
            none where no size fits.
        reason: the same in a sentence.
        warnings: what to know before trusting the times.
    """

    global_batch_size: int
    rows: tuple[MicroBatch, ...]
    limited_by: str
    reason: str
    warnings: tuple[str, ...] = ()

    @property
    def chosen(self) -> MicroBatch | None:
        """The one to use; None where no size fits."""
        return next((row for row in self.rows if row.chosen), None)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """What a step is made of, in seconds.

    Attributes:
        pieces: forward and backward of one piece, by its size.
        updates: the optimizer's update after pieces of a size; empty where it is not known or stands in `pieces`.
        adding: of each piece after the first, to add its gradients to those before it.
    """

    pieces: Mapping[int, float]
    updates: Mapping[int, float]
    adding: float = 0.0

    def once(self, sizes: BatchSizes) -> float:
        """What a step takes beside the forward and backward of its pieces."""
        update = between(self.updates, sizes.micro_batch_size) if self.updates else 0.0
        return update + (sizes.num_micro_batches - 1) * self.adding

    def step(self, sizes: BatchSizes) -> float:
        """The whole step."""
        return step_seconds(sizes.global_batch_size, sizes.micro_batch_size, self.pieces) + self.once(sizes)


def step_seconds(batch_size: int, size: int, times: Mapping[int, float]) -> float:
    """Forward and backward of all pieces; a size that is not known lies on the line between its neighbours.

    Args:
        batch_size: items in the global batch.
        size: items in every piece but perhaps the last.
        times: seconds of one piece by its size, at least one.

    >>> step_seconds(100, 32, {4: 1.0, 32: 5.0})
    16.0
    """
    sizes = BatchSizes.of(global_batch_size=batch_size, micro_batch_size=size)
    full = sizes.num_micro_batches - bool(sizes.tail)
    return full * between(times, sizes.micro_batch_size) + (between(times, sizes.tail) if sizes.tail else 0.0)


def between(times: Mapping[int, float], size: int) -> float:
    """Linear between known sizes; below the smallest its own time, above the largest in proportion."""
    above = min((known for known in times if known >= size), default=max(times))
    below = max((known for known in times if known <= size), default=min(times))
    if above == below:
        return times[above] * max(1.0, size / above)
    return times[below] + (times[above] - times[below]) * (size - below) / (above - below)


def even_sizes(batch_size: int) -> tuple[int, ...]:
    """The batch in 1, 2, 4, ... even pieces, the smallest size first.

    >>> even_sizes(100)
    (1, 2, 4, 7, 13, 25, 50, 100)
    """
    return tuple(sorted({-(-batch_size // (1 << power)) for power in range(batch_size.bit_length() + 1)}))


def micro_batches_document(found: MicroBatches | None) -> dict[str, Any]:
    """The keys of a JSON document that tell a cut; null and an empty list where there is none."""
    if found is None:
        return {"global_batch_size": None, "micro_batches": [], "micro_batch": None}
    import msgspec  # only writing needs it

    chosen = found.chosen
    return {
        "global_batch_size": found.global_batch_size,
        "micro_batches": list(msgspec.to_builtins(found.rows)),
        "micro_batch": {
            "micro_batch_size": chosen and chosen.micro_batch_size,
            "num_micro_batches": chosen and chosen.num_micro_batches,
            "limited_by": found.limited_by,
            "reason": found.reason,
        },
    }
