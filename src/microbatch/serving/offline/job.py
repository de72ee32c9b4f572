"""What is asked of `map` and `imap`, checked before anything runs, and the work that follows from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn

from microbatch.batch.independence import check_independence
from microbatch.batch.lengths import Length
from microbatch.batch.running import Forward, device_of
from microbatch.batch.token_budget import TokenBudget
from microbatch.curves.codec import load_profile
from microbatch.curves.objective import smallest_near_best
from microbatch.curves.profile import Profile
from microbatch.errors import InvalidBatchSizes, InvalidModel, InvalidProfile, InvalidSettings
from microbatch.serving.offline.memory import MemoryCap
from microbatch.serving.offline.placing import Runner
from microbatch.serving.offline.sizing import Sizing
from microbatch.serving.offline.sources import Collate, Source, source_of
from microbatch.serving.offline.work import Work

BatchSize = int | str | TokenBudget
Model = Callable[..., Any]

_CHECKED_ITEMS = 8


@dataclass(frozen=True, slots=True)
class Job:
    """The arguments that `map` and `imap` share, see there."""

    model: Model
    data: Any
    batch_size: BatchSize
    forward: Forward | None
    collate: Collate | None
    length: Length | None
    window: int
    device: torch.device | str | None
    output_device: torch.device | str | None
    autocast: torch.dtype | None
    profile: str | Path | Profile | None
    memory_limit: int | None
    check: bool

    def __post_init__(self) -> None:
        if not callable(self.model):
            raise InvalidModel(f"A {type(self.model).__name__} cannot be called.", "Give a module or a function.")
        if isinstance(self.batch_size, str) and self.batch_size != "auto":
            raise InvalidBatchSizes(f"batch_size is {self.batch_size!r}.", 'Give a number, "auto" or a TokenBudget.')
        sizes = {"window": self.window, "memory_limit": 1 if self.memory_limit is None else self.memory_limit}
        if not isinstance(self.batch_size, (str, TokenBudget)):
            sizes["batch_size"] = self.batch_size
        for name, size in sizes.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise InvalidBatchSizes(f"{name} must be a whole number of 1 or more, not {size!r}.", "Give one.")
        if self.profile is not None and self.batch_size != "auto":
            raise InvalidSettings('profile= is for batch_size="auto".', "Leave one of them out.")

    @property
    def runs_on(self) -> torch.device | None:
        """Where the model is to be moved; None for where it is. With the index of the device, as tensors have it."""
        return None if self.device is None else torch.empty(0, device=self.device).device

    def work(self) -> Work:
        """The data, the model and the size, put together.

        Raises:
            InvalidModel: with ``check``, rows that depend on each other.
        """
        own = device_of(self.model) if isinstance(self.model, nn.Module) else torch.device("cpu")
        device = self.runs_on or own
        runner = Runner(model=self.model, forward=self.forward, device=device, autocast=self.autocast)
        sizing, source = self._sizing(), self._source()
        if self.check and source.size != 1:
            self._check_rows(source.sample(_CHECKED_ITEMS))
        outputs = None if self.output_device is None else torch.device(self.output_device)
        return Work(source, runner, sizing, MemoryCap(self.memory_limit, device), outputs)

    def _source(self) -> Source:
        size = self.batch_size
        length = self.length or (size.length if isinstance(size, TokenBudget) else None)
        tokens = "yes" if isinstance(size, TokenBudget) else "if they differ"
        if isinstance(size, int) or self.profile is not None:
            tokens = "no"
        return source_of(self.data, collate=self.collate, length=length, window=self.window, tokens=tokens)

    def _sizing(self) -> Sizing:
        """What the size is, or how it is found."""
        size = self.batch_size
        if isinstance(size, TokenBudget):
            return Sizing(wanted=size.tokens, unit="tokens", source="your budget", piece_cost=size.piece_cost)
        if isinstance(size, int):
            return Sizing(wanted=size, unit="items", source="your size")
        if self.profile is not None:
            found = _profiled(self.profile, self.memory_limit)
            return Sizing(wanted=found, unit="items", source="the fastest of the profile that fits")
        return Sizing(wanted=None, unit="tokens", source="measured")

    def _check_rows(self, batch: Any) -> None:
        if not isinstance(self.model, nn.Module):
            raise InvalidModel("check=True needs a module.", "Leave it out for a function.")
        report = check_independence(self.model, batch, mode="inference", forward=self.forward)
        if report.exact:
            return
        culprit = report.culprits[0] if report.culprits else None
        where = f"{culprit.module} ({culprit.kind})" if culprit else "the model"
        raise InvalidModel(
            f"Pieces do not give what one pass gives: in {where} a row depends on more than itself.",
            culprit.remedy if culprit else "See microbatch.check_independence.",
        )


def _profiled(profile: str | Path | Profile, memory_limit: int | None) -> int:
    """The smallest size within 2 % of a profile's best throughput, among those that fit.

    Raises:
        InvalidProfile: a profile of training, or none of its sizes fits.
    """
    profile = load_profile(profile)
    if profile.mode == "training":
        raise InvalidProfile("The profile is one of training.", "Measure one with --mode inference.")
    times = {point.batch_size: median(point.samples) for point in profile.points if point.samples}
    memory = profile.memory
    if memory is not None:
        limit = (memory.limit_bytes if memory_limit is None else memory_limit) * (1 - memory.margin)
        times = {b: t for b, t in times.items() if memory.fixed_bytes + memory.bytes_per_item * b <= limit}
    if not times:
        raise InvalidProfile("None of the profile's sizes fits into memory.", "Measure smaller sizes.")
    sizes = sorted(times)
    return sizes[smallest_near_best(np.array(sizes, float), np.array([times[size] for size in sizes]))]
