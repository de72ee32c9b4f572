"""A slow simulator that shares nothing with the library: it reads the CSV text and relaxes until nothing moves."""

from __future__ import annotations

import re
from collections.abc import Callable

Seconds = Callable[[str, int, int], float]
"""(kind, stage, micro-batch) → seconds."""


def actions_of(text: str) -> list[list[list[tuple[int, str, int]]]]:
    """Ranks of groups of (stage, kind, micro-batch); a group is one action, or a pair that runs as one."""
    ranks = []
    for line in text.splitlines():
        cells = [re.findall(r"(\d+)([FIWB])(\d+)", cell.split(")")[0]) for cell in line.split(",") if cell]
        ranks.append([[(int(s), k, int(m)) for s, k, m in cell] for cell in cells])
    return ranks


def slow_ends(  # noqa: C901 (one loop, kept together to be read beside the rules)
    text: str, seconds: Seconds, message: Callable[[int], float], own: float = 0.0, overlap: bool = True
) -> dict[tuple[int, str, int], float]:
    """When each action ends. `message` is the travel time over the link behind a stage, `own` what it costs a rank."""
    ranks = actions_of(text)
    home = {(s, k, m): rank for rank, groups in enumerate(ranks) for group in groups for s, k, m in group}
    last = max(s for s, _, _ in home)
    ends = dict.fromkeys(home, 0.0)
    leaves = dict(ends)

    def source(action: tuple[int, str, int]) -> tuple[int, str, int] | None:
        stage, kind, micro_batch = action
        if kind == "F":
            return (stage - 1, "F", micro_batch) if stage else None
        if kind == "W" or stage == last:
            return None
        return next((stage + 1, k, micro_batch) for k in "IB" if (stage + 1, k, micro_batch) in home)

    def link(action: tuple[int, str, int]) -> int:
        return action[0] - 1 if action[1] == "F" else action[0]

    readers = {source(action): action for action in home if source(action) is not None}

    def sends(action: tuple[int, str, int]) -> float:
        reader = readers.get(action)
        if reader is None or home[reader] == home[action]:
            return 0.0
        return own + (0.0 if overlap else message(link(reader)))

    moved = True
    while moved:
        moved = False
        for rank, groups in enumerate(ranks):
            free = 0.0
            for group in groups:
                time = free
                for action in group:
                    needed = source(action)
                    if needed is not None:
                        crosses = home[needed] != rank
                        time = max(time, leaves[needed] + (own + message(link(action)) if crosses else 0.0))
                for action in group:
                    needed = source(action)
                    time += own if needed is not None and home[needed] != rank else 0.0
                for action in group:
                    stage, kind, micro_batch = action
                    time += seconds(kind, stage, micro_batch)
                    moved |= ends[action] != time
                    ends[action] = time
                for action in group:
                    moved |= leaves[action] != time
                    leaves[action] = time
                free = time + sum(sends(action) for action in group)
    return ends
