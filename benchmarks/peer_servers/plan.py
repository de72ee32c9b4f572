"""What is measured in which order, and which settings are kept; plain data, nothing runs here."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.peer_servers.loads import CLOSED, OPEN, LoadKind
from benchmarks.peer_servers.table import Peer, Setting

Row = dict[str, Any]
SCOUTED = 2
"""Settings of each server that tell the capacity before open loops can be chosen: the first ones of its table."""
NEAR = 1.05
"""A setting whose p50 or p99 in the short tuning is so close to the best is as good as it."""


@dataclass(frozen=True)
class Visit:
    """One start of a server and what is asked of it.

    Attributes:
        phase: ``tuning`` or ``round``.
        number: of the round.
        model: that it serves.
        peer, setting: the server.
        loads: that it is put under, in order.
    """

    phase: str
    number: int
    model: str
    peer: Peer
    setting: Setting
    loads: tuple[LoadKind, ...]

    def key(self, load: str) -> tuple[Any, ...]:
        """Of the row of one load."""
        return self.phase, self.number, self.model, self.peer.name, self.setting.label, load

    def left(self, rows: Iterable[Row]) -> Visit | None:
        """What of it has not been measured yet; None when all has, or when it did not start."""
        done = {key_of(row) for row in rows}
        if self.key("start") in done:
            return None
        loads = tuple(load for load in self.loads if self.key(load.name) not in done)
        return Visit(self.phase, self.number, self.model, self.peer, self.setting, loads) if loads else None


def key_of(row: Row) -> tuple[Any, ...]:
    """Of a row as it was written."""
    return row["phase"], row["round"], row["model"], row["peer"], row["setting"], row["load"]


def visits(models: Sequence[str], peers: Sequence[Peer], rows: Sequence[Row], count: int) -> Iterator[Visit]:
    """All that is to be measured, each as far as `rows` do not have it, which grow meanwhile."""
    others = [peer for peer in peers if not peer.ours]  # this library has nothing to tune
    for model in models:
        for visit in [*scouting(model, others), *tuning(model, others)]:
            yield from _left(visit, rows)
    for number in range(1, count + 1):
        for model in models:
            for visit in list(rounds(model, peers, rows, number)):
                yield from _left(visit, rows)


def _left(visit: Visit, rows: Sequence[Row]) -> Iterator[Visit]:
    left = visit.left(rows)
    if left is not None:
        yield left


def scouting(model: str, peers: Sequence[Peer]) -> Iterator[Visit]:
    """Closed loops at the widest and at no window: enough to know what the best server can do."""
    for peer in _serving(model, peers):
        for setting in peer.settings[:SCOUTED]:
            yield Visit("tuning", 0, model, peer, setting, CLOSED)


def tuning(model: str, peers: Sequence[Peer]) -> Iterator[Visit]:
    """Every setting under every load, a short time each; the only setting of a server needs no tuning."""
    for peer in _serving(model, peers):
        if len(peer.settings) > 1:
            for setting in peer.settings:
                yield Visit("tuning", 0, model, peer, setting, CLOSED + OPEN)


def rounds(model: str, peers: Sequence[Peer], rows: Sequence[Row], number: int) -> Iterator[Visit]:
    """Every server once, in an order of its own in each round, at those settings that were the best under some load."""
    chosen = _serving(model, peers)
    for peer in random.Random(number).sample(chosen, len(chosen)):
        for setting, loads in best_settings(model, peer, rows).items():
            yield Visit("round", number, model, peer, setting, loads)


def best_settings(model: str, peer: Peer, rows: Sequence[Row]) -> dict[Setting, tuple[LoadKind, ...]]:
    """Loads by setting. Closed loops: the most answers. Open loops: the lowest p50 and the lowest p99, two settings
    where no one is near both."""
    if not peer.tables:
        return {peer.settings[0]: CLOSED[-1:]}
    if len(peer.settings) == 1:
        return {peer.settings[0]: CLOSED + OPEN}
    found: dict[Setting, list[LoadKind]] = {}
    for load in CLOSED + OPEN:
        tried = {
            row["setting"]: row
            for row in rows
            if (row["phase"], row["model"], row["peer"], row["load"]) == ("tuning", model, peer.name, load.name)
        }
        for label in _best(tried, load):
            setting = next(each for each in peer.settings if each.label == label)
            found.setdefault(setting, []).append(load)
    return {setting: tuple(loads) for setting, loads in found.items()}


def _best(tried: dict[str, Row], load: LoadKind) -> list[str]:
    if not tried:
        return []
    if load.clients:
        return [max(tried, key=lambda label: tried[label]["rate"])]
    kept = {label: row for label, row in tried.items() if not row["behind"] and row["p50"] is not None} or tried
    near: dict[str, float] = {}
    least = {name: min(_number(row[name]) for row in kept.values()) for name in ("p50", "p99")}
    for label, row in kept.items():
        near[label] = max(_number(row[name]) / least[name] for name in least)
    both = min(near, key=lambda label: near[label])
    if near[both] <= NEAR:
        return [both]
    return list(dict.fromkeys(min(kept, key=lambda label: _number(kept[label][name])) for name in least))


def _number(value: float | None) -> float:
    return math.inf if value is None else value


def capacity(phase: str, model: str, rows: Iterable[Row], peers: Sequence[Peer]) -> float:
    """Requests a second of the best of the others in any closed loop of the tuning; 0 before there is one.

    In the tuning itself only scouted settings count, so that all settings are tried at the same rates.
    """
    most = SCOUTED if phase == "tuning" else None
    allowed = {(peer.name, each.label) for peer in peers if not peer.ours for each in peer.settings[:most]}
    found = [
        row["rate"]
        for row in rows
        if row["phase"] == "tuning" and row["model"] == model and (row["peer"], row["setting"]) in allowed
        and row["load"] in {load.name for load in CLOSED} and not row["failed"]
    ]  # fmt: skip
    return max(found, default=0.0)


def _serving(model: str, peers: Sequence[Peer]) -> list[Peer]:
    return [peer for peer in peers if model in peer.models]
