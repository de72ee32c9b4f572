"""A run of the model without its units: what each returns, in which order they come, and what each depends on.

Units run on tensors without values (torch's fake tensors), the code between them on real ones, which are zeros where a
unit would have made them. So every rank knows the shapes of all messages, whoever holds the weights.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from microbatch.errors import InvalidModel
from microbatch.pipeline.execution.calls import Call
from microbatch.pipeline.execution.labels import Labels, Names
from microbatch.pipeline.execution.shapes import Returned
from microbatch.pipeline.execution.units import inside, joined, skeleton, unit_names

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Record:
    """What a run has shown.

    Attributes:
        returned: by unit, in the order of the calls.
        needs: units (and parameters outside of units) that the inputs of each unit depend on.
        at_end: what the model's output depends on.
        changed: units whose outputs are changed in place behind them.
        flops: of each unit's forward.
        seen: outputs of units, to notice changes in place.
    """

    returned: dict[str, Returned] = field(default_factory=dict)
    needs: dict[str, Names] = field(default_factory=dict)
    at_end: Names = frozenset()
    changed: set[str] = field(default_factory=set)
    flops: dict[str, float] = field(default_factory=dict)
    seen: list[tuple[str, Tensor, int]] = field(default_factory=list)


class StandIn(nn.Module):
    """In the place of a unit; attributes that it lacks are those of the unit."""

    def __init__(self, name: str, like: nn.Module) -> None:
        super().__init__()
        self.__dict__["_name"], self.__dict__["_like"] = name, like

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_like"], name)


class _Probed(StandIn):
    def __init__(self, name: str, like: nn.Module, probe: Probe) -> None:
        super().__init__(name, like)
        self.__dict__["_probe"] = probe

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_probe"]._unit(self.__dict__["_name"], args, kwargs)

    forward = _call


class Probe:
    """A model without values.

    Attributes:
        units: names of the units, in the order of definition.
        loose: names of parameters outside of units.
        twin: the whole model with tensors that hold nothing.
        first_names: of each parameter's name the first that the same parameter has.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.units = unit_names(model)
        named = dict(model.named_parameters(remove_duplicate=False))
        self.loose = [name for name in named if not inside(name, self.units)]
        firsts: dict[nn.Parameter, str] = {}
        self.first_names = {name: firsts.setdefault(parameter, name) for name, parameter in named.items()}
        self._device = device
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.twin = self._faked(model)
        units = set(self.units)
        self._skeleton = skeleton(
            self.twin, lambda name, module: _Probed(name, module, self) if name in units else None
        )
        self._stand_ins: dict[str, Tensor] = {}
        for name in self.loose:
            stand_in(self._skeleton, name, self._loose(name, named[name]))
        for name, buffer in model.named_buffers(remove_duplicate=False):
            if not inside(name, self.units):
                owner, _, last = name.rpartition(".")
                real = torch.zeros_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
                self._skeleton.get_submodule(owner)._buffers[last] = real
        self._record = Record()
        self._labels: Labels | None = None

    def run(self, call: Call, *, follow: bool = False) -> Record:
        """What a call shows.

        Args:
            call: with real tensors.
            follow: also find out what depends on what.
        """
        self._record = Record()
        self._labels = Labels() if follow else None
        with torch.enable_grad(), _following(self._labels):
            if self._labels is not None:
                for name, tensor in self._stand_ins.items():
                    self._labels.mark(tensor, frozenset({name}))
            output = self._skeleton(*call.args, **call.kwargs)
            if self._labels is not None:
                self._record.at_end = self._labels.of(tree_leaves(output))
        self._note_changes()
        self._record.seen.clear()
        return self._record

    def returned(self, call: Call) -> Mapping[str, Returned]:
        """What each unit returns at a call."""
        return self.run(call).returned

    def train_only(self, trained: Mapping[str, bool]) -> None:
        """Which parameters are trained, by name."""
        named: list[tuple[str, Tensor]] = [
            *self.twin.named_parameters(remove_duplicate=False),
            *self._stand_ins.items(),
        ]
        for name, tensor in named:
            if name in trained:
                tensor.requires_grad_(trained[name])

    def whole(self, tensors: Mapping[str, Tensor]) -> nn.Module:
        """The whole model with these values, by name."""
        memo: dict[int, Any] = {}
        for name, held in [*self.twin.named_parameters(remove_duplicate=False),
                           *self.twin.named_buffers(remove_duplicate=False)]:  # fmt: skip
            value = tensors[name].detach()
            real = isinstance(held, nn.Parameter)
            memo[id(held)] = nn.Parameter(value, requires_grad=held.requires_grad) if real else value
        model: nn.Module = copy.deepcopy(self.twin, memo)
        return model

    def _faked(self, model: nn.Module) -> nn.Module:
        memo: dict[int, Any] = {}
        for tensor in [*model.parameters(), *model.buffers()]:
            fake = self._fake(tensor)
            memo[id(tensor)] = (
                nn.Parameter(fake, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
            )
        with no_dispatch():
            twin: nn.Module = copy.deepcopy(model, memo)
        return twin

    def _fake(self, tensor: Tensor) -> Tensor:
        with no_dispatch():
            meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        fake: Tensor = FakeTensor(self._mode, meta, self._device)
        return fake

    def _loose(self, name: str, parameter: nn.Parameter) -> Tensor:
        made = torch.zeros(parameter.shape, dtype=parameter.dtype, device=self._device)
        self._stand_ins[name] = made.requires_grad_(parameter.requires_grad)
        return self._stand_ins[name]

    def _unit(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        record = self._record
        if name in record.returned:
            raise InvalidModel(
                f"{name} is called more than once in one forward.", "A pipeline passes through each module once."
            )
        self._note_changes()
        if self._labels is not None:
            record.needs[name] = self._labels.of(tree_leaves((args, kwargs)))
        with _disable_current_modes():
            output = self._without_values(name, args, kwargs)
            record.returned[name] = output
            tensors = [self._zeros(meta) for meta in output.metas]
            if self._labels is not None:
                for tensor in tensors:
                    self._labels.mark(tensor, frozenset({name}))
            record.seen += [(name, tensor, tensor._version) for tensor in tensors]
            return output.filled(tensors)

    def _zeros(self, meta: Any) -> Tensor:
        zeros: Tensor = meta.zeros(self._device)
        return zeros.requires_grad_().clone() if meta.requires_grad else zeros

    def _without_values(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Returned:
        given: list[tuple[Tensor, Tensor]] = []

        def faked(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            fake = self._fake(leaf).requires_grad_(leaf.requires_grad)
            given.append((leaf, fake if not leaf.requires_grad else fake.clone()))
            return given[-1][1]

        module = self.twin.get_submodule(name)
        with self._mode:
            fakes, keywords = tree_map(faked, (args, kwargs))
            before = [fake._version for _, fake in given]
            try:
                output = module(*fakes, **keywords)
            except InvalidModel:
                raise
            except Exception as error:
                return self._like_its_input(name, module, [real for real, _ in given], error)
        if self._labels is not None:
            for (real, fake), version in zip(given, before, strict=True):
                if fake._version != version:
                    self._record.changed |= self._labels.of([real])
            self._record.flops[name] = self._flops(module, fakes, keywords)
        return Returned.of(output)

    def _flops(self, module: nn.Module, args: Any, kwargs: Any) -> float:
        """Of a forward; the counter's own hooks take no inputs that need gradients."""
        with torch.no_grad(), self._mode:
            args, kwargs = tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, (args, kwargs))
            with FlopCounterMode(display=False) as counter:
                module(*args, **kwargs)
        return float(counter.get_total_flops())

    def _like_its_input(self, name: str, module: nn.Module, given: Sequence[Tensor], error: Exception) -> Returned:
        """A unit whose work depends on values: one tensor like its first input is assumed, and checked when it runs."""
        if not given:
            raise InvalidModel(f"{name} does not run on tensors without values: {error}.", "Cut around it.") from error
        logger.info("%s does not run on tensors without values (%s); it is taken to keep shapes.", name, error)
        trained = any(parameter.requires_grad for parameter in module.parameters())
        like = self._fake(given[0])
        return Returned.of(like.requires_grad_((trained or given[0].requires_grad) and like.is_floating_point()))

    def _note_changes(self) -> None:
        """Outputs of units that the code behind them has changed in place."""
        self._record.changed |= {name for name, tensor, version in self._record.seen if tensor._version != version}


@contextmanager
def _following(labels: Labels | None) -> Iterator[None]:
    if labels is None:
        yield
        return
    with labels:
        yield


def stand_in(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Put a tensor that is no parameter in the place of one, in a skeleton."""
    owner, _, last = name.rpartition(".")
    module = model.get_submodule(owner)
    del module._parameters[last]
    module.__dict__[last] = tensor


def names_of(module: nn.Module, prefix: str) -> list[str]:
    """Full names of the parameters of a unit."""
    return [joined(prefix, name) for name, _ in module.named_parameters(remove_duplicate=False)]
