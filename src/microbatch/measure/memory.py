"""Bytes: the peak of one call as measured and as predicted, the curve over batch sizes, and the budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity

from microbatch.curves.profile import MemoryCurve
from microbatch.errors import NoAnswer
from microbatch.measure.budget import memory_budget as memory_budget
from microbatch.measure.output import without_lines
from microbatch.measure.storages import LiveStorages, bytes_of
from microbatch.measure.timer import synchronize

MARGIN = 0.05
"""Share of the budget that is kept free: what the prediction may be off by."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Running:
    """A model built to run: its step, and what it keeps from call to call.

    Attributes:
        step: one call.
        model: its parameters and buffers count as weights, gradients and buffers.
        optimizer: None in inference.
        example: the tensors of the input.
    """

    step: Callable[[], object]
    model: nn.Module
    optimizer: Optimizer | None = None
    example: tuple[Tensor, ...] = ()

    def held(self) -> list[Tensor]:
        """Every tensor that is alive between calls."""
        parameters = list(self.model.parameters())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        return [*parameters, *self.model.buffers(), *gradients, *_state(self.optimizer), *self.example]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Predicted peak of one batch size.

    Attributes:
        batch_size: items.
        peak_bytes: most bytes alive at once.
        parts: bytes by what they hold at the peak of forward and backward: weights, gradients, optimizer, buffers,
            example, activations (the rest, temporaries included).
    """

    batch_size: int
    peak_bytes: int
    parts: dict[str, int]


def measure_peak_bytes(
    call: Callable[[], object], device: torch.device | str = "cpu", *, held: Iterable[Tensor] = ()
) -> int:
    """Most bytes alive at once during a call, `held` included.

    On a CPU: `held` plus the highest sum of the allocations and frees that torch's profiler records, which is exact
    for tensors and for scratch that goes through torch's allocator (not for what a library allocates by itself).
    On CUDA: the allocator's peak, where everything on the device counts.

    Args:
        call: the step; run it once before, so that what stays alive between calls exists.
        device: where it runs.
        held: the tensors that are alive before the call and belong to it (CPU only).
    """
    if torch.device(device).type == "cuda":
        return _cuda_peak(call, device)
    base = bytes_of(held)
    with (
        without_lines(2, "USDT:"),  # torch 2.13 announces its profiler on standard error
        torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler,
    ):
        result = call()
        del result
    return base + highest(_changes(profiler))


def highest(changes: Iterable[int]) -> int:
    """The highest running sum, at least 0: (4, 4, -4, 2) → 8."""
    level = top = 0
    for change in changes:
        level += change
        top = max(top, level)
    return top


class Predictor:
    """Peaks of steps without running them: the storages that are alive while the steps run on fake tensors.

    Fake tensors know shape, dtype and device and hold no values, so this costs neither memory nor arithmetic. Model
    and optimizer are made once; every size then takes one step, the first size two, since an optimizer's state
    appears at the end of the first step and stands beside the activations of the second.

    Attributes:
        mode: the mode that the fake tensors belong to.
    """

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._live = LiveStorages()
        self._warm = False

    def peak(self, build: Callable[[], Running], batch_size: int) -> Prediction:
        """The peak of one step.

        Args:
            build: gives the step on fake tensors; the same model and optimizer at every call.
            batch_size: noted in the result.

        Raises:
            NoAnswer: a layer whose kernels hold memory that no formula gives (on a CPU: LSTM, transposed and 3-d
                convolutions).
            Exception: whatever the model raises on fake tensors, as for control flow that depends on values.
        """
        with self.mode, self._live as live:
            running = build()
            _check_known(running.model)
            live.note(running.held())
            if not self._warm:
                running.step()
                self._warm = True
            live.peak = live.now  # what building took does not count
            running.step()
            if live.unknown:
                raise _unknown(", ".join(sorted(live.unknown)))
            return Prediction(batch_size=batch_size, peak_bytes=live.peak, parts=_parts(running, live.peak))


def memory_curve(
    predictions: Iterable[Prediction], *, limit: int, limit_source: str, margin: float = MARGIN
) -> MemoryCurve:
    """Fixed part and slope from predictions at two sizes or more.

    The peak over the batch is a maximum of straight lines (forward and backward, the optimizer's step), so it bends
    upwards only: the line through the two largest sizes is the one that matters for what fits.

    Raises:
        ValueError: fewer than two different sizes.
    """
    small, large = _two_largest(predictions)
    slope = (large.peak_bytes - small.peak_bytes) / (large.batch_size - small.batch_size)
    fixed = max(0, round(large.peak_bytes - slope * large.batch_size))
    room = limit * (1 - margin) - fixed
    return MemoryCurve(
        fixed_bytes=fixed,
        bytes_per_item=slope,
        limit_bytes=limit,
        limit_source=limit_source,
        margin=margin,
        predicted_largest=max(0, int(room // slope)) if slope > 0 else None,
        parts=large.parts,
    )


def _cuda_peak(call: Callable[[], object], device: torch.device | str) -> int:
    synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def _changes(profiler: torch.profiler.profile) -> list[int]:
    inner = profiler.profiler
    assert inner is not None and inner.kineto_results is not None
    events = [event for event in inner.kineto_results.events() if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]  # type: ignore[attr-defined]


def _parts(running: Running, peak: int) -> dict[str, int]:
    parameters = list(running.model.parameters())
    gradients = [parameter for parameter in parameters if parameter.requires_grad and running.optimizer is not None]
    parts = {
        "weights": bytes_of(parameters),
        "gradients": sum(parameter.numel() * parameter.element_size() for parameter in gradients),
        "optimizer": bytes_of(_state(running.optimizer)),
        "buffers": bytes_of(running.model.buffers()),
        "example": bytes_of(running.example),
    }
    return parts | {"activations": max(0, peak - sum(parts.values()))}


def _check_known(model: nn.Module) -> None:
    """An LSTM runs as one oneDNN operator on a CPU and as many small ones on fake tensors."""
    for name, module in model.named_modules():
        if isinstance(module, nn.LSTM) and any(weight.device.type == "cpu" for weight in module.parameters()):
            raise _unknown(f"{name or 'the model'} (LSTM)")


def _unknown(what: str) -> NoAnswer:
    return NoAnswer(f"The memory that {what} takes on a CPU cannot be predicted.", "Measure it at small sizes.")


def _state(optimizer: Optimizer | None) -> list[Tensor]:
    if optimizer is None:
        return []
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]


def _two_largest(predictions: Iterable[Prediction]) -> tuple[Prediction, Prediction]:
    by_size = {prediction.batch_size: prediction for prediction in predictions}
    if len(by_size) < 2:
        raise ValueError("A curve needs predictions at two batch sizes.")
    small, large = sorted(by_size)[-2:]
    return by_size[small], by_size[large]
