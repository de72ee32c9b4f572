"""A module with an example of its input as an engine: items are rows of the example, without the batch dimension."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from microbatch.errors import InvalidModel, InvalidSettings
from microbatch.models.loaded import Loaded
from microbatch.serving.engine.batcher import DynamicBatcher
from microbatch.serving.loading.served import Given, Served

EXAMPLES = 4
"""Rows of the example that are run at the start, at most."""
LARGEST = 256
"""The engine tries no larger batch by itself."""
OWN_EXAMPLE = "Write a function that returns the model and a tensor, a tuple or a dict of tensors, and name it."


class Bound(nn.Module):
    """A model with the inputs that are the same for each request; the other ones come by position or by name."""

    def __init__(self, model: nn.Module, name: str, constants: Mapping[str, Any]) -> None:
        """
        Args:
            model: what runs.
            name: of the one input that comes by position; empty where inputs come as they are.
            constants: inputs by name.
        """
        super().__init__()
        self.model, self.name, self.constants = model, name, dict(constants)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.name:
            kwargs = {self.name: args[0], **kwargs}
            return self.model(**kwargs, **self.constants)
        return self.model(*args, **kwargs, **self.constants)


def from_loaded(text: str, name: str, loaded: Loaded, given: Given) -> Served:
    """A loaded MODEL as an engine.

    Raises:
        InvalidModel: its input is no tensor, tuple or dict of tensors with a batch dimension; or single items cannot
            be run.
        InvalidSettings: settings that contradict each other, or the model.
    """
    if "examples" in given:
        raise InvalidSettings(f"{text} brings its own example.", "Leave out --examples; it is for functions.")
    model, rows = items_of(loaded)
    limit = _largest_batch(loaded)
    given = given if limit is None else _limited(text, given, limit)
    engine = DynamicBatcher(model, name=name, examples=rows, **given)
    return Served(name=name, text=text, kind="module", engine=engine, takes=described(rows[0]), notes=loaded.notes)


def from_module(text: str, name: str, module: nn.Module, given: Given) -> Served:
    """A module of which no example is known: it learns its latency from requests."""
    note = (
        f"{text} comes without an example: nothing is warmed, measured or compared before the first request. "
        "Return (model, example) from a function for that."
    )
    notes = () if given.get("examples") else (note,)
    engine = DynamicBatcher(module, name=name, **given)
    return Served(name=name, text=text, kind="module", engine=engine, takes="what the model takes", notes=notes)


def items_of(loaded: Loaded) -> tuple[nn.Module, list[Any]]:
    """The model as it takes a batch of items, and some items.

    Raises:
        InvalidModel: the example is no tensor, tuple or dict of tensors with a batch dimension.
    """
    tensors = {key: value for key, value in loaded.kwargs.items() if isinstance(value, Tensor)}
    constants = {key: value for key, value in loaded.kwargs.items() if key not in tensors}
    if "use_cache" in constants:
        constants["use_cache"] = False  # nobody goes on from it
    flat = all(isinstance(value, Tensor) for value in loaded.args)
    plain = not any(isinstance(value, Mapping | list | tuple) for value in constants.values())
    if not (flat and plain) or bool(loaded.args) == bool(tensors):
        raise InvalidModel(f"The input of {loaded.name} is neither tensors by position nor by name.", OWN_EXAMPLE)
    inputs = [value for value in (*loaded.args, *tensors.values()) if isinstance(value, Tensor)]
    sizes = {len(value) if value.dim() else 0 for value in inputs}
    if len(sizes) != 1 or sizes == {0}:
        raise InvalidModel(f"The inputs of {loaded.name} have no batch dimension in common.", OWN_EXAMPLE)
    alone = next(iter(tensors)) if len(tensors) == 1 else ""
    model = Bound(loaded.model, alone, constants) if alone or constants else loaded.model
    return model, [_row(loaded.args, tensors, place) for place in range(min(EXAMPLES, *sizes))]


def described(item: Any) -> str:
    """What an item is, in a few words."""
    if isinstance(item, Tensor):
        shape = " × ".join(str(size) for size in item.shape) or "1"
        return f"{shape} numbers ({str(item.dtype).removeprefix('torch.')})"
    if isinstance(item, Mapping):
        return "; ".join(f"{key}: {described(value)}" for key, value in item.items())
    return "; ".join(described(value) for value in item)


def _row(args: tuple[Any, ...], tensors: Mapping[str, Tensor], place: int) -> Any:
    if len(args) == 1 or len(tensors) == 1:
        return [*args, *tensors.values()][0][place].clone()
    if args:
        return tuple(value[place].clone() for value in args)
    return {key: value[place].clone() for key, value in tensors.items()}


def _largest_batch(loaded: Loaded) -> int | None:
    """Items that an archive was exported for at most; None where nothing limits what the engine would try.

    Raises:
        InvalidModel: it was exported for larger batches only.
    """
    if not loaded.name.endswith(".pt2") or loaded.example_at is None:
        return None
    if not _takes(loaded, 1):
        raise InvalidModel(
            f"{loaded.name} was not exported for a single item, which a server also has to run.",
            "Export it with a Dim whose min is 1.",
        )
    if _takes(loaded, LARGEST):
        return None
    low, high = 1, LARGEST
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _takes(loaded, middle) else (low, middle)
    return low


def _takes(loaded: Loaded, batch: int) -> bool:
    assert loaded.example_at is not None
    try:
        with torch.no_grad():
            loaded.example_at(batch, None)
    except InvalidSettings:
        return False
    return True


def _limited(text: str, given: Given, limit: int) -> Given:
    asked = given.get("max_batch_size")
    if asked is not None and asked > limit:
        raise InvalidSettings(
            f"{text} was exported for batches of {limit} at most, and --max-batch-size is {asked}.",
            f"Give at most {limit}, or export it again.",
        )
    return {**given, "max_batch_size": asked or limit}
