"""Which processes share a step, read off the model: DistributedDataParallel, FSDP2 and HSDP, or plain replicas.

Started by torchrun, every rank makes its own `TrainStep` and calls it with its own part of the global batch, of any
size: the library divides by the weight of all ranks. A rank without data calls it with None.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from microbatch.errors import InvalidSettings
from microbatch.training.ranks.one_process import OneProcess, Ranks
from microbatch.training.ranks.replicated import Replicated
from microbatch.training.ranks.sharded import Sharded

logger = logging.getLogger(__name__)


def is_pipeline(model: object) -> bool:
    """Whether a model is a `Pipeline`, without loading what runs one."""
    return bool(getattr(model, "is_pipeline", False))


def ranks_of(
    model: nn.Module, optimizer: Optimizer, group: Any, device: torch.device, num_micro_batches: int | str | None = None
) -> Ranks:
    """The ranks that share the steps of a model.

    Args:
        model: wrapped, sharded or plain.
        optimizer: of its parameters.
        group: the ranks that hold replicas of a plain model; None for none. Under DDP and FSDP2 the model knows.
        device: where the model is.
        num_micro_batches: of a pipeline.

    Raises:
        InvalidSettings: FSDP1, DDP inside FSDP2, or a process group without torch.distributed.
    """
    if is_pipeline(model):
        from microbatch.training.ranks.pipelined import Pipelined

        return Pipelined(model, num_micro_batches)  # type: ignore[arg-type]
    parameters = [parameter for one in optimizer.param_groups for parameter in one["params"]]
    kinds = {
        kind: [module for module in model.modules() if isinstance(module, kind)]
        for kind in (DistributedDataParallel, FSDPModule, FullyShardedDataParallel)
    }
    if kinds[FullyShardedDataParallel]:
        raise InvalidSettings("FSDP1 has collectives that cannot be planned.", "Use fully_shard (FSDP2).")
    if kinds[FSDPModule] and kinds[DistributedDataParallel]:
        raise InvalidSettings("A model is either in DDP or sharded by FSDP2, not both.", "Use HSDP: a mesh of 2 axes.")
    if kinds[FSDPModule]:
        return Sharded(model, group, parameters, device)
    if kinds[DistributedDataParallel]:
        wrapper: Any = kinds[DistributedDataParallel][0]
        return Replicated(model, wrapper.process_group, parameters, device)
    if group is not None:
        if not dist.is_initialized():
            raise InvalidSettings("A process group is given, but there is none.", "Call init_process_group first.")
        return Replicated(model, group, parameters, device)
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        logger.warning(
            "There are %d processes and a plain model: each trains on its own. For one common step wrap the model in "
            "DistributedDataParallel or fully_shard, or give process_group=torch.distributed.group.WORLD.",
            dist.get_world_size(),
        )
    return OneProcess()


def is_empty(batch: object) -> bool:
    """Whether a rank has no data: None, or members without items."""
    if batch is None:
        return True
    if isinstance(batch, (Tensor, np.ndarray)):
        return batch.ndim > 0 and len(batch) == 0
    if isinstance(batch, Mapping):
        return all(is_empty(value) for value in batch.values())
    return isinstance(batch, (list, tuple)) and all(is_empty(value) for value in batch)
