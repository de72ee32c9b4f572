"""A model of equal blocks, for measurements of pipelines."""

from __future__ import annotations

import torch
from torch import Tensor, nn

RATE = 1e-9
"""Of learning: an update that takes its time and changes next to nothing, for the loss is to stay finite."""


class Block(nn.Module):
    """A residual block of two layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, values: Tensor) -> Tensor:
        """What is added to the values, and they."""
        result: Tensor = values + self.down(torch.relu(self.up(values)))
        return result


def loss(output: Tensor, _batch: object) -> tuple[Tensor, int]:
    """The squares."""
    return output.square().sum(), len(output)
