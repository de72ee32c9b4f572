"""Some steps of a pipeline on this machine, as `microbatch pipeline` runs them: what each of its ranks does."""

from __future__ import annotations

import inspect
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from microbatch.batch.different_rows import example_batch
from microbatch.batch.exactness import TOLERANCE, Culprit, ExactnessReport, relative_difference
from microbatch.batch.example import find_batch_size, tensors_in
from microbatch.batch.running import call
from microbatch.errors import InvalidModel
from microbatch.models.load import load_model
from microbatch.models.modes import in_mode
from microbatch.pipeline.execution.measuring import timeline_of
from microbatch.pipeline.execution.pipeline import Pipeline
from microbatch.pipeline.run_report import PipelineRun, RankMemory
from microbatch.pipeline.timeline import Timeline
from microbatch.training.step import TrainStep

ITEMS = 2
"""In each micro-batch where nothing is asked for."""
_NAMES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What to run.

    Attributes:
        model: MODEL as the user wrote it.
        mode: training or inference.
        schedule: a name, ``auto``, or a CSV.
        chunks: stages on each rank; None for what the schedule is known for.
        num_micro_batches: None to choose.
        batch_size: items of a step; None for `ITEMS` in each micro-batch.
        sequence: tokens of each item; None for the model's own.
        dtype: None for the model's own.
        steps: that are measured, after a first one.
        seed: of weights and inputs.
        check: compare with one process.
    """

    model: str
    mode: str = "training"
    schedule: str = "auto"
    chunks: int | None = None
    num_micro_batches: int | None = None
    batch_size: int | None = None
    sequence: int | None = None
    dtype: str | None = None
    steps: int = 5
    seed: int = 0
    check: bool = False


def run_pipeline(wanted: Wanted) -> PipelineRun:
    """Load, cut, run and measure. Every rank of the default process group calls it and returns the same."""
    torch.manual_seed(wanted.seed)  # all ranks have the same weights and inputs
    loaded = in_mode(load_model(wanted.model, dtype=wanted.dtype), wanted.mode, wanted.sequence)
    count = wanted.num_micro_batches or 4 * dist.get_world_size()
    args, kwargs = example_batch(loaded, wanted.batch_size or ITEMS * count)
    batch = _one_batch(loaded.model, args, kwargs)
    model = loaded.model.train(wanted.mode == "training")
    expected = _expected(model, batch) if wanted.check and wanted.mode == "inference" else None
    pipe = Pipeline(
        model, batch, schedule=wanted.schedule, chunks=wanted.chunks,
        num_micro_batches=wanted.num_micro_batches or "auto", device=_device(),
    )  # fmt: skip
    step: Any = pipe
    if wanted.mode == "training":
        step = TrainStep(pipe, torch.optim.AdamW, _loss(loaded.loss))
    exact = None
    if wanted.check:
        exact = step.check(batch) if expected is None else _compared(expected, pipe(batch), _dtype_of(model))
    seconds, timelines = _timed(pipe, lambda: step(batch), wanted.steps)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (seconds, _memory(pipe, step)))
    notes = list(loaded.notes)
    if isinstance(step, TrainStep) and step.choice is not None:
        notes.append(f"{step.choice.num_micro_batches} micro-batches: {step.choice.reason}.")
    longest = [max(times) for times in zip(*(times for times, _ in every))]
    middle = longest[1:].index(statistics.median_low(longest[1:]))
    return PipelineRun(
        model=wanted.model, mode=wanted.mode, batch_size=find_batch_size(args, kwargs), layers=tuple(pipe.stage_names),
        timeline=timelines[1 + middle], step_seconds=tuple(longest[1:]), first_step_seconds=longest[0],
        memory=tuple(memory for _, memory in every), device=str(pipe.device), exact=exact, notes=tuple(notes),
    )  # fmt: skip


def _one_batch(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The example in the form that a step takes: named where anything is."""
    if not kwargs:
        return args[0] if len(args) == 1 else args
    if not args:
        return kwargs
    names = [name for name in inspect.signature(model.forward).parameters if name not in kwargs]
    return dict(zip(names, args)) | kwargs


def _loss(given: Callable[..., Any] | None) -> Callable[[Any, Any], Any]:
    """The model's own, or the sum of the squares of its outputs."""
    return _squares if given is None else given


def _squares(output: Any, _batch: Any) -> tuple[Tensor, int]:
    found = [tensor for tensor in tensors_in(output) if tensor.is_floating_point() and tensor.requires_grad]
    if not found:
        raise InvalidModel("No output of the model depends on a parameter that is trained.", "Give it a loss.")
    return torch.stack([tensor.float().square().sum() for tensor in found]).sum(), len(found[0])


def _timed(pipe: Pipeline, run: Callable[[], object], steps: int) -> tuple[list[float], list[Timeline]]:
    """Seconds and timeline of a first step and the others."""
    seconds, timelines = [], []
    for _ in range(steps + 1):
        dist.barrier()
        began = time.perf_counter()
        run()
        if pipe.device.type == "cuda":
            torch.cuda.synchronize(pipe.device)
        seconds.append(time.perf_counter() - began)
        timelines.append(timeline_of(pipe))
    return seconds, timelines


def _memory(pipe: Pipeline, step: Any) -> RankMemory:
    parameters = list(pipe.parameters())
    held: int = sum(parameter.nbytes for parameter in parameters)
    if isinstance(step, TrainStep):
        held += sum(parameter.nbytes for parameter in pipe.parameters() if parameter.requires_grad)
        state: Any = step.optimizer
        held += sum(tensor.nbytes for tensor in tensors_in(list(state.state.values())))
    if pipe.device.type == "cuda":
        return RankMemory(state=held, peak=torch.cuda.max_memory_allocated(pipe.device))
    return RankMemory(state=held, peak=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def _expected(model: nn.Module, batch: Any) -> list[Tensor]:
    with torch.no_grad():
        return tensors_in(call(model, batch))


def _compared(expected: list[Tensor], output: Any, dtype: torch.dtype) -> ExactnessReport:
    """Outputs of the pipeline against those of the whole model in one process."""
    found = tensors_in(output)
    gaps = [relative_difference(one, other.cpu()) for one, other in zip(expected, found, strict=True)]
    worst, name = max(gaps, default=0.0), _NAMES.get(dtype, "fp32")
    culprit = Culprit(
        module="", kind="mixing", difference=worst, mode="inference", evidence="the outputs differ",
        remedy="microbatch check names the module that makes a row's result depend on the other rows.",
    )  # fmt: skip
    exact = worst <= TOLERANCE[name]
    return ExactnessReport(
        exact=exact, largest_difference=worst, culprits=() if exact else (culprit,), modes=("inference",), dtype=name,
        tolerance=TOLERANCE[name],
    )  # fmt: skip


def _dtype_of(model: nn.Module) -> torch.dtype:
    return next((parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()), torch.float32)


def _device() -> torch.device | None:
    """A device of its own for each rank where there are enough; None for the CPU."""
    if "nccl" not in str(dist.get_backend_config()):
        return None
    return torch.device("cuda", torch.cuda.current_device())
