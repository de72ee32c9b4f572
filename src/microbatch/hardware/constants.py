"""The constants of the time model: at most twelve per device, kept in its TOML under ``[constants.NAME]``.

A device without a table of measured times uses its datasheet and the defaults of its kind, which are the same for all
devices of that kind. What a constant does is said where it is used, in `microbatch.roofline`.
"""

from __future__ import annotations

from microbatch.hardware.device_spec import DeviceSpec

MOST_CONSTANTS = 12

DEFAULTS: dict[str, dict[str, float]] = {
    "gpu": {
        "gemm_efficiency": 0.81,
        "bandwidth_efficiency": 0.855,
        "flops_per_cache_byte": 27.0,
        "overlap_norm": 2.2,
        "gemm_seconds": 4.2e-6,
        "tile_seconds": 0.4e-6,
        "split_seconds": 1.3e-6,
        "kernel_seconds": 2e-6,
        "attention_efficiency": 0.6,
        "convolution_efficiency": 0.5,
        "gap_seconds": 1e-6,
        "host_seconds": 5e-6,
    },
    "cpu": {
        "product_efficiency": 0.85,
        "weight_bandwidth_share": 0.3,
        "weight_half_row_bytes": 500.0,
        "vector_bandwidth_share": 0.7,
        "vector_half_row_bytes": 1000.0,
        "cached_bandwidth_ratio": 2.0,
        "fresh_bandwidth_share": 0.15,
        "function_flops": 90.0,
        "convolution_efficiency": 0.9,
        "convolution_half_channels": 30.0,
        "attention_efficiency": 0.9,
    },
    "accelerator": {
        "gemm_efficiency": 0.85,
        "bandwidth_efficiency": 0.85,
        "array_size": 128.0,
        "overlap_norm": 6.0,
        "kernel_seconds": 2e-6,
        "attention_efficiency": 0.5,
    },
}
"""By kind of device: the name of each constant, and its value where the device's own file does not give one."""


def constants_of(spec: DeviceSpec) -> dict[str, float]:
    """Every constant of the device: its own, else the default of its kind."""
    return DEFAULTS[spec.kind] | spec.constants
