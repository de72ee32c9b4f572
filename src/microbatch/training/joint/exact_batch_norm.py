"""Batch normalisation by the statistics of the whole batch, in pieces: forward in lock step, backward in windows.

Forward, without a graph: all pieces run up to the first batch norm, add up their statistics, go on to the second, and
so on. This takes one forward pass; memory holds what every piece needs to go on from where it waits.

Backward: with y = γ·x̂ + β and x̂ = (x − μ)/σ over the N values of a channel in the whole batch,

    ∂L/∂x = γ/σ · (dy − Σ dy / N − x̂ · Σ(dy·x̂) / N)        (Ioffe and Szegedy 2015)

so that going back through a batch norm takes two sums over all pieces. The model is cut into windows of consecutive
batch norms, as many windows as there are pieces. From the last window to the first, every piece runs forward anew with
the known statistics, as far as the window goes, and keeps only what the window needs to go backward; all pieces then go
back through the window, from one batch norm to the one before it; the gradients that leave it are kept for the next.

So a step of M pieces takes the usual backward and 1 + (M + 1)/2 forward passes over the batch, the first in lock step.
(Where gradients leave a window through a function that is written in Python, forwards run to their end: 1 + M.) Memory
holds the window of all pieces, about as much as one piece whole, and the gradients at its border.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from microbatch.batch.running import device_of
from microbatch.batch.subject import not_compiled
from microbatch.errors import InvalidModel, InvalidSettings
from microbatch.sizes import BatchSizes
from microbatch.training.joint.batch_norm import Moments
from microbatch.training.joint.cuts import Call, Cut, Keep, Watch, counters_of
from microbatch.training.joint.going_back import GoingBack, Kept, Landmarks, all_nodes, next_number
from microbatch.training.joint.lockstep import OutOfStep, Task, Wait, run_in_lockstep
from microbatch.training.joint.running_statistics import RunningStatistics
from microbatch.training.joint.two_pass import Each, Roots
from microbatch.training.memory.snapshot import RandomStates, Snapshot
from microbatch.training.normalise import Loss
from microbatch.training.passes import Passes
from microbatch.training.phase import BACKWARD, FORWARD, during
from microbatch.training.ranks.one_process import Ranks

_ENDED = "ended"
_REMEDY = 'Choose batch_norm="micro_batch" or "frozen".'


class _Enough(BaseException):
    """Ends a forward that has made all of the graph that its window needs; no error, so nobody's to catch."""


@dataclass(frozen=True, slots=True)
class _Way:
    """One piece on its way back through a window."""

    back: GoingBack
    cuts: list[Cut]


def check_exact(model: nn.Module, ranks: Ranks) -> None:
    """
    Raises:
        InvalidSettings: a sharded model, or batch norms that are synchronised in another way.
    """
    if not ranks.retries_alone:
        raise InvalidSettings('batch_norm="exact" is not made for FSDP2.', "Use DistributedDataParallel.")
    if synchronised := [name for name, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)]:
        raise InvalidSettings(
            f"{synchronised[0]} is a SyncBatchNorm, which sees one piece of each rank.",
            'Leave the plain batch norms: batch_norm="exact" also goes over all ranks.',
        )


