"""What the article claims: for each plot the models to measure and the function that judges their curves.

To add a plot, write its row in `PLOTS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from microbatch.profiling.article_claims import (
    Curves,
    Verdict,
    judge_convolution,
    judge_decoder,
    judge_mlp,
    judge_moe,
    judge_widths,
)

Quantity = Literal["seconds", "gain"]

WIDTHS = (64, 128, 256, 512, 2048, 4096)
"""Beside 1024, which has a plot of its own."""
CONTEXTS = (32, 256)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One curve to measure.

    Attributes:
        label: its name in the plot, different from every other.
        model: the MODEL.
        share: its part of the budget, in proportion to the others.
        max_batch_size: the largest size that is worth its time.
        routed: items of the batch whose routing is recorded, for a mixture of experts.
    """

    label: str
    model: str
    share: float
    max_batch_size: int
    routed: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Plot:
    """One claim of the article.

    Attributes:
        quantity: what is drawn: seconds per call, or the gain in items per second over the smallest batch.
        also: labels of earlier plots that are drawn again to compare with.
    """

    key: str
    title: str
    claim: str
    quantity: Quantity
    trials: tuple[Trial, ...]
    judge: Callable[[Curves], Verdict]
    also: tuple[str, ...] = ()


def _width_trial(width: int) -> Trial:
    return Trial(
        label=f"width {width}",
        # As deep as in the article up to 1024; wider layers outgrow every cache by themselves.
        model=f"mlp:depth={8 if width < 2048 else 2},width={width}",
        share=6 if width < 2048 else 12,
        max_batch_size=1024 if width < 2048 else 256,
    )


def _decoder_trial(context: int, *, cache: bool) -> Trial:
    return Trial(
        label=f"{'cache' if cache else 'no cache'}, {context} tokens",
        model=f"decoder:depth=4,context={context},cache={'true' if cache else 'false'}",
        share=10 if cache else 14,
        max_batch_size=128 if cache else max(8, 1024 // context),
    )


def _moe_trial(name: str) -> Trial:
    return Trial(
        label=f"{name} routing",
        model=f"moe:depth=1,experts=64,hidden=256,routing={name.lower()}",
        share=10,
        max_batch_size=256,
        routed=64,
    )


_MLP = Trial(label="MLP 8x1024", model="mlp:depth=8,width=1024", share=24, max_batch_size=512)
_WIDTH_TRIALS = tuple(_width_trial(width) for width in WIDTHS)

PLOTS: tuple[Plot, ...] = (
    Plot(
        key="mlp",
        title="An MLP of depth 8 and width 1024",
        claim="Below a certain batch more rows are nearly free, above it the time grows with them.",
        quantity="seconds",
        trials=(_MLP,),
        judge=partial(judge_mlp, label=_MLP.label),
    ),
    Plot(
        key="widths",
        title="Widths from 64 to 4096",
        claim="The knee is at the same batch for every width, and small nets stay flat up to 512.",
        quantity="seconds",
        trials=_WIDTH_TRIALS,
        judge=partial(judge_widths, labels=tuple(trial.label for trial in (*_WIDTH_TRIALS, _MLP))),
        also=(_MLP.label,),
    ),
    Plot(
        key="convolution",
        title="A convolutional network and a pooling layer",
        claim="A convolution uses each weight at every position, so batching helps it less than an MLP.",
        quantity="gain",
        trials=(
            Trial(label="cnn", model="cnn", share=12, max_batch_size=128),
            Trial(label="pooling layer", model="pool", share=8, max_batch_size=256),
        ),
        judge=partial(judge_convolution, mlp=_MLP.label),
        also=(_MLP.label,),
    ),
    Plot(
        key="decoder",
        title="A decode step with and without a KV cache",
        claim="A transformer acts as an MLP apart from its KV cache, which grows with the batch and the context.",
        quantity="gain",
        trials=tuple(_decoder_trial(context, cache=cache) for cache in (True, False) for context in CONTEXTS),
        judge=partial(judge_decoder, contexts=CONTEXTS),
    ),
    Plot(
        key="moe",
        title="A mixture of experts under three routings",
        claim="The gate of a mixture of experts spreads a batch over the experts unevenly.",
        quantity="seconds",
        trials=tuple(_moe_trial(name) for name in ("even", "Zipf", "measured")),
        judge=judge_moe,
    ),
)
