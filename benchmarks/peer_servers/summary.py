"""From rows to tables: medians over the rounds, ratios within rounds, and whether each bar is kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from benchmarks.peer_servers.loads import CLOSED, LOADS, OPEN
from benchmarks.peer_servers.table import INSTALLED, SAME, Peer

Row = dict[str, Any]
BARS = {
    SAME: {"1 client": 1.0, "8 clients": 1.2, "32 clients": 1.0},
    INSTALLED: {"1 client": 1.2, "8 clients": 1.2},
}
"""Ours over the best of the others."""
IDLE_BAR, LENGTHS_BAR = 0.01, 1.3


def summary(rows: Sequence[Row], peers: Sequence[Peer]) -> Row:
    """Everything that is told of the rows of the rounds."""
    measured = [row for row in rows if row["phase"] == "round"]
    models = list(dict.fromkeys(row["model"] for row in measured))
    return {
        "rounds": max((row["round"] for row in measured), default=0),
        "tables": {model: {table: table_of(measured, peers, model, table) for table in BARS} for model in models},
        "lengths": lengths(measured),
        "idle": idle(measured),
        "settings": tried(rows),
        "failed_to_start": [row for row in rows if row["load"] == "start"],
        "noise": noise(measured),
    }


def table_of(rows: Sequence[Row], peers: Sequence[Peer], model: str, table: str) -> Row:
    """Cells by server and load, and ours against the best of the others."""
    standing = [peer for peer in peers if table in peer.tables and model in peer.models]
    cells = {
        peer.name: {load: cell for load in LOADS if (cell := cell_of(rows, model, peer.name, load)) is not None}
        for peer in standing
    }
    ours = next(peer.name for peer in standing if peer.ours)
    others = [peer.name for peer in standing if not peer.ours]
    return {"cells": cells, "ours": ours, "against": against(cells, ours, others, table)}


def cell_of(rows: Iterable[Row], model: str, peer: str, load: str) -> Row | None:
    """One cell; the best of two settings where p50 and p99 of an open loop have one each. None without a valid row."""
    found = [row for row in rows if (row["model"], row["peer"], row["load"]) == (model, peer, load)]
    valid = [row for row in found if not row["void"]]
    by_setting: dict[str, list[Row]] = {}
    for row in valid:
        by_setting.setdefault(row["setting"], []).append(row)
    if not by_setting:
        return {"void": len(found)} if found else None
    cells = [_median(setting, each) for setting, each in by_setting.items()]
    best = max(cells, key=lambda cell: cell["rate"])
    steady = [cell for cell in cells if not cell["behind"]]
    latency = {name: min((cell[name] for cell in steady), default=None) for name in ("p50", "p99")}
    return best | latency | {"settings": [cell["setting"] for cell in cells], "void": len(found) - len(valid),
                             "behind": not steady}  # fmt: skip


def _median(setting: str, rows: Sequence[Row]) -> Row:
    """Medians over rounds; a server that fell behind in most rounds does not keep up."""
    answered = [row for row in rows if row["p50"] is not None]
    return {
        "setting": setting,
        "rate": median(row["rate"] for row in rows),
        "rates": {str(row["round"]): row["rate"] for row in rows},
        "p50": median([row["p50"] for row in answered]) if answered else None,
        "p99": median([row["p99"] for row in answered]) if answered else None,
        "failed": sum(row["failed"] for row in rows),
        "behind": 2 * sum(bool(row.get("behind")) or row["p50"] is None for row in rows) > len(rows),
        "client_cpu": max(row["client_cpu"] for row in rows),
    }


def against(cells: dict[str, dict[str, Row]], ours: str, others: Sequence[str], table: str) -> dict[str, Row]:
    """By load: the best other server, our ratio to it (the median of the ratios within rounds), and the bar."""
    found: dict[str, Row] = {}
    for load in CLOSED:
        rated = {name: cells[name][load.name] for name in others if "rate" in cells[name].get(load.name, {})}
        mine = cells[ours].get(load.name, {})
        if rated and "rate" in mine:
            best = max(rated, key=lambda name: rated[name]["rate"])
            ratios = _ratios(mine["rates"], rated[best]["rates"])
            bar = BARS[table].get(load.name)
            ratio = median(ratios) if ratios else mine["rate"] / rated[best]["rate"]
            found[load.name] = {"best": best, "ratio": ratio, "ratios": ratios, "bar": bar,
                                "kept": None if bar is None else ratio >= bar}  # fmt: skip
    for load in OPEN:
        found |= _latencies(cells, ours, others, load.name)
    return found


def _latencies(cells: dict[str, dict[str, Row]], ours: str, others: Sequence[str], load: str) -> dict[str, Row]:
    found: dict[str, Row] = {}
    mine = cells[ours].get(load, {})
    for name in ("p50", "p99"):
        theirs = {peer: value for peer in others if (value := cells[peer].get(load, {}).get(name)) is not None}
        if theirs and mine:
            best = min(theirs, key=lambda peer: theirs[peer])
            ratio = None if mine.get(name) is None else mine[name] / theirs[best]  # None: ours fell behind
            kept = ratio is not None and ratio <= 1.0
            found[f"{load}, {name}"] = {"best": best, "ratio": ratio, "bar": 1.0, "kept": kept}
    return found


def _ratios(ours: dict[str, float], theirs: dict[str, float]) -> list[float]:
    return [ours[number] / theirs[number] for number in ours if theirs.get(number)]


def lengths(rows: Sequence[Row]) -> Row | None:
    """Told the lengths of texts, against batches in the order of arrival, both ours, under 32 clients."""
    by_way = {
        name: {str(row["round"]): row["rate"] for row in rows if row["load"] == CLOSED[-1].name and not row["void"]
               and row["model"] == "minilm" and row["peer"] == name}
        for name in ("microbatch", "microbatch, by arrival")
    }  # fmt: skip
    ratios = _ratios(*by_way.values())
    if not ratios:
        return None
    return {"ratio": median(ratios), "ratios": ratios, "bar": LENGTHS_BAR, "kept": median(ratios) >= LENGTHS_BAR}


def idle(rows: Iterable[Row]) -> Row:
    """Share of a core by server: the largest over settings, which are medians over rounds."""
    by_place: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if row["load"] == "idle":
            by_place.setdefault((row["peer"], row["setting"]), []).append(row["share"])
    found: dict[str, Row] = {}
    for (peer, setting), shares in by_place.items():
        found.setdefault(peer, {})[setting] = median(shares)
    return {peer: {"least": min(by.values()), "most": max(by.values())} for peer, by in found.items()}


def tried(rows: Iterable[Row]) -> Row:
    """Every setting of the tuning: answers a second of closed loops, p50 and p99 of open ones."""
    found: Row = {}
    for row in rows:
        if row["phase"] == "tuning" and row["load"] in LOADS:
            value = round(row["rate"], 1) if LOADS[row["load"]].clients else [row["p50"], row["p99"]]
            found.setdefault(row["model"], {}).setdefault(row["peer"], {}).setdefault(row["setting"], {})[
                row["load"]
            ] = value
    return found


def noise(rows: Iterable[Row]) -> Row:
    """How quiet the machine was."""
    seen = [row for row in rows if "stolen" in row]
    if not seen:
        return {}
    return {
        "rows": len(seen),
        "void": sum(bool(row["void"]) for row in seen),
        "largest_stolen": max(row["stolen"] for row in seen),
        "median_stolen": median(row["stolen"] for row in seen),
        "load_average": [min(row["load_average"] for row in seen), max(row["load_average"] for row in seen)],
        "client_cpu": max(row["client_cpu"] for row in seen),
    }
