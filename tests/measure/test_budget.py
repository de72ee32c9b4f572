"""The memory budget, from control groups that the test writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from microbatch.measure import budget
from microbatch.measure.budget import cgroup_room, memory_budget

MIB = 1 << 20


def group(folder: Path, version: int, limit: str, used: int, droppable: int = 0) -> None:
    """The files of one control group."""
    folder.mkdir(parents=True, exist_ok=True)
    names = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")}
    at, now, statistic = names.get(version, ("memory.max", "memory.current", "inactive_file"))
    (folder / at).write_text(f"{limit}\n")
    (folder / now).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{statistic} {droppable}\n")


def room(tmp_path: Path, membership: str) -> int | None:
    file = tmp_path / "membership"
    file.write_text(membership)
    return cgroup_room(tmp_path / "fs", file)


def test_version_two(tmp_path: Path) -> None:
    group(tmp_path / "fs" / "job", 2, str(100 * MIB), 40 * MIB, droppable=10 * MIB)
    assert room(tmp_path, "0::/job\n") == 70 * MIB


def test_version_one(tmp_path: Path) -> None:
    group(tmp_path / "fs" / "memory" / "job", 1, str(100 * MIB), 40 * MIB)
    assert room(tmp_path, "9:cpu,cpuacct:/job\n7:memory:/job\n") == 60 * MIB


def test_the_tightest_group_upwards_counts(tmp_path: Path) -> None:
    group(tmp_path / "fs" / "slice" / "job", 2, str(900 * MIB), 1 * MIB)
    group(tmp_path / "fs" / "slice", 2, str(500 * MIB), 450 * MIB)
    assert room(tmp_path, "0::/slice/job\n") == 50 * MIB


def test_in_a_container_the_root_holds_the_limit(tmp_path: Path) -> None:
    group(tmp_path / "fs", 2, str(300 * MIB), 100 * MIB)
    assert room(tmp_path, "0::/kubepods/pod7/abc\n") == 200 * MIB


@pytest.mark.parametrize(("version", "limit"), [(2, "max"), (1, str(2**63 - 4096)), (2, "")])
def test_no_limit_is_none(tmp_path: Path, version: int, limit: str) -> None:
    group(tmp_path / "fs" / ("" if version == 2 else "memory"), version, limit, MIB)
    assert room(tmp_path, "0::/\n7:memory:/\n") is None


def test_a_group_over_its_limit_has_no_room(tmp_path: Path) -> None:
    group(tmp_path / "fs", 2, str(MIB), 2 * MIB)
    assert room(tmp_path, "0::/\n") == 0


def test_the_users_limit_comes_first() -> None:
    assert memory_budget(123) == (123, "your limit")


class Available:
    def __init__(self, available: int) -> None:
        self.available = available


@pytest.mark.parametrize(
    ("allowed", "wanted"),
    [
        (None, (800, "80 % of available memory")),
        (900, (800, "80 % of available memory")),
        (300, (300, "cgroup limit")),
        (0, (0, "cgroup limit")),
    ],
)
def test_the_least_of_group_and_machine(
    monkeypatch: pytest.MonkeyPatch, allowed: int | None, wanted: tuple[int, str]
) -> None:
    monkeypatch.setattr(budget, "cgroup_room", lambda: allowed)
    monkeypatch.setattr("psutil.virtual_memory", lambda: Available(1000))
    assert memory_budget() == wanted
