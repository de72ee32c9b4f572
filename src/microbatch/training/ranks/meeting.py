"""Where ranks tell each other what happened: one small all-gather, which also carries failures.

A rank that fails comes to the next meeting all the same and says so there. So the others never wait for it in vain,
and every rank raises. What is sent is JSON in a buffer of fixed size: the bytes on the wire do not depend on values.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from microbatch.errors import RankFailed, RankOutOfMemory
from microbatch.training.phase import OPTIMIZER, phase_of

MEETING_BYTES = 2048
"""What each rank says at a meeting; a longer text takes a second all-gather."""

_PREFIX = 8
_LONGEST_TEXT = 600


@dataclass
class Traffic:
    """What this rank has sent since the step began.

    Attributes:
        bytes: as rings send them: an all-gather or a reduce-scatter of P bytes in total over N ranks (N−1)/N·P from
            each, an all-reduce twice that, a broadcast P (Thakur et al. 2005).
        calls: collectives.
    """

    bytes: float = 0.0
    calls: int = 0

    def add(self, kind: str, whole: float, ranks: int) -> None:
        """Count one collective whose unsharded tensor has `whole` bytes."""
        share = (ranks - 1) / ranks
        self.bytes += {"all_reduce": 2 * share, "broadcast": 1.0}.get(kind, share) * whole
        self.calls += 1


class Meeting:
    """The ranks that share a step.

    Attributes:
        group: None for all processes.
        device: of the tensors that are sent.
        rank: of this process within the group.
        size: number of ranks.
        traffic: of the present step.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group, self.device = group, device
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.traffic = Traffic()

    def hold(self, said: dict[str, Any]) -> list[dict[str, Any]]:
        """What every rank says, in the order of ranks.

        Raises:
            RankFailed: a rank said that it failed, or a rank is gone.
        """
        heard = self._exchange({"said": said})
        failures = [(rank, one["failed"]) for rank, one in enumerate(heard) if "failed" in one]
        if failures:
            raise _error_of(failures, self.size)
        return [one["said"] for one in heard]

    def tell(self, error: BaseException, *, memory: bool = False) -> None:
        """This rank failed: every rank that is at a meeting, or comes to one, hears of it.

        Args:
            error: what failed.
            memory: it ran out of memory, and tries again as soon as all ranks do.
        """
        text = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        failed = {"text": text[:_LONGEST_TEXT], "memory": memory, "updating": phase_of(error) == OPTIMIZER}
        try:
            self._exchange({"failed": failed})
        except RankFailed:  # the others are gone; what is raised is this rank's own error
            return

    def tell_and_raise(self, text: str, memory: bool) -> None:
        """As `tell`, for a failure that the ranks then raise alike."""
        heard = self._exchange({"failed": {"text": text[:_LONGEST_TEXT], "memory": memory}})
        raise _error_of([(rank, one["failed"]) for rank, one in enumerate(heard) if "failed" in one], self.size)

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum over the ranks, in place."""
        self.traffic.add("all_reduce", tensor.nbytes, self.size)
        self._calling(lambda: dist.all_reduce(tensor, group=self.group))

    def all_gather(self, mine: Tensor) -> list[Tensor]:
        """A tensor of the same shape from every rank, in the order of ranks."""
        every = list(torch.empty((self.size, *mine.shape), dtype=mine.dtype, device=mine.device))
        self.traffic.add("all_gather", self.size * mine.nbytes, self.size)
        self._calling(lambda: dist.all_gather(every, mine, group=self.group))
        return every

    def add_up(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks, where the tensor is."""
        moved = tensor.detach().to(self.device, copy=True)
        self.all_reduce(moved)
        return moved.to(tensor.device)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """A rank's values, on every rank."""
        self.traffic.add("broadcast", tensor.nbytes, self.size)
        self._calling(lambda: dist.broadcast(tensor, group=self.group, group_src=source))

    def broadcast_object(self, value: Any, source: int) -> Any:
        """A rank's object, on every rank: the length of its pickle, then the pickle."""
        data = pickle.dumps(value) if self.rank == source else b""
        length = torch.tensor([len(data)], device=self.device)
        self.broadcast(length, source)
        packed = torch.frombuffer(bytearray(data or int(length)), dtype=torch.uint8).to(self.device)
        self.broadcast(packed, source)
        return value if self.rank == source else pickle.loads(packed.cpu().numpy().tobytes())

    def _exchange(self, value: dict[str, Any]) -> list[dict[str, Any]]:
        data = json.dumps(value).encode()
        room = MEETING_BYTES
        texts = self._gather(data, room)
        longest = max(length for length, _ in texts)
        if longest > room - _PREFIX:
            texts = self._gather(data, -(-(longest + _PREFIX) // MEETING_BYTES) * MEETING_BYTES)
        return [json.loads(text) for _, text in texts]

    def _gather(self, data: bytes, room: int) -> list[tuple[int, bytes]]:
        """Length and bytes of every rank, cut off where there is no room."""
        packed = (len(data).to_bytes(_PREFIX, "little") + data)[:room].ljust(room, b"\0")
        mine = torch.frombuffer(bytearray(packed), dtype=torch.uint8).to(self.device)
        rows = [row.tobytes() for row in torch.stack(self.all_gather(mine)).cpu().numpy()]
        lengths = [int.from_bytes(row[:_PREFIX], "little") for row in rows]
        return [(length, row[_PREFIX : _PREFIX + length]) for length, row in zip(lengths, rows)]

    def _calling(self, collective: Any) -> None:
        try:
            collective()
        except RuntimeError as error:
            raise self.lost(str(error)) from None

    def lost(self, text: str) -> RankFailed:
        """The error of a rank that cannot reach the others: one of them was killed, or the network is gone."""
        return RankFailed(
            f"Rank {self.rank} of {self.size} lost the other ranks: {text.splitlines()[0][:300]}.",
            "Look for the first error of the others, and start again from the last checkpoint.",
        )


def _error_of(failures: Sequence[tuple[int, dict[str, Any]]], size: int) -> RankFailed:
    ranks = ", ".join(str(rank) for rank, _ in failures)
    text = failures[0][1]["text"]
    kind = RankOutOfMemory if any(failed["memory"] for _, failed in failures) else RankFailed
    moved = any(failed.get("updating") for _, failed in failures)
    return kind(
        f"Rank{'s' if len(failures) > 1 else ''} {ranks} of {size} failed: {text.rstrip('.')}.",
        "The other ranks had made that update: load the last checkpoint." if moved else "No rank changed its weights.",
    )
