"""``microbatch profile``: the options that arrive, and what is written when."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from microbatch.cli.app import run
from microbatch.curves.profile import Profile
from microbatch.errors import InvalidSettings, ModelFailed, TooNoisy
from tests.cli.examples import a_profile


class Sweep:
    """Stands in for `profile` and keeps what it was called with."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.fails: Exception | None = None
        self.prints = ""

    def __call__(self, model: object, example: object, **options: Any) -> Profile:
        self.calls.append({"model": model, "example": example, **options})
        if self.prints:
            sys.stdout.write(self.prints + "\n")
        if self.fails:
            raise self.fails
        return a_profile()


@pytest.fixture
def sweep(monkeypatch: pytest.MonkeyPatch) -> Sweep:
    fake = Sweep()
    monkeypatch.setattr("microbatch.profiling.sweep.profile", fake)
    return fake


def test_every_option_arrives(sweep: Sweep, capsys: pytest.CaptureFixture[str]) -> None:
    options = (
        "--mode training --device cpu --dtype bf16 --budget 5s --max-batch 64 --memory-limit 2GB "
        "--batch-dimension 0 --compile --seed 7 --threads 1"
    )
    assert run(["profile", "mlp:depth=1,width=8", *options.split(), "--json"]) == 0
    call = sweep.calls[0]
    expected = {
        "mode": "training",
        "device": "cpu",
        "dtype": "bf16",
        "budget": 5.0,
        "max_batch_size": 64,
        "memory_limit": 2 * 10**9,
        "batch_dimension": 0,
        "compile": True,
        "seed": 7,
        "progress": None,
        "name": "mlp:depth=1,width=8",
        "unit": "rows",
    }
    assert {name: call[name] for name in expected} == expected
    assert json.loads(capsys.readouterr().out)["recommended"]["measured"] is True


def test_the_defaults_are_those_of_the_function(sweep: Sweep) -> None:
    assert run(["profile", "mlp:depth=1,width=8"]) == 0
    call = sweep.calls[0]
    expected = {
        "mode": "inference",
        "device": "cpu",
        "dtype": None,
        "budget": 60.0,
        "max_batch_size": None,
        "memory_limit": None,
        "batch_dimension": None,
        "compile": False,
        "seed": 0,
    }
    assert {name: call[name] for name in expected} == expected


def test_every_file_is_written_in_the_form_of_its_suffix(
    sweep: Sweep, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / "mlp.json", tmp_path / "mlp.csv", tmp_path / "mlp.txt"]
    assert run(["profile", "mlp:depth=1,width=8", *(word for f in files for word in ("--out", str(f)))]) == 0
    assert json.loads(files[0].read_text())["points"][0]["samples"]
    assert files[1].read_text().startswith("batch_size,seconds\n")
    assert files[2].read_text().startswith("Use batch ")
    printed = capsys.readouterr().out
    assert [line for line in printed.splitlines() if line.startswith("Wrote")] == [f"Wrote {path}" for path in files]


def test_what_a_model_prints_stays_out_of_the_document(sweep: Sweep, capsys: pytest.CaptureFixture[str]) -> None:
    sweep.prints = "hello from the model"
    assert run(["profile", "mlp:depth=1,width=8", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["recommended"]
    assert printed.err == "hello from the model\n"


def test_a_bad_place_is_refused_before_anything_runs(sweep: Sweep, tmp_path: Path) -> None:
    assert run(["profile", "mlp:depth=1,width=8", "--out", str(tmp_path / "missing" / "mlp.html")]) == 2
    assert sweep.calls == []


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidSettings("The batch limit is 0.", "Give 1 or more."), 2),
        (ModelFailed("The model raised ValueError at batch 4:\nno good.", "Fix the model."), 2),
        (TooNoisy("The noise is 31 %.", "Stop other work."), 3),
    ],
)
def test_an_error_is_one_line_and_leaves_nothing_behind(
    error: Exception, status: int, sweep: Sweep, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep.fails = error
    out = tmp_path / "mlp.html"
    assert run(["profile", "mlp:depth=1,width=8", "--out", str(out)]) == status
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == f"error: {' '.join(str(error).split())}\n"
    assert list(tmp_path.iterdir()) == []


def test_samples_too_noisy_to_explain_are_kept(
    sweep: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise TooNoisy("The noise is 31 %.", "Stop other work.")

    monkeypatch.setattr("microbatch.profiling.explain.explain", refuse)
    files = [tmp_path / "mlp.json", tmp_path / "mlp.html"]
    assert run(["profile", "mlp:depth=1,width=8", *(word for f in files for word in ("--out", str(f)))]) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["mlp.json"]
    assert json.loads(files[0].read_text())["model"] == "mlp"
    assert "too" not in capsys.readouterr().out


def test_an_unknown_model_is_one_line(sweep: Sweep, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["profile", "mpl", "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["type"] == "InvalidModel"
    assert "mlp" in error["remedy"]
    assert sweep.calls == []


@pytest.mark.parametrize(("mode", "name"), [("decode", "--context"), ("prefill", "--sequence")])
def test_a_language_model_is_run_in_its_mode_at_its_length(mode: str, name: str, sweep: Sweep) -> None:
    model = "decoder:depth=1,width=16,heads=2,kv_heads=1,vocabulary=32"
    assert run(["profile", model, "--mode", mode, name, "24"]) == 0
    call = sweep.calls[0]
    assert (call["mode"], call["sequence"]) == (mode, 24)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("--context 5", "--context 5 needs --mode decode"),
        ("--mode decode --context 5 --sequence 6", "say the same"),
        ("--mode decode", "mlp has no mode 'decode'"),
        ("--sequence 5", "no sequence whose length"),
    ],
)
def test_lengths_and_modes_that_do_not_fit(
    options: str, text: str, sweep: Sweep, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["profile", "mlp", *options.split()]) == 2
    assert text in capsys.readouterr().err and not sweep.calls
