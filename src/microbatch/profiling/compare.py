"""Two profiles of one model, size by size: what became slower, what faster, and how sure that is. No torch.

Each size's time is its level (`microbatch.curves.levels`: the centre of the samples that are not slow outliers), each
ratio the quotient of two levels; its standard error comes from the spread of the samples, raised where a size and
its neighbours are noisier than the rest.

A *regression* needs a ratio of at least 1 + threshold and evidence that survives looking at many sizes. Either the
size stands out alone (Holm's step-down test over all sizes, S. Holm 1979, family-wise level 4 %), or all sizes
together moved by the threshold (their median ratio, level 1 %) and the size's own 90 % interval lies above 1. Two
runs of the same thing therefore show a regression in at most 5 % of comparisons; the same holds for improvements.

What no statistics on two runs can see is that the whole machine was slower during one of them: the intervals hold
the noise within the runs, and `common` says how much all sizes moved together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import msgspec
import numpy as np

from microbatch.curves.codec import load_profile
from microbatch.curves.levels import MEDIAN_PAIR_DISTANCE, Floats, Levels, find_levels
from microbatch.curves.profile import Profile
from microbatch.errors import InvalidProfile, InvalidSettings
from microbatch.units import format_percent

FEWEST_SAMPLES = 3
"""With two samples one outlier in each profile would decide."""
LASTING = 1.2
"""A shared machine's speed lasts over several samples, so these tell less than independent ones would. Without it a
size against itself is called different in 8 of 100 real tries, with it in 1 (benchmarks/against_itself.py)."""
_ALONE_LEVEL, _TOGETHER_LEVEL = 0.04, 0.01
_NORMAL = NormalDist()
_Z90 = _NORMAL.inv_cdf(0.95)
"""Half width of a 90 % interval in standard errors."""
_SAMPLES_FOR_SPREAD = 20
"""Neighbouring sizes tell the noise at a size together with it: as many as hold about this many samples."""
_MEDIAN_PENALTY = math.sqrt(math.pi / 2)
"""Standard error of a median over that of a mean."""

_MUST_AGREE = ("unit", "mode", "dtype", "structure")
_SHOULD_AGREE = ("source", "model")
_ENVIRONMENT_SHOULD_AGREE = ("device", "threads", "versions", "settings")


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """Time of one batch size in the second profile over the first, with its 90 % interval (None: too few samples)."""

    batch_size: int
    ratio: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Shift:
    """Median ratio over all sizes, with its 90 % interval (None: too few samples)."""

    ratio: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What changed between two profiles.

    Attributes:
        regressions: sizes that became slower by the threshold or more, beyond chance.
        improvements: sizes that became faster by as much.
        sizes: every size that both profiles hold.
        only_in_first, only_in_second: sizes that were left out.
        threshold: least change that counts, as a share.
        common: how much all sizes moved together.
        noise: spread of one sample around its size's time, as a share; None with one sample per size.
        detectable: change of one size alone that is found in half of the cases, as a share (median over the sizes);
            None with too few samples.
        warnings: what makes the comparison weaker than it looks.
    """

    regressions: tuple[Change, ...]
    improvements: tuple[Change, ...]
    sizes: tuple[Change, ...]
    only_in_first: tuple[int, ...]
    only_in_second: tuple[int, ...]
    threshold: float
    common: Shift
    noise: float | None
    detectable: float | None
    warnings: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists and numbers."""
        own: dict[str, Any] = msgspec.to_builtins(self)
        return {"schema_version": 1} | own


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pairs:
    """Common sizes in ascending order: log ratio, its standard error (nan: too few samples), spread of one sample."""

    sizes: tuple[int, ...]
    log_ratio: Floats
    error: Floats
    noise: float | None


def compare(first: Profile | str | Path, second: Profile | str | Path, *, threshold: float = 0.05) -> Comparison:
    """What became slower or faster from the first profile to the second.

    Args:
        first, second: profiles or paths to saved ones; only sizes that both hold are compared.
        threshold: least change that counts, as a share: 0.05 is 5 % slower or 1/1.05 of the time.

    Raises:
        InvalidProfile: no size in common, or profiles of different things (unit, mode, dtype or structure differ).
        InvalidSettings: a threshold outside [0, 1).
    """
    if not 0 <= threshold < 1:
        raise InvalidSettings(f"The threshold must lie between 0 and 1, not {threshold}.", "Write 0.05 for 5 %.")
    a, b = (_load(one) for one in (first, second))
    _refuse_unlike(a, b)
    pairs = _pair(a, b)
    changes = tuple(_change(*row) for row in zip(pairs.sizes, pairs.log_ratio, pairs.error))
    least = math.log1p(threshold)
    slower, faster = (_found(pairs, sign * pairs.log_ratio, least) for sign in (1, -1))
    detectable = _detectable(pairs)
    return Comparison(
        regressions=tuple(change for change, found in zip(changes, slower) if found),
        improvements=tuple(change for change, found in zip(changes, faster) if found),
        sizes=changes,
        only_in_first=tuple(sorted(set(a.batch_sizes) - set(pairs.sizes))),
        only_in_second=tuple(sorted(set(b.batch_sizes) - set(pairs.sizes))),
        threshold=threshold,
        common=_common(pairs),
        noise=pairs.noise,
        detectable=detectable,
        warnings=(*_differences(a, b), *_weaknesses(pairs, detectable, threshold)),
    )


def _load(profile: Profile | str | Path) -> Profile:
    return profile if isinstance(profile, Profile) else load_profile(profile)


def _refuse_unlike(a: Profile, b: Profile) -> None:
    """An empty field is unknown (a CSV) and agrees with anything."""
    for name in _MUST_AGREE:
        mine, other = getattr(a, name), getattr(b, name)
        if mine and other and mine != other:
            raise InvalidProfile(
                f"The profiles differ in {name}: {mine!r} and {other!r}.",
                "Compare two profiles of the same model, measured in the same way.",
            )


def _pair(a: Profile, b: Profile) -> _Pairs:
    common = sorted(set(a.batch_sizes) & set(b.batch_sizes))
    if not common:
        raise InvalidProfile(
            f"The profiles have no batch size in common: {_listed(a.batch_sizes)} and {_listed(b.batch_sizes)}.",
            "Measure both over the same sizes.",
        )
    levels = [find_levels(sorted(one.points, key=lambda point: point.batch_size)) for one in (a, b)]
    rows = [np.searchsorted(one.batch_sizes, common) for one in levels]
    log_ratio = levels[1].log_seconds[rows[1]] - levels[0].log_seconds[rows[0]]
    errors = [_standard_error(one)[row] for one, row in zip(levels, rows)]
    sigmas = [one.sigma for one in levels if one.sigma is not None]
    return _Pairs(
        sizes=tuple(common),
        log_ratio=log_ratio,
        error=np.hypot(*errors),
        noise=math.expm1(max(sigmas)) if sigmas else None,
    )


def _listed(sizes: tuple[int, ...]) -> str:
    return ", ".join(map(str, sizes[:6])) + (", ..." if len(sizes) > 6 else "")


def _standard_error(levels: Levels) -> Floats:
    """The level's own, raised where the samples of a size and its neighbours scatter more than all samples do."""
    if levels.sigma is None:
        return np.full(len(levels.samples), np.nan)
    error = np.full(len(levels.samples), np.nan)
    for index, samples in enumerate(levels.samples):
        if len(samples) >= FEWEST_SAMPLES:
            raised = max(1.0, _spread_around(levels.samples, index) / levels.sigma)
            error[index] = levels.standard_error[index] * raised * LASTING
    return error


