"""What only a prediction has, in words: the datasheet's ridge, the limits of decoding, the optimizer, a measurement
laid beside it."""

from __future__ import annotations

from microbatch.curves.beside import Beside
from microbatch.curves.explanation import Explanation
from microbatch.curves.prediction import DecodeLimits, OptimizerShare
from microbatch.reporting.surface import best_rows
from microbatch.reporting.wording import Fact, clean, rounded, short
from microbatch.units import format_number, format_percent, format_seconds


def facts(explanation: Explanation) -> list[Fact]:
    """Figures for the summary; none for a measured profile."""
    known = explanation.profile.prediction
    if known is None:
        return []
    return [_datasheet_ridge(explanation), *(_decode_facts(known.decode) if known.decode else [])]


def lines(explanation: Explanation) -> list[str]:
    """Sentences for the summary."""
    known = explanation.profile.prediction
    told = []
    if known is not None and known.decode is not None and known.decode.reason:
        told.append(clean(known.decode.reason))
    if known is not None and known.optimizer is not None:
        told.append(optimizer(known.optimizer))
    if explanation.profile.surface:
        told.append(_surface(explanation))
    if explanation.beside is not None:
        told += [beside(explanation.beside), *(clean(finding) for finding in explanation.beside.findings)]
    return told


def beside(found: Beside) -> str:
    """``Beside the measurement on Xeon: off by 9 % at the median, 21 % at the 90th percentile, 4 % too fast.``"""
    where = f" on {short(found.device, 60)}" if found.device else ""
    lean = f", {format_percent(abs(found.bias))} too {'slow' if found.bias > 0 else 'fast'} on the whole"
    return (
        f"Beside the measurement{where}, {len(found.points)} sizes: off by {format_percent(found.median_error)} at the "
        f"median and {format_percent(found.p90_error)} at the 90th percentile"
        f"{lean if abs(found.bias) >= 0.005 else ''}."
    )


def optimizer(share: OptimizerShare) -> str:
    """What the optimizer takes, and up to which size the step is bound by it."""
    of = "" if share.accumulation == 1 else f" of each of {share.accumulation} micro-batches"
    told = f"The optimizer ({short(share.name, 20)}) takes {format_seconds(share.seconds)}{of}"
    if share.bound_up_to is None:
        return f"{told}; it is less than half of a step at every size."
    return (
        f"{told}: up to {format_number(share.bound_up_to)} the step is bound by the optimizer; larger micro-batches "
        f"or more of them in a step (--accumulation) share it out."
    )


def _datasheet_ridge(explanation: Explanation) -> Fact:
    found = explanation.ridge
    if found.predicted_weights is None:
        return Fact(label="ridge by the datasheet", value="none", hint="no weights to share")
    activations = found.predicted_with_activations
    hint = "no batch is compute-bound once activations move" if activations is None else (
        f"{batch(activations)} with activations"
    )  # fmt: skip
    return Fact(label="ridge by the datasheet", value=batch(found.predicted_weights), hint=hint)


def batch(size: float) -> str:
    """A batch that need not be whole: 216.7 → ``217``, 1.69 → ``1.69``."""
    return format_number(round(size)) if size >= 10 else rounded(size)


def _decode_facts(limits: DecodeLimits) -> list[Fact]:
    told = []
    if limits.context_limit is not None:
        value = f"{format_number(round(limits.context_limit))} tokens"
        told.append(Fact(label="context limit", value=value, hint="beyond it no batch is compute-bound"))
    if limits.half_batch is not None and limits.saturated_throughput is not None:
        most = f"half of {rounded(limits.saturated_throughput)} tokens/s"
        at = "" if limits.context is None else f" at a context of {format_number(limits.context)}"
        told.append(Fact(label="half-way batch", value=batch(limits.half_batch), hint=f"{most}, the most{at}"))
    return told


def _surface(explanation: Explanation) -> str:
    rows = best_rows(explanation.profile.surface)
    told = [f"{format_number(row.batch_size)} at {format_number(row.sequence)}" for row in rows]
    length = "context" if explanation.profile.mode == "decode" else "sequence"
    return f"Best batch by {length}: {', '.join(told)} tokens."
