"""Which tokens of which sequences the next step computes: one pure function of what is known. No torch, no clock.

1. Everyone who generates gets one token, so that no newcomer makes a running stream wait. Where blocks are short, the
   cheapest to compute again gives its blocks back; the first in order of service never does, and so always proceeds.
2. Prompts share what the budget leaves: the first in order a part, the others the shortest first. So a short prompt
   does not wait for a long one, and a long one does not starve.
3. Who waits begins when all its tokens fit beside what the others still need. One that does not fit, or is longer, is
   passed by a bounded number of times; then nobody else begins before it.

Why each sequence ends: the first of those that run proceeds in every step, hence they end, one by one; a sequence that
gave its blocks back begins again only where there is twice as much room to spare as the time before, in the end only
alone, so that the number of preemptions is bounded; and the door closes for one that was passed by too often.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace, nsmallest

from microbatch.errors import RequestTooLarge
from microbatch.llm.budget import GROWTH_SHARE, Budget
from microbatch.llm.kv_blocks import blocks_for
from microbatch.llm.step_model import StepModel, pairs_of

HEAD_START = 20.0
"""One step of priority goes before everything of lower priority that came less than so many seconds earlier."""
PARTS = 4
"""The first prompt in order gets at least one part in so many of what is left to prompts."""
PIECES = 8
"""At most about so many prompts share a step: pieces that are too small cost more than they bring."""
MOST_SKIPS = 16
"""So often others may begin before one that does not fit, or is longer; then it goes first."""
REFINED = 3
"""A step's time is brought within the budget in at most so many rounds."""


@dataclass(frozen=True, slots=True)
class SequenceView:
    """One sequence as the scheduler sees it.

    Attributes:
        key: names it.
        known: tokens of prompt and answer so far.
        computed: of them, in the cache; 0 while it waits.
        cached: while it waits, tokens that the prefix cache would give.
        arrived: seconds; a sequence that gave its blocks back keeps its place.
        priority: larger goes first, see `HEAD_START`.
        tenant: whose it is; tenants that wait share alike.
        skipped: how often others began before it because it did not fit, or was longer.
        preempted: how often it gave its blocks back.
        blocks: that it holds; 0 means those of its computed tokens.
        copies: blocks to be copied before it writes, see `BlockPool.copies`.
        frees: blocks that come free when it ends, see `BlockPool.frees`; None means all that it holds.
        held: while it waits, blocks of its cached part that others use now, see `BlockPool.look`.
        answers: sequences that it becomes once its prompt has been computed.
    """

    key: Hashable
    known: int
    computed: int = 0
    cached: int = 0
    arrived: float = 0.0
    priority: int = 0
    tenant: str = ""
    skipped: int = 0
    preempted: int = 0
    blocks: int = 0
    copies: int = 0
    frees: int | None = None
    held: int = 0
    answers: int = 1


@dataclass(frozen=True, slots=True)
class SchedulerView:
    """All that decides.

    Attributes:
        running: sequences that hold blocks.
        waiting: those that hold none.
        free_blocks: that nobody holds.
        block_size: tokens of a block.
        num_blocks: all there are.
        budget: what a step may hold.
        model: seconds of a step; None while unknown.
        now: seconds.
        served: tokens that each tenant has had, see `microbatch.llm.fairness`; empty where all are one.
    """

    running: tuple[SequenceView, ...]
    waiting: tuple[SequenceView, ...]
    free_blocks: int
    block_size: int
    num_blocks: int
    budget: Budget
    model: StepModel | None = None
    now: float = 0.0
    served: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Share:
    """The next `tokens` of one sequence. It samples after the step when none of those it knows are left."""

    key: Hashable
    tokens: int


@dataclass(frozen=True, slots=True)
class Step:
    """What to compute.

    Attributes:
        shares: generation first.
        preempted: give their blocks back before; their tokens are computed again later.
        skipped: others began before these, which did not fit or were longer.
        reason: why it is this step, in words.
    """

    shares: tuple[Share, ...]
    preempted: tuple[Hashable, ...] = ()
    skipped: tuple[Hashable, ...] = ()
    reason: str = ""


def order_of(sequence: SequenceView) -> float:
    """Place in the order of service, smaller first. It never changes: who waits is overtaken by fewer and fewer."""
    return sequence.arrived - HEAD_START * sequence.priority


