"""How many bytes a run may use, and who says so."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

_AVAILABLE_SHARE = 0.8
_NO_LIMIT = 1 << 60
"""cgroup v1 writes a number near 2^63 where there is no limit."""

_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
"""Files of the limit and of what is used, and the statistic of what could be dropped."""


def memory_budget(limit: int | None = None, device: torch.device | str = "cpu") -> tuple[int, str]:
    """Bytes that a run may use, and where the figure comes from.

    The user's limit; else on CUDA what is free; else the least of what the control group still allows and 80 % of
    what the machine has available. Linux kills a process that takes more, it does not raise.
    """
    if limit is not None:
        return limit, "your limit"
    if torch.device(device).type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device), "free memory of the device"
    available = int(_AVAILABLE_SHARE * psutil.virtual_memory().available)
    allowed = cgroup_room()
    if allowed is not None and allowed < available:
        return allowed, "cgroup limit"
    return available, "80 % of available memory"


def cgroup_room(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> int | None:
    """Bytes that this process's control groups still allow (v2, else v1); None without a limit.

    Every group from the process's own up to the root may hold a limit: the least room counts. Page cache that the
    kernel can drop (``inactive_file``) is not counted as used.
    """
    rooms = [room for folder, names in _groups(root, membership) if (room := _room(folder, names)) is not None]
    return min(rooms) if rooms else None


def _groups(root: Path, membership: Path) -> list[tuple[Path, tuple[str, str, str]]]:
    found = []
    for line in _text(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            found += [(folder, _V2) for folder in _upwards(root, path)]
        elif "memory" in controllers.split(","):
            found += [(folder, _V1) for folder in _upwards(root / "memory", path)]
    # in a container the group's path may lie outside of what is mounted; its own files are then at the root
    return [*found, (root, _V2), (root / "memory", _V1)]


def _upwards(root: Path, path: str) -> list[Path]:
    own = root / path.lstrip("/")
    return [own, *(parent for parent in own.parents if parent.is_relative_to(root))]


def _room(folder: Path, names: tuple[str, str, str]) -> int | None:
    limit, used = _text(folder / names[0]).strip(), _text(folder / names[1]).strip()
    if not limit.isdigit() or int(limit) >= _NO_LIMIT or not used.isdigit():
        return None
    return max(0, int(limit) - int(used) + _statistic(folder / "memory.stat", names[2]))


def _statistic(path: Path, name: str) -> int:
    values = dict(line.split(" ", 1) for line in _text(path).splitlines() if " " in line)
    return int(values.get(name, 0))


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
