"""The built-in models without attention or experts: an MLP, a convolutional network, one pooling layer."""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal

import torch
from torch import Tensor, nn

from microbatch.models.loaded import EXAMPLE_BATCH, Loaded


def mlp(*, depth: int = 8, width: int = 1024, seed: int = 0) -> Loaded:
    """`depth` times Linear and ReLU; rows of `width` numbers."""
    layers = OrderedDict[str, nn.Module]()
    for number in range(1, depth + 1):
        layers[f"linear{number}"], layers[f"relu{number}"] = nn.Linear(width, width), nn.ReLU()
    return Loaded(name="mlp", model=nn.Sequential(layers), args=(_noise(seed, width),), unit="rows")


def cnn(*, width: int = 16, depth: int = 1, image: int = 32, classes: int = 10, seed: int = 0) -> Loaded:
    """A residual network of three stages of `depth` blocks; RGB images of `image` pixels a side.

    The stages have `width`, 2·`width` and 4·`width` channels; the second and third halve the image.
    """
    stages = (
        block
        for stage in range(3)
        for block in _stage(width << max(stage - 1, 0), width << stage, depth, stride=1 if stage == 0 else 2)
    )
    model = nn.Sequential(
        _convolution(3, width),
        *stages,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, classes),
    )
    return Loaded(name="cnn", model=model, args=(_noise(seed, 3, image, image),), unit="images")


def pool(
    *, channels: int = 16, image: int = 32, window: int = 3, kind: Literal["max", "mean"] = "max", seed: int = 0
) -> Loaded:
    """One pooling layer of stride 2, which has no weights to share between the items of a batch."""
    layer = nn.MaxPool2d(window, stride=2) if kind == "max" else nn.AvgPool2d(window, stride=2)
    return Loaded(name="pool", model=layer, args=(_noise(seed, channels, image, image),), unit="images")


class Residual(nn.Module):
    """Two 3×3 convolutions beside a shortcut (He et al., arXiv 1512.03385); x: (batch, channels, height, width)."""

    def __init__(self, inputs: int, outputs: int, *, stride: int) -> None:
        super().__init__()
        self.first = _convolution(inputs, outputs, stride=stride)
        self.second = _convolution(outputs, outputs)
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.second(self.first(x)) + self.shortcut(x))


def _stage(inputs: int, outputs: int, depth: int, *, stride: int) -> list[Residual]:
    first = Residual(inputs, outputs, stride=stride)
    return [first, *(Residual(outputs, outputs, stride=1) for _ in range(depth - 1))]


def _convolution(inputs: int, outputs: int, *, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())


def _noise(seed: int, *shape: int) -> Tensor:
    """An example batch of normal noise: (EXAMPLE_BATCH, *shape)."""
    return torch.randn(EXAMPLE_BATCH, *shape, generator=torch.Generator().manual_seed(seed))
