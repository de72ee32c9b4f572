"""The constants of the time model: at most twelve per device, kept in its TOML under ``[constants.NAME]``.

A device without a table of measured times uses its datasheet and the defaults of its kind, which are the same for all
devices of that kind. What a constant does is said where it is used, in `microbatch.roofline`.
"""

from __future__ import annotations

from microbatch.hardware.device_spec import DeviceSpec

MOST_CONSTANTS = 12

DEFAULTS: dict[str, dict[str, float]] = {
    "gpu": {},
    "cpu": {},
    "accelerator": {},
}
"""By kind of device: the name of each constant, and its value where the device's own file does not give one."""


def constants_of(spec: DeviceSpec) -> dict[str, float]:
    """Every constant of the device: its own, else the default of its kind."""
    return DEFAULTS[spec.kind] | spec.constants
