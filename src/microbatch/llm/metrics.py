"""What an engine has done so far, counted where it happens, under the names that vLLM gave these figures. No torch."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from dataclasses import asdict, dataclass, field
from typing import Any

from microbatch.notebook import notebook_form

KEPT_EVENTS = 200
"""Slow steps and preemptions that are remembered."""

_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
         160.0, 640.0, 2560.0)  # fmt: skip
_GAPS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_LATENCY = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
            960.0, 1920.0, 7680.0)  # fmt: skip
_STEP_TOKENS = tuple(float(2**power) for power in range(15))
_REQUEST_TOKENS = tuple(float(base * 10**power) for power in range(5) for base in (1, 2, 5))

BUCKETS: dict[str, tuple[float, ...]] = {
    "iteration_tokens_total": _STEP_TOKENS,
    "time_to_first_token_seconds": _TTFT,
    "inter_token_latency_seconds": _GAPS,
    "request_time_per_output_token_seconds": _GAPS,
    "e2e_request_latency_seconds": _LATENCY,
    "request_queue_time_seconds": _LATENCY,
    "request_prefill_time_seconds": _LATENCY,
    "request_decode_time_seconds": _LATENCY,
    "request_inference_time_seconds": _LATENCY,
    "request_prompt_tokens": _REQUEST_TOKENS,
    "request_generation_tokens": _REQUEST_TOKENS,
}
"""Histograms and the upper bounds of their buckets, as vLLM has them. Times in seconds."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """Observations by bucket.

    Attributes:
        bounds: upper bounds of the buckets; one more bucket holds what lies above.
        counts: observations in each bucket, not summed up.
        total: sum of all observations.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        """Of all observations."""
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class StepEvent:
    """Something in a step that a person may ask about.

    Attributes:
        at: seconds since the start of the engine.
        kind: slow_step, preemption, out_of_memory or failure.
        text: what and why, in one sentence.
    """

    at: float
    kind: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LLMMetrics:
    """An engine at one moment. Seconds and counts.

    Attributes:
        num_requests_running, num_requests_waiting: sequences now.
        kv_cache_usage_perc: share of the blocks in use, 0 to 1.
        num_preemptions: sequences that lost their blocks and had to be computed again.
        prefix_cache_queries, prefix_cache_hits: tokens asked for and found.
        prompt_tokens, generation_tokens: of prompts, those found in the cache included, and generated.
        request_success: finished requests by finish reason: stop, length, abort, error.
        refused: requests that the waiting room had no place for.
        expired: requests whose deadline passed.
        steps: calls of the model.
        step_seconds: of all steps together.
        model_seconds: of that, inside the model; the rest is scheduling, sampling and text.
        sampling_seconds: of that, in choosing tokens.
        histograms: by name, see `BUCKETS`.
        events: the last slow steps, preemptions and failures, the newest last.
        num_blocks, free_blocks, block_size: of the cache.
        max_num_sequences, max_num_tokens: what a step may hold now.
        budget_reason: why that much.
        step_model: what a step takes by tokens, cached tokens and sequences, in words; empty while unknown.
        uptime: seconds since the start.
        ready, draining: whether requests are welcome.
        retry_after: seconds until what waits now will have been answered.
        notes: what the user should know.
    """

    num_requests_running: int = 0
    num_requests_waiting: int = 0
    kv_cache_usage_perc: float = 0.0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    request_success: dict[str, int] = field(default_factory=dict)
    refused: int = 0
    expired: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    model_seconds: float = 0.0
    sampling_seconds: float = 0.0
    histograms: dict[str, Histogram] = field(default_factory=dict)
    events: tuple[StepEvent, ...] = ()
    num_blocks: int = 0
    free_blocks: int = 0
    block_size: int = 0
    max_num_sequences: int = 0
    max_num_tokens: int = 0
    budget_reason: str = ""
    step_model: str = ""
    uptime: float = 0.0
    ready: bool = False
    draining: bool = False
    retry_after: float = 0.0
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists and numbers."""
        return asdict(self)

    def _repr_html_(self) -> str | None:
        return notebook_form(self)


class _Tally:
    """A histogram while it is being filled."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.counts, self.total = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def now(self) -> Histogram:
        return Histogram(self.bounds, tuple(self.counts), self.total)


class Counters:
    """Counts of a running engine; written by its loop thread only, `refused` under its lock."""

    def __init__(self, born: float) -> None:
        """
        Args:
            born: when the engine started, by its clock.
        """
        self.born = born
        self.num_preemptions = self.prompt_tokens = self.generation_tokens = 0
        self.refused = self.expired = self.steps = 0
        self.step_seconds = self.model_seconds = self.sampling_seconds = 0.0
        self.request_success: Counter[str] = Counter()
        self.events: deque[StepEvent] = deque(maxlen=KEPT_EVENTS)
        self._tallies = {name: _Tally(bounds) for name, bounds in BUCKETS.items()}

    def observe(self, name: str, value: float) -> None:
        """Put one observation into a histogram of `BUCKETS`."""
        self._tallies[name].observe(value)

    def event(self, now: float, kind: str, text: str) -> None:
        """Remember what happened in a step."""
        self.events.append(StepEvent(now - self.born, kind, text))

    def totals(self) -> dict[str, Any]:
        """The fields of `LLMMetrics` that are counted here."""
        names = ("num_preemptions", "prompt_tokens", "generation_tokens", "refused", "expired", "steps",
                 "step_seconds", "model_seconds", "sampling_seconds")  # fmt: skip
        return {
            **{name: getattr(self, name) for name in names},
            "request_success": dict(self.request_success),
            "histograms": {name: tally.now() for name, tally in self._tallies.items()},
            "events": tuple(self.events),
        }
