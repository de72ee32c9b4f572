"""From a module to `microbatch.work.operators.Work`: its operators, with sizes as functions of batch and sequence.

The model runs on tensors without data at a few sizes. Each number of each operator is fitted by an exact polynomial
and checked at one more size. Where that fails, less is claimed, and `Work.warnings` says what.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from microbatch.capture.assemble import Claim, Mismatch, added_up, operators, straight_lines
from microbatch.capture.count import backward, slow_attention
from microbatch.capture.experts import Rule, as_routed, experts_of, routed_layers
from microbatch.capture.fake import Faker, plain_tensors
from microbatch.capture.fit import Size, agrees, interpolation
from microbatch.capture.moved import distinct_bytes, storage_of
from microbatch.capture.opaque import whole_operators
from microbatch.capture.record import DTYPE_NAMES, Record
from microbatch.capture.repeats import Block, blocks_of, repeats
from microbatch.capture.stored import ARITHMETIC, stored_as, weight_bytes
from microbatch.capture.tally import DependsOnData, tallying
from microbatch.errors import InvalidModel, InvalidSettings, MicrobatchError, ModelFailed
from microbatch.work.operators import Operator, Work
from microbatch.work.polynomial import ZERO, Polynomial

Example = Callable[[int, int | None], tuple[tuple[object, ...], dict[str, object]]]

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
    runs = _Runs(model, example, mode, dtype, with_sequence=sequence is not None)
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
    runs: _Runs, claims: Sequence[Claim], probabilities: tuple[float, ...]
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
    runs: _Runs, claim: Claim, probabilities: tuple[float, ...], reason: str
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


@dataclass(slots=True)
class _Runs:
    """Runs the model without data, at each size once."""

    model: nn.Module
    example: Example
    mode: str
    dtype: str | None
    with_sequence: bool
    repeated: bool = True
    fake: FakeTensorMode = field(default_factory=lambda: FakeTensorMode(allow_non_fake_inputs=True))
    twins: dict[str, Tensor] = field(default_factory=dict)
    blocks: list[Block] = field(default_factory=list)
    experts: list[tuple[nn.Module, Rule]] = field(default_factory=list)
    seen: dict[Size, list[Record]] = field(default_factory=dict)

    @contextmanager
    def without_data(self) -> Iterator[None]:
        """Inside, the model's parameters and buffers have twins without data."""
        faker = self._faker()
        named = (*self.model.named_parameters(), *self.model.named_buffers())
        self.twins = {name: faker.twin(tensor) for name, tensor in named}
        self.blocks, self.experts = list(blocks_of(self.model)), experts_of(self.model)
        with plain_tensors(self.model, faker):
            yield

    def at(self, size: Size) -> list[Record]:
        """The records at a size. The first run also checks that blocks repeat."""
        if size not in self.seen:
            try:
                self.seen[size] = self._run(size, repeated=self.repeated)
            except MicrobatchError:
                raise
            except DependsOnData as reason:
                raise _named(self.model, reason) from reason
            except Exception as reason:
                if not self.repeated:
                    raise ModelFailed(
                        f"{type(self.model).__name__} cannot run without data: {type(reason).__name__}: {reason}",
                        "Check that the example fits the model; a model that reads values cannot be predicted.",
                    ) from reason
                logger.debug("every block runs: %s", reason)
                self.repeated, self.seen = False, {}
                return self.at(size)
        return self.seen[size]

    def _run(self, size: Size, *, repeated: bool) -> list[Record]:
        args, kwargs = self._faker().anything(self._example(size))
        weights = [number for twin in self.twins.values() if (number := storage_of(twin)) is not None]
        training = self.mode == "training"
        with (
            self.fake,
            slow_attention(),
            torch.set_grad_enabled(training),
            tallying(self.model, frozenset(weights)) as tally,
            whole_operators(tally),
            routed_layers(self.experts, tally),
            repeats(self.blocks if repeated else [], tally, check=not self.seen) as blocks,
        ):
            output = torch.func.functional_call(self.model, self.twins, args, kwargs)
            if training:
                backward(self.model, output, list(self.twins.values()))
        return list(map(as_routed, blocks.records()))

    def _example(self, size: Size) -> tuple[Any, Any]:
        return self.example(size[0], size[1] if self.with_sequence else None)

    def _faker(self) -> Faker:
        return Faker(self.fake, ARITHMETIC[self.dtype] if self.dtype else None)

    def uncounted(self) -> tuple[str, ...]:
        """Operators that computed and have no formula."""
        return tuple(sorted({record.name for records in self.seen.values() for record in records if record.uncounted}))

    def cache(self, claim: Claim) -> Polynomial:
        """Bytes of the keys and values in the example: its floating-point tensors of three dimensions or more."""
        held = [self._cache_bytes(size) for size in claim.sizes]
        fitted = interpolation(claim.batches, claim.sequences)(held[:-1])
        if not agrees(fitted, claim.check, held[-1]):
            logger.warning("The cache in the example of %s is no polynomial of the batch.", type(self.model).__name__)
        return fitted

    def _cache_bytes(self, size: Size) -> int:
        faker = self._faker()
        faker.anything(self._example(size))
        return sum(
            distinct_bytes(tensor) for tensor in faker.tensors() if tensor.dim() > 2 and tensor.dtype.is_floating_point
        )


def _named(model: nn.Module, reason: DependsOnData) -> InvalidModel:
    part = model.get_submodule(reason.layer)
    where = f"{reason.layer} ({type(part).__name__})" if reason.layer else type(part).__name__
    return InvalidModel(
        f"{reason.operator} in {where} depends on the data: no shape of its result, or no path behind it, is known "
        "without running the model.",
        "Replace it by an operator of fixed shape (torch.where, a mask, padding), or measure the model with profile.",
    )


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
