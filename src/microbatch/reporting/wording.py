"""An explanation in words: each sentence is written here once, for the terminal, the page and the notebook."""

from __future__ import annotations

from dataclasses import dataclass
from math import floor, log, log10
from unicodedata import category

from microbatch.curves.explanation import Binding, Explanation
from microbatch.curves.profile import Layer, Profile
from microbatch.units import format_bytes, format_number, format_percent, format_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Fact:
    """One figure of a summary: a label, its value, and in brackets what it rests on."""

    label: str
    value: str
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.label} {self.value}" + (f" ({self.hint})" if self.hint else "")


def clean(text: str) -> str:
    """One line without terminal codes or zero bytes: a name may hold anything. Spaces of every width stay."""
    return "".join(c if c.isprintable() or category(c) == "Zs" else "\ufffd" for c in " ".join(text.splitlines()))


def short(text: str, letters: int = 48) -> str:
    """The text cleaned, and cut with an ellipsis when it is longer than ``letters``."""
    text = clean(text)
    return text if len(text) <= letters else text[: letters - 1] + "…"


def unit_of(profile: Profile) -> str:
    """What one item is called, safe to print."""
    return short(profile.unit, 20)


def rounded(value: float, digits: int = 3) -> str:
    """A figure with three significant digits, groups set apart: 123456.7 → ``123 000``."""
    return format_number(round(value, digits - 1 - floor(log10(abs(value)))) if value else 0.0)


def sizes(first: int, last: int) -> str:
    """``129-160``, or ``136`` when both are the same."""
    return format_number(first) if first == last else f"{format_number(first)}-{format_number(last)}"


def title(profile: Profile) -> str:
    """``mlp, inference, fp32, Xeon``: what was measured, and where."""
    parts = (profile.model or "unnamed model", profile.mode, profile.dtype, profile.environment.device)
    return ", ".join(short(part, 80) for part in parts if part)


def headline(explanation: Explanation) -> str:
    """``Use batch 392.``"""
    chosen = explanation.recommended
    return f"Use batch {format_number(chosen.batch_size)}{'' if chosen.measured else ' (predicted, not run)'}."


def throughput(explanation: Explanation) -> str:
    """``7 020 rows/s``"""
    return f"{rounded(explanation.recommended.throughput)} {unit_of(explanation.profile)}/s"


def memory_share(explanation: Explanation) -> str:
    """``41 % of memory`` at the recommended size; the bytes when no limit is known; empty when not measured."""
    peak = peak_bytes(explanation.profile, explanation.recommended.batch_size)
    memory = explanation.profile.memory
    if peak is None:
        return ""
    return f"{format_percent(peak / memory.limit_bytes)} of memory" if memory else f"{format_bytes(peak)} of memory"


def peak_bytes(profile: Profile, batch_size: int) -> int | None:
    """Peak at one size: measured, else predicted, else None."""
    point = next(point for point in profile.points if point.batch_size == batch_size)
    return point.peak_bytes if point.peak_bytes is not None else point.predicted_peak_bytes


def outcome(explanation: Explanation) -> str:
    """``7 020 rows/s (98 % of best), 56.1 ms, 41 % of memory.``"""
    chosen = explanation.recommended
    share = f"{throughput(explanation)} ({format_percent(chosen.share_of_best)} of best)"
    parts = (share, format_seconds(chosen.seconds), memory_share(explanation))
    return ", ".join(part for part in parts if part) + "."


def noise(explanation: Explanation) -> str:
    """``noise 1.8 %``, or that one time per size gives none."""
    if explanation.noise is None:
        return "no interval: " + ("computed" if explanation.profile.source == "predicted" else "one time per size")
    return f"noise {format_percent(explanation.noise)}"


def trust(explanation: Explanation) -> str:
    """``noise 1.8 %, confidence high``"""
    return f"{noise(explanation)}, confidence {explanation.recommended.confidence}"


def limit(explanation: Explanation) -> str:
    """What keeps the recommended size from being larger; empty when throughput has levelled off or nothing limits."""
    chosen = explanation.recommended
    return "" if chosen.limited_by in ("saturated", "none", "") else clean(chosen.reason)


def facts(explanation: Explanation) -> list[Fact]:
    """The other sizes worth knowing: trade-off, 90 % of best, under the target, largest that fits."""
    candidates = (_trade_off(explanation), _b90(explanation), _target(explanation), _largest(explanation))
    return [fact for fact in candidates if fact]


