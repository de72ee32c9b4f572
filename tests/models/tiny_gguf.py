"""Tiny GGUF files, written with the package gguf as llama.cpp's converter writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]
Type = gguf.GGMLQuantizationType

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def permuted(weight: Array, heads: int) -> Array:
    """llama.cpp's LlamaModel.permute, as it stands in convert_hf_to_gguf.py."""
    shape = weight.shape
    halves = weight.reshape(heads, 2, shape[0] // heads // 2, *shape[1:])
    result: Array = halves.swapaxes(1, 2).reshape(shape)
    return result


def gguf_name(name: str) -> str:
    """``model.layers.0.mlp.up_proj.weight`` → ``blk.0.ffn_up.weight``."""
    stem, _, suffix = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, number, rest = stem.split(".", 3)
        return f"blk.{number}.{NAMES[rest]}.{suffix}"
    return f"{NAMES[stem]}.{suffix}"


def write_gguf(
    path: Path, model: Any, architecture: str, *, kind: Type = Type.F32, permute: bool = False, vocabulary: bool = False
) -> Path:
    """A model of transformers with one of llama.cpp's types for its matrices and fp32 for its vectors."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if vocabulary:
        add_vocabulary(writer, config.vocab_size)
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array: Array = value.float().numpy()
        for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if permute and part in name:
                array = permuted(array, heads)
        own = kind if array.ndim > 1 else Type.F32
        writer.add_tensor(gguf_name(name), gguf.quants.quantize(array, own), raw_dtype=own)
    write_out(writer)
    return path


def add_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """A byte-level vocabulary of single letters and one merge."""
    letters = [chr(code) for code in range(ord("!"), ord("!") + size - 3)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(["<s>", "</s>", *letters, "ab"])
    writer.add_token_types([3, 3, *([1] * (size - 2))])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)


def write_out(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
