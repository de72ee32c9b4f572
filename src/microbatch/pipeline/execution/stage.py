"""One stage of a pipeline: what torch's runtime calls to compute, and to know what is sent and received.

torch's runtime (`torch.distributed.pipelining`) walks through the actions of a rank, posts sends and receives, waits
for what an action needs, and gathers and frees shards of FSDP2. Its own stages expect micro-batches of one shape; this
one has the shapes of each, so that pieces may differ, and starts backward from what the step's own loss returns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from microbatch.errors import InvalidModel
from microbatch.pipeline.execution import split_backward
from microbatch.pipeline.execution.calls import Call
from microbatch.pipeline.execution.layout import Layout
from microbatch.pipeline.execution.parts import Part
from microbatch.pipeline.execution.shapes import Meta, Plan
from microbatch.pipeline.placement import Placement
from microbatch.pipeline.schedule import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Action

Finish = Callable[[int, Any], Sequence[Tensor]]
"""``finish(micro_batch, output)`` on the last stage: the numbers that backward starts from; none for no gradient."""


@dataclass(frozen=True, slots=True)
class Run:
    """What the stages of a rank work on.

    Attributes:
        calls: of the model, one per micro-batch.
        plans: shapes of each.
        finish: see `Finish`.
        train: whether there is a backward.
        context: around each forward, as for autocast.
        seeds: of torch's generators at the forward of (stage, micro-batch); None leaves them alone.
    """

    calls: Sequence[Call]
    plans: Sequence[Plan]
    finish: Finish
    train: bool
    context: Callable[[], AbstractContextManager[object]]
    seeds: Callable[[int, int], int] | None = None


@dataclass(slots=True)
class _Graph:
    """What a forward left behind for its backward.

    Attributes:
        roots: what backward starts from.
        inputs: received tensors that need a gradient.
        gradients: of the roots; None on the last stage, where they are ones.
        groups: where the weight gradients go on; None where all is still to be done.
        whole_later: the whole backward is done with the weight gradients.
    """

    roots: list[Tensor]
    inputs: list[Tensor]
    gradients: list[Tensor] | None = None
    groups: split_backward.Groups | None = None
    whole_later: bool = False


@dataclass(slots=True)
class _Held:
    """Tensors of micro-batches that are on their way."""

    received: dict[int, list[Tensor]] = field(default_factory=dict)
    sent: dict[int, list[Tensor]] = field(default_factory=dict)
    arrived: dict[int, list[Tensor]] = field(default_factory=dict)
    returned: dict[int, list[Tensor]] = field(default_factory=dict)
    graphs: dict[int, _Graph] = field(default_factory=dict)


class Stage:
    """See the module.

    Attributes:
        index: of the stage.
        module: what runs; wrap, shard, checkpoint or compile it, or what is inside, before the first step.
        part: the part of the model inside of it.
        watch: called with (action, start, end) in seconds of `time.perf_counter` after each action; None for nobody.
    """

    def __init__(self, part: Part, index: int, placement: Placement, layout: Layout) -> None:
        self.index, self.part, self.layout = index, part, layout
        self.module: nn.Module = part
        self.watch: Any = None
        self._placement = placement
        self._run: Run | None = None
        self._held = _Held()
        self._splits: dict[int, bool] = {}
        # What torch's runtime reads.
        self.stage_index, self.num_stages = index, len(placement)
        self.group, self.group_rank, self.group_size = layout.group, layout.rank, layout.ranks
        self.device = layout.device
        self.is_first, self.is_last = index == 0, index == len(placement) - 1
        self.stage_index_to_group_rank = dict(enumerate(placement))

    @property
    def submod(self) -> nn.Module:
        """Where torch's runtime looks for FSDP2."""
        return self.module

    @property
    def has_backward(self) -> bool:
        """Whether the present run has a backward."""
        return self.run.train

    @property
    def run(self) -> Run:
        """The present run."""
        assert self._run is not None
        return self._run

    def parameters(self) -> list[nn.Parameter]:
        """Of the stage that are trained."""
        return [parameter for parameter in self.part.parameters() if parameter.requires_grad]

    def begin(self, run: Run | None) -> None:
        """Work on this from now on; None: on nothing, and what was held is let go."""
        self._run, self._held = run, _Held()
        if isinstance(self.module, FSDPModule):
            _kept_whole(self.module)
        self._splits.clear()

    # --- messages

    def get_fwd_recv_ops(self, micro_batch: int) -> list[dist.P2POp]:
        """Room for what the stage before sends."""
        if self.is_first:
            return []
        room = [meta.empty(self.device) for meta in self._metas(micro_batch, self.index - 1)]
        self._held.received[micro_batch] = room
        return self._operations(dist.irecv, room, self.index - 1)

    def get_fwd_send_ops(self, micro_batch: int) -> list[dist.P2POp]:
        """What was made for the next stage."""
        return self._operations(dist.isend, self._held.sent.pop(micro_batch), self.index + 1)

    def get_bwd_recv_ops(self, micro_batch: int) -> list[dist.P2POp]:
        """Room for the gradients of what was sent."""
        room = [meta.empty(self.device) for meta in self._metas(micro_batch, self.index) if meta.requires_grad]
        self._held.arrived[micro_batch] = room
        return self._operations(dist.irecv, room, self.index + 1)

    def get_bwd_send_ops(self, micro_batch: int) -> list[dist.P2POp]:
        """Gradients of what was received."""
        return self._operations(dist.isend, self._held.returned.pop(micro_batch), self.index - 1)

    def set_local_fwd_input(self, _output: Any, micro_batch: int) -> None:
        """The stage before is on this rank: torch's runtime hands over what its forward returned."""
        self._held.received[micro_batch] = [tensor.detach() for tensor in _output]

    def get_local_bwd_output(self, micro_batch: int) -> list[Tensor]:
        """Gradients for the stage before, on this rank."""
        return self._held.returned.pop(micro_batch)

    def set_local_bwd_input(self, gradients: list[Tensor], micro_batch: int) -> None:
        """Gradients from the next stage, on this rank."""
        self._held.arrived[micro_batch] = list(gradients)

    def _metas(self, micro_batch: int, boundary: int) -> tuple[Meta, ...]:
        return self.run.plans[micro_batch].messages[boundary]

    def _operations(self, kind: Any, tensors: Sequence[Tensor], stage: int) -> list[dist.P2POp]:
        peer = self._placement[stage]
        return [dist.P2POp(kind, tensor, group=self.group, group_peer=peer) for tensor in tensors]

    # --- work

    def forward_one_chunk(self, micro_batch: int, _args: Any, _kwargs: Any, save_forward_output: bool = True) -> Any:  # noqa: ARG002
        """F. Returns what is sent on."""
        run = self.run
        received = self._held.received.pop(micro_batch, [])
        if run.train:
            for tensor, meta in zip(received, self._metas(micro_batch, self.index - 1) if received else ()):
                tensor.requires_grad_(meta.requires_grad)
        start = self._begins(FORWARD, micro_batch)
        if run.seeds is not None:
            torch.manual_seed(run.seeds(self.index, micro_batch))
        with torch.set_grad_enabled(run.train), run.context():
            output = self._called(received, run.calls[micro_batch], run.plans[micro_batch])
            roots = list(run.finish(micro_batch, output)) if self.is_last else self._checked(micro_batch, output)
        self._ends(FORWARD, micro_batch, start)
        if run.train:
            roots = [_owned(root) for root in roots]
            inputs = [tensor for tensor in received if tensor.requires_grad]
            self._held.graphs[micro_batch] = _Graph(roots, inputs)
        if self.is_last:
            return None
        made = [root.detach().contiguous() for root in roots]
        if self._placement[self.index + 1] != self.group_rank:  # else torch's runtime hands it over itself
            self._held.sent[micro_batch] = made
        return made

    def backward_one_chunk(
        self,
        micro_batch: int,
        loss: Any = None,  # noqa: ARG002
        full_backward: bool = True,
        last_backward: bool = False,  # noqa: ARG002
    ) -> None:
        """B, or I where ``full_backward`` is false."""
        graph = self._held.graphs[micro_batch]
        if not self.is_last:
            graph.gradients = self._aligned(graph.roots, micro_batch)
        kind = BACKWARD if full_backward else INPUT_GRADIENT
        start = self._begins(kind, micro_batch)
        self._without_reduction()
        if full_backward:
            del self._held.graphs[micro_batch]
            found = self._backward(graph)
        else:
            found = self._input_gradients(graph)
        self._ends(kind, micro_batch, start)
        if not self.is_first:
            metas = [meta for meta in self._metas(micro_batch, self.index - 1) if meta.requires_grad]
            self._held.returned[micro_batch] = [
                meta.zeros(self.device) if gradient is None else gradient.contiguous()
                for gradient, meta in zip(found, metas, strict=True)
            ]

    def backward_weight_one_chunk(self, micro_batch: int, last_backward: bool = False) -> None:  # noqa: ARG002
        """W."""
        graph = self._held.graphs.pop(micro_batch)
        start = self._begins(WEIGHT_GRADIENT, micro_batch)
        self._without_reduction()
        if graph.whole_later:
            self._backward(graph)
        elif graph.groups is not None:
            split_backward.weight_gradients(self.parameters(), graph.groups)
        self._ends(WEIGHT_GRADIENT, micro_batch, start)

    def perform_reduce_grad(self, _factor: int) -> None:
        """Behind the last weight gradient of a step: FSDP2 adds up the gradients of its shards.

        As torch's own stages do it: backward starts at the stage's outputs and not at a loss, so that FSDP2 does not
        notice when it ends.
        """
        module = self.module
        if not isinstance(module, FSDPModule):
            return
        module.set_is_last_backward(True)
        module.set_reshard_after_backward(True)
        module.set_requires_gradient_sync(True)
        state = fully_shard.state(module)  # type: ignore[attr-defined]
        for one in state._state_ctx.all_states:
            groups = getattr(one, "_fsdp_param_groups", None)
            for group in [one._fsdp_param_group] if groups is None else groups:
                if group is not None:
                    group.post_backward()
        state._root_post_backward_final_callback()

    def clear_runtime_states(self) -> None:
        """Nothing: `begin` lets go of everything."""

    def _called(self, received: list[Tensor], call: Call, plan: Plan) -> Any:
        self.part.begin(plan)
        if isinstance(self.module, DistributedDataParallel):
            with self.module.no_sync():
                return self.module(*received, *call.args, **call.kwargs)
        return self.module(*received, *call.args, **call.kwargs)

    def _checked(self, micro_batch: int, output: tuple[Tensor, ...]) -> list[Tensor]:
        """What is sent is what the next stage has made room for."""
        metas = self._metas(micro_batch, self.index)
        found = [(tuple(tensor.shape), tensor.dtype) for tensor in output]
        planned = [(meta.shape, meta.dtype) for meta in metas]
        if found != planned:
            raise InvalidModel(
                f"Stage {self.index} returns {found} for micro-batch {micro_batch}, and {planned} was expected.",
                "Shapes between stages must follow from the shapes of the input; cut at another layer.",
            )
        pairs = enumerate(zip(output, metas))
        lost = [place for place, (tensor, meta) in pairs if tensor.requires_grad and not meta.requires_grad]
        if lost and self.run.train:
            raise InvalidModel(
                f"Result {lost[0]} of stage {self.index} needs a gradient, and none was expected.",
                "Freeze and unfreeze parameters between steps, not within.",
            )
        return list(output)

    def _aligned(self, roots: list[Tensor], micro_batch: int) -> list[Tensor]:
        """The gradients that arrived, one for each root; roots without one in the plan have zeros."""
        arrived = iter(self._held.arrived.pop(micro_batch))
        metas = self._metas(micro_batch, self.index)
        return [next(arrived) if meta.requires_grad else torch.zeros_like(root) for root, meta in zip(roots, metas)]

    def _backward(self, graph: _Graph) -> list[Tensor | None]:
        places = [place for place, root in enumerate(graph.roots) if root.requires_grad]
        if places:
            gradients = None if graph.gradients is None else [graph.gradients[place] for place in places]
            torch.autograd.backward([graph.roots[place] for place in places], gradients)
        found = [tensor.grad for tensor in graph.inputs]
        for tensor in graph.inputs:
            tensor.grad = None
        return found

    def _input_gradients(self, graph: _Graph) -> list[Tensor | None]:
        needed = [place for place, root in enumerate(graph.roots) if root.requires_grad]
        roots = [graph.roots[place] for place in needed]
        if not roots:
            return [None] * len(graph.inputs)
        if not graph.inputs:
            graph.whole_later = True
            return []
        if not split_backward.splits(roots, graph.inputs, self.parameters()):
            return self._backward(graph)
        gradients = None if graph.gradients is None else [graph.gradients[place] for place in needed]
        found, graph.groups = split_backward.input_gradients(roots, gradients, graph.inputs, self.parameters())
        graph.roots, graph.inputs, graph.gradients = [], [], None
        return found

    def _without_reduction(self) -> None:
        """FSDP2 adds up once, at the end of the step."""
        if isinstance(self.module, FSDPModule):
            self.module.set_is_last_backward(False)
            self.module.set_reshard_after_backward(False)
            self.module.set_requires_gradient_sync(False)

    def _begins(self, kind: int, micro_batch: int) -> float:
        if self.watch is None:
            return 0.0
        if hasattr(self.watch, "begin"):
            self.watch.begin(Action(self.index, kind, micro_batch))
        return time.perf_counter()

    def _ends(self, kind: int, micro_batch: int, start: float) -> None:
        if self.watch is not None:
            self.watch(Action(self.index, kind, micro_batch), start, time.perf_counter())


def _kept_whole(module: nn.Module) -> None:
    """Layers stay gathered from forward to backward: the runtime gathers and frees the stage as a whole.

    A layer that is freed after its forward would have other parameters when its weight gradients are split off.
    """
    for inner in module.modules():
        if isinstance(inner, FSDPModule):
            inner.set_reshard_after_forward(False, recurse=False)


def _owned(root: Tensor) -> Tensor:
    """A root that can lose its graph: a view cannot, and is copied."""
    return root.clone() if root._is_view() and root.requires_grad else root
