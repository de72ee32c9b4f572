"""What travels between stages: shapes and dtypes of messages, known on every rank before anything is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten


@dataclass(frozen=True, slots=True)
class Meta:
    """A tensor without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False

    @classmethod
    def of(cls, tensor: Tensor) -> Meta:
        """Of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return self.dtype.itemsize * int(torch.Size(self.shape).numel())

    def empty(self, device: torch.device) -> Tensor:
        """Room for it, without a gradient."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def zeros(self, device: torch.device) -> Tensor:
        """Zeros of it, without a gradient."""
        return torch.zeros(self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True, slots=True)
class Returned:
    """What a unit returns: nested containers with tensors, and constants.

    Attributes:
        structure: of the containers.
        leaves: a `Meta` for each tensor, else the value itself.
    """

    structure: TreeSpec
    leaves: tuple[Any, ...]

    @classmethod
    def of(cls, value: Any) -> Returned:
        """Of a value."""
        leaves, structure = tree_flatten(value)
        return cls(structure, tuple(Meta.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves))

    @property
    def metas(self) -> tuple[Meta, ...]:
        """Of its tensors in order."""
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, Meta))

    def filled(self, tensors: Iterable[Tensor]) -> Any:
        """The value with these tensors in their places."""
        following = iter(tensors)
        return tree_unflatten(
            [next(following) if isinstance(leaf, Meta) else leaf for leaf in self.leaves], self.structure
        )


def tensors_of(value: Any) -> list[Tensor]:
    """Tensors in nested containers, in the order of `Returned.metas`."""
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]


@dataclass(frozen=True, slots=True)
class Plan:
    """The messages of one micro-batch.

    Attributes:
        returned: what each unit returns.
        messages: per boundary between stages the tensors that cross it.
    """

    returned: Mapping[str, Returned]
    messages: tuple[tuple[Meta, ...], ...]

    @classmethod
    def of(cls, returned: Mapping[str, Returned], crossing: Sequence[Sequence[str]]) -> Plan:
        """From the units whose outputs cross each boundary."""
        messages = tuple(tuple(meta for unit in units for meta in returned[unit].metas) for units in crossing)
        return cls(returned, messages)


class Shapes:
    """Plans of the calls that were seen, by signature.

    Args:
        returned: what each unit returns at a call.
        crossing: the units whose outputs cross each boundary between stages.
    """

    MOST = 512
    """Plans that are kept; the oldest goes first."""

    def __init__(self, returned: Callable[[Any], Mapping[str, Returned]], crossing: Sequence[Sequence[str]]) -> None:
        self._returned, self._crossing = returned, crossing
        self._plans: dict[object, Plan] = {}

    def of(self, calls: Sequence[Any], *context: object) -> list[Plan]:
        """The plan of each call.

        Args:
            calls: one per micro-batch.
            context: what else shapes depend on, such as the dtype of autocast.
        """
        return [self._plan(call, context) for call in calls]

    def forget(self) -> None:
        """Something else than the calls has changed."""
        self._plans.clear()

    def _plan(self, call: Any, context: tuple[object, ...]) -> Plan:
        key = (call.signature(), context)
        if key not in self._plans:
            if len(self._plans) >= self.MOST:
                del self._plans[next(iter(self._plans))]
            self._plans[key] = Plan.of(self._returned(call), self._crossing)
        return self._plans[key]
