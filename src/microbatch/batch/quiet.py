"""Makes two runs of a model comparable to the last bits: no chance, and nothing narrower than float64."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

NARROW = (torch.float32, torch.bfloat16, torch.float16)
Noticed = Callable[[str, object], None]
"""Called with the name of each operator and what it returned."""


class Quiet(TorchDispatchMode):
    """Puts chance aside and, with `wide`, turns every conversion to a narrower dtype into one to float64.

    The same random numbers cannot be had in a batch and in its pieces, so each is replaced by its mean: a dropout
    mask of ones and zeros times 1/(1-p) becomes exactly 1, as if p were 0. A model that casts its norms to
    float32 would otherwise differ by float32's rounding between one row and many.

    Attributes:
        draws: random operators that were replaced.
    """

    def __init__(self, *, wide: bool, noticed: Noticed | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.wide, self.noticed = wide, noticed
        self.draws = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if self.wide and given.get("dtype") in NARROW:
            given["dtype"] = torch.float64
        name = func.overloadpacket.__name__
        replace = _MEANS.get(name)
        if replace is None:
            result = func(*args, **given)
        else:
            self.draws += 1
            result = replace(func, args, given)
        if self.noticed is not None:
            self.noticed(name, result)
        return result


def _mean(value: float) -> Callable[..., Any]:
    """Runs the operator for its shape, then fills in a constant."""

    def replace(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result: Tensor = func(*args, **kwargs)
        return result.fill_(value)

    return replace


def _bernoulli(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Probability p in place of ones and zeros; p is a number, a tensor, or the first tensor itself."""
    in_place = func.overloadpacket.__name__.endswith("_")
    p = args[1] if len(args) > 1 else kwargs.get("p", 0.5 if in_place else args[0])
    result: Tensor = args[0] if in_place else torch.empty_like(args[0])
    return result.copy_(p) if isinstance(p, Tensor) else result.fill_(p)


def _normal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The mean; in ``normal_(tensor, mean, std)`` it comes second."""
    if func.overloadpacket.__name__.endswith("_"):
        return args[0].fill_(args[1] if len(args) > 1 else kwargs.get("mean", 0.0))
    result: Tensor = func(*args, **kwargs)
    return result.copy_(args[0]) if isinstance(args[0], Tensor) else result.fill_(args[0])


def _uniform(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``uniform_(tensor, low, high)``: the middle."""
    low = args[1] if len(args) > 1 else kwargs.get("from", 0.0)
    high = args[2] if len(args) > 2 else kwargs.get("to", 1.0)
    return args[0].fill_((low + high) / 2)


def _integers(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The middle of the numbers that can be drawn."""
    limits = [number for number in args if isinstance(number, int)][:2]
    result: Tensor = func(*args, **kwargs)
    return result.fill_(sum(limits) // 2)


def _multinomial(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The likeliest categories."""
    chances, number = args[:2]
    if args[2] if len(args) > 2 else kwargs.get("replacement", False):
        return chances.argmax(-1, keepdim=True).expand(*chances.shape[:-1], number).clone()
    return chances.topk(number, dim=-1).indices


def _rrelu(_: Any, args: tuple[Any, ...], __: dict[str, Any]) -> Any:
    """``rrelu_with_noise(x, noise, low, high, training)``: the mean slope; the backward pass reads `noise`."""
    x, noise, low, high = args[:4]
    noise.copy_(torch.where(x <= 0, (low + high) / 2, 1.0))
    return x * noise


def _native_dropout(_: Any, args: tuple[Any, ...], __: dict[str, Any]) -> Any:
    return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)


_MEANS: dict[str, Callable[..., Any]] = {
    "bernoulli": _bernoulli,
    "bernoulli_": _bernoulli,
    "rand": _mean(0.5),
    "rand_like": _mean(0.5),
    "uniform_": _uniform,
    "randn": _mean(0.0),
    "randn_like": _mean(0.0),
    "normal": _normal,
    "normal_": _normal,
    "exponential_": _mean(1.0),
    "geometric_": _mean(1.0),
    "log_normal_": _mean(1.0),
    "cauchy_": _mean(0.0),
    "poisson": lambda _, args, __: args[0].clone(),
    "random_": _integers,
    "randint": _integers,
    "randint_like": _integers,
    "multinomial": _multinomial,
    "native_dropout": _native_dropout,
    "rrelu_with_noise": _rrelu,
}
"""What stands for each random operator. ``randperm`` is left alone: a batch that is shuffled mixes its rows."""


@contextmanager
def seeded() -> Iterator[None]:
    """The same random state of torch, numpy and Python at each start; as it was before afterwards."""
    torch_state, numpy_state, python_state = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        torch.default_generator.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        yield
    finally:
        torch.set_rng_state(torch_state)
        np.random.set_state(numpy_state)
        random.setstate(python_state)


@contextmanager
def default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """What torch makes of a Python number, for the time of a run; None leaves it alone."""
    before = torch.get_default_dtype()
    try:
        if dtype is not None:
            torch.set_default_dtype(dtype)
        yield
    finally:
        torch.set_default_dtype(before)
