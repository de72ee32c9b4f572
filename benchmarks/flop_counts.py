"""FLOPs of matrix products, convolutions and attention: captured, against counts that share no code with the capture.

    python benchmarks/flop_counts.py [--layers N] [--out benchmarks/results/flop_counts.json]

* Vision models of torchvision and timm: the model runs on the meta device under plain hooks that see a module and the
  shapes of its input and output (`count_by_hooks`).
* Language and other models of transformers: closed forms over the numbers of their config (`CONFIGS`), in the modes
  inference, prefill and decode.

Both count 2 FLOPs for a multiply-add, causal attention with the pairs that are kept, and leave out everything that
works element by element; of the captured work only `PRODUCTS` are added up. The two must be equal to the last digit.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from microbatch.batch.example import with_batch_size
from microbatch.capture.work import capture_work
from microbatch.models.hugging_face import load_folder
from microbatch.models.modes import in_mode
from microbatch.models.vision import load_vision
from microbatch.work.operators import Work

PRODUCTS = ("matmul", "convolution", "attention", "recurrent", "experts")

VISION = (
    "torchvision:resnet50", "torchvision:mobilenet_v3_large", "torchvision:efficientnet_b0", "torchvision:densenet121",
    "torchvision:convnext_tiny", "torchvision:regnet_y_400mf", "torchvision:vgg11", "torchvision:shufflenet_v2_x1_0",
    "torchvision:vit_b_16", "torchvision:swin_t", "torchvision:inception_v3", "torchvision:mnasnet1_0",
    "timm:resnet50", "timm:vit_small_patch16_224", "timm:mixer_b16_224", "timm:convnextv2_atto",
    "timm:deit_tiny_patch16_224", "timm:efficientnetv2_rw_t", "timm:resnext50_32x4d", "timm:mobilenetv4_conv_small",
)  # fmt: skip


def products_of(work: Work, batch: int, sequence: int = 1) -> int:
    """FLOPs of all matrix products in one call."""
    kept = (operator for operator in work.operators if operator.kind in PRODUCTS)
    return round(sum(operator.repeat * operator.flops(batch, sequence) for operator in kept))


def count_by_hooks(model: nn.Module, args: tuple[Any, ...]) -> int:
    """FLOPs of one call of a vision model, from the shapes that its modules see."""
    total: int = 0

    def add(module: nn.Module, given: tuple[Any, ...], out: Any) -> None:
        nonlocal total
        kinds = {kind.__name__ for kind in type(module).__mro__}
        rule = next((RULES[name] for name in RULES if name in kinds), None)
        total += rule(module, given[0], out) if rule else 0

    handles = [module.register_forward_hook(add) for module in model.modules()]
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            model(*args)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for handle in handles:
            handle.remove()
    return int(total)


def _convolution(module: Any, _: Tensor, out: Tensor) -> int:
    return int(2 * out.numel() * prod(module.weight.shape[1:]))


def _linear(module: Any, given: Tensor, _: Tensor) -> int:
    return 2 * given.numel() * int(module.out_features)


def _multihead(module: Any, given: Tensor, _: Any) -> int:
    """Its four projections run without being called as modules."""
    batch, tokens, width = given.shape if module.batch_first else (given.shape[1], given.shape[0], given.shape[2])
    return int(2 * batch * tokens * 4 * width**2 + 4 * batch * tokens**2 * width)


def _timm_attention(_: Any, given: Tensor, __: Any) -> int:
    """The projections are modules of their own."""
    batch, tokens, width = given.shape
    return 4 * batch * tokens**2 * width


def _windows(module: Any, given: Tensor, _: Any) -> int:
    """(batch, height, width, channels), padded to whole windows; the projections run without being called."""
    batch, height, width, channels = given.shape
    window_height, window_width = module.window_size
    rows, columns = -(-height // window_height) * window_height, -(-width // window_width) * window_width
    tokens = batch * rows * columns
    return int(2 * tokens * 4 * channels**2 + 4 * tokens * window_height * window_width * channels)


RULES: dict[str, Callable[[Any, Any, Any], int]] = {
    "_ConvNd": _convolution,
    "NonDynamicallyQuantizableLinear": lambda *_: 0,  # counted with its MultiheadAttention, which does not call it
    "Linear": _linear,
    "MultiheadAttention": _multihead,
    "Attention": _timm_attention,
    "ShiftedWindowAttention": _windows,
}
"""By the name of a module's class or of one of its bases."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """One call of one sequence.

    Attributes:
        new: tokens that the model is given.
        seen: tokens that they look at, those in the cache included.
        pairs: of a token and one that it looks at.
        all_pairs: the same without causality.
        answers: rows of logits.
    """

    new: int
    seen: int
    pairs: int
    all_pairs: int
    answers: int


def tokens_in(mode: str, sequence: int) -> Tokens:
    """What a causal model sees in a mode; for decode `sequence` tokens are in the cache."""
    if mode == "decode":
        return Tokens(new=1, seen=sequence + 1, pairs=sequence + 1, all_pairs=sequence + 1, answers=1)
    half, square = sequence * (sequence + 1) // 2, sequence**2
    return Tokens(
        new=sequence, seen=sequence, pairs=half, all_pairs=square, answers=1 if mode == "prefill" else sequence
    )


Numbers = dict[str, Any]
Form = Callable[[Numbers, Tokens], int]


def _attention(c: Numbers, t: Tokens, pairs: int | None = None) -> int:
    """Projections and products of one layer of grouped-query attention."""
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    width, groups = c.get("head_dim") or hidden // heads, c.get("num_key_value_heads") or heads
    projections = 2 * t.new * hidden * width * (2 * heads + 2 * groups)
    return int(projections + 4 * heads * width * (t.pairs if pairs is None else pairs))


def _gated(hidden: int, inner: int, t: Tokens) -> int:
    return 2 * t.new * 3 * hidden * inner


def _plain(hidden: int, inner: int, t: Tokens) -> int:
    return 2 * t.new * 2 * hidden * inner


def _logits(c: Numbers, t: Tokens) -> int:
    return int(2 * t.answers * c["hidden_size"] * c["vocab_size"])


def llama(c: Numbers, t: Tokens) -> int:
    """Attention and a gated feed-forward layer."""
    layer = _attention(c, t) + _gated(c["hidden_size"], c["intermediate_size"], t)
    return int(c["num_hidden_layers"] * layer + _logits(c, t))


def two_matrices(c: Numbers, t: Tokens) -> int:
    """Attention and a feed-forward layer of two matrices."""
    layer = _attention(c, t) + _plain(c["hidden_size"], c["intermediate_size"], t)
    return int(c["num_hidden_layers"] * layer + _logits(c, t))


def gpt2(c: Numbers, t: Tokens) -> int:
    """The same under other names."""
    names = {"hidden_size": "n_embd", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"}
    renamed = {ours: c[theirs] for ours, theirs in names.items()}
    return two_matrices({**renamed, "intermediate_size": 4 * c["n_embd"], "vocab_size": c["vocab_size"]}, t)


def falcon(c: Numbers, t: Tokens) -> int:
    """One key head for all query heads; transformers always gives it a mask, so no pair is skipped."""
    numbers = {**c, "num_key_value_heads": 1, "intermediate_size": 4 * c["hidden_size"]}
    return two_matrices(numbers, replace(t, pairs=t.all_pairs))


def mixture(c: Numbers, t: Tokens) -> int:
    """Attention, a gate over the experts, and the chosen ones."""
    experts, chosen = c.get("num_local_experts") or c["num_experts"], c["num_experts_per_tok"]
    inner = c.get("moe_intermediate_size") or c["intermediate_size"]
    routed = 2 * t.new * c["hidden_size"] * experts + chosen * _gated(c["hidden_size"], inner, t)
    return int(c["num_hidden_layers"] * (_attention(c, t) + routed) + _logits(c, t))


def deepseek(c: Numbers, t: Tokens) -> int:
    """Multi-head latent attention: queries and keys-and-values pass through low ranks; dense layers, then experts.

    The cache holds the low rank, so a decode step widens it for all tokens that it sees.
    """
    hidden, heads, inner = c["hidden_size"], c["num_attention_heads"], c["moe_intermediate_size"]
    nope, rope, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    queries = hidden * c["q_lora_rank"] + c["q_lora_rank"] * heads * (nope + rope)
    narrow, widening = hidden * (c["kv_lora_rank"] + rope), c["kv_lora_rank"] * heads * (nope + value)
    projections = t.new * (queries + narrow + heads * value * hidden) + t.seen * widening
    attention = 2 * projections + 2 * t.pairs * heads * (nope + rope + value)
    shared, chosen = c["n_shared_experts"], c["num_experts_per_tok"]
    routed = 2 * t.new * hidden * c["n_routed_experts"] + (chosen + shared) * _gated(hidden, inner, t)
    layers, dense = c["num_hidden_layers"], min(c["first_k_dense_replace"], c["num_hidden_layers"])
    feed_forward = dense * _gated(hidden, c["intermediate_size"], t) + (layers - dense) * routed
    return int(layers * attention + feed_forward + _logits(c, t))


def bert(c: Numbers, t: Tokens) -> int:
    """Every token sees every token; a transform and the vocabulary for each."""
    hidden = c["hidden_size"]
    layer = _attention(c, t, t.all_pairs) + _plain(hidden, c["intermediate_size"], t)
    return int(c["num_hidden_layers"] * layer + 2 * t.new * hidden * (hidden + c["vocab_size"]))


def vit(c: Numbers, _: Tokens) -> int:
    """Patches by a convolution, a class token, and a classifier on it."""
    patches = (c["image_size"] // c["patch_size"]) ** 2
    t = Tokens(new=patches + 1, seen=patches + 1, pairs=(patches + 1) ** 2, all_pairs=0, answers=1)
    layer = _attention(c, t) + _plain(c["hidden_size"], c["intermediate_size"], t)
    patching = 2 * patches * 3 * c["patch_size"] ** 2 * c["hidden_size"]
    return int(patching + c["num_hidden_layers"] * layer + 2 * c["hidden_size"] * len(c["id2label"]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """A published model's config, as far as the numbers go, and its closed form."""

    architecture: str
    numbers: Numbers
    form: Form
    modes: tuple[str, ...] = ("inference", "prefill", "decode")
    settings: Numbers = field(default_factory=dict)
    """What the closed form does not read."""


