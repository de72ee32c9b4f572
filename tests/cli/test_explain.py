"""``microbatch explain``: real curves in, one answer or one clear line out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from microbatch.cli.app import run
from microbatch.hardware.device_spec import DeviceSpec
from microbatch.profiling.settings import STACKS
from tests.cli.examples import CSV, an_explanation


@pytest.fixture
def curve(tmp_path: Path) -> str:
    (tmp_path / "times.csv").write_text(CSV)
    return str(tmp_path / "times.csv")


def test_a_csv_is_explained_as_text(curve: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", curve]) == 0
    assert capsys.readouterr().out.startswith("Use batch ")


def test_a_csv_is_explained_for_machines(curve: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", curve, "--json"]) == 0
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert printed.err == ""
    assert document["schema_version"] == 1
    assert document["recommended"]["objective"] == "throughput"
    keys = "recommended balanced b90 largest_within_target largest_that_fits ridge fit bound cliffs padding period"
    assert set(keys.split()) <= set(document)
    assert [point["batch_size"] for point in document["points"]] == [1, 2, 4, 8, 16, 32, 64, 96, 128, 192]


def test_a_saved_answer_is_a_curve_again(curve: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = str(tmp_path / "saved.json")
    assert run(["explain", curve, "--out", saved]) == 0
    capsys.readouterr()
    assert run(["explain", saved, "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["recommended"] == json.loads(Path(saved).read_text())["recommended"]


def test_a_target_changes_the_answer(curve: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", curve, "--latency-target", "15ms", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["recommended"]["limited_by"] == "target"
    assert document["recommended"]["seconds"] < 0.015


def test_every_option_arrives(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen: dict[str, Any] = {}

    def fake(curve: str, **options: object) -> object:
        seen.update(options, curve=curve)
        return an_explanation()

    monkeypatch.setattr("microbatch.profiling.explain.explain", fake)
    options = ["--device", "a100", "--gemm", "4096x22016", "--objective", "balanced", "--latency-target", "5ms"]
    options += ["--global-batch", "128"]
    assert run(["explain", "x.csv", *options, "--json"]) == 0
    device = seen.pop("device")
    assert isinstance(device, DeviceSpec)
    assert device.name == "a100-80gb-sxm"
    assert seen == {
        "curve": "x.csv", "gemm": (4096, 22016), "objective": "balanced", "latency_target": 0.005,
        "global_batch_size": 128,
    }  # fmt: skip
    assert json.loads(capsys.readouterr().out)["noise"] is None


BAD_CURVES = {
    "missing": None,
    "text": "batch_size,seconds\n1,fast\n2,0.1\n",
    "nan": "batch_size,seconds\n1,nan\n2,0.1\n",
    "zero": "batch_size,seconds\n1,0\n2,0.1\n",
    "negative": "batch_size,seconds\n1,-0.1\n2,0.1\n",
    "one row": "batch_size,seconds\n1,0.1\n",
    "empty": "",
}


@pytest.mark.parametrize("name", BAD_CURVES)
@pytest.mark.parametrize("machine", [True, False])
def test_a_bad_curve_is_one_clear_line(
    name: str, machine: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, text = tmp_path / "curve.csv", BAD_CURVES[name]
    if text is not None:
        path.write_text(text)
    out = tmp_path / "out.html"
    assert run(["explain", str(path), "--out", str(out), *(["--json"] if machine else [])]) == 2
    printed = capsys.readouterr()
    assert not out.exists()
    if machine:
        assert json.loads(printed.out)["error"]["message"]
        assert printed.err == ""
    else:
        assert printed.out == ""
        assert printed.err.count("\n") == 1


def test_settings_of_another_stack(curve: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", curve, "--emit", "triton"]) == 0
    assert "max_batch_size: " in capsys.readouterr().out


def test_settings_of_another_stack_for_machines(curve: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", curve, "--emit", "triton", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["stack"] == "triton"
    assert f"max_batch_size: {document['batch_size']}" in document["settings"]


def test_an_unknown_stack_is_one_line(curve: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", curve, "--emit", "tritn"]) == 2
    assert "triton" in capsys.readouterr().err


def test_help_names_every_stack(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", "--help"]) == 0
    assert f"--emit {'|'.join(STACKS)}" in capsys.readouterr().out
