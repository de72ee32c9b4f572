"""Decoders beside the transformers models that they were made of, whatever the rows of a step are."""

from __future__ import annotations

import random

import pytest
import torch

from microbatch.errors import InvalidModel
from microbatch.llm.models import KNOWN, decoder_of
from microbatch.llm.runner import Row, Runner
from tests.llm.tiny_models import CLASSES, MODELS, build, reference, tiny

VOCABULARY = 101
LENGTHS = (37, 1, 5, 23, 16)
TOLERANCE = {torch.float32: 1e-5, torch.float64: 3e-6, torch.bfloat16: 0.05, torch.float16: 0.006}
"""Of the largest logit. transformers rounds RMSNorm to fp32 in fp64 models too."""


def texts_of(random_numbers: random.Random, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    return [[random_numbers.randrange(VOCABULARY) for _ in range(length)] for length in lengths]


def tables_of(random_numbers: random.Random, texts: list[list[int]], size: int, blocks: int) -> list[list[int]]:
    """Blocks in no order at all."""
    free = list(range(blocks))
    random_numbers.shuffle(free)
    return [[free.pop() for _ in range(-(-len(text) // size))] for text in texts]


def in_pieces(runner: Runner, texts: list[list[int]], seed: int, most: int = 9) -> list[torch.Tensor]:
    """Logits of every token, computed in random pieces beside random mates."""
    numbers = random.Random(seed)
    tables = tables_of(numbers, texts, runner.block_size, runner.num_blocks)
    done = [0] * len(texts)
    found: list[list[torch.Tensor]] = [[] for _ in texts]
    while any(count < len(text) for count, text in zip(done, texts)):
        picked = [i for i, text in enumerate(texts) if done[i] < len(text) and numbers.random() < 0.7]
        numbers.shuffle(picked)
        rows = []
        for i in picked:
            count = min(numbers.choice([1, 1, 2, most]), len(texts[i]) - done[i])
            rows.append(Row(texts[i][done[i] : done[i] + count], done[i], tables[i], all_logits=True))
        if not rows:
            continue
        step = runner.step(rows)
        assert step.rows == tuple(range(len(rows)))
        for place, i in enumerate(picked):
            found[i].append(step.every[place])
            assert torch.equal(step.every[place][-1], step.last[place])
            done[i] += len(rows[place].ids)
    return [torch.cat(parts) for parts in found]


def assert_close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    largest = expected.abs().max()
    assert found.shape == expected.shape
    difference = float((found - expected).abs().max() / largest)
    assert difference < TOLERANCE[dtype], difference


@pytest.mark.parametrize("size", [4, 16])
@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_transformers_in_any_pieces(name: str, size: int) -> None:
    model = tiny(name)
    texts = texts_of(random.Random(name))
    runner = Runner(decoder_of(model), 40, size)
    for found, text in zip(in_pieces(runner, texts, seed=size), texts):
        assert_close(found, reference(model, text), torch.float32)


def test_every_known_class_has_a_model_here() -> None:
    assert {CLASSES.get(kind, f"{kind}ForCausalLM") for kind, _ in MODELS.values()} == set(KNOWN)


@pytest.mark.parametrize("name", ["llama-yarn", "qwen2-sliding", "gpt2", "gemma3", "mixtral"])
def test_logits_in_fp64(name: str) -> None:
    model = tiny(name, torch.float64)
    texts = texts_of(random.Random(name))
    for found, text in zip(in_pieces(Runner(decoder_of(model), 40, 4), texts, seed=3), texts):
        assert_close(found, reference(model, text), torch.float64)


@pytest.mark.parametrize("arithmetic", [None, "own"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gpt2", "qwen3-moe"])
def test_logits_in_16_bits_are_near_transformers(name: str, dtype: torch.dtype, arithmetic: str | None) -> None:
    """As near to the exact answer of the rounded weights as transformers is itself, or nearly."""
    model = tiny(name, dtype)
    exact = build(name).to(dtype).float()
    decoder = decoder_of(model, arithmetic=dtype if arithmetic else None)
    texts = texts_of(random.Random(name))
    for found, text in zip(in_pieces(Runner(decoder, 40, 4), texts, seed=3), texts):
        expected = reference(exact, text)
        theirs = float((reference(model, text).float() - expected).abs().max())
        assert found.dtype == torch.float32
        assert float((found - expected).abs().max()) < 1.5 * theirs + 0.005 * float(expected.abs().max())


@pytest.mark.parametrize("name", MODELS)
def test_greedy_ids_equal_generate(name: str) -> None:
    model = tiny(name)
    prompts = texts_of(random.Random(len(name)), (11, 3, 6))
    runner = Runner(decoder_of(model), 40, 4)
    tables = tables_of(random.Random(1), [[0] * 27 for _ in prompts], 4, 40)
    texts = [list(prompt) for prompt in prompts]
    rows = [Row(prompt, 0, table) for prompt, table in zip(prompts, tables)]
    for _ in range(12):
        for text, choice in zip(texts, runner.step(rows).last.argmax(dim=-1).tolist()):
            text.append(choice)
        rows = [Row(text[-1:], len(text) - 1, table) for text, table in zip(texts, tables)]
    for prompt, text in zip(prompts, texts):
        expected = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=12, do_sample=False
        )
        assert text == expected[0].tolist()


def test_the_model_is_left_as_it_was_and_trains_on() -> None:
    model = build("gemma2").train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attention = model.config._attn_implementation
    in_pieces(Runner(decoder_of(model), 40), texts_of(random.Random(0)), seed=0)
    assert model.training and model.config._attn_implementation == attention
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    ids = torch.tensor([[1, 2, 3, 4]])
    model(ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_weights_used_as_they_are_are_shared() -> None:
    model = tiny("llama")
    decoder = decoder_of(model)
    assert decoder.embedding.data_ptr() == model.get_input_embeddings().weight.data_ptr()


def test_other_classes_are_refused_by_name() -> None:
    with pytest.raises(InvalidModel, match="does not know the class Linear"):
        decoder_of(torch.nn.Linear(1, 1))


def test_a_hook_is_not_passed_by() -> None:
    model = build("llama")
    model.model.layers[1].mlp.register_forward_hook(lambda *given: None)
    with pytest.raises(InvalidModel, match=r"model\.layers\.1\.mlp has a hook"):
        decoder_of(model)


def test_a_replaced_layer_is_not_taken_for_a_plain_one() -> None:
    class Adapted(torch.nn.Linear):
        pass

    model = build("llama")
    model.model.layers[0].mlp.down_proj = Adapted(48, 32)
    with pytest.raises(InvalidModel, match=r"down_proj is a Adapted"):
        decoder_of(model)


def test_a_context_ends_where_its_positions_would_change() -> None:
    assert decoder_of(tiny("phi3-longrope")).context == 64
    assert decoder_of(tiny("llama-dynamic")).context == 128
