"""Schedules and situations that a group of ranks goes through; run by `tests/training/ranks.py`."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from microbatch.errors import MicrobatchError
from microbatch.pipeline.execution.pipeline import Pipeline
from microbatch.pipeline.schedule import Schedule
from microbatch.pipeline.schedules import SCHEDULES
from microbatch.training.step import TrainStep
from tests.pipeline.execution.jobs import MLPS, POINTS, SENTENCES, Job, Mlp, by_token, points, reference, sentences
from tests.pipeline.execution.situations import SITUATIONS, Made, gap, gradient_gap, sgd, weight_gap

EXECUTABLE = [name for name in SCHEDULES if name not in ("dualpipe", "chimera", "forward_only")]
EVERY = 5
"""Of the whole table, one cell in so many is run by the tests; `benchmarks/pipeline_exactness.py` runs all."""


def cells(part: int = 1) -> Iterator[tuple[str, str]]:
    """Schedules beside situations, so that each schedule meets others; every cell where ``part`` is 1."""
    for row, schedule in enumerate(EXECUTABLE):
        for column, situation in enumerate(SITUATIONS):
            if (row + column) % part == 0:
                yield schedule, situation


def exactness() -> Iterator[tuple[str, Any]]:
    """In float64."""
    for schedule, situation in cells(EVERY * dist.get_world_size() // 2):
        yield f"{schedule} {situation}", SITUATIONS[situation](Made(schedule))


def narrow() -> Iterator[tuple[str, Any]]:
    """In float32."""
    for index, schedule in enumerate(EXECUTABLE):
        situation = list(SITUATIONS)[(5 * index) % len(SITUATIONS)]
        yield f"{schedule} {situation}", SITUATIONS[situation](Made(schedule, dtype=torch.float32))


def own_orders() -> Iterator[tuple[str, Any]]:
    """An order of the user's own, with its micro-batches in another order on the last stage; and stages by name."""
    own = Schedule.of("interleaved", ranks=dist.get_world_size(), num_micro_batches=5)
    yield "own even", SITUATIONS["uneven"](Made(own, {"num_micro_batches": 5}))
    if dist.get_world_size() == 2:
        yield "backwards", SITUATIONS["unequal_tokens"](Made(_backwards()))
        yield "names", SITUATIONS["unequal_tokens"](Made("one_f_one_b", {"stages": ["blocks.4"]}))
        yield "auto", SITUATIONS["unequal_tokens"](Made("auto"))


def _backwards() -> Schedule:
    """The last stage takes the last micro-batch first."""
    from microbatch.pipeline.action_text import parse_schedule

    forward, back = ",".join(f"0F{i}" for i in range(5)), ",".join(f"0B{i}" for i in range(5))
    other = ",".join([*(f"1F{i}" for i in reversed(range(5))), *(f"1B{i}" for i in range(5))])
    return parse_schedule(f"{forward},{back}\n{other}\n")


def meshes() -> Iterator[tuple[str, Any]]:
    """2 × 2: replicas added up by the step, and stages sharded by FSDP2."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    for schedule in ("one_f_one_b", "zb_h1", "interleaved", "zb_v", "dualpipe_v"):
        for sharded in (False, True):
            yield f"{schedule} {'sharded' if sharded else 'replicas'}", _on_mesh(mesh, schedule, sharded=sharded)


def tensor_meshes() -> Iterator[tuple[str, Any]]:
    """2 × 2: the layers of each stage shared out over two ranks, which work on the same batch."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    for schedule in ("one_f_one_b", "zb_h1", "interleaved", "zb_v", "dualpipe_v"):
        yield schedule, _on_tensor_mesh(mesh, schedule)


def _on_tensor_mesh(mesh: Any, schedule: str) -> dict[str, float]:
    model, whole = MLPS.model(), points()
    pipe = Made(schedule, {"mesh": mesh}).pipe(MLPS)
    for stage in pipe.stages:
        for unit in stage.part.units:
            layer = stage.part.model.get_submodule(unit)
            if isinstance(layer, Mlp):
                parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    step = TrainStep(pipe, sgd(), MLPS.loss, forward=MLPS.forward, num_micro_batches=4, max_norm=0.05)
    result = step(whole)
    expected = reference(model, MLPS, whole, 0.05)
    return {"weights": weight_gap(pipe, model), "loss": abs(result.loss - expected["loss"])}


