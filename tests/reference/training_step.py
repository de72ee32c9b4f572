"""The reference for exactness: one forward and one backward over the whole batch, in plain torch."""

from __future__ import annotations

from typing import Any

import torch


def full_batch_step(
    model: Any, optimizer: Any, loss: Any, forward: Any, batch: Any, max_norm: float | None = None
) -> dict[str, Any]:
    """One ordinary step; the loss and the gradients that it stepped with."""
    optimizer.zero_grad()
    result = loss(forward(model, batch), batch)
    pairs = result.values() if isinstance(result, dict) else [result]
    whole = sum(total / weight for total, weight in pairs if weight)
    whole.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    if max_norm is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    return {"loss": whole.item(), **gradients}
