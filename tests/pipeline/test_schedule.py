"""The proof: nothing that cannot run passes, and what is wrong is named."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microbatch.errors import InvalidSchedule
from microbatch.pipeline.action_text import parse_schedule
from microbatch.pipeline.schedule import Schedule
from microbatch.pipeline.schedules import SCHEDULES

BROKEN = [
    ("0F0,0B0\n1F0\n", "1I0 of rank 1 is missing, and there is no 1B0 either"),
    ("0F0,0B0\n1B0\n", "1F0 is missing"),
    ("0F0,0F0,0B0\n1F0,1B0\n", "0F0 and 0F0 do the same work twice"),
    ("0F0,0I0,0B0,0W0\n1F0,1B0\n", "0I0 and 0B0 do the same work twice"),
    ("0F0,0I0\n1F0,1I0,1W0\n", "0W0 of rank 0 is missing"),
    ("0B0,0F0\n1F0,1B0\n", "rank 0 does 0B0 before 0F0"),
    ("0F0,0W0,0I0\n1F0,1B0\n", "rank 0 does 0W0 before 0I0"),
    ("0F0,0B0,1B0\n1F0\n", "1B0 stands on rank 0, and its stage lies on rank 1"),
    ("0F0,0X0\n", "row of rank 0: '0X0' is not an action"),
    ("\n", "holds no action"),
    ("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n",
     "rank 0 waits at 0B0 for 1B0 of rank 1; rank 1 waits at 1F1 for 0F1 of rank 0"),
    ("(0F0;0B1)OVERLAP_F_B,0F1,0B0\n1F0,1F1,1B0,1B1\n", "rank 0 does 0B1 before 0F1"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), BROKEN)
def test_a_broken_order_is_named(text: str, message: str) -> None:
    with pytest.raises(InvalidSchedule) as caught:
        parse_schedule(text)
    assert message in str(caught.value)
    assert caught.value.remedy


def test_a_pair_that_waits_for_its_second_part_is_seen() -> None:
    """As one action 0F1 and 0B0 wait for 1B0, which waits for 0F1; one behind the other they could run."""
    text = "0F0,{}\n1F0,1F1,1B0,1B1\n"
    parse_schedule(text.format("0F1,0B0,0B1"))
    with pytest.raises(InvalidSchedule, match="rank 0 waits at 0F1 for 1B0 of rank 1; rank 1 waits at 1F1 for 0F1"):
        parse_schedule(text.format("(0F1;0B0)OVERLAP_F_B,0B1"))


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "forward_only"])
def test_a_swapped_action_is_caught(name: str) -> None:
    """A forward and a backward of one stage and micro-batch change places, at every place of every rank."""
    schedule = Schedule.of(name, ranks=4, num_micro_batches=6)
    rows = [line.split(",") for line in schedule.to_csv().splitlines()]
    for rank, row in enumerate(rows):
        for place, cell in enumerate(row):
            if "F" in cell and not cell.startswith("("):
                backs = [i for i, other in enumerate(row) if other in (cell.replace("F", "B"), cell.replace("F", "I"))]
                for back in backs:
                    swapped = [list(other) for other in rows]
                    swapped[rank][place], swapped[rank][back] = swapped[rank][back], swapped[rank][place]
                    with pytest.raises(InvalidSchedule):
                        parse_schedule("\n".join(",".join(other) for other in swapped))


def can_run(rows: list[list[str]]) -> bool:
    """Whether an order of single actions runs, by trying: each rank does its next action when all it needs is done."""
    last = max(int(a.split("F")[0]) for row in rows for a in row if "F" in a)
    done: set[str] = set()
    at = [0] * len(rows)

    def ready(action: str) -> bool:
        kind = next(letter for letter in "FIWB" if letter in action)
        stage, micro_batch = (int(part) for part in action.split(kind))
        if kind == "F":
            return stage == 0 or f"{stage - 1}F{micro_batch}" in done
        if kind == "W":
            return f"{stage}I{micro_batch}" in done
        ahead = stage == last or bool({f"{stage + 1}I{micro_batch}", f"{stage + 1}B{micro_batch}"} & done)
        return ahead and f"{stage}F{micro_batch}" in done

    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while at[rank] < len(row) and ready(row[at[rank]]):
                done.add(row[at[rank]])
                at[rank] += 1
                moved = True
    return all(place == len(row) for place, row in zip(at, rows))


@given(
    name=st.sampled_from([name for name in SCHEDULES if name not in ("dualpipe", "dualpipe_v")]),
    ranks=st.sampled_from((2, 4)),
    count=st.integers(1, 6),
    seed=st.integers(0, 10**6),
)
def test_any_swap_passes_exactly_if_it_runs(name: str, ranks: int, count: int, seed: int) -> None:
    schedule = Schedule.of(name, ranks=ranks, num_micro_batches=count)
    rows = [line.split(",") for line in schedule.to_csv().splitlines()]
    rng = random.Random(seed)
    row = rng.choice(rows)
    one, two = rng.randrange(len(row)), rng.randrange(len(row))
    row[one], row[two] = row[two], row[one]
    text = "\n".join(",".join(cells) for cells in rows)
    if can_run(rows):
        parse_schedule(text)
    else:
        with pytest.raises(InvalidSchedule):
            parse_schedule(text)


def test_many_waiting_ranks_are_counted() -> None:
    rows = ["0F0,0B0,0F1,0B1", *(f"{s}F1,{s}F0,{s}B0,{s}B1" for s in range(1, 7))]
    with pytest.raises(InvalidSchedule, match="and 3 ranks more"):
        parse_schedule("\n".join(rows))


def test_pauses_comments_and_what_torch_adds_mean_nothing() -> None:
    plain = parse_schedule("0F0,0B0\n1F0,1B0\n")
    torchs = (
        "# stages 0 and 1\n0UNSHARD,0F0,0SEND_F0,,0RECV_B0,0B0,0REDUCE_GRAD\n,1RECV_F0,1F0, 1B0 ,1SEND_B0,1RESHARD\n"
    )
    assert parse_schedule(torchs) == plain
