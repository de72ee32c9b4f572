"""Who holds which block of the key-value cache: exact accounting, prefixes found again, copies before a shared write.

A sequence has a table of blocks, each with slots for `block_size` tokens. Blocks are shared by counting references. A
block whose tokens have all been computed can be found again by what it holds: the key is the name of the block before
it and its own token ids, so that a find compares every id of the whole prefix and nothing can be mixed up (the chain of
vLLM's prefix cache, with exact names in place of hashes). Equal blocks are held once: whoever computes one that exists
changes over to it. A free block keeps what it holds until it is needed; the least recently used goes first, and of
one sequence its last block, since what stands behind a block is only found through it. No torch, no clock.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Sequence
from itertools import count
from typing import NamedTuple

from microbatch.errors import InvalidSettings

Root = tuple[Hashable]
"""What stands before the first block of a prefix: the salt, in a tuple so that it is no name."""


class OutOfBlocks(Exception):
    """Fewer blocks are free than were asked for; nothing was taken."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"{needed} blocks are needed and {free} are free")
        self.needed, self.free = needed, free


class Found(NamedTuple):
    """What the cache holds of a prefix.

    Attributes:
        tokens: that need not be computed.
        held: blocks of them that somebody uses now, so that they take nothing from the free ones.
    """

    tokens: int
    held: int


class _Content(NamedTuple):
    """What a block holds, and what it is called: no name is given twice."""

    parent: int | Root
    ids: tuple[int, ...]
    name: int


class _Table:
    """The blocks of one sequence: `tokens` slots, and of the first `full` blocks it is known what they hold."""

    __slots__ = ("blocks", "full", "root", "tokens")

    def __init__(self, blocks: list[int], tokens: int, full: int, root: Root | None) -> None:
        self.blocks, self.tokens, self.full, self.root = blocks, tokens, full, root


