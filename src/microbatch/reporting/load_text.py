"""A load report as text: one sentence, and a table with a row for each run."""

from __future__ import annotations

from collections.abc import Iterable

from microbatch.reporting.table import Table, without_empty
from microbatch.reporting.text import align
from microbatch.reporting.wording import clean
from microbatch.units import format_number, format_percent, format_seconds
from microbatch.web.load.result import LoadReport, Run
from microbatch.web.load.verdict import named, told


def lines(report: LoadReport) -> Iterable[str]:
    """The sentence, the table, and what a reader should mistrust."""
    yield clean(report.verdict)
    if report.runs:
        yield from align(table_of(report))
    yield from (f"Note: {note}" for note in notes(report))


def subject(report: LoadReport) -> str:
    """What was asked, and how."""
    return clean(f"{report.url}, {f'{report.traffic} traffic' if report.traffic else 'closed loop'}")


def table_of(report: LoadReport) -> Table:
    """A row for each run; columns that no run fills are left out."""
    within = "good/s" if report.target is None else f"within {format_seconds(report.target)}"
    columns = ("load", "requests", "answers/s", within, "p50", "p90", "p99", "max", "failed", "client", "")
    return without_empty(subject(report), columns, [_row(run) for run in report.runs])


def _row(run: Run) -> tuple[str, ...]:
    failed = sum(run.errors.values())
    return (
        named(run),
        format_number(run.requests),
        format_number(run.throughput),
        "" if run.goodput is None else f"{format_number(run.goodput)}/s",
        *("" if seconds is None else format_seconds(seconds) for seconds in run.latency.values()),
        format_number(failed) if failed else "",
        format_percent(run.client_cpu),
        "void" if run.void else "interrupted" if run.interrupted else "",
    )


def notes(report: LoadReport) -> list[str]:
    """Errors by status, waits inside of the client, and an early end."""
    found = []
    for run in report.runs:
        if run.errors:
            found.append(f"{named(run)}: {clean(told(run))}.")
        if run.waited_for_connection and run.clients is None:
            count, most = format_number(run.waited_for_connection), format_number(run.connections)
            found.append(f"{named(run)}: {count} requests found all {most} connections busy; see --connections.")
        if run.interrupted:
            found.append(f"{named(run)}: interrupted after {format_seconds(run.seconds)}.")
    return found
