"""The row of ``gpu_check.py`` for losses and layers of the whole batch: two passes, and exact batch norms."""

from __future__ import annotations

import copy
from typing import Any


def whole_batch(device: str, *, tiny: bool) -> dict[str, Any]:
    """Gradients in four pieces are those of one pass, in float64; peaks of both in fp32.

    Args:
        device: where the models run.
        tiny: small sizes, for a CPU.
    """
    import torch
    from torch import Tensor, nn
    from torch.nn import functional

    from microbatch.training.step import TrainStep

    items, width, side = (32, 8, 8) if tiny else (256, 64, 32)
    torch.manual_seed(0)
    blocks: list[nn.Module] = []
    for _ in range(4):
        blocks += [nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 16)]
    encoder = nn.Sequential(nn.Conv2d(3, width, 1), *blocks, *head)
    images = torch.randn(items, 3, side, side)

    def loss(output: Tensor, _: Any) -> tuple[Tensor, int]:
        rows = functional.normalize(output, dim=1)
        scores = 5 * rows @ rows.roll(1, 1).T
        return functional.cross_entropy(scores, torch.arange(len(rows), device=rows.device), reduction="sum"), len(rows)

    def gradients(dtype: torch.dtype, size: int) -> tuple[list[Tensor], int | None]:
        model = copy.deepcopy(encoder).to(device, dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        step = TrainStep(model, optimizer, loss, joint="outputs", batch_norm="exact", micro_batch_size=size)
        step.accumulate(images.to(dtype))
        found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        return found, step(images.to(dtype)).peak_bytes

    def apart(one: list[Tensor], other: list[Tensor]) -> float:
        largest = max(float(g.abs().max()) for g in other)
        return max(float((a.double() - b.double()).abs().max()) for a, b in zip(one, other, strict=True)) / largest

    exact, _ = gradients(torch.float64, items)
    pieces, _ = gradients(torch.float64, items // 4)
    assert apart(pieces, exact) <= 1e-12, f"four pieces are {apart(pieces, exact)} off one pass"
    whole, peak_of_whole = gradients(torch.float32, items)
    fourth, peak_of_pieces = gradients(torch.float32, items // 4)
    found, allowed = apart(fourth, exact), 4 * apart(whole, exact) + 1e-6
    assert found <= allowed, f"in fp32 four pieces are {found} off, more than {allowed}"
    if peak_of_whole is not None and peak_of_pieces is not None:
        assert peak_of_pieces < 0.6 * peak_of_whole, f"{peak_of_pieces} of {peak_of_whole} bytes"
    return {"float64": apart(pieces, exact), "peak_whole": peak_of_whole, "peak_pieces": peak_of_pieces}
