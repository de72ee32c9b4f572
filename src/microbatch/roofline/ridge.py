"""The batch size where moving and computing take equally long. No torch.

A Linear of m inputs and n outputs does 2·m·n·b FLOPs on s·m·n bytes of weights, so with F FLOP/s and BW byte/s
(I* = F/BW) both times are equal at

    weights only:             b* = s·F / (2·BW)
    activations moved too:    b* = I*·s·m·n / (2·m·n − I*·s·(m+n)),  none when m·n/(m+n) ≤ I*·s/2

The second follows from 2·m·n·b / F = s·(m·n + b·(m+n)) / BW.
"""

from __future__ import annotations

from microbatch.errors import InvalidDevice
from microbatch.hardware.device_spec import DeviceSpec
from microbatch.units import DTYPE_BYTES


def intensity(spec: DeviceSpec, dtype: str) -> float:
    """I* = F/BW in FLOP per byte: work per byte from which on the device is bound by computing.

    Raises:
        InvalidDevice: the catalogue has no rate for that dtype.
    """
    return rate_of(spec, dtype) / spec.bandwidth


def rate_of(spec: DeviceSpec, dtype: str) -> float:
    """FLOP/s of a dtype.

    Raises:
        InvalidDevice: the device has no rate for that dtype.
    """
    if dtype not in spec.flops:
        known = ", ".join(spec.flops)
        raise InvalidDevice(f"{spec.name} has no rate for {dtype!r}.", f"Rates are known for {known}.")
    return spec.flops[dtype]


def weights_ridge(spec: DeviceSpec, dtype: str, *, weight_dtype: str | None = None) -> float:
    """b* = s·F/(2·BW): the ridge when only the weights are moved.

    Args:
        spec: the device.
        dtype: dtype of the arithmetic, which gives F.
        weight_dtype: dtype of the stored weights, which gives s; by default `dtype`.

    Raises:
        InvalidDevice: the catalogue has no rate for that dtype.

    >>> from microbatch.hardware.catalogue import load_device
    >>> round(weights_ridge(load_device("t4"), "fp16"))
    217
    """
    return DTYPE_BYTES[weight_dtype or dtype] * intensity(spec, dtype) / 2


def ridge_with_activations(spec: DeviceSpec, dtype: str, m: int, n: int) -> float | None:
    """The ridge of a Linear m → n when inputs and outputs are moved too; None when no batch is compute-bound.

    Raises:
        InvalidDevice: the catalogue has no rate for that dtype.

    >>> from microbatch.hardware.catalogue import load_device
    >>> round(ridge_with_activations(load_device("t4"), "fp16", 1024, 1024) or 0)
    376
    """
    moved = intensity(spec, dtype) * DTYPE_BYTES[dtype]
    gain = 2 * m * n - moved * (m + n)
    return moved * m * n / gain if gain > 0 else None