def _numbers(hidden: int, layers: int, heads: int, inner: int, vocabulary: int, **more: Any) -> Numbers:
    return {
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": inner,
        "vocab_size": vocabulary, **more,
    }  # fmt: skip


CONFIGS: dict[str, Config] = {
    "llama-3.1-405b": Config(
        architecture="llama", form=llama, numbers=_numbers(16384, 126, 128, 53248, 128256, num_key_value_heads=8)
    ),
    "llama-2-7b": Config(architecture="llama", form=llama, numbers=_numbers(4096, 32, 32, 11008, 32000)),
    "mistral-7b": Config(
        architecture="mistral", form=llama, numbers=_numbers(4096, 32, 32, 14336, 32000, num_key_value_heads=8),
        settings={"sliding_window": None},
    ),
    "qwen2-7b": Config(
        architecture="qwen2", form=llama, numbers=_numbers(3584, 28, 28, 18944, 152064, num_key_value_heads=4)
    ),
    "qwen3-8b": Config(
        architecture="qwen3", form=llama,
        numbers=_numbers(4096, 36, 32, 12288, 151936, num_key_value_heads=8, head_dim=128),
    ),
    "phi-3-mini": Config(
        architecture="phi3", form=llama, numbers=_numbers(3072, 32, 32, 8192, 32064, num_key_value_heads=32),
        settings={"pad_token_id": 0, "sliding_window": None},
    ),
    "gemma-7b": Config(
        architecture="gemma", form=llama,
        numbers=_numbers(3072, 28, 16, 24576, 256000, num_key_value_heads=16, head_dim=256),
    ),
    "gpt2": Config(
        architecture="gpt2", form=gpt2, numbers={"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}
    ),
    "gpt-neox-20b": Config(architecture="gpt_neox", form=two_matrices, numbers=_numbers(6144, 44, 64, 24576, 50432)),
    "opt-6.7b": Config(
        architecture="opt", form=two_matrices, numbers=_numbers(4096, 32, 32, 16384, 50272),
        settings={"ffn_dim": 16384, "word_embed_proj_dim": 4096},
    ),
    "falcon-7b": Config(
        architecture="falcon", form=falcon, numbers=_numbers(4544, 32, 71, 0, 65024),
        settings={"multi_query": True, "parallel_attn": True, "new_decoder_architecture": False, "bias": False},
    ),
    "mixtral-8x7b": Config(
        architecture="mixtral", form=mixture,
        numbers=_numbers(
            4096, 32, 32, 14336, 32000, num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2
        ),
    ),
    "qwen3-235b-a22b": Config(
        architecture="qwen3_moe", form=mixture,
        numbers=_numbers(
            4096, 94, 64, 12288, 151936, num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
            moe_intermediate_size=1536,
        ),
        settings={"decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    "deepseek-v3": Config(
        architecture="deepseek_v3", form=deepseek,
        numbers=_numbers(
            7168, 61, 128, 18432, 129280, num_key_value_heads=128, q_lora_rank=1536, kv_lora_rank=512,
            qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=256, n_shared_experts=1,
            num_experts_per_tok=8, moe_intermediate_size=2048, first_k_dense_replace=3,
        ),
        settings={"n_group": 8, "topk_group": 4},
    ),
    "bert-base": Config(
        architecture="bert", form=bert, numbers=_numbers(768, 12, 12, 3072, 30522), modes=("inference",),
        settings={"architectures": ["BertForMaskedLM"]},
    ),
    "vit-base": Config(
        architecture="vit", form=vit, modes=("inference",),
        numbers=_numbers(
            768, 12, 12, 3072, 0, image_size=224, patch_size=16, id2label={str(n): str(n) for n in range(1000)}
        ),
        settings={"architectures": ["ViTForImageClassification"]},
    ),
}  # fmt: skip
"""Numbers as in the published config.json files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One comparison at one size; `seconds` are those of the capture alone."""

    model: str
    mode: str
    batch: int
    sequence: int | None
    captured: int
    independent: int
    seconds: float
    warnings: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """To the last digit."""
        return self.captured == self.independent


def compare_vision(name: str, *, batch: int = 7) -> Row:
    """A vision model, captured at small batches, at a batch that it was not captured at."""
    loaded = load_vision(name, weights="meta")

    def example(size: int, _: int | None) -> tuple[tuple[object, ...], dict[str, object]]:
        return with_batch_size(loaded.args, loaded.kwargs, size)

    start = time.perf_counter()
    work = capture_work(loaded.model, example)
    seconds = time.perf_counter() - start
    independent = count_by_hooks(loaded.model, example(batch, None)[0])
    return Row(
        model=name, mode="inference", batch=batch, sequence=None, captured=products_of(work, batch),
        independent=independent, seconds=seconds, warnings=work.warnings,
    )  # fmt: skip


def compare_config(name: str, mode: str, *, layers: int | None = None, batch: int = 7, sequence: int = 97) -> Row:
    """A config of transformers on the meta device, captured as a function of batch and sequence."""
    config = CONFIGS[name]
    depth = "n_layer" if "n_layer" in config.numbers else "num_hidden_layers"
    numbers = config.numbers if layers is None else {**config.numbers, depth: layers}
    with tempfile.TemporaryDirectory() as folder:
        settings = {"model_type": config.architecture, **numbers, **config.settings, "dtype": "bfloat16"}
        (Path(folder) / "config.json").write_text(json.dumps(settings))
        loaded = load_folder(folder, weights="meta")
        long = 128 if loaded.default_sequence else None
        ready = in_mode(loaded, mode, long)
        assert ready.example_at is not None
        start = time.perf_counter()
        work = capture_work(ready.model, ready.example_at, mode=mode, sequence=long, free_sequence=long is not None)
        seconds = time.perf_counter() - start
    return Row(
        model=name, mode=mode, batch=batch, sequence=sequence if long else None,
        captured=products_of(work, batch, sequence),
        independent=batch * config.form(numbers, tokens_in(mode, sequence)), seconds=seconds, warnings=work.warnings,
    )  # fmt: skip


def main() -> None:
    """Prints one line for each model and mode, and how many are equal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, help="layers of each transformers model, instead of its own number")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows = [compare_vision(name) for name in VISION]
    rows += [compare_config(name, mode, layers=given.layers) for name, c in CONFIGS.items() for mode in c.modes]
    for row in rows:
        sign = "=" if row.equal else "≠"
        print(f"{row.model:32} {row.mode:10} {row.captured:>24,} {sign} {row.independent:>24,}  {row.seconds:.2f} s")
    print(f"{sum(row.equal for row in rows)} of {len(rows)} equal to the last digit")
    if given.out:
        table = [{name: getattr(row, name) for name in Row.__slots__} | {"equal": row.equal} for row in rows]
        given.out.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
