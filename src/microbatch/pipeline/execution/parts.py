"""A stage's part of a model: the model's own forward around the units of the stage, with stand-ins for all others.

The stand-in of an earlier unit returns what was received of it, or zeros where nothing depends on it. That of a later
unit ends the forward: what the stage has to send has been made by then.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from microbatch.errors import InvalidModel
from microbatch.pipeline.execution.cutting import Cut, on_device
from microbatch.pipeline.execution.probe import Probe, StandIn, stand_in
from microbatch.pipeline.execution.shapes import Plan, tensors_of
from microbatch.pipeline.execution.units import inside, skeleton


class _Done(BaseException):
    """The forward has reached a unit of a later stage."""


@dataclass(slots=True)
class _Now:
    """The micro-batch that is in the forward.

    Attributes:
        plan: its shapes.
        received: how many of the forward's arguments were received.
        outputs: of units, received or made here.
    """

    plan: Plan
    received: int
    outputs: dict[str, Any] = field(default_factory=dict)


class _Elsewhere(StandIn):
    """A unit of another stage."""

    def __init__(self, name: str, like: nn.Module, part: Part, *, earlier: bool) -> None:
        super().__init__(name, like)
        self.__dict__["_part"], self.__dict__["_earlier"] = part, earlier

    def _call(self, *_args: Any, **_kwargs: Any) -> Any:
        if not self.__dict__["_earlier"]:
            raise _Done
        return self.__dict__["_part"]._earlier(self.__dict__["_name"])

    forward = _call


class Part(nn.Module):
    """See the module. Called with what was received, then with the arguments of the model's own call.

    Attributes:
        model: the model with stand-ins; its parameters are those of the stage, under the names of the whole model.
        units: names of the stage's units.
    """

    def __init__(
        self, model: nn.Module, probe: Probe, cut: Cut, stage: int, changed: set[str], device: torch.device
    ) -> None:
        """
        Args:
            model: the whole model; what it holds for this stage is moved to the device and used, nothing is copied.
            probe: of the model.
            cut: into stages.
            stage: which one this is.
            changed: units whose outputs are changed in place by what comes behind them.
            device: of the stage.
        """
        super().__init__()
        self.units = cut.stages[stage]
        self._last = stage == len(cut.stages) - 1
        self._receives = cut.crossing[stage - 1] if stage else ()
        self._sends = () if self._last else cut.crossing[stage]
        self._changed, self._device = frozenset(changed), device
        self._now: _Now | None = None
        self._zeros: dict[tuple[tuple[int, ...], torch.dtype], Tensor] = {}
        earlier = cut.before(stage)
        known = set(probe.units)

        def replace(name: str, module: nn.Module) -> nn.Module | None:
            if name in self.units:
                return on_device(module, device)
            if name not in known:
                return None
            return _Elsewhere(name, probe.twin.get_submodule(name), self, earlier=name in earlier)

        self.model = skeleton(model, replace)
        for name in probe.loose:
            self._place(name, mine=name in cut.loose[stage])
        for name, buffer in list(self.model.named_buffers(remove_duplicate=False)):
            if not inside(name, probe.units) and not buffer.is_meta:
                owner, _, last = name.rpartition(".")
                self.model.get_submodule(owner)._buffers[last] = buffer.to(device)
        for name in self._sends:
            if name in self.units:
                self.model.get_submodule(name).register_forward_hook(partial(self._keep, name))

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile each layer, in place. What this module does around them differs from micro-batch to micro-batch, and
        would be compiled again and again."""
        for unit in self.units:
            module = self.model.get_submodule(unit)
            for number, hook in module._forward_hooks.items():
                if isinstance(hook, partial) and hook.func == self._keep:
                    module._forward_hooks[number] = torch.compiler.disable(hook)
            module.compile(*args, **kwargs)

    def begin(self, plan: Plan) -> None:
        """The next forward is that of a micro-batch with these shapes."""
        received = sum(len(plan.returned[unit].metas) for unit in self._receives)
        self._now = _Now(plan, received)

    def forward(self, *values: Any, **kwargs: Any) -> Any:
        """What the stage sends, as a tuple of tensors; the model's own output on the last stage."""
        now = self._now
        assert now is not None
        self._unpack(now, values[: now.received])
        output: Any = None
        try:
            output = self.model(*values[now.received :], **kwargs)
        except _Done:
            pass
        finally:
            self._now = None
        return output if self._last else self._to_send(now)

    def _unpack(self, now: _Now, tensors: tuple[Tensor, ...]) -> None:
        following = iter(tensors)
        for unit in self._receives:
            now.outputs[unit] = now.plan.returned[unit].filled(following)

    def _to_send(self, now: _Now) -> tuple[Tensor, ...]:
        missing = [unit for unit in self._sends if unit not in now.outputs]
        if missing:
            raise InvalidModel(
                f"{missing[0]} was not called, and the next stage needs what it returns.",
                "A pipeline passes through the same modules for every micro-batch.",
            )
        return tuple(tensor for unit in self._sends for tensor in tensors_of(now.outputs[unit]))

    def _earlier(self, name: str) -> Any:
        """What a unit of an earlier stage returned, or zeros of its shape."""
        now = self._now
        if now is None:  # recomputed by a checkpoint around more than a unit
            raise InvalidModel(
                f"{name} lies in another stage and inside of what is recomputed in backward.",
                "Checkpoint modules of one stage.",
            )
        if name in now.outputs:
            received = now.outputs[name]
            return tree_map(_cloned, received) if name in self._changed else received
        returned = now.plan.returned[name]
        return returned.filled(self._nothing(meta.shape, meta.dtype) for meta in returned.metas)

    def _nothing(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Zeros that nothing depends on; one for each shape, however often it is asked for."""
        key = (shape, dtype)
        if key not in self._zeros:
            if len(self._zeros) > _MOST_ZEROS:
                self._zeros.clear()
            self._zeros[key] = torch.zeros(shape, dtype=dtype, device=self._device)
        return self._zeros[key]

    def _keep(self, name: str, _module: nn.Module, _args: Any, output: Any) -> None:
        if self._now is not None:  # not when it is recomputed in backward
            self._now.outputs[name] = tree_map(_cloned, output) if name in self._changed else output

    def _place(self, name: str, *, mine: bool) -> None:
        """A parameter outside of units: moved to the device, or a stand-in."""
        owner, _, last = name.rpartition(".")
        module = self.model.get_submodule(owner)
        parameter = module._parameters[last]
        assert parameter is not None
        if not mine:
            stand_in(self.model, name, torch.zeros((), dtype=parameter.dtype, device=self._device).expand_as(parameter))
        elif not parameter.is_meta:
            parameter.data = parameter.data.to(self._device)


_MOST_ZEROS = 32


def _cloned(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
