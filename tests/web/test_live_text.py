"""What the live page says of an engine that generates text, from numbers alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from microbatch.llm.metrics import Histogram, LLMMetrics
from microbatch.web.live import PAUSE, Live
from microbatch.web.live_text import TextLook, text_look_at, text_rates_of, text_view_of
from microbatch.web.live_view import starting
from tests.web.text_engines import Echoing

NOW = Echoing().metrics()


def later(seconds: float, tokens: int, first: float, gaps: int) -> LLMMetrics:
    """So many tokens after, one of them the first of an answer."""
    seen = {
        "time_to_first_token_seconds": (4, 7.5 + first),
        "inter_token_latency_seconds": (3 + gaps, 7.5 + 0.02 * gaps),
    }
    histograms = {name: Histogram((1.0,), (count, 0), total) for name, (count, total) in seen.items()}
    return replace(
        NOW, uptime=NOW.uptime + seconds, generation_tokens=NOW.generation_tokens + tokens, histograms=histograms
    )


def view(*metrics: LLMMetrics) -> dict[str, Any]:
    return text_view_of("m", metrics[-1], [text_look_at(each) for each in metrics])


def facts(*metrics: LLMMetrics) -> dict[str, str]:
    return {each["label"]: each["value"] for each in view(*metrics)["facts"]}


def test_rates_are_those_of_the_last_seconds() -> None:
    rates = text_rates_of([text_look_at(NOW), text_look_at(later(2, 100, 0.25, 90))])
    assert rates is not None
    assert (rates.tokens, rates.first) == (50, 0.25)
    assert rates.gap is not None and abs(rates.gap - 0.02) < 1e-12
    assert text_rates_of([text_look_at(NOW)]) is None
    old = TextLook(0.0, 0, (0, 0.0), (0, 0.0))
    assert text_rates_of([old, text_look_at(NOW), text_look_at(later(2, 100, 0.25, 90))]) == rates


def test_what_is_told() -> None:
    told = facts(NOW, later(2, 100, 0.25, 90))
    assert told == {
        "throughput": "50 /s", "time to first token": "250 ms", "time per token": "20 ms", "running": "3",
        "cache": "25 %", "prefix hits": "40 %",
    }  # fmt: skip
    assert view(NOW, later(2, 100, 0.25, 90))["sentence"] == "50 tokens per second, 3 at once."
    assert facts(NOW)["time per token"] == "–"
    assert any("prefill of 200 tokens" in alert for alert in view(NOW)["alerts"])


def test_states() -> None:
    assert view(replace(NOW, steps=0))["sentence"] == "No request yet."
    assert view(replace(NOW, draining=True))["state"]["word"] == "draining"
    assert "Still to be answered: 5" in view(replace(NOW, draining=True))["sentence"]
    idle = replace(NOW, num_requests_running=0)
    assert view(idle, replace(idle, uptime=NOW.uptime + 1))["sentence"] == "Idle."


def test_a_view_has_all_that_the_page_shows() -> None:
    assert view(NOW).keys() == starting("m").keys()


def test_the_page_shows_engines_of_both_kinds() -> None:
    clock = [0.0]
    live = Live({"m": Echoing(), "n": Echoing()}, lambda: clock[0])
    for _ in range(3):
        event = live.event()
        clock[0] += PAUSE
    models = msgspec.json.decode(event.removeprefix(b"data: "))["models"]
    assert [each["name"] for each in models] == ["m", "n"]
    assert models[0]["state"]["word"] == "ready"
