"""What ``microbatch serve`` says once it serves: what, where, by which rules, and what to try first."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from microbatch.batch.exactness import ExactnessReport
from microbatch.serving.decisions.limits import Limits
from microbatch.serving.loading.folder_kind import LANGUAGE_MODEL
from microbatch.serving.loading.served import Served
from microbatch.units import format_number, format_seconds

SHORT = 60
"""Characters of an example that fits into a line for curl."""


def start_lines(url: str, served: Sequence[Served], notes: Sequence[str]) -> Iterator[str]:
    """To read in ten seconds."""
    for each in served:
        yield f"{each.name}: {each.text} at {url}{path_of(each, served)}"
        yield f"  takes {each.takes}"
        yield from (f"  {line}" for line in (_of_text if each.kind == LANGUAGE_MODEL else _of_items)(each.engine))
    yield from (f"note: {note}" for note in notes)
    yield f"try: {curl(url, served[0], served)}"
    yield f"Live page: {url}/   API: {url}/openapi.json   Ctrl-C ends it; what waits is answered first."


def _of_items(engine: Any) -> Iterator[str]:
    if engine.limits is not None:
        yield _rules(engine.limits)
    yield same_answer(engine.report)


def _of_text(engine: Any) -> Iterator[str]:
    limits = engine.limits
    yield (
        f"prompt and answer of up to {limits.context} tokens; steps of up to {limits.max_num_sequences} sequences "
        f"and {limits.max_num_tokens} tokens"
    )
    yield from limits.notes


def start_document(url: str, served: Sequence[Served], notes: Sequence[str], *, keys: int) -> dict[str, Any]:
    """The same for machines."""
    return {
        "url": url,
        "models": [_model_document(each, served) for each in served],
        "keys": keys,
        "notes": list(notes),
    }


def path_of(each: Served, served: Sequence[Served]) -> str:
    """Where it is asked for."""
    if each.kind == LANGUAGE_MODEL:
        return "/v1"
    return "/predict" if len(served) == 1 else f"/predict/{each.name}"


def curl(url: str, each: Served, served: Sequence[Served]) -> str:
    """A line that asks it, with an item that it takes where one is known and short."""
    if each.kind == "embeddings":
        path, body = "/v1/embeddings", json.dumps({"model": each.name, "input": "A first text."})
    elif each.kind == LANGUAGE_MODEL:
        path, body = "/v1/completions", json.dumps({"model": each.name, "prompt": "Once upon a time", "max_tokens": 32})
    else:
        path, body = path_of(each, served), _item(each)
    return f"curl {url}{path} -H 'Content-Type: application/json' -d '{body}'"


def same_answer(report: ExactnessReport | None) -> str:
    """The ExactnessReport in a line."""
    if report is None:
        return "Not compared: is an answer the same alone and in a batch? Give examples to know."
    largest = "" if report.largest_difference is None else f"largest difference {report.largest_difference:.2g}; "
    told = "the same" if report.exact else "NOT the same"
    return (
        f"An item gets {told} answer alone and in a batch of {report.batch_size} ({largest}up to "
        f"{report.tolerance:.2g} counts as rounding)"
    )


def _rules(limits: Limits) -> str:
    waits = "" if limits.max_queue_delay is None else f", delay {format_seconds(limits.max_queue_delay)} at most"
    budget = "" if limits.token_budget is None else f", {format_number(limits.token_budget)} padded tokens"
    reason = f" ({limits.reason})" if limits.reason else ""
    return (
        f"policy {limits.policy}{waits}; batches of up to {limits.max_batch_size}{budget}{reason}; "
        f"{limits.max_queue} may wait"
    )


def _model_document(each: Served, served: Sequence[Served]) -> dict[str, Any]:
    head = {
        "name": each.name,
        "model": each.text,
        "kind": each.kind,
        "path": path_of(each, served),
        "takes": each.takes,
    }
    limits = each.engine.limits
    if each.kind == LANGUAGE_MODEL:
        return head | dict(limits.to_json())
    report = each.engine.report
    return head | {
        "policy": limits and limits.policy,
        "max_batch_size": limits and limits.max_batch_size,
        "max_queue_delay": limits and limits.max_queue_delay,
        "max_queue": limits and limits.max_queue,
        "token_budget": limits and limits.token_budget,
        "reason": limits and limits.reason,
        "exact": report and report.exact,
        "largest_difference": report and report.largest_difference,
    }


def _item(each: Served) -> str:
    """An example as JSON; dots where there is none or it is long."""
    examples: tuple[Any, ...] = getattr(each.engine, "examples", ())
    if not examples:
        return '{"item": ...}'
    item = examples[0]
    try:
        text = json.dumps({"item": item.tolist() if hasattr(item, "tolist") else item})
    except (TypeError, ValueError):
        return '{"item": ...}'
    return text if len(text) <= SHORT and "'" not in text else '{"item": ...}'
