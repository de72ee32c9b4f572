"""What the rows of a comparison say: rates, ratios to this library, and whose tokens are whose. Nothing runs here."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.peer_generators.table import OURS, PEERS, REFERENCE

Row = dict[str, Any]
SECONDS = ("wall", "cpu")


def best_setting(rows: Sequence[Row], peer: str) -> str | None:
    """That had the least wall time in the first round in which all were tried; None where none went well."""
    tried = [row for row in rows if row["peer"] == peer and "wall" in row]
    first = min((row["round"] for row in tried), default=0)
    return min((row for row in tried if row["round"] == first), key=lambda row: row["wall"], default={}).get("setting")


def summary(rows: Sequence[Row]) -> list[Row]:
    """A row for each peer in each model and dtype, the fastest first."""
    cells = sorted({(row["model"], row["dtype"]) for row in rows})
    return [line for cell in cells for line in _cell([r for r in rows if (r["model"], r["dtype"]) == cell])]


def _cell(rows: Sequence[Row]) -> list[Row]:
    lines = [line for peer in PEERS if (line := _peer(rows, peer.name))]
    ours = next((line for line in lines if line["peer"] == OURS), None)
    for line in lines:
        if ours is not None and line is not ours:
            line["ours_over_it"] = {
                how: min(line["seconds"][kind][how] / ours["seconds"][kind][how] for kind in SECONDS)
                for how in ("least", "median")
            }
    return sorted(lines, key=lambda line: line["seconds"]["wall"]["least"])


def _peer(rows: Sequence[Row], peer: str) -> Row | None:
    setting = best_setting(rows, peer)
    kept = [row for row in rows if (row["peer"], row["setting"]) == (peer, setting) and "wall" in row]
    if not kept:
        return None
    seconds = {
        kind: {"least": min(row[kind] for row in kept), "median": statistics.median(row[kind] for row in kept)}
        for kind in SECONDS
    }
    tokens = kept[0]["tokens"]
    first = kept[0]["outputs"]
    found: Row = {key: kept[0][key] for key in ("model", "dtype", "peer", "setting")}
    return found | {
        "rounds": len(kept), "tokens": tokens, "seconds": seconds,
        "tokens_per_wall_second": tokens / seconds["wall"]["least"],
        "tokens_per_cpu_second": tokens / seconds["cpu"]["least"],
        "tried": {row["setting"]: row.get("wall", row.get("why")) for row in reversed(rows) if row["peer"] == peer},
        "equal_to_reference": agreement(rows, first),
        "equal_in_every_round": all(row["outputs"] == first for row in kept),
        "distinct_tokens": statistics.mean(len(set(output)) / len(output) for output in first),
    }  # fmt: skip


def agreement(rows: Sequence[Row], outputs: Sequence[Sequence[int]]) -> float | None:
    """Share of the sequences that equal the reference's; None where it did not run."""
    reference = next((row["outputs"] for row in rows if row["peer"] == REFERENCE and "outputs" in row), None)
    if reference is None:
        return None
    equal: list[bool] = [one == other for one, other in zip(outputs, reference, strict=True)]
    return sum(equal) / len(equal)


def differences(rows: Sequence[Row], peer: str) -> list[tuple[int, int, int, int]]:
    """Where a peer first leaves the reference: (sequence, place, the reference's token, its own)."""
    by_name = {row["peer"]: row["outputs"] for row in reversed(rows) if "outputs" in row}
    if peer not in by_name or REFERENCE not in by_name:
        return []
    found = []
    for number, (one, other) in enumerate(zip(by_name[REFERENCE], by_name[peer], strict=True)):
        place = next((place for place, pair in enumerate(zip(one, other)) if pair[0] != pair[1]), None)
        if place is not None:
            found.append((number, place, one[place], other[place]))
    return found


def table(lines: Sequence[Row]) -> str:
    """As text."""
    head = f"{'':34}{'rounds':>7}{'tok/s':>8}{'tok/cpu s':>10}{'ours ×':>8}{'median':>8}{'equal':>7}{'distinct':>9}"
    texts, cell = list[str](), ("", "")
    for line in lines:
        if (line["model"], line["dtype"]) != cell:
            cell = line["model"], line["dtype"]
            texts += ["", " ".join(cell), head]
        ratio, equal = line.get("ours_over_it"), line["equal_to_reference"]
        ratios = f"{ratio['least']:8.2f}{ratio['median']:8.2f}" if ratio else " " * 16
        share = f"{equal:7.0%}" if equal is not None else " " * 7
        texts.append(
            f"{line['peer'] + ', ' + line['setting']:34.34}{line['rounds']:7}{line['tokens_per_wall_second']:8.1f}"
            f"{line['tokens_per_cpu_second']:10.1f}{ratios}{share}{line['distinct_tokens']:9.0%}"
        )
    return "\n".join(texts)
