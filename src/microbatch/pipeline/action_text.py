"""Schedules as text, in torch's form: a CSV with one row per rank and ``2F0``, ``2I0``, ``2W0``, ``2B0`` in its cells.

A pair that runs as one is ``(0F5;7B2)OVERLAP_F_B``. Empty cells are pauses in torch's drawings and mean nothing here.
What torch adds when it lowers an order (sends, receives, gathers of weights) is left out when a file is read: it
follows from the order.
"""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

import numpy as np

from microbatch.errors import InvalidSchedule
from microbatch.pipeline.placement import Placement
from microbatch.pipeline.schedule import FORWARD, LETTERS, Action, Integers, Schedule, encode, joined, prove

_COMPUTE = re.compile(r"(\d{1,6})([FIWB])(\d{1,6})")
_LOWERED = re.compile(r"\d+(?:UNSHARD|RESHARD|REDUCE_GRAD|(?:SEND|RECV)_[FB]\d+)")
_PAIR = re.compile(r"\(([^;()]+);([^;()]+)\)OVERLAP_F_B")
LARGEST_FILE = 64 * 2**20
"""Bytes; a million actions take about 8 MB."""

FORM = "Write one row per rank with actions as in 0F0,0F1,0B0,0B1."


def schedule_csv(schedule: Schedule) -> str:
    """The text that `parse_schedule` and torch read."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    for rank in range(schedule.ranks):
        writer.writerow(_cells(schedule, schedule.of_rank(rank)))
    return stream.getvalue()


def _cells(schedule: Schedule, places: range) -> list[str]:
    cells: list[str] = []
    inside = False
    for index in places:
        text = str(schedule.action(index))
        if inside:
            cells[-1] = f"({cells[-1]};{text})OVERLAP_F_B"
        else:
            cells.append(text)
        inside = bool(schedule.is_joined[index])
    return cells


def read_schedule(path: str | Path) -> Schedule:
    """A schedule from a file.

    Raises:
        InvalidSchedule: not a readable file of that form, or an order that cannot run.
    """
    source = Path(path)
    if not source.is_file():
        raise InvalidSchedule(f"There is no file {source}.", FORM)
    if source.stat().st_size > LARGEST_FILE:
        raise InvalidSchedule(f"{source} has {source.stat().st_size} bytes, more than {LARGEST_FILE}.", FORM)
    try:
        text = source.read_text(encoding="utf-8-sig")
    except (UnicodeDecodeError, OSError) as error:
        raise InvalidSchedule(f"{source} cannot be read as text: {error}.", FORM) from None
    return parse_schedule(text, name=source.name)


def parse_schedule(text: str, name: str = "your order") -> Schedule:
    """A schedule from the text of a CSV; where stages lie follows from the rows in which they stand.

    Raises:
        InvalidSchedule: a cell that is no action, or an order that cannot run.
    """
    lines = [row for row in csv.reader(text.splitlines()) if not (row and row[0].lstrip().startswith("#"))]
    rows = [_read_row(row, rank, name) for rank, row in enumerate(lines)]
    actions = [action for row in rows for pair in row for action in pair]
    if not actions:
        raise InvalidSchedule(f"{name} holds no action.", FORM)
    count = 1 + max(action.micro_batch for action in actions)
    placements, directions = _find_places(rows, count, name)
    orders = tuple(_codes(row, count) for row in rows)
    return prove(name, count, placements, orders, directions, _two_copies(placements))


def _two_copies(placements: tuple[Placement, ...]) -> str:
    several = "A stage with copies on several ranks is only simulated: torch's runtime holds each stage once."
    return several if len(placements) > 1 else ""


def _read_row(cells: list[str], row: int, name: str) -> list[tuple[Action, ...]]:
    """The actions of one rank, pairs as pairs."""
    filled = [cell.strip() for cell in cells if cell.strip()]
    return [_read_cell(cell, row, name) for cell in filled if not _LOWERED.fullmatch(cell)]


def _read_cell(cell: str, row: int, name: str) -> tuple[Action, ...]:
    pair = _PAIR.fullmatch(cell)
    parts = [_COMPUTE.fullmatch(part.strip()) for part in (pair.groups() if pair else (cell,))]
    if not all(parts):
        raise InvalidSchedule(f"{name}, row of rank {row}: {cell!r} is not an action.", FORM)
    return tuple(Action(int(m[1]), LETTERS.index(m[2]), int(m[3])) for m in parts if m)


def _codes(row: list[tuple[Action, ...]], count: int) -> Integers:
    codes = []
    for pair in row:
        for action in pair:
            code = encode(action.kind, action.stage, action.micro_batch, count)
            codes.append(int(joined(code) if action is not pair[-1] else code))
    return np.asarray(codes, dtype=np.int64)


def _find_places(rows: list[list[tuple[Action, ...]]], count: int, name: str) -> tuple[tuple[Placement, ...], Integers]:
    """The rank of each stage by micro-batch; micro-batches that go the same way share a placement."""
    stages = 1 + max(action.stage for row in rows for pair in row for action in pair)
    table = np.full((count, stages), -1, dtype=np.int64)
    for rank, row in enumerate(rows):
        for action in (action for pair in row for action in pair if action.kind == FORWARD):
            table[action.micro_batch, action.stage] = rank
    missing = np.argwhere(table < 0)
    if len(missing):
        micro_batch, stage = missing[0]
        raise InvalidSchedule(
            f"{name}: {Action(int(stage), FORWARD, int(micro_batch))} is missing.",
            f"{stages} stages and {count} micro-batches need {stages * count} forwards.",
        )
    ways, directions = np.unique(table, axis=0, return_inverse=True)
    return tuple(tuple(int(rank) for rank in way) for way in ways), directions.reshape(-1).astype(np.int64)
