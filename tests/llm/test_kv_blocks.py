"""Blocks of the cache: every one is accounted for, whatever happens in whatever order, and prefixes are never mixed."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from microbatch.errors import InvalidSettings
from microbatch.llm.kv_blocks import BlockPool, Found, OutOfBlocks

IDS = list(range(100))


def computed(pool: BlockPool, key: object, ids: list[int]) -> tuple[tuple[int, int], ...]:
    """Open, grow and commit a sequence in one go."""
    pool.open(key, ids)
    pairs = pool.grow(key, len(ids))
    pool.commit(key, ids)
    pool.check()
    return pairs


def test_what_was_computed_is_found_again_up_to_the_last_token() -> None:
    pool = BlockPool(10, 4)
    computed(pool, "a", IDS[:12])
    assert pool.match(IDS[:12]) == 8
    assert pool.match(IDS[:13]) == 12
    assert pool.look(IDS[:13]) == Found(12, 3)
    pool.close("a")
    assert pool.look(IDS[:13]) == Found(12, 0)
    assert pool.free_blocks == 10
    assert pool.open("b", IDS[:13]) == 12
    assert (pool.free_blocks, pool.queries, pool.hits) == (7, 12 + 13, 12)
    pool.check()


def test_a_block_is_found_only_behind_the_same_prefix_and_salt() -> None:
    pool = BlockPool(10, 4)
    computed(pool, "a", [1, 2, 3, 4, 5, 6, 7, 8])
    assert pool.match([9, 2, 3, 4, 5, 6, 7, 8, 0]) == 0
    assert pool.match([1, 2, 3, 4, 5, 6, 7, 9, 0]) == 4
    assert pool.match([1, 2, 3, 4, 5, 6, 7, 8, 0], salt="another") == 0


def test_a_reused_block_is_not_found_under_its_old_name() -> None:
    pool = BlockPool(2, 2)
    computed(pool, "a", [1, 2, 3, 4])
    pool.close("a")
    computed(pool, "b", [5, 6, 7, 8])
    assert pool.match([1, 2, 3, 4, 0]) == 0
    assert pool.match([1, 2, 7, 8, 0]) == 0


def test_equal_blocks_are_held_once() -> None:
    pool = BlockPool(10, 4)
    for key in "ab":
        pool.open(key, IDS[:9])
        pool.grow(key, 9)
    assert pool.free_blocks == 4
    pool.commit("a", IDS[:9])
    pool.commit("b", IDS[:9])
    pool.check()
    assert list(pool.table("a"))[:2] == list(pool.table("b"))[:2]
    assert pool.table("a")[2] != pool.table("b")[2]
    assert pool.free_blocks == 6


def test_the_least_recently_used_is_reused_first_and_of_a_sequence_the_end() -> None:
    pool = BlockPool(4, 2)
    computed(pool, "old", [1, 2, 3, 4])
    computed(pool, "new", [5, 6, 7, 8])
    pool.close("old")
    pool.close("new")
    computed(pool, "c", [9, 9])
    assert (pool.match([1, 2, 3, 4, 0]), pool.match([5, 6, 7, 8, 0])) == (2, 4)
    assert pool.open("again", [1, 2, 0]) == 2
    pool.close("again")
    pool.open("d", [0])
    pool.grow("d", 4)
    assert (pool.match([1, 2, 3, 4, 0]), pool.match([5, 6, 7, 8, 0])) == (2, 0)


def test_who_shares_a_block_copies_it_before_writing() -> None:
    pool = BlockPool(10, 4)
    computed(pool, "a", IDS[:6])
    for child in "bc":
        pool.fork("a", child)
    shared = pool.table("a")[1]
    assert [pool.needed(key, 7) for key in "abc"] == [1, 1, 1]
    assert pool.grow("b", 7) == ((shared, pool.table("b")[1]),)
    assert pool.grow("a", 7) == ((shared, pool.table("a")[1]),)
    assert (pool.copies("c"), pool.grow("c", 7)) == (0, ())
    assert pool.table("c")[1] == shared
    assert len({pool.table(key)[0] for key in "abc"}) == 1
    pool.check()


def test_a_full_shared_block_is_not_copied() -> None:
    pool = BlockPool(10, 4)
    computed(pool, "a", IDS[:8])
    pool.fork("a", "b")
    assert (pool.needed("b", 9), pool.grow("b", 9)) == (1, ())
    assert pool.frees("b") == 1


def test_too_few_blocks_change_nothing() -> None:
    pool = BlockPool(3, 4)
    computed(pool, "a", IDS[:6])
    pool.fork("a", "b")
    with pytest.raises(OutOfBlocks, match="2 blocks are needed and 1 are free"):
        pool.grow("b", 12)
    pool.check()
    assert (list(pool.table("b")), pool.free_blocks) == (list(pool.table("a")), 1)


def test_without_prefix_caching_and_for_what_must_be_computed_nothing_is_found() -> None:
    pool = BlockPool(10, 4, prefix_caching=False)
    computed(pool, "a", IDS[:9])
    assert (pool.match(IDS[:9]), pool.open("b", IDS[:9]), pool.queries) == (0, 0, 0)
    pool = BlockPool(10, 4)
    computed(pool, "a", IDS[:9])
    assert pool.open("b", IDS[:9], share=False) == 0


def test_after_the_weights_have_changed_nothing_is_found() -> None:
    pool = BlockPool(10, 4)
    computed(pool, "a", IDS[:9])
    computed(pool, "b", IDS[50:59])
    pool.close("b")
    pool.forget()
    pool.check()
    pool.commit("a", IDS[:9])
    pool.close("a")
    pool.check()
    assert (pool.match(IDS[:9]), pool.match(IDS[50:59]), pool.free_blocks) == (0, 0, 10)


@pytest.mark.parametrize(("blocks", "size"), [(0, 4), (4, 0)])
def test_an_empty_cache_is_refused(blocks: int, size: int) -> None:
    with pytest.raises(InvalidSettings, match="holds nothing"):
        BlockPool(blocks, size)


class Blocks(RuleBasedStateMachine):
    """Any calls in any order, beside a model of what each slot of the cache holds.

    A block's slots are written when they are computed and copied when the pool says so, as a runner does; then every
    sequence must read its own tokens, whoever shares its blocks.
    """

    @initialize(num_blocks=st.integers(3, 12), caching=st.booleans())
    def begin(self, num_blocks: int, caching: bool) -> None:
        self.pool = BlockPool(num_blocks, 3, prefix_caching=caching)
        self.slots: dict[tuple[int, int], tuple[int, ...]] = {}
        self.ids: dict[int, list[int]] = {}
        self.done: dict[int, int] = {}
        self.salts: dict[int, int] = {}
        self.next = 0

    def key_at(self, data: st.DataObject) -> int:
        return int(data.draw(st.sampled_from(sorted(self.ids))))

    @rule(ids=st.lists(st.integers(0, 1), min_size=1, max_size=14), salt=st.integers(0, 1), share=st.booleans())
    def open(self, ids: list[int], salt: int, share: bool) -> None:
        expected = self.pool.match(ids, salt) if share else 0
        found = self.pool.open(self.next, ids, salt=salt, share=share)
        assert found == expected
        assert found < len(ids)
        self.ids[self.next], self.done[self.next], self.salts[self.next] = ids, found, salt
        self.next += 1

    @precondition(lambda self: self.ids)
    @rule(data=st.data(), more=st.integers(1, 7), commit=st.booleans())
    def compute(self, data: st.DataObject, more: int, commit: bool) -> None:
        key = self.key_at(data)
        ids, start = self.ids[key], self.done[key]
        ids += [data.draw(st.integers(0, 1)) for _ in range(start + more - len(ids))]
        end = start + more
        needed, free = self.pool.needed(key, end), self.pool.free_blocks
        try:
            pairs = self.pool.grow(key, end)
        except OutOfBlocks:
            assert needed > free
            assert self.pool.free_blocks == free
            return
        assert self.pool.free_blocks == free - needed
        for source, target in pairs:
            for place in range(3):
                if (source, place) in self.slots:
                    self.slots[target, place] = self.slots[source, place]
        table = self.pool.table(key)
        for place in range(start, end):
            self.slots[table[place // 3], place % 3] = (self.salts[key], *ids[: place + 1])
        self.done[key] = end
        if commit:
            self.pool.commit(key, ids[:end])

    @precondition(lambda self: self.ids)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = self.key_at(data)
        self.pool.fork(parent, self.next)
        self.ids[self.next], self.done[self.next] = list(self.ids[parent]), self.done[parent]
        self.salts[self.next] = self.salts[parent]
        self.next += 1

    @precondition(lambda self: self.ids)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        key = self.key_at(data)
        frees, free = self.pool.frees(key), self.pool.free_blocks
        self.pool.close(key)
        assert self.pool.free_blocks == free + frees
        del self.ids[key], self.done[key], self.salts[key]

    @invariant()
    def everything_adds_up(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        for key, done in self.done.items():
            table = self.pool.table(key)
            for place in range(done):
                expected = (self.salts[key], *self.ids[key][: place + 1])
                assert self.slots[table[place // 3], place % 3] == expected

    def teardown(self) -> None:
        for key in list(self.ids):
            self.pool.close(key)
        assert not self.ids or self.pool.free_blocks == self.pool.num_blocks


TestBlocks = Blocks.TestCase
TestBlocks.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