def admissible(prompt_tokens: int, max_tokens: int, num_blocks: int, block_size: int, context: int) -> None:
    """Whether a request can ever be served, whatever else runs.

    Args:
        prompt_tokens: of its prompt.
        max_tokens: most tokens of its answer; the last is never put into the cache.
        num_blocks, block_size: of the whole cache.
        context: most tokens the model takes.

    Raises:
        RequestTooLarge: with what it needs and what there is.
    """
    tokens = prompt_tokens + max_tokens
    if tokens > context:
        raise RequestTooLarge(
            f"{prompt_tokens} tokens of prompt and {max_tokens} of answer are {tokens}, and the model's context has "
            f"{context}.",
            f"Ask for at most {context - prompt_tokens} tokens." if prompt_tokens < context else "Shorten the prompt.",
        )
    needed = blocks_for(tokens - 1, block_size)
    if needed > num_blocks:
        raise RequestTooLarge(
            f"{prompt_tokens} tokens of prompt and {max_tokens} of answer need {needed} blocks of {block_size} tokens, "
            f"and {num_blocks} are available in the whole cache.",
            f"Ask for {num_blocks * block_size + 1} tokens in all at most, or give the cache more memory.",
        )


def schedule(view: SchedulerView) -> Step:
    """The next step; see the top of the file."""
    running, preempted, free = _with_room(view)
    decodes = [each for each in running if each.known - each.computed == 1]
    prefills = [each for each in running if each.known - each.computed > 1]
    entrance = Entrance() if preempted or not view.waiting else _entrance(view, running, prefills, free)
    chunks = _chunks(view, decodes, [*prefills, *entrance.newcomers], free)
    passed = entrance.passed({share.key for share in chunks})
    shares = (*[Share(each.key, 1) for each in decodes], *chunks)
    return Step(shares, preempted, passed, _reason(view, decodes, chunks, preempted, entrance.closed))


# -- blocks for those that run


def _with_room(view: SchedulerView) -> tuple[list[SequenceView], tuple[Hashable, ...], int]:
    """Those that run on, in order of service; who gives its blocks back; and the blocks left for more than one token.

    Everyone who generates needs room for one token, and so does the first in order, whatever it does.
    """
    running = sorted(view.running, key=order_of)
    size = view.block_size
    needs = [_needs(each, size) if each.known - each.computed == 1 else 0 for each in running]
    if running and needs[0] == 0:
        needs[0] = _needs(running[0], size)
    free = view.free_blocks - sum(needs)
    preempted: list[Hashable] = []
    while free < 0 and len(running) > 1:
        place = _victim(running, -free, size)
        victim = running.pop(place)
        free += needs.pop(place) + _frees(victim, size)
        preempted.append(victim.key)
        if len(running) == 1:  # whatever they shared is free now
            free = view.num_blocks - _blocks(running[0], size) - needs[0]
    if running and running[0].known - running[0].computed > 1:
        free += needs[0]  # it is the first to be given its share of the blocks
    return running, tuple(preempted), free


def _victim(running: Sequence[SequenceView], missing: int, size: int) -> int:
    """The cheapest to compute again that frees enough, or else the cheapest for what it frees; never the first."""
    costs = [(_cost(each, size), _frees(each, size), -place) for place, each in enumerate(running)][1:]
    enough = [(cost, place) for cost, frees, place in costs if frees >= missing]
    return -(min(enough) if enough else min([(cost / max(frees, 0.5), place) for cost, frees, place in costs]))[1]


def _cost(sequence: SequenceView, size: int) -> int:
    """Tokens to compute again: not what others keep in the cache. Having given way before counts double each time."""
    return max(1, min(sequence.computed, _frees(sequence, size) * size)) << min(sequence.preempted, 30)


