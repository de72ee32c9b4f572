"""Work of one call of a model, operator by operator, without computing it.

The model runs once on fake tensors, which have shapes and no data, so a count takes milliseconds and no memory at
any batch size. Where the path through the model depends on its data (a mixture-of-experts gate, a loop over the
tokens that are left), fake tensors cannot decide; the model then runs once for real, and the result says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from microbatch.capture.moved import tensors_in
from microbatch.capture.stored import packed_bytes
from microbatch.capture.tally import Tally, tallying
from microbatch.errors import InvalidModel, InvalidSettings

MODES = ("inference", "training")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCount:
    """One module and the operators that it ran itself, its submodules' left out."""

    name: str
    """Name in the model; empty for the model itself, and for work that no module ran."""
    kind: str
    """The class of the module, as in ``Linear``."""
    parameter_bytes: int
    flops: float
    moved_bytes: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Count:
    """Work of one call. The layers' FLOPs and bytes add up to the model's.

    Attributes:
        flops: floating-point operations, one multiply-add counted as two.
        moved_bytes: bytes moved if every operator reads its inputs and writes its results once.
        weight_bytes: bytes of the parameters, packed ones included.
        uncounted: operators that compute and have no formula, as in ``aten::_fft_r2c``; `flops` lacks them.
        layers: modules that ran operators, in the order in which they first did.
        computed: the model had to run for real, because its path depends on its data.
    """

    flops: float
    moved_bytes: float
    weight_bytes: int
    uncounted: tuple[str, ...]
    layers: tuple[LayerCount, ...]
    computed: bool = False


def count(
    model: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object], *, mode: str = "inference"
) -> Count:
    """Count one call ``model(*args, **kwargs)``; training adds the backward pass of the sum of the outputs.

    The model is counted as it stands (train or eval) and is left as it was: parameters, gradients, buffers, hooks
    and the random state. Work of the optimizer and of the loss is not part of the model and not counted.

    Raises:
        InvalidSettings: an unknown mode.
        InvalidModel: training was asked for and no output is a tensor.
    """
    if mode not in MODES:
        raise InvalidSettings(f"A model cannot be counted in mode {mode!r}.", f"Use one of {', '.join(MODES)}.")
    model = getattr(model, "_orig_mod", model)  # a compiled model does the same work as the one it was made from
    try:
        tally, computed = _run(model, args, dict(kwargs), mode, _fake), False
    except InvalidModel:
        raise
    except Exception as reason:
        # Fake tensors refuse in many ways (data-dependent values, kernels without shapes, .numpy()). Whatever the
        # reason, a real run either counts the model or raises the model's own error.
        logger.debug("Counting %s by a real run: %s", type(model).__name__, reason)
        tally, computed = _run(model, args, dict(kwargs), mode, _real), True
    return _summary(model, tally, computed=computed)


Bind = Callable[[Any], Any]


@contextmanager
def _fake() -> Iterator[Bind]:
    """Turns tensors into fake ones; parameters follow by themselves when an operator meets them."""
    with FakeTensorMode(allow_non_fake_inputs=True) as fake_mode:
        yield lambda tree: tree_map_only(Tensor, fake_mode.from_tensor, tree)


@contextmanager
def _real() -> Iterator[Bind]:
    """Copies tensors (they are small: buffers and the example), so that the originals keep their values."""
    with torch.random.fork_rng():
        yield lambda tree: tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), tree)


def _run(
    model: nn.Module,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    mode: str,
    world: Callable[[], AbstractContextManager[Bind]],
) -> Tally:
    training = mode == "training"
    with world() as bind, slow_attention(), torch.set_grad_enabled(training):
        buffers, args, kwargs = bind((dict(model.named_buffers()), args, kwargs))
        with tallying(model) as tally:
            output = torch.func.functional_call(model, buffers, args, kwargs)
            if training:
                backward(model, output, list(model.parameters()))
    return tally


def backward(model: nn.Module, output: object, parameters: Sequence[Tensor]) -> None:
    """Runs the backward pass of the sum of the outputs without touching ``.grad``.

    Raises:
        InvalidModel: no output is a tensor.
    """
    outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
    if not tensors_in(output):
        raise InvalidModel(
            f"{type(model).__name__} returned {type(output).__name__}, which holds no tensor to train on.",
            "Return a tensor, or a tuple, list or dict of tensors.",
        )
    if outputs and parameters:
        torch.autograd.grad(outputs, parameters, [torch.ones_like(tensor) for tensor in outputs], allow_unused=True)


@contextmanager
def slow_attention() -> Iterator[None]:
    """torch's fused encoder layer hides its operators; the same layer in parts does the same arithmetic."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def _summary(model: nn.Module, tally: Tally, *, computed: bool) -> Count:
    modules = dict(model.named_modules())
    work: dict[str, list[float]] = {}
    for record in tally.records:
        done = work.setdefault(record.layer, [0.0, 0.0])
        done[0] += record.flops
        done[1] += record.moved.total
    layers = tuple(
        LayerCount(
            name=name,
            kind=type(modules[name]).__name__,
            parameter_bytes=_weight_bytes(modules[name], recurse=False),
            flops=flops,
            moved_bytes=moved,
        )
        for name, (flops, moved) in work.items()
        if flops or moved
    )
    return Count(
        flops=sum(layer.flops for layer in layers),
        moved_bytes=sum(layer.moved_bytes for layer in layers),
        weight_bytes=_weight_bytes(model, recurse=True),
        uncounted=tuple(sorted({record.name for record in tally.records if record.uncounted})),
        layers=layers,
        computed=computed,
    )


def _weight_bytes(module: nn.Module, *, recurse: bool) -> int:
    own = sum(parameter.nbytes for parameter in module.parameters(recurse=recurse))
    return own + sum(packed_bytes(part) for part in (module.modules() if recurse else [module]))
