"""Each form by its suffix, whole or not at all."""

from __future__ import annotations

import csv
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from microbatch.curves.codec import load_profile
from microbatch.errors import InvalidSettings
from microbatch.hardware.device_spec import DeviceSpec
from microbatch.reporting.save import FORMS, pretty_json, save, show
from microbatch.reporting.text import to_text
from tests.reporting import examples

STARTS = {
    ".json": b"{", ".html": b"<!doctype html>", ".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF",
    ".txt": b"Use batch 392.", ".csv": b"batch_size,seconds\n",
}  # fmt: skip
T4 = DeviceSpec(name="t4", flops={"fp16": 65e12}, bandwidth=3e11)


@pytest.mark.parametrize("suffix", FORMS)
def test_every_form_of_an_explanation(suffix: str, tmp_path: Path) -> None:
    path = save(examples.rich(), str(tmp_path / f"result{suffix.upper()}"))
    assert path.read_bytes().startswith(STARTS[suffix])
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("suffix", [".html", ".png"])
def test_a_profile_is_explained_where_the_form_needs_it(suffix: str, tmp_path: Path) -> None:
    path = save(examples.rich_profile(), tmp_path / f"result{suffix}")
    assert path.read_bytes().startswith(STARTS[suffix])


def test_json_can_be_loaded_as_a_profile_again(tmp_path: Path) -> None:
    assert load_profile(save(examples.rich(), tmp_path / "a.json")).points == examples.rich_profile().points
    assert load_profile(save(examples.rich_profile(), tmp_path / "b.json")) == examples.rich_profile()


def test_csv_has_a_row_for_each_sample(tmp_path: Path) -> None:
    path = save(examples.rich_profile(), tmp_path / "samples.csv")
    lines = csv.DictReader(path.read_text().splitlines())
    rows = [(int(row["batch_size"]), float(row["seconds"])) for row in lines]
    assert rows == [(point.batch_size, s) for point in examples.rich_profile().points for s in point.samples]


def test_json_keeps_lists_of_numbers_on_one_line_and_has_no_nan() -> None:
    document = {"a": [1.5, 2, None], "text": "[\n1,\n2]", "bad": math.nan, "empty": [], "rows": [{"b": ["x", "y, z"]}]}
    text = pretty_json(document).decode()
    assert '"a": [1.5, 2, null]' in text
    assert json.loads(text) == document | {"bad": None}


REFUSED: tuple[tuple[object, str, str], ...] = (
    (examples.rich(), "result.docx", r"'\.docx'.*\.json, \.html, \.png, \.svg, \.pdf, \.txt, \.csv"),
    (examples.rich(), "result", "name without a suffix"),
    (examples.rich(), "missing/result.json", "folder .*missing' does not exist"),
    (T4, "t4.html", r"DeviceSpec has no form \.html.*an Explanation or a Profile"),
    (T4, "t4.csv", r"DeviceSpec has no form \.csv"),
    ({}, "plain.json", r"dict has no form \.json"),
    ({}, "plain.txt", "dict has no form as text"),
)


@pytest.mark.parametrize(("result", "name", "message"), REFUSED)
def test_mistakes_are_told_and_leave_nothing(result: object, name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidSettings, match=message):
        save(result, tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_keeps_the_old_file_and_leaves_no_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = save(examples.rich(), tmp_path / "result.json")
    before = target.read_bytes()

    def half(path: Path, content: bytes) -> int:
        with path.open("wb") as stream:
            stream.write(content[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(InvalidSettings, match=r"result\.json' cannot be written: No space left on device"):
        save(examples.empty(), target)
    assert target.read_bytes() == before
    assert list(tmp_path.iterdir()) == [target]


def test_a_folder_in_the_way_is_told(tmp_path: Path) -> None:
    (tmp_path / "result.json").mkdir()
    with pytest.raises(InvalidSettings, match="cannot be written"):
        save(examples.rich(), tmp_path / "result.json")
    assert [entry.name for entry in tmp_path.iterdir()] == ["result.json"]


def test_show_prints_plain_text_into_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    show(examples.rich())
    assert capsys.readouterr().out == to_text(examples.rich()) + "\n"


def test_show_leaves_markup_alone(capsys: pytest.CaptureFixture[str]) -> None:
    show(DeviceSpec(name="[bold]t4[/bold]", flops={"fp16": 65e12}, bandwidth=3e11))
    assert "[bold]t4[/bold]" in capsys.readouterr().out


def test_text_and_json_load_neither_torch_nor_matplotlib() -> None:
    code = (
        "import sys\n"
        "from microbatch.hardware.device_spec import DeviceSpec\n"
        "from microbatch.reporting.save import save, show\n"
        "show(DeviceSpec(name='t4', flops={'fp16': 65e12}, bandwidth=3e11))\n"
        "sys.exit(str({'torch', 'matplotlib', 'jinja2'} & set(sys.modules) or ''))"
    )
    paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=paths, check=False)
    assert done.stderr.strip() == ""
    assert "217" in done.stdout
