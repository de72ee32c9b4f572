"""``microbatch check``: exit status 1 when a batch in pieces is not the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from microbatch.cli.app import run

MODEL = """
import torch
from torch import nn

class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, scale=None):
        print("a model may print")
        x = self.layer(x)
        return x - x.mean(0)

def centred():
    return Centred(), torch.randn(2, 4)

def normed():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), {"input": torch.randn(3, 4)}

def time_first():
    return nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4)), torch.randn(5, 2, 4)

def contrastive():
    return nn.Linear(4, 4), (torch.randn(4, 4),), {"loss": lambda z, x: ((z @ z.T).logsumexp(1).sum(), len(x))}

def single():
    return nn.Linear(4, 4), torch.randn(1, 4)

class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.attention = nn.Embedding(9, 4), nn.MultiheadAttention(4, 1, batch_first=True)

    def forward(self, input_ids, attention_mask=None, cu_seqlens=None, position_ids=None):
        x = self.embedding(input_ids)
        return self.attention(x, x, x)[0]

def unmasked():
    return Tokens(), {"input_ids": torch.randint(9, (2, 6)), "attention_mask": torch.ones(2, 6)}

def packed():
    return Tokens(), {"input_ids": torch.randint(9, (1, 6)), "cu_seqlens": torch.tensor([0, 2, 6])}

def positions():
    return Tokens(), {"input_ids": torch.randint(9, (1, 5)), "position_ids": torch.tensor([[0, 1, 0, 1, 2]])}

def broken():
    return nn.Linear(5, 4), torch.randn(2, 4)
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "nets.py").write_text(MODEL)
    return str(tmp_path / "nets.py")


def test_exact_exits_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", "mlp:depth=2,width=8", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["exact"] is True
    assert document["culprits"] == []
    assert document["largest_difference"] < 1e-14
    assert {mode: part["exact"] for mode, part in document["modes"].items()} == {"training": True, "inference": True}


def test_batch_norm_is_named_in_training_only(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", f"{model}:normed", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["exact"] is False and document["largest_difference"] > 0.01
    first = document["culprits"][0]
    assert (first["module"], first["kind"], first["mode"]) == ("1", "batch_norm", "training")
    assert first["difference"] > 0.01 and "GroupNorm" in first["remedy"]
    assert document["modes"]["inference"]["exact"] is True
    assert run(["check", f"{model}:normed", "--mode", "inference"]) == 0


def test_the_text_is_short_and_names_the_model_itself(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", f"{model}:centred"]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith("Training: not exact.")
    assert "Centred computes a statistic over the batch" in printed
    assert "a model may print" not in printed
    assert len(printed.splitlines()) <= 10


def test_a_loss_over_pairs_is_named(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", f"{model}:contrastive", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert [(c["module"], c["kind"]) for c in document["culprits"]] == [("loss", "loss")]
    assert document["modes"]["inference"]["exact"] is True


def test_another_batch_dimension(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", f"{model}:time_first", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["culprits"][0]["kind"] == "time"
    assert run(["check", f"{model}:time_first", "--batch-dimension", "1"]) == 0


@pytest.mark.parametrize(
    ("settings", "culprit"),
    [("", None), (",capacity=1.0", "0.layer.router"), (",gate=experts", "0.layer.router")],
)
def test_experts(settings: str, culprit: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    status = run(["check", f"moe:width=8,hidden=8,experts=4{settings}", "--json"])
    document = json.loads(capsys.readouterr().out)
    assert status == (0 if culprit is None else 1)
    assert {(c["module"], c["kind"]) for c in document["culprits"][:1]} == (
        {(culprit, "capacity")} if culprit else set()
    )


@pytest.mark.parametrize(("name", "kind"), [("unmasked", "padding"), ("packed", "packing"), ("positions", "packing")])
def test_padding_and_packing(name: str, kind: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", f"{model}:{name}", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert [(c["module"], c["kind"]) for c in document["culprits"]] == [("attention", kind)] * 2


def test_one_row_is_made_several(model: str) -> None:
    assert run(["check", f"{model}:single"]) == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "no model 'nowhere'"),
        (["{}:broken"], "cannot be multiplied"),
        (["mlp:depth=1,width=4", "--batch-size", "1"], "--batch-size"),
        (["mlp:depth=1,width=4", "--sequence", "4"], "sequence"),
        (["mlp:depth=1,width=4", "--batch-dimension", "5"], "batch"),
        (["mlp:depth=1,width=4", "--out", "report.html"], "html"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], words: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(tmp_path / a) if a.endswith(".html") else a.format(model) for a in arguments]
    assert run(["check", *given]) == 2
    printed = capsys.readouterr()
    assert words in printed.err and printed.err.count("\n") == 1


def test_the_report_is_written(tmp_path: Path) -> None:
    out = tmp_path / "exact.json"
    assert run(["check", "mlp:depth=1,width=4", "--out", str(out), "--out", str(tmp_path / "exact.txt")]) == 0
    assert json.loads(out.read_text())["exact"] is True
    assert (tmp_path / "exact.txt").read_text().startswith("Training: exact.")
