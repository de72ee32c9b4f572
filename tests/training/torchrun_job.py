"""A training script as users write it, started by torchrun; run by `test_torchrun.py`.

Each rank trains on its own rows, the last one runs out of memory once. Rank 0 writes how far the weights are from
those of one process that trains on all rows. With ``killed``, the last rank is killed in its second step instead.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from microbatch import TrainStep
from microbatch.errors import RankFailed
from tests.training.jobs import by_token, difference, forward, reference, sequences, tagger
from tests.training.sharded_cases import weights

STEPS = 2


def wrapped(kind: str) -> Any:
    model: Any = tagger()
    if kind == "ddp":
        return DistributedDataParallel(model)
    for layer in (model.block, model.head, model):
        fully_shard(layer)
    return model


def rows(number: int) -> dict[str, torch.Tensor]:
    """This rank's part of a batch: 3 rows of the first rank, 10 of the second."""
    part = slice(0, 3) if dist.get_rank() == 0 else slice(3, None)
    return {name: value[part] for name, value in sequences(number).items()}


def train(kind: str, *, killed: bool) -> dict[str, Any]:
    model = wrapped(kind)
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), by_token, forward=forward, micro_batch_size=4)
    plain, calls = tagger(), [0]

    def fail(*_: Any) -> None:
        calls[0] += 1
        if dist.get_rank() == 1 and calls[0] == 3 and not killed:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        if dist.get_rank() == 1 and calls[0] == 5 and killed:
            os.kill(os.getpid(), signal.SIGKILL)

    inner = model.module if kind == "ddp" else model
    inner.block.register_full_backward_hook(fail)
    began, attempts = time.monotonic(), []
    for number in range(STEPS):
        try:
            attempts.append(len(step(rows(number)).attempts))
        except RankFailed as error:
            return {"error": str(error), "seconds": time.monotonic() - began}
        plain.load_state_dict(reference(plain, by_token, sequences(number)).weights)
    return {"difference": difference(weights(inner), dict(plain.state_dict())), "attempts": attempts}


def main(folder: Path, kinds: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {kind: train(kind.removesuffix(" killed"), killed=kind.endswith("killed")) for kind in kinds}
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    if not any(kind.endswith("killed") for kind in kinds):
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
