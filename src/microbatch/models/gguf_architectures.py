"""The models of GGUF files as transformers knows them: config, names of weights, and what llama.cpp changed in them.

To support another architecture, write a function from a file to its config beyond `_shared`, and its row in
`ARCHITECTURES`. Source for names and changes: llama.cpp, convert_hf_to_gguf.py and gguf-py/gguf/constants.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from microbatch.errors import InvalidModel
from microbatch.models.gguf_file import GgufFile


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """One architecture.

    Attributes:
        kind: the transformers class.
        settings: from a file to what its config holds beyond `shared_settings`.
        names: names of weights that differ from `NAMES`.
        permuted: whether the rows of query and key weights lie in llama.cpp's order, pairs of a rotation together.
        norm_offset: what llama.cpp added to the weights of normalisations.
        needs_range: whether its activations overflow fp16, so that 16-bit weights become bf16.
    """

    kind: str
    settings: Callable[[GgufFile], dict[str, Any]] = lambda _: {}
    names: Mapping[str, str] = field(default_factory=dict)
    permuted: bool = False
    norm_offset: float = 0.0
    needs_range: bool = False


def find_architecture(file: GgufFile) -> Architecture:
    """
    Raises:
        InvalidModel: an architecture that is not in `ARCHITECTURES`.
    """
    name = file.architecture
    if name == "llama" and file.metadata.get("expert_count"):
        name = "llama with experts"
    if name not in ARCHITECTURES:
        known = ", ".join(key for key in ARCHITECTURES if " " not in key)
        raise InvalidModel(f"The architecture {name!r} of {file.path} cannot be converted.", f"Known: {known}.")
    return ARCHITECTURES[name]


def settings_of(file: GgufFile, architecture: Architecture) -> dict[str, Any]:
    """The config's keywords.

    Raises:
        InvalidModel: metadata that the config needs are missing.
    """
    try:
        return {**_shared(file), **architecture.settings(file)}
    except KeyError as error:
        raise InvalidModel(f"{file.path} lacks the metadata {error.args[0]!r}.", "Take another file.") from error


def _shared(file: GgufFile) -> dict[str, Any]:
    meta = file.metadata
    heads = meta["attention.head_count"]
    return {
        "vocab_size": file.shape("token_embd.weight")[0],
        "hidden_size": meta["embedding_length"],
        "intermediate_size": meta.get("feed_forward_length") or 0,
        "num_hidden_layers": meta["block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": meta.get("attention.head_count_kv", heads),
        "head_dim": _head_width(file),
        "max_position_embeddings": meta["context_length"],
        "rms_norm_eps": _rounded(meta["attention.layer_norm_rms_epsilon"]),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_parameters": _rope(file),
        **_special_tokens(meta),
    }


def _head_width(file: GgufFile) -> int:
    meta = file.metadata
    found = meta.get("attention.key_length") or meta.get("rope.dimension_count")
    return int(found or meta["embedding_length"] // meta["attention.head_count"])


def _rounded(value: float) -> float:
    """A decimal that was stored in 32 bits, as it was meant: 1e-5 and not 9.99999974e-06."""
    return float(np.format_float_positional(np.float32(value), unique=True))


def _special_tokens(meta: Mapping[str, Any]) -> dict[str, int]:
    keys = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    found = {name: meta.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    return {name: int(value) for name, value in found.items() if value is not None}


def _rope(file: GgufFile) -> dict[str, Any]:
    """Base and scaling of the rotations."""
    meta = file.metadata
    theta = {"rope_theta": _rounded(meta.get("rope.freq_base", _DEFAULT_THETA))}
    kind = meta.get("rope.scaling.type", "none")
    if "rope_freqs.weight" in file.tensors:
        return {**theta, **_llama3_scaling(file, theta["rope_theta"])}
    if kind == "linear":
        return {**theta, "rope_type": "linear", "factor": _rounded(meta["rope.scaling.factor"])}
    if kind == "yarn":
        return {
            **theta,
            "rope_type": "yarn",
            "factor": _rounded(meta["rope.scaling.factor"]),
            "original_max_position_embeddings": meta["rope.scaling.original_context_length"],
        }
    if kind == "longrope" or "rope_factors_long.weight" in file.tensors:
        return {**theta, **_long_scaling(file)}
    if kind != "none":
        raise InvalidModel(
            f"{file.path} scales its rotations by {kind!r}.", "Only none, linear, yarn and longrope work."
        )
    return {**theta, "rope_type": "default"}


def _llama3_scaling(file: GgufFile, theta: float) -> dict[str, Any]:
    """Llama 3.1 stores its scaling as one factor per frequency; its own four numbers give them back.

    Raises:
        InvalidModel: they do not, so that the factors are another model's.
    """
    factors = file.values("rope_freqs.weight").astype(np.float64)
    scaling = {
        "rope_type": "llama3",
        "factor": _rounded(float(factors.max())),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    if not np.allclose(factors, _llama3_factors(scaling, theta, 2 * len(factors)), rtol=1e-3):
        raise InvalidModel(f"{file.path} scales its rotations in a way of its own.", "Take the original model.")
    return scaling


def _llama3_factors(scaling: Mapping[str, Any], theta: float, width: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """What each frequency is divided by (transformers, modeling_rope_utils, _compute_llama3_parameters)."""
    wavelengths = 2 * math.pi * theta ** (np.arange(0, width, 2) / width)
    low, high, most = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    smooth = np.clip((scaling["original_max_position_embeddings"] / wavelengths - low) / (high - low), 0, 1)
    return np.asarray(1 / ((1 - smooth) / most + smooth))


def _long_scaling(file: GgufFile) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "long_factor": [_rounded(value) for value in file.values("rope_factors_long.weight")],
        "short_factor": [_rounded(value) for value in file.values("rope_factors_short.weight")],
        "original_max_position_embeddings": file.metadata["rope.scaling.original_context_length"],
    }


def _llama(file: GgufFile) -> dict[str, Any]:
    return {
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
    }


def _mixtral(file: GgufFile) -> dict[str, Any]:
    return {
        "num_local_experts": file.metadata["expert_count"],
        "num_experts_per_tok": file.metadata["expert_used_count"],
        "sliding_window": None,
    }


def _qwen2_experts(file: GgufFile) -> dict[str, Any]:
    return {
        **_experts(file),
        "shared_expert_intermediate_size": file.shape("blk.0.ffn_gate_shexp.weight")[0],
        "norm_topk_prob": False,
    }


def _qwen3_experts(file: GgufFile) -> dict[str, Any]:
    return {**_experts(file), "norm_topk_prob": True}


def _experts(file: GgufFile) -> dict[str, Any]:
    return {
        "num_experts": file.metadata["expert_count"],
        "num_experts_per_tok": file.metadata["expert_used_count"],
        "moe_intermediate_size": file.shape("blk.0.ffn_gate_exps.weight")[1],
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _gemma2(file: GgufFile) -> dict[str, Any]:
    meta = file.metadata
    return {
        "attn_logit_softcapping": _rounded(meta["attn_logit_softcapping"]),
        "final_logit_softcapping": _rounded(meta["final_logit_softcapping"]),
        "sliding_window": meta["attention.sliding_window"],
        "query_pre_attn_scalar": _query_scale(file, layers_of_largest=46),
    }


def _gemma3(file: GgufFile) -> dict[str, Any]:
    meta = file.metadata
    cap = meta.get("final_logit_softcapping")
    local = {"rope_type": "default", "rope_theta": _rounded(meta.get("rope.freq_base_swa", _DEFAULT_THETA))}
    full = {"rope_theta": _GEMMA3_THETA, **_rope(file)} if "rope.freq_base" not in meta else _rope(file)
    return {
        "final_logit_softcapping": None if cap is None else _rounded(cap),
        "sliding_window": meta["attention.sliding_window"],
        "query_pre_attn_scalar": _query_scale(file, layers_of_largest=62),
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
    }


def _query_scale(file: GgufFile, *, layers_of_largest: int) -> int:
    """The width of a head; hidden size over heads in the 27B model, which llama.cpp knows by its layers."""
    meta = file.metadata
    if meta["block_count"] == layers_of_largest:
        return int(meta["embedding_length"] // meta["attention.head_count"])
    return _head_width(file)


def _phi3(file: GgufFile) -> dict[str, Any]:
    meta = file.metadata
    width = meta["embedding_length"] // meta["attention.head_count"]
    rope = {**_rope(file), "partial_rotary_factor": meta["rope.dimension_count"] / width}
    return {
        "head_dim": width,
        "original_max_position_embeddings": meta.get("rope.scaling.original_context_length", meta["context_length"]),
        "sliding_window": meta.get("attention.sliding_window") or None,
        "rope_parameters": rope,
    }


_DEFAULT_THETA = 10_000.0
_GEMMA3_THETA = 1_000_000.0

NAMES: dict[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.*.gate_proj",
    "ffn_up_exps": "mlp.experts.*.up_proj",
    "ffn_down_exps": "mlp.experts.*.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
"""llama.cpp's names of weights, and those of transformers; * stands for each expert, stacked in llama.cpp's."""

UNUSED = frozenset({"rope_freqs", "rope_factors_long", "rope_factors_short"})
"""Tensors that belong in the config."""

_GEMMA_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_MIXTRAL_NAMES = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.*.w1",
    "ffn_down_exps": "block_sparse_moe.experts.*.w2",
    "ffn_up_exps": "block_sparse_moe.experts.*.w3",
}

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(kind="LlamaForCausalLM", settings=_llama, permuted=True),
    "llama with experts": Architecture(
        kind="MixtralForCausalLM", settings=_mixtral, names=_MIXTRAL_NAMES, permuted=True
    ),
    "qwen2": Architecture(kind="Qwen2ForCausalLM"),
    "qwen2moe": Architecture(kind="Qwen2MoeForCausalLM", settings=_qwen2_experts),
    "qwen3": Architecture(kind="Qwen3ForCausalLM"),
    "qwen3moe": Architecture(kind="Qwen3MoeForCausalLM", settings=_qwen3_experts),
    "gemma": Architecture(kind="GemmaForCausalLM", norm_offset=1.0, needs_range=True),
    "gemma2": Architecture(
        kind="Gemma2ForCausalLM", settings=_gemma2, names=_GEMMA_NAMES, norm_offset=1.0, needs_range=True
    ),
    "gemma3": Architecture(
        kind="Gemma3ForCausalLM", settings=_gemma3, names=_GEMMA_NAMES, norm_offset=1.0, needs_range=True
    ),
    "phi3": Architecture(kind="Phi3ForCausalLM", settings=_phi3, names={"ffn_up": "mlp.gate_up_proj"}),
}
"""By llama.cpp's name; Mistral's models are of "llama" there, and of LlamaForCausalLM here, which computes the same."""
