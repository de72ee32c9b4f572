"""Weights and optimizer state at the start of an update, so that one that runs out of memory half-way loses nothing.

A copy at each step would cost about as much as the update itself. Copies are kept where an optimizer is most likely
to run out, in its first update, which creates its state; and where they cost nothing, up to `SMALL` bytes. Then the
update is undone and made again. Otherwise each tensor's version counter, which every operation in place advances,
tells what has moved: mostly nothing, else the update is made again from where it stopped (`unfinished`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import _get_current_dispatch_mode

from microbatch.batch.oom import drop_frames, is_out_of_memory
from microbatch.training.memory.unfinished import finish

SMALL = 4 << 20
"""Bytes that are copied within a fraction of a millisecond."""

Versions = list[tuple[Tensor, int]]
"""Tensors, each with its version counter at some moment."""


@dataclass(frozen=True, slots=True)
class Safeguard:
    """The start of one update.

    Attributes:
        optimizer: what updates.
        scaler: what unscales its gradients.
        states: shallow copy of the state of each parameter.
        versions: every tensor that the update may change, gradients left out.
        copies: their values; None where none were kept.
    """

    optimizer: Optimizer
    scaler: GradScaler | None
    states: dict[Any, dict[str, Any]]
    versions: Versions
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
        return cls(optimizer, scaler, states, versions_of(tensors), _copies(tensors) if wanted else None)

    def make_again(self, update: Callable[[], object], gradients: Versions) -> bool:
        """Make an update after all that ran out of memory. Call it when memory was given back.

        Args:
            update: the whole update.
            gradients: as they were before the update.

        Returns:
            False where that is not possible; `restore` then tells what it has changed.
        """
        if self.copies is None and self._moved():
            return self._finish(update, gradients)
        if _count_moved(gradients):  # some optimizers work in the gradients' own memory
            return False
        self._put_back()
        return _goes_through(update)

    def restore(self) -> int:
        """Put weights and optimizer state back.

        Returns:
            Tensors that stay changed, since no copy was kept; their state is then left alone. 0 is as before.
        """
        if self.copies is None and (moved := self._moved()):
            return moved
        self._put_back()
        if self.scaler is not None:  # it remembers that this optimizer's gradients were unscaled
            self.scaler._per_optimizer_states.pop(id(self.optimizer), None)
        return 0

    def _put_back(self) -> None:
        """Values from their copies; the same dicts hold the same tensors, what the update created is dropped."""
        if self.copies is not None:
            with torch.no_grad():
                for (tensor, _), copy in zip(self.versions, self.copies, strict=True):
                    tensor.copy_(copy)
        for parameter in [parameter for parameter in self.optimizer.state if parameter not in self.states]:
            del self.optimizer.state[parameter]
        for parameter, state in self.states.items():
            self.optimizer.state[parameter].clear()
            self.optimizer.state[parameter].update(state)

    def _finish(self, update: Callable[[], object], gradients: Versions) -> bool:
        """Go on as long as that leads further; some tensors fit where others did not."""
        if not self._counts():
            return False
        tensors = [*self.versions, *gradients]
        made = Counter({id(tensor): tensor._version - version for tensor, version in tensors})
        before = -1
        while made.total() > before:
            before = made.total()
            if not self._keep_begun_states(made):
                return False
            if _goes_through(lambda: finish(self.optimizer, update, made)):
                return True
        return False

    def _keep_begun_states(self, made: Counter[int]) -> bool:
        """State of parameters that have moved stays, what was created too; that of the others is as it was."""
        for parameter, state in list(self.optimizer.state.items()):
            before = self.states.get(parameter, {})
            created = {name: value for name, value in state.items() if name not in before}
            if any(made[id(value)] for value in (parameter, *before.values())):
                if not all(isinstance(value, Tensor) for value in created.values()):
                    return False
                made.update({id(value): value._version for value in created.values() if id(value) not in made})
                state.update(before)
            elif parameter in self.states:
                state.clear()
                state.update(before)
            else:
                del self.optimizer.state[parameter]
        return True

    def _moved(self) -> int:
        """Tensors changed since; all of them where nothing counts."""
        return _count_moved(self.versions) if self._counts() else len(self.versions)

    def _counts(self) -> bool:
        """Whether version counters can be trusted.

        Fused operators do not advance them, nor do "foreach" ones on sharded tensors or inside a dispatch mode;
        an optimizer from elsewhere may write past them, through ``.data``.
        """
        if not type(self.optimizer).__module__.startswith("torch.optim") or _get_current_dispatch_mode() is not None:
            return False
        return not any(
            group.get("fused") or (group.get("foreach") and any(isinstance(p, DTensor) for p in group["params"]))
            for group in self.optimizer.param_groups
        )


def versions_of(tensors: list[Tensor]) -> Versions:
    """The present version counter of each."""
    return [(tensor, tensor._version) for tensor in tensors]


def _count_moved(versions: Versions) -> int:
    return sum(tensor._version != version for tensor, version in versions)


def _goes_through(update: Callable[[], object]) -> bool:
    """Whether an update is made; what it raises here is of less use than the error that came first."""
    try:
        update()
    except Exception as error:
        drop_frames(error)
    else:
        return True
    return False


def _copies(tensors: list[Tensor]) -> list[Tensor] | None:
    """On the host, which has more memory than a device; None where there is no room."""
    try:
        return [tensor.detach().to("cpu", copy=True) for tensor in tensors]
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    return None
