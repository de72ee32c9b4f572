"""What a run over a data set did, and why in those pieces."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from microbatch.serving.offline.growing import Trial


@dataclass(frozen=True, kw_only=True, slots=True)
class MapReport:
    """One run of `microbatch.map`.

    Attributes:
        items: that ran.
        pieces: calls of the model that gave outputs.
        seconds: from the first item to the last output.
        unit: what sizes count, items or tokens.
        size: of a piece at the end; None where the data ended before one was chosen.
        reason: why that size.
        tokens: of all items; items where they are alike.
        padded_tokens: that ran, padding included.
        out_of_memory: pieces that did not fit and ran again, smaller.
        trials: runs while the size was looked for.
    """

    items: int
    pieces: int
    seconds: float
    unit: str
    size: int | None
    reason: str
    tokens: int
    padded_tokens: int
    out_of_memory: int = 0
    trials: tuple[Trial, ...] = ()

    @property
    def padding(self) -> float:
        """Share of the tokens that ran which were padding."""
        return 1.0 - self.tokens / self.padded_tokens if self.padded_tokens else 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain values; times in seconds."""
        return {"schema_version": 1, **dataclasses.asdict(self), "padding": self.padding}
