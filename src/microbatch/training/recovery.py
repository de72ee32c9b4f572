"""What one training step remembers about memory from one batch to the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from microbatch.errors import DoesNotFit
from microbatch.training.phase import OPTIMIZER, during
from microbatch.training.result import Attempt
from microbatch.training.retry import grown_back, run_with_retry
from microbatch.training.safeguard import Safeguard
from microbatch.training.size_limit import SizeLimit

T = TypeVar("T")


class Recovery:
    """Runs the tries of a step, undoes updates that failed half-way, and grows the size back.

    Attributes:
        limit: what memory has allowed so far.
    """

    def __init__(self) -> None:
        self.limit = SizeLimit()
        self._guard: Safeguard | None = None
        self._careful = True

    def run(
        self,
        attempt: Callable[[int], T],
        wanted: int,
        *,
        batch_size: int,
        undo: Callable[[], None],
        device: torch.device,
        alone: bool,
        contents: Callable[[], str] = str,
    ) -> tuple[T, tuple[Attempt, ...]]:
        """See `run_with_retry`; starts at the size wanted, or at what memory allowed last."""
        wanted = min(wanted, batch_size)
        size = self.limit.first_size(wanted)

        def undo_all() -> None:
            undo()
            if moved := self.undo_update():
                raise DoesNotFit(
                    f"The optimizer ran out of memory after it had changed {moved} tensors of weights and its state, "
                    "and no copy of them was kept.",
                    "Load the last checkpoint; free memory, or use an optimizer with less state.",
                )

        done, tries = run_with_retry(
            attempt, size, batch_size=batch_size, undo=undo_all, device=device, alone=alone, contents=contents
        )
        if len(tries) > 1:
            self.limit = self.limit.after_failure(tries[-1].micro_batch_size)
        else:
            self._note_quiet(wanted)
        return done, tries

    @contextmanager
    def guarding(self, optimizer: Optimizer, scaler: GradScaler | None) -> Iterator[None]:
        """Around an update: `undo_update` can go back to here until it ends well."""
        self._guard = Safeguard.take(optimizer, scaler, careful=self._careful)
        with during(OPTIMIZER):
            yield
        self._guard, self._careful = None, False

    def undo_update(self) -> int:
        """Undo an update that did not end; how many tensors stay changed (0: everything is as before it)."""
        guard, self._guard = self._guard, None
        if guard is None:
            return 0
        self._careful = guard.copies is None  # copies on the same device may be what did not fit: not twice
        return guard.restore()

    def _note_quiet(self, wanted: int) -> None:
        before = self.limit.largest
        self.limit = self.limit.after_success(wanted)
        if before is not None and self.limit.largest != before:
            grown_back(self.limit.first_size(wanted))
