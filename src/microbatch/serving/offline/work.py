"""Offline work piece by piece: which items run together, what happens when memory ends, which size is the fastest."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch

from microbatch.batch.oom import drop_frames, is_out_of_memory, out_of_memory_rule, release
from microbatch.batch.running import is_compiled
from microbatch.batch.split import take
from microbatch.batch.token_budget import PIECE_SHARE, filled, piece_sizes
from microbatch.errors import DoesNotFit
from microbatch.measure.timer import synchronize
from microbatch.serving.offline.joining import Axes, Done
from microbatch.serving.offline.memory import MemoryCap
from microbatch.serving.offline.padding import Padding, compare
from microbatch.serving.offline.placing import Moving, Runner, moving
from microbatch.serving.offline.sizing import Sizing, Unit
from microbatch.serving.offline.sources import Block, Made, Source

logger = logging.getLogger(__name__)

_AHEAD = 4
"""Full pieces of items that are looked at to cut the next one while the size is looked for."""

_MATTERS = "The outputs of an item depend on how far it is padded."

LONG_SECONDS = 0.01
"""A piece that takes longer may hold much memory: before twice as much runs, its peak is predicted."""


@dataclass(slots=True)
class Counts:
    """What has run so far: items, pieces, their tokens, and their tokens with padding."""

    items: int = 0
    pieces: int = 0
    tokens: int = 0
    padded_tokens: int = 0


@dataclass(slots=True)
class Queue:
    """The items of a block that have not run, in the order in which they will.

    Attributes:
        block: whose items they are.
        order: their places in it.
        at: where in the order the next piece begins.
        ends: for each place in the order, where the items of its kind end.
        plan: sizes of the next pieces and the size that they were planned for, where items differ in length.
        left: tokens of the items that have not run.
    """

    block: Block
    order: list[int]
    ends: list[int] | None
    at: int = 0
    plan: tuple[tuple[int, bool], list[int]] | None = None
    left: int = 0

    def __post_init__(self) -> None:
        self.left = sum(self.lengths(self.order))

    @classmethod
    def of(cls, block: Block, *, by_items: bool) -> Queue:
        """Longest first, items of one kind together; as they came where items count or nothing is padded."""
        order, lengths, kinds = list(range(block.count)), block.lengths, block.kinds
        if not by_items and block.padded and not isinstance(lengths, int):
            order.sort(key=lambda place: -lengths[place])
        if kinds is None:
            return cls(block, order, None)
        first = {kind: place for place, kind in reversed(list(enumerate(kinds)))}
        order.sort(key=lambda place: first[kinds[place]])
        ends = [len(order)] * len(order)
        for at in range(len(order) - 2, -1, -1):
            ends[at] = ends[at + 1] if kinds[order[at]] == kinds[order[at + 1]] else at + 1
        return cls(block, order, ends)

    def next_piece(self, size: int, unit: Unit, piece_cost: int | None, *, is_planned: bool) -> list[int]:
        """Places of the next piece's items.

        Args:
            size: of a piece at most.
            unit: what it counts.
            piece_cost: see `TokenBudget`.
            is_planned: the size stays, so that all pieces are planned at once.
        """
        end = len(self.order) if self.ends is None else self.ends[self.at]
        count = self._count(size, unit, piece_cost, end, is_planned)
        return self.order[self.at : min(self.at + count, end)]

    def _count(self, size: int, unit: Unit, piece_cost: int | None, end: int, is_planned: bool) -> int:
        lengths = self.block.lengths
        if unit == "items":
            return size
        if isinstance(lengths, int):
            return max(1, size // lengths)
        if self.plan is None or self.plan[0] != (size, is_planned) or not self.plan[1]:
            if not is_planned:  # only this piece counts: what the next few would be decides on it
                end = min(end, self.at + _AHEAD * max(1, size // max(1, lengths[self.order[self.at]])))
            waiting = [lengths[place] for place in self.order[self.at : end]]
            cost = max(1, size // PIECE_SHARE) if piece_cost is None else piece_cost
            sizes = piece_sizes(waiting, size, cost) if self.block.padded else filled(waiting, size)
            self.plan = (size, is_planned), sizes[::-1]
        return self.plan[1][-1]

    def done(self, count: int) -> None:
        """The next items have run."""
        self.left -= sum(self.lengths(self.order[self.at : self.at + count]))
        self.at += count
        if self.plan is not None and self.plan[1].pop() != count:
            self.plan = None

    def lengths(self, places: list[int]) -> list[int]:
        """Tokens of each of these items."""
        lengths = self.block.lengths
        return [lengths] * len(places) if isinstance(lengths, int) else [lengths[place] for place in places]

    def cost(self, places: list[int]) -> int:
        """Tokens that run, padding included."""
        lengths = self.lengths(places)
        return max(lengths) * len(lengths) if self.block.padded else sum(lengths)

    def listed(self, places: list[int]) -> str:
        """Which items of the data they are, in words."""
        low, high = self.block.start + min(places), self.block.start + max(places)
        return f"item {low}" if low == high else f"items {low} to {high}"


class Work:
    """Runs a source through a model; iterated over it gives every piece as it is done, in the order of running."""

    def __init__(
        self, source: Source, runner: Runner, sizing: Sizing, cap: MemoryCap, output_device: torch.device | None
    ) -> None:
        self.source, self.runner, self.sizing = source, runner, sizing
        self.counts = Counts()
        self.axes: Axes = {}
        self._cap, self._output_device = cap, output_device
        self._knows_axes, self._is_ragged = False, False
        self._failure = ""
        self._failed_alone = -1
        self._looks = sizing.is_looking

    def __iter__(self) -> Iterator[Done]:
        waiting: list[tuple[Done, Moving]] = []  # outputs that are on their way while the next piece runs
        for done, output in self._pieces():
            waiting.append((done, output))
            while waiting and (len(waiting) > 1 or waiting[0][1].event is None):
                yield _arrived(*waiting.pop(0))
        for done, output in waiting:
            yield _arrived(done, output)
        self.sizing.settle()

    def scale(self) -> tuple[Unit, int]:
        """What sizes are shown in, and by what they are divided: in items where all were alike."""
        if self._looks and not self._is_ragged:
            return "items", self.source.longest
        return self.sizing.unit, 1

    def _pieces(self) -> Iterator[tuple[Done, Moving]]:
        self._show_padding()
        self.sizing.begin(self.source.longest, self.source.size)
        while (block := self.source.block(self._items_wanted())) is not None:
            queue = Queue.of(block, by_items=self.sizing.unit == "items")
            self._is_ragged |= not isinstance(block.lengths, int)
            self._keep_limit(queue)
            while queue.at < len(queue.order):
                size = self.sizing.size()
                places = queue.next_piece(
                    size, self.sizing.unit, self.sizing.piece_cost, is_planned=not self.sizing.is_looking
                )
                ran = self._run(queue, places, size)
                if ran is None:
                    self._shrink(queue, places, size)
                else:
                    queue.done(len(places))
                    yield ran

    def _items_wanted(self) -> int:
        size = self.sizing.size()
        return size if self.sizing.unit == "items" else max(1, size // self.source.longest)

    def _keep_limit(self, queue: Queue) -> None:
        """A limit that the user set holds for the first piece too."""
        if self._cap.is_strict and not self._cap.is_known and self.sizing.is_looking:
            places = queue.order[:2]
            self._cap.predict(self.runner, queue.block.make(places).batch, len(places), queue.cost(places))
            self.sizing.bound(self._cap.largest)

    def _run(self, queue: Queue, places: list[int], size: int) -> tuple[Done, Moving] | None:
        """One piece; None where it ran out of memory. What is held is given back outside of the except block."""
        looking, device = self.sizing.is_looking, self.runner.device
        try:
            made = queue.block.make(_together(places))
            if looking:
                synchronize(device)
            start = time.perf_counter()
            output = self.runner.run(made.batch, eager=self._is_eager(queue, places))
            if looking:
                synchronize(device)
            seconds = time.perf_counter() - start
            moved = moving(output, self._output_device, device)
            self._note_padding(made, queue, places)
            if looking and seconds > LONG_SECONDS:
                self._cap.predict(self.runner, made.batch, len(places), queue.cost(places))
                self.sizing.largest = self._cap.largest
        except Exception as error:
            if not is_out_of_memory(error):
                error.add_note(f"microbatch.map: in a piece of {len(places)}, {queue.listed(places)}.")
                raise
            text = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            self._failure = f"{out_of_memory_rule(error)}: {text}"
            drop_frames(error)
            return None
        self._note(queue, places, size, seconds)
        where = _together([queue.block.start + place for place in places])
        return Done(where, None, made.spans, made.offset), moved

    def _note(self, queue: Queue, places: list[int], size: int, seconds: float) -> None:
        cost = queue.cost(places)
        self.counts.items += len(places)
        self.counts.pieces += 1
        self.counts.tokens += sum(queue.lengths(places))
        self.counts.padded_tokens += cost
        self.sizing.done(size, len(places) if self.sizing.unit == "items" else cost, seconds, self._left(queue, places))

    def _left(self, queue: Queue, places: list[int]) -> int | None:
        """Tokens that have not run, as if later items were like those so far; None where nobody knows their number."""
        if self.source.size is None:
            return None
        waiting = len(queue.order) - queue.at - len(places)
        later = self.source.size - self.counts.items - waiting
        return queue.left - sum(queue.lengths(places)) + later * self.counts.tokens // self.counts.items

    def _shrink(self, queue: Queue, places: list[int], size: int) -> None:
        """After a piece that did not fit.

        Raises:
            DoesNotFit: it was one item.
        """
        release(self.runner.device)
        queue.plan = None
        if len(places) == 1 and self._failed_alone != (at := queue.block.start + places[0]):
            self._failed_alone = at  # once more: what was cached has been given back
            return
        if len(places) == 1:
            raise DoesNotFit(
                f"Out of memory with one item alone, {queue.listed(places)} ({self._failure}). "
                f"{self._cap.contents(self.runner, queue.block.make(places).batch)}".strip(),
                "Use a narrower dtype (autocast=torch.bfloat16), shorter items, or a device with more memory.",
            )
        self.sizing.failed(size, len(places) if self.sizing.unit == "items" else queue.cost(places))
        logger.warning(
            "Out of memory with %d items (%s); they run again in smaller pieces.", len(places), self._failure
        )

    def _is_eager(self, queue: Queue, places: list[int]) -> bool:
        """Only pieces of the size that stays run compiled: any other shape would be compiled for one piece.

        Items that differ in length give many shapes; they run as the model was compiled.
        """
        if not is_compiled(self.runner.model):
            return False
        if self.sizing.wanted is None:
            return True
        lengths = queue.block.lengths
        if self.sizing.unit == "items":
            return len(places) != self.sizing.wanted
        return isinstance(lengths, int) and len(places) != max(1, self.sizing.wanted // lengths)

    def _show_padding(self) -> None:
        """Before pieces of padded data are trimmed: whether that changes outputs, and which dimensions are tokens."""
        examples = [(padded, alone) for padded, alone in self.source.examples() if padded.width != alone.width]
        for padded, alone in examples:
            if (found := self._compared(padded, alone)) is None:
                continue
            self.axes, self._knows_axes = self.axes or found.axes, True
            if found.matters:
                logger.warning("%s All columns of the data are kept, and short items save no work.", _MATTERS)
                break
        else:
            if self._knows_axes or not self.source.width:
                return
        self.source.keep_padding()
        self.axes = {}

    def _compared(self, padded: Made, alone: Made) -> Padding | None:
        """None where memory does not suffice for it."""
        try:
            return compare(self.runner, padded, alone)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            drop_frames(error)
        release(self.runner.device)
        return None

    def _note_padding(self, made: Made, queue: Queue, places: list[int]) -> None:
        """The same for items that were padded to share a piece, the first time that one was."""
        if self._knows_axes or made.spans is None or made.width is None:
            return
        lengths = [len(span) for span in made.spans]
        row = lengths.index(min(lengths))
        if lengths[row] == made.width:
            return
        single = take(made.batch, range(row, row + 1))
        padded = Made(single, [made.spans[row]], 0, made.width)
        alone = queue.block.make([places[row]])
        if alone.spans is not None and alone.width != made.width:
            found = compare(self.runner, padded, alone)
            self.axes, self._knows_axes = found.axes, True
            if found.matters:
                logger.warning("%s Give only items of one length to a piece, or use the mask in the model.", _MATTERS)


def _arrived(done: Done, output: Moving) -> Done:
    return Done(done.places, output.wait(), done.spans, done.offset)


def _together(places: list[int]) -> list[int] | range:
    """As a range where they follow each other: rows are then views."""
    follow = all(b == a + 1 for a, b in pairwise(places))
    return range(places[0], places[-1] + 1) if follow else places
