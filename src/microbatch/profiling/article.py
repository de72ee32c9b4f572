"""The article's experiments, measured on this machine: what each plot claims, and whether it holds here."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from microbatch.curves.profile import ExpertLoad
from microbatch.errors import InvalidSettings, NoAnswer
from microbatch.profiling.article_claims import Verdict
from microbatch.profiling.article_curve import Curve, read_curve
from microbatch.profiling.article_plots import PLOTS, Plot, Quantity, Trial

if TYPE_CHECKING:
    from microbatch.hardware.device_spec import DeviceSpec
    from microbatch.models.loaded import Loaded

Measure = Callable[..., Any]
"""`microbatch.profile`, or what stands in for it."""
Progress = Callable[[float, str], None]

PREDICTED_DTYPES = ("fp16", "fp32")
LARGEST_PREDICTED = 4096
LATE = 1.1
"""Past this many times the budget no further curve is begun."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """The same curves computed for a device that need not be here, and the verdict on them."""

    device: str
    dtype: str
    verdict: Verdict
    curves: tuple[Curve, ...]

    @property
    def place(self) -> str:
        """``t4 in fp16``"""
        return f"{self.device} in {self.dtype}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """One claim with its measured curves and the verdict on them."""

    key: str
    title: str
    claim: str
    quantity: Quantity
    verdict: Verdict
    curves: tuple[Curve, ...]
    predictions: tuple[Prediction, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Article:
    """Every claim, measured here."""

    sections: tuple[Section, ...]
    budget: float
    """Seconds that the measurement was given."""
    wall_seconds: float
    """Seconds that it took."""

    def to_json(self) -> dict[str, Any]:
        """One document: each section with its verdict and, for each curve, the explanation with every raw sample."""
        return {
            "schema_version": 1,
            "budget": self.budget,
            "wall_seconds": self.wall_seconds,
            "sections": [_section_json(section) for section in self.sections],
        }


def _section_json(section: Section) -> dict[str, Any]:
    return {
        "key": section.key,
        "title": section.title,
        "claim": section.claim,
        **section.verdict.to_json(),
        "curves": [_curve_json(curve) for curve in section.curves],
        "predictions": [
            {
                "device": prediction.device,
                "dtype": prediction.dtype,
                **prediction.verdict.to_json(),
                "curves": [_curve_json(curve) for curve in prediction.curves],
            }
            for prediction in section.predictions
        ],
    }


def _curve_json(curve: Curve) -> dict[str, Any]:
    measured = curve.explanation or curve.profile
    document = measured.to_json() if measured is not None else None
    return {
        "label": curve.label,
        "model": curve.model,
        "problem": curve.problem,
        "ridge": msgspec.to_builtins(curve.knee),
        "overhead_bound": curve.overhead_bound,
        "routing": msgspec.to_builtins(curve.routing),
        "profile": document,
    }


def run_article(
    *,
    budget: float = 200.0,
    progress: Progress | None = None,
    measure: Measure | None = None,
    device: str = "cpu",
    device_spec: DeviceSpec | None = None,
    seed: int = 0,
    clock: Callable[[], float] = time.monotonic,
) -> Article:
    """Measure every plot of `PLOTS` and judge its claim; with a `device_spec` compute the same plots for it too.

    Args:
        budget: seconds that the whole may take, about, shared out over the curves.
        progress: called with the share that is done and what is measured now.
        measure: what takes a profile; `microbatch.profile` by default.
        device: where torch runs.
        device_spec: a device to predict for, in each of `PREDICTED_DTYPES` that it has a rate for.
        seed: for the sampling order.
        clock: seconds from any start; the curves left share what is left of the budget.

    Raises:
        InvalidSettings: a budget that is not above zero.
    """
    if not 0 < budget < float("inf"):
        raise InvalidSettings(f"A budget of {budget} seconds is not above zero.", "Give 200 seconds or more.")
    run = _Run(measure or _profile(), budget, progress or _silent, device, seed, clock)
    sections = tuple(_section(plot, run) for plot in PLOTS)
    if device_spec is not None:
        sections = with_predictions(sections, device_spec)
    return Article(sections=sections, budget=budget, wall_seconds=run.elapsed)


class _Run:
    """The curves so far, and how much of the budget is spent."""

    def __init__(
        self,
        measure: Measure,
        budget: float,
        progress: Progress,
        device: str,
        seed: int,
        clock: Callable[[], float],
    ) -> None:
        self.curves: dict[str, Curve] = {}
        self._measure, self._progress, self._device, self._seed = measure, progress, device, seed
        self._budget, self._clock, self._start = budget, clock, clock()
        self._whole = self._left = sum(trial.share for plot in PLOTS for trial in plot.trials)

    @property
    def elapsed(self) -> float:
        return self._clock() - self._start

    def take(self, trial: Trial) -> Curve:
        """Measures one curve; a machine too noisy for it leaves a curve that says so."""
        share, done = trial.share / self._whole, 1 - self._left / self._whole

        def within(fraction: float, text: str) -> None:
            self._progress(done + share * fraction, f"{trial.label}: {text}")

        within(0.0, "loading")
        late = self.elapsed > LATE * self._budget
        self.curves[trial.label] = (
            Curve(label=trial.label, model=trial.model, problem=f"the {self._budget:.0f} s were used up before it.")
            if late
            else self._curve(trial, self._seconds_for(trial), within)
        )
        self._left -= trial.share
        return self.curves[trial.label]

    def _seconds_for(self, trial: Trial) -> float:
        """Its share of the budget; less when the curves before took longer than theirs, down to a quarter."""
        planned = trial.share / self._whole * self._budget
        left = trial.share / self._left * (self._budget - self.elapsed)
        return min(planned, max(left, planned / 4))

    def _curve(self, trial: Trial, budget: float, progress: Progress) -> Curve:
        from microbatch.models.load import load_model

        loaded = load_model(trial.model)
        curve = Curve(label=trial.label, model=trial.model, routing=_routing(loaded, trial.routed))
        try:
            profile = self._measure(
                loaded.model,
                loaded.args,
                device=self._device,
                budget=budget,
                max_batch_size=trial.max_batch_size,
                seed=self._seed,
                progress=progress,
                name=loaded.name,
                unit=loaded.unit,
            )
        except NoAnswer as error:
            return replace(curve, problem=error.message)
        return read_curve(curve, profile)


def _routing(loaded: Loaded, items: int | None) -> tuple[ExpertLoad, ...]:
    """Recorded apart from the profile, at one size for every curve, so that they can be compared."""
    if items is None:
        return ()
    from microbatch.batch.example import with_batch_size
    from microbatch.models.moe import measure_imbalance

    args, kwargs = with_batch_size(loaded.args, loaded.kwargs, items)
    return measure_imbalance(loaded.model, args, kwargs, batch_size=items)


def with_predictions(sections: tuple[Section, ...], spec: DeviceSpec) -> tuple[Section, ...]:
    """The sections with their curves computed for a device, in each dtype that it has a rate for."""
    found = {dtype: _predicted(sections, spec, dtype) for dtype in PREDICTED_DTYPES if dtype in spec.flops}
    return tuple(
        replace(section, predictions=tuple(_prediction(section, spec, dtype, found[dtype]) for dtype in found))
        for section in sections
    )


def _predicted(sections: tuple[Section, ...], spec: DeviceSpec, dtype: str) -> dict[str, Curve]:
    """Every curve of the article, by label; how a gate routes does not depend on the device."""
    from microbatch.profiling.predict import predict

    measured = {curve.label: curve for section in sections for curve in section.curves}
    found = {}
    for label, curve in measured.items():
        profile = predict(curve.model, spec, dtype=dtype, max_batch_size=LARGEST_PREDICTED)
        routing = tuple(replace(load, seconds=None, even_seconds=None) for load in curve.routing)
        found[label] = read_curve(Curve(label=label, model=curve.model, routing=routing), profile)
    return found


def _prediction(section: Section, spec: DeviceSpec, dtype: str, curves: dict[str, Curve]) -> Prediction:
    plot = next(plot for plot in PLOTS if plot.key == section.key)
    return Prediction(
        device=spec.name,
        dtype=dtype,
        verdict=replace(plot.judge(curves), where=f"on {spec.name} in {dtype}, as computed"),
        curves=tuple(curves[curve.label] for curve in section.curves),
    )


def _section(plot: Plot, run: _Run) -> Section:
    curves = [run.take(trial) for trial in plot.trials]
    return Section(
        key=plot.key,
        title=plot.title,
        claim=plot.claim,
        quantity=plot.quantity,
        verdict=plot.judge(run.curves),
        curves=(*curves, *(run.curves[label] for label in plot.also)),
    )


def _profile() -> Measure:
    """Torch is loaded only to measure: an article can be read and drawn without it."""
    from microbatch.profiling.sweep import profile

    return profile


def _silent(_: float, __: str) -> None:
    """No progress is shown."""
