"""The arithmetic of a batch: global size, micro-batch size and number, any two giving the third."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from microbatch.errors import InvalidBatchSizes


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """How one global batch is cut into micro-batches.

    Attributes:
        global_batch_size: items in one optimizer step, over all pieces.
        micro_batch_size: items in every piece but perhaps the last.
        num_micro_batches: number of pieces, the smaller tail included.
        uneven: the size of each piece where lengths decide; `micro_batch_size` is then the largest of them.

    >>> BatchSizes.of(global_batch_size=128, micro_batch_size=16).num_micro_batches
    8
    """

    global_batch_size: int
    micro_batch_size: int
    num_micro_batches: int
    uneven: tuple[int, ...] | None = None

    @classmethod
    def of(
        cls,
        *,
        global_batch_size: int | None = None,
        micro_batch_size: int | None = None,
        num_micro_batches: int | None = None,
        uneven: Sequence[int] | None = None,
    ) -> BatchSizes:
        """The third size from any two; all three are checked against each other.

        A micro-batch larger than the batch is one piece. Uneven pieces give all three.

        >>> BatchSizes.of(uneven=[2, 5, 1]).global_batch_size
        8

        Raises:
            InvalidBatchSizes: fewer than two sizes, a size below 1, more pieces than items, or a contradiction.
        """
        given = {
            "global_batch_size": global_batch_size,
            "micro_batch_size": micro_batch_size,
            "num_micro_batches": num_micro_batches,
        }
        for name, size in given.items():
            if size is not None:
                _check_positive(name, size)
        if uneven is not None:
            return cls._from_pieces(given, tuple(uneven))
        if list(given.values()).count(None) > 1:
            raise InvalidBatchSizes(
                "Two of global_batch_size, micro_batch_size and num_micro_batches are needed.",
                "Give any two; the third follows.",
            )
        if global_batch_size is None:
            assert micro_batch_size is not None and num_micro_batches is not None
            return cls(micro_batch_size * num_micro_batches, micro_batch_size, num_micro_batches)
        if micro_batch_size is None:
            assert num_micro_batches is not None
            return cls._from_number(global_batch_size, num_micro_batches)
        micro = min(micro_batch_size, global_batch_size)
        number = -(-global_batch_size // micro)
        if num_micro_batches is None or num_micro_batches == number:
            return cls(global_batch_size, micro, number)
        evened_out = cls._from_number(global_batch_size, num_micro_batches)
        if evened_out.micro_batch_size != micro:
            raise InvalidBatchSizes(
                f"A global batch of {global_batch_size} in micro-batches of {micro} is {number} pieces, "
                f"not {num_micro_batches}.",
                "Leave one of the three out.",
            )
        return evened_out

    @classmethod
    def _from_pieces(cls, given: dict[str, int | None], uneven: tuple[int, ...]) -> BatchSizes:
        sizes = cls(sum(uneven), max(uneven), len(uneven), uneven)
        for name, size in given.items():
            if size not in (None, getattr(sizes, name)):
                raise InvalidBatchSizes(
                    f"Pieces of {list(uneven)} have {name} {getattr(sizes, name)}, not {size}.",
                    "Leave the other sizes out.",
                )
        return sizes

    @classmethod
    def _from_number(cls, global_batch_size: int, num_micro_batches: int) -> BatchSizes:
        if num_micro_batches > global_batch_size:
            raise InvalidBatchSizes(
                f"A global batch of {global_batch_size} cannot be cut into {num_micro_batches} pieces.",
                f"Use at most {global_batch_size} micro-batches.",
            )
        return cls(global_batch_size, -(-global_batch_size // num_micro_batches), num_micro_batches)

    @property
    def pieces(self) -> tuple[int, ...]:
        """The size of each piece in order; they add up to the global batch size.

        Full micro-batches and a tail; where those would be fewer pieces than asked for (9 in 6), evened out.
        """
        if self.uneven is not None:
            return self.uneven
        if self._has_full_pieces:
            full, tail = divmod(self.global_batch_size, self.micro_batch_size)
            return (self.micro_batch_size,) * full + ((tail,) if tail else ())
        small, larger = divmod(self.global_batch_size, self.num_micro_batches)
        return (small + 1,) * larger + (small,) * (self.num_micro_batches - larger)

    @property
    def tail(self) -> int:
        """Items in the last piece when it is smaller than the first, else 0."""
        if self.uneven is not None:
            return self.uneven[-1] if self.uneven[-1] < self.micro_batch_size else 0
        if self._has_full_pieces:
            return self.global_batch_size % self.micro_batch_size
        small, larger = divmod(self.global_batch_size, self.num_micro_batches)
        return small if larger else 0

    @property
    def _has_full_pieces(self) -> bool:
        """Whether all pieces but the last are full; else they are evened out."""
        return self.num_micro_batches * self.micro_batch_size - self.global_batch_size < self.micro_batch_size

    def require_equal(self, engine: str) -> BatchSizes:
        """The same sizes, for an engine that needs equal pieces.

        Raises:
            InvalidBatchSizes: the pieces differ; names the nearest sizes that divide the global batch.
        """
        if not self.tail:
            return self
        full, tail = divmod(self.global_batch_size, self.micro_batch_size)
        below, above = nearest_divisors(self.global_batch_size, self.micro_batch_size)
        raise InvalidBatchSizes(
            f"{engine} needs equal pieces: {self.global_batch_size} = {full} x {self.micro_batch_size} + {tail}.",
            f"Nearest divisors: {below} and {above}.",
        )


def nearest_divisors(whole: int, size: int) -> tuple[int, int]:
    """The largest divisor of `whole` that is at most `size`, and the smallest that is at least `size`."""
    below = next(d for d in range(min(size, whole), 0, -1) if whole % d == 0)
    above = next(d for d in range(min(size, whole), whole + 1) if whole % d == 0)
    return below, above


def _check_positive(name: str, size: object) -> None:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise InvalidBatchSizes(f"{name} must be a whole number of 1 or more, not {size!r}.", "Give a positive size.")
