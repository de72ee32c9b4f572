"""How a step's batch becomes pieces: by number of items, or by length under a budget of tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from microbatch.batch.lengths import Lengths, columns_of, is_list, trimmed
from microbatch.batch.pieces import Pieces
from microbatch.batch.size_limit import Ladder
from microbatch.batch.split import take
from microbatch.batch.token_budget import TokenBudget, filled, longest_first, padded_tokens, piece_sizes
from microbatch.sizes import BatchSizes
from microbatch.training.result import Attempt

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cutting:
    """A batch and how it is cut at a size, which counts items or, under a budget, tokens.

    Attributes:
        batch: the items in the order in which they run.
        sizes: the pieces at a size.
        ladder: the sizes that are left after one that ran out of memory.
        wanted: the size asked for; None where that is found elsewhere.
        lengths: of the items in their order, as they count; None where items count.
        real: tokens of all items without padding.
        padded: whether items are padded to the longest of their piece.
    """

    batch: Any
    sizes: Callable[[int], BatchSizes]
    ladder: Ladder
    wanted: int | None = None
    lengths: Sequence[int] | None = None
    real: int = 0
    padded: bool = True

    def tokens(self, sizes: BatchSizes) -> tuple[int | None, int | None]:
        """Tokens of the batch, and those that run, padding included; None where items count."""
        if self.lengths is None:
            return None, None
        return self.real, padded_tokens(self.lengths, sizes.pieces) if self.padded else self.real

    def named(self, attempts: Sequence[Attempt]) -> tuple[Attempt, ...]:
        """Tries at sizes of this cutting; under a budget with the most items that a piece had."""
        if self.lengths is None:
            return tuple(attempts)
        most = {a.micro_batch_size: self.sizes(a.micro_batch_size).micro_batch_size for a in attempts}
        return tuple(
            replace(a, micro_batch_size=most[a.micro_batch_size], token_budget=a.micro_batch_size) for a in attempts
        )


def by_size(batch: Any, batch_size: int) -> Cutting:
    """In the batch's order, so many items per piece."""
    return Cutting(batch=batch, sizes=lambda size: _equal(batch_size, size), ladder=Ladder.of_items(max(batch_size, 1)))


def as_given(batch: Pieces, sizes: Sequence[int]) -> Cutting:
    """Cut already, into pieces of these sizes; where one runs out of memory there is nothing smaller."""
    largest = max(sizes)
    ladder = Ladder(largest, lambda _: None, lambda _: f"pieces as they were given, of up to {largest} items")
    return Cutting(batch=batch, sizes=lambda _: BatchSizes.of(uneven=sizes), ladder=ladder, wanted=largest)


def by_length(batch: Any, found: Lengths, budget: TokenBudget, *, trims: bool, list_of_samples: bool | None) -> Cutting:
    """Longest items first, each piece within the budget, with the least padding.

    Sequences that lie end to end have no padding and stay in their order, and so do items whose padding must stay:
    each then counts as long as the batch is wide.

    Args:
        found: lengths of the batch's items.
        trims: whether pieces lose the padding that all of their items have.
    """
    wide = 0 if trims or not found.padded or is_list(batch, list_of_samples) else columns_of(batch, budget.length)[0]
    every = [max(wide, length) for length in found.values]
    order = longest_first(every) if found.padded else list(range(len(every)))
    lengths = [every[place] for place in order]
    longest = max(lengths)
    if longest > budget.tokens:
        logger.warning(
            "Item %d has %d tokens, more than the budget of %d: it is a piece of its own.",
            every.index(longest), longest, budget.tokens,
        )  # fmt: skip

    def sizes(tokens: int) -> BatchSizes:
        cut = piece_sizes(lengths, tokens, budget.cost_at(tokens)) if found.padded else filled(lengths, tokens)
        return BatchSizes.of(uneven=cut)

    return Cutting(
        batch=take(batch, order, list_of_samples=list_of_samples),
        sizes=sizes,
        ladder=_ladder(max(1, len(every) * longest if found.padded else sum(lengths)), longest),
        wanted=budget.tokens,
        lengths=lengths,
        real=sum(found.values),
        padded=found.padded,
    )


def trim(piece: Any, budget: TokenBudget | None, *, list_of_samples: bool | None) -> Any:
    """The piece without the padding that all of its items have; as it is without a budget."""
    return piece if budget is None or is_list(piece, list_of_samples) else trimmed(piece, budget.length)


def _ladder(whole: int, longest: int) -> Ladder:
    """Budgets by halves, down to the longest item alone."""

    def following(tokens: int) -> int | None:
        return max(longest, tokens // 2) if tokens > longest else None

    def said(tokens: int) -> str:
        return f"a budget of {tokens} tokens" if tokens > longest else f"the longest item alone, {longest} tokens"

    return Ladder(whole, following, said)


def _equal(batch_size: int, micro_batch_size: int) -> BatchSizes:
    if not batch_size:  # a rank without data
        return BatchSizes(0, micro_batch_size, 0)
    return BatchSizes.of(global_batch_size=batch_size, micro_batch_size=micro_batch_size)
