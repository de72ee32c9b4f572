"""From a text to an engine: functions, modules and engines of a user's own file, and every MODEL form."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from microbatch.errors import InvalidBatch, InvalidModel, InvalidSettings
from microbatch.models.load import load_model
from microbatch.serving.engine.batcher import DynamicBatcher
from microbatch.serving.loading.folder_kind import kind_of
from microbatch.serving.loading.load import load_all, load_served, name_and_text
from microbatch.serving.loading.reading import Reading
from microbatch.serving.loading.served import Served
from tests.models.tiny import CAUSAL, OTHERS, write_folder
from tests.serving.sentence_folders import write_encoder, write_json, write_sentence_folder

APP = """
import microbatch
from microbatch.serving.engine.batcher import DynamicBatcher

def double(items):
    return [2 * item for item in items]

@microbatch.batched(max_batch_size=4, max_queue=9)
def embed(items: list[int]) -> list[int]:
    return [item + 1 for item in items]

engine = DynamicBatcher(double, max_batch_size=3)

class Model:
    def __init__(self):
        self.factor = 3

    def __call__(self, items):
        return [self.factor * item for item in items]

model = Model()

def make():
    return double

async def later(items):
    return items

def broken():
    raise OSError("no such weights\\nsecond line")

number = 7
"""

TORCH_APP = """
import torch
from torch import nn

net = nn.Linear(4, 2).eval()

class Net(nn.Linear):
    def __init__(self):
        super().__init__(4, 2)

def build():
    torch.manual_seed(0)
    return nn.Linear(4, 2).eval(), torch.randn(3, 4)

def pair():
    return nn.Bilinear(4, 3, 2).eval(), (torch.randn(2, 4), torch.randn(2, 3))

