"""What one training step did."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from microbatch.training.noise_scale import NoiseScale


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One try at a step.

    Attributes:
        micro_batch_size: items in each piece but perhaps the last; under a budget of tokens the most of any piece.
        outcome: ``"done"``, or what ended it, as in ``"out of memory"``.
        phase: where it ended: forward, backward, reduction or optimizer; None when it is done.
        reason: who ran out and what it said; None when it is done.
        token_budget: what the pieces were held to; None where items count.
    """

    micro_batch_size: int
    outcome: str
    phase: str | None = None
    reason: str | None = None
    token_budget: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One optimizer step.

    Attributes:
        loss: sum of the losses of all terms, each its sum over its weight; NaN for a batch without weight.
        losses: the loss of each term.
        weight: what was divided by: the weight of the first term over all pieces and ranks.
        weights: the weight of each term.
        batch_size: items of this rank's batch.
        micro_batch_size: items in each piece but perhaps the last; under a budget of tokens the most of any piece.
        num_micro_batches: pieces.
        attempts: every try, the successful one last.
        peak_bytes: the device allocator's peak during the step (its peak counter is reset at the start); None on
            devices whose allocator does not tell.
        grad_norm: global norm before clipping; None without ``max_norm`` and ``noise_scale``.
        sent_bytes: what this rank sent to others for the step, counted as rings send it (see
            `microbatch.training.ranks.meeting.Traffic`); 0 for one process.
        communication_calls: collectives of the step.
        skipped: why the weights were left as they were; None when they were updated.
        tokens: of the items under a budget of tokens; None where items count.
        padded_tokens: that ran, padding included.
        gradient_noise_scale: the run's so far, in samples: beyond a global batch of about that, more samples per step
            buy little. None without ``noise_scale=True`` and before a step with two pieces.
        noise_scale: the same with its interval and what it rests on; `str` of it is a sentence.
    """

    loss: float
    losses: dict[str, float]
    weight: float
    weights: dict[str, float]
    batch_size: int
    micro_batch_size: int
    num_micro_batches: int
    attempts: tuple[Attempt, ...] = field(default=())
    peak_bytes: int | None = None
    grad_norm: float | None = None
    skipped: str | None = None
    tokens: int | None = None
    padded_tokens: int | None = None
    sent_bytes: int = 0
    communication_calls: int = 0
    gradient_noise_scale: float | None = None
    noise_scale: NoiseScale | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values; null where a number is not finite."""
        document: dict[str, Any] = _plain(dataclasses.asdict(self))
        return {"schema_version": 1, **document}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
