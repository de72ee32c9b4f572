"""What a run of load showed, as plain numbers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from typing import Any

from microbatch.notebook import notebook_form
from microbatch.web.load.tally import Tally
from microbatch.web.load.verdict import void_reason

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One load. Rates per second, times in seconds; None is unknown or not asked for.

    Attributes:
        clients: of a closed loop, each of which asks again as soon as it has its answer.
        rate: of an open loop, as asked for.
        offered: of an open loop, as it came out; random traffic differs from its rate.
        seconds: of the window that rates are taken over.
        requests: that were measured and came to an end.
        errors: those without an answer of success, by status, or ``timeout``, ``connection``, ``not HTTP``.
        samples: what the server said with the first of each.
        throughput: answers a second.
        goodput: answers within the target a second.
        latency: p50, p90, p99 and max of the answers, from the moment a request was due; quantiles within 0.5 %.
        histogram: (upper edge, answers below it) of the buckets that are not empty.
        client_cpu: share of one core that the client used.
        late: requests sent more than a millisecond after they were due, since the client itself was busy.
        lateness: p99 and worst of these delays.
        waited_for_connection: requests that found every connection busy; their wait counts as latency.
        connections: that were open at once.
        backlog_growth: of an open loop: by how much more requests waited when the last was due than at the start.
        void: why these are figures of the client and not of the server; empty where they are the server's.
        interrupted: ended before its time.
    """

    clients: int | None
    rate: float | None
    offered: float | None
    seconds: float
    requests: int
    errors: dict[str, int]
    samples: dict[str, str]
    throughput: float
    goodput: float | None
    latency: dict[str, float | None]
    histogram: tuple[tuple[float, int], ...]
    client_cpu: float
    late: int
    lateness: dict[str, float | None]
    waited_for_connection: int
    connections: int
    backlog_growth: int | None
    void: str = ""
    interrupted: bool = False

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists and numbers."""
        document = dataclasses.asdict(self)
        document["histogram"] = [list(row) for row in self.histogram]
        document["late"] = {"requests": self.late, **document.pop("lateness")}
        return document | {"void": self.void or None}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """All runs against one server.

    Attributes:
        url: as it was asked.
        traffic: poisson, uniform, bursts or a file; None for closed loops.
        target: seconds that `goodput` holds answers to.
        runs: in the order in which they ran.
        verdict: one sentence.
    """

    url: str
    traffic: str | None
    target: float | None
    runs: tuple[Run, ...]
    verdict: str

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists and numbers; of a single run its figures stand at the top, of several in ``runs``."""
        about = {"schema_version": 1, "url": self.url, "traffic": self.traffic, "target": self.target}
        runs = [run.to_json() for run in self.runs]
        return about | {"verdict": self.verdict} | (runs[0] if len(runs) == 1 else {"runs": runs})

    def _repr_html_(self) -> str | None:
        return notebook_form(self)


def run_of(
    tally: Tally,
    *,
    clients: int | None,
    rate: float | None,
    cpu_seconds: float,
    elapsed: float,
    connections: int,
    interrupted: bool = False,
) -> Run:
    """The figures of one run.

    Args:
        tally: as it ended.
        clients, rate: whichever was asked for.
        cpu_seconds: that the client used since the start of the window.
        elapsed: seconds since then; shorter than the window where the run was interrupted.
        connections: that were open at once.
        interrupted: by the user.
    """
    whole = tally.last if tally.window is None else min(tally.window, elapsed)
    seconds = max(whole, 1e-9)
    is_open = clients is None
    due_for = max(min(tally.until, elapsed), 1e-9)
    run = Run(
        clients=clients,
        rate=rate,
        offered=tally.due / due_for if is_open else None,
        seconds=seconds,
        requests=tally.requests,
        errors=dict(sorted(tally.errors.items())),
        samples={status: text for status, text in sorted(tally.samples.items()) if text},
        throughput=tally.answered / seconds,
        goodput=None if tally.target is None else tally.good / seconds,
        latency={name: tally.latency.quantile(share) for name, share in QUANTILES.items()},
        histogram=tally.latency.rows(),
        client_cpu=cpu_seconds / elapsed if elapsed > 0 else 0.0,
        late=tally.late,
        lateness={"p99": tally.lateness.quantile(0.99), "worst": tally.lateness.quantile(1.0)},
        waited_for_connection=tally.waited,
        connections=connections,
        backlog_growth=tally.due - tally.ended if is_open else None,
        interrupted=interrupted,
    )
    return replace(run, void=void_reason(run))
