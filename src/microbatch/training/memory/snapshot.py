"""What a try at a step changes besides gradients, kept so that a second try starts where the first did."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
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
        elsewhere: states of the generators of further devices that hold parts of the model.
    """

    random: dict[str, Any]
    buffers: tuple[tuple[nn.Module, str, Tensor, Tensor], ...]
    elsewhere: tuple[tuple[torch.device, Tensor], ...] = ()

    @classmethod
    def take(cls, model: nn.Module, device: torch.device) -> Snapshot:
        """Copies of every buffer, and the states of the generators that a forward may use."""
        buffers = tuple(
            (module, name, buffer, buffer.detach().clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        )
        others = {parameter.device for parameter in model.parameters()} - {device}
        elsewhere = tuple((o, _module_of(o).get_rng_state(o)) for o in others if o.type not in ("cpu", "meta"))
        return cls(random_state(device), buffers, elsewhere)

    def restore(self) -> None:
        """Put everything back; a buffer that was replaced by another tensor is the old one again."""
        with torch.no_grad():
            for module, name, buffer, values in self.buffers:
                buffer.copy_(values)
                module._buffers[name] = buffer
        self.restore_random()

    def restore_random(self) -> None:
        """Put the random state back, and nothing else."""
        set_random_state(self.random)
        for device, values in self.elsewhere:
            _module_of(device).set_rng_state(values, device)


def _module_of(device: torch.device) -> Any:
    return torch.get_device_module(device)


def random_state(device: torch.device) -> dict[str, Any]:
    """Of every generator that a forward may use: torch's on the CPU and on the device, Python's, numpy's."""
    state: dict[str, Any] = {"python": random.getstate(), "cpu": torch.get_rng_state()}
    if device.type != "cpu":
        state["device"] = (device, _module_of(device).get_rng_state(device))
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """The counterpart of `random_state`."""
    random.setstate(state["python"])
    torch.set_rng_state(state["cpu"])
    if "device" in state:
        device, values = state["device"]
        _module_of(device).set_rng_state(values, device)
    if "numpy" in state:
        sys.modules["numpy"].random.set_state(state["numpy"])


class RandomStates:
    """A random state for each of several pieces that run in turns."""

    def __init__(self, number: int, device: torch.device) -> None:
        """Each begins at a seed drawn from torch's generator, whose state is left as after drawing."""
        self._device = device
        seeds = torch.randint(2**31, (number,)).tolist()
        self.after_drawing = random_state(device)
        self._starts = [_seeded(seed, device) for seed in seeds]
        self._now = list(self._starts)
        set_random_state(self.after_drawing)

    @contextmanager
    def turn(self, index: int) -> Iterator[None]:
        """Around a turn of a piece."""
        set_random_state(self._now[index])
        yield
        self._now[index] = random_state(self._device)

    def begin(self, index: int) -> None:
        """As at the beginning of a piece."""
        set_random_state(self._starts[index])


def _seeded(seed: int, device: torch.device) -> dict[str, Any]:
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    return random_state(device)
