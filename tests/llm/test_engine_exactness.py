"""Greedy answers in fp32 are those of transformers' `generate`, one by one, whatever else the engine does meanwhile."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from microbatch.llm.results import Generation
from microbatch.llm.sampling_params import SamplingParams
from tests.llm.engines import an_engine, model_of, prompts_of

TIE = 1e-4
"""Where the two largest logits are nearer than this, rounding may decide."""
PENALTY = 50.0
"""Of every second request: models with random weights like to repeat themselves, which would prove little."""
MODELS = ("llama-mha-tied", "llama-llama3", "qwen2-sliding", "qwen3", "mistral", "mixtral", "qwen3-moe", "gemma2",
          "gemma3", "phi3", "gpt2")  # fmt: skip
CROWDED = {"num_blocks": 20, "max_num_tokens": 16, "max_num_sequences": 6}
"""Blocks for 80 tokens and steps of 16: prompts are cut, and sequences have to give their blocks back."""


@dataclass(slots=True)
class Alone:
    """What transformers generates for one prompt, and where rounding might decide otherwise."""

    ids: list[int]
    ties: list[int] = field(default_factory=list)


@torch.no_grad()
def alone(model: Any, prompt: list[int], tokens: int, penalty: float) -> Alone:
    found = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
        max_new_tokens=tokens, output_scores=True, return_dict_in_generate=True, eos_token_id=None, pad_token_id=0,
        repetition_penalty=penalty,
    )  # fmt: skip
    tops = [logits[0].topk(2).values for logits in found.scores]
    ties = [place for place, top in enumerate(tops) if float(top[0] - top[1]) < TIE]
    return Alone(found.sequences[0, len(prompt) :].tolist(), ties)


def equal(answer: tuple[int, ...], reference: Alone) -> bool:
    """Up to the first place where rounding may decide."""
    upto = reference.ties[0] if reference.ties else len(reference.ids)
    return list(answer[:upto]) == reference.ids[:upto] and len(answer) == len(reference.ids)


@pytest.mark.parametrize("name", MODELS)
def test_answers_are_those_of_generate(name: str) -> None:
    model, prompts = model_of(name), prompts_of(9, seed=5)
    lengths = [16 + 3 * (number % 4) for number in range(len(prompts))]
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=length,
            ignore_eos=True,
            n=3 if number == 4 else 1,
            repetition_penalty=PENALTY if number % 2 else 1.0,
        )
        for number, length in enumerate(lengths)
    ]
    with an_engine(name, **CROWDED) as engine:
        answers: list[Generation] = engine.generate(prompts, params)
        metrics = engine.metrics()
    references = [
        alone(model, prompt, each.max_tokens or 0, each.repetition_penalty) for prompt, each in zip(prompts, params)
    ]
    wrong = [
        (number, completion.index)
        for number, (answer, reference) in enumerate(zip(answers, references))
        for completion in answer.completions
        if not equal(completion.token_ids, reference)
    ]
    assert wrong == []
    assert sum(len(reference.ties) for reference in references) <= 2
    assert metrics.free_blocks == metrics.num_blocks
    assert metrics.num_preemptions > 0 and metrics.prefix_cache_hits > 0
    assert metrics.steps > max(lengths) + len(prompts) // 2  # prompts were cut: each step holds 16 tokens
    penalised = [answer.token_ids for answer, each in zip(answers, params) if each.repetition_penalty > 1]
    distinct = sum(len(set(ids)) for ids in penalised) / sum(map(len, penalised))
    assert distinct >= 0.5
