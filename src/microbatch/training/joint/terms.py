"""Terms of a loss that are functions of the whole batch, and how what they need is joined over pieces and ranks.

A contrastive loss compares every item with every other; the load-balancing loss of a mixture of experts multiplies two
means over all tokens. Neither is a sum over pieces. But each is a function L(v) of values v of which every piece makes
its own rows v_p: ∂L/∂θ = Σ_p ∂L/∂v_p · ∂v_p/∂θ is a sum over pieces once ∂L/∂v is known (Gao et al. 2021, GradCache).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from microbatch.batch.members import is_plain_sequence, rebuilt
from microbatch.errors import InvalidLoss
from microbatch.training.normalise import ONLY, Pair, pairs_of

_ROWS = (
    "Let forward return tensors with one row per item, as embeddings and labels; scores between items belong in the "
    "loss."
)

_PLAIN = (type(None), bool, int, float, str)


@dataclass(frozen=True, slots=True)
class JointTerm:
    """A term of the loss that is a function of the whole batch, for ``TrainStep(joint="terms")``.

    Attributes:
        values: what this piece adds: a tensor or tensors in any containers, with one row per item, token or whatever
            the function takes. The rows of all pieces and ranks are joined along dimension 0, in order.
        function: ``function(values) -> (sum, weight)`` of the joined values.
    """

    values: Any
    function: Callable[[Any], Any]

    @classmethod
    def of_means(cls, sums: Any, weight: Any, function: Callable[[Any], Any]) -> JointTerm:
        """A term that is a function of means over the whole batch, and needs no more of it than their sums.

        Args:
            sums: sums over this piece: a tensor or tensors in any containers.
            weight: what they are divided by, as a number of tokens: those of all pieces and ranks are added first.
            function: ``function(means) -> (sum, weight)``, of means in the containers of the sums. A batch without
                weight has no means: the term then has no weight either.
        """

        def of_rows(rows: Any) -> Any:
            whole = rows[1].sum()
            if not whole:
                return 0.0, 0
            return function(changed("", rows[0], lambda _, row: row.sum(0) / whole))

        rows = changed("", sums, lambda _, leaf: leaf[None] if isinstance(leaf, Tensor) else torch.tensor([leaf]))
        return cls((rows, torch.as_tensor(weight).detach().reshape(1)), of_rows)


def terms_of(result: Any) -> tuple[dict[str, Pair], dict[str, JointTerm]]:
    """What a loss returned for a piece: the terms that are sums over pieces, and those of the whole batch.

    Raises:
        InvalidLoss: see `microbatch.training.normalise.pairs_of`.
    """
    named = result if isinstance(result, Mapping) else {ONLY: result}
    joint = {str(name): term for name, term in named.items() if isinstance(term, JointTerm)}
    sums = {str(name): pair for name, pair in named.items() if not isinstance(pair, JointTerm)}
    return (pairs_of(sums) if sums or not joint else {}), joint


def evaluated(name: str, function: Callable[[Any], Any], values: Any) -> dict[str, Pair]:
    """The term of these values; a dict of pairs as terms of their own."""
    pairs = pairs_of(function(values))
    return {_joined_name(name, own): pair for own, pair in pairs.items()}


def of_piece_alone(result: Any) -> Any:
    """The result with each joint term evaluated on what one piece has: for probes of time and memory."""
    if isinstance(result, JointTerm):
        return result.function(result.values)
    if not isinstance(result, Mapping):
        return result
    terms: dict[str, Any] = {}
    for name, value in result.items():
        if isinstance(value, JointTerm):
            terms |= {
                own: (pair.sum, pair.weight) for own, pair in evaluated(str(name), value.function, value.values).items()
            }
        else:
            terms[str(name)] = value
    return terms


def _joined_name(name: str, own: str) -> str:
    if name == ONLY:
        return own
    return name if own == ONLY else f"{name}.{own}"


def changed(path: str, value: Any, change: Callable[[str, Any], Any]) -> Any:
    """The same containers around changed leaves, given their paths."""
    if not _is_container(value):
        return change(path, value)
    return rebuilt(value, path, lambda name, item: changed(name, item, change))


def leaves_of(value: Any) -> dict[str, Any]:
    """Every leaf by its path."""
    found: dict[str, Any] = {}
    changed("", value, found.setdefault)
    return found


def kept(leaf: Any) -> Any:
    """The leaf without its graph, and without the larger tensor that it may be a view of."""
    if not isinstance(leaf, Tensor):
        return leaf
    plain = leaf.detach()
    return plain.clone() if plain.untyped_storage().nbytes() > plain.nbytes else plain


@dataclass(frozen=True, slots=True)
class Joined:
    """One leaf of several pieces (or ranks).

    Attributes:
        value: the rows of all of them, what they share, or a `NotJoined`.
        shared: whether it is one value for all, as a temperature is, instead of rows.
        rows: rows of each; all 0 for what is no rows.
    """

    value: Any
    shared: bool
    rows: tuple[int, ...]

    def part(self, gradient: Tensor, index: int) -> Tensor | None:
        """What of a gradient of the whole belongs to one; a shared value takes it once."""
        if self.shared:
            return gradient if index == 0 else None
        start = sum(self.rows[:index])
        return gradient[start : start + self.rows[index]]


def is_shared(parts: Sequence[Any], items: Sequence[int]) -> bool:
    """Whether a leaf is one value for all pieces: no tensor, no dimension, or one row for several items.

    Args:
        parts: the leaf of each piece.
        items: items of each piece; empty where one row is a row.
    """
    if not all(isinstance(part, Tensor) and part.dim() for part in parts):
        return True
    several = [part for part, number in zip(parts, items) if number > 1]
    return bool(several) and all(part.shape[0] == 1 for part in several)


def join(path: str, parts: Sequence[Any], *, shared: bool) -> Joined:
    """The leaves of several pieces as one; what cannot be joined says so when the loss touches it.

    Args:
        path: name of the leaf.
        parts: the leaf of each piece.
        shared: whether they are one value, see `is_shared`; else their rows are joined along dimension 0.
    """
    if shared:
        same = all(_is_same(part, parts[0]) for part in parts)
        value = parts[0] if same else NotJoined(path, "is not one row per item and differs between pieces")
        return Joined(value, True, (0,) * len(parts))
    kinds = {(part.dtype, part.shape[1:]) for part in parts}
    if len(kinds) > 1:
        shapes = ", ".join(sorted({str(list(part.shape)) for part in parts}))
        return Joined(NotJoined(path, f"has the shapes {shapes} in different pieces"), True, (0,) * len(parts))
    return Joined(torch.cat(list(parts)), False, tuple(len(part) for part in parts))


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one is other or (one.dtype == other.dtype and torch.equal(one, other))
    return isinstance(one, _PLAIN) and type(one) is type(other) and one == other


class NotJoined:
    """Stands for a part of the outputs that could not be joined; any use of it is an error that says why."""

    def __init__(self, path: str, why: str, remedy: str = _ROWS) -> None:
        self._text, self._remedy = f"The loss uses {path or 'the output'}, which {why}.", remedy

    def refuse(self, *_: Any) -> NoReturn:
        raise InvalidLoss(self._text, self._remedy)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.refuse()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls)]
        found[0].refuse()

    __getitem__ = __iter__ = __len__ = __float__ = __bool__ = __matmul__ = __rmatmul__ = __neg__ = refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = refuse


def _is_container(value: Any) -> bool:
    if isinstance(value, (Mapping, tuple, list)):
        return isinstance(value, Mapping) or is_plain_sequence(value) or hasattr(value, "_fields")
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
