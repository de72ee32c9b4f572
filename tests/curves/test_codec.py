"""Saved curves: a round trip without loss, and one clear line for every broken file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from microbatch.curves.codec import dump_profile, load_profile
from microbatch.curves.profile import Environment, ExpertLoad, Failure, Layer, MemoryCurve, Peaks, Point, Profile
from microbatch.errors import InvalidProfile


def full_profile() -> Profile:
    return Profile(
        points=(
            Point(batch_size=1, samples=(0.1, 0.2), rounds=(0, 1), update_samples=(0.01, 0.0), kernels=("a",)),
            Point(batch_size=2, samples=(0.3,), beside_gradients_bytes=7),
        ),
        model="m",
        peaks=Peaks(flops=1e12, bandwidth=1e10, source="measured here", cache_bytes=1 << 25),
        memory=MemoryCurve(
            fixed_bytes=10, bytes_per_item=2.5, limit_bytes=100, limit_source="x", margin=0.1, parts={"w": 1}
        ),
        layers=(Layer(name="l", kind="Linear", parameter_bytes=4, flops_per_item=8, activation_bytes_per_item=2),),
        routing=(ExpertLoad(layer="e", batch_size=2, tokens=4, tokens_per_expert=(3, 1)),),
        failures=(Failure(batch_size=4, kind="error", text="no"),),
        adding_samples=(0.001, 0.002),
        environment=Environment(device="cpu", clock_hz=(1e9,), versions={"torch": "2"}),
    )


def test_round_trip_keeps_everything(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(dump_profile(full_profile()))
    assert load_profile(path) == full_profile()
    assert load_profile(str(path)).to_json() == full_profile().to_json()


def test_a_profile_saved_before_updates_were_timed_apart_still_loads(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text(OLD)
    profile = load_profile(tmp_path / "old.json")
    assert [(point.samples, point.update_samples) for point in profile.points] == [((0.02, 0.021), ()), ((0.03,), ())]
    assert profile.adding_samples == ()


OLD = """{"points": [
    {"batch_size": 1, "samples": [0.02, 0.021], "rounds": [0, 1], "times": [0.1, 0.2], "first_call_seconds": 0.1,
     "flops": null, "moved_bytes": null, "overhead_seconds": null, "peak_bytes": null, "predicted_peak_bytes": 900,
     "page_faults": null, "allocator_retries": null, "kernels": []},
    {"batch_size": 8, "samples": [0.03]}],
  "schema_version": 1, "model": "mlp", "mode": "training", "sequence": null, "dtype": "fp32", "unit": "rows",
  "memory": {"fixed_bytes": 100, "bytes_per_item": 10.0, "limit_bytes": 1000, "limit_source": "x", "margin": 0.05,
             "predicted_largest": 85, "largest_that_fits": null, "parts": {"weights": 50}},
  "stopped_by": "limit", "warnings": []}"""


def test_csv_repeats_and_order_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("\ufeffseconds, batch_size ,note\n0.3,4,x\n# remark\n0.1,1,\n\n0.2,1.0,\n")
    profile = load_profile(path)
    assert [(p.batch_size, p.samples) for p in profile.points] == [(1, (0.1, 0.2)), (4, (0.3,))]
    assert profile.source == "csv"


BROKEN = {
    "empty.csv": ("", "empty"),
    "header.csv": ("a,b\n1,2\n", "columns a, b"),
    "text.csv": ("batch_size,seconds\n1,fast\n", "'fast' is not a number"),
    "size.csv": ("batch_size,seconds\nbig,1\n", "'big' is not a number"),
    "half.csv": ("batch_size,seconds\n1.5,1\n", "not a whole number"),
    "nan.csv": ("batch_size,seconds\n1,nan\n", "nan seconds"),
    "zero.csv": ("batch_size,seconds\n1,0\n", "0.0 seconds"),
    "negative.csv": ("batch_size,seconds\n1,-2\n", "-2.0 seconds"),
    "short.csv": ("batch_size,seconds\n1\n", "'' is not a number"),
    "one_row.csv": ("batch_size,seconds\n8,0.1\n", "one batch size, 8"),
    "no_rows.csv": ("batch_size,seconds\n", "no batch size"),
    "broken.json": ("{", "not a saved profile"),
    "other.json": ('{"points": 3}', "not a saved profile"),
    "no_samples.json": ('{"points": [{"batch_size": 1, "samples": []}]}', "0 samples"),
    "newer.json": (json.dumps({"points": [], "schema_version": 99}), "schema version 99"),
    "twice.json": (json.dumps({"points": [{"batch_size": 1, "samples": [1.0]}] * 2}), "more than once"),
    "updates.json": ('{"points": [{"batch_size": 1, "samples": [1.0, 1.0], "update_samples": [0.5]}]}', "1 of updates"),
    "update.json": (
        '{"points": [{"batch_size": 1, "samples": [1.0], "update_samples": [1.5]}]}',
        "1.5 of them to update",
    ),
    "adding.json": ('{"points": [{"batch_size": 1, "samples": [1.0]}], "adding_samples": [-1.0]}', "in -1.0 seconds"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_refused_in_one_line(tmp_path: Path, name: str) -> None:
    content, said = BROKEN[name]
    (tmp_path / name).write_text(content)
    with pytest.raises(InvalidProfile) as caught:
        load_profile(tmp_path / name)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.remedy


def test_missing_files_folders_and_binaries_are_refused(tmp_path: Path) -> None:
    (tmp_path / "b.csv").write_bytes(b"\xff\xfe\x00\x81")
    for path in (tmp_path / "none.json", tmp_path, tmp_path / "b.csv"):
        with pytest.raises(InvalidProfile):
            load_profile(path)
