"""A step of a `Pipeline`: forward, loss and backward of all pieces of a batch at once, in the pipeline's schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from microbatch.batch.oom import is_out_of_memory
from microbatch.errors import DoesNotFit, InvalidSettings
from microbatch.pipeline.execution.calls import Call, call_of, finished, recorded
from microbatch.pipeline.execution.pipeline import Pipeline
from microbatch.pipeline.execution.shapes import tensors_of
from microbatch.sizes import BatchSizes
from microbatch.training.normalise import Pair, Tally, Total, pairs_of
from microbatch.training.passes import Passes
from microbatch.training.ranks.pipelined import Pipelined
from microbatch.training.ranks.several import MARKED

Roots = Callable[[Mapping[str, Pair]], Sequence[Tensor]]
"""What backward starts from, of a piece's sums and weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinedPasses(Passes):
    """As `Passes`, for a `Pipeline`."""

    def run(
        self, batch: Any, sizes: BatchSizes, weights: Mapping[str, float] | None
    ) -> tuple[dict[str, Total], float | None]:
        """See `Passes.run`."""
        divisor = None if weights is not None else self.ranks.divisor
        tally = self._through(batch, sizes, lambda pairs: self.roots(pairs, weights, divisor))
        return self.ranks.meet(tally.totals(), divisor)

    def weights(self, batch: Any, sizes: BatchSizes) -> dict[str, float]:
        """See `Passes.weights`: one forward-only pipeline."""
        tally = self._through(batch, sizes, None)
        return {name: total.weight for name, total in self.ranks.meet(tally.totals(), None)[0].items()}

    def _through(self, batch: Any, sizes: BatchSizes, roots: Roots | None) -> Tally:
        """All pieces through all stages; without ``roots`` forward only."""
        ranks, pipe, tally = self.ranks, self.model, Tally()
        assert isinstance(ranks, Pipelined) and isinstance(pipe, Pipeline)
        if not sizes.num_micro_batches:  # a replica without data
            ranks.ready()
            return tally
        pieces = list(self.pieces(ranks.of_all(batch), sizes))
        calls = [self._call(piece) for piece in pieces]
        pipe.plans(calls, self.casting)  # what is wrong with a piece is told before any rank waits for it
        ranks.ready()

        def finish(index: int, output: Any) -> Sequence[Tensor]:
            pairs = pairs_of(self.loss(self._result(pieces[index], output), pieces[index]))
            tally.add(pairs)
            if roots is None:
                return ()
            return roots(pairs) or (_nothing(output) if ranks.shards else ())

        try:
            pipe.run(calls, finish, train=roots is not None, context=self.casting, seed=ranks.seed)
        except Exception as error:
            told = self._does_not_fit(sizes, error) if is_out_of_memory(error) else error
            setattr(told, MARKED, True)
            raise told from (error if told is not error else error.__cause__)
        return tally

    def _does_not_fit(self, sizes: BatchSizes, error: Exception) -> DoesNotFit:
        """The ranks are in the middle of a schedule, so that there is no second try."""
        pipe = self.model
        assert isinstance(pipe, Pipeline)
        return DoesNotFit(
            f"Rank {pipe.rank} ran out of memory with micro-batches of {sizes.micro_batch_size} items, "
            f"{sizes.num_micro_batches} in the step: {str(error).splitlines()[0]}",
            "Take more micro-batches, a schedule that holds fewer of them, or recompute activations.",
        )

    def _call(self, piece: Any) -> Call:
        if self.forward is None:
            return call_of(piece, list_of_samples=self.list_of_samples)
        return recorded(self.forward, self.model, piece)

    def _result(self, piece: Any, output: Any) -> Any:
        return output if self.forward is None else finished(self.forward, self.model, piece, output)


def _nothing(output: Any) -> list[Tensor]:
    """Roots with gradients of zero: replicas gather their shards in every backward, without weight too.

    Not the loss times zero: a mean over no targets has the gradient NaN.
    """
    return [tensor.sum() * 0 for tensor in tensors_of(output) if tensor.requires_grad]


REFUSED = {
    "joint": "A joint loss needs the outputs of all pieces in one place.",
    "noise_scale": "The gradients of single pieces are not apart in a pipeline.",
    "profile": "The number of micro-batches of a pipeline is not read off a profile.",
    "process_group": "A pipeline knows its processes.",
}
"""Arguments of `TrainStep` that a pipeline does not have, and why."""


def check_pipelined(**given: object) -> None:
    """
    Raises:
        InvalidSettings: an argument that a pipeline does not have.
    """
    refused = [name for name, value in dict(**given).items() if name in REFUSED and value]
    if refused:
        raise InvalidSettings(REFUSED[refused[0]], f"Leave {refused[0]}= out.")
    if given["batch_norm"] == "exact":
        raise InvalidSettings(
            "Exact batch norms need all pieces in one layer at a time.", 'Take batch_norm="frozen" or "micro_batch".'
        )
