"""The norm of each piece's own gradient, while all pieces add to the same ``.grad``; no second buffer.

A hook on a leaf receives what one backward pass adds to its ``.grad``, once and summed over all uses of the parameter,
before it is added. Its norm is taken there and then, parameter by parameter. FSDP2's leaves are not the parameters:
there the input of each reduce-scatter is what this rank adds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from microbatch.training.noise_scale import NoiseScale, RunningNoise, measured, share_of
from microbatch.training.normalise import Pair, Total, common_weight
from microbatch.training.ranks.one_process import Ranks

_NARROW = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Piece:
    """What one piece has added.

    Attributes:
        norm: of its gradient; None for nothing.
        weights: by term of the loss.
        divisor: what its sums were divided by; None for the final weights.
    """

    norm: Tensor | None
    weights: dict[str, float]
    divisor: float | None


class PieceNorms:
    """Measures the pieces of each step, and keeps averages over the steps.

    Attributes:
        running: the averages.
    """

    def __init__(self, parameters: Callable[[], Sequence[nn.Parameter]], scaler: GradScaler | None) -> None:
        """
        Args:
            parameters: gives those that are trained.
            scaler: of the loss.
        """
        self.running = RunningNoise()
        self._parameters = parameters
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._pieces: list[Piece] = []
        self._parts: dict[object, Tensor] | None = None
        self._whole, self._scale = True, 1.0

    @contextmanager
    def watching(self, ranks: Ranks) -> Iterator[None]:
        """Around forward and backward of all pieces of one try; what an earlier try found is forgotten."""
        self._pieces, self._parts = [], None
        self._scale = 1.0 if self._scaler is None else self._scaler.get_scale()
        hooks = [(parameter, partial(self._note, index)) for index, parameter in enumerate(self._parameters())]
        handles = [parameter.register_hook(hook) for parameter, hook in hooks]
        try:
            with ranks.showing_gradients(self._note) as self._whole:
                yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def piece(self, pairs: Mapping[str, Pair], divisor: float | None) -> Iterator[None]:
        """Around the backward pass of a piece.

        Args:
            pairs: what its loss returned.
            divisor: what its sums are divided by; None for the final weights.
        """
        self._parts = {}
        yield
        parts, self._parts = list(self._parts.values()), None
        norm = torch.linalg.vector_norm(torch.stack([part.to(parts[0].device) for part in parts])) if parts else None
        self._pieces.append(Piece(norm, {name: pair.weight for name, pair in pairs.items()}, divisor))

    def step_ends(
        self, ranks: Ranks, totals: Mapping[str, Total], norm: float | None, samples: int
    ) -> NoiseScale | None:
        """The run's noise scale after this step.

        Args:
            ranks: that share the step; all of them call this.
            totals: of all pieces and ranks.
            norm: of the whole gradient, unscaled and before clipping; None for a step that was skipped.
            samples: on all ranks.
        """
        said = ranks.share(self._said(totals))
        squares, shares, all_shares = (math.fsum(one[key] for one in said) for key in ("squares", "shares", "all"))
        if norm is not None and all(one["whole"] for one in said) and math.isclose(all_shares, 1.0, rel_tol=1e-6):
            one = measured(squares=squares, shares=shares, square_of_sum=norm**2, samples=samples)
            if one is not None:
                self.running.add(one)
        return self.running.noise_scale(samples)

    def _note(self, key: object, gradient: Tensor) -> None:
        if self._parts is None:
            return
        if key in self._parts:  # a gradient in two parts, as reentrant checkpoints give it: their norms do not add up
            self._whole = False
        values = gradient.detach()
        values = values.coalesce().values() if values.is_sparse else values
        self._parts[key] = torch.linalg.vector_norm(values, dtype=torch.float32 if values.dtype in _NARROW else None)

    def _said(self, totals: Mapping[str, Total]) -> dict[str, Any]:
        """This rank's part of q, a and of all shares, see `microbatch.training.noise_scale`."""
        weights = {name: total.weight for name, total in totals.items()}
        weight = common_weight(totals) or 1.0
        pieces = [piece for piece in self._pieces if piece.norm is not None]
        norms = torch.stack([piece.norm for piece in pieces if piece.norm is not None]).tolist() if pieces else []
        units = [1.0 if piece.divisor is None else piece.divisor / weight for piece in pieces]
        shares = [share_of(piece.weights, weights) for piece in self._pieces]
        return {
            "squares": math.fsum((norm * unit / self._scale) ** 2 for norm, unit in zip(norms, units)),
            "shares": math.fsum(share**2 for share in shares),
            "all": math.fsum(shares),
            "whole": self._whole,
        }
