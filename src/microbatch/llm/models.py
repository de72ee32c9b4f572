"""Decoders out of transformers' classes: the one file that knows them (5.24).

Weights are shared with the model where they are used as they are; fused and packed ones are copies. The model itself is
only read, so that it can train on; but training it makes a decoder wrong that was made before: make it anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, relu, silu

from microbatch.errors import InvalidModel
from microbatch.llm.attention import Scores
from microbatch.llm.decoder import (
    MLP,
    Activation,
    Decoder,
    Experts,
    GatedMLP,
    Layer,
    LayerNorm,
    Norm,
    PlainMLP,
    RMSNorm,
    Rope,
)
from microbatch.llm.packed import Linear, fused
from microbatch.models.packed_linear import is_available

ACTIVATIONS: dict[str, Activation] = {
    "silu": silu,
    "swish": silu,
    "relu": relu,
    "gelu": gelu,
    "gelu_new": partial(gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(gelu, approximate="tanh"),
}
"""By the name in config.json; others run as transformers has them."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, slots=True)
class Family:
    """What differs between classes that name their parts as Llama does.

    Attributes:
        window: whose `sliding_window` counts: the whole model's, each layer's own, or none.
        softcap: scores are capped, as `attn_logit_softcapping` says.
        sandwich: norms after attention and after the MLP as well, weights counted from 1 (Gemma).
        normalised, rounded: see `Experts`; None for "as config.json says".
    """

    window: Literal["model", "layer"] | None = None
    softcap: bool = False
    sandwich: bool = False
    normalised: bool | None = None
    rounded: bool = False


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(),
    "Qwen2ForCausalLM": Family(window="layer"),
    "Qwen3ForCausalLM": Family(window="layer"),
    "MistralForCausalLM": Family(window="model"),
    "MixtralForCausalLM": Family(window="model", normalised=True),
    "Qwen3MoeForCausalLM": Family(window="model", rounded=True),
    "Phi3ForCausalLM": Family(window="model"),
    "Gemma2ForCausalLM": Family(window="layer", softcap=True, sandwich=True),
    "Gemma3ForCausalLM": Family(window="layer", sandwich=True),
}
KNOWN = (*FAMILIES, "GPT2LMHeadModel")


