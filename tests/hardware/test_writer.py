"""A device written and read again, and files that are whole or not there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from microbatch.errors import InvalidDevice
from microbatch.hardware.catalogue import device_names, load_device, parse_device
from microbatch.hardware.constants import DEFAULTS
from microbatch.hardware.device_spec import DeviceSpec
from microbatch.hardware.writer import check_path, device_toml, write_device
from microbatch.units import DTYPE_BYTES

PLAIN = DeviceSpec(
    name="mine", flops={"fp32": 1e12}, bandwidth=1e11, sources={"flops.fp32": "measured", "bandwidth": "measured"}
)

figures = some.floats(min_value=1e-9, max_value=1e20)
sources = some.text(some.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip)


@some.composite
def specs(draw: some.DrawFn) -> DeviceSpec:
    """Any device that the catalogue would take, with sources of any text."""
    kind = draw(some.sampled_from(sorted(DEFAULTS)))
    dtypes = draw(some.sets(some.sampled_from(sorted(set(DTYPE_BYTES) - {"tf32"})), min_size=1))
    flops = {dtype: draw(figures) for dtype in sorted(dtypes)}
    whole: dict[str, Any] = {
        key: draw(some.none() | some.integers(1, 2**60)) for key in ("memory_bytes", "multiprocessors")
    }
    fractional: dict[str, Any] = {key: draw(some.none() | figures) for key in ("link_bandwidth", "launch_seconds")}
    names = draw(some.sets(some.sampled_from(sorted(DEFAULTS[kind])))) if DEFAULTS[kind] else set()
    constants = {name: draw(figures) for name in sorted(names)}
    present = [key for key, value in (whole | fractional).items() if value is not None]
    keys = ["bandwidth", *(f"flops.{d}" for d in flops), *present, *(f"constants.{name}" for name in constants)]
    return DeviceSpec(
        name=draw(some.from_regex(r"[a-z0-9]{1,8}(-[a-z0-9]{1,4}){0,3}", fullmatch=True)),
        kind=kind, flops=flops, bandwidth=draw(figures), constants=constants,
        sources={key: draw(sources) for key in keys}, **whole, **fractional,
    )  # fmt: skip


@given(specs())
def test_what_is_written_is_read_again(spec: DeviceSpec) -> None:
    assert parse_device(device_toml(spec), origin="test") == spec


@given(some.text(some.characters(exclude_categories=["Cs"])))
def test_a_heading_is_a_comment(heading: str) -> None:
    assert parse_device(device_toml(PLAIN, heading=heading), origin="test") == PLAIN


@pytest.mark.parametrize("name", device_names())
def test_the_catalogue_survives(name: str) -> None:
    assert parse_device(device_toml(load_device(name)), origin=name) == load_device(name)


def test_a_file_is_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("old")
    write_device(PLAIN, path, heading="measured\nhere")
    assert load_device(path) == PLAIN
    assert path.read_text().startswith("# measured\n# here\nname = ")
    assert list(tmp_path.iterdir()) == [path]


def test_a_device_that_breaks_a_rule_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("old")
    with pytest.raises(InvalidDevice, match=r"flops\.fp32 has no source"):
        write_device(DeviceSpec(name="mine", flops={"fp32": 1e12}, bandwidth=1e11), path)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("here.json", "does not end in .toml"),
        ("here", "does not end in .toml"),
        ("missing/here.toml", "does not exist"),
        ("folder.toml", "is a folder"),
    ],
)
def test_a_path_that_cannot_hold_a_device(tmp_path: Path, path: str, says: str) -> None:
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(InvalidDevice, match=re.escape(says)) as caught:
        check_path(tmp_path / path)
    assert caught.value.remedy
