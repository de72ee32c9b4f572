"""A timeline as a Chrome trace, for chrome://tracing and Perfetto: one process per rank."""

from __future__ import annotations

from typing import Any

from microbatch.pipeline.schedule import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT
from microbatch.pipeline.timeline import Timeline

_NAMES = {FORWARD: "forward", INPUT_GRADIENT: "input gradient", WEIGHT_GRADIENT: "weight gradient",
          BACKWARD: "full backward"}  # fmt: skip


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """Complete events (``ph`` X) in microseconds, memory as counters, and arrows for messages between ranks."""
    events: list[dict[str, Any]] = []
    for rank in range(timeline.schedule.ranks):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}})
        times, held = timeline.memory_steps(rank)
        events += [
            {"ph": "C", "name": "activations", "pid": rank, "tid": 0, "ts": time * 1e6, "args": {"held": value}}
            for time, value in zip(times.tolist(), held.tolist())
        ]
    events += [_event(timeline, index) for index in range(len(timeline.schedule))]
    for index in timeline.schedule.crosses().nonzero()[0].tolist():
        events += _arrow(timeline, index)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"schedule": timeline.schedule.name}}


def _event(timeline: Timeline, index: int) -> dict[str, Any]:
    action = timeline.schedule.action(index)
    start, end = float(timeline.start[index]), float(timeline.end[index])
    return {
        "ph": "X", "name": str(action), "cat": _NAMES[action.kind], "pid": int(timeline.schedule.rank[index]), "tid": 0,
        "ts": start * 1e6, "dur": (end - start) * 1e6,
        "args": {"stage": action.stage, "micro_batch": action.micro_batch},
    }  # fmt: skip


def _arrow(timeline: Timeline, index: int) -> list[dict[str, Any]]:
    source = int(timeline.schedule.needs[index])
    ranks, name = timeline.schedule.rank, "message"
    return [
        {"ph": "s", "name": name, "cat": name, "id": index, "pid": int(ranks[source]), "tid": 0,
         "ts": float(timeline.end[source]) * 1e6},
        {"ph": "f", "bp": "e", "name": name, "cat": name, "id": index, "pid": int(ranks[index]), "tid": 0,
         "ts": float(timeline.start[index]) * 1e6},
    ]  # fmt: skip
