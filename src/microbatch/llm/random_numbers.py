"""Random numbers that are functions of a seed and a position, not of what was drawn before or beside.

Philox4x32-10 (Salmon and others, "Parallel random numbers: as easy as 1, 2, 3", 2011): a counter of 128 bits and a key
of 64 give 128 bits that pass every test of TestU01. The position in the output is the counter and the seed is the key,
so a token drawn alone, in any batch, or again after a preemption meets the same number. Loads no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_ROUNDS = 10
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_TOKENS, _ANSWERS = 0, 1
"""What the numbers are for, in the counter's upper half: two uses of a seed never meet."""

Words = npt.NDArray[np.uint64]


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """One number from 0 to below 1 for each pair of seed and position.

    They have 52 bits, so that ``u × total`` stays below ``total`` after rounding.

    >>> uniforms([7, 7], [0, 1]).tolist() == [*uniforms([7], [0]).tolist(), *uniforms([7], [1]).tolist()]
    True
    """
    first, second, _, _ = _philox(_words(positions), _TOKENS, _words(seeds))
    return ((first << _HALF | second) >> np.uint64(12)).astype(np.float64) * 2.0**-52


def answer_seed(seed: int, index: int) -> int:
    """The seed of one of several answers to a prompt; the first has the request's own.

    >>> answer_seed(7, 0)
    7
    """
    if index == 0:
        return seed
    first, second, _, _ = _philox(_words([index]), _ANSWERS, _words([seed]))
    return int((first << _HALF | second)[0])


def _words(numbers: Sequence[int]) -> Words:
    """The lower 64 bits of each; negative ones as two's complement."""
    return np.array([number & 0xFFFFFFFFFFFFFFFF for number in numbers], dtype=np.uint64)


def _philox(counter: Words, upper: int, key: Words) -> tuple[Words, Words, Words, Words]:
    """The four 32-bit words of each counter, whose upper half is `upper` for all."""
    zero = np.zeros_like(counter)
    words = (counter & _LOW, counter >> _HALF, zero + np.uint64(upper), zero)
    return philox4x32(words, (key & _LOW, key >> _HALF))


def philox4x32(words: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, Words, Words, Words]:
    """Ten rounds on arrays of 32-bit words, each held in 64 bits."""
    a, b, c, d = words
    low, high = key
    for _ in range(_ROUNDS):
        left, right = _MULTIPLIERS[0] * a, _MULTIPLIERS[1] * c
        a, b, c, d = right >> _HALF ^ b ^ low, right & _LOW, left >> _HALF ^ d ^ high, left & _LOW
        low, high = low + _WEYL[0] & _LOW, high + _WEYL[1] & _LOW
    return a, b, c, d
