"""Results as plain text: a summary to read in ten seconds, and the details behind it."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from microbatch.curves.explanation import Explanation
from microbatch.curves.profile import Profile
from microbatch.errors import InvalidSettings
from microbatch.hardware.device_spec import DeviceSpec
from microbatch.reporting import exactness, micro_batches, prediction_wording, wording, zone_wording
from microbatch.reporting.table import Table
from microbatch.reporting.tables import tables
from microbatch.units import DTYPE_BYTES, format_bytes, format_number, format_percent, format_rate, format_seconds

if TYPE_CHECKING:
    from microbatch.pipeline.run_report import PipelineRun
    from microbatch.pipeline.timeline import Timeline
    from microbatch.profiling.compare import Change, Comparison, Shift
    from microbatch.serving.decisions.dry_run import DryRun
    from microbatch.web.load.result import LoadReport

WIDTH = 116
"""Columns that a line of a summary aims for."""


def to_text(result: object) -> str:
    """The result as lines of text, without colour and without a newline at the end.

    Args:
        result: an Explanation, a Comparison, a Profile, a DeviceSpec, an ExactnessReport, a Timeline or a LoadReport.

    Raises:
        InvalidSettings: the result has no form as text.
    """
    name = type(result).__name__
    write = _FORMS.get(name)
    if write is None:
        raise InvalidSettings(f"A {name} has no form as text.", f"These have one: {', '.join(_FORMS)}.")
    return "\n".join(write(result))


def to_details(explanation: Explanation) -> str:
    """All that stands behind a summary: each table, why utilisation rose or not, and the warnings."""
    parts = ["\n".join(align(table)) for table in tables(explanation)]
    if explanation.utilisation:
        parts.append(_titled("Utilisation", _wrapped(wording.clean(explanation.utilisation))))
    if told := wording.notes(explanation):
        parts.append(_titled("Notes", "\n".join(_wrapped(note) for note in told)))
    return "\n\n".join(parts)


def align(table: Table) -> list[str]:
    """A title, a line of column names, and the rows with numbers to the right and words to the left."""
    grid = [table.columns, *table.rows]
    widths = [max(len(row[column]) for row in grid) for column in range(len(table.columns))]
    left = {column for column in range(len(widths)) if table.is_left(column)}
    lines = ["  " + "  ".join(_cell(cell, widths[i], i in left) for i, cell in enumerate(row)).rstrip() for row in grid]
    return [table.title, *lines, *([f"  {table.note}"] if table.note else [])]


def _cell(text: str, width: int, left: bool) -> str:
    return text.ljust(width) if left else text.rjust(width)


def _titled(title: str, body: str) -> str:
    return f"{title}\n{body}"


def _wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent="  ", subsequent_indent="  ", break_long_words=False)


def _explanation(explanation: Explanation) -> Iterable[str]:
    yield from _cut(explanation)
    told = f"{wording.headline(explanation)}  {wording.outcome(explanation)}     {wording.trust(explanation)}"
    yield told if explanation.micro_batches is None else f"A batch in one piece: {told[0].lower()}{told[1:]}"
    yield from _flow([str(fact) for fact in (*wording.facts(explanation), *prediction_wording.facts(explanation))])
    if limit := wording.limit(explanation):
        yield f"  {limit}"
    yield from zone_wording.zones(explanation)
    yield wording.binding(explanation)
    yield from prediction_wording.lines(explanation)
    for note in wording.notes(explanation):
        yield f"Note: {note}"


def _cut(explanation: Explanation) -> Iterable[str]:
    """The global batch in micro-batches, where one was given."""
    found = explanation.micro_batches
    if found is None:
        return
    yield f"{micro_batches.headline(explanation, found)}  {micro_batches.outcome(explanation, found)}"
    yield f"  {micro_batches.reason(found)}"
    yield from align(micro_batches.micro_batch_table(explanation, micro_batches.LINES_OF_SIZES))


def _flow(items: list[str]) -> Iterable[str]:
    """Items side by side, a new line where they would grow too long."""
    line = " "
    for item in items:
        if len(line) + 3 + len(item) > WIDTH and line.strip():
            yield line
            line = " "
        line += f"{'   ' if line.strip() else ' '}{item}"
    yield line


def _comparison(comparison: Comparison) -> Iterable[str]:
    least = format_percent(comparison.threshold)
    yield from _changes(f"slower by {least} or more", comparison.regressions)
    yield from _changes(f"faster by {least} or more", comparison.improvements)
    for text, value in (("Noise of one sample", comparison.noise), ("Found half of the time", comparison.detectable)):
        if value is not None:
            yield f"{text}: {format_percent(value)}."
    yield f"All sizes together: {_ratio(comparison.common)}."
    yield from (f"Note: {wording.clean(warning)}" for warning in comparison.warnings)


def _changes(kind: str, changes: tuple[Change, ...]) -> Iterable[str]:
    if not changes:
        yield f"No size is {kind}."
        return
    yield f"{len(changes)} {'size is' if len(changes) == 1 else 'sizes are'} {kind}:"
    for change in changes:
        yield f"  batch {format_number(change.batch_size)}: {_ratio(change)}"


def _ratio(change: Change | Shift) -> str:
    known = change.low is not None and change.high is not None
    interval = f"{change.low:.3f}-{change.high:.3f}" if known else "no interval"
    return f"{change.ratio:.3f} × the time ({interval})"


def _profile(profile: Profile) -> Iterable[str]:
    rows = [_profile_row(size, profile) for size in profile.batch_sizes]
    columns = ("batch size", "fastest", f"{wording.unit_of(profile)}/s", "samples")
    yield from align(Table(title=wording.title(profile), columns=columns, rows=tuple(rows)))


def _profile_row(batch_size: int, profile: Profile) -> tuple[str, ...]:
    samples = next(point.samples for point in profile.points if point.batch_size == batch_size)
    fastest = min(samples)
    rate = wording.rounded(batch_size / fastest)
    return format_number(batch_size), format_seconds(fastest), rate, format_number(len(samples))


def _device(device: DeviceSpec) -> Iterable[str]:
    rows = tuple(
        (name, format_rate(flops, "FLOP"), _ridge(name, flops, device)) for name, flops in device.flops.items()
    )
    yield from align(Table(title=device.name, columns=("dtype", "dense peak", "ridge"), rows=rows))
    facts = (
        ("bandwidth", format_rate(device.bandwidth, "B")),
        ("memory", _bytes(device.memory_bytes)),
        ("cache", _bytes(device.cache_bytes)),
        ("multiprocessors", "" if device.multiprocessors is None else str(device.multiprocessors)),
        ("link bandwidth", "" if device.link_bandwidth is None else format_rate(device.link_bandwidth, "B")),
        ("launch", "" if device.launch_seconds is None else format_seconds(device.launch_seconds)),
    )
    yield from (f"  {name}: {value}" for name, value in facts if value)
    yield from (f"  source of {wording.clean(name)}: {wording.clean(text)}" for name, text in device.sources.items())


def _ridge(dtype: str, flops: float, device: DeviceSpec) -> str:
    """b* = s·F/(2·BW): the batch at which reading a weight of s bytes takes as long as its 2 FLOPs per item."""
    size = DTYPE_BYTES.get(dtype)
    return "" if size is None else format_number(round(size * flops / (2 * device.bandwidth)))


def _bytes(count: int | None) -> str:
    return "" if count is None else format_bytes(count)


def _timeline(timeline: Timeline) -> Iterable[str]:
    from microbatch.reporting.timeline_text import lines

    return lines(timeline)


def _pipeline_run(run: PipelineRun) -> Iterable[str]:
    from microbatch.reporting.pipeline_run_text import lines

    return lines(run)


def _load(report: LoadReport) -> Iterable[str]:
    from microbatch.reporting.load_text import lines

    return lines(report)


def _dry_run(result: DryRun) -> Iterable[str]:
    from microbatch.reporting.dry_run_text import lines

    return lines(result)


_FORMS: dict[str, Callable[[Any], Iterable[str]]] = {
    "Explanation": _explanation,
    "Comparison": _comparison,
    "Profile": _profile,
    "DeviceSpec": _device,
    "ExactnessReport": exactness.lines,
    "Timeline": _timeline,
    "PipelineRun": _pipeline_run,
    "DryRun": _dry_run,
    "LoadReport": _load,
}
"""Forms by the name of the class, so that showing a device does not load what compares profiles."""
