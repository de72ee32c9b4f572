"""Places of blocks: one for each, and what a block holds goes where the block goes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microbatch.llm.placement import Placement


def test_a_sequence_that_grows_beside_others_stays_together() -> None:
    placement = Placement(64)
    tables: list[list[int]] = [[], [], [], []]
    for block in range(40):  # handed out in turn, as growing sequences take them
        table = tables[block % 4]
        placement.begin(block, table[-1] if table else None, set())
        table.append(block)
    for table in tables:
        places = placement.places(table, len(table))
        assert places == list(range(places[0], places[0] + len(table)))


def test_a_full_cache_makes_room_behind_a_sequence() -> None:
    placement = Placement(4)
    for block in range(4):
        placement.begin(block, block - 1 if block else None, set())
    [second] = placement.places([1], 1)
    move = placement.begin(3, 0, busy={0})
    assert move is not None and move[0] == second
    assert placement.places([0, 3], 2) == [0, 1] and placement.places([1], 1) == [move[1]]


def test_a_block_in_use_stays_where_it_is() -> None:
    placement = Placement(4)
    for block in range(4):
        placement.begin(block, block - 1 if block else None, set())
    assert placement.begin(3, 0, busy={0, 1}) is None
    assert placement.places(range(4), 4) == [0, 1, 2, 3]


def test_a_block_that_was_never_written_is_not_read() -> None:
    with pytest.raises(KeyError, match="Block 2 is read and was never written"):
        Placement(4).places([2], 1)


@given(
    count=st.integers(1, 9),
    steps=st.lists(
        st.tuples(st.integers(0, 8), st.none() | st.integers(0, 8), st.sets(st.integers(0, 8))), max_size=60
    ),
)
def test_what_a_block_holds_goes_with_it(count: int, steps: list[tuple[int, int | None, set[int]]]) -> None:
    placement = Placement(count)
    stored: dict[int, int] = {}  # what lies at a place
    held: dict[int, int] = {}  # what a block should hold
    for number, (name, earlier, busy) in enumerate(steps):
        block = name % count
        before = None if earlier is None or earlier % count not in held or earlier % count == block else earlier % count
        move = placement.begin(block, before, busy)
        if move is not None:
            stored[move[1]] = stored[move[0]]
        [place] = placement.places([block], 1)
        stored[place] = held[block] = number
        places = placement.places(list(held), len(held))
        assert len(set(places)) == len(held) and all(0 <= place < count for place in places)
        assert [stored[place] for place in places] == list(held.values())
