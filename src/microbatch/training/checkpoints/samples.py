"""Which samples belong to which step and rank: the same global batches for any number of ranks, from any sample on.

Plain arithmetic on indices. A run stands at sample s of its data, counted over all epochs; what comes next follows
from s, the length of the data, the batch and the seed alone, not from who has read what before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from microbatch.errors import InvalidBatchSizes, InvalidSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalBatches:
    """Indices of this rank's share of each global batch, for the ``batch_sampler`` of a DataLoader.

    Every epoch has each sample once, in an order of its own. The last batch of an epoch has what is left. Iterating
    goes through all epochs without a stop, beginning at `start`.

    Attributes:
        length: samples in the data set.
        global_batch_size: samples of a step, over all ranks.
        seed: of the order; None for the order of the data.
        epochs: after which the batches end; None for never.
        start: samples that all ranks together have seen, ``step.samples`` of a run that goes on.
        drop_last: leave out the last batch of an epoch where it is smaller; which samples these are differs by epoch.
        rank: of this process; None for torch.distributed's, 0 without it.
        num_ranks: processes; None for torch.distributed's, 1 without it.
        shares: how much each rank takes, as in (2, 1) where the first is twice as fast; None for equal shares.
    """

    length: int
    global_batch_size: int
    seed: int | None = None
    epochs: int | None = 1
    start: int = 0
    drop_last: bool = False
    rank: int | None = None
    num_ranks: int | None = None
    shares: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        """
        Raises:
            InvalidBatchSizes: a length, batch or start that is no batch size, or no batch in an epoch.
            InvalidSettings: a rank or shares that do not fit the number of ranks.
        """
        if self.length < 1 or self.global_batch_size < 1 or self.start < 0:
            raise InvalidBatchSizes(
                f"{self.length} samples in batches of {self.global_batch_size} from sample {self.start}.",
                "Give a length and a global batch size of 1 or more, and a start of 0 or more.",
            )
        if not self.samples_per_epoch:
            raise InvalidBatchSizes(
                f"{self.length} samples are less than one batch of {self.global_batch_size}.", "Keep the last batch."
            )
        rank, ranks = self.place
        if not 0 <= rank < ranks:
            raise InvalidSettings(f"Rank {rank} of {ranks} ranks.", "Ranks count from 0.")
        if self.shares is not None and (len(self.shares) != ranks or min(self.shares) < 0 or not sum(self.shares)):
            raise InvalidSettings(f"Shares {self.shares} for {ranks} ranks.", "Give one number of 0 or more per rank.")

    @property
    def place(self) -> tuple[int, int]:
        """Rank and number of ranks."""
        rank, ranks = _place_in_torch() if self.rank is None or self.num_ranks is None else (0, 1)
        return (rank if self.rank is None else self.rank, ranks if self.num_ranks is None else self.num_ranks)

    @property
    def samples_per_epoch(self) -> int:
        """Samples that are used in one epoch."""
        return self.length - self.length % self.global_batch_size if self.drop_last else self.length

    def global_batch(self, start: int) -> list[int]:
        """Indices of the global batch that begins at a sample: up to the end of its epoch at most."""
        epoch, first = divmod(start, self.samples_per_epoch)
        last = min(first + self.global_batch_size, self.samples_per_epoch)
        found: list[int] = order(self.length, self.seed, epoch)[first:last].tolist()
        return found

    def share(self, batch: Sequence[int]) -> list[int]:
        """This rank's part of a global batch: neighbours, as many as its share says; none where there are too few."""
        rank, ranks = self.place
        ends = list(accumulate(self.shares or (1.0,) * ranks))
        start, end = (round(len(batch) * part / ends[-1]) for part in (ends[rank - 1] if rank else 0.0, ends[rank]))
        return list(batch[start:end])

    def __iter__(self) -> Iterator[list[int]]:
        sample = self.start
        while self.epochs is None or sample < self.epochs * self.samples_per_epoch:
            batch = self.global_batch(sample)
            yield self.share(batch)
            sample += len(batch)

    def __len__(self) -> int:
        """Batches that are left.

        Raises:
            TypeError: there is no end.
        """
        if self.epochs is None:
            raise TypeError("batches without an end have no length; give epochs=")
        whole, first = divmod(self.start, self.samples_per_epoch)
        if whole >= self.epochs:
            return 0
        of_an_epoch = -(-self.samples_per_epoch // self.global_batch_size)
        return -(-(self.samples_per_epoch - first) // self.global_batch_size) + (self.epochs - whole - 1) * of_an_epoch


@lru_cache(maxsize=2)
def order(length: int, seed: int | None, epoch: int) -> NDArray[np.int64]:
    """The order of the samples in one epoch.

    From numpy's RandomState, whose streams never change; Generator's may from version to version.
    """
    if seed is None:
        return np.arange(length)
    bits = np.random.MT19937(np.random.SeedSequence([seed, epoch]))
    return np.random.RandomState(bits).permutation(length)


def none_where_empty(collate: Callable[[list[Any]], Any] | None = None) -> Callable[[list[Any]], Any]:
    """A ``collate_fn`` that gives None where a rank has no samples, as a step wants it.

    Args:
        collate: for all other batches; None for the DataLoader's own.
    """
    return partial(_collated, collate)


def _collated(collate: Callable[[list[Any]], Any] | None, samples: list[Any]) -> Any:
    if not samples:
        return None
    if collate is None:
        from torch.utils.data import default_collate

        collate = default_collate
    return collate(samples)


def _place_in_torch() -> tuple[int, int]:
    import torch.distributed as dist

    running = dist.is_available() and dist.is_initialized()
    return (dist.get_rank(), dist.get_world_size()) if running else (0, 1)
