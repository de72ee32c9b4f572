"""What a pipeline is put through, each against one process: run on every rank of a group, whatever the schedule.

A situation takes how to make a pipeline (`Made`) and returns the largest difference from one process: of gradients
over the largest gradient, of the loss over itself, of outputs over the largest.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from microbatch.batch.pieces import Pieces
from microbatch.pipeline.execution.pipeline import Pipeline, seed_of
from microbatch.training.step import TrainStep
from tests.pipeline.execution.jobs import (
    GATED,
    OUTSIDE,
    POINTS,
    SENTENCES,
    TERMS,
    TIED,
    TURNED,
    Job,
    chain,
    points,
    reference,
    sentences,
)

Difference = float
SAME = object()


@dataclass(frozen=True)
class Made:
    """How a situation makes its pipeline.

    Attributes:
        schedule: a name or an order.
        options: further arguments of `Pipeline`.
        dtype: of the model.
    """

    schedule: Any
    options: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64

    def pipe(self, job: Job, model: nn.Module | None = None, batch: Any = None, **options: Any) -> Pipeline:
        built = job.model(self.dtype, **job.keywords) if model is None else model
        example = job.example(cast(job.batch() if batch is None else batch, self.dtype))
        return Pipeline(built, example, schedule=self.schedule, **{**self.options, **options})


def cast(batch: Any, dtype: torch.dtype) -> Any:
    """The batch with its floating-point members in a dtype."""
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in batch.items()}


def full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def gradients(pipe: nn.Module) -> dict[str, Tensor]:
    return {name: full(p.grad) for name, p in pipe.named_parameters() if p.grad is not None}


def gap(exact: Mapping[str, Tensor], found: Mapping[str, Tensor], names: Iterable[str] | None = None) -> Difference:
    """Largest difference over the largest value; missing ones are zeros. Over all ranks."""
    scale = max(float(value.abs().max()) for value in exact.values()) or 1.0
    chosen = [name for name in (found if names is None else names) if name in exact]
    off = max((float((exact[name] - found.get(name, torch.zeros_like(exact[name]))).abs().max()) for name in chosen),
              default=0.0)  # fmt: skip
    return over_ranks(off / scale)


def over_ranks(value: float) -> float:
    told = torch.tensor([value if value == value else torch.inf], dtype=torch.float64)
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    return float(told)


def missing(pipe: Pipeline, exact: Mapping[str, Tensor]) -> list[str]:
    """Names of this rank's parameters that should have a gradient."""
    return [name for name, parameter in pipe.named_parameters() if name in exact and parameter.requires_grad]


def gradient_gap(pipe: Pipeline, exact: Mapping[str, Any]) -> Difference:
    wanted = {name: value for name, value in exact.items() if isinstance(value, Tensor)}
    return gap(wanted, gradients(pipe), missing(pipe, wanted))


def weight_gap(pipe: Pipeline, model: nn.Module) -> Difference:
    exact = {name: value.detach() for name, value in model.named_parameters()}
    return gap(exact, {name: full(value) for name, value in pipe.named_parameters()})


def sgd(lr: float = 0.1) -> Any:
    return partial(torch.optim.SGD, lr=lr)


def stepped(
    made: Made,
    job: Job,
    *,
    batch: Any = None,
    given: Any = SAME,
    number: Any = None,
    max_norm: float | None = None,
    prepare: Callable[[nn.Module], None] | None = None,
    **options: Any,
) -> Difference:
    """Gradients of `accumulate`, then loss, norm and weights of a whole step.

    Args:
        batch: of one process; by default the job's.
        given: what this rank is given; by default the batch.
        number: of micro-batches.
        prepare: changes the model first, on both sides.
    """  # fmt: skip
    whole = cast(job.batch() if batch is None else batch, made.dtype)
    one, other = job.model(made.dtype, **job.keywords), job.model(made.dtype, **job.keywords)
    for model in (one, other):
        (prepare or (lambda _: None))(model)
    pipe = made.pipe(job, other, whole)
    step = TrainStep(pipe, sgd(), job.loss, forward=job.forward, num_micro_batches=number, max_norm=max_norm, **options)
    mine = whole if given is SAME else given
    step.accumulate(mine)
    exact = reference(copy.deepcopy(one), job, whole)
    scale = 1.0 if step.scaler is None else step.scaler.get_scale()
    worst = gradient_gap(pipe, {name: scale * value for name, value in exact.items()})
    pipe.zero_grad()
    result = step(mine)
    expected = reference(one, job, whole, max_norm)
    loss = over_ranks(abs(result.loss - expected["loss"]) / abs(expected["loss"]))
    return max(worst, loss, weight_gap(pipe, one))


