"""``torchvision:NAME`` and ``timm:NAME``: their models with random weights, and an example image of the usual size.

``image=160`` after the name chooses another size, as in ``timm:resnet50,image=160``. Nothing is fetched.
"""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from microbatch.errors import InvalidModel, InvalidSettings
from microbatch.models.loaded import EXAMPLE_BATCH, Loaded, Weights
from microbatch.models.torchvision_operators import make_torchvision_importable

DEFAULT_IMAGE = 224
FRAMES = 16
"""Frames of a video, as the video models of torchvision were trained with."""
OWN_EXAMPLE = "Write a function that returns the model and an example, and name it as file.py:callable."


@dataclass(frozen=True, slots=True)
class Built:
    """A model as its package makes it.

    Attributes:
        model: on the device that was the default while it was built.
        shapes: of its inputs, without the batch.
        unit: what one item is called.
    """

    model: nn.Module
    shapes: tuple[tuple[int, ...], ...]
    unit: str = "images"


def load_vision(text: str, *, dtype: torch.dtype | None = None, weights: Weights = "load") -> Loaded:
    """The model that ``torchvision:NAME`` or ``timm:NAME`` names, in eval mode, with random weights.

    Args:
        dtype: of weights and images; fp32 when left out.
        weights: ``"meta"`` builds shapes only, without memory.

    Raises:
        InvalidModel: the package is missing, has no such model, or the model takes no batch of images.
        InvalidSettings: a setting other than ``image``, or an image that the model does not take.
    """
    package, _, rest = text.partition(":")
    name, image = _settings(package, rest)
    library = _library(package, text)
    built = _built(PACKAGES[package], library, name, image, on_meta=weights == "meta")
    images = tuple(_noise(shape, dtype or torch.float32, on_meta=weights == "meta") for shape in built.shapes)
    return Loaded(name=text, model=built.model.to(dtype).eval(), args=images, unit=built.unit)


def _settings(package: str, rest: str) -> tuple[str, int | None]:
    name, *pairs = (part.strip() for part in rest.split(","))
    if not name:
        raise InvalidModel(f"{package}: names no model.", f"Write {package}:resnet50.")
    image = None
    for pair in pairs:
        key, _, value = pair.partition("=")
        if key != "image" or not value.isdecimal() or not 0 < int(value) < _LARGEST_IMAGE:
            raise InvalidSettings(
                f"{package}:{name} has no setting {pair!r}.", f"Write {package}:{name},image=160, or leave it out."
            )
        image = int(value)
    return name, image


def _library(package: str, text: str) -> Any:
    make_torchvision_importable()
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise InvalidModel(
            f"{text} needs the package {package}, which is not installed.",
            "Install it: pip install 'microbatch[vision]'.",
        ) from error


def _built(make: Maker, library: Any, name: str, image: int | None, *, on_meta: bool) -> Built:
    """Built on the meta device where that is asked for and the model's own code allows it, else moved there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not on_meta:
            return make(library, name, image)
        try:
            with torch.device("meta"):
                return make(library, name, image)
        except (RuntimeError, NotImplementedError):  # it reads values of its tensors while it is built
            built = make(library, name, image)
            return Built(built.model.to("meta"), built.shapes, built.unit)


def _torchvision(library: Any, name: str, image: int | None) -> Built:
    importlib.import_module("torchvision.models")
    if name not in library.models.list_models():
        raise InvalidModel(f"torchvision has no model {name!r}.", _close(name, library.models.list_models()))
    builder = library.models.get_model_builder(name)
    kind = builder.__module__.split(".")[2]
    if kind == "detection":
        raise InvalidModel(f"torchvision:{name} takes a list of images, not a batch.", OWN_EXAMPLE)
    # Segmentation models would fetch their backbone otherwise.
    bare = {"weights_backbone": None} if "weights_backbone" in inspect.signature(builder).parameters else {}
    model = _of_size(partial(builder, weights=None, **bare), "image_size", image)
    shape = (3, *_usual_size(library, name, image))
    if kind == "video":
        return Built(model, ((shape[0], FRAMES, *shape[1:]),), "clips")
    return Built(model, (shape, shape) if kind == "optical_flow" else (shape,), _UNITS.get(kind, "images"))


def _usual_size(library: Any, name: str, image: int | None) -> tuple[int, int]:
    """Of the images that the default weights were made for; the weights themselves are not fetched."""
    if image is not None:
        return image, image
    default = getattr(library.models.get_model_weights(name), "DEFAULT", None)
    # A preset bound to its arguments; those without any, as of optical flow, take every size.
    size = getattr(getattr(default, "transforms", None), "keywords", {}).get("crop_size")
    if size is None:
        return DEFAULT_IMAGE, DEFAULT_IMAGE
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[-1]))


def _timm(library: Any, name: str, image: int | None) -> Built:
    architecture = name.partition(".")[0]  # behind the point: which weights, as in resnet50.a1_in1k
    if not library.is_model(architecture):
        raise InvalidModel(f"timm has no model {name!r}.", _close(architecture, library.list_models()))
    try:
        model: Any = _of_size(partial(library.create_model, name, pretrained=False), "img_size", image)
    except RuntimeError as error:
        if "pretrained tag" not in str(error).lower():
            raise
        known = library.list_models(f"{architecture}.*", pretrained=True)
        raise InvalidModel(f"timm has no weights {name!r}.", _close(name, known)) from error
    channels, *size = model.pretrained_cfg.get("input_size") or (3, DEFAULT_IMAGE, DEFAULT_IMAGE)
    return Built(model, ((channels, *(size if image is None else (image, image))),))


def _of_size(build: Callable[..., nn.Module], keyword: str, image: int | None) -> nn.Module:
    """With `image` told to models that are built for one size; convolutional ones take any and know no such keyword."""
    if image is not None:
        with suppress(TypeError):
            return build(**{keyword: image})
    return build()


def _close(name: str, known: Sequence[str]) -> str:
    """The nearest names, or where all of them are listed: there are too many for a line."""
    close = get_close_matches(name, known, n=3)
    return f"Did you mean {' or '.join(close)}?" if close else "Its function list_models lists them all."


def _noise(shape: tuple[int, ...], dtype: torch.dtype, *, on_meta: bool) -> Tensor:
    """(EXAMPLE_BATCH, *shape) of normal noise."""
    if on_meta:
        return torch.empty(EXAMPLE_BATCH, *shape, dtype=dtype, device="meta")
    return torch.randn(EXAMPLE_BATCH, *shape, generator=torch.Generator().manual_seed(0)).to(dtype)


Maker = Callable[[Any, str, int | None], Built]

PACKAGES: dict[str, Maker] = {"torchvision": _torchvision, "timm": _timm}
"""How each package makes the model of a name, at a size of image or its usual one."""

_UNITS = {"optical_flow": "pairs of images"}
_LARGEST_IMAGE = 100_000
