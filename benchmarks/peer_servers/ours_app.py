"""What `microbatch serve benchmarks/peer_servers/ours_app.py:NAME` serves."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.peer_servers.callables import INPUT, LONGEST, minilm, mlp, mlp_module
from benchmarks.peer_servers.items import ITEMS
from microbatch.models.torchvision_operators import make_torchvision_importable
from microbatch.serving.engine.batcher import DynamicBatcher

torch.set_num_threads(1)
make_torchvision_importable()  # transformers looks for it


def mlp_same() -> DynamicBatcher:
    """The callable of all."""
    return DynamicBatcher(mlp(), examples=ITEMS["mlp"]()[:8])


def mlp_fast() -> tuple[Any, torch.Tensor]:
    """The module, as a user hands it over."""
    return mlp_module(), torch.randn(4, INPUT, generator=torch.Generator().manual_seed(0))


def minilm_same() -> DynamicBatcher:
    """The callable of all, told how long a text is."""
    return DynamicBatcher(minilm(), examples=ITEMS["minilm"]()[:32], length=tokens)


def minilm_arrival() -> DynamicBatcher:
    """The same without lengths: batches in the order of arrival."""
    return DynamicBatcher(minilm(), examples=ITEMS["minilm"]()[:32])


def tokens(text: str) -> int:
    """About how many tokens a text has: four letters each, and the two at its ends."""
    return min(2 + -(-len(text) // 4), LONGEST)
