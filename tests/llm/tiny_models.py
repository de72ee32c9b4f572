"""Random-weight models of every family, small enough to run one by one beside ours."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from microbatch.models.hugging_face import import_transformers, quiet

SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "initializer_range": 0.3,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 1e4,
}
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 2}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 7, "num_hidden_layers": 4}
GEMMA3_LAYERS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
GEMMA3_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 64,
    "rope_theta": 1e4,
}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-mha-tied": ("Llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama-mqa-biases": ("Llama", {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("Llama", {"head_dim": 12}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "llama-dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
    "llama-gelu": ("Llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "qwen2": ("Qwen2", {}),
    "qwen2-sliding": ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "mistral": ("Mistral", {"sliding_window": 7}),
    "mistral-one-block": ("Mistral", {"sliding_window": 16}),
    "mistral-full": ("Mistral", {"sliding_window": None}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral-sliding": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 1, "sliding_window": 10}),
    "qwen3-moe": ("Qwen3Moe", {**MOE, "norm_topk_prob": True}),
    "qwen3-moe-plain-shares": ("Qwen3Moe", {**MOE, "decoder_sparse_step": 1, "norm_topk_prob": False}),
    "gemma2": ("Gemma2", {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3Text", {**GEMMA, "rope_parameters": GEMMA3_ROPES, "layer_types": GEMMA3_LAYERS}),
    "phi3": ("Phi3", {"sliding_window": 11}),
    "phi3-longrope": ("Phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 64}),
    "phi3-partial": (
        "Phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}, "head_dim": 16},
    ),
    "gpt2": ("GPT2", {}),
    "gpt2-by-layer": ("GPT2", {"scale_attn_by_inverse_layer_idx": True, "activation_function": "relu"}),
}
CLASSES = {"GPT2": "GPT2LMHeadModel", "Gemma3Text": "Gemma3ForCausalLM"}


@cache
def tiny(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """The model, in eval mode; one for all tests, which must not change it."""
    return build(name, dtype)


def build(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """A fresh one, with the weights that its name always has."""
    kind, settings = MODELS[name]
    transformers = import_transformers("The tests compare with transformers")
    with quiet(), torch.random.fork_rng():
        torch.manual_seed(len(name))
        config = getattr(transformers, f"{kind}Config")(**{**SIZES, **settings})
        model = getattr(transformers, CLASSES.get(kind, f"{kind}ForCausalLM"))(config)
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and biases start as ones and zeros, which would hide their use
                parameter.data.add_(torch.randn_like(parameter) * 0.2)
    model.config._experts_implementation = "eager"  # grouped products have no fp64
    return model.to(dtype).eval()


@torch.no_grad()
def reference(model: Any, ids: list[int]) -> torch.Tensor:
    """Logits [tokens, vocabulary] of one text alone, by transformers."""
    found: torch.Tensor = model(torch.tensor([ids]), use_cache=False).logits[0]
    return found
