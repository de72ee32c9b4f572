"""What torch does around its kernels: the seconds of one unit of host work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from microbatch.roofline.cpu import HOST_WORK, HOST_WORK_BY_NAME

_WIDTH, _HEADS, _TOKENS = 32, 2, 4
_BETWEEN, _COUNT = 1024, 8
"""Width of the Linear layers in between, whose weights push everything else out of the inner caches, and how many."""

_KINDS = (
    *("normalisation", "matmul", "gelu", "matmul", "elementwise"),
    *("matmul", "reduction", "matmul", "copy"),  # scores, softmax, mixed, heads joined
    *("lookup", "copy", "elementwise", "mean"),  # rows, cat, mul, mean
)
"""What `_Mixed` runs, by kind or name."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """Seconds of one unit of host work.

    Attributes:
        in_model: where products pass their weights through the caches, so that the framework's own code and tables
            have been pushed out when they are needed again.
        alone: in a loop that runs nothing else.
        how: what was run.
    """

    in_model: float
    alone: float
    how: str


def launch_calls() -> dict[str, Callable[[], object]]:
    """Tiny operators of many kinds: by themselves, and between Linear layers, whose own time is to be taken off."""
    mixed, x, numbers = _Mixed().eval(), torch.randn(1, _TOKENS, _WIDTH), torch.arange(_TOKENS)
    layers = [nn.Linear(_BETWEEN, _BETWEEN) for _ in range(_COUNT)]
    row = torch.randn(1, _BETWEEN)

    def products() -> None:
        for layer in layers:
            layer(row)

    def both() -> None:
        for layer in layers:
            layer(row)
            mixed(x, numbers)

    return {"products": products, "both": both, "alone": lambda: mixed(x, numbers)}


def find_launch(times: Mapping[str, float]) -> Launch:
    """From the seconds of `launch_calls`."""
    units = sum((HOST_WORK | HOST_WORK_BY_NAME)[kind] for kind in _KINDS)
    between = (times["both"] - times["products"]) / _COUNT
    return Launch(
        in_model=max(between, times["alone"]) / units,
        alone=times["alone"] / units,
        how=f"{len(_KINDS)} tiny operators of different kinds between Linear layers of {_BETWEEN}",
    )
