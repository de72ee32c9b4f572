"""What belongs to one rank of a training run: its random state, and what it has learnt about its memory."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from microbatch.batch.running import device_of
from microbatch.batch.size_limit import SizeLimit
from microbatch.training.checkpoints.plain_values import Packer, unpack
from microbatch.training.memory.micro_batch_size import Choice
from microbatch.training.memory.snapshot import random_state, set_random_state
from microbatch.training.ranks.distributed import is_pipeline

if TYPE_CHECKING:
    from microbatch.training.step import TrainStep

logger = logging.getLogger(__name__)


def take_from_all(step: TrainStep) -> list[dict[str, Any]]:
    """Of every rank, in the order of ranks, on every rank."""
    mine = {"random": _random(device_of(step.model)), "learnt": _learnt(step)}
    return [unpack(one["packed"], {}) for one in step._ranks.share({"packed": Packer().pack(mine)})]


def put_back(step: TrainStep, saved: Sequence[Mapping[str, Any]]) -> None:
    """This rank's own; where the number of ranks is another one, what makes sense.

    Args:
        step: that goes on.
        saved: of every rank that there was.
    """
    meeting = step._ranks.meeting
    same = len(saved) == (1 if meeting is None else meeting.size)
    _put_back_learnt(step, [one["learnt"] for one in saved], same)
    _put_back_random(step, [one["random"] for one in saved])


def _random(device: torch.device) -> dict[str, Any]:
    """Random state as bytes and numbers."""
    state = random_state(device)
    packed = {"python": state["python"], "cpu": state["cpu"].numpy().tobytes()}
    if "device" in state:
        packed["device"] = state["device"][1].numpy().tobytes()
    if "numpy" in state:
        kind, keys, *rest = state["numpy"]
        packed["numpy"] = (kind, keys.tobytes(), *rest)
    return packed


def _put_back_random(step: TrainStep, saved: Sequence[Mapping[str, Any]]) -> None:
    """A rank that there was not before gets a seed that follows from the first rank's state."""
    rank, device = step._ranks.rank, device_of(step.model)
    if rank >= len(saved):
        digest = hashlib.sha256(saved[0]["cpu"] + rank.to_bytes(8, "little")).digest()
        torch.manual_seed(int.from_bytes(digest[:6], "little"))
        return
    mine = saved[rank]
    state = {"python": mine["python"], "cpu": _generator_state(mine["cpu"])}
    if "device" in mine and device.type != "cpu":
        state["device"] = (device, _generator_state(mine["device"]))
    if "numpy" in mine:
        kind, keys, *rest = mine["numpy"]
        state["numpy"] = (kind, np.frombuffer(keys, dtype=np.uint32), *rest)
    set_random_state(state)


def _generator_state(values: bytes) -> Tensor:
    return torch.frombuffer(bytearray(values), dtype=torch.uint8)


def _learnt(step: TrainStep) -> dict[str, Any]:
    """What a rank knows about its memory, and on which device that holds."""
    choice = step.choice
    # a pipeline chooses anew: its stages, schedule and ranks may be others when the run goes on
    if choice is not None and choice.num_micro_batches is not None:
        choice = None
    kept = None if choice is None else {"size": choice.micro_batch_size, "reason": choice.reason}
    limit = asdict(step._recovery.limit)
    return {"device": _device_name(step), "choice": kept, "limit": limit, "weights_differ": step._weights_differ}


def _put_back_learnt(step: TrainStep, saved: Sequence[Mapping[str, Any]], same: bool) -> None:
    """A rank's own; on another number of ranks what the one with the least memory knows. Not on another device."""
    mine = saved[step._ranks.rank] if same else saved[0]
    step._weights_differ = mine["weights_differ"]
    if mine["device"] != _device_name(step):
        logger.info("The checkpoint is from %s: what memory allowed there is not used.", mine["device"])
        return
    choice, limit = mine["choice"], SizeLimit(**mine["limit"])
    if not same:
        choices = [one["choice"] for one in saved if one["choice"] is not None]
        choice = min(choices, key=lambda one: one["size"], default=None)
        limits = [one["limit"]["largest"] for one in saved if one["limit"]["largest"] is not None]
        limit = SizeLimit(largest=min(limits, default=None))
    step._recovery.limit = limit
    if is_pipeline(step.model):  # what one process chose is a size, and says nothing of a number
        choice = None
    step.choice = None if choice is None else Choice(micro_batch_size=choice["size"], reason=choice["reason"])


def _device_name(step: TrainStep) -> str:
    device = device_of(step.model)
    if device.type != "cuda":
        return device.type
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name} with {properties.total_memory} bytes"