def _spread_around(samples: tuple[Floats, ...], index: int) -> float:
    """Spread of one sample from the distances of all pairs within each of the nearest sizes."""
    reach = max(1, round((_SAMPLES_FOR_SPREAD / len(samples[index]) - 1) / 2))
    near = samples[max(0, index - reach) : index + reach + 1]
    distances = [np.abs(x[:, None] - x[None, :])[np.triu_indices(len(x), 1)] for x in near]
    return float(np.median(np.concatenate(distances))) / MEDIAN_PAIR_DISTANCE


def _change(size: int, log_ratio: float, error: float) -> Change:
    return Change(batch_size=size, ratio=math.exp(log_ratio), **_interval(log_ratio, error))


def _interval(log_ratio: float, error: float) -> dict[str, float]:
    if math.isnan(error):
        return {}
    return {"low": math.exp(log_ratio - _Z90 * error), "high": math.exp(log_ratio + _Z90 * error)}


def _found(pairs: _Pairs, rise: Floats, least: float) -> list[bool]:
    """Whether each size rose by `least` (in log units) beyond chance; see the top of the file."""
    alone = _holm([1 - _NORMAL.cdf(z) for z in _z(rise, pairs.error)], _ALONE_LEVEL)
    middle, error = _median_rise(rise, pairs.error)
    together = middle >= least and 1 - _NORMAL.cdf(_one(middle, error)) <= _TOGETHER_LEVEL
    own = [z > _Z90 for z in _z(rise, pairs.error)]
    return [bool(r >= least and (h or (together and o))) for r, h, o in zip(rise, alone, own)]