def even(made: Made) -> Difference:
    return stepped(made, POINTS, batch=points(16), number=4)


def uneven(made: Made) -> Difference:
    """13 items in 4 micro-batches."""
    return stepped(made, POINTS, number=4)


def fewer(made: Made) -> Difference:
    """3 items where 8 micro-batches were asked for."""
    return stepped(made, POINTS, batch=points(3), number=8)


def single(made: Made) -> Difference:
    return stepped(made, POINTS, number=1)


def unequal_tokens(made: Made) -> Difference:
    """Padding masks on all stages, rows without targets, a parameter outside of all layers, outputs in a dict."""
    return stepped(made, SENTENCES, number=5)


def pre_split(made: Made) -> Difference:
    """Pieces of the loader's own, of different sizes and lengths, each with its mask."""
    whole = sentences()
    edges = [0, 1, 6, 8, 13]
    pieces = []
    for first, last in pairwise(edges):
        part = {name: value[first:last] for name, value in whole.items()}
        longest = int(part["attention_mask"].sum(1).max())
        pieces.append({name: value[:, :longest] for name, value in part.items()})
    return stepped(made, SENTENCES, batch=whole, given=Pieces(pieces))


def changing(made: Made) -> Difference:
    """Batches of other sizes and lengths one after the other, and back."""
    model = SENTENCES.model(made.dtype)
    pipe = made.pipe(SENTENCES)
    step = TrainStep(pipe, sgd(), SENTENCES.loss, forward=SENTENCES.forward, num_micro_batches=3)
    worst = 0.0
    for items, longest in ((13, 7), (4, 5), (7, 3), (13, 7)):
        batch = sentences(items, seed=items, longest=longest)
        result = step(batch)
        expected = reference(model, SENTENCES, batch)
        worst = max(worst, over_ranks(abs(result.loss - expected["loss"])), weight_gap(pipe, model))
    return worst


def dict_target(made: Made) -> Difference:
    """Two terms of different weights, of which no one weight fits both."""
    return stepped(made, TERMS, number=4)


def tied(made: Made) -> Difference:
    return stepped(made, TIED, number=4, max_norm=0.05)


def freeze(names: Callable[[str], bool], model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not names(name))


def frozen_first(made: Made) -> Difference:
    """No stage but the last ones trains."""
    prepare = partial(freeze, lambda name: not name.startswith(("norm", "head")))
    return stepped(made, SENTENCES, number=4, prepare=prepare)


def frozen_last(made: Made) -> Difference:
    prepare = partial(freeze, lambda name: name.startswith(("blocks.3", "blocks.5", "head")))
    return stepped(made, SENTENCES, number=4, prepare=prepare)


def frozen_later(made: Made) -> Difference:
    """What is trained changes between two steps."""
    model = SENTENCES.model(made.dtype)
    pipe = made.pipe(SENTENCES)
    step = TrainStep(pipe, sgd(), SENTENCES.loss, forward=SENTENCES.forward, num_micro_batches=3)
    worst = 0.0
    for names in ("blocks.0", "embed"):
        for one in (pipe, model):
            freeze(lambda name, prefix=names: not name.startswith(prefix), one)  # type: ignore[misc]
        step(sentences())
        reference(model, SENTENCES, sentences())
        worst = max(worst, weight_gap(pipe, model))
    return worst


def several_cross(made: Made) -> Difference:
    """The stream lives outside of the layers."""
    return stepped(made, OUTSIDE, number=4)


def two_results(made: Made) -> Difference:
    """Layers return views, and beside them values that depend on their weights only."""
    return stepped(made, GATED, number=4)


def views(made: Made) -> Difference:
    """Layers return views, whose backward can be split."""
    return stepped(made, TURNED, number=4)


