"""``microbatch serve --dry-run``: what to expect before any traffic, from a profile or from measuring the model now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from microbatch.cli.progress import measuring
from microbatch.errors import InvalidSettings
from microbatch.serving.decisions.dry_run import DryRun, dry_run
from microbatch.serving.decisions.latency import Latency
from microbatch.serving.decisions.limits import Wishes
from microbatch.serving.loading.reading import Reading

WISHES = ("policy", "max_batch_size", "max_queue_delay", "latency_target", "max_queue", "max_queue_per_tenant")
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Requests in a batch of which the time is read off a table of tokens."""


def expected(
    texts: Sequence[str], given: Mapping[str, Any], rates: Sequence[float], traffic: str, as_kind: str | None
) -> DryRun:
    """The simulation of one model.

    Raises:
        InvalidSettings: no model and no profile, several models, or settings that a simulation of requests cannot know.
    """
    if "token_budget" in given:
        raise InvalidSettings("--token-budget counts tokens, and a dry run counts requests.", "Leave it out.")
    if len(texts) > 1:
        raise InvalidSettings(f"A dry run is of one model, not of {len(texts)}.", "Run it once for each.")
    if not texts and "profile" not in given:
        raise InvalidSettings("There is neither a model nor a profile.", "Name a MODEL, or give --profile FILE.")
    wishes = Wishes(**{name: given[name] for name in WISHES if name in given})
    workers = given.get("workers", 1) * len(given.get("devices", ("cpu",)))
    if "profile" in given:
        return dry_run(given["profile"], wishes, rates=rates, traffic=traffic, workers=workers)
    latency, most, note = _measured(texts[0], given, as_kind)
    wishes = replace(wishes, max_batch_size=wishes.max_batch_size or most)
    found = dry_run(latency, wishes, rates=rates, traffic=traffic, workers=workers)
    return replace(found, notes=(*found.notes, note)) if note else found


def _measured(text: str, given: Mapping[str, Any], as_kind: str | None) -> tuple[Latency, int | None, str]:
    """Seconds by requests in a batch, measured here; the largest batch where it does not follow; what it is of.

    Raises:
        InvalidSettings: it cannot be measured without examples.
    """
    from microbatch.serving.loading.load import load_served, name_and_text

    name, text = name_and_text(text)
    with measuring():
        served = load_served(text, name, given, as_kind=as_kind)
        try:
            served.engine.start()
            curve, most = served.engine.metrics().curve, served.engine.metrics().max_batch_size
        finally:
            served.engine.close()
    if not curve:
        raise InvalidSettings(
            f"Nothing is known of the latency of {text}.", "Give --profile FILE, or --examples FILE to measure it with."
        )
    if not isinstance(served.engine, Reading):
        return Latency(dict(curve)), None, ""
    tokens = round(median(len(row) for row in served.engine.engine.examples))
    of_tokens, largest = Latency(dict(curve)), curve[-1][0]
    sizes = {size for size in SIZES if size <= most and size * tokens <= largest} | {1}
    note = f"Measured on items of {tokens} tokens; longer ones take longer."
    return Latency({size: of_tokens.seconds(size * tokens) for size in sizes}), most, note
