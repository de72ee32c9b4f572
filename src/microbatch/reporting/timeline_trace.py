"""A timeline as a Chrome trace, for chrome://tracing and Perfetto: one process per rank."""

from __future__ import annotations

from typing import Any

from microbatch.pipeline.schedule import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT
from microbatch.pipeline.timeline import Timeline

_NAMES = {FORWARD: "forward", INPUT_GRADIENT: "input gradient", WEIGHT_GRADIENT: "weight gradient",
          BACKWARD: "full backward"}  # fmt: skip


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """Complete events (``ph`` X) in microseconds, memory as counters, and arrows for messages between ranks.

    A timeline beside the first has processes of its own behind the first one's, on the same axis.
    """
    events: list[dict[str, Any]] = []
    for number, one in enumerate(timeline.shown):
        events += _events(one, number * timeline.schedule.ranks, one.source if timeline.beside else "")
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"schedule": timeline.schedule.name}}


def _events(timeline: Timeline, first: int, source: str) -> list[dict[str, Any]]:
    """All of one timeline; its ranks are the processes from `first` on."""
    events: list[dict[str, Any]] = []
    for rank in range(timeline.schedule.ranks):
        process, name = first + rank, f"rank {rank} {source}".rstrip()
        events.append({"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}})
        times, held = timeline.memory_steps(rank)
        events += [
            {"ph": "C", "name": "activations", "pid": process, "tid": 0, "ts": time * 1e6, "args": {"held": value}}
            for time, value in zip(times.tolist(), held.tolist())
        ]
    events += [_event(timeline, index, first) for index in range(len(timeline.schedule))]
    for index in timeline.schedule.crosses().nonzero()[0].tolist():
        events += _arrow(timeline, index, first)
    return events


def _event(timeline: Timeline, index: int, first: int) -> dict[str, Any]:
    action = timeline.schedule.action(index)
    start, end = float(timeline.start[index]), float(timeline.end[index])
    return {
        "ph": "X", "name": str(action), "cat": _NAMES[action.kind], "pid": first + int(timeline.schedule.rank[index]),
        "tid": 0, "ts": start * 1e6, "dur": (end - start) * 1e6,
        "args": {"stage": action.stage, "micro_batch": action.micro_batch},
    }  # fmt: skip


def _arrow(timeline: Timeline, index: int, first: int) -> list[dict[str, Any]]:
    source = int(timeline.schedule.needs[index])
    ranks, name = timeline.schedule.rank, "message"
    number = first * len(timeline.schedule) + index
    return [
        {"ph": "s", "name": name, "cat": name, "id": number, "pid": first + int(ranks[source]), "tid": 0,
         "ts": float(timeline.end[source]) * 1e6},
        {"ph": "f", "bp": "e", "name": name, "cat": name, "id": number, "pid": first + int(ranks[index]), "tid": 0,
         "ts": float(timeline.start[index]) * 1e6},
    ]  # fmt: skip
