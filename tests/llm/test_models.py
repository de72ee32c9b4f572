"""Decoders beside the transformers models that they were made of, whatever the rows of a step are."""

from __future__ import annotations

import random

import pytest
import torch

from microbatch.errors import InvalidModel
from microbatch.llm.models import KNOWN, decoder_of
from microbatch.llm.placement import Placement
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
            torch.testing.assert_close(step.every[place][-1], step.last[place], rtol=1e-3, atol=1e-4)
            done[i] += len(rows[place].ids)
    return [torch.cat(parts) for parts in found]


def assert_close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    largest = expected.abs().max()
    assert found.shape == expected.shape
    difference = float((found - expected).abs().max() / largest)
    assert difference < TOLERANCE[dtype], difference


class Scattered(Placement):
    """Every block where its name says: in no order."""

    def begin(self, block: int, before: int | None, busy: set[int]) -> None:
        self._put(block, block)


def scattered(runner: Runner) -> Runner:
    """The runner, whose sequences must be gathered."""
    runner._placement = Scattered(runner.num_blocks)
    return runner


@pytest.mark.parametrize("size", [4, 16])
@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_transformers_in_any_pieces(name: str, size: int) -> None:
    model = tiny(name)
    texts = texts_of(random.Random(name))
    runner = Runner(decoder_of(model), 40, size)
    if size == 4:
        scattered(runner)
    for found, text in zip(in_pieces(runner, texts, seed=size), texts):
        assert_close(found, reference(model, text), torch.float32)