class ExactBatchNorm:
    """How the pieces of one step run, see the module and `microbatch.training.joint.two_pass.Order`."""

    def __init__(self, start: Snapshot) -> None:
        """
        Args:
            start: buffers and random state before the step.
        """
        self._start, self._after = start, start
        self._whole: list[Moments] = []
        self._bytes: list[int] = []
        self._random: RandomStates

    def forward(self, passes: Passes, loss: Loss, batch: Any, sizes: BatchSizes, each: Each) -> None:
        """Forward of all pieces in lock step. Buffers change as in one pass of the first piece."""
        device = device_of(passes.model)
        settings, running = _settings_of_thread(device), RunningStatistics(passes.model)
        self._random = RandomStates(sizes.num_micro_batches, device)
        pieces, counters = passes.pieces(batch, sizes), counters_of(passes.model)

        def task(index: int, wait: Wait) -> None:
            with settings(), Watch(lambda _, call: call.output(wait(call)), counters if index else {}):
                each(index, replace(passes, loss=loss).result_of(next(pieces)))

        tasks: list[Task] = [partial(task, index) for index in range(sizes.num_micro_batches)]
        with during(FORWARD), not_compiled(), passes.ranks.piece(0, 1):
            try:
                run_in_lockstep(tasks, partial(self._meet, passes.ranks, running), self._random.turn)
            except OutOfStep:
                raise InvalidModel("Some pieces go through more batch norms than others.", _REMEDY) from None
        self._end(passes.ranks, running, working=bool(tasks))
        self._after = running.changed(self._random.after_drawing)

    def backward(self, passes: Passes, loss: Loss, batch: Any, sizes: BatchSizes, roots: Roots) -> bool:
        """Forward and backward of all pieces, window by window from the last."""
        number, trained = sizes.num_micro_batches, False
        inner = replace(passes, loss=loss)

        def result_of(index: int, pieces: Iterator[Any]) -> tuple[list[Tensor], list[Tensor | None]]:
            return roots(index, inner.result_of(next(pieces)))

        kept: list[Kept] = [{} for _ in range(number)]
        for window in reversed(windows(self._bytes, max(number, 1))):
            pieces, ways = passes.pieces(batch, sizes), list[_Way]()
            for index in range(number):
                self._start.restore()
                self._random.begin(index)
                with during(FORWARD), not_compiled(), passes.ranks.piece(index, number):
                    way, has_ends = self._forth(partial(result_of, index, pieces), window, kept[index])
                ways.append(way)
                trained |= has_ends
            with during(BACKWARD):
                self._back(passes.ranks, ways, window)
            kept = [way.back.kept for way in ways]
        self._after.restore()
        return trained

    def _meet(self, ranks: Ranks, running: RunningStatistics, calls: list[Call]) -> Moments:
        """The statistics of the whole batch, where all pieces have come to the same batch norm."""
        if any(call.same != calls[0].same for call in calls):
            raise InvalidModel("Some pieces go through other batch norms than others.", _REMEDY)
        own = Moments.together([Moments.of(call.input) for call in calls])
        whole = self._of_all_ranks(ranks, running.told(calls[0]), own) if ranks.number > 1 else own
        assert whole is not None
        if whole.count < 2:
            raise InvalidModel("A batch norm has one value per channel in the whole batch.", "Use larger batches.")
        running.update(calls[0], whole)
        self._note(whole, calls[0].input.nbytes)
        return whole

    def _end(self, ranks: Ranks, running: RunningStatistics, *, working: bool) -> None:
        """This rank's pieces have ended; one without pieces follows the others until theirs have."""
        if ranks.number == 1:
            return
        if working:
            self._of_all_ranks(ranks, _ENDED, None)
            return
        while (whole := self._of_all_ranks(ranks, None, None, running)) is not None:
            self._note(whole, 1)

    def _note(self, whole: Moments, size: int) -> None:
        self._whole.append(whole)
        self._bytes.append(size)

    def _of_all_ranks(
        self, ranks: Ranks, told: Any, own: Moments | None, running: RunningStatistics | None = None
    ) -> Moments | None:
        """Statistics over all ranks; None where all have ended."""
        tensors = [] if own is None else [own.mean, own.variance]
        said = ranks.gather({"count": own.count if own else 0, "told": told}, tensors)
        working = [(note, Moments(note["count"], *given)) for note, given in said if given]
        if working and any(note["told"] == _ENDED for note, _ in said):
            raise InvalidModel("Some ranks go through more batch norms than others.", _REMEDY)
        if not working:
            return None
        whole = Moments.together([moments for _, moments in working])
        if running is not None:
            running.follow(working[0][0]["told"], whole)
        return whole

    def _forth(
        self,
        run: Callable[[], tuple[Sequence[Tensor], Sequence[Tensor | None]]],
        window: range,
        kept: Kept,
    ) -> tuple[_Way, bool]:
        """Forward of a piece, of which only the window can be gone back through; whether it has ends to begin from."""
        cuts: list[Cut] = []
        anchor = torch.zeros((), requires_grad=True)
        keep, base = Keep(window), next_number()
        marks = Landmarks(kept, base)

        def answer(number: int, call: Call) -> Tensor:
            if number >= len(self._whole):
                raise InvalidModel("A piece goes through more batch norms the second time.", _REMEDY)
            if number == window.stop and marks.complete:
                raise _Enough
            cut, output = Cut.at(call, self._whole[number], anchor, kept=number in window)
            cuts.append(cut)
            keep.passed = number + 1
            marks.see(output)
            return output

        back = GoingBack(base)
        try:
            with keep.saved(), Watch(answer, {}, marks.see):  # what is counted is put back before the next piece
                tensors, gradients = run()
        except _Enough:
            back.resume(marks.found.values(), kept)
            return _Way(back, cuts), False
        if window.stop == len(self._whole):
            back.start(tensors, gradients)
        else:
            back.resume(all_nodes(tensors), kept)
        return _Way(back, cuts), bool(tensors)

    def _back(self, ranks: Ranks, ways: list[_Way], window: range) -> None:
        """All pieces back through a window, from one batch norm to the one before it."""
        with Watch(_refuse, {}):
            for number in reversed(window):
                for way in ways:
                    way.back.down_to(way.cuts[number].number)
                with torch.no_grad():
                    _go_through(ranks, ways, number, self._whole[number])
            if window.start == 0:
                for way in ways:
                    way.back.to_the_end()


