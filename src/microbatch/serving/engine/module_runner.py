"""A module as a function of a list of items: one conversion, one copy to the device and one forward for the batch."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from microbatch.batch.example import tensors_in
from microbatch.batch.split import to_device
from microbatch.batch.subject import call
from microbatch.errors import InvalidModel, InvalidOutput
from microbatch.serving.engine.collating import collated
from microbatch.serving.engine.fast_linear import with_fast_linear
from microbatch.serving.engine.padded import Collate, without_padding


class ModuleRunner:
    """Runs a module on lists of items. Can be pickled, for worker processes.

    Attributes:
        model: what runs.
        device: where.
    """

    def __init__(
        self,
        model: nn.Module,
        device: str = "cpu",
        collate: Collate | None = None,
        trim: Callable[[Any], int] | None = None,
        *,
        fast: bool = False,
    ) -> None:
        """
        Args:
            model: on the device, in the mode in which it is to run.
            device: of the model.
            collate: from a list of items to a batch; by default `microbatch.serving.engine.collating.collated`.
            trim: tokens of an item, where results have one row for each token of the longest item of the batch.
            fast: linear layers may be replaced by faster ones that give the same up to rounding, at the first call.
        """
        self.model, self.device = model, device
        self._collate, self._trim = collate or collated, trim
        self._fast = fast and device == "cpu" and not is_compiled(model)

    def __call__(self, items: list[Any]) -> list[Any]:
        if self._fast:
            self.model, self._fast = with_fast_linear(self.model), False
        batch = to_device(self._collate(items), torch.device(self.device))
        with torch.no_grad():
            output = call(self.model, batch)
        rows = rows_of(_to_host(output), len(items))
        if self._trim is None:
            return rows
        lengths = [self._trim(item) for item in items]
        return [without_padding(row, max(lengths), length) for row, length in zip(rows, lengths)]


def rows_of(output: Any, count: int) -> list[Any]:
    """One result for each item: row i of every tensor, in the containers that the output has.

    Raises:
        InvalidOutput: a tensor with another number of rows.
    """
    if isinstance(output, Tensor):
        if output.dim() == 0 or output.shape[0] != count:
            raise InvalidOutput(
                f"{count} items went in and a tensor of shape {tuple(output.shape)} came out.",
                "A model that is served returns one row for each item, in dimension 0.",
            )
        return list(output.unbind())
    if isinstance(output, Mapping):
        members = {key: rows_of(value, count) for key, value in output.items() if value is not None}
        return [{key: rows[place] for key, rows in members.items()} for place in range(count)]
    if isinstance(output, tuple | list):
        parts = [rows_of(value, count) for value in output if value is not None]
        return [tuple(rows[place] for rows in parts) for place in range(count)]
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        return rows_of({f.name: getattr(output, f.name) for f in dataclasses.fields(output)}, count)
    raise InvalidOutput(f"The model returned a {type(output).__name__}.", "Return tensors, or containers of them.")


def _to_host(output: Any) -> Any:
    """The output on the CPU, each tensor in one copy."""
    if all(tensor.device.type == "cpu" for tensor in tensors_in(output)):
        return output
    if isinstance(output, Tensor):
        return output.cpu()
    return to_device(output, torch.device("cpu"))


def serving_copy(model: nn.Module, device: str) -> nn.Module:
    """The module in eval mode on a device; the one given keeps its mode, its device and its hooks.

    On the model's own device weights and buffers are shared, not copied. A compiled module is taken as it is.

    Raises:
        InvalidModel: it cannot be copied, or it is compiled and in training mode.
    """
    if is_compiled(model):
        if model.training:
            raise InvalidModel("The compiled model is in training mode.", "Call model.eval() before it is served.")
        return model
    shared: dict[int, Any] = {}
    if all(tensor.device == torch.device(device) for tensor in [*model.parameters(), *model.buffers()]):
        shared = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    try:
        return copy.deepcopy(model, shared).to(device).eval()
    except Exception as error:
        raise InvalidModel(
            f"The model cannot be copied ({type(error).__name__}: {error}), and it must not be changed.",
            "Make it work with copy.deepcopy.",
        ) from error


def is_compiled(model: nn.Module) -> bool:
    """Whether each new batch size may cost a compilation."""
    return hasattr(model, "_orig_mod") or any(module._compiled_call_impl for module in model.modules())
