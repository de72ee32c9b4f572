"""``microbatch devices``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from microbatch.cli.app import run
from microbatch.hardware.catalogue import device_names
from microbatch.hardware.device_spec import DeviceSpec


def test_the_list_has_every_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["devices"]) == 0
    words = capsys.readouterr().out.split()
    assert set(device_names()) <= set(words)


def test_the_list_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["devices", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [device["name"] for device in document["devices"]] == list(device_names())


def test_one_device_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["devices", "t4", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema_version"] == 1
    assert document["flops"]["fp16"] == 65e12
    assert document["bandwidth"] == 300e9
    keys = {"name", "memory_bytes", "multiprocessors", "cache_bytes", "link_bandwidth", "sources"}
    assert keys <= set(document)


def test_one_device_as_text_names_its_sources(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["devices", "a100"]) == 0
    printed = capsys.readouterr().out
    assert "a100-80gb-sxm" in printed
    assert "source of" in printed


def test_an_unknown_device_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["devices", "h10", "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["type"] == "InvalidDevice"
    assert "h100" in error["remedy"]


def test_a_file_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = 'name = "mine"\nrates = "dense"\n[flops.fp32]\nvalue = 1e12\nsource = "measured"\n'
    (tmp_path / "mine.toml").write_text(f'{own}[bandwidth]\nvalue = 1e11\nsource = "measured"\n')
    assert run(["devices", str(tmp_path / "mine.toml"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["flops"] == {"fp32": 1e12}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is measured in no time."""
    from microbatch.measure import calibrate

    spec = DeviceSpec(name="mine", flops={"fp32": 1e12}, bandwidth=1e11, kind="cpu",
                      sources={"flops.fp32": "measured", "bandwidth": "measured"})  # fmt: skip
    monkeypatch.setattr(calibrate, "measure_device", lambda *_, **__: (spec, ("It was busy.",)))


def test_this_machine_is_measured_into_a_file(quick: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "here.toml"
    assert run(["devices", "--measure", str(path)]) == 0
    printed = capsys.readouterr()
    assert f"Wrote {path}" in printed.out and "1 TFLOP/s" in printed.out
    assert printed.err == "warning: It was busy.\n"
    assert path.read_text().startswith("# This machine") and "# It was busy." in path.read_text()
    assert run(["devices", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "cpu"


def test_measured_for_machines(quick: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["devices", "--measure", str(tmp_path / "here.toml"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["flops"] == {"fp32": 1e12}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--measure", "here.json"], "here.json does not end in .toml. Write to here.toml."),
        (["--measure", "missing/here.toml"], "The folder missing does not exist."),
        (["t4", "--measure", "here.toml"], "not 't4'"),
        (["--threads", "2"], "Add --measure FILE."),
        (["--measure", "here.toml", "--threads", "0"], "0 threads"),
        (["--measure", "here.toml", "--device", "tpu"], "tpu"),
    ],
)
def test_bad_measurements(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["devices", *arguments]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())