def compiled() -> Iterator[tuple[str, Any]]:
    """Layers that are compiled, at batches of some sizes: exact, and compiled a few times only."""
    for schedule in ("one_f_one_b", "interleaved"):
        model, pipe = SENTENCES.model(), Made(schedule).pipe(SENTENCES)
        counters.clear()
        pipe.compile(backend="aot_eager")
        step = TrainStep(pipe, sgd(), SENTENCES.loss, forward=SENTENCES.forward, num_micro_batches=4)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # dynamo's own, about gradients that it looks at
            for items in (13, 5):
                step(sentences(items))
                reference(model, SENTENCES, sentences(items))
        yield schedule, {"weights": weight_gap(pipe, model), "graphs": counters["stats"]["unique_graphs"]}


def _on_mesh(mesh: Any, schedule: str, *, sharded: bool) -> dict[str, float]:
    model, whole = SENTENCES.model(), sentences()
    pipe = Made(schedule, {"mesh": mesh}).pipe(SENTENCES)
    if sharded:
        for stage in pipe.stages:
            for unit in stage.part.units:
                fully_shard(stage.part.model.get_submodule(unit), mesh=mesh["dp"])
            fully_shard(stage.module, mesh=mesh["dp"])
    edges = (0, 9, 13)
    first, last = edges[pipe.layout.replica : pipe.layout.replica + 2]
    mine = {name: value[first:last] for name, value in whole.items()}
    step = TrainStep(pipe, sgd(), SENTENCES.loss, forward=SENTENCES.forward, num_micro_batches=4, max_norm=0.05)
    result = step(mine)
    expected = reference(model, SENTENCES, whole, 0.05)
    return {"weights": weight_gap(pipe, model), "loss": abs(result.loss - expected["loss"])}


def refused() -> Iterator[tuple[str, Any]]:
    """What would be wrong is refused on every rank, and the next step works."""
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    pipe = Made("zb_h1").pipe(POINTS)
    for stage in pipe.stages:
        stage.module = DistributedDataParallel(stage.part, process_group=group)
    yield "ddp", _said(lambda: _step(pipe)(points()))
    pipe = Made("zb_h1").pipe(POINTS)
    for stage in pipe.stages:
        stage.module.compile(backend="eager")
    yield "compiled", _said(lambda: _step(pipe)(points()))
    pipe = Made("one_f_one_b").pipe(POINTS)
    yield "different", _said(lambda: _step(pipe)(points(seed=dist.get_rank())))
    yield "after", gradient_gap_of(pipe)
    yield "stages", _said(lambda: Made("one_f_one_b", {"stages": 5}).pipe(POINTS))
    yield "too many", _said(lambda: Pipeline(nn.Linear(2, 2), torch.zeros(1, 2), schedule="one_f_one_b"))
    yield "name", _said(lambda: Made("gpipe", {"stages": ["layer.1"]}).pipe(SENTENCES))
    yield "simulated", _said(lambda: Made("dualpipe").pipe(POINTS))
    yield "joint", _said(lambda: TrainStep(pipe, sgd(), POINTS.loss, forward=POINTS.forward, joint="outputs"))


def gradient_gap_of(pipe: Pipeline) -> float:
    step = _step(pipe)
    step.accumulate(points())
    return gradient_gap(pipe, reference(POINTS.model(), POINTS, points()))


def _step(pipe: Pipeline) -> TrainStep:
    return TrainStep(pipe, sgd(), POINTS.loss, forward=POINTS.forward, num_micro_batches=4)


def _said(run: Any) -> dict[str, str]:
    try:
        run()
    except MicrobatchError as error:
        return {"type": type(error).__name__, "text": str(error)}
    return {"type": "none", "text": ""}


def proofs() -> Iterator[tuple[str, Any]]:
    """`check` names every stage; a layer that mixes rows is found."""
    for what in ("exact", "mixes"):
        model = SENTENCES.model()
        if what == "mixes":
            model.norm.register_forward_hook(lambda _, args, output: output * (1 + args[0].square().mean()))  # type: ignore[union-attr]
        pipe = Made("zb_v").pipe(SENTENCES, model)
        step = TrainStep(pipe, sgd(), SENTENCES.loss, forward=SENTENCES.forward, num_micro_batches=4)
        report = step.check(sentences())
        yield what, {"exact": report.exact, "off": report.largest_difference, "notes": list(report.notes)}


