"""What a prediction is asked for, and its clock: one device's part of a work, timed at any size. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from microbatch.hardware.device_spec import DeviceSpec
from microbatch.roofline.time import CallTime, time_call
from microbatch.work.operators import Work


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What a prediction is asked for.

    Attributes:
        devices: how many share the model, tensor parallel.
        kv_heads: heads of keys and values, which limits how often the cache can be split.
        sequence: length, in decoding the context; None where the model has none.
        weight_dtype: as the weights are stored.
        launches: of a GPU's kernels, ``"eager"`` or ``"graph"``, see `microbatch.roofline.launches`.
        max_batch_size: no larger size.
        memory_limit: bytes of one device; by default all that it has.
        optimizer, accumulation: of a training step.
        surface: sequence lengths to lay beside each other.
        sizes: further sizes to compute, as those of a measured profile.
        layer_sizes: further sizes to give the layers' times at.
    """

    devices: int = 1
    kv_heads: int | None = None
    sequence: int | None = None
    weight_dtype: str = ""
    launches: str = "eager"
    max_batch_size: int | None = None
    memory_limit: int | None = None
    optimizer: str = "adam"
    accumulation: int = 1
    surface: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    layer_sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Clock:
    """One device's part of the work, and its time at any size."""

    work: Work
    spec: DeviceSpec
    sequence: float
    launches: str = "eager"
    calls: dict[tuple[int, float], CallTime] = field(default_factory=dict)

    def call(self, size: int, sequence: float | None = None) -> CallTime:
        key = size, self.sequence if sequence is None else sequence
        if key not in self.calls:
            self.calls[key] = time_call(self.work, self.spec, batch=size, sequence=key[1], launches=self.launches)
        return self.calls[key]

    def seconds(self, size: int) -> float:
        return self.call(size).seconds
