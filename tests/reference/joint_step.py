"""The reference for joint losses: every piece forward with its graph kept, one loss of all outputs, one backward."""

from __future__ import annotations

from typing import Any

import torch


def joined(outputs: list[Any]) -> Any:
    """Outputs of several pieces as one: tensors row by row, in tuples and dicts as deep as one likes."""
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(outputs) if first.dim() else first
    if isinstance(first, dict):
        return {name: joined([output[name] for output in outputs]) for name in first}
    parts = [joined(list(part)) for part in zip(*outputs)]
    return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)


def joint_step(model: Any, loss: Any, forward: Any, pieces: list[Any], batch: Any) -> dict[str, Any]:
    """The loss, and the gradients that it leaves."""
    result = loss(joined([forward(model, piece) for piece in pieces]), batch)
    whole = sum(total / weight for total, weight in (result.values() if isinstance(result, dict) else [result]))
    whole.backward()
    return {
        "loss": whole.item(),
        **{name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None},
    }
