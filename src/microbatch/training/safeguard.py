"""Weights and optimizer state at the start of an update, so that one that runs out of memory half-way can be undone.

A copy at each step would cost about as much as the update itself. Copies are kept where an optimizer is most likely
to run out, in its first update, which creates its state; and where they cost nothing, up to `SMALL` bytes. Otherwise
each tensor's version counter, which every operation in place advances, tells whether anything has moved: nearly
always nothing has, and then there is nothing to undo.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from microbatch.batch.oom import is_out_of_memory

SMALL = 4 << 20
"""Bytes that are copied within a fraction of a millisecond."""


@dataclass(frozen=True, slots=True)
class Safeguard:
    """The start of one update.

    Attributes:
        optimizer: what updates.
        scaler: what unscales its gradients.
        states: shallow copy of the state of each parameter.
        versions: every tensor that the update may change, with its version counter.
        copies: their values; None where none were kept.
    """

    optimizer: Optimizer
    scaler: GradScaler | None
    states: dict[Any, dict[str, Any]]
    versions: list[tuple[Tensor, int]]
    copies: list[Tensor] | None

    @classmethod
    def take(cls, optimizer: Optimizer, scaler: GradScaler | None, *, careful: bool) -> Safeguard:
        """Notes the start of an update.

        Args:
            careful: keep copies whatever their size, where there is room for them.
        """
        states = {parameter: dict(state) for parameter, state in optimizer.state.items()}
        tensors = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        tensors += [value for state in states.values() for value in state.values() if isinstance(value, Tensor)]
        wanted = careful or sum(tensor.nbytes for tensor in tensors) <= SMALL
        versions = [(tensor, tensor._version) for tensor in tensors]
        return cls(optimizer, scaler, states, versions, _copies(tensors) if wanted else None)

    def restore(self) -> int:
        """Put weights and optimizer state back.

        Returns:
            Tensors that stay changed, since no copy was kept; their state is then left alone. 0 is as before.
        """
        if self.copies is None:
            if moved := self._moved():
                return moved
        else:
            with torch.no_grad():
                for (tensor, _), copy in zip(self.versions, self.copies, strict=True):
                    tensor.copy_(copy)
        self._restore_states()
        return 0

    def _restore_states(self) -> None:
        """The same dicts hold the same tensors again; what the update created is dropped."""
        for parameter in [parameter for parameter in self.optimizer.state if parameter not in self.states]:
            del self.optimizer.state[parameter]
        for parameter, state in self.states.items():
            self.optimizer.state[parameter].clear()
            self.optimizer.state[parameter].update(state)
        if self.scaler is not None:  # it remembers that this optimizer's gradients were unscaled
            self.scaler._per_optimizer_states.pop(id(self.optimizer), None)

    def _moved(self) -> int:
        """Tensors changed since; all of them where an optimizer may write past the counters, through ``.data``."""
        if not type(self.optimizer).__module__.startswith("torch.optim"):
            return len(self.versions)
        return sum(tensor._version != version for tensor, version in self.versions)


def _copies(tensors: list[Tensor]) -> list[Tensor] | None:
    """On the host, which has more memory than a device; None where there is no room."""
    try:
        return [tensor.detach().to("cpu", copy=True) for tensor in tensors]
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    return None
