"""``microbatch predict``: figures, exit statuses, one clear line for each mistake, and what is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import microbatch
from microbatch.cli.app import run
from microbatch.curves.codec import load_profile
from microbatch.curves.profile import Point, Profile

KEYS = {
    "recommended": {"batch_size", "objective", "reason", "limited_by", "measured"},
    "ridge": {"value", "low", "high", "predicted_weights", "predicted_with_activations"},
    "fit": {"form", "p", "fixed_seconds", "seconds_per_item", "rms"},
}
"""What DESIGN promises of the document's parts; more may follow."""
TOP = {
    "schema_version", "recommended", "balanced", "b90", "largest_within_target", "largest_that_fits", "ridge", "fit",
    "bound", "cliffs", "padding", "period", "warnings", "uncounted", "noise", "points", "environment", "prediction",
    "surface", "beside", "memory", "layers",
}  # fmt: skip
POINT = {
    "batch_size", "seconds", "low", "high", "samples", "first_call_seconds", "compute_utilisation",
    "bandwidth_utilisation", "overhead_share", "peak_bytes",
}  # fmt: skip
CLIFF = {"batch_size", "from", "to", "ratio", "excess", "cause", "evidence", "pad_to"}


def document(capsys: pytest.CaptureFixture[str], line: str, status: int = 0) -> dict[str, Any]:
    assert run(["predict", *line.split(), "--json"]) == status
    printed = capsys.readouterr()
    assert printed.err == ""
    found: dict[str, Any] = json.loads(printed.out)
    return found


def test_the_document_has_every_key_with_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "mlp --device t4 --dtype fp16")
    assert set(found) >= TOP
    for key, names in KEYS.items():
        assert set(found[key]) >= names, key
    assert set(found["points"][0]) >= POINT
    assert found["cliffs"]
    assert set(found["cliffs"][0]) >= CLIFF
    assert found["recommended"]["measured"] is False
    assert found["source"] == "predicted"


FIGURES = [
    ("mlp:depth=8,width=1024 --device t4 --dtype fp16", 217, 376),
    ("mlp:depth=8,width=1024 --device t4 --dtype fp32", 54, 60),
    ("mlp:depth=8,width=2048 --device t4 --dtype fp16", 217, 275),
    ("mlp:depth=8,width=256 --device t4 --dtype fp16", 217, None),
    ("mlp --device a100 --dtype bf16", 153, 218),
    ("mlp --device a100 --dtype int8", 153, 218),
    ("mlp --device a100 --dtype bf16 --weights-dtype int8", 77, 109),
    ("mlp --device a100 --dtype bf16 --weights-dtype int4", 38, 55),
    ("mlp --device a100 --dtype tf32", 153, 218),
    ("mlp --device a100 --dtype fp32", 19, 20),
]


@pytest.mark.parametrize(("line", "weights", "full"), FIGURES)
def test_ridges(line: str, weights: int, full: int | None, capsys: pytest.CaptureFixture[str]) -> None:
    ridge = document(capsys, f"{line} --max-batch 64")["ridge"]
    assert round(ridge["predicted_weights"]) == weights
    found = ridge["predicted_with_activations"]
    assert (found and round(found)) == full


def test_steps_of_a_gpu_come_with_tiles_and_waves(capsys: pytest.CaptureFixture[str]) -> None:
    cliffs = document(capsys, "mlp:depth=2,width=4096 --device a100 --dtype bf16 --launches graph")["cliffs"]
    waves = [cliff for cliff in cliffs if cliff["cause"] in ("wave", "tile")]
    assert len(waves) >= 3
    assert all("multiprocessors" in cliff["evidence"] or "waves" in cliff["evidence"] for cliff in waves)
    assert all(cliff["batch_size"] - cliff["from"] == 1 for cliff in cliffs)


def test_training_says_what_the_optimizer_takes(capsys: pytest.CaptureFixture[str]) -> None:
    one, eight = (
        document(capsys, f"mlp --device a100 --mode training --accumulation {k} --max-batch 64") for k in (1, 8)
    )
    assert one["prediction"]["optimizer"]["name"] == "adam"
    assert one["prediction"]["optimizer"]["accumulation"] == 1
    assert one["ridge"]["predicted_weights"] > 1.5 * eight["ridge"]["predicted_weights"]
    assert one["memory"]["parts"]["optimizer"] == 2 * one["memory"]["parts"]["weights"] // 1 + 64


