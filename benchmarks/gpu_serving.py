"""The row of ``gpu_check.py`` for serving: a module on the device behind the engine, and batches that do not fit."""

from __future__ import annotations

import asyncio
from typing import Any


def serving(device: str, *, tiny: bool) -> dict[str, Any]:
    """Answers are those of the module itself; what runs out of memory is split, and nobody notices.

    Args:
        device: where the module runs.
        tiny: small sizes, for a CPU.
    """
    import torch
    from torch import Tensor, nn

    from microbatch.serving.engine.batcher import DynamicBatcher

    torch.manual_seed(0)
    width = 32 if tiny else 1024
    layers = [layer for _ in range(2 if tiny else 8) for layer in (nn.Linear(width, width), nn.ReLU())]
    model, items = nn.Sequential(*layers).eval(), list(torch.randn(256, width))
    engine = DynamicBatcher(model, examples=items[:4], devices=[device], max_batch_size=32)
    answers = asyncio.run(engine.submit_many(items))
    metrics = engine.metrics()
    engine.close()
    with torch.no_grad():
        expected = model(torch.stack(items))
    largest = float((torch.stack(answers) - expected).abs().max() / expected.abs().max())
    assert largest < 1e-3, f"answers differ by {largest} of the largest value"
    assert metrics.batches < len(items), "nothing shared a batch"

    # A CPU refuses only what no address space holds; a GPU is filled until it is full.
    piece = 2**48 if device == "cpu" else torch.cuda.get_device_properties(device).total_memory // 6

    class Greedy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) > 4:  # so many items do not fit
                torch.empty(2 * piece * len(x), dtype=torch.uint8, device=x.device)
            return 2 * x

    greedy = DynamicBatcher(Greedy(), devices=[device], max_batch_size=32)
    doubled = asyncio.run(greedy.submit_many(items))
    limited = greedy.metrics()
    greedy.close()
    assert all(torch.equal(found, 2 * item) for found, item in zip(doubled, items))
    assert limited.size_limit <= 5 and limited.out_of_memory >= 1, "running out of memory was not learnt from"
    return {
        "largest_difference": largest,
        "batches": metrics.batches,
        "curve": [list(row) for row in metrics.curve],
        "out_of_memory": limited.out_of_memory,
        "size_limit": limited.size_limit,
    }
