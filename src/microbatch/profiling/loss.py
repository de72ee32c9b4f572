"""What is trained for: the user's loss, or one that every output can have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from microbatch.batch.example import tensors_in
from microbatch.errors import InvalidModel, InvalidSettings

Loss = Callable[[Any, Any], Any]
"""``loss(output, batch) -> (sum, weight)``, or a dict of such pairs."""


def loss_of(
    loss: Loss | None, output: object, args: tuple[object, ...], kwargs: dict[str, object], batch_size: int
) -> Tensor:
    """The scalar to run backward from.

    Args:
        loss: the user's; None for the sum of the squares of every floating-point output over the batch size. Unlike
            those of a plain sum its gradients are dense and differ by item, as a real loss's do.
        output: what the model returned.
        args, kwargs: what it was given.
        batch_size: items in the batch.

    Raises:
        InvalidModel: no output depends on a parameter that is trained.
        InvalidSettings: the user's loss returned something else than pairs.
    """
    value = _default(output, batch_size) if loss is None else _divided(loss(output, batch_of(args, kwargs)))
    if not value.requires_grad:
        raise InvalidModel(
            "The loss depends on no parameter that is trained.", "Give another loss=, or unfreeze a parameter."
        )
    return value


def batch_of(args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """The batch as a loss gets it: the single argument, the tuple of arguments, the dict of keyword arguments, or
    the pair of both."""
    if kwargs:
        return (args, kwargs) if args else kwargs
    return args[0] if len(args) == 1 else args


def _default(output: object, batch_size: int) -> Tensor:
    trained = [tensor for tensor in tensors_in(output) if tensor.is_floating_point() and tensor.requires_grad]
    sums = [tensor.square().sum() for tensor in trained]
    if not sums:
        raise InvalidModel(
            "The model's output holds no floating-point tensor that depends on a parameter.", "Give a loss=."
        )
    total = sums[0]
    for further in sums[1:]:
        total = total + further
    return total / batch_size


def _divided(result: object) -> Tensor:
    pairs = list(result.values()) if isinstance(result, Mapping) else [result]
    if not all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in pairs):
        raise InvalidSettings("The loss must return (sum, weight), or a dict of such pairs.", "Return both.")
    losses: list[Tensor] = [total / weight for total, weight in pairs]  # type: ignore[misc]
    whole = losses[0]
    for further in losses[1:]:
        whole = whole + further
    return whole