def _needs(sequence: SequenceView, size: int) -> int:
    """Blocks for one token more."""
    return -(-(sequence.computed + 1) // size) - _blocks(sequence, size) + sequence.copies


def _blocks(sequence: SequenceView, size: int) -> int:
    return sequence.blocks or -(-sequence.computed // size)


def _frees(sequence: SequenceView, size: int) -> int:
    return _blocks(sequence, size) if sequence.frees is None else sequence.frees


# -- who begins


@dataclass(frozen=True, slots=True)
class Entrance:
    """Who may begin.

    Attributes:
        newcomers: those that fit.
        looked_at: all that were looked at, in turn.
        closed: why nobody else may begin; empty where anyone could.
    """

    newcomers: tuple[SequenceView, ...] = ()
    looked_at: tuple[Hashable, ...] = ()
    closed: str = ""

    def passed(self, begun: set[Hashable]) -> tuple[Hashable, ...]:
        """Those before which somebody else has begun."""
        last = max([place for place, key in enumerate(self.looked_at) if key in begun], default=0)
        return tuple([key for key in self.looked_at[:last] if key not in begun])


def _entrance(
    view: SchedulerView, running: Sequence[SequenceView], prefills: Sequence[SequenceView], free: int
) -> Entrance:
    """Who waits and fits: all its tokens, beside what prompts under way still need and some blocks to grow into."""
    size, slots = view.block_size, view.budget.max_sequences - sum([each.answers for each in running])
    room = free - sum([-(-each.known // size) - _blocks(each, size) for each in prefills])
    if slots <= 0 or (room <= 0 and running):
        return Entrance(closed="as many sequences as allowed run" if slots <= 0 else "no blocks are free")
    pace = _Pace(view, running)
    newcomers, looked_at, closed = list[SequenceView](), list[Hashable](), ""
    for each in _in_turn(view, slots + MOST_SKIPS):
        looked_at.append(each.key)
        needed = -(-each.known // size) - each.held
        beside = len(running) + len(newcomers)
        if needed + _reserve(each, beside, view.num_blocks) > room:
            closed = f"one that waits needs {needed} blocks, and {max(0, room)} are free"
            if each.skipped >= MOST_SKIPS:
                break
        elif beside and each.answers > slots:
            closed = "as many sequences as allowed run"
            break
        elif beside and not pace.allows(each):
            closed = "one more would make each step too long"
            break
        else:
            newcomers.append(each)
            room -= needed
            slots -= each.answers
            if slots <= 0:
                break
    return Entrance(tuple(newcomers), tuple(looked_at), closed)


def _reserve(sequence: SequenceView, beside: int, num_blocks: int) -> int:
    """Blocks left to grow into when it begins: one for each that runs, twice as many each time it had to give way."""
    return min(beside << min(sequence.preempted, 30), num_blocks) if beside else 0


def _in_turn(view: SchedulerView, most: int) -> list[SequenceView]:
    """The first of those that wait: who had begun before; then the tenants by what they had; in order of service."""
    if not view.served:
        return nsmallest(most, view.waiting, key=_turn)
    return _by_tenant(view, most)


def _turn(sequence: SequenceView) -> tuple[bool, float]:
    return (not sequence.preempted, order_of(sequence))


def _by_tenant(view: SchedulerView, most: int) -> list[SequenceView]:
    """Each place goes to the tenant that has been served least, what it was given by places before included."""
    lines: dict[str, list[SequenceView]] = {}
    back = [each for each in view.waiting if each.preempted]
    for each in view.waiting:
        if not each.preempted:
            lines.setdefault(each.tenant, []).append(each)
    heads = []
    for tenant, line in lines.items():
        line.sort(key=order_of, reverse=True)
        heads.append((view.served.get(tenant, 0.0), order_of(line[-1]), tenant))
    heapify(heads)
    found = sorted(back, key=order_of)[:most]
    while heads and len(found) < most:
        served, _, tenant = heads[0]
        each = lines[tenant].pop()
        found.append(each)
        if lines[tenant]:
            heapreplace(heads, (served + each.known, order_of(lines[tenant][-1]), tenant))
        else:
            heappop(heads)
    return found


class _Pace:
    """Whether generation by all that run, with one more and one more, still leaves time within a step."""

    def __init__(self, view: SchedulerView, running: Sequence[SequenceView]) -> None:
        self._model, seconds = view.model, view.budget.seconds
        self._allowed = GROWTH_SHARE * seconds if seconds is not None else None
        self._count = sum([each.answers for each in running])
        self._known = sum([each.known * each.answers for each in running])

    def allows(self, sequence: SequenceView) -> bool:
        """Whether it may begin too; if so it is counted."""
        if self._model is None or self._allowed is None:
            return True
        count, known = self._count + sequence.answers, self._known + sequence.known * sequence.answers
        if self._model.seconds(count, known, count) > self._allowed:
            return False
        self._count, self._known = count, known
        return True


# -- prompts


def _chunks(
    view: SchedulerView, decodes: Sequence[SequenceView], prompts: Sequence[SequenceView], free: int
) -> list[Share]:
    """Shares of the prompts in what the budget leaves: the largest that keep the step within its time."""
    if not prompts:
        return []
    most = view.budget.max_tokens - len(decodes)
    least = max(1, min(view.block_size, most))
    left = max(least, most)
    model, seconds = view.model, view.budget.seconds
    if model is None or seconds is None:
        return _split(view, prompts, left, free)
    cached = sum([each.computed for each in decodes])
    depth = _begun(prompts[0])
    within = model.tokens_within(seconds, cached + depth, len(decodes) + 1, depth) - len(decodes)
    chunks = _split(view, prompts, left := max(least, min(left, within)), free)
    alone = model.seconds(len(decodes), cached, len(decodes))
    for _ in range(REFINED):
        took = _seconds(model, decodes, cached, prompts, chunks)
        if took <= seconds or left == least:
            break
        left = max(least, int(left * max(0.0, seconds - alone) / (took - alone)))
        chunks = _split(view, prompts, left, free)
    return chunks


def _seconds(
    model: StepModel, decodes: Sequence[SequenceView], cached: int, prompts: Sequence[SequenceView], chunks: list[Share]
) -> float:
    begun = {each.key: _begun(each) for each in prompts}
    return model.seconds(
        len(decodes) + sum([share.tokens for share in chunks]),
        cached + sum([begun[share.key] for share in chunks]),
        len(decodes) + len(chunks),
        sum([pairs_of(share.tokens, begun[share.key]) for share in chunks]),
    )


def _split(view: SchedulerView, prompts: Sequence[SequenceView], left: int, free: int) -> list[Share]:
    """`left` tokens among prompts: the first gets its part and what is left over, the others the shortest first.

    Each of the others may take a third of what is still left, so that a short one is done at once and several long
    ones proceed together.
    """
    first, others = prompts[0], prompts[1:]
    if len(others) > 1:
        served = view.served
        others = sorted(
            others,
            key=lambda each: (each.skipped < MOST_SKIPS, served.get(each.tenant, 0.0), each.known - _begun(each)),
        )
    room = _Room(view.block_size, left, free)
    piece = max(view.block_size, left // PIECES)
    room.give(first, max(left // min(len(prompts), PARTS), piece))
    for count, each in zip(range(len(others), 0, -1), others):
        if room.tokens == 0:
            break
        room.give(each, max(room.tokens // min(count, PARTS - 1), piece))
    room.give(first, room.tokens)
    return [Share(key, tokens) for key, tokens in room.given.items() if tokens]


class _Room:
    """Tokens and blocks that are left, and who was given how many tokens."""

    def __init__(self, size: int, tokens: int, blocks: int) -> None:
        self._size, self.tokens, self._blocks = size, tokens, blocks
        self.given: dict[Hashable, int] = {}

    def give(self, sequence: SequenceView, most: int) -> None:
        """So many tokens more at most, by what it lacks and by what is left."""
        size, given = self._size, self.given.get(sequence.key, 0)
        base = _begun(sequence) + given
        has = -(-base // size) if given else _holds(sequence, size)
        slots = (has + self._blocks) * size - base
        tokens = min(most, sequence.known - base, self.tokens, slots)
        if tokens > 0:
            self._blocks -= max(0, -(-(base + tokens) // size) - has)
            self.tokens -= tokens
            self.given[sequence.key] = given + tokens


def _begun(sequence: SequenceView) -> int:
    """Tokens that need not be computed."""
    return sequence.computed or sequence.cached


def _holds(sequence: SequenceView, size: int) -> int:
    """Blocks that count for it already, less what it has to copy."""
    return _blocks(sequence, size) - sequence.copies if sequence.computed else sequence.held


# -- in words


def _reason(
    view: SchedulerView,
    decodes: Sequence[SequenceView],
    chunks: Sequence[Share],
    preempted: Sequence[Hashable],
    closed: str,
) -> str:
    parts = [f"{len(decodes)} generate"] if decodes else []
    if chunks:
        parts.append(f"{sum([share.tokens for share in chunks])} tokens of {len(chunks)} prompts")
    if preempted:
        parts.append(f"{len(preempted)} gave way, for {view.free_blocks} blocks were free")
    if closed:
        parts.append(f"{len(view.waiting)} wait: {closed}")
    return "; ".join(parts) or "nothing to compute"
