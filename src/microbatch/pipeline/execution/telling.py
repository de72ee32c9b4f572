"""What ranks tell each other about a failure: whose it was, where it happened, and what it said."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch.distributed as dist

from microbatch.errors import RankFailed

_LONGEST_TEXT = 2_000
_WRAPPED = "failed to run"
"""Torch's runtime raises what a stage raised as the cause of a RuntimeError with these words."""
_OF_A_CONNECTION = (
    "gloo/",
    "Connection closed by peer",
    "Connection reset by peer",
    "pair closure",
    "NCCL",
    "ncclComm",
)


class Doing(NamedTuple):
    """What a rank does at a time.

    Attributes:
        words: as in ``forward of stage 1, micro-batch 2``; empty where nothing is known.
        alike: errors that every rank finds alike now, or hears of in another way, so that none is left waiting.
    """

    words: str = ""
    alike: tuple[type[Exception], ...] = (Exception,)


@dataclass(frozen=True, slots=True)
class Failure:
    """A rank that cannot go on.

    Attributes:
        rank: which.
        text: type and message of its error; empty where its process just ended.
        where: what it was doing.
        process: its number on its machine, for one that just ended.
    """

    rank: int
    text: str = ""
    where: str = ""
    process: int = 0

    def to_bytes(self) -> str:
        """For a store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_bytes(cls, data: bytes) -> Failure:
        """The counterpart of `to_bytes`."""
        return cls(**json.loads(data))

    def error(self, ranks: int) -> RankFailed:
        """What the other ranks raise."""
        if not self.text:
            return RankFailed(
                f"Rank {self.rank} of {ranks} is gone: its process {self.process} was killed, or has ended.",
                "Look at its output, and for a lack of memory (dmesg); start again from the last checkpoint.",
            )
        where = f" in the {self.where}" if self.where else ""
        return RankFailed(
            f"Rank {self.rank} of {ranks} failed{where}: {self.text.rstrip('.')}.",
            "Connections are closed: mend that, and start again from the last checkpoint.",
        )


def told(error: BaseException, rank: int, where: str) -> Failure:
    """What a rank says of its own error."""
    text = f"{type(error).__name__}: {str(error).strip()}".rstrip(": ")
    return Failure(rank, text[:_LONGEST_TEXT], where)


def own_error(error: BaseException) -> BaseException:
    """What the user's code raised, without what torch's runtime wrapped around it."""
    while isinstance(error, RuntimeError) and error.__cause__ is not None and _WRAPPED in str(error).lower():
        error = error.__cause__
    return error


def is_of_a_connection(error: BaseException) -> bool:
    """Whether an error may be nothing but the end of another rank."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError | RankFailed) and any(words in str(error) for words in _OF_A_CONNECTION)


def lost(error: BaseException, rank: int, ranks: int) -> RankFailed:
    """A connection broke and nobody knows why: another machine, or the network."""
    return RankFailed(
        f"Rank {rank} of {ranks} lost the other ranks: {str(error).strip().splitlines()[0][:300]}",
        "Look for the first error of the others, and start again from the last checkpoint.",
    )
