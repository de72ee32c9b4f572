"""``microbatch pipeline``: real ranks on this machine, and mistakes that are told before any is started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from microbatch.cli.app import run
from microbatch.pipeline.costs_file import read_costs

MODEL = "mlp:depth=4,width=32"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what one run wrote, and its answer in ``answer.json``."""
    folder = tmp_path_factory.mktemp("run")
    names = ("run.json", "costs.csv", "step.svg", "step.html", "step.txt", "step.trace.json")
    outputs = [part for name in names for part in ("--out", str(folder / name))]
    done = subprocess.run(
        [sys.executable, "-m", "microbatch", "pipeline", MODEL, "--stages", "2", "--schedule", "zb_h1",
         "--micro-batches", "4", "--steps", "2", "--check", "--json", *outputs],
        capture_output=True, text=True, timeout=120, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (folder / "answer.json").write_text(done.stdout)
    return folder


def answer_of(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((folder / "answer.json").read_text())
    return loaded


def test_one_document_says_what_was_measured(trained: Path) -> None:
    found = answer_of(trained)
    assert (found["schedule"], found["ranks"], found["num_micro_batches"], found["batch_size"]) == ("zb_h1", 2, 4, 8)
    assert (found["source"], found["beside"]["source"]) == ("measured", "simulated")
    assert found["step_seconds"] > found["makespan"] * 0.5
    assert 0 < found["bubble_fraction"] < 1 and 0 < found["beside"]["bubble_fraction"] < 1
    assert len(found["samples"]) == 2
    assert all(0 < one["state"] < one["peak"] for one in found["memory"]) and len(found["memory"]) == 2
    assert found["exact"] is True and found["largest_difference"] <= 1e-6
    assert found["advice"].endswith(".")
    assert [len(found["costs"][name]) for name in ("forward", "input_gradient", "weight_gradient")] == [2, 2, 2]
    names = [name for names in found["layers"] for name in names]
    assert len(names) == len(set(names)) > 2


def test_every_file_is_written(trained: Path) -> None:
    assert json.loads((trained / "run.json").read_text())["advice"] == answer_of(trained)["advice"]
    svg = (trained / "step.svg").read_text()
    assert svg.count(">measured<") == svg.count(">simulated<") == 2
    trace = json.loads((trained / "step.trace.json").read_text())
    assert {event["pid"] for event in trace["traceEvents"]} == {0, 1, 2, 3}
    assert "To change: " in (trained / "step.txt").read_text()
    assert "measured" in (trained / "step.html").read_text()


@pytest.mark.parametrize("name", ["run.json", "costs.csv"])
def test_what_was_saved_is_simulated(name: str, trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    costs = read_costs(trained / name)
    assert costs.per_stage("forward", 2).tolist() == answer_of(trained)["costs"]["forward"]
    for schedule in ("gpipe", "auto"):
        assert run(["simulate", schedule, "--stages", "2", "--costs", str(trained / name), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["makespan"] > 0


def test_inference_in_words(capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["--mode", "inference", "--micro-batches", "3", "--batch-size", "7", "--steps", "1", "--check"]
    assert run(["pipeline", MODEL, *arguments]) == 0
    printed = capfd.readouterr().out
    assert printed.startswith(f"{MODEL}, inference: forward_only, 2 ranks, 3 micro-batches, batch 7")
    assert "as one process" in printed
    assert "rank 0 measured" in printed and "rank 1 simulated" in printed


MISTAKES = (
    (["--schedule", "zb_x"], "There is no schedule 'zb_x'"),
    (["--schedule", "dualpipe"], "only simulated"),
    (["--schedule", "zb_v", "--chunks", "3"], "has 2 chunks on each rank, not 3"),
    (["--schedule", "nothing.csv"], "There is no file nothing.csv"),
    (["--schedule", "order.csv", "--stages", "3"], "--stages is 3, and order.csv has 2"),
    (["--schedule", "order.csv", "--micro-batches", "3"], "--micro-batches is 3, and order.csv has 2"),
    (["--out", "run.png"], "A run has no form .png"),
    (["--out", "nowhere/run.svg"], "does not exist"),
    (["--stages", "0"], "0"),
    (["--mode", "decode"], "decode"),
)


@pytest.mark.parametrize(("arguments", "words"), MISTAKES, ids=[" ".join(given) for given, _ in MISTAKES])
def test_mistakes_are_one_line_before_a_process_starts(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "order.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    monkeypatch.setattr("microbatch.pipeline.execution.launch.launch", lambda *_, **__: pytest.fail("started"))
    assert run(["pipeline", MODEL, *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert words in printed.err


def test_a_wrong_number_of_processes_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As every rank of torchrun prints it, before any meets the others."""
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "4"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    assert run(["pipeline", MODEL, "--stages", "2"]) == 2
    printed = capsys.readouterr()
    assert printed.err == (
        "error: --stages is 2, and torchrun started 4 processes. Leave --stages out, or start 2 processes.\n"
    )


def test_a_mistake_that_a_rank_finds_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Too few layers for ten stages: the model is only known once it is loaded."""
    arguments = ["--schedule", "interleaved", "--chunks", "5", "--steps", "1"]
    assert run(["pipeline", "mlp:depth=1,width=8", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1
    assert "stages are wanted" in printed.err
