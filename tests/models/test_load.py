"""Every MODEL form: what loads, and what is refused with which words."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from microbatch.errors import InvalidModel, InvalidSettings
from microbatch.models.load import FORMS, load_model

GOOD = """
import torch
from dataclasses import dataclass
from torch import nn
from sibling import WIDTH

@dataclass
class Settings:
    width: int = WIDTH

def positional():
    return nn.Linear(4, 4), torch.ones(2, 4)

def pair():
    return nn.Bilinear(4, 4, 2), (torch.ones(2, 4), torch.ones(2, 4))

def keyword():
    return nn.Linear(4, 4), {"input": torch.ones(2, 4)}

def tokens():
    return nn.Embedding(8, 4), torch.zeros(2, 3, dtype=torch.long), {"unit": "sentences", "loss": lambda o, b: (o, 1)}

def broken():
    raise OSError("no weights at /nowhere\\nsecond line")

def bad_options():
    return nn.Linear(4, 4), torch.ones(2, 4), {"units": "rows"}

def bad_unit():
    return nn.Linear(4, 4), torch.ones(2, 4), {"unit": 3}

def bad_loss():
    return nn.Linear(4, 4), torch.ones(2, 4), {"loss": 3}

def list_options():
    return nn.Linear(4, 4), torch.ones(2, 4), ["rows"]

def only_model():
    return nn.Linear(4, 4)

def text_example():
    return nn.Linear(4, 4), "ones"

def swapped():
    return torch.ones(2, 4), nn.Linear(4, 4)

def empty():
    return ()

number = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "good_model.py").write_text(GOOD)
    (tmp_path / "sibling.py").write_text("WIDTH = 4\n")
    (tmp_path / "raises.py").write_text("raise KeyError('left out')\n")
    (tmp_path / "checkpoint.pt").write_bytes(b"\x80\x04.")
    (tmp_path / "renamed.txt").write_bytes(b"\x80\x04.")
    (tmp_path / "renamed.pt2").write_bytes(b"\x80\x02}.")
    torch.save({}, tmp_path / "saved.safetensors")
    (tmp_path / "notes.txt").write_text("notes")
    (tmp_path / "archive.pt2").write_bytes(b"PK")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    (tmp_path / "weights").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_file_with_positional_example(folder: Path) -> None:
    loaded = load_model(f"{folder}/good_model.py:positional")
    assert isinstance(loaded.model, nn.Linear)
    assert loaded.unit == "rows" and loaded.loss is None and loaded.kwargs == {}
    assert isinstance(loaded.args[0], Tensor)
    assert loaded.model(*loaded.args).shape == (2, 4)


def test_module_on_the_current_folder(folder: Path) -> None:
    loaded = load_model("good_model:pair")
    assert loaded.model(*loaded.args).shape == (2, 2)


def test_keyword_example(folder: Path) -> None:
    loaded = load_model("good_model.py:keyword")
    assert loaded.args == ()
    assert loaded.model(**loaded.kwargs).shape == (2, 4)


def test_options(folder: Path) -> None:
    loaded = load_model("good_model.py:tokens")
    assert loaded.unit == "sentences"
    assert loaded.loss is not None and loaded.loss(1, 2) == (1, 1)


def test_dtype_converts_floats_and_leaves_integers(folder: Path) -> None:
    assert next(load_model("good_model.py:tokens", dtype="bf16").model.parameters()).dtype == torch.bfloat16
    tokens = load_model("good_model.py:tokens", dtype="bf16").args[0]
    assert isinstance(tokens, Tensor) and tokens.dtype == torch.long
    rows = load_model("mlp:depth=1,width=4", dtype="fp64").args[0]
    assert isinstance(rows, Tensor) and rows.dtype == torch.float64


def test_unknown_dtype_names_the_nearest() -> None:
    with pytest.raises(InvalidSettings, match=r"fp1.*bf16|fp1.*fp16"):
        load_model("mlp:depth=1,width=4", dtype="fp1")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("missing.py:make", ("missing.py", "no file")),
        ("no_such_package.models:make", ("no_such_package.models", "no module")),
        ("good_model.py:positionel", ("positionel", "positional")),
        ("good_model.py:number", ("int", "not a callable")),
        ("good_model.py:broken", ("OSError", "no weights at /nowhere")),
        ("good_model.py:bad_options", ("units", "unit")),
        ("good_model.py:bad_unit", ("unit 3",)),
        ("good_model.py:bad_loss", ("loss", "int")),
        ("good_model.py:list_options", ("options", "list")),
        ("good_model.py:only_model", ("a Linear", "(model, example)")),
        ("good_model.py:text_example", ("example", "str")),
        ("good_model.py:swapped", ("Tensor, Linear",)),
        ("good_model.py:empty", ("nothing",)),
        ("raises.py:make", ("KeyError", "left out")),
        ("good_model.py", ("good_model.py:callable",)),
        ("checkpoint.pt", ("pickle", "any code")),
        ("other.pth", ("pickle",)),
        ("renamed.txt", ("pickle", "any code")),
        ("renamed.pt2", ("pickle", "any code")),
        ("saved.safetensors", ("pickle", "any code")),
        ("archive.pt2", ("no whole torch.export archive", "torch.export.save")),
        ("missing.pt2", ("no file 'missing.pt2'",)),
        ("model.gguf", ("GGUF", "microbatch convert model.gguf model")),
        ("notes.txt", ("file of no form", "file.py:callable")),
        ("weights", ("folder weights", "no config.json")),
        ("mpl:depth=8", ("mpl", "mlp")),
        ("", ("no model ''",)),
        (":make", ("no model",)),
    ],
)
def test_refusals_are_one_clear_line(folder: Path, text: str, words: tuple[str, ...]) -> None:
    with pytest.raises(InvalidModel) as caught:
        load_model(text)
    message = str(caught.value)
    assert "\n" not in message and caught.value.remedy
    assert all(word in message for word in words), message


def test_a_checkpoint_is_not_opened(folder: Path) -> None:
    (folder / "trap.pt").write_bytes(b"not a pickle at all")
    with pytest.raises(InvalidModel, match="pickle"):
        load_model("trap.pt")


def test_the_last_form_takes_every_text() -> None:
    assert FORMS[-1][0]("anything at all")
