"""Is a batch in pieces the same as a whole batch? Runs the model both ways and names what makes the difference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from microbatch.batch.exactness import TOLERANCE, Culprit, ExactnessReport
from microbatch.batch.example import Dimension, find_batch_size, map_tensors
from microbatch.batch.gradients import Loss, check_gradients
from microbatch.batch.naming import Comparison, name_culprits
from microbatch.batch.outcome import Piece, additive
from microbatch.batch.padding import packed_sequences, padded_rows, token_rows
from microbatch.batch.remedies import REMEDY
from microbatch.batch.rows import Rows, largest, match_all, pieces_of
from microbatch.batch.split import batch_size_of, split
from microbatch.batch.state import buffers_apart, check_state, kept_by
from microbatch.batch.subject import Forward, Subject
from microbatch.errors import InvalidBatch, InvalidSettings, ModelFailed, NoAnswer

MODES = ("training", "inference")
DTYPES = {"fp64": torch.float64, "fp32": torch.float32}
MOST_SINGLES = 3
"""Rows that are run alone."""


def check_independence(
    model: nn.Module,
    batch: Any,
    *,
    mode: str = "training",
    forward: Forward | None = None,
    loss: Loss | None = None,
    batch_dimension: Dimension = None,
) -> ExactnessReport:
    """Whether the model gives every row of a batch what it gives it in a piece of the batch, and if not, why not.

    Copies of the model run on the CPU in float64, and without chance: dropout is put aside. The model, its mode and
    the random state are left as they were. Checked are the rows of the outputs of halves, of an uneven cut and of rows
    alone; state carried from piece to piece; in training the gradients; where the batch has a mask or packed
    sequences, rows without their padding and sequences alone.

    Args:
        model: any module.
        batch: two rows or more, different from each other; whatever `microbatch.batch.split` can cut.
        mode: ``"training"`` or ``"inference"``.
        forward: ``forward(model, batch) -> output``; by default ``model(batch)``, ``model(*batch)`` or
            ``model(**batch)`` by the batch's type.
        loss: ``loss(output, batch) -> (sum, weight)`` or a dict of such pairs; by default the sum of squares.
        batch_dimension: where the batch is, if not in dimension 0: one number, or one by path of the tensor.

    Raises:
        InvalidSettings: an unknown mode, or a loss in inference.
        InvalidBatch: fewer than two rows, or a batch that cannot be cut.
        InvalidModel: the model cannot be copied.
        ModelFailed: the model raised on the whole batch.
        NoAnswer: no output can be laid beside that of a piece.
    """
    if mode not in MODES:
        raise InvalidSettings(f"There is no mode {mode!r}.", f"Use one of {', '.join(MODES)}.")
    if loss is not None and mode != "training":
        raise InvalidSettings("Inference has no loss.", "Leave it out, or use mode='training'.")
    if not packed_sequences(batch):
        _size_of(batch, batch_dimension)
    return _check(model, batch, forward, mode, loss, batch_dimension).report()


def _check(
    model: nn.Module, batch: Any, forward: Forward | None, mode: str, loss: Loss | None, dimension: Dimension
) -> _Check:
    """In the widest dtype that the model runs in."""
    errors: list[Exception] = []
    for name, dtype in DTYPES.items():
        subject = Subject(model, forward, mode, dtype)
        try:
            full = subject.outputs(batch)
        except Exception as error:
            errors.append(error)
            continue
        notes = [f"Compared in float32, for the model does not run in float64: {_text(errors[0])}"] if errors else []
        return _Check(subject, batch, full, mode, loss, dimension, name, notes)
    raise ModelFailed(
        f"The model raised {_text(errors[-1])}", "It must run on the whole batch, on the CPU; see forward=."
    ) from errors[-1]


def _text(error: Exception) -> str:
    line = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {line}"


@dataclass(slots=True)
class _Check:
    """One examination; what it found so far."""

    subject: Subject
    batch: Any
    full: tuple[Tensor, ...]
    mode: str
    loss: Loss | None
    dimension: Dimension
    dtype: str
    notes: list[str]
    differences: list[float] = field(default_factory=list)
    culprits: list[Culprit] = field(default_factory=list)
    exact: bool = True

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.dtype]

    def report(self) -> ExactnessReport:
        size, splits = self._check_rows_or_packing()
        self._check_padding()
        if self.subject.draws:
            self.notes.append(
                "Random numbers were put aside: dropout is off here, and draws anew for each piece in training."
            )
        return ExactnessReport(
            exact=self.exact,
            largest_difference=max(self.differences) if self.differences else None,
            culprits=tuple(_once(self.culprits)),
            modes=(self.mode,),
            batch_size=size,
            splits=splits,
            dtype=self.dtype,
            tolerance=self.tolerance,
            notes=tuple(self.notes),
        )

    def _check_rows_or_packing(self) -> tuple[int, tuple[tuple[int, ...], ...]]:
        packed = packed_sequences(self.batch)
        if packed:
            pieces = [self._piece(piece, rows) for _, piece, rows in packed]
            self._judge([pieces], "packing")
            return len(packed), ((1,) * len(packed),)
        size = _size_of(self.batch, self.dimension)
        splits = _splits(size)
        self._check_rows(splits)
        return size, splits

    def _check_rows(self, splits: tuple[tuple[int, ...], ...]) -> None:
        again = self.subject.outputs(self.batch)
        whole = Rows(1, 0, 1)
        difference = largest(match_all(self.full, again, whole), whole_numbers=True)
        if difference is not None and difference > self.tolerance:
            self.differences.append(difference)
            self._blame(Comparison(self.batch, self.batch, whole), "state")
            self.notes.append("The same batch gives another answer the second time, whatever the split.")
            return
        tried = [[self._piece(*part) for part in self._chosen(sizes)] for sizes in splits]
        kind = "packing" if token_rows(self.batch, list(splits[0])) else None
        self._judge(tried, kind)
        halves = tried[0]
        if all(piece.outputs is not None for piece in halves):
            self._check_state(halves)
            if self.exact and self.mode == "training":
                self._check_gradients(halves)

    def _chosen(self, sizes: tuple[int, ...]) -> list[tuple[Any, Rows]]:
        """Pieces to run: all of a cut in two, the first, a middle and the last row alone."""
        rows = token_rows(self.batch, list(sizes)) or pieces_of(sizes)
        wanted = range(len(sizes)) if len(sizes) <= MOST_SINGLES else (0, len(sizes) // 2, len(sizes) - 1)
        return [(piece, rows[n]) for n, piece in enumerate(self._cut(sizes)) if n in wanted]

    def _cut(self, sizes: tuple[int, ...]) -> list[Any]:
        if self.dimension is None:
            return list(split(self.batch, sizes))
        paths = _paths(self.dimension)

        def axis_of(path: str) -> int | None:
            return paths.get(path, 0) if isinstance(paths, Mapping) else paths

        def piece(rows: Rows) -> Any:
            def narrowed(path: str, tensor: Tensor) -> Tensor:
                axis = axis_of(path) if tensor.dim() else None
                return tensor if axis is None else tensor.narrow(axis, rows.start, rows.count)

            return map_tensors((self.batch,), {}, narrowed)[0][0]

        return [piece(rows) for rows in pieces_of(sizes)]

    def _piece(self, batch: Any, rows: Rows) -> Piece:
        try:
            outputs = self.subject.outputs(batch)
        except Exception:
            return Piece(batch, rows, None, [])
        return Piece(batch, rows, outputs, match_all(self.full, outputs, rows))

    def _judge(self, tried: list[list[Piece]], kind: str | None) -> None:
        """Compares every piece; names the culprits from the worst piece that ran, else from one that did not."""
        accepted = additive(self.full, tried, self.tolerance)
        worst: list[tuple[float, Piece]] = []
        compared = False
        for piece in (piece for pieces in tried for piece in pieces):
            kept = [m for n, m in enumerate(piece.matches) if n not in accepted]
            difference = largest(kept, whole_numbers=True)
            compared = compared or difference is not None or bool(accepted)
            if difference is not None:
                self.differences.append(difference)
            if piece.outputs is None or any(m.difference is None for m in kept):
                worst.append((0.0, piece))
            elif difference is not None and difference > self.tolerance:
                worst.append((difference, piece))
        if worst:
            _, piece = max(worst, key=lambda item: item[0])
            self._blame(Comparison(self.batch, piece.batch, piece.rows), kind)
        elif not compared:
            raise NoAnswer(
                "No output of the model can be laid beside that of a piece.", "Return a tensor with a row for each row."
            )
        if accepted:
            self.differences += accepted.values()
            self.notes.append(
                "An output has no rows but adds up, or is a mean over rows: add up sums and weights, not means."
            )

    def _blame(self, comparison: Comparison, kind: str | None) -> None:
        self.exact = False
        found = name_culprits(self.subject, comparison, self.tolerance, kind=kind, mode=self.mode)
        for culprit in found:
            kept = kept_by(self.subject, comparison, culprit.module) if kind == "state" else []
            evidence = f"it keeps {', '.join(kept)} from the call before" if kept else culprit.evidence
            self.culprits.append(replace(culprit, evidence=evidence))

    def _check_state(self, halves: Sequence[Piece]) -> None:
        model = self.subject.fresh()
        pieces = [(piece.batch, piece.outputs or ()) for piece in halves]
        found = check_state(self.subject, pieces, model, self.tolerance)
        if found is not None:
            self.differences += [found.difference] if found.difference is not None else []
            self._blame(found.comparison, "state")
            return
        known = {culprit.module for culprit in self.culprits}
        for buffer in buffers_apart(self.subject, self.batch, model, self.tolerance):
            if buffer.module in known:
                continue
            self.exact = False
            self.culprits.append(buffer.culprit(self.mode))

    def _check_gradients(self, halves: Sequence[Piece]) -> None:
        has_rows = [match.has_rows for match in halves[0].matches]
        if len(has_rows) != len(self.full):
            has_rows = [True] * len(self.full)
        pieces = [piece.batch for piece in halves]
        found = check_gradients(self.subject, self.batch, pieces, self.loss, has_rows, self.tolerance)
        if found is None:
            self.notes.append("No gradients were compared: the output depends on nothing that is trained.")
            return
        difference = found.report.largest_difference or 0.0
        self.differences += [difference, found.sums]
        if max(difference, found.sums) <= self.tolerance:
            return
        self.exact = False
        by_model = found.report.culprits and (self.loss is None or not self._exact_without_loss(pieces, has_rows))
        if by_model:
            self.culprits.append(_gradient_culprit(found.report.culprits[-1], self.mode))
        else:
            self.culprits.append(_loss_culprit(max(difference, found.sums), self.mode))

    def _exact_without_loss(self, pieces: Sequence[Any], has_rows: Sequence[bool]) -> bool:
        found = check_gradients(self.subject, self.batch, pieces, None, has_rows, self.tolerance)
        return found is None or found.report.exact

    def _check_padding(self) -> None:
        if not self.exact:
            return
        for row, alone, rows in padded_rows(self.batch):
            try:
                full, part = self.subject.outputs(row), self.subject.outputs(alone)
            except Exception as error:
                self.notes.append(f"Padding was not checked, a row does not run without it: {_text(error)}")
                continue
            difference = largest(match_all(full, part, rows), whole_numbers=True)
            if difference is not None:
                self.differences.append(difference)
            if difference is not None and difference > self.tolerance:
                self._blame(Comparison(row, alone, rows), "padding")


def _size_of(batch: Any, dimension: Dimension) -> int:
    given = _paths(dimension)
    size = batch_size_of(batch) if given is None else find_batch_size((batch,), {}, dimension=given)
    if size < 2:
        raise InvalidBatch("A batch of 1 row cannot be cut.", "Give two rows or more, different from each other.")
    return size


def _paths(dimension: Dimension) -> Dimension:
    """Paths of the caller are those inside the batch; here the batch is the first of a tuple."""
    if dimension is None or isinstance(dimension, int):
        return dimension
    return {f"args[0]{path if path.startswith('[') else f'[{path!r}]'}": axis for path, axis in dimension.items()}


def _splits(size: int) -> tuple[tuple[int, ...], ...]:
    """Halves, an uneven cut, rows alone."""
    half = -(-size // 2)
    return tuple(dict.fromkeys([(half, size - half), (1, size - 1), (1,) * size]))


def _once(culprits: Sequence[Culprit]) -> list[Culprit]:
    found: dict[tuple[str, str], Culprit] = {}
    for culprit in culprits:
        found.setdefault((culprit.module, culprit.kind), culprit)
    return list(found.values())


def _loss_culprit(difference: float, mode: str) -> Culprit:
    return Culprit(
        module="loss",
        kind="loss",
        difference=difference,
        remedy=REMEDY["loss"],
        evidence="outputs agree row by row, the loss's sums do not add up",
        type="function",
        mode=mode,
    )


def _gradient_culprit(culprit: Culprit, mode: str) -> Culprit:
    return Culprit(
        module=culprit.module,
        kind="gradient",
        difference=culprit.difference,
        remedy=REMEDY["gradient"],
        evidence=f"outputs agree row by row, {culprit.evidence}",
        mode=mode,
    )
