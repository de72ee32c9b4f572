"""Going back through the graph of one piece node by node, latest first, so that it can wait anywhere for the others.

torch's own engine goes back in one go. Here each node is called by itself, in the order of the numbers that nodes get
when they are made; the gradients of nodes that are not reached yet can be kept and given to the graph of another
forward of the same piece. Gradients reach parameters through torch's engine, with the hooks of parameters; hooks on
activations and backward hooks of modules are not called.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from microbatch.errors import InvalidModel


class Landmarks:
    """Nodes of a piece's graph, noted while its forward runs.

    Attributes:
        found: by number within the piece.
    """

    def __init__(self, wanted: Iterable[int], base: int) -> None:
        """
        Args:
            wanted: their numbers.
            base: number of the first node of the forward.
        """
        self.found: dict[int, Node] = {}
        self._wanted, self._base = frozenset(wanted), base

    @property
    def complete(self) -> bool:
        return len(self.found) == len(self._wanted)

    def see(self, result: Any) -> None:
        """Note the nodes of what an operation returned."""
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor) and (node := tensor.grad_fn) is not None:
                number = node._sequence_nr() - self._base
                if number in self._wanted:
                    self.found[number] = node


Kept = dict[int, list[Tensor | None]]
"""Gradients of nodes not reached yet, by number within the piece."""


def next_number() -> int:
    """The number that the next node of this thread gets."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


class GoingBack:
    """The way back of one piece.

    Attributes:
        kept: gradients of nodes not reached yet.
    """

    def __init__(self, base: int) -> None:
        """
        Args:
            base: number of the first node of the piece's forward.
        """
        self.kept: Kept = {}
        self._base = base
        self._nodes: dict[int, Node] = {}
        self._latest: list[int] = []

    def start(self, tensors: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """Begin at the ends of the graph; None is the gradient 1 of a number."""
        for tensor, gradient in zip(tensors, gradients, strict=True):
            self.give(tensor, torch.ones_like(tensor) if gradient is None else gradient)

    def resume(self, nodes: Iterable[Node], kept: Kept) -> None:
        """Go on where another graph of the same forward stopped.

        Args:
            nodes: of this graph, those that have gradients among them.
            kept: what the other kept.

        Raises:
            InvalidModel: the forward made other nodes this time.
        """
        found = {self._number(node): node for node in nodes}
        if missing := kept.keys() - found.keys():
            raise InvalidModel(
                f"A piece does not go the same way twice: {len(missing)} operations are missing the second time.",
                "A forward that is run again must do the same; choose another batch_norm.",
            )
        for number, gradients in kept.items():
            self._note(number, found[number])
            self.kept[number] = gradients

    def give(self, tensor: Tensor, gradient: Tensor) -> None:
        """Add to the gradient of a tensor of the graph."""
        if tensor.grad_fn is not None:
            self._give(tensor.grad_fn, tensor.output_nr, gradient)
        elif tensor.requires_grad:
            torch.autograd.backward([tensor], [gradient])

    def give_edge(self, edge: tuple[Node | None, int], gradient: Tensor) -> None:
        """Add to the gradient at an edge of the graph, in the shape and dtype that the node takes."""
        node, place = edge
        if node is None:
            return
        if node.name() == "torch::autograd::AccumulateGrad":
            variable: Tensor = node.variable  # type: ignore[attr-defined]
            torch.autograd.backward([variable], [_as_wanted(gradient, variable.shape, variable.dtype)])
        else:
            wanted = node._input_metadata[place]
            self._give(node, place, _as_wanted(gradient, wanted.shape, wanted.dtype))

    def down_to(self, number: int) -> None:
        """Call every node made later than a number of torch's."""
        with torch.no_grad():
            while self._latest and -self._latest[0] > number - self._base:
                latest = -heapq.heappop(self._latest)
                node, gradients = self._nodes.pop(latest), self.kept.pop(latest)
                for edge, gradient in _called(node, gradients):
                    self.give_edge(edge, gradient)

    def to_the_end(self) -> None:
        """Call every node that is left."""
        self.down_to(self._base - 1)

    def take(self, node: Node) -> Tensor | None:
        """The gradient that a node of one output was given; the node is not called."""
        number = self._number(node)
        if number not in self.kept:
            return None
        self._latest.remove(-number)
        heapq.heapify(self._latest)
        del self._nodes[number]
        return self.kept.pop(number)[0]

    def _give(self, node: Node, place: int, gradient: Tensor) -> None:
        number = self._number(node)
        if number not in self.kept:
            self._note(number, node)
            self.kept[number] = [None] * len(node._input_metadata)
        before = self.kept[number][place]
        self.kept[number][place] = gradient if before is None else before + gradient

    def _note(self, number: int, node: Node) -> None:
        self._nodes[number] = node
        heapq.heappush(self._latest, -number)

    def _number(self, node: Node) -> int:
        return node._sequence_nr() - self._base


def _called(node: Any, gradients: list[Tensor | None]) -> Iterator[tuple[tuple[Node | None, int], Tensor]]:
    """Where a node's gradients go, and those."""
    edges = node.next_functions
    if hasattr(node, "needs_input_grad"):  # a function written in Python: its arguments are not all tensors
        filled = [_zeros(form) if one is None else one for one, form in zip(gradients, node._input_metadata)]
        given = node.apply(*filled)
        given = given if isinstance(given, tuple) else (given,)
        given = [one for one, needed in zip(given, node.needs_input_grad) if needed]
        edges = [edge for edge in edges if edge[0] is not None]
    else:
        given = node(*gradients)
        given = given if isinstance(given, tuple) else (given,)
    for edge, gradient in zip(edges, given, strict=True):
        if gradient is not None and edge[0] is not None:
            yield edge, gradient


def _zeros(form: Any) -> Tensor:
    return torch.zeros(form.shape, dtype=form.dtype, device=form.device)


def _as_wanted(gradient: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """As torch's engine does it between nodes: added up where a value was broadcast, and cast."""
    if gradient.shape != torch.Size(shape):
        gradient = gradient.sum_to_size(*shape)
    return gradient if gradient.dtype == dtype else gradient.to(dtype)


def all_nodes(tensors: Iterable[Tensor]) -> Iterator[Node]:
    """Every node behind some tensors but those of leaves."""
    waiting: list[Node | None] = [tensor.grad_fn for tensor in tensors]
    seen: set[Node] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or node.name() == "torch::autograd::AccumulateGrad":
            continue
        seen.add(node)
        yield node
        waiting += [following for following, _ in node.next_functions]
