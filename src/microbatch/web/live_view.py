"""What the live page shows of a model, as words and shares of a picture: the page only puts it in place.

Plain functions of `Metrics` and of the seconds before. No clock, no thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple, Protocol

from microbatch.serving.decisions.latency import row_of
from microbatch.serving.decisions.metrics import LaunchRecord, Metrics
from microbatch.units import format_duration, format_number, format_percent, format_seconds
from microbatch.web.live_axes import Axis, curve_axes, top_of

WINDOW = 5.0
"""Seconds over which rates are taken."""
SHOWN = 60
"""Looks, about one per second, that the pictures of the last minute hold."""
MOST_BARS = 10
"""Batch sizes that get a bar each; more are put together in octaves."""
QUIET = 10.0
"""Seconds without a launch after which a server is called idle."""

View = dict[str, Any]


class Ready(Protocol):
    """Metrics of any engine."""

    @property
    def ready(self) -> bool:
        """Whether requests are welcome."""
        ...

    @property
    def draining(self) -> bool:
        """Whether it is about to stop."""
        ...


class Look(NamedTuple):
    """What is kept of a moment. `p50` and `p99` are None while nothing has been answered since the look before."""

    at: float
    answered: int
    failed: int
    refused: int
    expired: int
    batches: int
    busy: float
    waiting: int
    p50: float | None
    p99: float | None


def look_at(metrics: Metrics, before: Look | None) -> Look:
    """The moment."""
    fresh = before is not None and metrics.answered > before.answered
    latency = metrics.latency if fresh else {}
    return Look(
        metrics.uptime, metrics.answered, metrics.failed, metrics.refused, metrics.expired, metrics.batches,
        metrics.busy_seconds, metrics.waiting, latency.get("p50"), latency.get("p99"),
    )  # fmt: skip


class Rates(NamedTuple):
    """Per second over the last `WINDOW`; `busy` is the share of the workers' time, `batch` the mean size."""

    answered: float
    failed: float
    refused: float
    expired: float
    busy: float
    batch: float | None


def rates_of(looks: Sequence[Look], workers: int) -> Rates | None:
    """From the oldest look within the window to the newest; None before there are two."""
    last = looks[-1]
    first = next(look for look in looks if look.at >= last.at - WINDOW)
    seconds = last.at - first.at
    if seconds <= 0:
        return None
    batches, ended = last.batches - first.batches, last.answered + last.failed - first.answered - first.failed
    return Rates(
        answered=(last.answered - first.answered) / seconds,
        failed=(last.failed - first.failed) / seconds,
        refused=(last.refused - first.refused) / seconds,
        expired=(last.expired - first.expired) / seconds,
        busy=min(1.0, (last.busy - first.busy) / (seconds * max(1, workers))),
        batch=ended / batches if batches else None,
    )


def starting(name: str) -> View:
    """A model that cannot be asked yet."""
    return {
        "name": name, "state": {"word": "starting", "kind": "wait"}, "sentence": "The model is loaded and measured.",
        "alerts": [], "facts": [], "history": None, "sizes": None, "reasons": None, "tenants": None, "curve": None,
        "counts": [], "about": "",
    }  # fmt: skip


def view_of(name: str, metrics: Metrics, looks: Sequence[Look]) -> View:
    """Everything about a model.

    Args:
        name: of the model.
        metrics: now.
        looks: the moments up to now, oldest first; at least the one of `metrics`.
    """
    rates = rates_of(looks, metrics.workers)
    return {
        "name": name,
        "state": state_of(metrics),
        "sentence": sentence_of(metrics, rates),
        "alerts": alerts_of(metrics, rates),
        "facts": facts_of(metrics, rates),
        "history": history_of(looks),
        "sizes": sizes_of(metrics.launches),
        "reasons": reasons_of(metrics.launches),
        "tenants": tenants_of(metrics),
        "curve": curve_of(metrics),
        "counts": counts_of(metrics),
        "about": f"Policy {metrics.policy}. Up for {format_duration(metrics.uptime)}.",
    }


def state_of(metrics: Ready) -> dict[str, str]:
    """One word, and whether that is good, a passing state, or bad."""
    if metrics.draining:
        return {"word": "draining", "kind": "wait"}
    if not metrics.ready:
        return {"word": "not ready", "kind": "bad"}
    return {"word": "ready", "kind": "good"}


