"""Every named schedule at every size that makes sense: proved, written, read back; and what makes no sense is told."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from microbatch.errors import InvalidSchedule
from microbatch.pipeline.action_text import parse_schedule
from microbatch.pipeline.schedule import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Schedule
from microbatch.pipeline.schedules import SCHEDULES
from tests.pipeline.sizes import sizes_of


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_size_is_complete(name: str) -> None:
    """Counted here again, by sets: the schedule's own proof is not asked."""
    for schedule in sizes_of(name):
        actions = [schedule.action(index) for index in range(len(schedule))]
        assert len(set(actions)) == len(actions)
        pairs = {(s, m) for s in range(schedule.stages) for m in range(schedule.num_micro_batches)}
        by_kind = {kind: {(a.stage, a.micro_batch) for a in actions if a.kind == kind} for kind in range(4)}
        assert by_kind[FORWARD] == pairs
        if name != "forward_only":
            assert by_kind[INPUT_GRADIENT] == by_kind[WEIGHT_GRADIENT] == pairs - by_kind[BACKWARD]


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_text_reads_back(name: str, tmp_path: Path) -> None:
    for schedule in sizes_of(name, range(1, 5), (1, 4, 6)):
        again = parse_schedule(schedule.to_csv())
        assert again == schedule
        assert again.placements[: len(schedule.placements)] == schedule.placements or len(schedule.placements) > 1
    (tmp_path / "order.csv").write_text(schedule.to_csv())
    assert Schedule.from_csv(tmp_path / "order.csv") == schedule


@pytest.mark.parametrize("name", [name for name, row in SCHEDULES.items() if row.splits])
def test_what_splits_is_said(name: str) -> None:
    schedule = Schedule.of(name, ranks=4, num_micro_batches=8)
    assert (schedule.kind == WEIGHT_GRADIENT).any()


def test_placements() -> None:
    assert Schedule.of("interleaved", ranks=2, num_micro_batches=2, chunks=2).placement == (0, 1, 0, 1)
    assert Schedule.of("zb_v", ranks=3, num_micro_batches=3).placement == (0, 1, 2, 2, 1, 0)
    assert Schedule.of("chimera", ranks=2, num_micro_batches=4).placements == ((0, 1), (1, 0))
    shapes = {name: Schedule.of(name, ranks=4, num_micro_batches=8).shape for name in SCHEDULES}
    assert {name for name, shape in shapes.items() if shape == "v"} == {
        "zb_v",
        "v_half",
        "v_min",
        "dualpipe_v",
        "hanayo",
    }
    assert {name for name, shape in shapes.items() if shape == "both ways"} == {"dualpipe", "chimera"}


@pytest.mark.parametrize(
    ("arguments", "message", "remedy"),
    [
        (("one_f_oneb", 4, 8, None), "no schedule 'one_f_oneb'", "one_f_one_b"),
        (("one_f_one_b", 0, 8, None), "ranks must be a whole number of 1 or more, not 0", "1"),
        (("one_f_one_b", 4, 0, None), "num_micro_batches must be a whole number of 1 or more, not 0", "1"),
        (("one_f_one_b", 4, 8, 2), "one_f_one_b has 1 chunks on each rank, not 2", "interleaved for 2"),
        (("zb_v", 4, 8, 3), "zb_v has 2 chunks on each rank, not 3", "Nearest: 2, or interleaved for 3"),
        (("dualpipe", 5, 8, None), "even number of ranks, not 5", "4 or 6"),
        (("chimera", 1, 8, None), "even number of ranks, not 1", "2 ranks"),
        (("hanayo", 4, 8, 3), "hanayo has", "Nearest: 2"),
    ],
)
def test_what_makes_no_sense_names_the_nearest(
    arguments: tuple[str, int, int, int | None], message: str, remedy: str
) -> None:
    name, ranks, count, chunks = arguments
    with pytest.raises(InvalidSchedule, match=message) as caught:
        Schedule.of(name, ranks=ranks, num_micro_batches=count, chunks=chunks)
    assert remedy in caught.value.remedy


def test_one_rank_and_one_micro_batch() -> None:
    alone = Schedule.of("one_f_one_b", ranks=1, num_micro_batches=1)
    assert alone.to_csv() == "0F0,0B0\n"
    assert Schedule.of("zb_h1", ranks=1, num_micro_batches=1).to_csv() == "0F0,0I0,0W0\n"


def test_equality_is_of_actions() -> None:
    one = Schedule.of("one_f_one_b", ranks=2, num_micro_batches=4)
    assert one != Schedule.of("gpipe", ranks=2, num_micro_batches=4)
    assert one == parse_schedule(one.to_csv(), "another name")
    assert hash(one) == hash(parse_schedule(one.to_csv()))
    assert np.array_equal(one.orders[0], parse_schedule(one.to_csv()).orders[0])
