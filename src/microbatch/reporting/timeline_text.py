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
    """One lane per rank on one time axis, with its peak and its waiting; of very many the middle ones are left out.

    Where another timeline is shown beside it, its lanes stand under those of the first, on the same axis.
    """
    ranks = timeline.schedule.ranks
    shown = (
        range(ranks) if ranks <= _MOST_LANES else [*range(_MOST_LANES // 2), *range(ranks - _MOST_LANES // 2, ranks)]
    )
    span = max(one.makespan for one in timeline.shown)
    width = max(len(_label(one, timeline, ranks - 1)) for one in timeline.shown)
    roomy = _is_roomy(timeline, span)
    for rank in shown:
        for one in timeline.shown:
            yield f"  {_label(one, timeline, rank):<{width}} {_lane(one, rank, span, roomy)}"
    if len(shown) < ranks:
        yield f"  ({ranks - len(shown)} ranks between them are not shown)"
    yield f"  {'':>{width}} {_axis(timeline, span)}"
    kinds = sorted(set(timeline.schedule.kind.tolist()))
    names = ("forward", "input gradient", "weight gradient", "full backward")
    legend = "   ".join(f"{LETTERS[kind]} {names[kind]}" for kind in kinds)
    yield f"  {'':>{width}} {legend}   {_WAITING} waiting" + ("; the number is the micro-batch" if roomy else "")


def _label(one: Timeline, timeline: Timeline, rank: int) -> str:
    """``rank 3``, with the source where two share the axis."""
    name = f"rank {rank:>{len(str(timeline.schedule.ranks - 1))}}"
    return name if timeline.beside is None else f"{name} {one.source}"


def _lane(one: Timeline, rank: int, span: float, roomy: bool) -> str:
    """The actions, what is held at most, and the share of the makespan that is waiting."""
    idle = float(one.idle_per_rank[rank]) / one.makespan if one.makespan else 0.0
    drawn = _written(one, rank, span) if roomy else _sampled(one, rank, span)
    return f"{drawn} holds {format_number(one.peak_activations[rank])}, waits {format_percent(idle)}"


def _is_roomy(timeline: Timeline, span: float) -> bool:
    """Whether most actions are wide enough for their letter and number."""
    widths = (timeline.end - timeline.start) * _COLUMNS / (span or 1.0)
    return bool(np.median(widths) >= 1 + len(str(timeline.schedule.num_micro_batches - 1)))


def _columns(timeline: Timeline, rank: int, span: float) -> list[tuple[int, int, int]]:
    """(place in the row of actions, first column, column behind the last) of each action."""
    scale = _COLUMNS / (span or 1.0)
    places = timeline.schedule.of_rank(rank)
    starts = np.rint(timeline.start[places.start : places.stop] * scale).astype(int).tolist()
    ends = np.rint(timeline.end[places.start : places.stop] * scale).astype(int).tolist()
    return list(zip(places, starts, ends))


def _written(timeline: Timeline, rank: int, span: float) -> str:
    cells = [_WAITING] * _COLUMNS
    for place, start, end in _columns(timeline, rank, span):
        action = timeline.schedule.action(place)
        text = f"{LETTERS[action.kind]}{action.micro_batch}"
        cells[start:end] = text.ljust(end - start, _FILL[action.kind])[: end - start]
    return "".join(cells)


def _sampled(timeline: Timeline, rank: int, span: float) -> str:
    """Too many actions to write: what takes most of each column's time."""
    shares = np.zeros((len(LETTERS) + 1, _COLUMNS))
    step = (span or 1.0) / _COLUMNS
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


def _axis(timeline: Timeline, span: float) -> str:
    end = wording.time(timeline, span)
    return f"0{end.rjust(_COLUMNS - 1)}"
