"""How the model is called with a micro-batch: read off the batch, or off a forward function that calls the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from microbatch.errors import InvalidSettings

Forward = Callable[[Any, Any], Any]
"""``forward(model, batch) -> output``."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the model: ``model(*args, **kwargs)``."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def signature(self) -> tuple[Any, ...]:
        """Equal for calls whose messages have the same shapes: shapes and dtypes of tensors, and all other values."""
        leaves, structure = tree_flatten((self.args, dict(self.kwargs)))
        return (str(structure), *(_print_of(leaf) for leaf in leaves))

    @property
    def members(self) -> dict[int | str, Any]:
        """Arguments by place and by name: a batch that can be cut."""
        found: dict[int | str, Any] = dict(enumerate(self.args))
        return found | dict(self.kwargs)

    @classmethod
    def of_members(cls, members: Mapping[Any, Any]) -> Call:
        """The counterpart of `members`."""
        args = tuple(value for key, value in members.items() if isinstance(key, int))
        return cls(args, {key: value for key, value in members.items() if isinstance(key, str)})

    def changed(self, change: Callable[[Tensor], Tensor]) -> Call:
        """The same call with other tensors."""
        leaves, structure = tree_flatten((self.args, dict(self.kwargs)))
        args, kwargs = tree_unflatten([change(x) if isinstance(x, Tensor) else x for x in leaves], structure)
        return Call(args, kwargs)


def _print_of(leaf: object) -> object:
    if isinstance(leaf, Tensor):
        return (tuple(leaf.shape), leaf.dtype)
    return leaf if isinstance(leaf, (str, int, float, bool, type(None))) else repr(leaf)


class _Reached(BaseException):
    """The model was called: what the forward function does with its output is for the last stage."""


class _Instead:
    """Stands for the model in a forward function; everything but the call is the model's own."""

    def __init__(self, model: nn.Module, answer: Callable[[Call], Any]) -> None:
        self._model, self._answer = model, answer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._answer(Call(args, kwargs))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def call_of(batch: Any, *, list_of_samples: bool | None = None) -> Call:
    """A mapping as keywords, a tuple or a list of members as arguments, else as it is."""
    if isinstance(batch, Mapping):
        return Call((), batch)
    if isinstance(batch, tuple) or (isinstance(batch, list) and not list_of_samples):
        return Call(tuple(batch))
    return Call((batch,))


def recorded(forward: Forward, model: nn.Module, batch: Any) -> Call:
    """The call that a forward function makes, without making it.

    Raises:
        InvalidSettings: it calls no model.
    """
    made: list[Call] = []

    def answer(call: Call) -> Any:
        made.append(call)
        raise _Reached

    try:
        forward(_Instead(model, answer), batch)
    except _Reached:
        return made[0]
    raise InvalidSettings("forward does not call the model.", "Write forward(model, batch) with one call of model.")


def finished(forward: Forward, model: nn.Module, batch: Any, output: Any) -> Any:
    """What a forward function makes of the model's output.

    Raises:
        InvalidSettings: it calls the model a second time.
    """
    calls: list[Call] = []

    def answer(call: Call) -> Any:
        if calls:
            raise InvalidSettings("forward calls the model twice.", "A pipeline runs a micro-batch through it once.")
        calls.append(call)
        return output

    return forward(_Instead(model, answer), batch)