def deep():
    return nn.Linear(4, 2), ([torch.randn(2, 4)],)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with modules of names that no other test has."""
    (tmp_path / "plain_app.py").write_text(APP)
    (tmp_path / "torch_app.py").write_text(TORCH_APP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("plain_app", "torch_app"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def served(text: str, **given: Any) -> Served:
    name, text = name_and_text(text)
    return load_served(text, name, given)


def answer(found: Served, *items: Any) -> list[Any]:
    engine = found.engine
    try:
        engine.start()
        return asyncio.run(engine.submit_many(items))
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("app:embed", "embed"),
        ("app.py:embed", "embed"),
        ("package.module:embed", "embed"),
        ("mlp", "mlp"),
        ("mlp:depth=8,width=1024", "mlp"),
        ("torchvision:resnet18", "resnet18"),
        ("timm:resnet50,image=160", "resnet50"),
        ("some/where/model.pt2", "model"),
        ("/", "model"),
        ("small=mlp:depth=2", "small"),
        ("a.b-c=mlp", "a.b-c"),
    ],
)
def test_names(text: str, name: str) -> None:
    found, rest = name_and_text(text)
    assert found == name
    assert text.endswith(rest)


def test_a_name_is_taken_off_a_model_and_not_out_of_it() -> None:
    assert name_and_text("small=mlp:depth=2") == ("small", "mlp:depth=2")
    assert name_and_text("./lr=0.1/model")[1] == "./lr=0.1/model"
    assert name_and_text("mlp:depth=2")[1] == "mlp:depth=2"


@pytest.mark.parametrize("place", ["plain_app", "plain_app.py", "./plain_app.py"])
@pytest.mark.parametrize(
    ("name", "expected"),
    [("double", [4]), ("embed", [3]), ("engine", [4]), ("Model", [6]), ("model", [6]), ("make", [4])],
)
def test_what_a_file_holds(folder: Path, place: str, name: str, expected: list[int]) -> None:
    found = served(f"{place}:{name}")
    assert (found.name, found.kind) == (name, "function")
    assert answer(found, 2) == expected


def test_a_file_elsewhere_imports_its_neighbours_when_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "neighbour_of_app.py").write_text("FACTOR = 5\n")
    (tmp_path / "lazy_app.py").write_text(
        "def run(items):\n    from neighbour_of_app import FACTOR\n    return [FACTOR * item for item in items]\n"
    )
    assert answer(served(f"{tmp_path}/lazy_app.py:run"), 2) == [10]


def test_a_file_whose_name_is_taken_still_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "json.py").write_text("def run(items):\n    return items\n")
    assert answer(served(f"{tmp_path}/json.py:run"), 2) == [2]


def test_settings_on_the_command_line_win_over_the_decorator(folder: Path) -> None:
    own = served("plain_app:embed")
    assert isinstance(own.engine, DynamicBatcher)
    answer(own, 1)
    assert own.engine.limits is not None and (own.engine.limits.max_batch_size, own.engine.limits.max_queue) == (4, 9)
    given = served("plain_app:embed", max_batch_size=6)
    answer(given, 1)
    assert given.engine.limits is not None
    assert (given.engine.limits.max_batch_size, given.engine.limits.max_queue) == (6, 9)
    assert given.engine.limits.reason == "as you set it"


def test_settings_that_contradict_those_of_the_decorator(folder: Path) -> None:
    with pytest.raises(InvalidSettings, match="never waits"):
        served("plain_app:embed", policy="launch_when_free", max_queue_delay=0.1)


def test_an_engine_keeps_its_settings(folder: Path) -> None:
    with pytest.raises(InvalidSettings, match="max_queue would say it again"):
        served("plain_app:engine", max_queue=3)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("plain_app:dubble", "Did you mean double"),
        ("plain_app:number", "is a int, which cannot be served"),
        ("plain_app:later", "coroutine function"),
        ("plain_app:broken", "raised OSError: no such weights"),
        ("no_such_app:embed", "no module 'no_such_app'"),
        ("no_such_app.py:embed", "There is no file"),
        ("plain_app.py", "names a file but no callable"),
        ("torch_app:deep", "neither tensors by position nor by name"),
        ("mpl:depth=8", "There is no model 'mpl:depth=8'"),
        ("weights.bin", "is a pickle"),
    ],
)
def test_what_cannot_be_served_is_one_error(folder: Path, text: str, words: str) -> None:
    with pytest.raises(InvalidModel, match=words) as caught:
        served(text)
    assert "\n" not in str(caught.value)


def test_a_worker_process_finds_the_function_of_a_file(folder: Path) -> None:
    assert answer(served("plain_app.py:double", processes=True), 2, 3) == [4, 6]


def test_a_plain_function_needs_no_torch(folder: Path) -> None:
    code = (
        "import asyncio, sys; from microbatch.serving.loading.load import load_served;"
        "engine = load_served('plain_app.py:double', 'double', {}).engine.start();"
        "print(asyncio.run(engine.submit(4)), 'torch' in sys.modules); engine.close()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["8", "False"]


def test_a_module_without_an_example_says_so(folder: Path) -> None:
    for name in ("net", "Net"):
        found = served(f"torch_app:{name}")
        assert found.kind == "module"
        assert "comes without an example" in found.notes[0]
        assert answer(found, torch.ones(4))[0].shape == (2,)


def test_a_module_with_its_example(folder: Path) -> None:
    found = served("torch_app:build", max_batch_size=4)
    assert found.takes == "4 numbers (float32)"
    rows = torch.randn(9, 4)
    torch.manual_seed(0)
    with torch.no_grad():
        expected = nn.Linear(4, 2)(rows)
    assert torch.allclose(torch.stack(answer(found, *rows)), expected, atol=1e-6)
    assert found.engine.report is not None and found.engine.report.exact


def test_two_inputs_are_a_pair(folder: Path) -> None:
    found = served("torch_app:pair", max_batch_size=2)
    assert found.takes == "4 numbers (float32); 3 numbers (float32)"
    (row,) = answer(found, (torch.ones(4), torch.ones(3)))
    assert row.shape == (2,)


@pytest.mark.parametrize(
    "text", ["mlp:depth=2,width=16", "cnn:image=8", "transformer:width=16,sequence=8", "moe:width=16"]
)
def test_built_in_models(text: str) -> None:
    found = served(text, max_batch_size=2)
    loaded = load_model(text)
    with torch.no_grad():
        expected = loaded.model(*loaded.args)
    items = list(loaded.args[0])  # type: ignore[call-overload]
    for row, one in zip(answer(found, *items), expected, strict=True):
        assert torch.allclose(row, one, atol=1e-5)


def exported(path: Path, most: int | None) -> str:
    batch = torch.export.Dim("batch", max=most) if most else torch.export.Dim("batch")
    program = torch.export.export(nn.Linear(4, 2).eval(), (torch.randn(2, 4),), dynamic_shapes={"input": {0: batch}})
    torch.export.save(program, path)
    return str(path)


def test_an_archive_is_never_run_beyond_what_it_was_exported_for(tmp_path: Path) -> None:
    text = exported(tmp_path / "net.pt2", 6)
    found = served(text)
    assert len(answer(found, *torch.randn(20, 4))) == 20
    assert found.engine.metrics().max_batch_size == 6
    assert max(found.engine.metrics().batch_sizes) <= 6
    with pytest.raises(InvalidSettings, match="batches of 6 at most, and --max-batch-size is 7"):
        served(text, max_batch_size=7)


def test_an_archive_without_a_limit(tmp_path: Path) -> None:
    assert answer(served(exported(tmp_path / "net.pt2", None), max_batch_size=4), torch.ones(4))[0].shape == (2,)


def test_images_come_as_they_are_and_by_no_name(tmp_path: Path) -> None:
    text = write_folder(tmp_path / "vit", OTHERS["images"])
    found = served(text, max_batch_size=2)
    assert found.kind == "module"
    (answered,) = answer(found, torch.randn(3, 32, 32))
    assert set(answered) >= {"logits"}
    assert any("weights are random" in note for note in found.notes)


def test_a_language_model_as_a_module_answers_for_each_token(tmp_path: Path) -> None:
    text = write_folder(tmp_path / "llama", CAUSAL["llama"])
    with pytest.raises(InvalidModel, match="language model that generates text"):
        served(text)
    found = load_served(text, "llama", {"max_batch_size": 4}, as_kind="module")
    assert isinstance(found.engine, Reading)
    model: Any = found.engine.engine.run
    rows = [[5, 6, 7], [8], list(range(2, 14))]
    with torch.no_grad():
        expected = [model(input_ids=torch.tensor([row])).logits[0] for row in rows]
    answers = answer(found, *rows, "text")
    for one, logits in zip(answers, expected):
        assert torch.allclose(one["logits"], logits, atol=1e-5)
    assert isinstance(answers[-1], InvalidBatch)


def test_an_encoder_with_a_head_takes_texts(tmp_path: Path) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    folder = write_encoder(tmp_path / "model")
    config = BertConfig.from_pretrained(folder, num_labels=5)
    BertForSequenceClassification(config).save_pretrained(folder)
    assert kind_of(folder) == "module"
    short, long = answer(served(str(folder), max_batch_size=4), "a", "a text of some length")
    assert short["logits"].shape == long["logits"].shape == (5,)


KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "a language model": ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, "language-model"),
    "GPT-2": ({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}, "language-model"),
    "a translator": ({"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"}, "language-model"),
    "a bare encoder": ({"architectures": ["BertModel"], "model_type": "bert"}, "embeddings"),
    "a masked one": ({"architectures": ["RobertaForMaskedLM"], "model_type": "roberta"}, "embeddings"),
    "one without a name": ({"model_type": "mpnet"}, "embeddings"),
    "a classifier": ({"architectures": ["BertForSequenceClassification"], "model_type": "bert"}, "module"),
    "an image model": ({"architectures": ["ViTModel"], "model_type": "vit"}, "module"),
}


@pytest.mark.parametrize("case", KINDS)
def test_what_a_folder_is_seen_as(tmp_path: Path, case: str) -> None:
    settings, kind = KINDS[case]
    write_json(tmp_path / "config.json", settings)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert kind_of(tmp_path) == kind
    assert kind_of(tmp_path, "module") == "module"


def test_a_sentence_folder_says_what_it_is(tmp_path: Path) -> None:
    folder = write_sentence_folder(tmp_path / "model")
    write_json(folder / "config.json", {"architectures": ["LlamaForCausalLM"], "model_type": "llama"})
    assert kind_of(folder) == "embeddings"


def test_as_is_for_folders() -> None:
    with pytest.raises(InvalidSettings, match="--as module chooses what a folder is; mlp is none"):
        load_served("mlp", "mlp", {}, as_kind="module")


def test_two_of_one_name() -> None:
    with pytest.raises(InvalidSettings, match="Two models are called 'mlp'"):
        load_all(["mlp:depth=2", "mlp:depth=4"], {})


def test_arrays_are_items_too(folder: Path) -> None:
    (row,) = answer(served("torch_app:build", max_batch_size=2), np.ones(4, dtype=np.float32))
    assert row.shape == (2,)
