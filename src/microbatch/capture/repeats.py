"""Blocks that repeat: of siblings that do the same work, one runs and counts for all.

The 126 layers of a large language model differ in nothing that a count could see. Children of a ModuleList or a
Sequential with the same classes, shapes and settings, called with inputs of the same shapes, are run once; for the
others only outputs of the same shapes are made. A check also runs the last of each such group and compares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import MethodType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from microbatch.capture.fake import empty_like
from microbatch.capture.moved import tensors_in
from microbatch.capture.opaque import replaced
from microbatch.capture.record import Record, Run
from microbatch.capture.tally import Tally

_OWN = frozenset(vars(nn.Module())) - {"training"}
"""What every module carries; the rest of its attributes are its settings."""


class NotRepeated(Exception):
    """Two blocks that looked the same did different work."""


Block = tuple[nn.Module, int, bool]
"""A module that has siblings like itself, a number that they share, and whether it is the last of them."""


@dataclass(slots=True)
class _Known:
    """A block that ran: its outputs' shapes, and where they are inputs passed through, which."""

    run: Run
    leaves: list[object]
    structure: TreeSpec


@dataclass(slots=True)
class Repeats:
    """The blocks that ran so far, by the block around them, their group, and their inputs."""

    tally: Tally
    check: bool = False
    known: dict[object, _Known] = field(default_factory=dict)
    checked: list[tuple[Run, Run]] = field(default_factory=list)

    def call(self, block: Block, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs the block's `forward`, or gives outputs like those of the one that ran."""
        module, group, last = block
        leaves, structure = tree_flatten((args, kwargs))
        key = (id(self.tally.run), group, structure, torch.is_grad_enabled(), *map(_seen, leaves))
        found = self.known.get(key)
        if found is None:
            found = self.known[key] = _Known(Run(self.tally.running[-1], self.tally.run), [], structure)
            out = self._run(found.run, forward, args, kwargs)
            found.leaves, found.structure = _template(out, leaves)
            return out
        found.run.count += 1
        if self.check and last:
            again = Run(self.tally.running[-1], self.tally.run)
            self.checked.append((found.run, again))
            return self._run(again, forward, args, kwargs)
        return self._like(found, leaves, module)

    def _run(self, run: Run, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self.tally.run = run
        try:
            return forward(*args, **kwargs)
        finally:
            self.tally.run = run.parent

    def _like(self, known: _Known, inputs: list[object], module: nn.Module) -> Any:
        made = [leaf for leaf in known.leaves if isinstance(leaf, Tensor)]
        fresh: Iterator[Tensor] = map(_another, made)  # objects of their own, or joining two would count one
        if torch.is_grad_enabled():
            tied = [*tensors_in(inputs), *module.parameters()]
            fresh = iter(replaced(self.tally, lambda: tuple(map(_empty, made)), tied, lambda: None))

        def filled(leaf: object) -> object:
            if isinstance(leaf, _Passed):
                return inputs[leaf.place]
            return next(fresh) if isinstance(leaf, Tensor) else leaf

        return tree_unflatten([filled(leaf) for leaf in known.leaves], known.structure)

    def records(self) -> list[Record]:
        """All records without those of the blocks that ran for comparison.

        Raises:
            NotRepeated: one of these did other work than the block that stood for it.
        """
        for one, other in self.checked:
            if _work_of(one, self.tally.records) != _work_of(other, self.tally.records):
                raise NotRepeated(other.name)
        again = [run for _, run in self.checked]
        return [record for record in self.tally.records if not any(_inside(record.run, run) for run in again)]


def _seen(leaf: object) -> object:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad
    return leaf if isinstance(leaf, int | float | str | torch.dtype | None) else id(leaf)


def _template(out: object, inputs: list[object]) -> tuple[list[object], TreeSpec]:
    leaves, structure = tree_flatten(out)
    places = {id(leaf): place for place, leaf in enumerate(inputs)}
    return [_Passed(places[id(leaf)]) if _passed(leaf, places) else leaf for leaf in leaves], structure


@dataclass(frozen=True, slots=True)
class _Passed:
    place: int


def _passed(leaf: object, places: dict[int, int]) -> bool:
    return id(leaf) in places and not isinstance(leaf, int | float | str | None)


def _another(tensor: Tensor) -> Tensor:
    if isinstance(tensor, FakeTensor):
        return empty_like(tensor, tensor.fake_mode, tensor.dtype)
    return tensor.detach()


def _empty(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _inside(run: Run | None, outer: Run) -> bool:
    return run is not None and (run is outer or _inside(run.parent, outer))


def _work_of(outer: Run, records: list[Record]) -> list[tuple[Record, int]]:
    inside = ((record, record.run) for record in records if _inside(record.run, outer))
    return [
        (replace(record, layer="", run=None), run.repeat // outer.repeat) for record, run in inside if run is not None
    ]


@contextmanager
def repeats(blocks: Iterable[Block], tally: Tally, *, check: bool = False) -> Iterator[Repeats]:
    """Inside, blocks that repeat run once. The modules' ``forward`` is given back afterwards.

    Args:
        check: run the last of each group as well, so that `Repeats.records` can compare.
    """
    found = Repeats(tally, check)
    with ExitStack() as stack:
        for block in blocks:
            stack.enter_context(forward_of(block[0], _bound(found, block, block[0].forward)))
        yield found


def _bound(found: Repeats, block: Block, forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: found.call(block, forward, args, kwargs)


@contextmanager
def forward_of(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Inside, calling the module calls `forward`."""
    with mock.patch.object(module, "forward", forward):
        yield


def blocks_of(model: nn.Module) -> Iterator[Block]:
    """Modules with parts that have a sibling like themselves."""
    for container in model.modules():
        if isinstance(container, nn.ModuleList | nn.Sequential):
            children = list(dict.fromkeys(container))
            numbers = _place_numbers(children)
            groups: dict[object, list[nn.Module]] = {}
            for child in children:
                if next(child.children(), None) is not None and "forward" not in vars(child):
                    groups.setdefault(settings_of(child, numbers), []).append(child)
            for group in groups.values():
                if len(group) > 1:
                    yield from ((child, id(group[0]), child is group[-1]) for child in group)


def settings_of(module: nn.Module, numbers: frozenset[str] = frozenset()) -> object:
    """What two blocks must have in common to do the same work: classes, shapes, and attributes.

    Args:
        numbers: attributes that only number the blocks; they are left out.
    """
    tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    attributes = ((name, value) for name, value in vars(module).items() if name not in _OWN and name not in numbers)
    return (
        type(module),
        tuple((name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for name, tensor in tensors),
        tuple((name, _plain(value)) for name, value in attributes),
        tuple((name, settings_of(child, numbers)) for name, child in module.named_children()),
    )


def _plain(value: object) -> object:
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    if isinstance(value, partial):
        return _plain((value.func, value.args, tuple(value.keywords.items())))
    if isinstance(value, MethodType):  # of the block itself, whose attributes are compared anyway
        return id(value.__func__)
    return value if isinstance(value, int | float | str | None) else id(value)


def _place_numbers(blocks: Sequence[nn.Module]) -> frozenset[str]:
    """Attributes, as ``layer_idx``, that grow by one from each block to the next and are the same within each."""
    first, *others = map(_whole_numbers, blocks) if len(blocks) > 1 else ({},)
    return frozenset(
        name
        for name, values in first.items()
        if len(values) == 1 and all(found.get(name) == {min(values) + n} for n, found in enumerate(others, 1))
    )


def _whole_numbers(block: nn.Module) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for module in block.modules():
        for name, value in vars(module).items():
            if name not in _OWN and isinstance(value, int) and not isinstance(value, bool):
                found.setdefault(name, set()).add(value)
    return found
