"""``--global-batch``: a step in micro-batches of each size, of a saved profile, a CSV, a prediction, a measurement."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import microbatch
from microbatch.cli.app import run
from microbatch.curves.profile import MemoryCurve, Point, Profile
from microbatch.units import THIN_SPACE

KEYS = {
    "micro_batch_size", "num_micro_batches", "tail", "step_seconds", "low", "high", "samples_per_second", "peak_bytes",
    "fits", "bound", "chosen",
}  # fmt: skip
PIECES = {1: 0.020, 2: 0.022, 4: 0.026, 8: 0.034, 16: 0.050, 32: 0.098, 64: 0.2, 128: 0.42}
UPDATE, ADDING = 0.03, 0.001


def trained() -> Profile:
    """Three samples of each size that hardly differ, and a memory in which 64 is the most."""
    points = tuple(
        Point(
            batch_size=size,
            samples=tuple((seconds + UPDATE) * share for share in (0.999, 1.0, 1.001)),
            update_samples=tuple(UPDATE * share for share in (0.999, 1.0, 1.001)),
            rounds=(0, 1, 2),
        )
        for size, seconds in PIECES.items()
    )
    memory = MemoryCurve(
        fixed_bytes=300_000_000, bytes_per_item=10_000_000.0, limit_bytes=1_200_000_000, limit_source="cgroup limit",
        margin=0.05, parts={"weights": 100_000_000, "gradients": 100_000_000, "optimizer": 200_000_000},
    )  # fmt: skip
    return Profile(
        points=points, model="mlp", mode="training", dtype="fp32", memory=memory, adding_samples=(ADDING,) * 3,
        stopped_by="limit",
    )  # fmt: skip


@pytest.fixture
def saved(tmp_path: Path) -> str:
    return str(microbatch.save(trained(), tmp_path / "training.json"))


def document(capsys: pytest.CaptureFixture[str], line: list[str], status: int = 0) -> dict[str, Any]:
    assert run([*line, "--json"]) == status
    printed = capsys.readouterr()
    assert printed.err == ""
    found: dict[str, Any] = json.loads(printed.out)
    return found


def test_each_size_has_its_number_time_memory_and_verdict(saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, ["explain", saved, "--global-batch", "128"])
    assert found["global_batch_size"] == 128
    rows = {row["micro_batch_size"]: row for row in found["micro_batches"]}
    assert list(rows) == list(PIECES)
    assert all(set(row) >= KEYS for row in rows.values())
    assert {size: row["num_micro_batches"] for size, row in rows.items()} == {size: 128 // size for size in PIECES}
    for size, seconds in PIECES.items():
        pieces = 128 // size
        wanted = pieces * seconds + (pieces - 1) * ADDING + UPDATE
        assert rows[size]["step_seconds"] == pytest.approx(wanted, rel=2e-3)
        assert rows[size]["low"] < rows[size]["step_seconds"] < rows[size]["high"]
        assert rows[size]["samples_per_second"] == pytest.approx(128 / wanted, rel=2e-3)
        beside = 100_000_000 if pieces > 1 else 0
        assert rows[size]["peak_bytes"] == 300_000_000 + beside + 10_000_000 * size
    assert {size: row["fits"] for size, row in rows.items()} == {size: size < 128 for size in PIECES}
    assert [size for size, row in rows.items() if row["chosen"]] == [32]
    assert found["micro_batch"] == {
        "micro_batch_size": 32, "num_micro_batches": 4, "limited_by": "saturated",
        "reason": "Larger pieces gain less than 2 %.",
    }  # fmt: skip


def test_the_whole_batch_takes_the_time_of_its_own_size(saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, ["explain", saved, "--global-batch", "32"])
    points = {point["batch_size"]: point for point in found["points"]}
    last = found["micro_batches"][-1]
    assert (last["micro_batch_size"], last["num_micro_batches"]) == (32, 1)
    for own, name in (("step_seconds", "seconds"), ("low", "low"), ("high", "high")):
        assert last[own] == pytest.approx(points[32][name], rel=1e-9)


def test_a_ragged_last_piece_is_told(saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, ["explain", saved, "--global-batch", "100"])
    rows = {row["micro_batch_size"]: row for row in found["micro_batches"]}
    assert (rows[32]["num_micro_batches"], rows[32]["tail"]) == (4, 4)
    wanted = 3 * PIECES[32] + PIECES[4] + 3 * ADDING + UPDATE
    assert rows[32]["step_seconds"] == pytest.approx(wanted, rel=2e-3)
    assert rows[100]["measured"] is False


def test_the_summary_can_be_read(saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", saved, "--global-batch", "128"]) == 0
    lines = capsys.readouterr().out.replace(THIN_SPACE, " ").splitlines()
    assert lines[0].startswith("Use micro-batches of 32.  4 make a step of 128: 42")
    assert lines[0].endswith("rows/s, 60 % of memory.")
    assert lines[1:3] == ["  Larger pieces gain less than 2 %.", "Micro-batches of a global batch of 128"]
    table = [line.split() for line in lines[3:12]]
    assert table[0][:3] == ["micro-batch", "pieces", "time"]
    assert [row[:2] for row in table[1:]] == [[str(size), str(128 // size)] for size in PIECES]
    assert table[6][-1] == "use" and table[8][-3:] == ["does", "not", "fit"]
    assert lines[12].startswith("A batch in one piece: use batch ")


def test_every_form_of_report_tells_it(saved: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [tmp_path / name for name in ("told.html", "told.txt", "told.json")]
    assert run(["explain", saved, "--global-batch", "128", *(w for n in names for w in ("--out", str(n)))]) == 0
    page, text = names[0].read_text(), names[1].read_text().replace(THIN_SPACE, " ")
    assert "<h1>Use micro-batches of 32.</h1>" in page
    assert "<h2>Micro-batches of a global batch of 128</h2>" in page
    assert "best whole step" in page
    assert "Micro-batches of a global batch of 128" in text
    assert json.loads(names[2].read_text())["micro_batch"]["micro_batch_size"] == 32
    again = document(capsys_cleared(capsys), ["explain", str(names[2]), "--global-batch", "128"])
    assert again["micro_batches"] == json.loads(names[2].read_text())["micro_batches"]


def capsys_cleared(capsys: pytest.CaptureFixture[str]) -> pytest.CaptureFixture[str]:
    capsys.readouterr()
    return capsys


def test_without_a_global_batch_the_keys_are_empty(saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, ["explain", saved])
    assert (found["global_batch_size"], found["micro_batches"], found["micro_batch"]) == (None, [], None)


def test_nothing_that_fits_is_a_no(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = trained()
    assert profile.memory is not None
    small = replace(profile, memory=replace(profile.memory, limit_bytes=320_000_000))
    path = str(microbatch.save(small, tmp_path / "small.json"))
    found = document(capsys, ["explain", path, "--global-batch", "128"], status=1)
    assert found["micro_batch"]["micro_batch_size"] is None and not any(r["chosen"] for r in found["micro_batches"])
    assert "one of 1 needs 410 MB, and 304 MB are allowed" in found["micro_batch"]["reason"]
    assert run(["explain", path, "--global-batch", "128"]) == 1
    assert capsys.readouterr().out.startswith("No micro-batch fits.  A step of 128 rows cannot run.")


def test_a_profile_without_apart_updates_says_what_that_means(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = replace(trained(), points=tuple(replace(point, update_samples=()) for point in trained().points))
    path = str(microbatch.save(old, tmp_path / "old.json"))
    found = document(capsys, ["explain", path, "--global-batch", "128"])
    assert any("did not time the optimizer's update apart" in warning for warning in found["warnings"])


def test_a_csv_is_taken_with_a_word(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = "".join(f"{size},{seconds}\n" for size, seconds in PIECES.items())
    (tmp_path / "times.csv").write_text(f"batch_size,seconds\n{rows}")
    found = document(capsys, ["explain", str(tmp_path / "times.csv"), "--global-batch", "64"])
    steps = {row["micro_batch_size"]: row["step_seconds"] for row in found["micro_batches"]}
    assert steps[16] == pytest.approx(4 * PIECES[16])
    assert any("the update is not known" in warning for warning in found["warnings"])


def test_a_prediction_takes_one_update_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    line = "predict mlp:depth=2,width=256 --device h100 --mode training --global-batch 1000"
    found = document(capsys, line.split())
    rows = {row["micro_batch_size"]: row for row in found["micro_batches"]}
    assert {1, 2, 4, 8, 16, 32, 63, 125, 250, 500, 1000} <= set(rows)
    assert rows[125]["num_micro_batches"] == 8 and rows[63]["tail"] == 1000 - 15 * 63
    points = {point["batch_size"]: point for point in found["points"]}
    for size in (125, 500):
        (whole,), (update,) = points[size]["samples"], points[size]["update_samples"]
        pieces = rows[size]["num_micro_batches"]
        assert rows[size]["step_seconds"] == pytest.approx(pieces * (whole - update) + update)
    assert rows[1000]["fits"] is True and sum(row["chosen"] for row in rows.values()) == 1


class Sweep:
    """Stands in for `profile` and keeps what it was called with."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(self, model: object, example: object, **options: Any) -> Profile:
        self.calls.append(options)
        return trained()


