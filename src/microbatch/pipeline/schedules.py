"""Every schedule with a name: a function that makes it, and its row in `SCHEDULES`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial

import numpy as np

from microbatch.errors import InvalidSchedule
from microbatch.pipeline.both_ways import chimera, dualpipe, dualpipe_v
from microbatch.pipeline.placement import loop, stages_of
from microbatch.pipeline.schedule import BACKWARD, FORWARD, Integers, Schedule, encode, prove
from microbatch.pipeline.steady import Visits, group_sizes, in_groups, one_each
from microbatch.pipeline.v_shaped import hanayo, v_half, v_min, zb_v

Make = Callable[..., Schedule]
"""(ranks, micro-batches) → a schedule; with the chunks behind them where there is a choice."""


def gpipe(ranks: int, count: int) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2019)."""
    return _one_stage_each("gpipe", ranks, count, lambda _: count)


def one_f_one_b(ranks: int, count: int) -> Schedule:
    """One forward, one backward, as few in flight as the depth allows (Narayanan et al. 2021, 2.2.1)."""
    return _one_stage_each("one_f_one_b", ranks, count, lambda rank: ranks - 1 - rank)


def eager_one_f_one_b(ranks: int, count: int) -> Schedule:
    """1F1B with twice the forwards to warm up, so that messages travel while a rank computes."""
    return _one_stage_each("eager_one_f_one_b", ranks, count, lambda rank: 2 * (ranks - 1 - rank))


def zb_h1(ranks: int, count: int) -> Schedule:
    """1F1B with weight gradients put off by as many micro-batches as the rank is deep (Qi et al. 2023, ZB-H1)."""
    return _one_stage_each("zb_h1", ranks, count, lambda rank: ranks - 1 - rank, lambda rank: rank)


def zb_h2(ranks: int, count: int) -> Schedule:
    """ZB-H1 with twice the forwards to warm up and twice the delay: no rank waits within its step (ZB-H2)."""
    return _one_stage_each("zb_h2", ranks, count, lambda rank: 2 * (ranks - 1 - rank), lambda rank: 2 * rank)


def interleaved(ranks: int, count: int, chunks: int) -> Schedule:
    """1F1B over v stages on each rank, depth first in groups of p micro-batches (Narayanan et al. 2021, 2.2.2)."""
    return _depth_first("interleaved", ranks, count, chunks, hops=2)


def interleaved_zero_bubble(ranks: int, count: int, chunks: int) -> Schedule:
    """Interleaved 1F1B with half the forwards to warm up, and weight gradients put off (torch's ZB1P)."""
    return _depth_first("interleaved_zero_bubble", ranks, count, chunks, hops=1, delay=lambda rank: rank)


def looped_bfs(ranks: int, count: int, chunks: int) -> Schedule:
    """Breadth first: every micro-batch through one stage, then all through the next (Lamy-Poirier 2022)."""
    orders = []
    for rank in range(ranks):
        mine = stages_of(loop(ranks, chunks), rank)
        back = range(count - 1, -1, -1)
        forwards = [encode(FORWARD, stage, np.arange(count), count) for stage in mine]
        backwards = [encode(BACKWARD, stage, np.asarray(back), count) for stage in reversed(mine)]
        orders.append(np.concatenate(forwards + backwards))
    return prove("looped_bfs", count, (loop(ranks, chunks),), orders)


def forward_only(ranks: int, count: int, chunks: int) -> Schedule:
    """Forwards alone, for serving."""
    placement = loop(ranks, chunks)
    visits = [in_groups(stages_of(placement, rank), group_sizes(ranks, count)) for rank in range(ranks)]
    return prove("forward_only", count, (placement,), [encode(FORWARD, *visit, count) for visit in visits])


def _one_stage_each(
    name: str,
    ranks: int,
    count: int,
    warm_up: Callable[[int], int],
    delay: Callable[[int], int] = lambda _: -1,
) -> Schedule:
    """Rank r holds stage r; a delay below zero means full backwards."""
    orders = []
    for rank in range(ranks):
        visits = np.full(count, rank), np.arange(count)
        put_off = delay(rank)
        orders.append(one_each(visits, visits, warm_up(rank), count, delay=None if put_off < 0 else put_off))
    return prove(name, count, (loop(ranks),), orders)


