"""The tables of a report: the terminal aligns them, the page lays them out."""

from __future__ import annotations

from collections.abc import Iterable

from microbatch.curves.explanation import Binding, Cliff, Explanation
from microbatch.curves.profile import ExpertLoad, Layer, MemoryCurve, Point, Profile
from microbatch.reporting import wording, zone_wording
from microbatch.reporting.beside_table import beside_table
from microbatch.reporting.environment_table import environment
from microbatch.reporting.micro_batches import micro_batch_table
from microbatch.reporting.surface import surface_table
from microbatch.reporting.table import Table, duration, percent, without_empty
from microbatch.reporting.wording import clean, rounded, short
from microbatch.units import format_bytes, format_number, format_percent, format_rate, format_seconds

MOST_ROWS = 200
"""A table of sizes shows at most so many rows; the data behind the page or the JSON holds all of them."""


def tables(explanation: Explanation) -> list[Table]:
    """Every table that has something to show, in the order of the report."""
    return [*about_the_cut(explanation), *about_sizes(explanation), *about_the_run(explanation)]


def about_the_cut(explanation: Explanation) -> list[Table]:
    """A global batch in micro-batches of each size, where one was given."""
    return _filled(micro_batch_table(explanation))


def about_sizes(explanation: Explanation) -> list[Table]:
    """What to avoid and what to pad."""
    profile = explanation.profile
    return _filled(
        zones(explanation), falls(explanation), padding(explanation), surface_table(profile), beside_table(explanation)
    )


def about_the_run(explanation: Explanation) -> list[Table]:
    """What stands behind the advice: memory, layers, experts, the machine, and every size."""
    profile = explanation.profile
    return _filled(
        memory(profile), layers(profile), experts(profile), failures(profile), environment(profile), points(explanation)
    )


def _filled(*built: Table) -> list[Table]:
    return [table for table in built if table.rows]


def zones(explanation: Explanation) -> Table:
    """One row for each cliff."""
    unit = explanation.profile.unit
    rows = tuple(_zone(cliff, unit) for cliff in explanation.cliffs)
    words = ("price", "why", "instead")
    return Table(
        title="Sizes to avoid", columns=("sizes", "price", "time per item", *words[1:]), rows=rows, words=words
    )


def _zone(cliff: Cliff, unit: str) -> tuple[str, ...]:
    excess = f"× {rounded(cliff.excess)}"
    if cliff.excess_low is not None and cliff.excess_high is not None:
        excess += f" ({rounded(cliff.excess_low)}-{rounded(cliff.excess_high)})"
    reason = zone_wording.because(cliff.cause, cliff.evidence)
    why = " ".join(part for part in (reason, zone_wording.edge(cliff)) if part)
    zone = wording.sizes(cliff.batch_size, cliff.to_size)
    return zone, zone_wording.price(cliff, unit), excess, why, zone_wording.advice(cliff)


def falls(explanation: Explanation) -> Table:
    """Sizes where the time falls although the batch grows."""
    rows = tuple(
        (
            wording.sizes(drop.from_size, drop.batch_size),
            f"× {rounded(drop.ratio)}",
            zone_wording.because(drop.cause, drop.evidence),
        )
        for drop in explanation.drops
    )
    return Table(title="Sizes where the time falls", columns=("sizes", "time", "why"), rows=rows, words=("why",))


def padding(explanation: Explanation) -> Table:
    """Sizes that get faster when they are filled up to a larger one."""
    rows = tuple(
        (format_number(row.batch_size), format_number(row.pad_to), format_percent(row.saves))
        for row in explanation.padding
    )
    period = f"Time repeats with a period of {explanation.period}." if explanation.period else ""
    return Table(title="Sizes worth padding", columns=("batch size", "pad to", "saves"), rows=rows, note=period)


def memory(profile: Profile) -> Table:
    """What memory is spent on, and what it allows."""
    curve = profile.memory
    if curve is None:
        return Table(title="Memory", columns=("what", "value"), rows=())
    told = _memory_rows(curve, profile.unit, predicted=profile.source == "predicted")
    note = profile.prediction.memory_method if profile.prediction else ""
    rows = tuple((name, value) for name, value in told if value)
    return Table(title="Memory", columns=("what", "value"), rows=rows, note=f"Found {note}." if note else "")


def _memory_rows(curve: MemoryCurve, unit: str, *, predicted: bool) -> Iterable[tuple[str, str]]:
    yield "fixed, whatever the batch", format_bytes(curve.fixed_bytes)
    for name, size in curve.parts.items():
        yield f"· {short(name)}", format_bytes(size)
    yield f"for each of the {short(unit, 20)}", format_bytes(curve.bytes_per_item)
    yield f"limit ({short(curve.limit_source) or 'source unknown'})", format_bytes(curve.limit_bytes)
    yield "kept free", format_percent(curve.margin)
    if not predicted:
        yield "largest batch run that fits", _count(curve.largest_that_fits)
    yield "largest batch predicted, not run", _count(curve.predicted_largest)