def windows(sizes: list[int], number: int) -> list[range]:
    """Consecutive batch norms in at most that many windows of about the same bytes.

    >>> windows([4, 2, 1, 1], 2)
    [range(0, 1), range(1, 4)]
    """
    total, borders, level = sum(sizes), [0], 0
    for place, size in enumerate(sizes):
        level += size
        if level >= total * len(borders) / number:
            borders.append(place + 1)
    return [range(start, stop) for start, stop in pairwise(borders)]


def _go_through(ranks: Ranks, ways: list[_Way], number: int, whole: Moments) -> None:
    """From the gradients of a batch norm's outputs to those of its inputs, weight and bias."""
    given = [(way, way.cuts[number], way.back.take(node)) for way in ways if (node := way.cuts[number].node)]
    sums = torch.zeros(2, *whole.mean.shape, dtype=whole.mean.dtype, device=whole.mean.device)
    for way, cut, gradient in given:
        if gradient is not None and cut.call is not None:
            sums += _sums(cut.call, gradient, whole, way.back)
    if ranks.number > 1:
        sums = torch.stack([tensors[0] for _, tensors in ranks.gather({"cut": number}, [sums])]).sum(0)
    for way, cut, gradient in given:
        assert cut.call is not None and cut.node is not None
        way.back.give_edge(cut.node.next_functions[0], _of_input(cut.call, gradient, whole, sums / whole.count))


def _sums(call: Call, gradient: Tensor, whole: Moments, back: GoingBack) -> Tensor:
    """Σ dy and Σ(dy·x̂) of one piece; they are also the gradients of bias and weight."""
    wide = gradient.to(whole.mean.dtype)
    over = [0, *range(2, wide.dim())]
    sums = torch.stack([wide.sum(over), (wide * call.scaled_back(whole)).sum(over)])
    for parameter, own in zip((call.bias, call.weight), sums):
        if parameter is not None:
            back.give(parameter, own.to(parameter.dtype))
    return sums


def _of_input(call: Call, gradient: Tensor | None, whole: Moments, means: Tensor) -> Tensor:
    """∂L/∂x; a piece without a loss of its own has one by what it does to the statistics."""
    own = 0.0 if gradient is None else gradient.to(whole.mean.dtype)
    centred = own - call.by_channel(means[0]) - call.scaled_back(whole) * call.by_channel(means[1])
    factor = call.over_deviation(whole)
    if call.weight is not None:
        factor = factor * call.weight.detach()
    return (centred * call.by_channel(factor)).to(call.input.dtype)


def _refuse(_number: int, _call: Call) -> Tensor:
    raise InvalidModel(
        "A batch norm runs again on the way back, inside activation checkpointing.",
        'Switch checkpointing off: batch_norm="exact" keeps no more than a window of the model anyhow.',
    )


def _settings_of_thread(device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """What a thread needs to run forward as this one would, without gradients."""
    module: Any = None if device.type == "cpu" else torch.get_device_module(device)
    stream = module.current_stream(device) if hasattr(module, "current_stream") else None
    cast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None

    @contextmanager
    def settings() -> Iterator[None]:
        if module is not None:
            module.set_device(device)
        if stream is not None:
            module.set_stream(stream)
        with torch.no_grad(), torch.autocast(device.type, dtype=cast, enabled=cast is not None):
            yield

    return settings
