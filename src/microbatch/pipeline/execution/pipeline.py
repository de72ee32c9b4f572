"""A model in stages on several processes: cut, ordered, and run on torch's runtime."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from microbatch.batch.running import device_of, is_compiled
from microbatch.batch.split import batch_size_of, split
from microbatch.curves.profile import Profile
from microbatch.errors import InvalidBatch, InvalidModel, InvalidSettings
from microbatch.pipeline.execution import failures, tied
from microbatch.pipeline.execution.calls import Call, call_of
from microbatch.pipeline.execution.cutting import cut, divide, modelled_costs, tied_parameters
from microbatch.pipeline.execution.layout import introduce, layout_of
from microbatch.pipeline.execution.ordering import ordering_of
from microbatch.pipeline.execution.parts import Part
from microbatch.pipeline.execution.probe import Probe
from microbatch.pipeline.execution.runtime import Runtime, forwards, lowered
from microbatch.pipeline.execution.shapes import Plan, Shapes
from microbatch.pipeline.execution.sharing import fingerprint, from_rank, joined, source_of
from microbatch.pipeline.execution.stage import Finish, Run, Stage
from microbatch.pipeline.layer_costs import layer_costs
from microbatch.pipeline.partition import LayerCost, Partition
from microbatch.pipeline.placement import Placement, stages_of
from microbatch.pipeline.schedule import INPUT_GRADIENT, Schedule
from microbatch.sizes import BatchSizes
from microbatch.units import format_number

logger = logging.getLogger(__name__)

Context = Callable[[], AbstractContextManager[object]]

_WRAPPERS = re.compile(r"\b(_checkpoint_wrapped_module|_orig_mod)\b\.?|\.(_checkpoint_wrapped_module|_orig_mod)$")
"""What wrappers of checkpointing and compilation put into names."""


@dataclass(frozen=True, slots=True)
class Ran:
    """The last run of a pipeline.

    Attributes:
        schedule: its order.
        plans: shapes of each micro-batch.
        train: whether it had a backward.
    """

    schedule: Schedule
    plans: tuple[Plan, ...]
    train: bool

    @property
    def sent_bytes(self) -> tuple[int, ...]:
        """Over each boundary, forward, in the whole run."""
        boundaries = range(len(self.plans[0].messages)) if self.plans else range(0)
        return tuple(sum(meta.nbytes for plan in self.plans for meta in plan.messages[b]) for b in boundaries)


class Pipeline(nn.Module):
    """This rank's stages of a model, with the messages to the others.

    Every rank makes it from the same model, and calls it and steps with it together with the others. Parameters and
    state have the names that they have in the whole model; this rank has those of its stages.

    Attributes:
        stages: of this rank.
        stage_names: the layers of each stage, over all ranks.
        partition: how they were divided, and what each is thought to cost.
        ordering: the schedule for any number of micro-batches.
        layout: the processes.
        shapes: of messages, by the signature of a call.
        num_micro_batches: of a batch, or ``"auto"``.
        memory_limit: bytes of each rank; None for what there is.
        watch: called after each action, see `Stage`; None for nobody.
        last: the last run.
    """

    is_pipeline = True

    def __init__(
        self,
        model: nn.Module,
        example: Any,
        *,
        stages: int | Sequence[str] | None = None,
        schedule: str | Path | Schedule = "auto",
        chunks: int | None = None,
        num_micro_batches: int | str = "auto",
        mesh: Any = None,
        group: Any = None,
        costs: Sequence[LayerCost] | Profile | None = None,
        device: torch.device | str | None = None,
        memory_limit: int | None = None,
    ) -> None:
        """
        Args:
            model: whole, the same on every rank, possibly on the meta device; its layers of this rank are used, not
                copied.
            example: what it is called with: a mapping as keywords, a tuple as arguments, else as it is.
            stages: their number over all ranks, balanced by cost; or the name of the first layer of each but the
                first, as in ``["layers.8"]``; by default what the schedule needs.
            schedule: a name, an order of your own (`Schedule` or the path of a CSV), or ``"auto"``.
            chunks: stages on each rank; follows from ``stages``.
            num_micro_batches: of a batch, never more than there are items; ``"auto"`` is found out at the first batch
                of a step, and four for each rank in inference.
            mesh: a DeviceMesh with an axis ``pp``; others hold replicas, whose gradients a step adds up.
            group: the ranks of the pipeline, without a mesh; by default all.
            costs: of the layers, or a profile of the model that has them; else modelled by FLOPs and bytes.
            device: of this rank's stages; by default where the model is.
            memory_limit: bytes of each rank, for the division into stages and the number of micro-batches.

        Raises:
            InvalidModel: no layers to cut between, or fewer than stages.
            InvalidSchedule: see `microbatch.pipeline.execution.ordering.ordering_of`.
            InvalidSettings: no process group, a mesh without an axis of stages, or a layer that is not there.
        """
        super().__init__()
        self.layout = layout_of(mesh, group, _device(model, device))
        self.ordering = ordering_of(schedule, self.layout.ranks, stages, chunks)
        self.num_micro_batches = _checked_number(num_micro_batches)
        self.memory_limit = memory_limit
        self._probe = Probe(model, self.device)
        record = self._probe.run(self._placed(call_of(example)), follow=True)
        if len(record.returned) < self.ordering.stages:
            raise InvalidModel(
                f"The model has {len(record.returned)} layers to cut between ({', '.join(record.returned)}), and "
                f"{self.ordering.stages} stages are wanted.",
                "Take fewer stages, or a model with numbered blocks such as layers.0.",
            )
        names = None if stages is None or isinstance(stages, int) else list(stages)
        self.partition: Partition = divide(
            _costs(costs, model, list(record.returned), record), self.placement, names, memory_limit
        )
        uncalled = [unit for unit in self._probe.units if unit not in record.returned]
        self._cut = cut(record, self.partition.stages, uncalled, self._probe.loose)
        self.stage_names = self._cut.stages
        self.shapes = Shapes(self._probe.returned, self._cut.crossing)
        mine = stages_of(self.placement, self.layout.rank)
        parts = [Part(model, self._probe, self._cut, stage, record.changed, self.device) for stage in mine]
        self.parts = nn.ModuleList(parts)
        self.stages = [Stage(part, stage, self.placement, self.layout) for part, stage in zip(parts, mine)]
        self.watch: Any = None
        self.last: Ran | None = None
        self._runtimes: dict[tuple[bool, int], Runtime] = {}
        self._trained: dict[str, bool] = {}
        self._forwards: dict[int, Schedule] = {}
        introduce(self.layout, self.placement)
        self.tied = tied.tie(tied_parameters(model, self._cut), self.placement, self.layout)
        tied.same_values(self.tied, self.parameter)

    @property
    def device(self) -> torch.device:
        """Of this rank's stages."""
        return self.layout.device

    @property
    def group(self) -> Any:
        """The process group of the pipeline; None for all processes."""
        return self.layout.group

    @property
    def rank(self) -> int:
        """Place of this process in the pipeline."""
        return self.layout.rank

    @property
    def ranks(self) -> int:
        """Processes in the pipeline."""
        return self.layout.ranks

    @property
    def placement(self) -> Placement:
        """The rank of each stage."""
        return self.ordering.placement

    @property
    def holds_last(self) -> bool:
        """Whether outputs are made here."""
        return self.placement[-1] == self.rank

    def schedule_of(self, count: int) -> Schedule:
        """The order of a step with so many micro-batches."""
        return self.ordering.of(count)

    def forward_schedule_of(self, count: int) -> Schedule:
        """The order of inference with so many micro-batches."""
        if count not in self._forwards:
            self._forwards[count] = forwards(self.placement, count)
        return self._forwards[count]

    def parameter(self, name: str) -> nn.Parameter:
        """A parameter of this rank by its name in the whole model."""
        return dict(self.named_parameters(remove_duplicate=False))[name]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output, on every rank of the pipeline: as ``pipe(batch)``, or called as the model is.

        A rank that gives None gets the batch of another.
        """
        one = len(args) == 1 and not kwargs
        call = None if one and args[0] is None else call_of(args[0]) if one else Call(args, dict(**kwargs))
        return self.infer(call)

    def infer(self, call: Call | None, *, outputs: str = "everywhere", num_micro_batches: int | None = None) -> Any:
        """Forward only.

        Args:
            call: of the model; None where another rank has it.
            outputs: ``"everywhere"``, ``"last"`` for the rank of the last stage only (None on the others), or
                ``"nowhere"``.
            num_micro_batches: that the batch is cut into.

        Raises:
            InvalidBatch: no rank has a batch, two have different ones, or one that cannot be cut.
        """
        with failures.watched(self):
            return self._inferred(call, outputs, num_micro_batches)

    def _inferred(self, call: Call | None, outputs: str, num_micro_batches: int | None) -> Any:
        call = self._shared(call)
        items = batch_size_of(call.members)
        count = self.ordering.count_of(items, num_micro_batches or self.num_micro_batches)
        sizes = BatchSizes.of(global_batch_size=items, num_micro_batches=count)
        calls = [Call.of_members(piece) for piece in split(call.members, sizes.pieces)]
        found: dict[int, Any] = {}

        def finish(micro_batch: int, output: Any) -> Sequence[Tensor]:
            if outputs != "nowhere":
                found[micro_batch] = output
            return ()

        self.run(calls, finish, train=False)
        output = joined([found[place] for place in range(count)]) if found else None
        return from_rank(output, self.placement[-1], self.layout) if outputs == "everywhere" else output

    def run(
        self,
        calls: Sequence[Call],
        finish: Finish,
        *,
        train: bool = True,
        context: Context = nullcontext,
        seed: int | None = None,
    ) -> None:
        """Forward, and backward where ``train`` says so, of all micro-batches, in the schedule's order.

        Every rank of the pipeline calls it. Gradients are added to what stands in ``.grad``; nothing is divided, and
        tied weights and replicas are not added up, see `reduce`.

        Args:
            calls: of the model, one per micro-batch, the same on every rank.
            finish: on the last stage, makes of each output what backward starts from.
            train: whether there is a backward.
            context: around each forward.
            seed: of what is random in each forward, see `seed_of`; None leaves torch's generators to go on.
        """
        schedule = self.schedule_of(len(calls)) if train else self.forward_schedule_of(len(calls))
        self._check_modules(schedule)
        plans = self.plans(calls, context)
        seeds = None if seed is None else lambda stage, micro_batch: seed_of(seed, stage, micro_batch)
        run = Run([self._placed(call) for call in calls], plans, finish, train, context, seeds)
        runtime = self._runtime(schedule, train)
        for stage in self.stages:
            stage.watch = self.watch
            stage.begin(run)
        try:
            with failures.shared(self), _random_state_kept(self.device, keep=seed is not None):
                runtime.go()
        except BaseException:
            self._runtimes.clear()  # a runtime that stopped half-way holds messages
            raise
        finally:
            for stage in self.stages:
                stage.begin(None)
        self.last = Ran(schedule, tuple(plans), train)

    def plans(self, calls: Sequence[Call], context: Context = nullcontext) -> list[Plan]:
        """Shapes of the messages of each call."""
        kind = self.device.type
        with context():
            cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
            return self.shapes.of([self._placed(call) for call in calls], cast)

    def reduce_tied(self) -> None:
        """Add up the gradients of weights that stand in stages of several ranks."""
        tied.add_up(self.tied, self.parameter)

    def first_name(self, name: str) -> str:
        """The first of the names that a parameter has in the whole model: another one where weights are tied."""
        return self._probe.first_names.get(name, name)

    def whole_names(self) -> set[str]:
        """Of all parameters and buffers that the whole model saves."""
        return set(self._probe.twin.state_dict())

    def parameters_of(self, stage: int) -> list[str]:
        """Names of the parameters of any stage."""
        return self._cut.parameters(self._probe.twin, stage)

    def trained(self) -> str:
        """Which parameters of this rank are trained, a mark for each."""
        named = dict(self.named_parameters(remove_duplicate=False))
        return "".join("1" if named[name].requires_grad else "0" for name in self._names_of(self.rank))

    def train_only(self, marks: Sequence[str]) -> None:
        """What `trained` says on each rank of the pipeline: gradients that nobody needs are then not sent."""
        trained = {}
        for rank, mark in enumerate(marks):
            trained.update(dict(zip(self._names_of(rank), (one == "1" for one in mark))))
        if trained != self._trained:
            self._trained = trained
            self._probe.train_only(trained)
            self.shapes.forget()

    def whole(self) -> nn.Module | None:
        """The whole model with the present values, on the CPU of the first rank; None on the others."""
        tensors = {name: _whole(tensor) for name, tensor in [*self.named_parameters(remove_duplicate=False),
                                                             *self.named_buffers(remove_duplicate=False)]}  # fmt: skip
        every: list[Any] = [None] * self.ranks if self.rank == 0 else []
        dist.gather_object(tensors, every or None, group=self.group, group_dst=0)
        if self.rank:
            return None
        return self._probe.whole({name: tensor for one in every for name, tensor in one.items()})

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Modules under the names that they have in the whole model."""
        yield prefix, self
        seen: set[nn.Module] = set() if memo is None else memo
        for part in self.parts:
            for name, module in part.model.named_modules(seen, prefix, remove_duplicate):  # type: ignore[union-attr]
                yield _WRAPPERS.sub("", name), module

    def state_dict(self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:  # type: ignore[override]
        """Of this rank's stages, under the names of the whole model."""
        found: dict[str, Any] = {} if destination is None else destination
        for part in self.parts:
            part.model.state_dict(destination=found, prefix=prefix, keep_vars=keep_vars)  # type: ignore[union-attr]
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """From the state of this rank's stages, or of the whole model."""
        missing: list[str] = []
        for part in self.parts:
            own = part.model.state_dict()  # type: ignore[union-attr]
            mine = {name: state_dict[name] for name in own if name in state_dict}
            missing += [name for name in own if name not in state_dict]
            part.model.load_state_dict(mine, strict=False, assign=assign)  # type: ignore[union-attr]
        if strict and missing:
            raise InvalidModel(f"The state has no {missing[0]}.", "Load the state of the same model.")
        return missing, []

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile each layer of this rank's stages, in place, as `torch.nn.Module.compile` does; for schedules with
        full backwards only."""
        for part in self.parts:
            part.compile(*args, **kwargs)

    def train(self, mode: bool = True) -> Pipeline:
        """As of any module; also of what stages were wrapped in."""
        super().train(mode)
        for stage in getattr(self, "stages", ()):
            stage.module.train(mode)
        return self

    def _names_of(self, rank: int) -> list[str]:
        names = (self._cut.parameters(self._probe.twin, stage) for stage in stages_of(self.placement, rank))
        return list(dict.fromkeys(name for some in names for name in some))

    def _placed(self, call: Call) -> Call:
        return call.changed(lambda tensor: tensor.to(self.device, non_blocking=True))

    def _runtime(self, schedule: Schedule, train: bool) -> Runtime:
        key = (train, schedule.num_micro_batches)
        if key not in self._runtimes:
            self._runtimes[key] = lowered(schedule, self.stages)
        return self._runtimes[key]

    def _shared(self, call: Call | None) -> Call:
        mine = None if call is None else fingerprint(call.members)
        prints: list[Any] = [None] * self.ranks
        dist.all_gather_object(prints, mine, group=self.group)
        if not any(one is not None for one in prints):
            raise InvalidBatch("No rank of the pipeline was given a batch.", "Give it on one rank at least.")
        source = source_of(prints)
        if source is None:
            assert call is not None
            return call
        return Call.of_members(from_rank(None if call is None else call.members, source, self.layout))

    def _check_modules(self, schedule: Schedule) -> None:
        """
        Raises:
            InvalidSettings: a wrapper that gives wrong gradients in this schedule.
        """
        splits = bool((schedule.kind == INPUT_GRADIENT).any())
        for stage in self.stages:
            modules = list(stage.module.modules())
            if splits and any(is_compiled(module) for module in modules):
                raise InvalidSettings(
                    f"{schedule.name} makes input and weight gradients apart, and a compiled backward makes both in "
                    "one.",
                    'Take one with full backwards ("one_f_one_b", "interleaved"), or leave torch.compile out.',
                )
            if splits and any(isinstance(module, DistributedDataParallel) for module in modules):
                raise InvalidSettings(
                    f"DistributedDataParallel does not see the weight gradients that {schedule.name} makes.",
                    "Give mesh= with an axis for replicas, whose gradients are added up once, or use fully_shard.",
                )
            sharded = any(isinstance(module, FSDPModule) for module in modules)
            if sharded and not isinstance(stage.module, FSDPModule):
                raise InvalidSettings(
                    f"Layers of stage {stage.index} are sharded, and the stage itself is not.",
                    "Call fully_shard on stage.module too, after its layers.",
                )


def seed_of(seed: int, stage: int, micro_batch: int) -> int:
    """The seed of torch's generators at one forward: the same in any order and on any rank."""
    return (seed * 1_000_003 + stage * 65_537 + micro_batch) % 2**63


def _device(model: nn.Module, device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    found = device_of(model)
    return torch.device("cpu") if found.type == "meta" else found


def _checked_number(number: int | str) -> int | str:
    if number == "auto" or (isinstance(number, int) and not isinstance(number, bool) and number > 0):
        return number
    shown = format_number(number) if isinstance(number, int) else repr(number)
    raise InvalidSettings(f"num_micro_batches is {shown}.", 'Give a whole number of 1 or more, or "auto".')


def _costs(
    given: Sequence[LayerCost] | Profile | None, model: nn.Module, units: list[str], record: Any
) -> list[LayerCost]:
    if given is None:
        return modelled_costs(model, record)
    costs = layer_costs(given, 1) if isinstance(given, Profile) else list(given)
    by_name = {cost.name: cost for cost in costs}
    missing = [unit for unit in units if unit not in by_name]
    if missing:
        raise InvalidSettings(
            f"The costs name no layer {missing[0]!r}.", f"Give one for each of {', '.join(units[:12])}."
        )
    return [by_name[unit] for unit in units]


def _whole(tensor: Tensor) -> Tensor:
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().cpu().clone()


def _random_state_kept(device: torch.device, *, keep: bool) -> AbstractContextManager[object]:
    """torch's generators are as before afterwards."""
    if device.type == "cpu":
        return torch.random.fork_rng([], enabled=keep)
    return torch.random.fork_rng([device], enabled=keep, device_type=device.type)