def sentence_of(metrics: Metrics, rates: Rates | None) -> str:
    """What the server is doing, for whoever reads nothing else."""
    if metrics.draining:
        left = _items(metrics.waiting + metrics.running)
        return f"About to stop. Still to be answered: {left}; new ones are refused."
    if not metrics.workers_alive:
        return "No worker is alive; one is being started again."
    if not metrics.launches:
        return "The first batch is running." if metrics.accepted else "No request yet."
    if rates is None:
        return "Requests are being counted …"
    if not rates.answered:
        return "No item gets a result." if rates.failed or rates.refused or rates.expired else _quiet(metrics)
    batches = f", in batches of {format_number(rates.batch)}" if rates.batch and rates.batch >= 1.05 else ", one by one"
    return f"{format_number(rates.answered)} items per second{batches}."


def _quiet(metrics: Metrics) -> str:
    last = metrics.launches[-1]
    silence = metrics.uptime - last.at - last.seconds
    if metrics.waiting or metrics.running:
        return f"A batch is running; the last one took {format_seconds(last.seconds)}."
    return f"Idle. The last request was answered {format_duration(silence)} ago." if silence > QUIET else "Idle."


def alerts_of(metrics: Metrics, rates: Rates | None) -> list[str]:
    """What needs a person, one sentence each: of the last seconds first, then what is so all the time."""
    found = []
    if rates is not None and rates.refused:
        found.append(f"The queue is full: {format_number(rates.refused)} items per second are refused.")
    if rates is not None and rates.failed:
        found.append(f"{format_number(rates.failed)} items per second fail. Their errors are in the log.")
    if rates is not None and rates.expired:
        found.append(f"{format_number(rates.expired)} items per second miss their deadline.")
    if metrics.workers_alive < metrics.workers:
        found.append(f"{metrics.workers_alive} of {metrics.workers} workers are alive.")
    target, p99 = metrics.latency_target, metrics.latency.get("p99")
    if rates is not None and rates.answered and target is not None and p99 is not None and p99 > target:
        found.append(f"One answer in a hundred takes {format_seconds(p99)}; the target is {format_seconds(target)}.")
    if metrics.size_limit < metrics.max_batch_size:
        found.append(f"Memory ran out: batches have at most {metrics.size_limit} items now.")
    return [*found, *metrics.notes]


def facts_of(metrics: Metrics, rates: Rates | None) -> list[dict[str, str]]:
    """The figures in large."""
    latency, recent = metrics.latency, f"of the last {format_number(min(metrics.answered, 1000))} answers"
    target = metrics.latency_target
    half, most = (format_seconds(latency[key]) if latency else "–" for key in ("p50", "p99"))
    return [
        fact("throughput", f"{format_number(rates.answered)} /s" if rates else "…", "items answered per second"),
        fact("p50 latency", half, f"half are faster, {recent}"),
        fact("p99 latency", most, f"target {format_seconds(target)}" if target else "1 in 100 is slower"),
        fact("batch size", format_number(rates.batch) if rates and rates.batch else "–",
              f"mean; at most {format_number(metrics.max_batch_size)}"),
        fact("queue", format_number(metrics.waiting),
              f"waiting, of at most {format_number(metrics.max_queue)}; {format_number(metrics.running)} running"),
        fact("workers busy", format_percent(rates.busy) if rates else "…",
              f"{metrics.workers_alive} of {metrics.workers} alive"),
    ]  # fmt: skip


def fact(label: str, value: str, hint: str) -> dict[str, str]:
    """One figure in large, with what it is of."""
    return {"label": label, "value": value, "hint": hint}


def history_of(looks: Sequence[Look]) -> View:
    """The last minute: answers per second, and latency; newest last, missing seconds None."""
    pairs = list(pairwise(looks))[-SHOWN:]
    rates = [(b.answered - a.answered) / (b.at - a.at) if b.at > a.at else None for a, b in pairs]
    lines = {"p50": [b.p50 for _, b in pairs], "p99": [b.p99 for _, b in pairs]}
    rate_top = top_of(rates, least=1.0)
    time_top = top_of([*lines["p50"], *lines["p99"]], least=1e-3)
    return {
        "shown": SHOWN,
        "throughput": {"top": f"{format_number(rate_top)} /s", "points": _shares(rates, rate_top)},
        "latency": {
            "top": format_seconds(time_top),
            "lines": {name: _shares(values, time_top) for name, values in lines.items()},
        },
    }


