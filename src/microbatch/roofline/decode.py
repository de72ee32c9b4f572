"""What decoding one token for each of b sequences can reach, from the work's own polynomials. No torch.

A step reads s_w·P bytes of weights and b·T·κ bytes of keys and values for a context of T tokens, and does
b·(2·P + T·a) FLOPs, with κ = 2·L·n_kv·d_h·s_kv and a = 4·L·n_h·d_h for ordinary attention. As b grows the weights no
longer count, and computing takes longer than reading only while (2·P + T·a)/F ≥ T·κ/BW, that is up to

    T* = 2·P / (κ·I* − a)            with I* = F/BW.

Throughput saturates at BW/(T·κ), and the batch of half of that is B_half = s_w·P/(T·κ). P counts embeddings, as in the
published figures for Llama (6.74e9, 8.03e9, 70.6e9), and of a mixture of experts those that a token uses.
"""

from __future__ import annotations

from dataclasses import dataclass

from microbatch.hardware.device_spec import DeviceSpec
from microbatch.roofline.ridge import intensity
from microbatch.units import DTYPE_BYTES
from microbatch.work.operators import Work


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeWork:
    """The numbers that the limits follow from.

    Attributes:
        active_parameters: P, those that one token uses.
        weight_bytes: all weights as stored.
        cache_bytes_per_token: κ, for one token of one sequence.
        attention_flops_per_token: a, for one new token and one token of context.
    """

    active_parameters: float
    weight_bytes: float
    cache_bytes_per_token: float
    attention_flops_per_token: float


def decode_work_of(work: Work) -> DecodeWork | None:
    """The numbers of a captured decode step; None unless its sizes are functions of the context.

    A cache that does not grow with the context (sliding windows alone, state-space layers) gives κ = 0.
    """
    if work.mode != "decode" or not work.sequence_free:
        return None
    attention = sum(o.repeat * o.flops.coefficient(1, 1) for o in work.operators)
    return DecodeWork(
        active_parameters=_active_parameters(work),
        weight_bytes=work.weight_bytes,
        cache_bytes_per_token=work.cache_bytes.coefficient(1, 1),
        attention_flops_per_token=attention,
    )


def context_limit(work: DecodeWork, spec: DeviceSpec, dtype: str) -> float | None:
    """T*: the context beyond which no batch is compute-bound; None when attention itself is compute-bound, so that
    there is no such context.

    Raises:
        InvalidDevice: the device has no rate for that dtype.
    """
    gain = work.cache_bytes_per_token * intensity(spec, dtype) - work.attention_flops_per_token
    return 2 * work.active_parameters / gain if gain > 0 else None


def half_batch(work: DecodeWork, context: float) -> float | None:
    """B_half: the batch of half of the throughput that reading the cache allows; None without a growing cache."""
    growth = context * work.cache_bytes_per_token
    return work.weight_bytes / growth if growth > 0 else None


def saturated_throughput(work: DecodeWork, spec: DeviceSpec, context: float) -> float | None:
    """Tokens per second that no batch exceeds: BW/(T·κ); None without a growing cache."""
    growth = context * work.cache_bytes_per_token
    return spec.bandwidth / growth if growth > 0 else None


def _active_parameters(work: Work) -> float:
    idle = sum(
        o.repeat
        * o.weight_bytes.coefficient(0)
        / DTYPE_BYTES[o.weight_dtype or o.dtype]
        * (1 - o.routed.top_k / o.routed.experts)
        for o in work.operators
        if o.routed is not None
    )
    return work.parameters - idle
