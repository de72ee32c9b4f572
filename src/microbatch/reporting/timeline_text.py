"""A timeline in a terminal: one lane per rank, letters for what is done, dots for waiting."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from microbatch.pipeline.schedule import LETTERS
from microbatch.pipeline.timeline import Timeline
from microbatch.reporting import timeline_wording as wording
from microbatch.units import format_number, format_percent

_COLUMNS = 96
"""Of a lane, beside its label."""
_FILL = "─═┄━"
"""What follows the letter and number of F, I, W and B, so that kinds differ without colour."""
_WAITING = "·"
_MOST_LANES = 64


def lines(timeline: Timeline) -> Iterable[str]:
    """The sentence, the figures, the lanes."""
    yield wording.headline(timeline)
    yield f"  {wording.subject(timeline)}"
    rows = wording.facts(timeline)
    width = max(len(label) for label, _, _ in rows)
    yield from (f"  {label.ljust(width)}  {value}  ({hint})" for label, value, hint in rows)
    yield ""
    yield from lanes(timeline)
    yield from (f"Note: {note}" for note in wording.notes(timeline))


def lanes(timeline: Timeline) -> Iterable[str]:
    """One lane per rank on one time axis, with its peak and its waiting; of very many the middle ones are left out."""
    ranks = timeline.schedule.ranks
    shown = (
        range(ranks) if ranks <= _MOST_LANES else [*range(_MOST_LANES // 2), *range(ranks - _MOST_LANES // 2, ranks)]
    )
    label = len(str(ranks - 1))
    roomy = _is_roomy(timeline)
    idle = timeline.idle_per_rank / timeline.makespan if timeline.makespan else timeline.idle_per_rank
    for rank in shown:
        lane = _written(timeline, rank) if roomy else _sampled(timeline, rank)
        peak = format_number(timeline.peak_activations[rank])
        yield f"  rank {rank:>{label}} {lane} holds {peak}, waits {format_percent(float(idle[rank]))}"
    if len(shown) < ranks:
        yield f"  ({ranks - len(shown)} ranks between them are not shown)"
    yield f"  {'':>{label + 5}} {_axis(timeline)}"
    kinds = sorted(set(timeline.schedule.kind.tolist()))
    names = ("forward", "input gradient", "weight gradient", "full backward")
    legend = "   ".join(f"{LETTERS[kind]} {names[kind]}" for kind in kinds)
    yield f"  {'':>{label + 5}} {legend}   {_WAITING} waiting" + ("; the number is the micro-batch" if roomy else "")


def _is_roomy(timeline: Timeline) -> bool:
    """Whether most actions are wide enough for their letter and number."""
    widths = (timeline.end - timeline.start) * _COLUMNS / (timeline.makespan or 1.0)
    return bool(np.median(widths) >= 1 + len(str(timeline.schedule.num_micro_batches - 1)))


def _columns(timeline: Timeline, rank: int) -> list[tuple[int, int, int]]:
    """(place in the row of actions, first column, column behind the last) of each action."""
    scale = _COLUMNS / (timeline.makespan or 1.0)
    places = timeline.schedule.of_rank(rank)
    starts = np.rint(timeline.start[places.start : places.stop] * scale).astype(int).tolist()
    ends = np.rint(timeline.end[places.start : places.stop] * scale).astype(int).tolist()
    return list(zip(places, starts, ends))


def _written(timeline: Timeline, rank: int) -> str:
    cells = [_WAITING] * _COLUMNS
    for place, start, end in _columns(timeline, rank):
        action = timeline.schedule.action(place)
        text = f"{LETTERS[action.kind]}{action.micro_batch}"
        cells[start:end] = text.ljust(end - start, _FILL[action.kind])[: end - start]
    return "".join(cells)


def _sampled(timeline: Timeline, rank: int) -> str:
    """Too many actions to write: what takes most of each column's time."""
    shares = np.zeros((len(LETTERS) + 1, _COLUMNS))
    step = (timeline.makespan or 1.0) / _COLUMNS
    edges = np.arange(_COLUMNS + 1) * step
    places = slice(timeline.schedule.of_rank(rank).start, timeline.schedule.of_rank(rank).stop)
    kinds, starts, ends = timeline.schedule.kind[places], timeline.start[places], timeline.end[places]
    for kind in range(len(LETTERS)):
        chosen = kinds == kind
        # Time spent in this kind before each edge, so that a column is a difference.
        done = np.interp(edges, *_cumulative(starts[chosen], ends[chosen]))
        shares[kind] = np.diff(done)
    shares[-1] = step - shares[:-1].sum(axis=0)
    return "".join((LETTERS + _WAITING)[kind] for kind in shares.argmax(axis=0))


def _cumulative(starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Times, and the seconds spent inside of the actions up to each."""
    if not len(starts):
        return np.zeros(1), np.zeros(1)
    times = np.stack((starts, ends), axis=1).ravel()
    spent = np.cumsum(np.stack((np.zeros(len(starts)), ends - starts), axis=1).ravel())
    return times, spent


def _axis(timeline: Timeline) -> str:
    end = wording.time(timeline, timeline.makespan)
    return f"0{end.rjust(_COLUMNS - 1)}"
