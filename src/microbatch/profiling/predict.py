"""Predicts a model's curve on a device that need not be here: the model's operators, timed by the device's figures."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from microbatch.curves.profile import Profile
from microbatch.errors import InvalidDevice, InvalidSettings
from microbatch.hardware.catalogue import load_device
from microbatch.hardware.device_spec import DeviceSpec
from microbatch.profiling.predict_clock import Settings
from microbatch.profiling.predict_work import predict_work
from microbatch.roofline.precision import in_precision
from microbatch.roofline.ridge import rate_of
from microbatch.units import DTYPE_BYTES
from microbatch.work.operators import Work

if TYPE_CHECKING:
    from torch import nn

    from microbatch.models.loaded import Loaded

MODES = ("inference", "training", "prefill", "decode")
_SEVERAL = re.compile(r"([1-9]\d{0,4})x(.+)")


def predict(
    model: str | Loaded | nn.Module | Work,
    device: str | Path | DeviceSpec,
    *,
    example: Any = None,
    mode: str = "inference",
    dtype: str | None = None,
    weights_dtype: str | None = None,
    sequence: int | None = None,
    launches: str = "eager",
    max_batch_size: int | None = None,
    memory_limit: int | None = None,
    optimizer: str = "adam",
    accumulation: int = 1,
    surface: Sequence[int] = (),
    sizes: Sequence[int] = (),
    layer_sizes: Sequence[int] = (),
    name: str = "",
    unit: str = "rows",
) -> Profile:
    """The curve of a model on a device, computed and not run; `explain` reads it as it reads a measured one.

    Args:
        model: a MODEL as on the command line (``"mlp:depth=8,width=1024"``, a folder, ``"file.py:build"``), a loaded
            one, any module with its `example`, or a `Work` made by hand.
        device: a name of the catalogue, a path of a TOML file, or a `DeviceSpec`; ``"8xh200"`` is a node of eight that
            share the model, tensor parallel.
        example: the input of a module, of any batch size: a tensor, a tuple or a dict.
        mode: inference, training, prefill or decode.
        dtype: of the arithmetic: fp32, tf32, fp16, bf16, fp8, int8; by default the model's own.
        weights_dtype: in which the weights are stored, where it is not `dtype`: int8 or int4.
        sequence: tokens of each item; in decode mode those that the cache already holds.
        launches: of a GPU's kernels: ``"eager"``, one by one by the host, or ``"graph"``, together, as CUDA graphs,
            engines and compiled decoding do.
        max_batch_size: compute no larger size.
        memory_limit: bytes of each device; by default all that it has.
        optimizer: adam, adamw, sgd, sgd-momentum or lion, in training.
        accumulation: micro-batches in one optimizer step, in training.
        surface: sequence lengths for which a table of sequence × batch is computed as well.
        sizes: further sizes to compute, as those of a measured profile.
        layer_sizes: further sizes at which the time of each layer is kept.
        name: of a module, for the report.
        unit: what one item of a module's batch is called.

    Raises:
        InvalidDevice: an unknown device, or one without a rate for the dtype.
        InvalidModel: a MODEL that cannot be loaded or captured.
        InvalidSettings: an option outside its range.
    """
    count, spec = find_device(device)
    _check(mode, dtype, weights_dtype, sequence, spec)
    given: dict[str, Any] = {
        "devices": count, "max_batch_size": max_batch_size, "memory_limit": memory_limit, "optimizer": optimizer,
        "accumulation": accumulation, "surface": tuple(surface), "sizes": tuple(sizes),
        "layer_sizes": tuple(layer_sizes), "weight_dtype": weights_dtype or "",
        "launches": launches,
    }  # fmt: skip
    if isinstance(model, Work):
        work = _cast(model, dtype, weights_dtype)
        return predict_work(work, spec, Settings(sequence=sequence or work.sequence, **given))
    from microbatch.profiling.predict_model import Wanted, capture

    wanted = Wanted(
        mode=mode, dtype=_stored_in(dtype, spec), sequence=sequence, surface=bool(surface), name=name, unit=unit,
        optimizer=optimizer,
    )  # fmt: skip
    captured = capture(model, example, wanted)
    work = _cast(captured.work, dtype, weights_dtype)
    settings = Settings(sequence=captured.sequence, kv_heads=captured.kv_heads, **given)
    exact = count == 1 and work.weight_bytes == captured.work.weight_bytes
    return predict_work(work, spec, settings, memory=captured.memory(spec, memory_limit) if exact else None)


def find_device(device: str | Path | DeviceSpec) -> tuple[int, DeviceSpec]:
    """How many devices, and which: ``"8xh200"`` is eight.

    Raises:
        InvalidDevice: an unknown name, or a file that breaks the rules.
    """
    if isinstance(device, DeviceSpec):
        return 1, device
    match = _SEVERAL.fullmatch(str(device))
    return (int(match[1]), load_device(match[2])) if match else (1, load_device(device))


def _check(mode: str, dtype: str | None, weights_dtype: str | None, sequence: int | None, spec: DeviceSpec) -> None:
    if mode not in MODES:
        raise InvalidSettings(f"There is no mode {mode!r}.", f"Use one of {', '.join(MODES)}.")
    for name in (dtype, weights_dtype):
        if name is not None and name not in DTYPE_BYTES:
            raise InvalidSettings(f"There is no dtype {name!r}.", f"Known: {', '.join(DTYPE_BYTES)}.")
    if dtype is not None:
        rate_of(spec, dtype)
    if sequence is not None and sequence < 1:
        raise InvalidSettings(f"A sequence of {sequence} tokens holds nothing.", "Give 1 or more.")


def _stored_in(dtype: str | None, spec: DeviceSpec) -> str | None:
    """The dtype that the model is captured in: that of the arithmetic where a model can be loaded in it, else the
    16-bit one that the device has, in which everything but the quantised products stays."""
    if dtype is None or DTYPE_BYTES[dtype] >= 2:
        return dtype
    known = [name for name in ("bf16", "fp16", "fp32") if name in spec.flops]
    if not known:
        raise InvalidDevice(
            f"{spec.name} has no rate for bf16, fp16 or fp32, in which all but the {dtype} products run.",
            f"Rates are known for {', '.join(spec.flops)}.",
        )
    return known[0]


def _cast(work: Work, dtype: str | None, weights_dtype: str | None) -> Work:
    dtype = dtype or work.dtype
    stored = weights_dtype or dtype
    return work if dtype == work.dtype and weights_dtype is None else in_precision(work, dtype, stored)
