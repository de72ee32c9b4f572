"""Small decoders of transformers, without weights from anywhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from microbatch.models.torchvision_operators import make_torchvision_importable
from tests.pipeline.execution.jobs import VOCABULARY, sentences

_SHARED = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 16,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_OWN: dict[str, dict[str, Any]] = {
    "llama": _SHARED,
    "gemma2": {**_SHARED, "sliding_window": 8, "query_pre_attn_scalar": 8, "tie_word_embeddings": True},
    "qwen3": _SHARED,
    "gpt2": {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 16, "resid_pdrop": 0.0,
             "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2},
}  # fmt: skip


def decoder_of(name: str) -> Any:
    """A causal language model in float64, the same each time."""
    make_torchvision_importable()
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **_OWN[name])
    return AutoModelForCausalLM.from_config(config).double()  # type: ignore[no-untyped-call]


def texts() -> dict[str, Tensor]:
    """Padded on the right."""
    return sentences(9, seed=4)


def of_decoder(model: Any, batch: dict[str, Tensor]) -> Any:
    return model(input_ids=batch["tokens"], attention_mask=batch["attention_mask"], use_cache=False)["logits"]
