"""A model and its input without data: shapes only, on a CPU that needs no memory, whatever device they live on."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_flatten, tree_unflatten


def empty_like(tensor: Tensor, mode: FakeTensorMode, dtype: torch.dtype) -> FakeTensor:
    """A tensor of the same shape and strides without data. Made as torch makes it, but without asking the dispatcher,
    which costs ten times as much: a large model has thousands of tensors."""
    with no_dispatch():
        meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="meta")
    return FakeTensor(mode, meta, torch.device("cpu"))


class Faker:
    """Makes twins of tensors; views of one tensor and tied parameters get one twin each.

    Args:
        mode: the fake mode in which the model will run.
        dtype: what floating-point tensors become; None leaves them.
    """

    def __init__(self, mode: FakeTensorMode, dtype: torch.dtype | None = None) -> None:
        self.mode, self.dtype = mode, dtype
        self._twins: dict[int, tuple[object, object]] = {}  # the original is kept, so that its id stays its own

    def twin(self, tensor: Tensor) -> Tensor:
        """One tensor without data."""
        if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
            return self.mode.from_tensor(tensor)
        widened = self.dtype if self.dtype is not None and tensor.dtype.is_floating_point else tensor.dtype
        return empty_like(tensor, self.mode, widened).requires_grad_(tensor.requires_grad)

    def anything(self, value: Any) -> Any:
        """Nested values and plain objects that hold tensors (a cache of keys and values), copied with twins."""
        leaves, structure = tree_flatten(value)
        return tree_unflatten([self._leaf(leaf) for leaf in leaves], structure)

    def tensors(self) -> list[Tensor]:
        """The twins of all tensors that `anything` met."""
        return [twin for _, twin in self._twins.values() if isinstance(twin, Tensor)]

    def _leaf(self, leaf: Any) -> Any:
        if id(leaf) not in self._twins:
            self._twins[id(leaf)] = leaf, self._made(leaf)
        return self._twins[id(leaf)][1]

    def _made(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return self.twin(leaf)
        if not hasattr(leaf, "__dict__") or isinstance(leaf, type | nn.Module) or callable(leaf):
            return leaf
        twin = copy.copy(leaf)
        self._twins[id(leaf)] = leaf, twin
        vars(twin).update({name: self.anything(value) for name, value in vars(leaf).items()})
        return twin


@contextmanager
def plain_tensors(model: nn.Module, faker: Faker) -> Iterator[None]:
    """Inside, tensors that modules keep as plain attributes are fake as well."""
    found = [
        (vars(module), name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor)
    ]
    for attributes, name, value in found:
        attributes[name] = faker.twin(value)
    try:
        yield
    finally:
        for attributes, name, value in found:
            attributes[name] = value
