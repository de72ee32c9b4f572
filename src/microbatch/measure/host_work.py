"""What torch does around its kernels: the seconds of one unit of host work."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from microbatch.measure.rounds import time_rounds
from microbatch.roofline.cpu import HOST_WORK

_WIDTH, _HEADS, _TOKENS = 32, 2, 4
_BIG = 1024
_BIGS = 4

_KINDS = (
    *("normalisation", "matmul", "elementwise", "matmul", "elementwise"),  # norm, up, gelu, down, add
    *("matmul", "reduction", "matmul", "copy"),  # scores, softmax, mixed, heads joined
    *("lookup", "copy", "elementwise", "reduction"),  # rows, cat, mul, mean
)
"""What `_Mixed` runs."""


class _Mixed(nn.Module):
    """Operators of many kinds on a handful of numbers, in modules and with the views that models have."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.activation = nn.GELU()
        self.rows = nn.Embedding(_TOKENS, _WIDTH)

    def forward(self, x: Tensor, numbers: Tensor) -> Tensor:
        """x: (1, tokens, width); numbers: (tokens,)."""
        x = x + self.down(self.activation(self.up(self.norm(x))))
        heads = x.view(1, _TOKENS, _HEADS, -1).transpose(1, 2)
        scores = (heads @ heads.transpose(-1, -2)).softmax(-1)
        joined = (scores @ heads).transpose(1, 2).reshape(1, _TOKENS, -1)
        return torch.cat([joined[0], self.rows(numbers)], dim=-1).mul(0.5).mean(-1)


def measure_launch(seconds: float) -> tuple[float, str]:
    """Seconds of one unit of host work, and how they were found.

    Between two runs of the mixed operators a large Linear passes its weights through the caches, as in a model, where
    the framework's own code and tables have been pushed out when they are needed again. Its time alone is taken off.
    """
    mixed, x, numbers = _Mixed().eval(), torch.randn(1, _TOKENS, _WIDTH), torch.arange(_TOKENS)
    bigs = [nn.Linear(_BIG, _BIG) for _ in range(_BIGS)]
    row = torch.randn(1, _BIG)

    def run(between: Sequence[Callable[[], object]]) -> None:
        for big in bigs:
            big(row)
            for call in between:
                call()

    calls = {"alone": lambda: run(()), "with": lambda: run((lambda: mixed(x, numbers),))}
    times = time_rounds(calls, seconds)
    units = sum(HOST_WORK[kind] for kind in _KINDS)
    spent = max(times["with"] - times["alone"], 0.01 * times["with"]) / _BIGS
    return spent / units, f"{len(_KINDS)} tiny operators of different kinds between large Linear layers"
