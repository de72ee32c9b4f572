"""Tiny models of transformers as folders, by architecture; made from configs, with no download."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHARED = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
ENCODER = {**VISION, "vocab_size": 96, "max_position_embeddings": 64}
MLA = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "layer_types": ["linear_attention", "full_attention"],
}


@dataclass(frozen=True, slots=True)
class Tiny:
    """One architecture: its class, and config.json without what transformers fills in."""

    kind: str
    model_type: str
    settings: dict[str, Any]


CAUSAL = {
    "llama": Tiny("LlamaForCausalLM", "llama", SHARED),
    "sliding": Tiny("MistralForCausalLM", "mistral", {**SHARED, "sliding_window": 8}),
    "mixed windows": Tiny(
        "Gemma3ForCausalLM",
        "gemma3_text",
        {**SHARED, "head_dim": 8, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "latent": Tiny("DeepseekV3ForCausalLM", "deepseek_v3", {**SHARED, **MLA}),
    "experts": Tiny("MixtralForCausalLM", "mixtral", {**SHARED, "num_local_experts": 4}),
    "learned positions": Tiny(
        "GPT2LMHeadModel", "gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 96, "n_positions": 64}
    ),
    "linear attention": Tiny("Qwen3NextForCausalLM", "qwen3_next", {**SHARED, **LINEAR}),
    "state space": Tiny(
        "MambaForCausalLM", "mamba", {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 96, "state_size": 8}
    ),
}
OTHERS = {
    "encoder": Tiny("BertForMaskedLM", "bert", ENCODER),
    "encoder from padding": Tiny("RobertaForMaskedLM", "roberta", ENCODER),
    "images": Tiny("ViTForImageClassification", "vit", {**VISION, "image_size": 32, "patch_size": 8}),
    "convolutions": Tiny(
        "ResNetForImageClassification", "resnet", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}
    ),
    "encoder and decoder": Tiny(
        "T5ForConditionalGeneration",
        "t5",
        {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 2, "num_heads": 4, "vocab_size": 96},
    ),
    "text and images": Tiny(
        "CLIPModel",
        "clip",
        {"text_config": ENCODER, "vision_config": {**VISION, "image_size": 32, "patch_size": 8}},
    ),
    "sound": Tiny(
        "Wav2Vec2Model",
        "wav2vec2",
        {
            **VISION,
            "conv_dim": [8] * 7,
            "num_conv_pos_embeddings": 4,
            "num_conv_pos_embedding_groups": 2,
        },
    ),
    "spectrum": Tiny(
        "WhisperForConditionalGeneration",
        "whisper",
        {
            "d_model": 32,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "vocab_size": 96,
            "pad_token_id": 1,
            "bos_token_id": 2,
            "eos_token_id": 3,
            "decoder_start_token_id": 4,
            "max_source_positions": 50,
        },
    ),
}


def write_folder(folder: Path, tiny: Tiny, **more: object) -> str:
    """config.json in a new folder; returns its name as a user writes it."""
    folder.mkdir(exist_ok=True)
    settings = {"model_type": tiny.model_type, "architectures": [tiny.kind], **tiny.settings, **more}
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    return str(folder)
