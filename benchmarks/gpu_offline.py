"""The GPU check of offline inference: host data through a model on a device, with and without room for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import microbatch
from microbatch.batch.token_budget import TokenBudget


class Encoder(nn.Module):
    """Tokens to one vector per sequence; padding is masked."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.block = nn.Embedding(100, width), nn.TransformerEncoderLayer(width, 4, batch_first=True)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden: Tensor = self.block(self.embed(input_ids), src_key_padding_mask=attention_mask == 0)
        mask = attention_mask[..., None]
        return (hidden * mask).sum(1) / mask.sum(1)


def offline(device: str, *, tiny: bool) -> dict[str, Any]:
    """Outputs equal one pass and come back to the host; out of memory, pieces run again, smaller."""
    torch.manual_seed(0)
    count, longest = (60, 16) if tiny else (4000, 256)
    model = Encoder(16 if tiny else 256).to(device)
    lengths = torch.randint(1, longest + 1, (count,)).tolist()
    items = [{"input_ids": torch.randint(1, 100, (n,)), "attention_mask": torch.ones(n).long()} for n in lengths]
    expected = microbatch.map(model, items, 16, progress=False)
    found: dict[str, Any] = {}
    sizes: dict[str, Any] = {"auto": "auto", "budget": TokenBudget(16 * longest)}
    for name, size in sizes.items():
        outputs, report = microbatch.map(model, items, size, progress=False, return_report=True)
        difference = float((outputs - expected).abs().max())
        assert outputs.device.type == "cpu" and difference < 1e-2, f"{name}: outputs differ by {difference}"
        found[name] = report.to_json() | {"difference": difference}
    return found | ({} if torch.device(device).type == "cpu" else {"memory": _without_room(device)})


def _without_room(device: str) -> dict[str, Any]:
    """A device capped to 2 GiB, and a piece that wants more."""
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((2 << 30) / total, device)
    try:
        rows = torch.randn(4096, 1024)
        model = nn.Sequential(nn.Linear(1024, 1 << 18), nn.ReLU(), nn.Linear(1 << 18, 1)).to(device)
        outputs, report = microbatch.map(model, rows, 4096, progress=False, return_report=True)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    assert outputs.shape == (4096, 1) and report.out_of_memory > 0, report
    return {"out_of_memory": report.out_of_memory, "pieces": report.pieces}