def test_the_summary_can_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["predict", "mlp", "--device", "t4", "--dtype", "fp16"]) == 0
    printed = capsys.readouterr().out
    assert "(predicted, not run)" in printed
    assert "ridge by the datasheet 217 (376 with activations)" in printed
    assert "no size was run" in printed


def test_every_form_is_written_and_read_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [tmp_path / f"curve{suffix}" for suffix in (".json", ".html", ".png", ".svg", ".csv", ".txt")]
    options = [word for name in names for word in ("--out", str(name))]
    assert run(["predict", "mlp:depth=2,width=128", "--device", "t4", "--dtype", "fp16", *options]) == 0
    assert all(name.stat().st_size > 200 for name in names)
    assert load_profile(names[0]).source == "predicted"
    capsys.readouterr()
    assert run(["explain", str(names[0]), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["ridge"]["predicted_weights"] == pytest.approx(216.7, abs=0.1)
    assert again["recommended"]["measured"] is False


def test_a_measurement_is_laid_beside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    points = tuple(
        Point(batch_size=b, samples=tuple(t * (1 + 0.001 * i) for i in range(3)))
        for b, t in ((1, 2e-4), (3, 2.1e-4), (37, 2.2e-4), (301, 3e-4), (4000, 2e-3))
    )
    microbatch.save(Profile(points=points, model="mlp", dtype="fp16"), tmp_path / "measured.json")
    found = document(capsys, f"mlp --device t4 --dtype fp16 --beside {tmp_path / 'measured.json'}")
    assert set(found["beside"]) >= {"median_error", "p90_error", "points", "findings"}
    assert [point["batch_size"] for point in found["beside"]["points"]] == [1, 3, 37, 301, 4000]
    assert all(point["computed"] for point in found["beside"]["points"])
    seconds = {point["batch_size"]: point["seconds"] for point in found["points"]}
    for point in found["beside"]["points"]:
        assert point["error"] == pytest.approx(seconds[point["batch_size"]] / point["measured"] - 1)


def test_what_does_not_fit_is_a_no(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "mlp --device t4 --memory-limit 20MB", status=1)
    assert found["largest_that_fits"] == 0
    assert any(warning.startswith("It does not fit") for warning in found["warnings"])
    assert found["recommended"]["limited_by"] == "memory"


def test_a_file_of_ones_own_is_a_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'name = "mine"\nrates = "dense"\n[flops.fp32]\nvalue = 1e12\nsource = "a test"\n'
        '[bandwidth]\nvalue = 1e10\nsource = "a test"\n'
    )
    found = document(capsys, f"mlp --device {path} --max-batch 64")
    assert found["ridge"]["predicted_weights"] == pytest.approx(4 * 1e12 / 2e10)
    assert found["largest_that_fits"] is None


MISTAKES = [
    ("mlp --device t44", "There is no device 't44' in the catalogue. Nearest: t4"),
    ("mlp --device 8xh201", "Nearest: h200"),
    ("mlp --device t4 --dtype bf16", "t4 has no rate for 'bf16'. Rates are known for fp32, fp16, int8."),
    ("mlp --device t4 --dtype fp12", "There is no dtype 'fp12'"),
    ("mlp --device 2xt4 --dtype fp16", "t4 has no link_bandwidth"),
    ("mlp --device t4 --mode decode", "mlp has no mode 'decode'"),
    ("mlp --device t4 --context 128", "--context 128 needs --mode decode"),
    ("mlp --device t4 --surface 1,x", "'1,x' is not a list of lengths"),
    ("mlp --device t4 --surface 128,256", "there is no surface"),
    ("mlp --device t4 --mode training --optimizer adamm", "There is no optimizer 'adamm'"),
    ("mlp --device t4 --accumulation 0", "0 is not in the range"),
    ("mlp --device t4 --beside nowhere.json", "There is no file nowhere.json"),
    ("mlp", "Missing option '--device'"),
    ("nothing --device t4", "There is no model 'nothing'"),
]


@pytest.mark.parametrize(("line", "words"), MISTAKES)
def test_a_mistake_is_one_line(line: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["predict", *line.split()]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert words in printed.err
