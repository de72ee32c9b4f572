"""Small language models, tokenizers and engines for the tests of the engine: random, made here, nothing is loaded."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers

from microbatch.curves.profile import Point, Profile
from microbatch.llm.engine import LLMEngine
from microbatch.llm.tokenizer import Tokenizer
from microbatch.models.hugging_face import import_transformers, quiet
from tests.llm.tiny_models import tiny

VOCABULARY = 512
EOS = 1
PROFILE = Profile(
    points=tuple(Point(batch_size=b, samples=(t, t * 1.01, t * 1.02)) for b, t in ((1, 1e-3), (4, 2e-3), (16, 3e-3))),
    mode="decode", sequence=32,
)  # fmt: skip
TEXT = "text"
"""Name of the model whose vocabulary is that of the tokenizer; the others are those of `tests.llm.tiny_models`."""
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.35,
    "bos_token_id": 0, "eos_token_id": EOS, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip


@cache
def model_of(name: str) -> Any:
    """A model with random weights, the same in every run."""
    if name != TEXT:
        return tiny(name)
    transformers = import_transformers("The tests compare with transformers")
    with quiet(), torch.random.fork_rng():
        torch.manual_seed(11)
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()


@cache
def tokenizer_folder() -> Path:
    """A tokenizer of single bytes, two special tokens before them, and words of several bytes behind them."""
    folder = Path(mkdtemp(prefix="microbatch-tokenizer-"))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, "</s>": EOS, **{each: 2 + place for place, each in enumerate(alphabet)}}
    for place in range(len(vocabulary), VOCABULARY):
        vocabulary[f"w{place}"] = place
    raw = RawTokenizer(models.BPE(vocab=vocabulary, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<s>", "</s>"])
    raw.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        '{"bos_token": "<s>", "eos_token": "</s>", "chat_template": '
        "\"{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\\n{% endfor %}\"}"
    )
    (folder / "config.json").write_text('{"model_type": "llama", "bos_token_id": 0, "eos_token_id": 1}')
    return folder


@cache
def tokenizer() -> Tokenizer:
    """The tokenizer of that folder."""
    return Tokenizer.from_folder(tokenizer_folder())


def an_engine(model: str = TEXT, **settings: Any) -> LLMEngine:
    """An engine that starts at once: its cache and steps are small, and a profile says how long they take."""
    given = {"num_blocks": 64, "block_size": 4, "max_num_sequences": 8, "max_num_tokens": 64, "seed": 3,
             "profile": PROFILE, **settings}  # fmt: skip
    return LLMEngine(model_of(model), tokenizer(), **given)


def prompts_of(
    count: int, *, seed: int = 0, shortest: int = 3, longest: int = 30, vocabulary: int = 101
) -> list[list[int]]:
    """Random prompts; every third begins as the one before it."""
    generator = torch.Generator().manual_seed(seed)
    found: list[list[int]] = []
    for number in range(count):
        length = int(torch.randint(shortest, longest + 1, (), generator=generator))
        ids = torch.randint(2, vocabulary, (length,), generator=generator).tolist()
        found.append(found[-1][: len(found[-1]) - 1] + ids[:5] if number % 3 == 2 else ids)
    return found
