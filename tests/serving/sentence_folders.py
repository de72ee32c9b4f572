"""Small sentence models as folders, made from configs without a download, and the plain way to run them."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from microbatch.models.torchvision_operators import make_torchvision_importable

WORDS = ("batch", "request", "answer", "length", "text", "the", "a", "of", "is", "long", "short", "and")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
POSITIONS = 48

TEXTS = (
    "Short.",
    "",
    "The answer of a request is the answer of that request, whatever batch it was in and whoever came with it.",
    "A text",
    "length and length and length and length and length and length and length and length and length and more",
    "ÄÖÜ 漢字 \U0001f642 unknown, all of it",
    "a",
)
"""Of very different length; one is cut, one is empty."""


def write_tokenizer(folder: Path) -> Any:
    """A WordPiece tokenizer of a few words and all letters, padding and cutting as some folders have it."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    signs = string.ascii_lowercase + string.digits + string.punctuation
    pieces = [*SPECIAL, *WORDS, *signs, *(f"##{sign}" for sign in string.ascii_lowercase + string.digits)]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")]
    )
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=16)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def write_encoder(folder: Path, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Path:
    """A BERT of two layers with random weights, and its tokenizer: a plain Hugging Face folder."""
    make_torchvision_importable()
    from transformers import BertConfig, BertModel

    folder.mkdir(parents=True, exist_ok=True)
    size = write_tokenizer(folder).get_vocab_size()
    config = BertConfig(
        vocab_size=size, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=POSITIONS, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(seed)
    model: Any = BertModel(config)
    model.to(dtype).save_pretrained(folder)
    return folder


def write_sentence_folder(
    folder: Path,
    *,
    poolings: tuple[str, ...] = ("mean_tokens",),
    normalised: bool = True,
    longest: int | None = 24,
    dtype: torch.dtype = torch.float32,
    **limits: Any,
) -> Path:
    """The same with what sentence-transformers writes beside it."""
    write_encoder(folder, dtype=dtype)
    kinds = [("Transformer", ""), ("Pooling", "1_Pooling"), *([("Normalize", "2_Normalize")] if normalised else [])]
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (kind, path) in enumerate(kinds)
    ]
    write_json(folder / "modules.json", modules)
    (folder / "1_Pooling").mkdir()
    names = ("cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens", "lasttoken")
    chosen = {f"pooling_mode_{name}": name in poolings for name in names}
    write_json(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": 32, **chosen})
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": longest, **limits})
    return folder


def write_json(file: Path, document: Any) -> None:
    file.write_text(json.dumps(document), encoding="utf-8")


def tokens_of(folder: Path, text: str, longest: int) -> list[int]:
    """As the tokenizers library has them."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(longest)
    return list(tokenizer.encode(text).ids)


def plain(
    folder: Path, text: str, *, longest: int = 24, pooling: str = "mean_tokens", normalised: bool = True
) -> Tensor:
    """The vector of one text by transformers alone: one row, nothing padded, in the dtype of the folder."""
    make_torchvision_importable()
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, dtype="auto").eval()
    ids = tokens_of(folder, text, longest)
    with torch.no_grad():
        hidden = model(input_ids=torch.tensor([ids])).last_hidden_state[0]
    vector: Tensor = {
        "mean_tokens": lambda: hidden.mean(0),
        "mean_sqrt_len_tokens": lambda: hidden.sum(0) / len(ids) ** 0.5,
        "cls_token": lambda: hidden[0],
        "lasttoken": lambda: hidden[-1],
        "max_tokens": lambda: hidden.max(0).values,
    }[pooling]()
    return vector / vector.norm() if normalised else vector
