"""What one training step remembers about memory from one batch to the next."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from microbatch.batch.oom import drop_frames, out_of_memory_rule, release
from microbatch.batch.size_limit import Ladder, SizeLimit
from microbatch.errors import DoesNotFit
from microbatch.training.memory.retry import OUT_OF_MEMORY, first_line, grown_back, run_with_retry
from microbatch.training.memory.safeguard import Safeguard, versions_of
from microbatch.training.phase import OPTIMIZER, during
from microbatch.training.result import Attempt

logger = logging.getLogger(__name__)

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
        self._made_again: str | None = None

    def run(
        self,
        attempt: Callable[[int], T],
        wanted: int,
        *,
        ladder: Ladder,
        undo: Callable[[], None],
        device: torch.device,
        alone: bool,
        contents: Callable[[], str] = str,
    ) -> tuple[T, tuple[Attempt, ...]]:
        """See `run_with_retry`; starts at the size wanted, or at what memory allowed last."""
        wanted = min(wanted, ladder.whole)
        size = self.limit.first_size(wanted)
        self._made_again = None

        def undo_all() -> None:
            undo()
            if moved := self.undo_update():
                raise DoesNotFit(
                    f"The optimizer ran out of memory after it had changed {moved} tensors of weights and its state, "
                    "and no copy of them was kept.",
                    "Load the last checkpoint; free memory, or use an optimizer with less state.",
                )

        done, tries = run_with_retry(
            attempt, size, ladder=ladder, undo=undo_all, device=device, alone=alone, contents=contents
        )
        if len(tries) > 1:
            self.limit = self.limit.after_failure(tries[-1].micro_batch_size)
        else:
            self._note_quiet(wanted, ladder)
        return done, self._with_update(tries)

    @contextmanager
    def guarding(self, optimizer: Optimizer, scaler: GradScaler | None) -> Iterator[None]:
        """Around an update: `undo_update` can go back to here until it ends well."""
        self._guard = Safeguard.take(optimizer, scaler, careful=self._careful)
        with during(OPTIMIZER):
            yield
        self._guard, self._careful = None, False

    def make(self, update: Callable[[], object]) -> None:
        """The optimizer's step; where it runs out of memory, made again in place: gradients are still there."""
        assert self._guard is not None
        parameters = [p for group in self._guard.optimizer.param_groups for p in group["params"]]
        before = versions_of([parameter.grad for parameter in parameters if parameter.grad is not None])
        error = _out_of_memory(update)
        if error is None:
            return
        drop_frames(error)
        release(parameters[0].device)
        if not self._guard.make_again(update, before):
            raise error
        self._made_again = f"{out_of_memory_rule(error)}: {first_line(error)}"
        logger.warning("Out of memory in optimizer (%s); the update is made again from where it was.", self._made_again)

    def _with_update(self, tries: tuple[Attempt, ...]) -> tuple[Attempt, ...]:
        """The tries of a step, and the one whose update alone was made again."""
        if self._made_again is None:
            return tries
        size, reason = tries[-1].micro_batch_size, self._made_again
        failed = Attempt(micro_batch_size=size, outcome=OUT_OF_MEMORY, phase=OPTIMIZER, reason=reason)
        return (*tries[:-1], failed, tries[-1])

    def undo_update(self) -> int:
        """Undo an update that did not end; how many tensors stay changed (0: everything is as before it)."""
        guard, self._guard = self._guard, None
        if guard is None:
            return 0
        self._careful = guard.copies is None  # copies on the same device may be what did not fit: not twice
        return guard.restore()

    def _note_quiet(self, wanted: int, ladder: Ladder) -> None:
        before = self.limit.largest
        self.limit = self.limit.after_success(wanted)
        if before is not None and self.limit.largest != before:
            grown_back(ladder.said(self.limit.first_size(wanted)))


def _out_of_memory(update: Callable[[], object]) -> Exception | None:
    """The error of an update that ran out of memory; others pass."""
    try:
        update()
    except Exception as error:
        if out_of_memory_rule(error) is None:
            raise
        return error
    return None
