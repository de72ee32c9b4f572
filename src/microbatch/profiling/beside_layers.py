"""The layer whose share of the time differs most between a prediction and a measurement. No torch."""

from __future__ import annotations

import re
from collections import defaultdict

from microbatch.curves.profile import Layer, Profile
from microbatch.units import format_number, format_percent

_DIGITS = re.compile(r"\d+")


def layer_finding(predicted: Profile, measured: Profile, least: float) -> str:
    """One sentence; empty where layers were not timed at a common size, or no share differs by `least`.

    A prediction keeps identical layers in one row, so names are compared with numbers left out where it does:
    ``layers.0.mlp.up``, ``layers.1.mlp.up``, ... are ``layers.*.mlp.up`` together.
    """
    common = sorted(set(predicted.layer_batch_sizes) & set(measured.layer_batch_sizes))
    together = any(layer.repeat > 1 for layer in predicted.layers)
    rows = []
    for size in common:
        here, there = (_shares(profile, size, together) for profile in (predicted, measured))
        rows += [(abs(here[name] - there[name]), size, name, here[name], there[name]) for name in here.keys() & there]
    if not rows:
        return ""
    difference, size, name, predicted_share, measured_share = max(rows)
    if difference < least:
        return f"Every layer's share of the time agrees within {format_percent(least)}."
    return (
        f"At {format_number(size)} {name} takes {format_percent(measured_share)} of the time measured and "
        f"{format_percent(predicted_share)} of the time predicted: no other layer's share differs as much."
    )


def _shares(profile: Profile, size: int, together: bool) -> dict[str, float]:
    """Share of the time of all layers, by name."""
    column = profile.layer_batch_sizes.index(size)
    seconds: defaultdict[str, float] = defaultdict(float)
    for layer in profile.layers:
        seconds[_name(layer, together)] += layer.seconds[column] if column < len(layer.seconds) else 0.0
    total = sum(seconds.values())
    return {name: taken / total for name, taken in seconds.items()} if total else {}


def _name(layer: Layer, together: bool) -> str:
    return _DIGITS.sub("*", layer.name) if together else layer.name
