"""The collectives that FSDP2 makes in each layer, counted and noted, so that a rank that failed can make the rest.

All ranks go through the same collectives in every piece. A rank that runs out of memory half-way has made some of
them, and the others wait for the rest. It makes the rest with zeros, on its emptied memory; then it can say what
happened, and no rank uses the numbers of that piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from microbatch.training.ranks.meeting import Traffic
from microbatch.training.ranks.one_process import Show


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of one piece.

    Attributes:
        kind: all_gather, reduce_scatter or all_reduce.
        given, taken: elements put in and got out.
        dtype, device: of both.
        group: the ranks.
        make: calls it with tensors put in and got out.
    """

    kind: str
    given: int
    taken: int
    dtype: torch.dtype
    device: torch.device
    group: Any
    make: Callable[[Tensor, Tensor], object]

    def play(self) -> None:
        """Take part with zeros."""
        given = torch.zeros(self.given, dtype=self.dtype, device=self.device)
        taken = given if self.kind == "all_reduce" else torch.empty(self.taken, dtype=self.dtype, device=self.device)
        self.make(taken, given)


class Collectives:
    """Counts and notes the collectives of a sharded model.

    Attributes:
        traffic: where they are counted.
        of_a_piece: what one whole piece made, in order; None before the first.
        show: what gets the gradients that this rank gives; None for nobody.
    """

    def __init__(self, model: nn.Module) -> None:
        self.traffic = Traffic()
        self.of_a_piece: tuple[Collective, ...] | None = None
        self._made: list[Collective] = []
        self.show: Show | None = None
        sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._groups = [group for module in sharded for group in _parameter_groups(module)]
        for group in self._groups:
            self._watch(group)

    @contextmanager
    def showing_gradients(self, show: Show) -> Iterator[bool]:
        """While this lasts `show` gets what this rank gives to each reduce-scatter; a group of one rank makes none."""
        self.show = show
        try:
            yield all(group._reduce_scatter_process_group.size() > 1 for group in self._groups)
        finally:
            self.show = None

    def piece_begins(self) -> None:
        self._made = []

    def piece_ends(self) -> None:
        self.of_a_piece = tuple(self._made)

    def play_rest(self) -> None:
        """Make what the present piece has not made yet."""
        for collective in (self.of_a_piece or ())[len(self._made) :]:
            self._play(collective)

    def play_piece(self) -> None:
        for collective in self.of_a_piece or ():
            self._play(collective)

    def _play(self, collective: Collective) -> None:
        self._count(collective)
        collective.play()

    def note(self, collective: Collective) -> None:
        self._made.append(collective)
        self._count(collective)

    def _count(self, collective: Collective) -> None:
        whole = max(collective.given, collective.taken) * collective.dtype.itemsize
        self.traffic.add(collective.kind, whole, dist.get_world_size(collective.group))

    def _watch(self, group: Any) -> None:
        group._all_gather_comm = Watched(group._all_gather_comm, "all_gather", self)
        group._reduce_scatter_comm = Watched(group._reduce_scatter_comm, "reduce_scatter", self)
        if group._is_hsdp:
            group._all_reduce_hook = _after_all_reduce(group, self)


class Watched:
    """A communication of FSDP2's that is noted before it is made."""

    def __init__(self, inner: Any, kind: str, collectives: Collectives) -> None:
        self._inner = inner.__dict__.get("_inner", inner) if isinstance(inner, Watched) else inner
        self._kind, self._collectives = kind, collectives

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        tensor: Tensor = self._inner.allocate(size, dtype=dtype, device=device)
        return tensor

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        *args: Any,
        async_op: bool = False,
        **options: Any,
    ) -> Any:
        def make(taken: Tensor, given: Tensor) -> object:
            return self._inner(taken, given, group, *args, **options)

        self._collectives.note(
            Collective(
                self._kind, input_tensor.numel(), output_tensor.numel(), input_tensor.dtype, input_tensor.device, group,
                make,
            )
        )  # fmt: skip
        if self._kind == "reduce_scatter" and self._collectives.show is not None:
            self._collectives.show(self, input_tensor)
        return self._inner(output_tensor, input_tensor, group, *args, async_op=async_op, **options)


def _after_all_reduce(group: Any, collectives: Collectives) -> Callable[[Tensor], None]:
    users_own, ranks = group._all_reduce_hook, group._all_reduce_process_group

    def hook(output: Tensor) -> None:
        numel = output.numel()
        collectives.note(
            Collective(
                "all_reduce", numel, numel, output.dtype, output.device, ranks,
                lambda taken, _: dist.all_reduce(taken, group=ranks),
            )
        )  # fmt: skip
        if users_own is not None:
            users_own(output)

    return hook


def _parameter_groups(module: FSDPModule) -> list[Any]:
    state: Any = module._get_fsdp_state()
    return list(state._fsdp_param_groups)
