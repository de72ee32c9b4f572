"""What a try at a step changes besides gradients, kept so that a second try starts where the first did."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Random state and buffers at the start of a step.

    Attributes:
        random: state of torch's generators by device (``None``: the CPU's), of Python's and of numpy's global one.
        buffers: (module, name, tensor that stood there, its values).
    """

    random: dict[str, Any]
    buffers: tuple[tuple[nn.Module, str, Tensor, Tensor], ...]

    @classmethod
    def take(cls, model: nn.Module, device: torch.device) -> Snapshot:
        """Copies of every buffer, and the states of the generators that a forward may use."""
        buffers = tuple(
            (module, name, buffer, buffer.detach().clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        )
        return cls(random_state(device), buffers)

    def restore(self) -> None:
        """Put everything back; a buffer that was replaced by another tensor is the old one again."""
        with torch.no_grad():
            for module, name, buffer, values in self.buffers:
                buffer.copy_(values)
                module._buffers[name] = buffer
        set_random_state(self.random)


def random_state(device: torch.device) -> dict[str, Any]:
    """Of every generator that a forward may use: torch's on the CPU and on the device, Python's, numpy's."""
    state: dict[str, Any] = {"python": random.getstate(), "cpu": torch.get_rng_state()}
    if device.type != "cpu":
        state["device"] = (device, torch.get_device_module(device).get_rng_state(device))
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """The counterpart of `random_state`."""
    random.setstate(state["python"])
    torch.set_rng_state(state["cpu"])
    if "device" in state:
        device, values = state["device"]
        torch.get_device_module(device).set_rng_state(values, device)
    if "numpy" in state:
        sys.modules["numpy"].random.set_state(state["numpy"])