def layers(profile: Profile) -> Table:
    """One row for each layer: weights, FLOPs, and its time at each layer batch size."""
    timed = profile.layer_batch_sizes if all(layer.seconds for layer in profile.layers) else ()
    repeated = any(layer.repeat > 1 for layer in profile.layers)
    columns = ["layer", *(["×"] if repeated else []), "kind", "weights", f"FLOP per {_one(profile.unit)}"]
    for size in timed:
        columns += [f"time at {format_number(size)}", "share"]
    weight_columns = [wording.layer_weights(profile, size)[0] for size in timed]
    rows = [
        _layer(layer, repeated, [(column[index], sum(column)) for column in weight_columns])
        for index, layer in enumerate(profile.layers)
    ]
    return Table(title="Layers", columns=tuple(columns), rows=tuple(rows))


def _layer(layer: Layer, repeated: bool, times: list[tuple[float, float]]) -> tuple[str, ...]:
    shares = [
        cell for own, total in times for cell in (format_seconds(own), format_percent(own / total) if total else "")
    ]
    flops = format_rate(layer.flops_per_item, "FLOP").removesuffix("/s")
    number = (format_number(layer.repeat),) if repeated else ()
    return short(layer.name), *number, short(layer.kind, 32), format_bytes(layer.parameter_bytes), flops, *shares


def _one(unit: str) -> str:
    return short(unit, 20).removesuffix("s")


def experts(profile: Profile) -> Table:
    """How evenly each layer of experts was loaded, and what the unevenness cost."""
    columns = ("layer", "batch size", "tokens", "busiest ÷ mean", "experts hit", "dropped", "time", "lost to imbalance")
    return without_empty("Experts", columns, [_expert(load) for load in profile.routing])


def _expert(load: ExpertLoad) -> tuple[str, ...]:
    lost = ""
    if load.seconds is not None and load.even_seconds is not None:
        lost = _signed_seconds(load.seconds - load.even_seconds)
    return (
        short(load.layer), format_number(load.batch_size), format_number(load.tokens), rounded(load.load_factor),
        f"{load.distinct_experts} of {len(load.tokens_per_expert)}", _count(load.dropped or None),
        duration(load.seconds), lost,
    )  # fmt: skip


def points(explanation: Explanation) -> Table:
    """Every size, or an even choice of them when there are very many."""
    raw = {point.batch_size: point for point in explanation.profile.points}
    chosen = _choose(explanation)
    measured = explanation.profile.source != "predicted"
    rows = [_point(point, raw[point.batch_size], measured) for point in chosen]
    columns = (
        "batch size", "time", "90 % interval", f"{wording.unit_of(explanation.profile)}/s", "of peak FLOP/s",
        "of bandwidth", "no operator runs", "bound", "peak memory", "first call", "samples",
    )  # fmt: skip
    left = len(explanation.points) - len(chosen)
    note = f"{len(chosen)} of {len(explanation.points)} sizes are shown; the JSON has all of them." if left else ""
    return without_empty("All sizes", columns, rows, note)


def _choose(explanation: Explanation) -> list[Binding]:
    every = explanation.points
    if len(every) <= MOST_ROWS:
        return list(every)
    even = {every[round(step * (len(every) - 1) / (MOST_ROWS - 1))].batch_size for step in range(MOST_ROWS)}
    return [point for point in every if point.batch_size in even | {explanation.recommended.batch_size}]


def _point(point: Binding, raw: Point, measured: bool) -> tuple[str, ...]:
    interval = ""
    if point.low is not None and point.high is not None:
        interval = f"{format_seconds(point.low)} - {format_seconds(point.high)}"
    return (
        format_number(point.batch_size), format_seconds(point.seconds), interval, rounded(point.throughput),
        percent(point.compute_utilisation), percent(point.bandwidth_utilisation), percent(point.overhead_share),
        point.bound, "" if raw.peak_bytes is None else format_bytes(raw.peak_bytes), duration(raw.first_call_seconds),
        format_number(len(raw.samples)) if measured else "",
    )  # fmt: skip


def failures(profile: Profile) -> Table:
    """The sizes that did not run, and why."""
    rows = tuple(
        (format_number(failure.batch_size), failure.kind.replace("_", " "), clean(failure.text))
        for failure in profile.failures
    )
    return Table(
        title="Sizes that did not run", columns=("batch size", "what", "message"), rows=rows, words=("message",)
    )


def _signed_seconds(seconds: float) -> str:
    return f"{'-' if seconds < 0 else ''}{format_seconds(abs(seconds))}"


def _count(number: int | None) -> str:
    return "" if number is None else format_number(number)
