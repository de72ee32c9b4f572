"""``microbatch simulate``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from microbatch.cli.app import run
from microbatch.pipeline.schedules import SCHEDULES

KEYS = {"makespan", "makespan_with_optimizer", "bubble_fraction", "bubble_over_ideal", "bubble_per_rank",
        "peak_activations", "critical_path", "schema_version"}  # fmt: skip


def document(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> dict[str, Any]:
    assert run(["simulate", *arguments, "--json"]) == status
    loaded: dict[str, Any] = json.loads(capsys.readouterr().out)
    return loaded


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_for_machines(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, name, "--stages", "4", "--micro-batches", "8")
    assert set(found) >= KEYS
    assert len(found["peak_activations"]) == len(found["bubble_per_rank"]) == 4
    assert found["schedule"] == name


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_as_text(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", name]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Ranks wait")
    assert "rank 3 " in printed
    assert all(len(line) <= 132 for line in printed.splitlines() if line.startswith("  rank"))


def test_numbers_per_stage(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(
        capsys, "one_f_one_b", "--stages", "2", "--micro-batches", "2", "--forward", "1,2", "--input-gradient", "1",
        "--weight-gradient", "0.5,0.5", "--message", "0.25",
    )  # fmt: skip
    # F 1, message, F 2, B 1.5, F 2, B 1.5, message, B 1.5
    assert found["makespan"] == 1 + 0.25 + 2 * 3.5 + 0.25 + 1.5


def test_an_order_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "order.csv"
    path.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    assert document(capsys, str(path))["makespan"] == 9
    assert run(["simulate", str(path), "--stages", "3"]) == 2
    assert "--stages is 3" in capsys.readouterr().err
    path.write_text("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
    assert run(["simulate", str(path)]) == 2
    assert "rank 0 waits at 0B0 for 1B0 of rank 1" in capsys.readouterr().err


def test_what_does_not_fit_is_a_no(capsys: pytest.CaptureFixture[str]) -> None:
    assert document(capsys, "gpipe", "--memory-limit", "4", status=1)["fits"] is False
    assert document(capsys, "one_f_one_b", "--memory-limit", "4")["fits"] is True
    sized = document(capsys, "gpipe", "--memory-limit", "7GB", "--activation-bytes", "1e9", status=1)
    assert sized["peak_bytes"] == [8_000_000_000] * 4
    assert run(["simulate", "gpipe", "--memory-limit", "7GB"]) == 2
    assert "7000000000 bytes" in capsys.readouterr().err


def test_actions_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(document(capsys, "gpipe", "--actions")["actions"]) == 64


def test_costs_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "costs.csv").write_text("forward,input_gradient,weight_gradient\n1,1,1\n2,2,2\n")
    found = document(capsys, "gpipe", "--stages", "2", "--micro-batches", "2", "--costs", str(tmp_path / "costs.csv"))
    assert found["makespan"] == 1 + 2 * 2 + 2 * 4 + 2


def test_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [tmp_path / name for name in ("a.svg", "a.html", "a.txt", "a.csv", "a.json", "a.trace.json")]
    arguments = [part for name in names for part in ("--out", str(name))]
    assert run(["simulate", "zb_h1", *arguments]) == 0
    assert all(name.stat().st_size > 100 for name in names)
    assert run(["simulate", "zb_h1", "--out", str(tmp_path / "a.png")]) == 2
    assert "no form .png" in capsys.readouterr().err


def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["zb_x"], ["zb_v", "--chunks", "3"], ["gpipe", "--forward", "1,2"], ["gpipe", "--forward", "x"],
                      ["nothing.csv"], ["gpipe", "--stages", "0"]):  # fmt: skip
        assert run(["simulate", *arguments]) == 2
        assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_time_at_all_and_one_of_everything(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    nothing = ["--forward", "0", "--input-gradient", "0", "--weight-gradient", "0"]
    for arguments in (nothing, ["--stages", "2", "--micro-batches", "1"]):
        assert run(["simulate", name, *arguments]) == 0
        assert run(["simulate", name, *arguments, "--json"]) == 0
        assert "NaN" not in capsys.readouterr().out


def test_the_best_order_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("auto", "--stages", "4", "--micro-batches", "4", "--forward", "1,1,1,2", "--memory-limit", "4")
    found = document(capsys, *arguments)
    assert set(found) >= KEYS | {"reason", "tried", "optimal"}
    named = [one["seconds"] for one in found["tried"] if not one["verdict"].startswith("does not fit")]
    assert found["makespan"] <= min(named) + 1e-9
    assert max(found["peak_activations"]) <= 4
    assert run(["simulate", *arguments]) == 0
    assert capsys.readouterr().out.startswith(found["reason"])


def test_no_order_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "auto", "--memory-limit", "0.5"]) == 1
    assert "No schedule fits" in capsys.readouterr().out
    assert document(capsys, "auto", "--memory-limit", "0.5", status=1)["error"]["type"] == "DoesNotFit"
