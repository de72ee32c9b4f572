"""Which rank holds which stage. A placement is one rank per stage, in the order of the model."""

from __future__ import annotations

Placement = tuple[int, ...]


def loop(ranks: int, chunks: int = 1) -> Placement:
    """Round and round: stage s on rank s mod p (Narayanan et al. 2021, interleaved)."""
    return tuple(stage % ranks for stage in range(ranks * chunks))


def zigzag(ranks: int, chunks: int = 2) -> Placement:
    """There and back again, so that stages at a turn share a rank: a V for two chunks, waves for more (Hanayo)."""
    there = tuple(range(ranks))
    return tuple(rank for chunk in range(chunks) for rank in (there if chunk % 2 == 0 else there[::-1]))


def both_ways(ranks: int) -> tuple[Placement, Placement]:
    """Two copies of every stage, one per direction (Chimera, DualPipe): parameters are held twice."""
    return loop(ranks), tuple(reversed(range(ranks)))


def stages_of(placement: Placement, rank: int) -> tuple[int, ...]:
    """The stages that a rank holds, in the order of the model."""
    return tuple(stage for stage, holder in enumerate(placement) if holder == rank)


def shape_of(placement: Placement) -> str:
    """``loop``, ``v`` (any zigzag) or ``own``."""
    ranks = max(placement) + 1
    chunks, rest = divmod(len(placement), ranks)
    if rest == 0 and placement == loop(ranks, chunks):
        return "loop"
    return "v" if rest == 0 and placement == zigzag(ranks, chunks) else "own"