def _z(rise: Floats, error: Floats) -> list[float]:
    return [_one(r, e) for r, e in zip(rise, error)]


def _one(rise: float, error: float) -> float:
    """Rise in standard errors; 0, no evidence, where the error is unknown."""
    return 0.0 if math.isnan(error) else float(rise) / max(float(error), 1e-12)


def _holm(p_values: list[float], level: float) -> list[bool]:
    """Which hypotheses fall: the i-th smallest p of n is held against level/(n − i), until the first that stands."""
    rejected = [False] * len(p_values)
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        if p_values[index] > level / (len(p_values) - rank):
            break
        rejected[index] = True
    return rejected


def _median_rise(rise: Floats, error: Floats) -> tuple[float, float]:
    """Median over the sizes and its standard error; unknown below three sizes, where it is no more than one of them."""
    known = error[~np.isnan(error)]
    spread = float(np.median(known)) / math.sqrt(len(known)) * _MEDIAN_PENALTY if len(known) >= 3 else math.nan
    return float(np.median(rise)), spread


def _common(pairs: _Pairs) -> Shift:
    middle, error = _median_rise(pairs.log_ratio, pairs.error)
    return Shift(ratio=math.exp(middle), **_interval(middle, error))


def _detectable(pairs: _Pairs) -> float | None:
    known = pairs.error[~np.isnan(pairs.error)]
    if not len(known):
        return None
    return math.expm1(_NORMAL.inv_cdf(1 - _ALONE_LEVEL / len(pairs.sizes)) * float(np.median(known)))


def _differences(a: Profile, b: Profile) -> list[str]:
    pairs = [(name, getattr(a, name), getattr(b, name)) for name in _SHOULD_AGREE]
    for name in _ENVIRONMENT_SHOULD_AGREE:
        mine, other = getattr(a.environment, name), getattr(b.environment, name)
        if isinstance(mine, dict):
            pairs += [(f"{name} of {key}", mine.get(key), other.get(key)) for key in sorted({*mine, *other})]
        else:
            pairs.append((name, mine, other))
    return [f"The profiles differ in {name}: {x} and {y}." for name, x, y in pairs if x and y and x != y]


def _weaknesses(pairs: _Pairs, detectable: float | None, threshold: float) -> list[str]:
    few = int(np.isnan(pairs.error).sum())
    found = []
    if few:
        found.append(
            f"{few} of {len(pairs.sizes)} sizes have fewer than {FEWEST_SAMPLES} samples in one of the profiles: "
            "their ratios have no interval, and no change is claimed for them."
        )
    if detectable is not None and detectable > max(threshold, 0.01):
        found.append(
            f"Too noisy for small changes: one size alone must change by {format_percent(detectable)} to be found "
            "in half of the cases."
        )
    return found
