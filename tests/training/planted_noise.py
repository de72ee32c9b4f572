"""Quadratics whose gradient noise scale is known: sample x has the loss ½|H(θ − x)|² with x from N(μ, C), θ fixed.

Its gradient HᵀH(θ − x) has the mean HᵀH(θ − μ) and the covariance HᵀH C HᵀH, whatever the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from microbatch.training.step import TrainStep


@dataclass(frozen=True)
class Planted:
    """A quadratic.

    Attributes:
        dimensions: of θ.
        decay: the i-th standard deviation of the samples is i**-decay.
        noise_scale: tr(Σ) / |G|², by the distance of θ from μ.
        steepness: the i-th curvature is i**-steepness.
        weighted: samples have random weights w; the noise scale is then E w² / (E w)² as large.
    """

    dimensions: int
    noise_scale: float
    decay: float = 0.0
    steepness: float = 0.0
    weighted: bool = False

    def curvature(self) -> Tensor:
        return torch.arange(1, self.dimensions + 1, dtype=torch.float64) ** -self.steepness

    def deviations(self) -> Tensor:
        return torch.arange(1, self.dimensions + 1, dtype=torch.float64) ** -self.decay

    def model(self) -> nn.Module:
        """θ in two parts, at the distance from μ = 0 that gives the noise scale."""
        curvature, deviations = self.curvature(), self.deviations()
        variance = (curvature**2 * deviations).square().sum()
        direction = torch.ones(self.dimensions, dtype=torch.float64)
        gradient = curvature**2 * direction
        theta = direction * (variance / self.noise_scale).sqrt() / gradient.norm()
        return Point(theta)

    def batch(self, items: int, generator: torch.Generator) -> dict[str, Tensor]:
        x = torch.randn(items, self.dimensions, dtype=torch.float64, generator=generator) * self.deviations()
        uniform = torch.rand(items, dtype=torch.float64, generator=generator)
        weight = uniform**2 if self.weighted else torch.ones_like(uniform)
        return {"x": x, "weight": weight}

    def expected(self) -> float:
        return self.noise_scale * (9 / 5 if self.weighted else 1.0)  # of u², u uniform: E w² = 1/5, (E w)² = 1/9

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        losses = 0.5 * (self.curvature() * (output - batch["x"])).square().sum(1)
        return (losses * batch["weight"]).sum(), batch["weight"].sum()

    def step(self, model: nn.Module, micro_batch_size: int, **options: Any) -> TrainStep:
        options = {"forward": lambda m, b: m(b["x"]), "noise_scale": True, **options}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        return TrainStep(model, optimizer, self.loss, micro_batch_size=micro_batch_size, **options)


class Point(nn.Module):
    """A position: its first coordinate and the rest."""

    def __init__(self, position: Tensor) -> None:
        super().__init__()
        self.first, self.rest = nn.Parameter(position[:1].clone()), nn.Parameter(position[1:].clone())

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.first, self.rest]).expand_as(x)


PLANTED = {
    "few dimensions": Planted(dimensions=4, noise_scale=10.0),
    "many dimensions": Planted(dimensions=300, noise_scale=100.0),
    "much signal": Planted(dimensions=20, noise_scale=0.5),
    "much noise": Planted(dimensions=300, noise_scale=200.0),
    "unequal variances": Planted(dimensions=100, noise_scale=30.0, decay=0.5),
    "unequal curvatures": Planted(dimensions=100, noise_scale=8.0, steepness=0.5),
    "weighted": Planted(dimensions=100, noise_scale=20.0, weighted=True),
}