def dropout(made: Made) -> Difference:
    """The same masks as one process that seeds each stage and micro-batch alike; in checkpointed layers too."""
    model, batch = chain(made.dtype, 0.3), cast(points(), made.dtype)
    pipe = made.pipe(POINTS, chain(made.dtype, 0.3))
    step = TrainStep(pipe, sgd(), POINTS.loss, forward=POINTS.forward, num_micro_batches=4)
    state = torch.get_rng_state()
    step.accumulate(batch)
    seed = step._ranks.seed  # type: ignore[attr-defined]
    whole: Any = 0.0
    for index, (piece, y) in enumerate(zip(batch["x"].split(4), batch["y"].split(4))):
        x = piece
        for stage, units in enumerate(pipe.stage_names):
            torch.manual_seed(seed_of(seed, stage, index))
            for unit in units:
                x = model.get_submodule(unit)(x.clone())
        whole = whole + POINTS.loss(x, {"y": y})[0] / len(batch["y"])
    whole.backward()
    torch.set_rng_state(state)
    return gradient_gap(pipe, {name: p.grad for name, p in model.named_parameters()})


def checkpointed(made: Made) -> Difference:
    """Activations of half of the layers are recomputed."""

    def prepare(model: nn.Module) -> None:
        for block in model.blocks[::2]:  # type: ignore[index]
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)

    return stepped(made, SENTENCES, number=4, prepare=prepare)


def accumulated(made: Made) -> Difference:
    """Gradients of two batches of different weights, added up by the user."""
    model, batches = SENTENCES.model(made.dtype), [sentences(7, seed=2), sentences(11, seed=3)]
    pipe = made.pipe(SENTENCES)
    step = TrainStep(pipe, sgd(), SENTENCES.loss, forward=SENTENCES.forward, num_micro_batches=4)
    found: dict[str, Tensor] = {}
    exact: dict[str, Tensor] = {}
    for batch in batches:
        step.accumulate(batch)
        for name, value in gradients(pipe).items():
            found[name] = found.get(name, torch.zeros_like(value)) + value
        for name, value in reference(copy.deepcopy(model), SENTENCES, batch).items():
            if isinstance(value, Tensor):
                exact[name] = exact.get(name, torch.zeros_like(value)) + value
    return gap(exact, found, missing(pipe, exact))


def evaluated(made: Made) -> Difference:
    """Forward only between steps, with other batch sizes and without targets: the unsplit model's outputs."""
    model = SENTENCES.model(made.dtype)
    pipe = made.pipe(SENTENCES)
    step = TrainStep(pipe, sgd(), SENTENCES.loss, forward=SENTENCES.forward, num_micro_batches=4)
    worst = 0.0
    for items in (1, 7, 64):
        batch = sentences(items, seed=items)
        inputs = {name: batch[name] for name in ("tokens", "attention_mask")}
        found = pipe.eval()(inputs)["scores"]
        expected = model.eval()(**inputs)["scores"].detach()
        worst = max(worst, gap({"scores": expected}, {"scores": found}))
        pipe.train(), model.train()
        step(sentences())
        reference(model, SENTENCES, sentences())
    return max(worst, weight_gap(pipe, model))


def clipped(made: Made) -> Difference:
    return stepped(made, SENTENCES, number=4, max_norm=0.05)


def scaled(made: Made) -> Difference:
    """Loss scaling; then a gradient that is not finite on one stage makes all of them skip."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    return stepped(made, POINTS, number=4, max_norm=0.1, scaler=scaler)


def one_rank_has_it(made: Made) -> Difference:
    """Only the first rank reads the data."""
    return stepped(made, POINTS, number=4, given=points(dtype=made.dtype) if dist.get_rank() == 0 else None)


SITUATIONS: dict[str, Callable[[Made], Difference]] = {
    one.__name__: one
    for one in (
        even, uneven, fewer, single, unequal_tokens, pre_split, changing, dict_target, tied, frozen_first, frozen_last,
        frozen_later, several_cross, two_results, dropout, checkpointed, accumulated,
        evaluated, clipped, scaled, one_rank_has_it, views,
    )
}  # fmt: skip