def load(
    path: str | Path, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> tuple[Decoder, Any]:
    """The decoder of a folder with config.json and safetensors, and its config.

    Args:
        dtype: by default what config.json says, else fp32.
        device: by default the CPU.

    Raises:
        InvalidModel: see `microbatch.models.hugging_face.load_folder`; or no family that is known.
    """
    from microbatch.models.hugging_face import load_folder

    model: Any = load_folder(str(path), dtype=dtype).model
    if device is not None:
        model.to(device)
    return decoder_of(model), model.config


@torch.no_grad()
def decoder_of(model: Any, *, dtype: torch.dtype | None = None, arithmetic: torch.dtype | None = None) -> Decoder:
    """The model's weights of this moment as a decoder.

    Args:
        model: of transformers, one of `KNOWN`.
        dtype: that the weights are rounded to; by default their own.
        arithmetic: dtype that products run in; by default `dtype`, and fp32 on a CPU without fast products in it.

    Raises:
        InvalidModel: another class, or one with parts that were replaced.
    """
    name = type(model).__name__
    if name not in KNOWN:
        raise InvalidModel(f"Generation does not know the class {name}.", f"Use a model of {', '.join(KNOWN)}.")
    _check(model)
    weight = model.get_input_embeddings().weight
    dtype = dtype or weight.dtype
    if dtype not in DTYPES:
        raise InvalidModel(f"{name} has weights in {dtype}.", "Use fp32, bf16 or fp16.")
    read = _Reading(model, dtype, arithmetic or fast_arithmetic(dtype, weight.device))
    return _gpt2(read) if name == "GPT2LMHeadModel" else _llama(read, FAMILIES[name])


def fast_arithmetic(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype itself, or fp32 on a CPU where oneDNN has no products of the 16-bit one: torch's own take eight times
    as long there as those in fp32 (benchmarks/generation_kernels.py)."""
    return torch.float32 if device.type == "cpu" and dtype.itemsize == 2 and not is_available(dtype) else dtype


def _check(model: Any) -> None:
    """Every part is what its family has: a replaced one (an adapter, a quantised layer, a hook) would be passed by."""
    for name, module in model.named_modules():
        if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
            raise InvalidModel(f"{name or 'The model'} has a hook, which generation would pass by.", "Remove it.")
        if isinstance(module, nn.Linear) and type(module) is not nn.Linear:
            raise InvalidModel(
                f"{name} is a {type(module).__name__}, which generation does not know.", "Merge it into a plain Linear."
            )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise InvalidModel("The model has no weights: they lie on the meta device.", "Load them first.")


def _check_plain(module: Any, kind: str) -> None:
    """An adapter may stand in the place of a layer and show the weights of what it adapts."""
    if type(module).__name__ != kind:
        raise InvalidModel(f"A {type(module).__name__} stands in for a {kind}.", f"Merge it into a plain {kind}.")


@dataclass(frozen=True, slots=True)
class _Reading:
    """A model, and the dtypes that its weights go through."""

    model: Any
    dtype: torch.dtype
    arithmetic: torch.dtype

    @property
    def config(self) -> Any:
        return self.model.config

    def values(self, tensor: Tensor) -> Tensor:
        """The tensor itself where neither dtype changes it."""
        return tensor.detach().to(self.dtype).to(self.arithmetic)

    def linear(self, *modules: Any) -> Linear:
        """Linear layers over the same input as one."""
        for module in modules:
            _check_plain(module, "Linear")
        return fused([(self.values(module.weight), self._bias(module)) for module in modules])

    def _bias(self, module: Any) -> Tensor | None:
        return None if module.bias is None else self.values(module.bias)

    def rms_norm(self, module: Any, from_one: bool) -> RMSNorm:
        eps = module.eps if from_one else module.variance_epsilon
        weight = module.weight.detach().to(self.dtype)
        if from_one:  # Gemma's product comes before the rounding
            return RMSNorm(1.0 + weight.float(), eps)
        return RMSNorm(weight.to(self.arithmetic), eps)

    def layer_norm(self, module: nn.LayerNorm) -> LayerNorm:
        return LayerNorm(self.values(module.weight), self.values(module.bias), module.eps)

    def activation(self, name: str, module: Any) -> Activation:
        found: Activation = ACTIVATIONS.get(name, module)
        return found

    def decoder(self, layers: Sequence[Layer], norm: Norm, context: int, **parts: Any) -> Decoder:
        embedding = self.model.get_input_embeddings().weight.detach().to(self.dtype)
        return Decoder(
            name=type(self.model).__name__,
            vocab_size=embedding.shape[0],
            context=context,
            dtype=self.dtype,
            arithmetic=self.arithmetic,
            device=embedding.device,
            embedding=embedding,
            layers=tuple(layers),
            norm=norm,
            head=self.linear(self.model.get_output_embeddings()),
            **parts,
        )


def _gpt2(read: _Reading) -> Decoder:
    body, config = read.model.transformer, read.config
    if config.add_cross_attention:
        raise InvalidModel("This GPT2LMHeadModel attends to an encoder.", "Use one without add_cross_attention.")

    def linear(module: Any) -> Linear:
        _check_plain(module, "Conv1D")
        return Linear(read.values(module.weight).T.contiguous(), read.values(module.bias))  # Conv1D is [in, out]

    def layer(block: Any) -> Layer:
        activation = read.activation(config.activation_function, block.mlp.act)
        return Layer(
            heads=block.attn.num_heads,
            kv_heads=block.attn.num_heads,
            head_dim=block.attn.head_dim,
            scores=Scores(block.attn.scaling),
            window=None,
            rope=None,
            qkv=linear(block.attn.c_attn),
            output=linear(block.attn.c_proj),
            mlp=PlainMLP(linear(block.mlp.c_fc), linear(block.mlp.c_proj), activation, config.hidden_size),
            norm=read.layer_norm(block.ln_1),
            mlp_norm=read.layer_norm(block.ln_2),
        )

    positions = body.wpe.weight.detach().to(read.dtype)
    layers = [layer(block) for block in body.h]
    return read.decoder(layers, read.layer_norm(body.ln_f), positions.shape[0], positions=positions)


def _llama(read: _Reading, family: Family) -> Decoder:
    body, config = read.model.model, read.config
    if getattr(config, "use_bidirectional_attention", False):
        raise InvalidModel(f"This {type(read.model).__name__} attends both ways.", "Use a causal one.")
    ropes, rope_of, context = _ropes(read)
    layers = [_layer(read, family, layer, rope_of(index)) for index, layer in enumerate(body.layers)]
    scale = getattr(body.embed_tokens, "embed_scale", None)
    return read.decoder(
        layers,
        read.rms_norm(body.norm, family.sandwich),
        context,
        ropes=ropes,
        embedding_scale=1.0 if scale is None else float(scale.to(read.dtype)),
        softcap=getattr(config, "final_logit_softcapping", None),
    )


def _layer(read: _Reading, family: Family, layer: Any, rope: int) -> Layer:
    config, attention = read.config, layer.self_attn
    whole = hasattr(attention, "qkv_proj")
    parts = (attention.qkv_proj,) if whole else (attention.q_proj, attention.k_proj, attention.v_proj)
    norm = partial(read.rms_norm, from_one=family.sandwich)
    windows = {"model": config, "layer": attention, None: None}
    after = (
        {
            "mlp_norm": norm(layer.pre_feedforward_layernorm),
            "output_norm": norm(layer.post_attention_layernorm),
            "mlp_output_norm": norm(layer.post_feedforward_layernorm),
        }
        if family.sandwich
        else {"mlp_norm": norm(layer.post_attention_layernorm)}
    )
    if hasattr(attention, "q_norm"):
        after |= {"q_norm": norm(attention.q_norm), "k_norm": norm(attention.k_norm)}
    return Layer(
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=attention.head_dim,
        scores=Scores(attention.scaling, config.attn_logit_softcapping if family.softcap else None),
        window=getattr(windows[family.window], "sliding_window", None),
        rope=rope,
        qkv=read.linear(*parts),
        output=read.linear(attention.o_proj),
        mlp=_mlp(read, family, layer.mlp),
        norm=norm(layer.input_layernorm),
        **after,
    )


def _mlp(read: _Reading, family: Family, module: Any) -> MLP:
    config = read.config
    if hasattr(module, "experts"):
        return _experts(read, family, module)
    name = config.hidden_activation if family.sandwich else config.hidden_act
    activation = read.activation(name, getattr(module, "act_fn", None) or module.activation_fn)
    whole = hasattr(module, "gate_up_proj")
    parts = (module.gate_up_proj,) if whole else (module.gate_proj, module.up_proj)
    return GatedMLP(read.linear(*parts), read.linear(module.down_proj), activation, config.hidden_size)


def _experts(read: _Reading, family: Family, module: Any) -> Experts:
    config, experts = read.config, module.experts
    activation = read.activation(config.hidden_act, experts.act_fn)
    gates, downs = read.values(experts.gate_up_proj), read.values(experts.down_proj)
    normalised = config.norm_topk_prob if family.normalised is None else family.normalised
    return Experts(
        Linear(read.values(module.gate.weight)),
        tuple(GatedMLP(Linear(g), Linear(d), activation, config.hidden_size) for g, d in zip(gates, downs)),
        module.gate.top_k,
        normalised,
        family.rounded,
    )


def _ropes(read: _Reading) -> tuple[tuple[Rope, ...], Callable[[int], int], int]:
    """The rotary positions, which of them a layer has, and how many positions hold in them.

    Longer texts change the frequencies of every position in longrope, keys in the cache included, and in dynamic NTK:
    both end where they would.
    """
    module, config = read.model.model.rotary_emb, read.config
    kinds = sorted(module.rope_type) if isinstance(module.rope_type, dict) else [""]
    ropes, context = [], config.max_position_embeddings
    for kind in kinds:
        before = f"{kind}_" if kind else ""
        frequencies = getattr(module, f"{before}original_inv_freq").detach()
        ropes.append(Rope(frequencies, getattr(module, f"{before}attention_scaling"), read.arithmetic))
        settings = config.rope_parameters[kind] if kind else config.rope_parameters
        if settings["rope_type"] == "longrope":
            context = min(context, settings["original_max_position_embeddings"])
    return tuple(ropes), lambda index: kinds.index(config.layer_types[index]) if kinds != [""] else 0, context
