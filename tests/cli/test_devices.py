"""``microbatch devices``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from microbatch.cli.app import run
from microbatch.hardware.catalogue import device_names


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
