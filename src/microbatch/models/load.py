"""From a MODEL as the user writes it to a model that can be measured or captured.

To support a further form, write a function from the text to a `Loaded` and its row in `FORMS`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from microbatch.errors import InvalidModel, InvalidSettings
from microbatch.models.archive import load_archive
from microbatch.models.built_in import BUILT_IN, build
from microbatch.models.hugging_face import load_folder
from microbatch.models.loaded import Example, Loaded, Weights
from microbatch.models.named_object import is_named
from microbatch.models.pickles import is_pickle, refuse_pickle
from microbatch.models.spelling import nearest
from microbatch.models.user_code import from_callable
from microbatch.models.vision import PACKAGES, load_vision

TORCH_DTYPES: dict[str, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
"""Dtypes that a model can be loaded in, by our spelling (tf32 is stored as fp32)."""

WHAT_WORKS = (
    f"Use a built-in model ({', '.join(BUILT_IN)}), a Hugging Face folder, a .pt2 archive, torchvision:NAME, "
    "timm:NAME, package.module:callable or file.py:callable."
)

Form = Callable[[str, torch.dtype | None, Weights], Loaded]
"""Loads a text of one form, in a dtype where one is asked for."""


def load_model(text: str, *, dtype: str | None = None, weights: Weights = "load") -> Loaded:
    """The model that `text` names, and an example of its input.

    A MODEL is a built-in model with settings (``mlp:depth=8,width=1024``); a Hugging Face folder; a ``torch.export``
    archive (``.pt2``); ``torchvision:NAME`` or ``timm:NAME``; or a callable that takes no argument, as
    ``package.module:callable`` or ``file.py:callable``. It returns ``(model, example)`` or
    ``(model, example, options)``: the example is a tensor, a tuple of positional or a dict of keyword arguments;
    options may hold ``unit`` (what one item is called) and ``loss``. Only such a callable's own code ever runs.

    Args:
        dtype: fp64, fp32, tf32, fp16 or bf16: the model and the floating-point tensors of the example are converted.
        weights: ``"load"``: from the files where there are any, else a random start; ``"random"``: without opening
            them; ``"meta"``: shapes without memory, on the meta device, for folders, torchvision and timm; the other
            forms build what they build.

    Raises:
        InvalidModel: the form is unknown or not supported, something is missing or broken, or code of the user's
            raised or returned something else.
        InvalidSettings: a setting of a built-in model, or the dtype, is not valid.
    """
    if dtype is not None and dtype not in TORCH_DTYPES:
        raise InvalidSettings(f"A model cannot be loaded in {dtype!r}.", nearest(dtype, TORCH_DTYPES))
    form = next(form for matches, form in FORMS if matches(text))
    return form(text, None if dtype is None else TORCH_DTYPES[dtype], weights)


def _converting(build_it: Callable[[str], Loaded]) -> Form:
    """A form whose models come in their own dtype and are converted afterwards."""

    def load(text: str, dtype: torch.dtype | None, _: Weights) -> Loaded:
        loaded = build_it(text)
        return loaded if dtype is None else converted(loaded, dtype)

    return load


def converted(loaded: Loaded, dtype: torch.dtype) -> Loaded:
    """The same with floating-point weights and inputs of that dtype, in every mode."""

    def convert(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    def convert_example(example: Example) -> Example:
        args, kwargs = tree_map_only(Tensor, convert, example)
        return args, kwargs

    example_at, build_mode = loaded.example_at, loaded.build_mode
    args, kwargs = convert_example((loaded.args, loaded.kwargs))
    return dataclasses.replace(
        loaded,
        model=loaded.model.to(dtype),
        args=args,
        kwargs=kwargs,
        example_at=example_at and (lambda batch, sequence: convert_example(example_at(batch, sequence))),
        build_mode=build_mode and (lambda mode, sequence: converted(build_mode(mode, sequence), dtype)),
    )


def _load_vision(text: str, dtype: torch.dtype | None, weights: Weights) -> Loaded:
    return load_vision(text, dtype=dtype, weights=weights)


def _load_archive(text: str, dtype: torch.dtype | None, _: Weights) -> Loaded:
    return load_archive(text, dtype=dtype)


def _load_folder(text: str, dtype: torch.dtype | None, weights: Weights) -> Loaded:
    return load_folder(text, dtype=dtype, weights=weights)


def _refuse_gguf(text: str) -> Loaded:
    raise InvalidModel(
        f"{text} is a GGUF file, whose weights torch cannot run as they are.",
        f"Convert it to a folder first: microbatch convert {text} {Path(text).stem}",
    )


def _refuse_unknown(text: str) -> Loaded:
    if text.endswith(".py"):
        raise InvalidModel(f"{text!r} names a file but no callable in it.", f"Write {text}:callable.")
    if Path(text).is_file():
        raise InvalidModel(f"{text} is a file of no form that is known.", WHAT_WORKS)
    raise InvalidModel(f"There is no model {text!r}.", f"{_close_built_in(text)}{WHAT_WORKS}")


def _close_built_in(text: str) -> str:
    sentence = nearest(text.partition(":")[0], BUILT_IN)
    return f"{sentence} " if sentence.startswith("Did") else ""


def _is_built_in(text: str) -> bool:
    return text.partition(":")[0] in BUILT_IN


def _is_folder(text: str) -> bool:
    return bool(text) and Path(text).is_dir()


FORMS: tuple[tuple[Callable[[str], bool], Form], ...] = (
    (_is_built_in, _converting(build)),
    (is_pickle, _converting(refuse_pickle)),
    (lambda text: text.endswith(".pt2"), _load_archive),
    (lambda text: text.partition(":")[0] in PACKAGES and ":" in text, _load_vision),
    (lambda text: text.lower().endswith(".gguf"), _converting(_refuse_gguf)),
    (_is_folder, _load_folder),
    (is_named, _converting(from_callable)),
    (lambda _: True, _converting(_refuse_unknown)),
)
"""Forms in the order in which they are tried: whether a text is of the form, and how it is loaded."""
