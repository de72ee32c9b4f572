"""One device's part of a work that several devices of a node share, tensor parallel. No torch.

As in Megatron-LM (Shoeybi et al., arXiv 1909.08053): inside a block the first products are split by their outputs
(query, key and value by heads; the first of the MLP), the last one by its inputs (the output projection; the second of
the MLP), so that one sum over all devices follows each of them: twice a layer. What lies between is split, what lies on
the residual stream is done by every device. A ring sums x bytes over n devices by sending 2·(n − 1)/n · x.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from microbatch.errors import InvalidDevice, InvalidSettings
from microbatch.hardware.device_spec import DeviceSpec
from microbatch.roofline.operator_time import OperatorTime
from microbatch.units import DTYPE_BYTES
from microbatch.work.operators import Gemm, Operator, Work
from microbatch.work.polynomial import Polynomial

LINK_EFFICIENCY = 0.8
"""Share of the link that a ring of 2 to 8 H100 reaches, 365 to 370 of 450 GB/s (NVIDIA/nccl issue 1455)."""
EXCHANGE_SECONDS = 6e-6
"""Least time of a sum over two H100 in a CUDA graph (NVIDIA/nccl issue 1259); over more of them somewhat longer."""
WEIGHTED = ("matmul", "experts", "recurrent")
"""Kinds of products that are split; convolutions are not, since models of them are split by images."""


@dataclass(frozen=True, slots=True)
class _Shares:
    """By how much an operator's parts shrink on one device."""

    work: float = 1.0
    read: float = 1.0
    written: float = 1.0


def split_work(work: Work, devices: int, *, kv_heads: int | None = None) -> Work:
    """What one of `devices` devices does in one call, its sums over all devices included as ``communication``.

    Args:
        work: the whole model's.
        devices: 1 or more; 1 changes nothing.
        kv_heads: heads of keys and values; with fewer of them than devices each head is kept by several.

    Raises:
        InvalidSettings: fewer than one device, or a work without products to split.
    """
    if devices < 1:
        raise InvalidSettings(f"{devices} devices cannot run a model.", "Give 1 or more.")
    if devices == 1:
        return work
    width = _residual_width(work.operators)
    cache = 1 / (min(devices, kv_heads) if kv_heads else devices)
    operators = _split_all(work, width, devices, cache)
    stored = sum(o.repeat * o.weight_bytes(0) for o in work.operators if not o.backward)
    kept = sum(o.repeat * o.weight_bytes(0) for o in operators if not o.backward)
    share = kept / stored if stored else 1.0
    return replace(
        work,
        operators=tuple(operators),
        weight_bytes=round(work.weight_bytes * share),
        parameters=round(work.parameters * share),
        cache_bytes=work.cache_bytes * cache,
    )


def time_communication(operator: Operator, spec: DeviceSpec, batch: float, sequence: float) -> OperatorTime:
    """Seconds of one exchange between devices: its start, and the bytes that one device sends, over its link.

    Raises:
        InvalidDevice: the device's link is not in the catalogue.
    """
    if spec.link_bandwidth is None:
        raise InvalidDevice(
            f"{spec.name} has no link_bandwidth, so several of them cannot be predicted.",
            "Add [link_bandwidth] (byte/s in one direction, with its source) to a device file of your own.",
        )
    seconds = operator.read_bytes(batch, sequence) / (LINK_EFFICIENCY * spec.link_bandwidth)
    return OperatorTime(
        seconds=seconds + EXCHANGE_SECONDS,
        compute_seconds=0.0,
        memory_seconds=seconds,
        overhead_seconds=EXCHANGE_SECONDS,
    )


def _split_all(work: Work, width: float, devices: int, cache: float) -> list[Operator]:
    """Every operator's part, in order. `inside` says that a block's outputs are split at this place."""
    result: list[Operator] = []
    inside = attended = False
    has_attention = any(map(_attends, work.operators))
    for operator in work.operators:
        if _is_split(operator):
            ends = inside and _ends_block(operator, width, attended or not has_attention)
            result.append(_by_inputs(operator, devices) if ends else _by_outputs(operator, devices))
            if ends:
                result.append(_sum_over(operator, devices))
            inside, attended = not ends, attended and not ends
            continue
        attended = attended or _attends(operator)
        share = 1 / devices if inside or operator.kind in ("attention", "optimizer") else 1.0
        read = max(share, cache) if operator.kind == "attention" and work.mode == "decode" else share
        result.append(_scaled(operator, _Shares(share, read, share)))
    return result


def _is_split(operator: Operator) -> bool:
    return operator.kind in WEIGHTED and operator.gemm is not None and bool(operator.weight_bytes.terms)


def _attends(operator: Operator) -> bool:
    """Attention, fused or written out as products of two activations."""
    return operator.kind == "attention" or (operator.kind == "matmul" and not operator.weight_bytes.terms)


def _residual_width(operators: Sequence[Operator]) -> float:
    """Inputs of the first product with weights, which is the width of what all blocks add to."""
    for operator in operators:
        if _is_split(operator) and operator.gemm is not None:
            return operator.gemm.k(1)
    raise InvalidSettings("This model has no product that several devices could share.", "Predict it on one device.")


def _ends_block(operator: Operator, width: float, attended: bool) -> bool:
    """Back to the residual stream: from inside of an MLP, or square and after attention."""
    assert operator.gemm is not None
    return operator.gemm.n(1) == width and (operator.gemm.k(1) != width or attended)


def _by_outputs(operator: Operator, devices: int) -> Operator:
    assert operator.gemm is not None
    scaled = _scaled(operator, _Shares(1 / devices, 1.0, 1 / devices))
    return replace(scaled, gemm=replace(operator.gemm, n=operator.gemm.n * (1 / devices)))


def _by_inputs(operator: Operator, devices: int) -> Operator:
    assert operator.gemm is not None
    scaled = _scaled(operator, _Shares(1 / devices, 1 / devices, 1.0))
    return replace(scaled, gemm=replace(operator.gemm, k=operator.gemm.k * (1 / devices)))


def _scaled(operator: Operator, by: _Shares) -> Operator:
    return replace(
        operator,
        flops=operator.flops * by.work,
        weight_bytes=operator.weight_bytes * by.work,
        read_bytes=operator.read_bytes * by.read,
        written_bytes=operator.written_bytes * by.written,
        gemm=operator.gemm if by.work == 1 else _fewer(operator.gemm, by.work),
    )


def _fewer(gemm: Gemm | None, share: float) -> Gemm | None:
    """Attention is split by heads: fewer independent products of the same shape."""
    return None if gemm is None else replace(gemm, count=gemm.count * share)


def _sum_over(operator: Operator, devices: int) -> Operator:
    """The sum that follows a product split by its inputs; `read_bytes` is what one device sends.

    Of a mixture of experts one row for each token, since its experts' results are added up before they are sent.
    """
    sent: Polynomial = _result_bytes(operator) * (2 * (devices - 1) / devices)
    return Operator(
        name="all-reduce", kind="communication", layer=f"{operator.layer}:all-reduce", dtype=operator.dtype,
        read_bytes=sent, backward=operator.backward, repeat=operator.repeat,
    )  # fmt: skip


def _result_bytes(operator: Operator) -> Polynomial:
    if operator.routed is None or operator.gemm is None:
        return operator.written_bytes
    return operator.routed.tokens * (operator.gemm.n(1) * DTYPE_BYTES[operator.dtype])
