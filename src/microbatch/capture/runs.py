"""Runs of a model on tensors without data, at any size, each size once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from microbatch.capture.assemble import Claim
from microbatch.capture.count import backward, slow_attention
from microbatch.capture.experts import Rule, as_routed, experts_of, routed_layers
from microbatch.capture.fake import Faker, plain_tensors
from microbatch.capture.fit import Size, agrees, interpolation
from microbatch.capture.moved import distinct_bytes, storage_of
from microbatch.capture.opaque import whole_operators
from microbatch.capture.record import Record
from microbatch.capture.repeats import Block, blocks_of, repeats
from microbatch.capture.stored import ARITHMETIC
from microbatch.capture.tally import DependsOnData, tallying
from microbatch.errors import InvalidModel, MicrobatchError, ModelFailed
from microbatch.work.polynomial import Polynomial

Example = Callable[[int, int | None], tuple[tuple[object, ...], dict[str, object]]]
"""``example(batch, sequence) -> (args, kwargs)``"""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Runs:
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
    held: dict[Size, int] = field(default_factory=dict)

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
        faker = self._faker()
        args, kwargs = faker.anything(self._example(size))
        self.held[size] = _held_bytes(faker.tensors())
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
        held = [self._held_at(size) for size in claim.sizes]
        fitted = interpolation(claim.batches, claim.sequences)(held[:-1])
        if not agrees(fitted, claim.check, held[-1]):
            logger.warning("The cache in the example of %s is no polynomial of the batch.", type(self.model).__name__)
        return fitted

    def _held_at(self, size: Size) -> int:
        if size not in self.held:
            faker = self._faker()
            faker.anything(self._example(size))
            self.held[size] = _held_bytes(faker.tensors())
        return self.held[size]


def _held_bytes(tensors: list[Tensor]) -> int:
    """Of the floating-point tensors of three dimensions or more: in a decode step's example, keys and values."""
    return sum(distinct_bytes(tensor) for tensor in tensors if tensor.dim() > 2 and tensor.dtype.is_floating_point)


def _named(model: nn.Module, reason: DependsOnData) -> InvalidModel:
    part = model.get_submodule(reason.layer)
    where = f"{reason.layer} ({type(part).__name__})" if reason.layer else type(part).__name__
    return InvalidModel(
        f"{reason.operator} in {where} depends on the data: no shape of its result, or no path behind it, is known "
        "without running the model.",
        "Replace it by an operator of fixed shape (torch.where, a mask, padding), or measure the model with profile.",
    )
