"""What the first of two passes keeps for a joint loss, and the gradient that the loss has with respect to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from microbatch.training.joint.terms import (
    Joined,
    JointTerm,
    NotJoined,
    changed,
    evaluated,
    is_shared,
    join,
    kept,
    leaves_of,
    terms_of,
)
from microbatch.training.normalise import Tally, Total
from microbatch.training.passes import Passes
from microbatch.training.ranks.gathering import Gathered


class Collected:
    """The first pass over the pieces of this rank.

    Attributes:
        terms: the joint terms by name.
    """

    def __init__(self, items: tuple[int, ...]) -> None:
        """
        Args:
            items: of each piece, where values have one row per item; empty where one row is a row.
        """
        self.terms: dict[str, Values] = {}
        self._items = items
        self._tally = Tally()

    def add(self, index: int, result: Any) -> None:
        """Note what the loss returned for a piece."""
        pairs, joint = terms_of(result)
        self._tally.add(pairs)
        for name, term in joint.items():
            if name not in self.terms:
                self.terms[name] = Values(name, term.function, changed("", term.values, lambda _, leaf: kept(leaf)))
            self.terms[name].add(index, term)

    def totals(self) -> dict[str, Total]:
        """Of the terms that are sums over pieces, on this rank."""
        return self._tally.totals()

    def told(self) -> tuple[dict[str, Any], list[Tensor]]:
        """What the other ranks need: a note, and the tensors that it speaks of in their order."""
        for values in self.terms.values():
            values.join(self._items)
        note = {
            "totals": {name: [total.sum, total.weight] for name, total in self.totals().items()},
            "seed": int(torch.randint(2**31, ())),
            "terms": {name: values.told() for name, values in self.terms.items()},
        }
        leaves = [leaf.value for values in self.terms.values() for leaf in values.leaves.values()]
        return note, [leaf for leaf in leaves if isinstance(leaf, Tensor)]


@dataclass
class Values:
    """The values of one joint term on this rank.

    Attributes:
        name: of the term.
        function: of the joined values.
        structure: the first piece's values in their containers.
        leaves: by path, those of all pieces joined.
    """

    name: str
    function: Callable[[Any], Any]
    structure: Any
    leaves: dict[str, Joined] = field(default_factory=dict)
    _pieces: list[int] = field(default_factory=list)
    _parts: dict[str, list[Any]] = field(default_factory=dict)
    _differentiable: set[str] = field(default_factory=set)
    _gradients: dict[str, Tensor] = field(default_factory=dict)

    def add(self, index: int, term: JointTerm) -> None:
        """Keep the values of a piece."""
        self._pieces.append(index)
        for path, leaf in leaves_of(term.values).items():
            self._parts.setdefault(path, []).append(kept(leaf))
            if isinstance(leaf, Tensor) and _may_have_gradient(leaf):
                self._differentiable.add(path)

    def join(self, items: tuple[int, ...]) -> None:
        """Join the values of all pieces of this rank."""
        of_each = [items[index] for index in self._pieces] if items else []
        for path in list(self._parts):
            parts = self._parts.pop(path)
            if len(parts) < len(self._pieces):
                joined = Joined(NotJoined(path, "some pieces do not have"), True, ())
            else:
                joined = join(path, parts, shared=is_shared(parts, of_each))
            self.leaves[path] = joined

    def told(self) -> list[list[Any]]:
        """Path of each tensor, whether it is shared, and whether it has a gradient."""
        tensors = {path: leaf for path, leaf in self.leaves.items() if isinstance(leaf.value, Tensor)}
        return [[path, leaf.shared, path in self._differentiable] for path, leaf in tensors.items()]

    def differentiate(self, passes: Passes, said: Gathered, rank: int) -> dict[str, Total]:
        """The loss of the values of all ranks, and the gradient of this rank's.

        Every rank computes the whole loss. The first that has the term reports it and takes the gradients of the
        loss's own parameters; the others leave those alone.
        """
        having = [number for number, (note, _) in enumerate(said) if self.name in note["terms"]]
        own, first = having.index(rank), rank == having[0]
        everywhere = {path: self._of_all_ranks(path, said, having) for path in self.leaves}
        wanted = {path: leaf.value for path, leaf in everywhere.items() if _has_gradient(leaf)}
        with passes.casting():
            values = changed("", self.structure, lambda path, _: everywhere[path].value)
            pairs = evaluated(self.name, self.function, values)
        roots = passes.roots(pairs, {name: pair.weight for name, pair in pairs.items()}, None)
        if roots and (first or wanted):
            torch.autograd.backward(roots, inputs=None if first else list(wanted.values()))
        for path, tensor in wanted.items():
            part = None if tensor.grad is None else everywhere[path].part(tensor.grad, own)
            if part is not None:
                self._gradients[path] = part
        if not first:
            return {name: Total(0.0, 0.0) for name in pairs}
        return {
            name: Total(float(pair.sum.detach()) if pair.weight else 0.0, pair.weight) for name, pair in pairs.items()
        }

    def gradients(self, term: JointTerm, index: int) -> list[tuple[Tensor, Tensor | None]]:
        """The values of a piece that have a gradient, each with it."""
        found: list[tuple[Tensor, Tensor | None]] = []
        for path, leaf in leaves_of(term.values).items():
            if path in self._gradients and leaf.requires_grad:
                part = self.leaves[path].part(self._gradients[path], self._pieces.index(index))
                if part is not None:
                    found.append((leaf, part))
        return found

    def _of_all_ranks(self, path: str, said: Gathered, having: list[int]) -> Joined:
        """One leaf of every rank that has the term, as a leaf of the graph where it has a gradient."""
        given = [_find(said[number], self.name, path) for number in having]
        parts = [one for one in given if one is not None]
        if not parts:  # no tensor: a number, or what cannot be joined
            return self.leaves[path]
        if len(parts) < len(given):
            return Joined(NotJoined(path, "some ranks do not have"), True, ())
        joined = join(path, [tensor for tensor, _, _ in parts], shared=all(shared for _, shared, _ in parts))
        if any(differentiable for _, _, differentiable in parts) and isinstance(joined.value, Tensor):
            return Joined(joined.value.detach().requires_grad_(), joined.shared, joined.rows)
        return joined


def _may_have_gradient(leaf: Tensor) -> bool:
    return leaf.requires_grad if torch.is_grad_enabled() else leaf.is_floating_point() or leaf.is_complex()


def _has_gradient(leaf: Joined) -> bool:
    return isinstance(leaf.value, Tensor) and leaf.value.requires_grad


def _find(one: tuple[Any, list[Tensor]], name: str, path: str) -> tuple[Tensor, bool, bool] | None:
    """A rank's tensor of that term and path, whether it is shared, and whether it has a gradient."""
    note, tensors = one
    place = 0
    for term, told in note["terms"].items():
        for own_path, shared, differentiable in told:
            if (term, own_path) == (name, path):
                return tensors[place], shared, differentiable
            place += 1
    return None
