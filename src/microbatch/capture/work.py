"""From a module to `microbatch.work.operators.Work`: its operators, with sizes as functions of batch and sequence.

The model runs on tensors without data at a few sizes. Each number of each operator is fitted by an exact polynomial
and checked at one more size. Where that fails, less is claimed, and `Work.warnings` says what.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from microbatch.capture.assemble import Claim, Mismatch, added_up, operators, straight_lines
from microbatch.capture.record import DTYPE_NAMES
from microbatch.capture.runs import Example, Runs
from microbatch.capture.stored import ARITHMETIC, stored_as, weight_bytes
from microbatch.errors import InvalidModel, InvalidSettings
from microbatch.work.operators import Operator, Work
from microbatch.work.polynomial import ZERO

MODES = ("inference", "training", "prefill", "decode")

logger = logging.getLogger(__name__)


def capture_work(
    model: nn.Module,
    example: Example,
    *,
    mode: str = "inference",
    batches: Sequence[int] = (2, 3, 19),
    sequence: int | None = None,
    free_sequence: bool = False,
    dtype: str | None = None,
    routing: Sequence[float] | None = None,
    name: str = "",
    unit: str = "rows",
) -> Work:
    """The operators of one call of a model, without computing it; parameters may be real, fake or on the meta device.

    The model is left as it was.

    Args:
        example: (args, kwargs) at a batch and a sequence; for decode the sequence is the context in the cache.
        mode: training adds the backward pass of the sum of the outputs; prefill and decode are inference whose
            example the caller chose.
        batches: three or more; the last one checks what the others say.
        sequence: at which sizes hold; None where the model has none, or the example keeps its own.
        free_sequence: sizes as functions of the sequence too, seen at lengths up to `sequence`.
        dtype: what the model would run in, see `capture.stored.ARITHMETIC`; None leaves its own.
        routing: chance that a token picks each expert at all; None for even routing.

    Raises:
        InvalidModel: a shape or a path depends on the data (the operator and the module are named), or training
            finds no tensor in the output.
        InvalidSettings: an unknown mode or dtype, too few batches, or `free_sequence` without `sequence`.
        ModelFailed: the model raised.
    """
    _check(mode, batches, sequence, free_sequence, dtype)
    model = getattr(model, "_orig_mod", model)  # a compiled model does the same work as the one it was made from
    runs = Runs(model, example, mode, dtype, with_sequence=sequence is not None)
    claims = _claims(sorted(set(batches)), sequence or 1, free_sequence)
    with _in_mode(model, mode), runs.without_data():
        made, free, warnings = _strongest(runs, claims, tuple(routing or ()))
        cache = runs.cache(claims[0] if free else claims[-2]) if mode == "decode" else ZERO
    parameters = list(model.parameters())
    return Work(
        operators=tuple(stored_as(made, dtype)),
        model=name,
        mode=mode,
        dtype=dtype or _dtype_of(parameters),
        weight_bytes=weight_bytes(model, dtype),
        parameters=sum(parameter.numel() for parameter in parameters),
        unit=unit,
        uncounted=runs.uncounted(),
        sequence=None if free else sequence,
        sequence_free=free,
        cache_bytes=cache,
        warnings=tuple(warnings),
    )


def _check(mode: str, batches: Sequence[int], sequence: int | None, free: bool, dtype: str | None) -> None:
    if mode not in MODES:
        raise InvalidSettings(f"Work cannot be captured in mode {mode!r}.", f"Use one of {', '.join(MODES)}.")
    if dtype is not None and dtype not in ARITHMETIC:
        raise InvalidSettings(f"Work cannot be captured in {dtype!r}.", f"Use one of {', '.join(ARITHMETIC)}.")
    if len(set(batches)) < 3 or min(batches) < 1:
        raise InvalidSettings(f"{list(batches)} are not three different batches.", "Give two to fit and one to check.")
    if free and sequence is None:
        raise InvalidSettings("Sizes as functions of the sequence need a sequence.", "Give the longest one.")


def _claims(batches: list[int], sequence: int, free: bool) -> list[Claim]:
    """From the strongest claim to the weakest: linear in the batch, then quadratic, in any and in one sequence."""
    further = [*batches, batches[-1] + 2]
    claims = []
    for sequences, checked in [(_lengths(sequence))] * free + [((sequence,), sequence)]:
        for known in (batches, further):
            fitted = tuple(known[:-1] if known is further else known[:2])
            claims.append(Claim(batches=fitted, sequences=sequences, check=(known[-1], checked)))
    return claims


def _lengths(longest: int) -> tuple[tuple[int, ...], int]:
    """Three lengths to fit and one to check, far apart, so that a window or a block between them shows.

    A short sequence is followed by longer ones.
    """
    if longest < 32:
        return (longest, longest + 1, longest + 2), longest + 3
    return (longest // 16, longest // 2, longest), longest // 4 + 1


def _strongest(
    runs: Runs, claims: Sequence[Claim], probabilities: tuple[float, ...]
) -> tuple[list[Operator], bool, list[str]]:
    """The operators under the strongest claim that holds, whether it is for any sequence, and what was given up."""
    given_up: list[str] = []
    for form in (list, added_up):
        for claim in claims:
            try:
                seen = {size: form(runs.at(size)) for size in claim.sizes}
                made = operators(seen, claim, probabilities)
            except Mismatch as reason:
                logger.debug("%s: %s", claim, reason)
                given_up = given_up or [str(reason)]
                continue
            free = len(claim.sequences) > 1
            if len(claims) > 2 and not free:
                length = claim.check[1]
                return made, False, [f"Sizes hold for a sequence of {length} only: {given_up[0]}"]
            return made, free, []
    return _nearly(runs, claims[-1], probabilities, given_up[0])


def _nearly(
    runs: Runs, claim: Claim, probabilities: tuple[float, ...], reason: str
) -> tuple[list[Operator], bool, list[str]]:
    """Straight lines in the batch where nothing exact holds, and by how much they are off where that was seen."""
    seen = {size: added_up(runs.at(size)) for size in claim.sizes}
    ends = min(seen), max(seen)
    try:
        made, off = straight_lines(seen, ends, probabilities)
    except Mismatch as error:
        raise InvalidModel(
            f"The work of this model does not follow from its batch: {error}",
            "Take what depends on the batch out of the model, or measure it with profile.",
        ) from error
    between = f"straight lines through batch {ends[0][0]} and {ends[1][0]}, off by {off:.1%} between"
    return made, False, [f"{reason} Sizes are {between}, and by more outside."]


@contextmanager
def _in_mode(model: nn.Module, mode: str) -> Iterator[None]:
    """Inside, the model is in eval mode for inference; for training it is as it was, or in training mode."""
    flags = [(module, module.training) for module in model.modules()]
    if mode != "training":
        model.eval()
    elif not model.training:
        model.train()
    try:
        yield
    finally:
        for module, training in flags:
            module.training = training


def _dtype_of(parameters: Sequence[Tensor]) -> str:
    floating = (parameter.dtype for parameter in parameters if parameter.dtype.is_floating_point)
    return DTYPE_NAMES.get(next(floating, torch.float32), "fp32")
