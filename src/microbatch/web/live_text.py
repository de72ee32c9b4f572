"""What the live page shows of an engine that generates text, in the form of `live_view.view_of`. No clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from microbatch.units import format_duration, format_number, format_percent, format_seconds
from microbatch.web.live_view import WINDOW, View, fact, starting, state_of

if TYPE_CHECKING:
    from microbatch.llm.metrics import LLMMetrics

SHOWN_EVENTS = 3
"""Slow steps and preemptions that are told."""


class TextLook(NamedTuple):
    """What is kept of a moment."""

    at: float
    tokens: int
    first: tuple[int, float]
    gaps: tuple[int, float]


class TextRates(NamedTuple):
    """Over the last `WINDOW`: tokens per second; mean seconds to a first token and between two, None without any."""

    tokens: float
    first: float | None
    gap: float | None


def text_look_at(metrics: LLMMetrics) -> TextLook:
    """The moment."""
    first, gaps = _seen(metrics, "time_to_first_token_seconds"), _seen(metrics, "inter_token_latency_seconds")
    return TextLook(metrics.uptime, metrics.generation_tokens, first, gaps)


def text_rates_of(looks: Sequence[TextLook]) -> TextRates | None:
    """From the oldest look within the window to the newest; None before there are two."""
    last = looks[-1]
    first = next(look for look in looks if look.at >= last.at - WINDOW)
    seconds = last.at - first.at
    if seconds <= 0:
        return None
    return TextRates(
        (last.tokens - first.tokens) / seconds, _mean(first.first, last.first), _mean(first.gaps, last.gaps)
    )


def text_view_of(name: str, metrics: LLMMetrics, looks: Sequence[TextLook]) -> View:
    """Everything about a model.

    Args:
        name: of the model.
        metrics: now.
        looks: the moments up to now, oldest first; at least the one of `metrics`.
    """
    rates = text_rates_of(looks)
    told = [
        f"{format_duration(metrics.uptime - event.at)} ago: {event.text}" for event in metrics.events[-SHOWN_EVENTS:]
    ]
    return starting(name) | {
        "state": state_of(metrics),
        "sentence": _sentence(metrics, rates),
        "alerts": [*metrics.notes, *reversed(told)],
        "facts": _facts(metrics, rates),
        "counts": [{"label": label, "value": f"{count:,}".replace(",", "\u202f")} for label, count in _counts(metrics)],
        "about": f"{metrics.budget_reason} Up for {format_duration(metrics.uptime)}.".strip(),
    }


def _sentence(metrics: LLMMetrics, rates: TextRates | None) -> str:
    if metrics.draining:
        left = metrics.num_requests_running + metrics.num_requests_waiting
        return f"About to stop. Still to be answered: {format_number(left)}; new ones are refused."
    if not metrics.steps:
        return "No request yet."
    if rates is None:
        return "Tokens are being counted …"
    if not rates.tokens and not metrics.num_requests_running:
        return "Idle."
    return f"{format_number(rates.tokens)} tokens per second, {format_number(metrics.num_requests_running)} at once."


def _facts(metrics: LLMMetrics, rates: TextRates | None) -> list[dict[str, str]]:
    recent = f"mean of the last {format_seconds(WINDOW)}"
    asked, waiting = metrics.prefix_cache_queries, format_number(metrics.num_requests_waiting)
    used, blocks = format_percent(metrics.kv_cache_usage_perc), format_number(metrics.num_blocks)
    return [
        fact("throughput", f"{format_number(rates.tokens)} /s" if rates else "…", "tokens generated per second"),
        fact("time to first token", _seconds(rates and rates.first), recent),
        fact("time per token", _seconds(rates and rates.gap), recent),
        fact("running", format_number(metrics.num_requests_running),
             f"of at most {format_number(metrics.max_num_sequences)}; {waiting} wait"),
        fact("cache", used, f"in use, of {blocks} blocks"),
        fact("prefix hits", format_percent(metrics.prefix_cache_hits / asked) if asked else "–",
             "of the tokens of prompts were in the cache"),
    ]  # fmt: skip


def _counts(metrics: LLMMetrics) -> list[tuple[str, int]]:
    always = [("prompt tokens", metrics.prompt_tokens), ("generated tokens", metrics.generation_tokens)]
    rare = [("preemptions", metrics.num_preemptions), ("refused", metrics.refused), ("expired", metrics.expired)]
    ended = [(f"ended by {reason}", count) for reason, count in sorted(metrics.request_success.items())]
    return [*always, *ended, *((label, count) for label, count in rare if count)]


def _seen(metrics: LLMMetrics, name: str) -> tuple[int, float]:
    found = metrics.histograms.get(name)
    return (0, 0.0) if found is None else (found.count, found.total)


def _mean(before: tuple[int, float], now: tuple[int, float]) -> float | None:
    return (now[1] - before[1]) / (now[0] - before[0]) if now[0] > before[0] else None


def _seconds(value: float | None) -> str:
    return "–" if value is None else format_seconds(value)