class Slow(nn.Module):
    """A layer that takes some time for each call, and some for each item."""

    def __init__(self, call: float, item: float) -> None:
        super().__init__()
        self.call, self.item = call, item
        self.layers = nn.Sequential(nn.Linear(8, 512), nn.Tanh(), nn.Linear(512, 8))

    def forward(self, values: Tensor) -> Tensor:
        time.sleep(self.call + self.item * len(values))
        result: Tensor = self.layers(values)
        return result


WEIGHTS = 2 * 4 * (8 * 512 + 512 + 512 * 8 + 8)
"""Bytes of the weights of a `Slow` and their gradients."""
KEPT = 4 * (512 + 8)
"""Bytes that a `Slow` in the first stage keeps of an item: what is behind the tanh, and what is sent."""
LIMIT = int((WEIGHTS + 2 * 10 * KEPT) / 0.95)
"""Bytes that two micro-batches of eight items fit in, and of sixteen do not."""


def chosen() -> Iterator[tuple[str, Any]]:
    """The number of micro-batches is found out at the first batch: as costs and memory say, the same on all ranks."""
    yield "each call costs", _chosen(Slow(0.015, 0.0), 8)
    yield "each item costs", _chosen(Slow(0.0, 0.02), 8)
    free = _chosen(Slow(0.0, 0.0), 64)
    yield "free", free
    yield "limited", _chosen(Slow(0.015, 0.0), 64, memory_limit=LIMIT)
    yield "nothing fits", _said(lambda: _chosen(Slow(0.0, 0.0), 64, memory_limit=1000))
    job, whole = SENTENCES, sentences()
    model, pipe = job.model(), Made("zb_v").pipe(job)
    step = TrainStep(pipe, sgd(), job.loss, forward=job.forward, max_norm=0.05)
    mine = whole if dist.get_rank() == 0 else None
    results = [step(mine), step(mine)]
    for _ in results:
        reference(model, job, whole, 0.05)
    assert step.choice is not None
    numbers = [step.choice.num_micro_batches, *(result.num_micro_batches for result in results)]
    yield "one rank has it", {"weights": weight_gap(pipe, model), "numbers": numbers}


def _chosen(layer: Slow, items: int, memory_limit: int | None = None) -> dict[str, Any]:
    torch.manual_seed(0)
    layers = [copy.deepcopy(layer) for _ in range(dist.get_world_size())]
    batch = torch.randn(items, 8)
    pipe = Pipeline(nn.Sequential(*layers), batch, schedule="one_f_one_b")
    step = TrainStep(pipe, sgd(), lambda output, batch: (output.square().sum(), len(batch)), memory_limit=memory_limit)
    before = {name: value.detach().clone() for name, value in pipe.named_parameters()}
    step.accumulate(batch)
    choice = step.choice
    assert choice is not None
    return {
        "number": choice.num_micro_batches, "reason": choice.reason,
        "tried": [[one.micro_batch_size, one.seconds, one.peak_bytes] for one in choice.probes],
        "same": all(torch.equal(before[name], value) for name, value in pipe.named_parameters()),
    }  # fmt: skip


def hugging_face() -> Iterator[tuple[str, Any]]:
    """Decoders as transformers has them: their own masks, positions and scaled embeddings on every stage."""
    for name, schedule in (("llama", "zb_v"), ("gemma2", "interleaved"), ("gpt2", "one_f_one_b"), ("qwen3", "zb_h1")):
        yield name, _of_hugging_face(name, schedule)


def _of_hugging_face(name: str, schedule: str) -> float:
    from tests.pipeline.execution.hugging_face import decoder_of, of_decoder, texts

    whole = texts()
    model, exact = decoder_of(name), decoder_of(name)
    inputs = {"input_ids": whole["tokens"], "attention_mask": whole["attention_mask"], "use_cache": False}
    pipe = Pipeline(model, inputs, schedule=schedule)
    job = Job(decoder_of, texts, by_token, of_decoder, lambda _: inputs)
    step = TrainStep(pipe, sgd(), by_token, forward=of_decoder, num_micro_batches=4, max_norm=0.05)
    found = pipe.eval()(inputs)["logits"]
    expected = exact.eval()(**inputs)["logits"].detach()
    worst = gap({"logits": expected}, {"logits": found})
    pipe.train(), exact.train()
    step(whole)
    reference(exact, job, whole, 0.05)
    return max(worst, weight_gap(pipe, exact))
