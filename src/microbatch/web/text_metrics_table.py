"""What `/metrics` tells of an engine that generates text: one row for each series, read from `LLMMetrics`.

Figures that vLLM has, too, keep its names and its label, so that dashboards and autoscalers made for it work; what
only this server has is called after it, as in `metrics_table`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from microbatch.web.metrics_table import Histogram, Samples, Series, field_of

if TYPE_CHECKING:
    from microbatch.llm.metrics import LLMMetrics

VLLM, MODEL_NAME = "vllm:", "model_name"
"""The prefix of vLLM's names, and what it calls the label of the model."""


def _vllm(name: str, kind: str, text: str) -> Series:
    read = _histogram(name) if kind == "histogram" else field_of(name)
    return Series(name, kind, text, read, prefix=VLLM, model_label=MODEL_NAME)


def _histogram(name: str) -> Callable[[Any], Samples | Histogram]:
    def read(metrics: LLMMetrics) -> Samples | Histogram:
        found = metrics.histograms.get(name)
        if found is None:
            return []
        return Histogram(tuple(zip((*found.bounds, float("inf")), accumulate(found.counts))), found.total)

    return read


def _reasons(metrics: LLMMetrics) -> Samples:
    return [((reason,), count) for reason, count in metrics.request_success.items()]


TEXT_SERIES = (
    _vllm("num_requests_running", "gauge", "Sequences that are generated."),
    _vllm("num_requests_waiting", "gauge", "Sequences that wait."),
    _vllm("kv_cache_usage_perc", "gauge", "Share of the blocks of the cache that is in use, 1 for all of them."),
    _vllm("num_preemptions", "counter", "Sequences that gave their blocks back and were computed again."),
    _vllm("prefix_cache_queries", "counter", "Tokens of prompts that were looked for in the cache."),
    _vllm("prefix_cache_hits", "counter", "Tokens of prompts that were found there."),
    _vllm("prompt_tokens", "counter", "Tokens of prompts, those found in the cache included."),
    _vllm("generation_tokens", "counter", "Tokens that were generated."),
    Series("request_success", "counter", "Requests and answers by how they ended.", _reasons, ("finished_reason",),
           VLLM, MODEL_NAME),
    _vllm("iteration_tokens_total", "histogram", "Tokens in a step."),
    _vllm("time_to_first_token_seconds", "histogram", "From the request to its first token."),
    _vllm("inter_token_latency_seconds", "histogram", "Between two tokens of an answer."),
    _vllm("request_time_per_output_token_seconds", "histogram", "Mean of those of an answer."),
    _vllm("e2e_request_latency_seconds", "histogram", "From the request to the last token of an answer."),
    _vllm("request_queue_time_seconds", "histogram", "From the request to its first step."),
    _vllm("request_prefill_time_seconds", "histogram", "From there to the first token."),
    _vllm("request_decode_time_seconds", "histogram", "From the first token to the last one."),
    _vllm("request_inference_time_seconds", "histogram", "From the first step to the last token."),
    _vllm("request_prompt_tokens", "histogram", "Tokens of a prompt."),
    _vllm("request_generation_tokens", "histogram", "Tokens of an answer."),
    Series("steps", "counter", "Calls of the model.", field_of("steps")),
    Series("step_seconds", "counter", "Seconds of all steps together.", field_of("step_seconds")),
    Series("step_model_seconds", "counter", "Of these, inside of the model.", field_of("model_seconds")),
    Series("step_sampling_seconds", "counter", "Of these, in choosing tokens.", field_of("sampling_seconds")),
    Series("requests_refused", "counter", "Requests that the queue had no room for.", field_of("refused")),
    Series("requests_expired", "counter", "Requests whose deadline passed.", field_of("expired")),
    Series("cache_blocks", "gauge", "Blocks of the cache.", field_of("num_blocks")),
    Series("step_sequences_limit", "gauge", "Sequences that a step may hold now.", field_of("max_num_sequences")),
    Series("step_tokens_limit", "gauge", "Tokens that a step may hold now.", field_of("max_num_tokens")),
)  # fmt: skip
"""In the order of the page."""

OF_BOTH = frozenset({"ready", "draining", "retry_after_seconds"})
"""Rows of `metrics_table.SERIES` that are told of every engine."""
