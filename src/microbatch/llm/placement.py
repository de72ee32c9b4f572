"""Where the blocks of the cache lie, so that a sequence's keys are neighbours and are read in place. No torch.

Whoever hands out blocks names them in any order; a block is put behind the one before it when its first token is
written, since what it held is gone then. What lies there already and is not in use changes places with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence


class Placement:
    """A place for each block, no two at the same one. A place is taken when a block is first written."""

    def __init__(self, num_blocks: int) -> None:
        """
        Args:
            num_blocks: blocks, and places.
        """
        self._place: list[int | None] = [None] * num_blocks
        self._block: list[int | None] = [None] * num_blocks
        self._spread = _spread(num_blocks)

    def places(self, table: Sequence[int], count: int) -> list[int]:
        """Where the first blocks of a table lie.

        Raises:
            KeyError: one of them was never written.
        """
        found = [self._place[block] for block in table[:count]]
        if None in found:
            raise KeyError(f"Block {table[found.index(None)]} is read and was never written.")
        return [place for place in found if place is not None]

    def begin(self, block: int, before: int | None, busy: set[int]) -> tuple[int, int] | None:
        """A block is about to be written from its first slot on.

        Args:
            before: the block before it in its sequence; None for a first one.
            busy: blocks that should stay where they are.

        Returns:
            A move (from, to) of what lies at the place that the block gets; None where nothing has to move.
        """
        old = self._place[block]
        wanted = self._behind(before)
        other = None if wanted is None else self._block[wanted]
        if wanted is None or wanted == old or other in busy:
            if old is None:
                self._put(block, self._unused())
            return None
        if other is None:
            if old is not None:
                self._block[old] = None
            self._put(block, wanted)
            return None
        free = self._unused() if old is None else old
        self._put(other, free)
        self._put(block, wanted)
        return wanted, free

    def in_order(self) -> None:
        """Every block counts as written, in order; for measurements, which read what nobody wrote."""
        self._place = list(range(len(self._place)))
        self._block = list(range(len(self._block)))

    def _behind(self, before: int | None) -> int | None:
        place = None if before is None else self._place[before]
        return None if place is None or place + 1 == len(self._block) else place + 1

    def _unused(self) -> int:
        """A place that nothing lies at, far from others while there is room."""
        for place in self._spread:
            if self._block[place] is None:
                return place
        return self._block.index(None)  # given up again since it was passed

    def _put(self, block: int, place: int) -> None:
        self._place[block], self._block[place] = place, block


def _spread(count: int) -> Iterator[int]:
    """All numbers below `count`, each far from those before it: their bits in reverse (van der Corput's sequence)."""
    bits = (count - 1).bit_length()
    for number in range(1 << bits):
        place = int(f"{number:0{max(bits, 1)}b}"[::-1], 2)
        if place < count:
            yield place
