"""Offline inference whose address space is capped, so that memory really runs out; run as a script by the tests.

Prints, in one JSON line, how often memory ran out, and how far the outputs are from those without a cap.
"""

from __future__ import annotations

import json
import resource
import sys

import torch

from microbatch.serving.offline.mapping import map as map_
from tests.training.capped import MODELS, cap

ITEMS = 256
ROOM = {"conv": 6e7, "attention": 4e7}


def main(kind: str, size: str) -> None:
    torch.set_num_threads(1)
    make, shape, _ = MODELS[kind]
    torch.manual_seed(0)
    model, x = make().eval(), torch.randn(ITEMS, *shape)
    batch_size = size if size == "auto" else int(size)
    map_(model, x[:4], 2)  # libraries load what they load at first use
    before = cap(int(ROOM[kind]))
    outputs, report = map_(model, x, batch_size, return_report=True, forward=lambda m, b: m(b).flatten(1).mean(1))
    resource.setrlimit(resource.RLIMIT_AS, before)
    expected = map_(model, x, 2, forward=lambda m, b: m(b).flatten(1).mean(1))
    difference = float((outputs - expected).abs().max())
    sys.stdout.write(json.dumps({"out_of_memory": report.out_of_memory, "difference": difference}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