def ridge(explanation: Explanation) -> str:
    """``ridge 109, 101-118``, or why there is none."""
    found = explanation.ridge
    if found.value is None:
        return "no ridge" + (f": {phrase(found.reason)}" if found.reason else "")
    interval = f", {sizes(round(found.low), round(found.high))}" if found.low and found.high else ", no interval"
    return f"ridge {rounded(found.value)}{interval}{', overhead-bound' if found.overhead_bound else ''}"


def _trade_off(explanation: Explanation) -> Fact:
    size = explanation.balanced
    return Fact(
        label="best trade-off", value="unknown" if size is None else format_number(size), hint=ridge(explanation)
    )


def _b90(explanation: Explanation) -> Fact | None:
    size = explanation.b90
    return None if size is None else Fact(label="90 % of best from", value=format_number(size))


def _target(explanation: Explanation) -> Fact | None:
    target, size = explanation.latency_target, explanation.largest_within_target
    if target is None:
        return None
    label = f"under {format_seconds(target)}:"
    if size is not None:
        return Fact(label=label, value=format_number(size))
    fastest = min(explanation.points, key=lambda point: point.seconds)
    hint = f"the fastest call takes {format_seconds(fastest.seconds)}, at batch {format_number(fastest.batch_size)}"
    return Fact(label=label, value="no size", hint=hint)


def _largest(explanation: Explanation) -> Fact:
    memory = explanation.profile.memory
    if explanation.largest_that_fits is not None:
        return Fact(label="largest that fits:", value=format_number(explanation.largest_that_fits))
    if memory and memory.predicted_largest:
        allowed = rounded(memory.predicted_largest)
        return Fact(label="memory allows about", value=allowed, hint="predicted, not run")
    return Fact(label="largest that fits:", value="unknown", hint="memory was not measured" if not memory else "")


def binding(explanation: Explanation) -> str:
    """``At 392: compute-bound, 81 % of peak. At 1: memory-bound, 76 % of bandwidth. Dominant layer: up (61 %).``"""
    chosen = explanation.point(explanation.recommended.batch_size)
    ends = dict.fromkeys((chosen, explanation.points[0]))
    if not any(point.bound for point in ends):
        told = ["What binds is unknown: " + _why_unbound(explanation.profile)]
    else:
        told = [f"At {format_number(point.batch_size)}: {bound(point)}." for point in ends if point.bound]
    return " ".join(part for part in (*told, dominant(explanation)) if part)


def _why_unbound(profile: Profile) -> str:
    if profile.peaks.flops is None and profile.peaks.bandwidth is None:
        return "the device's peaks were not given."
    return "the operators of the model were not counted."


def bound(point: Binding) -> str:
    """``compute-bound, 81 % of peak``"""
    shares = {
        "compute": (point.compute_utilisation, "of peak"),
        "memory": (point.bandwidth_utilisation, "of bandwidth"),
        "overhead": (point.overhead_share, "of the time no operator runs"),
    }
    kinds = [point.bound] if point.bound in shares else list(shares)
    told = [f"{format_percent(value)} {of}" for value, of in (shares[kind] for kind in kinds) if value is not None]
    name = f"{point.bound}-bound" if point.bound in shares else "bound by several things"
    return ", ".join((name, *told))


def dominant(explanation: Explanation) -> str:
    """``Dominant layer: mlp.up (61 %).``, by measured time, else by FLOPs; empty when no layer is known."""
    profile = explanation.profile
    if not profile.layers:
        return ""
    weights, of = layer_weights(profile, explanation.recommended.batch_size)
    total = sum(weights)
    if not total:
        return ""
    layer, weight = max(zip(profile.layers, weights, strict=True), key=lambda pair: pair[1])
    return f"Dominant layer: {short(layer.name)} ({format_percent(weight / total)}{of})."


def layer_weights(profile: Profile, batch_size: int) -> tuple[list[float], str]:
    """Time of each layer at the layer batch size nearest to ``batch_size``; FLOPs when layers were not timed."""
    timed = all(layer.seconds for layer in profile.layers) and profile.layer_batch_sizes
    if not timed:
        return [layer.flops_per_item for layer in profile.layers], " of the FLOPs"
    nearest = min(profile.layer_batch_sizes, key=lambda size: abs(log(size / batch_size)))
    column = profile.layer_batch_sizes.index(nearest)
    return [_seconds(layer, column) for layer in profile.layers], ""


def _seconds(layer: Layer, column: int) -> float:
    return layer.seconds[column] if column < len(layer.seconds) else 0.0


def notes(explanation: Explanation) -> list[str]:
    """Every warning, each once."""
    return list(dict.fromkeys(clean(warning) for warning in (*explanation.warnings, *explanation.profile.warnings)))


def phrase(text: str) -> str:
    """A sentence cleaned and without its full stop, to stand inside another."""
    return clean(text).strip().rstrip(".")
