"""The machine and the run as a table."""

from __future__ import annotations

from collections.abc import Iterable

from microbatch.curves.profile import Environment, Profile
from microbatch.reporting import wording
from microbatch.reporting.table import Table, duration, percent
from microbatch.reporting.wording import clean, short
from microbatch.units import format_bytes, format_number, format_rate


def environment(profile: Profile) -> Table:
    """The machine and the run, as far as they are known."""
    rows = tuple((name, value) for name, value in (*_machine(profile.environment), *_run(profile)) if value)
    return Table(title="Environment", columns=("what", "value"), rows=rows, words=("value",))


def _machine(machine: Environment) -> Iterable[tuple[str, str]]:
    yield "device", clean(machine.device)
    yield "threads", _of(machine.threads, machine.cores, "cores")
    yield "memory", "" if machine.memory_bytes is None else format_bytes(machine.memory_bytes)
    loads = ((machine.load_before, "before"), (machine.load_after, "after"))
    yield "load of the machine", ", ".join(f"{load:.2f} {when}" for load, when in loads if load is not None)
    yield "CPU used by other processes", percent(machine.busy_elsewhere)
    yield "CPU taken by other machines", percent(machine.steal)
    yield "clock", _span([format_rate(clock, "Hz").removesuffix("/s") for clock in machine.clock_hz])
    yield "throttled", "" if machine.throttled is None else ("yes" if machine.throttled else "no")
    for name, value in (*machine.versions.items(), *machine.settings.items()):
        yield short(name), clean(value)


def _run(profile: Profile) -> Iterable[tuple[str, str]]:
    peaks = profile.peaks
    source = f" ({clean(peaks.source)})" if peaks.source else ""
    yield "peak", "" if peaks.flops is None else format_rate(peaks.flops, "FLOP") + source
    yield "bandwidth", "" if peaks.bandwidth is None else format_rate(peaks.bandwidth, "B") + source
    yield "weights", "" if profile.weight_bytes is None else format_bytes(profile.weight_bytes)
    yield f"{wording.unit_of(profile)} timed", format_number(profile.timed_rows) if profile.timed_rows else ""
    yield "duration of the run", duration(profile.wall_seconds)
    compiled = f"{profile.compile_count} ×, {duration(profile.compile_seconds)}"
    yield "compiled", compiled if profile.compile_count else ""
    yield "ended by", profile.stopped_by


def _span(values: list[str]) -> str:
    return " → ".join(value for value, previous in zip(values, [None, *values]) if value != previous)


def _of(part: int | None, whole: int | None, what: str) -> str:
    if part is None:
        return ""
    return str(part) if whole is None else f"{part} of {whole} {what}"
