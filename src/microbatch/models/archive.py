"""A ``torch.export`` archive (``.pt2``) as a model, where it was exported for more than one batch size."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from microbatch.errors import InvalidModel, InvalidSettings
from microbatch.models.archive_contents import EXPORT_AGAIN, read_archive
from microbatch.models.loaded import EXAMPLE_BATCH, Example, Loaded
from microbatch.models.torchvision_operators import make_torchvision_importable


class Exported(nn.Module):
    """The graph of an archive; it stays in the mode in which it was exported, which is part of the graph."""

    def __init__(self, program: nn.Module) -> None:
        super().__init__()
        self.program = program

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.program(*args, **kwargs)

    def train(self, mode: bool = True) -> Exported:
        """Sets the flag alone: torch refuses to change an exported graph."""
        self.training = mode
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Exported:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of what it does itself to copy a graph
            return Exported(copy.deepcopy(self.program, memo)).train(self.training)


@dataclass(frozen=True, slots=True)
class Input:
    """One input of the graph.

    Attributes:
        value: an example: a tensor, or a plain value.
        batch: which of its dimensions are the batch.
    """

    value: object
    batch: tuple[int, ...]


def load_archive(text: str, *, dtype: torch.dtype | None = None) -> Loaded:
    """The graph of an archive, for inference.

    Args:
        dtype: refused where it is not the archive's own: its graph names the dtype.

    Raises:
        InvalidModel: see `microbatch.models.archive_contents.read_archive`; or the batch is fixed.
        InvalidSettings: a dtype other than the archive's.
    """
    contents = read_archive(Path(text))
    with _quiet():
        program = _opened(text)
        model = Exported(program.module(check_guards=False))
    _check_dtype(text, model, dtype)
    symbol, inputs, structure = _inputs(text, program)
    least, most = _range(program, symbol)
    example_at = partial(_example_at, text, inputs, structure, least, most)
    args, kwargs = example_at(max(EXAMPLE_BATCH, least), None)
    notes = () if most is None and least <= EXAMPLE_BATCH else (f"{text} was exported for {_wording(least, most)}.",)
    return Loaded(
        name=str(contents.path),
        model=model,
        args=args,
        kwargs=kwargs,
        example_at=example_at,
        modes=("inference",),
        notes=notes,
    )


@contextmanager
def _quiet() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _opened(text: str) -> Any:
    make_torchvision_importable()  # its operators may be in the graph
    try:
        return torch.export.load(text)
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise InvalidModel(f"{text} cannot be opened: {lines[0]}", EXPORT_AGAIN) from error


def _check_dtype(text: str, model: nn.Module, dtype: torch.dtype | None) -> None:
    own = next((tensor.dtype for tensor in model.state_dict().values() if tensor.is_floating_point()), dtype)
    if dtype is not None and dtype != own:
        raise InvalidSettings(
            f"{text} was exported in {str(own).removeprefix('torch.')}, which its graph cannot change.",
            "Export the model in the other dtype, or leave the dtype out.",
        )


def _inputs(text: str, program: Any) -> tuple[Any, list[Input], Any]:
    """The batch's symbol, the example inputs in order, and how (args, kwargs) are made of them."""
    shapes = [_shape(node) for node in _user_inputs(program)]
    symbol = next((shape[0].node.expr for shape in shapes if shape and _is_free(shape[0])), None)
    if symbol is None:
        sizes = ", ".join(str(tuple(shape)) for shape in shapes if shape) or "none"
        raise InvalidModel(
            f"{text} was exported for a fixed batch (inputs of {sizes}), so no other size can be run.",
            "Export it with dynamic_shapes that free dimension 0, as in {'x': {0: torch.export.Dim('batch')}}.",
        )
    batches = [tuple(axis for axis, size in enumerate(shape) if _is(size, symbol)) for shape in shapes]
    values, structure = _example_values(program)
    return symbol, [Input(value, batch) for value, batch in zip(values, batches, strict=True)], structure


def _user_inputs(program: Any) -> list[Any]:
    names = list(program.graph_signature.user_inputs)
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    return [nodes.get(name) if isinstance(name, str) else None for name in names]


def _shape(node: Any) -> tuple[Any, ...]:
    found = None if node is None else node.meta.get("val")
    return tuple(found.shape) if isinstance(found, Tensor) else ()


def _is_free(size: object) -> bool:
    return isinstance(size, torch.SymInt) and bool(size.node.expr.is_Symbol)


def _is(size: object, symbol: object) -> bool:
    return isinstance(size, torch.SymInt) and size.node.expr == symbol


def _example_values(program: Any) -> tuple[list[Any], Any]:
    """The archive's own example where it has one, else noise and zeros of the shapes in the graph."""
    if program.example_inputs:
        return tree_flatten(program.example_inputs)
    made = [_made(node) for node in _user_inputs(program)]
    args, kwargs = tree_unflatten(made, program.call_spec.in_spec)
    return tree_flatten((args, kwargs))


def _made(node: Any) -> object:
    value = node.meta["val"]
    if not isinstance(value, Tensor):
        return value
    shape = [size if isinstance(size, int) else size.node.hint or EXAMPLE_BATCH for size in value.shape]
    if not value.dtype.is_floating_point:
        return torch.zeros(shape, dtype=value.dtype)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(value.dtype)


def _range(program: Any, symbol: object) -> tuple[int, int | None]:
    """Least and largest batch; torch writes 2 as the least where 1 was not tried, which is no limit."""
    found = program.range_constraints.get(symbol)
    least = 1 if found is None or int(found.lower) <= EXAMPLE_BATCH else int(found.lower)
    most = None if found is None or not found.upper.is_Integer else int(found.upper)
    return least, most


def _wording(least: int, most: int | None) -> str:
    return f"batches of {least} or more" if most is None else f"batches of {least} to {most}"


def _example_at(
    text: str, inputs: list[Input], structure: Any, least: int, most: int | None, batch: int, sequence: int | None
) -> Example:
    if sequence is not None:
        raise InvalidSettings(f"{text} has no sequence whose length could be chosen.", "Leave it out.")
    if batch < least or (most is not None and batch > most):
        raise InvalidSettings(
            f"{text} was exported for {_wording(least, most)}, not for {batch}.", "Choose a batch within."
        )
    args, kwargs = tree_unflatten([_resized(item, batch) for item in inputs], structure)
    return tuple(args), dict(kwargs)


def _resized(item: Input, batch: int) -> object:
    """The example's own items in turn."""
    value = item.value
    if not isinstance(value, Tensor):
        return value
    for axis in item.batch:
        value = value.index_select(axis, torch.arange(batch) % value.shape[axis])
    return value