def _depth_first(
    name: str, ranks: int, count: int, chunks: int, *, hops: int, delay: Callable[[int], int | None] = lambda _: None
) -> Schedule:
    """v stages per rank in groups; ``hops`` forwards more to warm up for each rank nearer to the front."""
    placement, sizes = loop(ranks, chunks), group_sizes(ranks, count)
    orders: list[Integers] = []
    for rank in range(ranks):
        mine = stages_of(placement, rank)
        forwards: Visits = in_groups(mine, sizes)
        backwards: Visits = in_groups(mine[::-1], sizes)
        warm_up = (chunks - 1) * sizes[0] + hops * (ranks - 1 - rank)
        orders.append(one_each(forwards, backwards, warm_up, count, delay=delay(rank)))
    return prove(name, count, (placement,), orders)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A schedule of the table.

    Attributes:
        make: the function.
        chunks: stages on each rank unless the user says otherwise.
        only: the chunks that it can have; empty for any number.
        even: it needs an even number of ranks.
        instead: the schedule that takes other numbers of chunks.
        torch: the class of torch.distributed.pipelining with the same schedule; empty for none.
        splits: input and weight gradients are done apart.
    """

    make: Make
    chunks: int = 1
    only: tuple[int, ...] = ()
    even: bool = False
    instead: str = "interleaved"
    torch: str = ""
    splits: bool = False


_single = partial(Row, chunks=1, only=(1,))
_double = partial(Row, chunks=2, only=(2,), splits=True)

SCHEDULES: dict[str, Row] = {
    "gpipe": _single(make=gpipe, torch="ScheduleGPipe", instead="looped_bfs"),
    "one_f_one_b": _single(make=one_f_one_b, torch="Schedule1F1B"),
    "eager_one_f_one_b": _single(make=eager_one_f_one_b),
    "interleaved": Row(make=interleaved, chunks=2, torch="ScheduleInterleaved1F1B"),
    "looped_bfs": Row(make=looped_bfs, chunks=2, torch="ScheduleLoopedBFS"),
    "zb_h1": _single(make=zb_h1, instead="interleaved_zero_bubble", splits=True),
    "zb_h2": _single(make=zb_h2, instead="interleaved_zero_bubble", splits=True),
    "zb_v": _double(make=zb_v, torch="ScheduleZBVZeroBubble"),
    "v_half": _double(make=v_half),
    "v_min": _double(make=v_min),
    "interleaved_zero_bubble": Row(
        make=interleaved_zero_bubble, chunks=2, torch="ScheduleInterleavedZeroBubble", splits=True
    ),
    "dualpipe": _single(make=dualpipe, even=True, instead="dualpipe_v", splits=True),
    "dualpipe_v": _double(make=dualpipe_v, torch="ScheduleDualPipeV"),
    "chimera": _single(make=chimera, even=True),
    "hanayo": Row(make=hanayo, chunks=2, only=(2, 4, 6, 8)),
    "forward_only": Row(make=forward_only, chunks=1),
}
"""Every named schedule. Tests, the command line and the recommendation read this table."""


def make_schedule(name: str, ranks: int, num_micro_batches: int, chunks: int | None = None) -> Schedule:
    """See `Schedule.of`."""
    row = SCHEDULES.get(name)
    if row is None:
        near = get_close_matches(name, SCHEDULES, n=3, cutoff=0.4)
        meant = f"Did you mean {' or '.join(near)}?" if near else f"There are {', '.join(SCHEDULES)}."
        raise InvalidSchedule(f"There is no schedule {name!r}.", meant)
    for word, size in (("ranks", ranks), ("num_micro_batches", num_micro_batches), ("chunks", chunks)):
        _check_size(word, size)
    wanted = row.chunks if chunks is None else chunks
    _check_chunks(name, row, wanted)
    if row.even and ranks % 2:
        raise InvalidSchedule(
            f"{name} runs in two directions and needs an even number of ranks, not {ranks}.",
            f"Nearest: {ranks - 1 or 2} or {ranks + 1} ranks." if ranks > 1 else "Nearest: 2 ranks.",
        )
    chosen = () if len(row.only) == 1 else (wanted,)
    return row.make(ranks, num_micro_batches, *chosen)


def _check_size(word: str, size: object) -> None:
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise InvalidSchedule(f"{word} must be a whole number of 1 or more, not {size!r}.", "Nearest: 1.")


def _check_chunks(name: str, row: Row, chunks: int) -> None:
    if not row.only or chunks in row.only:
        return
    nearest = min(row.only, key=lambda known: abs(known - chunks))
    others = f", or {row.instead} for {chunks}" if row.instead != name and chunks > 1 else ""
    raise InvalidSchedule(
        f"{name} has {' or '.join(map(str, row.only))} chunks on each rank, not {chunks}.",
        f"Nearest: {nearest}{others}.",
    )
