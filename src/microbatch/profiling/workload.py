"""One model made ready to run at any batch size, and left as it was afterwards."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensor, FakeTensorMode
from torch.optim import Adam, Optimizer

from microbatch.batch.example import Dimension, can_change, find_batch_size, map_tensors, tensors_in, with_batch_size
from microbatch.errors import InvalidModel, InvalidSettings
from microbatch.measure.dtypes import dtype_name, precision, torch_dtype
from microbatch.measure.memory import Prediction, Predictor, Running, measure_peak_bytes
from microbatch.measure.timer import Stopwatch, time_call
from microbatch.profiling.loss import Loss as Loss
from microbatch.profiling.loss import loss_of
from microbatch.profiling.optimizers import MakeOptimizer as MakeOptimizer
from microbatch.profiling.optimizers import add_weights_to_gradients, as_on_device, still, trainable, with_gradients
from microbatch.profiling.saved import keep_compiling, keep_model, keep_random

MODES = ("inference", "training", "prefill", "decode")
"""Prefill and decode run as inference does: what makes them so is the model and its example."""

TIMES_ADDED = 7
"""Readings of how long adding gradients takes, after one that warms up."""

ExampleAt = Callable[[int], tuple[tuple[object, ...], dict[str, object]]]
"""Makes (args, kwargs) of a batch size."""


class Workload:
    """A model, an example and a mode, as calls without arguments.

    Inference runs the user's own model under ``eval()`` and ``no_grad()``; another dtype or device, and training,
    run a copy. ``close()`` (or the end of a ``with``) puts flags, buffers, random state and switches back.

    Attributes:
        model: the module that runs.
        device: where it runs.
        dtype: our spelling of the dtype of its floating-point weights, as in ``"fp32"``.
        batch_size: items in the example as given.
        structure: fingerprint of the model, see `structure_of`.
    """

    def __init__(
        self,
        model: nn.Module,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
        *,
        mode: str = "inference",
        device: torch.device | str = "cpu",
        dtype: str | None = None,
        compile: bool = False,  # noqa: A002 - torch's own word
        loss: Loss | None = None,
        optimizer: MakeOptimizer | None = None,
        batch_dimension: Dimension = None,
        example_at: ExampleAt | None = None,
    ) -> None:
        """
        Args:
            model: any module.
            args, kwargs: an example input of any batch size.
            mode: ``"inference"``, ``"prefill"``, ``"decode"``: one forward; ``"training"``: forward, backward,
                optimizer step, gradients freed.
            device: torch's name of a device.
            dtype: fp64, fp32, tf32 (CUDA only), fp16 or bf16; by default as the model is.
            compile: run through ``torch.compile``, one graph per batch size (``dynamic=False``), since a graph for
                all sizes hides what each size costs at its best.
            loss: ``loss(output, batch) -> (sum, weight)`` or a dict of such pairs; `batch` is the single argument,
                the tuple of arguments, or the dict of keyword arguments (both: a pair). By default the sum of the
                squares of every floating-point output, over the batch size: unlike those of a plain sum its
                gradients are dense, as a real loss's are.
            optimizer: makes one from parameters; Adam by default. Its learning rate is set close to zero.
            batch_dimension: see `microbatch.batch.example.find_batch_size`.
            example_at: makes the input of each size; by default the rows of the example are repeated.

        Raises:
            InvalidSettings: an unknown mode or dtype, or options that only training has.
            InvalidModel: an example without one clear batch, or a model that cannot be copied.
        """
        _check_settings(mode, dtype, torch.device(device), loss, optimizer)
        self.mode, self.device = mode, torch.device(device)
        self._args, self._kwargs, self._dimension = args, dict(kwargs or {}), batch_dimension
        self._example_at = example_at
        self.batch_size = find_batch_size(self._args, self._kwargs, dimension=batch_dimension)
        self.structure = structure_of(model)
        self._loss, self._make_optimizer = loss, optimizer or Adam
        self._dtype = torch_dtype(dtype) if dtype else None
        self._undo = ExitStack()
        self._undo.enter_context(keep_random())
        self._undo.enter_context(precision(dtype))
        self.model = self._own_model(model)
        self.dtype = dtype or _dtype_of(self.model)
        self._set_mode()
        self._optimizer = still(self._make_optimizer(trainable(self.model))) if self.trains else None
        self._update_watch = Stopwatch(self.device)
        self._predictor: Predictor | None = None
        self._fake: tuple[nn.Module, Optimizer | None] | None = None
        self._compiling = self._undo.enter_context(keep_compiling()) if compile else None
        self._forward: Callable[..., Any] = torch.compile(self.model, dynamic=False) if compile else self.model

    def prepare(self, batch_size: int) -> Callable[[], object]:
        """A call that does one step at that batch size; the example is built now, nothing else is done yet.

        The call returns the model's output (inference) or the loss (training). What the model raises passes through.

        Raises:
            InvalidModel: while running, when training finds no floating-point output that depends on a parameter.
        """
        return self._running(batch_size).step

    def _running(self, batch_size: int) -> Running:
        if self._optimizer is not None:  # a step that failed may have left gradients behind
            self._optimizer.zero_grad(set_to_none=True)
        args, kwargs = self.example(batch_size)
        step = self._step(self._forward, self._optimizer, args, kwargs, batch_size)
        example = tuple(tensors_in((args, kwargs)))
        return Running(step=step, model=self.model, optimizer=self._optimizer, example=example)

    def _fake_running(self, batch_size: int, beside_gradients: bool = False) -> Running:
        assert self._predictor is not None
        mode = self._predictor.mode
        if self._fake is None:
            self._fake = self._fake_model(mode)
        model, optimizer = self._fake
        args, kwargs = map_tensors(*self.example(batch_size), lambda _, tensor: _as_fake(mode, tensor))
        step = self._step(model, optimizer, args, kwargs, batch_size)
        if beside_gradients:
            step = with_gradients(trainable(model), step)
        return Running(step=step, model=model, optimizer=optimizer, example=tuple(tensors_in((args, kwargs))))

    def _fake_model(self, mode: FakeTensorMode) -> tuple[nn.Module, Optimizer | None]:
        with FakeCopyMode(mode):
            model = copy.deepcopy(self.model)
        if not self.trains:
            return model, None
        optimizer = still(self._make_optimizer(trainable(model)))
        if self.device.type == "cuda":
            as_on_device(optimizer)
        return model, optimizer

    def example(self, batch_size: int) -> tuple[tuple[object, ...], dict[str, object]]:
        """The example as (args, kwargs) of that batch size, where the model is and in its dtype."""
        if self._example_at is not None:
            args, kwargs = self._example_at(batch_size)
        else:
            args, kwargs = with_batch_size(self._args, self._kwargs, batch_size, dimension=self._dimension)
        return map_tensors(args, kwargs, self._placed)

    def measure_peak_bytes(self, batch_size: int) -> int:
        """Most bytes alive at once in a step of that size, weights, example and optimizer state included.

        Runs the step twice: what the first call creates must stand when the second is measured.
        """
        running = self._running(batch_size)
        running.step()
        return measure_peak_bytes(running.step, self.device, held=running.held())

    @property
    def update_seconds(self) -> float | None:
        """Seconds of the optimizer's update in the last training step that ran; None where there was none."""
        return self._update_watch.seconds if self.trains else None

    def time_adding(self, batch_size: int) -> tuple[float, ...]:
        """Seconds in which one more piece's gradients are added to those of the pieces before it, several readings.

        The weights are added in their place: as many bytes, and no memory for a second set of gradients.
        """
        args, kwargs = self.example(batch_size)
        loss_of(self._loss, self._forward(*args, **kwargs), args, kwargs, batch_size).backward()
        call = partial(add_weights_to_gradients, list(self.model.parameters()))
        found = [time_call(call, self.device) for _ in range(1 + TIMES_ADDED)]
        self.model.zero_grad(set_to_none=True)
        return tuple(found[1:])

    def predict_peak(self, batch_size: int, *, beside_gradients: bool = False) -> Prediction:
        """The same without running it, see `microbatch.measure.memory.Predictor`; the model is not compiled.

        Args:
            batch_size: items.
            beside_gradients: the training step begins beside the gradients of earlier pieces.

        Raises:
            Exception: whatever the model raises on fake tensors, as for control flow that depends on values.
        """
        if self._predictor is None:
            self._predictor, self._fake = Predictor(), None
        try:
            return self._predictor.peak(lambda: self._fake_running(batch_size, beside_gradients), batch_size)
        except Exception:
            self._predictor = None  # it was left in the middle of a step
            raise

    @property
    def trains(self) -> bool:
        """Whether a call is a training step."""
        return self.mode == "training"

    @property
    def repeats_rows(self) -> bool:
        """Whether batches larger than the example hold its rows again and again."""
        return self._example_at is None

    @property
    def compile_count(self) -> int | None:
        """Graphs compiled so far; None without ``compile=True``."""
        return self._compiling.count() if self._compiling else None

    @property
    def compile_seconds(self) -> float | None:
        """Seconds spent compiling so far; None without ``compile=True``."""
        return self._compiling.seconds() if self._compiling else None

    def close(self) -> None:
        """Put everything back as it was; the workload cannot run afterwards."""
        self._undo.close()

    def __enter__(self) -> Workload:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _own_model(self, model: nn.Module) -> nn.Module:
        if self.trains or not self._is_placed(model):
            return _copied(model).to(device=self.device, dtype=self._dtype)
        self._undo.enter_context(keep_model(model))
        return model

    def _is_placed(self, model: nn.Module) -> bool:
        tensors = [*model.parameters(), *model.buffers()]
        return all(self._placed("", tensor) is tensor for tensor in tensors)

    def _placed(self, _: str, tensor: Tensor) -> Tensor:
        dtype = self._dtype if tensor.is_floating_point() else None
        with torch.no_grad():
            moved = tensor.to(device=self.device, dtype=dtype)
        return moved if moved is tensor else moved.requires_grad_(tensor.requires_grad)

    def _set_mode(self) -> None:
        if not self.trains:
            self.model.eval()
        elif not self.model.training:  # a model in training mode may hold frozen parts in eval mode: left alone
            self.model.train()

    def _step(
        self,
        forward: Callable[..., Any],
        optimizer: Optimizer | None,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        batch_size: int,
    ) -> Callable[[], object]:
        renew = can_change((args, *kwargs.values()))

        def infer() -> object:
            # not inference_mode: tensors that a module caches in it could never be trained with afterwards
            with torch.no_grad():
                return forward(*args, **kwargs)

        def infer_renewed() -> object:
            new_args, new_kwargs = map_tensors(args, kwargs, _same)
            with torch.no_grad():
                return forward(*new_args, **new_kwargs)

        def train() -> object:
            new_args, new_kwargs = map_tensors(args, kwargs, _same) if renew else (args, kwargs)
            output = forward(*new_args, **new_kwargs)
            loss = loss_of(self._loss, output, new_args, new_kwargs, batch_size)
            loss.backward()
            assert optimizer is not None
            self._update_watch.start()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            self._update_watch.stop()
            return loss.detach()

        if optimizer is not None:
            return train
        return infer_renewed if renew else infer


