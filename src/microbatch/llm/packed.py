"""Linear layers of a decoder: fused, packed where that pays, in row tiles where bits must not depend on mates."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from microbatch.models.packed_linear import SMALLEST, is_available, pack, packed_linear

PACKED_ROWS = 32
"""Rows that a packed weight is laid out for; others run as well (benchmarks/generation_kernels.py has the table)."""
TILES = (16, 8, 4, 2, 1)
"""Rows of one product in tiles, the first that gives a row the same bits at each of its places."""


class Linear:
    """y = x Wᵀ + b over rows [rows, in]. The weight is frozen: a packed one does not follow the model's training.

    Attributes:
        features: that come out.
        tile: rows of every product, 0 for all rows at once.
    """

    __slots__ = ("_bias", "_packed", "_weight", "features", "tile")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """
        Args:
            weight: [out, in], in the dtype of the arithmetic.
        """
        self.features = weight.shape[0]
        self.tile = 0
        self._bias = bias
        self._packed = may_be_packed(weight)
        self._weight = pack(weight, PACKED_ROWS) if self._packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        if not self.tile:
            return self._product(x)
        rows = x.shape[0]
        whole = pad(x, (0, 0, 0, -rows % self.tile))
        return torch.cat([self._product(tile) for tile in whole.split(self.tile)])[:rows]

    def _product(self, x: Tensor) -> Tensor:
        product = packed_linear if self._packed else linear
        return product(x, self._weight, self._bias)

    @torch.no_grad()
    def use_tiles(self, dtype: torch.dtype, features: int, device: torch.device) -> None:
        """From now on a row has the same bits whatever other rows there are.

        Args:
            features: that go in.
        """
        row = torch.randn(1, features, generator=torch.Generator().manual_seed(features)).to(device, dtype)
        for tile in TILES:
            self.tile = tile
            found = self._product(row.expand(tile, -1).contiguous())
            if torch.equal(found, found[:1].expand_as(found)):
                return


def fused(layers: Sequence[tuple[Tensor, Tensor | None]]) -> Linear:
    """One layer for several over the same input, their outputs side by side."""
    biases = [bias for _, bias in layers]
    together = None
    if any(bias is not None for bias in biases):
        together = torch.cat([weight.new_zeros(weight.shape[0]) if bias is None else bias for weight, bias in layers])
    weight = layers[0][0] if len(layers) == 1 else torch.cat([weight for weight, _ in layers])
    return Linear(weight, together)


def may_be_packed(weight: Tensor) -> bool:
    """On a CPU, large enough, and in a dtype that this processor's oneDNN packs."""
    return weight.device.type == "cpu" and weight.numel() >= SMALLEST and is_available(weight.dtype)