@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "gpt2"])
def test_packed_weights_give_the_same_logits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers of these models are too small to be packed by themselves."""
    monkeypatch.setattr("microbatch.llm.packed.SMALLEST", 0)
    model, texts = tiny(name), texts_of(random.Random(name))
    for found, text in zip(in_pieces(Runner(decoder_of(model), 40, 4), texts, seed=5), texts, strict=True):
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


def test_an_adapter_that_shows_the_weights_of_its_layer_is_not_passed_by() -> None:
    class Adapter(torch.nn.Module):
        def __init__(self, base_layer: torch.nn.Linear) -> None:
            super().__init__()
            self.base_layer = base_layer

        @property
        def weight(self) -> torch.Tensor:
            return self.base_layer.weight

        @property
        def bias(self) -> torch.Tensor | None:
            return self.base_layer.bias

    model = build("llama")
    attention = model.model.layers[0].self_attn
    attention.q_proj = Adapter(attention.q_proj)
    with pytest.raises(InvalidModel, match="A Adapter stands in for a Linear"):
        decoder_of(model)


def test_a_context_ends_where_its_positions_would_change() -> None:
    assert decoder_of(tiny("phi3-longrope")).context == 64
    assert decoder_of(tiny("llama-dynamic")).context == 128


def test_a_prompt_may_be_computed_without_any_logits() -> None:
    model = tiny("mistral")
    runner = Runner(decoder_of(model), 40, 4)
    text, table = list(range(30)), tuple(range(11, 19))
    silent = runner.step([Row(text[:13], 0, table, wants_logits=False)])
    assert silent.last.shape == (0, VOCABULARY) and silent.rows == () and not silent.every
    found = runner.step([Row(text[13:20], 13, table, wants_logits=False), Row(text[:9], 0, (1, 2, 3))])
    assert found.rows == (1,)
    assert_close(found.last[0], reference(model, text[:9])[-1], torch.float32)
    assert_close(runner.step([Row(text[20:], 20, table)]).last[0], reference(model, text)[-1], torch.float32)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_neighbouring_blocks_are_read_in_place(name: str) -> None:
    """Tables in order, beside tables in none, some with the same blocks in front."""
    model = tiny(name)
    runner = scattered(Runner(decoder_of(model), 60, 4))  # places are the names that the tables have
    texts = [[i * 7 % VOCABULARY for i in range(n, n + 30)] for n in range(4)]
    tables = [list(range(8)), list(range(19, 11, -1)), list(range(20, 28)), [30, 31, 32, 40, 41, 42, 43, 44]]
    runner.step([Row(text[:9], 0, table, wants_logits=False) for text, table in zip(texts, tables)])
    texts.append(texts[0][:8] + texts[1][8:])
    tables.append([*tables[0][:2], *range(50, 56)])
    runner.step([Row(texts[4][8:9], 8, tables[4])])
    for end in (10, 11, 12, 13, 20, 21, 29):
        before = end - 1 if end < 14 or end == 21 else {20: 13, 29: 21}[end]
        found = runner.step([Row(text[before:end], before, table) for text, table in zip(texts, tables)])
        for logits, text in zip(found.last, texts):
            assert_close(logits, reference(model, text[:end])[-1], torch.float32)


def test_copies_of_blocks_are_read_before_any_is_written() -> None:
    model = tiny("qwen3")
    runner = Runner(decoder_of(model), 20, 4)
    text = list(range(8))
    runner.step([Row(text, 0, (3, 4))])
    runner.copy([(3, 4), (4, 3), (4, 9)])
    found = runner.step([Row([50], 8, (4, 3, 7)), Row([60], 8, (4, 9, 8))])
    assert_close(found.last[0], reference(model, [*text, 50])[-1], torch.float32)
    assert_close(found.last[1], reference(model, [*text, 60])[-1], torch.float32)


def test_what_a_block_held_before_reaches_nobody() -> None:
    """Not even where it was no number: masked slots count zero times."""
    model = tiny("llama")
    runner = scattered(Runner(decoder_of(model), 20, 4))
    for pool in (*runner.cache.keys, *runner.cache.values):
        pool.fill_(float("nan"))
    texts, tables = [[1, 2, 3, 4, 5], [7, 8]], [[9, 3], [5]]
    found = runner.step([Row(text, 0, table) for text, table in zip(texts, tables)])
    for _ in range(5):
        for text, choice in zip(texts, found.last.argmax(dim=-1).tolist()):
            text.append(choice)
        tables = [[9, 3, 1], [5, 12]]
        found = runner.step([Row(text[-1:], len(text) - 1, table) for text, table in zip(texts, tables)])
    for logits, text in zip(found.last, texts):
        assert_close(logits, reference(model, text)[-1], torch.float32)


@pytest.mark.parametrize("name", ["llama-head-dim", "qwen2-sliding", "mixtral", "gemma2", "gpt2", "phi3-partial"])
def test_invariant_rows_have_the_same_bits_whatever_their_mates(name: str) -> None:
    texts = texts_of(random.Random(name))
    runner = Runner(decoder_of(tiny(name)), 40, 4, invariant=True)
    ways = [in_pieces(runner, texts, seed, most) for seed, most in ((1, 9), (2, 3), (3, 30))]
    alone = [in_pieces(runner, [text], seed=4)[0] for text in texts]
    for way in ways:
        for found, expected in zip(way, alone):
            assert torch.equal(found, expected)
    for found, text in zip(alone, texts):
        assert_close(found, reference(tiny(name), text), torch.float32)


def test_blocks_change_places_and_keep_what_they_hold() -> None:
    """A cache that is nearly full, used again and again: moves happen, and prefixes that wait are still right."""
    model = tiny("qwen2")
    runner = Runner(decoder_of(model), 12, 4)
    moves: list[tuple[int, int] | None] = []

    class Watched(Placement):
        def begin(self, block: int, before: int | None, busy: set[int]) -> tuple[int, int] | None:
            moves.append(super().begin(block, before, busy))
            return moves[-1]

    runner._placement = Watched(runner.num_blocks)
    numbers = random.Random(5)
    prefix = list(range(8))
    runner.step([Row(prefix, 0, (2, 7), wants_logits=False)])
    for _ in range(12):
        free = [block for block in range(12) if block not in (2, 7)]
        numbers.shuffle(free)
        texts = [[numbers.randrange(VOCABULARY) for _ in range(length)] for length in (17, 9)]
        tables = [free[:5], free[5:8]]
        for end in range(1, 18):
            rows = [
                Row(text[end - 1 : end], end - 1, table[: -(-end // 4)])
                for text, table in zip(texts, tables)
                if end <= len(text)
            ]
            last = runner.step(rows).last
        assert_close(last[0], reference(model, texts[0])[-1], torch.float32)
        found = runner.step([Row([9], 8, (2, 7, free[8]))]).last[0]
        assert_close(found, reference(model, [*prefix, 9])[-1], torch.float32)
    assert any(moves)