def structure_of(model: nn.Module) -> str:
    """SHA-256 over module names, classes and the shapes of parameters and buffers; the same for every dtype."""
    digest = hashlib.sha256()
    for name, module in model.named_modules():
        digest.update(f"{name}:{type(module).__qualname__}\n".encode())
        for kind, tensors in (("p", module.named_parameters), ("b", module.named_buffers)):
            for key, tensor in tensors(recurse=False):
                digest.update(f" {kind} {key} {tuple(tensor.shape)}\n".encode())
    return digest.hexdigest()


def _as_fake(mode: FakeTensorMode, tensor: Tensor) -> Tensor:
    return tensor if isinstance(tensor, FakeTensor) else mode.from_tensor(tensor)


def _check_settings(
    mode: str, dtype: str | None, device: torch.device, loss: Loss | None, optimizer: MakeOptimizer | None
) -> None:
    if mode not in MODES:
        raise InvalidSettings(f"There is no mode {mode!r}.", f"Use one of {', '.join(MODES)}.")
    if mode != "training" and (loss is not None or optimizer is not None):
        raise InvalidSettings(
            f"{mode.capitalize()} has no loss and no optimizer.", "Leave them out, or use mode='training'."
        )
    if isinstance(optimizer, Optimizer):
        raise InvalidSettings(
            "The optimizer is bound to the model's own parameters, which profiling must not train.",
            "Give a function that makes one, as in optimizer=lambda p: torch.optim.SGD(p, momentum=0.9).",
        )
    if dtype == "tf32" and device.type != "cuda":
        raise InvalidSettings(f"There is no tf32 on {device.type}.", "Use fp32 or bf16.")


def _copied(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise InvalidModel(
            f"The model cannot be copied ({error}), and it must not be changed.",
            "Make it work with copy.deepcopy.",
        ) from error


def _dtype_of(model: nn.Module) -> str:
    tensors = [*model.parameters(), *model.buffers()]
    return next((dtype_name(tensor.dtype) for tensor in tensors if tensor.is_floating_point()), "fp32")


def _same(_: str, tensor: Tensor) -> Tensor:
    return tensor