class BlockPool:
    """The blocks of one cache and the tables of all sequences.

    Attributes:
        num_blocks: all there are.
        block_size: tokens that a block holds.
        queries: tokens that were looked for in the prefix cache.
        hits: those of them that were found.
    """

    def __init__(self, num_blocks: int, block_size: int = 16, *, prefix_caching: bool = True) -> None:
        """
        Args:
            num_blocks: all there are.
            block_size: tokens that a block holds.
            prefix_caching: whether blocks can be found again.

        Raises:
            InvalidSettings: a number below 1.
        """
        if num_blocks < 1 or block_size < 1:
            raise InvalidSettings(
                f"A cache of {num_blocks} blocks of {block_size} tokens holds nothing.", "Give both at least 1."
            )
        self.num_blocks, self.block_size, self._prefix_caching = num_blocks, block_size, prefix_caching
        self.queries = self.hits = 0
        self._references = [0] * num_blocks
        self._content: list[_Content | None] = [None] * num_blocks
        self._empty = list(range(num_blocks - 1, -1, -1))
        self._kept: OrderedDict[int, None] = OrderedDict()  # free, and can be found; the least recently used first
        self._index: dict[tuple[int | Root, tuple[int, ...]], int] = {}
        self._tables: dict[Hashable, _Table] = {}
        self._names = count()

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody holds, those that can be found again included."""
        return len(self._empty) + len(self._kept)

    @property
    def usage(self) -> float:
        """Share of the blocks that somebody holds."""
        return 1 - self.free_blocks / self.num_blocks

    def open(self, key: Hashable, token_ids: Sequence[int], *, salt: Hashable = None, share: bool = True) -> int:
        """Begin the table of a new sequence with what the cache holds of its prefix.

        Args:
            key: of the sequence.
            token_ids: all it knows; the last one is always left to compute.
            salt: only sequences of the same salt share blocks.
            share: False where every token has to be computed.

        Returns:
            Tokens that are computed already: full blocks.
        """
        self._must_be_new(key)
        root = (salt,) if self._prefix_caching else None
        blocks = self._find(token_ids, root) if share and root is not None else []
        for block in blocks:
            self._hold(block)
        tokens = len(blocks) * self.block_size
        self._tables[key] = _Table(blocks, tokens, len(blocks), root)
        if share and root is not None:
            self.queries += len(token_ids)
            self.hits += tokens
        return tokens

    def match(self, token_ids: Sequence[int], salt: Hashable = None) -> int:
        """Tokens that `open` would find; nothing is taken."""
        return self.look(token_ids, salt).tokens

    def look(self, token_ids: Sequence[int], salt: Hashable = None) -> Found:
        """As `match`, with how many of the blocks are in use."""
        blocks = self._find(token_ids, (salt,)) if self._prefix_caching else []
        return Found(len(blocks) * self.block_size, sum([self._references[block] > 0 for block in blocks]))

    def copies(self, key: Hashable) -> int:
        """Blocks, 0 or 1, that `grow` must copy before the sequence can write its next token."""
        table = self._tables[key]
        return int(table.tokens % self.block_size > 0 and self._references[table.blocks[-1]] > 1)

    def needed(self, key: Hashable, num_tokens: int) -> int:
        """Blocks that `grow` would take: new ones, and copies of what is shared."""
        table = self._tables[key]
        if num_tokens <= table.tokens:
            return 0
        return -(-num_tokens // self.block_size) - len(table.blocks) + self.copies(key)

    def frees(self, key: Hashable) -> int:
        """Blocks that would come free if the sequence were closed: those that nobody else holds."""
        references = self._references
        return sum([references[block] == 1 for block in self._tables[key].blocks])

    def grow(self, key: Hashable, num_tokens: int) -> tuple[tuple[int, int], ...]:
        """Give a sequence slots for so many tokens in all, and write nowhere that others read.

        Returns:
            Blocks to copy before anything is written: (from, to).

        Raises:
            OutOfBlocks: too few are free; nothing has changed.
        """
        table = self._tables[key]
        if num_tokens <= table.tokens:
            return ()
        if num_tokens <= len(table.blocks) * self.block_size and self._references[table.blocks[-1]] == 1:
            table.tokens = num_tokens  # most steps of most sequences
            return ()
        needed = self.needed(key, num_tokens)
        if needed > self.free_blocks:
            raise OutOfBlocks(needed, self.free_blocks)
        pairs = self._own_last(table) if self.copies(key) else ()
        table.blocks += [self._take() for _ in range(needed - len(pairs))]
        table.tokens = num_tokens
        return pairs

    def table(self, key: Hashable) -> Sequence[int]:
        """The blocks of a sequence, in the order of its tokens. Changes as the sequence grows and is committed."""
        return self._tables[key].blocks

    def commit(self, key: Hashable, token_ids: Sequence[int]) -> None:
        """These first tokens of a sequence have been computed: blocks that are full can be found from now on."""
        table = self._tables[key]
        if table.root is None:
            return
        size = self.block_size
        for place in range(table.full, min(len(token_ids), table.tokens) // size):
            self._settle(table, place, tuple(token_ids[place * size : (place + 1) * size]))

    def fork(self, parent: Hashable, child: Hashable) -> None:
        """Begin a table that shares every block of another, the last one too; all slots of the other are written."""
        self._must_be_new(child)
        table = self._tables[parent]
        for block in table.blocks:
            self._references[block] += 1
        self._tables[child] = _Table(list(table.blocks), table.tokens, table.full, table.root)

    def close(self, key: Hashable) -> None:
        """A sequence ends: what nobody else holds is free, and can be found until it is needed."""
        for block in reversed(self._tables.pop(key).blocks):
            self._release(block)

    def forget(self) -> None:
        """Nothing computed so far will be found again: the weights have changed."""
        for block in self._index.values():
            self._content[block] = None
        self._index.clear()
        self._empty += self._kept
        self._kept.clear()
        for table in self._tables.values():
            table.full, table.root = 0, None

    def check(self) -> None:
        """Assert all that must hold between any two calls; for tests."""
        held = Counter(block for table in self._tables.values() for block in table.blocks)
        assert self._references == [held[block] for block in range(self.num_blocks)]
        assert sorted([*held, *self._empty, *self._kept]) == list(range(self.num_blocks))
        named = {block: content for block, content in enumerate(self._content) if content is not None}
        assert self._index == {(content.parent, content.ids): block for block, content in named.items()}
        assert len({content.name for content in named.values()}) == len(named)
        assert set(self._kept) <= set(named)
        assert not set(self._empty) & set(named)
        assert set(named) <= held.keys() | set(self._kept)
        for table in self._tables.values():
            self._check_table(table)

    def _check_table(self, table: _Table) -> None:
        assert len(table.blocks) == -(-table.tokens // self.block_size)
        assert len(set(table.blocks)) == len(table.blocks)
        assert table.full * self.block_size <= table.tokens
        parent: int | Root | None = table.root
        for block in table.blocks[: table.full]:
            content = self._content[block]
            assert content is not None and content.parent == parent
            parent = content.name

    # -- one block

    def _must_be_new(self, key: Hashable) -> None:
        if key in self._tables:
            raise ValueError(f"{key!r} has a table already")

    def _find(self, token_ids: Sequence[int], root: Root) -> list[int]:
        parent: int | Root = root
        blocks, size = list[int](), self.block_size
        for start in range(0, (len(token_ids) - 1) // size * size, size):
            block = self._index.get((parent, tuple(token_ids[start : start + size])))
            if block is None:
                break
            blocks.append(block)
            parent = self._name_of(block)
        return blocks

    def _name_of(self, block: int) -> int:
        content = self._content[block]
        assert content is not None
        return content.name

    def _settle(self, table: _Table, place: int, ids: tuple[int, ...]) -> None:
        """A block has become full: it can be found, or the sequence changes over to an equal one."""
        assert table.root is not None
        block = table.blocks[place]
        parent = self._name_of(table.blocks[place - 1]) if place else table.root
        equal = self._index.get((parent, ids))
        if equal is None:
            self._unname(block)
            self._index[parent, ids] = block
            self._content[block] = _Content(parent, ids, next(self._names))
        elif equal != block:
            self._hold(equal)
            table.blocks[place] = equal
            self._release(block)
        table.full = place + 1

    def _unname(self, block: int) -> None:
        """It cannot be found any more."""
        content = self._content[block]
        if content is not None:
            del self._index[content.parent, content.ids]
            self._content[block] = None

    def _own_last(self, table: _Table) -> tuple[tuple[int, int]]:
        shared, own = table.blocks[-1], self._take()
        self._references[shared] -= 1
        table.blocks[-1] = own
        return ((shared, own),)

    def _hold(self, block: int) -> None:
        if self._references[block] == 0:
            del self._kept[block]
        self._references[block] += 1

    def _take(self) -> int:
        if self._empty:
            block = self._empty.pop()
        else:
            block, _ = self._kept.popitem(last=False)
            self._unname(block)
        self._references[block] = 1
        return block

    def _release(self, block: int) -> None:
        self._references[block] -= 1
        if self._references[block]:
            return
        if self._content[block] is None:
            self._empty.append(block)
        else:
            self._kept[block] = None


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that so many tokens take."""
    return -(-tokens // block_size)
