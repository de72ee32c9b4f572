"""What a mixture-of-experts gate does to a batch: how many experts it wakes, and how busy the busiest is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from microbatch.errors import InvalidSettings

Floats = NDArray[np.float64]

_STEPS_PER_E_FOLD = 8
"""Quadrature points per factor e of time; the trapezoid rule on a smooth bell converges exponentially in it."""


def even_probabilities(experts: int, top_k: int) -> tuple[float, ...]:
    """Chance that a token picks each expert at all when every choice is as likely: top_k / experts."""
    _check(experts, top_k)
    return (top_k / experts,) * experts


def zipf_probabilities(experts: int, top_k: int, *, exponent: float = 1.0) -> tuple[float, ...]:
    """The same when expert r (from 1) is as popular as 1 / r^exponent and a token draws without replacement."""
    _check(experts, top_k)
    return inclusion_probabilities([rank**-exponent for rank in range(1, experts + 1)], top_k)


def inclusion_probabilities(popularity: Sequence[float], top_k: int) -> tuple[float, ...]:
    """Chance that each expert is among `top_k` drawn one after the other, without replacement, by popularity.

    Give expert e an exponential clock of rate w_e: the first `top_k` clocks that ring are such a draw, since the next
    to ring is expert e with chance w_e over the rates that are left. So

        p_e = ∫ w_e exp(−w_e t) · P(fewer than top_k of the other clocks rang before t) dt,

    and the number of others that rang is a sum of independent yes-or-no variables whose distribution follows by
    recursion. The integral is taken over log t.

    Raises:
        InvalidSettings: `top_k` is not between 1 and the number of experts with popularity above zero.
    """
    rates = np.asarray(popularity, dtype=np.float64)
    _check(int((rates > 0).sum()), top_k)
    result = np.zeros(len(rates))
    result[rates > 0] = _inclusion(rates[rates > 0], top_k)
    return tuple(result.tolist())


def _inclusion(rates: Floats, top_k: int) -> Floats:
    log_times = np.arange(np.log(1e-16 / rates.max()), np.log(50 / rates.min()), 1 / _STEPS_PER_E_FOLD)
    times = np.exp(log_times)
    rang = -np.expm1(-np.outer(rates, times))  # (experts, times): chance that a clock rang before t
    before, after = _rang_before(rang, top_k), _rang_before(rang[::-1], top_k)[::-1]
    # Fewer than top_k of the others: m among the experts before e, at most top_k − 1 − m among those after.
    fewer = np.einsum("etm,etm->et", before, np.cumsum(after, axis=2)[:, :, ::-1])
    density = rates[:, None] * times * np.exp(-np.outer(rates, times))
    probabilities: Floats = (density * fewer).sum(axis=1) / _STEPS_PER_E_FOLD
    return probabilities


def _rang_before(rang: Floats, top_k: int) -> Floats:
    """(experts, times, top_k): chance that exactly m of the experts before each one rang, for m below top_k."""
    counts = np.zeros((*rang.shape, top_k))
    counts[0, :, 0] = 1
    for expert in range(1, len(rang)):
        yes = rang[expert - 1][:, None]
        counts[expert] = counts[expert - 1] * (1 - yes)
        counts[expert, :, 1:] += counts[expert - 1, :, :-1] * yes
    return counts


def expected_distinct_experts(probabilities: Sequence[float], tokens: int) -> float:
    """Experts that at least one of `tokens` picks, on average: Σ_e 1 − (1 − p_e)^tokens.

    Their weights have to be read, so this over the number of experts is the share of the weights that moves.

    >>> expected_distinct_experts(even_probabilities(experts=8, top_k=2), tokens=3)
    4.625
    """
    return float(sum(1 - (1 - probability) ** tokens for probability in probabilities))


def expected_busiest(probabilities: Sequence[float], tokens: int) -> float:
    """Tokens of the most popular expert, on average: tokens · max p_e."""
    return tokens * max(probabilities)


def _check(experts: int, top_k: int) -> None:
    if not 1 <= top_k <= experts:
        raise InvalidSettings(
            f"A token cannot pick {top_k} of {experts} experts.", f"Use a top_k between 1 and {experts}."
        )
