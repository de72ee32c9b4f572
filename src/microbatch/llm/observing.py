"""What is counted of steps and answers. No torch."""

from __future__ import annotations

from collections.abc import Sequence as Rows

from microbatch.llm.metrics import Counters
from microbatch.llm.row_pieces import Row
from microbatch.llm.sequence import Sequence
from microbatch.llm.step_model import StepSample, pairs_of


def sample_of(rows: Rows[Row], seconds: float) -> StepSample:
    """What the model of steps learns from a step with these rows."""
    counts = [len(row.ids) for row in rows]
    return StepSample(
        tokens=sum(counts),
        cached=sum([row.start for row in rows]),
        sequences=len(rows),
        seconds=seconds,
        pairs=sum([pairs_of(count, row.start) for count, row in zip(counts, rows)]),
        prefill=sum([count for count in counts if count > 1]),
    )


def observe_token(counters: Counters, sequence: Sequence, now: float) -> None:
    """A sequence has one token more."""
    if sequence.last_at is not None:
        counters.observe("inter_token_latency_seconds", now - sequence.last_at)
    else:
        sequence.first_at = now
        if sequence.index == 0:
            counters.observe("time_to_first_token_seconds", now - sequence.request.arrived)
    sequence.last_at = now


def observe_answer(counters: Counters, sequence: Sequence, now: float) -> None:
    """A sequence has ended."""
    request, first = sequence.request, sequence.first_at or now
    started, tokens = sequence.started_at or now, len(sequence.output_ids)
    times = {
        "e2e_request_latency_seconds": now - request.arrived,
        "request_queue_time_seconds": started - request.arrived,
        "request_prefill_time_seconds": first - started,
        "request_decode_time_seconds": now - first,
        "request_inference_time_seconds": now - started,
        "request_prompt_tokens": len(request.prompt_ids),
        "request_generation_tokens": tokens,
    }
    if tokens > 1:
        times["request_time_per_output_token_seconds"] = (now - first) / (tokens - 1)
    for name, value in times.items():
        counters.observe(name, value)