@pytest.mark.parametrize(("more", "largest"), [((), 100), (("--max-batch", "60"), 60), (("--max-batch", "600"), 100)])
def test_a_measurement_looks_at_even_cuts_and_no_further(
    more: tuple[str, ...], largest: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = Sweep()
    monkeypatch.setattr("microbatch.profiling.sweep.profile", sweep)
    line = ["profile", "mlp:depth=1,width=8", "--mode", "training", "--global-batch", "100", *more]
    assert document(capsys, line)["global_batch_size"] == 100
    assert sweep.calls[0]["max_batch_size"] == largest
    assert sweep.calls[0]["sizes"] == (1, 2, 4, 7, 13, 25, 50, 100)


MISTAKES = [
    ("explain {saved} --global-batch 0", "0 is not in the range x>=1"),
    ("explain {saved} --global-batch -8", "-8 is not in the range x>=1"),
    ("explain {saved} --global-batch many", "'many' is not a valid integer"),
    ("explain {inferred} --global-batch 128", "Measure one with --mode training"),
    ("profile mlp --global-batch 128", "--global-batch 128 is cut into micro-batches of one optimizer step; it needs"),
    ("profile mlp --mode training --global-batch 0", "0 is not in the range x>=1"),
    ("profile decoder --mode decode --global-batch 128", "needs --mode training, not decode"),
    ("predict mlp --device h100 --global-batch 128", "needs --mode training, not inference"),
    ("predict mlp --device h100 --mode training --global-batch 128 --accumulation 4", "give one of them"),
]


@pytest.mark.parametrize(("line", "words"), MISTAKES)
def test_a_mistake_is_one_line(
    line: str, words: str, saved: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inferred = microbatch.save(replace(trained(), mode="inference"), tmp_path / "inferred.json")
    assert run(line.format(saved=saved, inferred=inferred).split()) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert words in printed.err