def _shares(values: Sequence[float | None], top: float) -> list[float | None]:
    return [None if value is None else round(value / top, 4) for value in values]


def sizes_of(launches: Sequence[LaunchRecord]) -> View:
    """Which batch sizes the last launches had."""
    sizes = Counter(record.size for record in launches)
    if len(sizes) > MOST_BARS:
        octaves = Counter[int]()
        for size, count in sizes.items():
            octaves[size.bit_length()] += count
        rows = [(_octave(bits), octaves[bits]) for bits in sorted(octaves)]
    else:
        rows = [(str(size), sizes[size]) for size in sorted(sizes)]
    return _bars(rows, len(launches))


def _octave(bits: int) -> str:
    low, high = 1 << (bits - 1), (1 << bits) - 1
    return str(low) if low == high else f"{low}–{high}"


def reasons_of(launches: Sequence[LaunchRecord]) -> View:
    """Why the last launches were made, the usual reason first."""
    return _bars(Counter(record.reason for record in launches).most_common(MOST_BARS), len(launches))


def tenants_of(metrics: Metrics) -> View | None:
    """Whose work was launched; None where nobody is told apart."""
    if not metrics.tenants:
        return None
    served = Counter({name: tenant.served for name, tenant in metrics.tenants.items()})
    return _bars(served.most_common(MOST_BARS), max(1, served.total()))


def _bars(rows: Sequence[tuple[str, int]], total: int) -> View:
    return {
        "of": f"the last {format_number(total)} batches" if total > 1 else "the first batch" if total else "",
        "rows": [
            {"label": label, "value": format_percent(count / total), "share": round(count / total, 4)}
            for label, count in rows
        ],
    }


def curve_of(metrics: Metrics) -> View | None:
    """The expected time of a batch by its size, and what the last ones of each size took; None before it is known."""
    if not metrics.curve:
        return None
    ran = _taken(metrics.launches)
    points = [*metrics.curve, *((cost, seconds) for cost, (seconds, _) in ran.items())]
    across, up = curve_axes(points)
    most = max((count for _, count in ran.values()), default=1)
    items = all(record.cost == record.size for record in metrics.launches)
    return {
        "title": f"Time of a batch by its {'size' if items else 'work'}",
        "line": _places(across, up, metrics.curve),
        "dots": [
            {"x": across.place(cost), "y": up.place(seconds), "share": round(count / most, 4)}
            for cost, (seconds, count) in ran.items()
        ],
        "across": across.ticks_as(format_number),
        "up": up.ticks_as(format_seconds),
        "says": _best(metrics.curve),
    }


def _taken(launches: Sequence[LaunchRecord]) -> Mapping[int, tuple[float, int]]:
    """Median seconds and number of the launches of each row of the table, those with a failed call left out."""
    taken: dict[int, list[float]] = {}
    for record in launches:
        if record.calls == 1:
            taken.setdefault(row_of(record.cost), []).append(record.seconds)
    return {cost: (median(seconds), len(seconds)) for cost, seconds in sorted(taken.items())}


def _places(across: Axis, up: Axis, points: Sequence[tuple[int, float]]) -> list[tuple[float, float]]:
    return [(across.place(cost), up.place(seconds)) for cost, seconds in points]


def _best(curve: Sequence[tuple[int, float]]) -> str:
    (low, alone), (high, full) = curve[0], curve[-1]
    if low == high:
        return f"Only a batch of {format_number(low)} is known: {format_seconds(alone)}."
    return (
        f"A batch of {format_number(low)} takes {format_seconds(alone)}, one of {format_number(high)} "
        f"{format_seconds(full)}: {format_number(high / full / (low / alone))} times the throughput."
    )


def counts_of(metrics: Metrics) -> list[dict[str, str]]:
    """Counts since the start; the rare ones only when they are not zero."""
    always = ("accepted", "answered", "failed", "refused", "batches")
    rare = ("expired", "cancelled", "retries", "out_of_memory", "worker_restarts")
    names = [*always, *(name for name in rare if getattr(metrics, name))]
    return [{"label": name.replace("_", " "), "value": f"{getattr(metrics, name):,}".replace(",", "\u202f")}
            for name in names]  # fmt: skip


def _items(count: int) -> str:
    return f"{format_number(count)} item{'s' if count != 1 else ''}"
