"""What a prediction needs of a model: its operators, and where it can be run on fake tensors, its memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from microbatch.batch.example import tensors_in, with_batch_size
from microbatch.capture.work import capture_work
from microbatch.curves.profile import MemoryCurve
from microbatch.errors import InvalidModel
from microbatch.hardware.device_spec import DeviceSpec
from microbatch.measure.memory import memory_curve
from microbatch.measure.storages import bytes_of
from microbatch.models.load import load_model
from microbatch.models.loaded import EXAMPLE_BATCH, Loaded
from microbatch.models.modes import in_mode
from microbatch.profiling.optimizers import MakeOptimizer
from microbatch.profiling.predict_memory import limit_source
from microbatch.profiling.workload import Workload
from microbatch.roofline.footprint import MARGIN, fitted
from microbatch.work.operators import Work
from microbatch.work.polynomial import ZERO, Polynomial

logger = logging.getLogger(__name__)

PREDICTED_AT = (8, 64)
LARGEST_ON_FAKE_TENSORS = 2_000_000_000
"""Bytes of weights up to which a model is run on fake tensors for its memory; above, its operators have to tell."""

KEPT = ("weights", "gradients", "optimizer", "buffers")
"""Parts that do not grow with the batch."""

MAKERS: dict[str, MakeOptimizer] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "sgd-momentum": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
}
"""Optimizers that can be run on fake tensors; the memory of others follows from their rule."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """How a model is to be captured; see `microbatch.profiling.predict.predict`."""

    mode: str
    dtype: str | None
    sequence: int | None
    surface: bool
    name: str
    unit: str
    optimizer: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Captured:
    """A model's operators.

    Attributes:
        work: as functions of the batch, and of the sequence where the model has one.
        sequence: the length that was asked for, or the model's own; None where it has none.
        kv_heads: heads of keys and values; None where the model does not say.
        loaded: what runs.
        wanted: what was asked for.
    """

    work: Work
    sequence: int | None
    kv_heads: int | None
    loaded: Loaded
    wanted: Wanted

    def memory(self, spec: DeviceSpec, memory_limit: int | None) -> MemoryCurve | None:
        """The memory curve of the model run on fake tensors; None where it cannot be or is too large for that."""
        limit = memory_limit or spec.memory_bytes
        if limit is None or not _can_be_faked(self.loaded.model) or self.work.weight_bytes > LARGEST_ON_FAKE_TENSORS:
            return None
        try:
            found = self._on_fake_tensors(limit)
        except Exception as error:  # whatever a model does on fake tensors: then its operators have to tell
            logger.info("memory on fake tensors not found: %s", error)
            return None
        parts = {name: size for name, size in found.parts.items() if size and name in KEPT}
        return fitted(
            parts, found.bytes_per_item, limit=limit, limit_source=limit_source(spec, memory_limit), margin=MARGIN,
            fixed=found.fixed_bytes,
        )  # fmt: skip

    def _on_fake_tensors(self, limit: int) -> MemoryCurve:
        training = self.wanted.mode == "training"
        options: dict[str, Any] = (
            {"mode": "training", "loss": self.loaded.loss, "optimizer": MAKERS[self.wanted.optimizer]}
            if training
            else {"mode": "inference"}
        )
        with Workload(self.loaded.model, self.loaded.args, self.loaded.kwargs, **options) as workload:
            predictions = [workload.predict_peak(size) for size in PREDICTED_AT]
        return memory_curve(predictions, limit=limit, limit_source="")


def capture(model: str | Loaded | nn.Module, example: Any, wanted: Wanted) -> Captured:
    """The operators of a model in the mode and at the sequence that are asked for.

    Raises:
        InvalidModel: it cannot be loaded, has no example, or cannot be captured.
        InvalidSettings: a mode or sequence that it does not offer.
    """
    whole = _loaded(model, example, wanted)
    loaded = in_mode(whole, wanted.mode, wanted.sequence)
    sequence = wanted.sequence or loaded.default_sequence
    work = capture_work(
        loaded.model,
        _example_of(loaded),
        mode=wanted.mode,
        sequence=sequence,
        free_sequence=sequence is not None and (wanted.surface or wanted.mode == "decode"),
        dtype=wanted.dtype,
        name=wanted.name or loaded.name,
        unit=loaded.unit,
    )
    if wanted.mode in ("inference", "prefill") and sequence is not None:
        work = replace(work, cache_bytes=_filled_cache(whole, sequence))
    work = replace(work, warnings=(*loaded.notes, *work.warnings))
    return Captured(work=work, sequence=sequence, kv_heads=_kv_heads(loaded.model), loaded=loaded, wanted=wanted)


def _loaded(model: str | Loaded | nn.Module, example: Any, wanted: Wanted) -> Loaded:
    if isinstance(model, str):
        return load_model(model, dtype=wanted.dtype, weights="meta")
    if isinstance(model, Loaded):
        return model
    if example is None:
        raise InvalidModel("A module alone does not say what goes into it.", "Give an input as example=.")
    args, kwargs = ((), example) if isinstance(example, dict) else (_tuple(example), {})
    name = wanted.name or type(model).__name__
    return Loaded(name=name, model=model, args=args, kwargs=kwargs, unit=wanted.unit)


def _tuple(example: Any) -> tuple[object, ...]:
    return example if isinstance(example, tuple) else (example,)


def _filled_cache(loaded: Loaded, sequence: int) -> Polynomial:
    """Keys and values that a forward over `sequence` tokens leaves behind: those that decoding after it starts from.

    Two lengths are asked, so that windows count as far as they are filled at `sequence`.
    """
    if "decode" not in loaded.modes:
        return ZERO
    low, high = (_cache_bytes(loaded, length) for length in (max(1, sequence // 2), sequence))
    grows = sequence > 1 and abs(high - 2 * low) <= 0.02 * high
    return Polynomial({(1, 1): high / sequence}) if grows else Polynomial({(1, 0): high})


def _cache_bytes(loaded: Loaded, sequence: int) -> float:
    """Of one sequence: the floating-point tensors of three dimensions or more that a decode step is given."""
    step = in_mode(loaded, "decode", sequence)
    held = [t for t in tensors_in((step.args, *step.kwargs.values())) if t.dim() > 2 and t.is_floating_point()]
    return bytes_of(held) / EXAMPLE_BATCH


def _example_of(loaded: Loaded) -> Callable[[int, int | None], tuple[tuple[object, ...], dict[str, object]]]:
    if loaded.example_at is not None:
        return loaded.example_at
    return lambda batch, _: with_batch_size(loaded.args, loaded.kwargs, batch)


def _can_be_faked(model: nn.Module) -> bool:
    """Weights that lie on a device: fake tensors of meta tensors have no kernels to choose from."""
    return all(parameter.device.type != "meta" for parameter in model.parameters())


def _kv_heads(model: nn.Module) -> int | None:
    """As a Hugging Face config names them; None for any other model."""
    for module in model.modules():
        found = getattr(getattr(module, "config", None), "num_key_value_heads", None)
        if isinstance(found, int):
            return found
    return None
