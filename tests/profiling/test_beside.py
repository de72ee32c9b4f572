"""A prediction laid beside a measurement: errors, and sentences that name where they come from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import microbatch
from microbatch.curves.beside import Beside
from microbatch.curves.codec import load_profile
from microbatch.curves.explanation import Explanation
from microbatch.curves.profile import Environment, Layer, Peaks, Point, Profile
from microbatch.errors import InvalidProfile
from microbatch.profiling.beside import lay_beside
from microbatch.profiling.explain import explain
from microbatch.profiling.predict import predict
from tests.roofline import works

SIZES = (*range(1, 17), 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
PREDICTED = explain(predict(works.mlp(), works.plain("t4"), sizes=SIZES, layer_sizes=(1, 512)))


def measured(**changes: object) -> Profile:
    """What was predicted, as if it had been measured three times with 0.2 % of noise."""
    points = tuple(
        Point(
            batch_size=point.batch_size,
            samples=tuple(point.samples[0] * (1 + 0.002 * shift) for shift in (-1, 0, 1)),
            overhead_seconds=0.0,
            peak_bytes=point.predicted_peak_bytes,
        )
        for point in PREDICTED.profile.points
        if point.batch_size in SIZES
    )
    profile = Profile(
        points=points, model=PREDICTED.profile.model, dtype="fp16", environment=Environment(device="a T4 somewhere"),
        peaks=PREDICTED.profile.peaks, layers=PREDICTED.profile.layers,
        layer_batch_sizes=PREDICTED.profile.layer_batch_sizes,
    )  # fmt: skip
    return replace(profile, **changes)  # type: ignore[arg-type]


def slower(factor: float, *, above: int = 0, below: int = 10**9) -> tuple[Point, ...]:
    return tuple(
        replace(point, samples=tuple(s * factor for s in point.samples)) if above < point.batch_size < below else point
        for point in measured().points
    )


def laid(profile: Profile) -> Beside:
    found = lay_beside(PREDICTED, profile).beside
    assert found is not None
    return found


def said(profile: Profile, words: str) -> bool:
    return any(words in finding for finding in laid(profile).findings)


def test_a_perfect_prediction_has_no_error() -> None:
    found = laid(measured())
    assert found.median_error < 0.003
    assert len(found.points) == len(SIZES)
    assert all(point.computed for point in found.points)
    assert said(measured(), "No size is off by 10 % or more")
    assert said(measured(), "Every layer's share of the time agrees")
    assert found.device == "a T4 somewhere"


def test_errors_are_predicted_over_measured() -> None:
    found = laid(measured(points=slower(1.25)))
    assert found.median_error == pytest.approx(0.2, abs=0.003)
    assert found.p90_error == pytest.approx(0.2, abs=0.004)
    assert found.bias == pytest.approx(-0.2, abs=0.003)


def test_the_worst_size_is_named() -> None:
    points = tuple(
        replace(point, samples=tuple(3 * s for s in point.samples)) if point.batch_size == 24 else point
        for point in measured().points
    )
    assert said(measured(points=points), "Furthest off at 24, 67 % too fast")


def test_the_end_of_the_curve_that_is_off_is_named() -> None:
    assert said(measured(points=slower(1.5, below=100)), "time that does not grow with the batch")
    assert said(measured(points=slower(1.5, above=200)), "time for each item")


def test_the_layer_whose_share_differs_most_is_named() -> None:
    layers = tuple(
        replace(layer, seconds=tuple(5 * s for s in layer.seconds)) if layer.kind == "elementwise" else layer
        for layer in measured().layers
    )
    assert said(measured(layers=layers), "At 512 ")
    assert said(measured(layers=layers), "no other layer's share differs as much")


def test_layers_with_numbers_are_compared_with_the_row_that_stands_for_them() -> None:
    work = works.decoding(works.LLAMA_3_8B)
    predicted = explain(predict(work, works.plain("h100"), sequence=512, layer_sizes=(1,)))
    rows = [
        Layer(name=layer.name.replace("layers.0", f"layers.{i}"), kind="Linear", parameter_bytes=0, flops_per_item=0.0,
              activation_bytes_per_item=0.0, seconds=(layer.seconds[0] / layer.repeat,))
        for layer in predicted.profile.layers for i in range(layer.repeat)
    ]  # fmt: skip
    points = tuple(replace(p, samples=p.samples * 2) for p in predicted.profile.points)
    profile = Profile(
        points=points, model="llama", mode="decode", dtype="bf16", layers=tuple(rows), layer_batch_sizes=(1,)
    )
    found = lay_beside(predicted, profile).beside
    assert found is not None
    assert any("Every layer's share of the time agrees" in finding for finding in found.findings)


def test_overhead_memory_and_peaks_are_compared() -> None:
    points = tuple(
        replace(point, overhead_seconds=0.4 * point.samples[0], peak_bytes=2 * (point.peak_bytes or 0))
        for point in measured().points
    )
    profile = measured(points=points, peaks=Peaks(flops=50e12, bandwidth=250e9))
    assert said(profile, "Overhead at")
    assert said(profile, "of the measured time")
    assert said(profile, "Memory at")
    assert said(profile, "The device differs: peak 65 TFLOP/s in the prediction, 50 TFLOP/s measured; bandwidth")


def test_cliffs_of_one_side_only_are_named() -> None:
    assert said(measured(points=slower(1.4, above=100)), "Cliffs measured but not predicted: 128.")
    step = replace(PREDICTED.profile, points=slower(1.4, above=100), source="predicted")
    found = lay_beside(explain(step), measured()).beside
    assert found is not None
    assert any("Predicted but not measured: 128" in finding for finding in found.findings)
    both = lay_beside(explain(step), measured(points=slower(1.4, above=100))).beside
    assert both is not None
    assert any("The same cliffs, 128." in finding for finding in both.findings)


def test_another_model_or_dtype_is_said() -> None:
    assert said(measured(model="other"), "The model differs")
    assert said(measured(dtype="bf16"), "The dtype differs: fp16 is predicted, bf16 was measured")


def test_sizes_between_the_computed_ones_are_read_between_them() -> None:
    thin = explain(predict(works.mlp(), works.plain("t4")))
    profile = measured(points=(Point(batch_size=301, samples=(1e-4, 1e-4)), *measured().points[:3]))
    found = lay_beside(thin, replace(profile, points=tuple(sorted(profile.points, key=lambda p: p.batch_size)))).beside
    assert found is not None
    point = found.points[-1]
    assert (point.batch_size, point.computed) == (301, False)
    around = [thin.point(size).seconds for size in (288, 320)]
    assert around[0] < point.predicted < around[1]


def test_a_csv_is_enough(tmp_path: Path) -> None:
    microbatch.save(measured(), tmp_path / "times.csv")
    found = lay_beside(PREDICTED, tmp_path / "times.csv").beside
    assert found is not None
    assert found.median_error < 0.003


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mode": "training"}, "measured in mode training, and inference is predicted"),
        ({"source": "predicted"}, "was predicted, not measured"),
        ({"points": (Point(batch_size=100_000, samples=(1.0, 1.0)),)}, "holds sizes 100000 to 100000"),
    ],
)
def test_what_cannot_be_compared_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidProfile, match=words):
        lay_beside(PREDICTED, measured(**changes))


def test_it_is_in_the_document_and_loads_again(tmp_path: Path) -> None:
    told: Explanation = lay_beside(PREDICTED, measured())
    document = told.to_json()
    assert {"median_error", "p90_error", "points", "findings"} <= set(document["beside"])
    assert set(document["beside"]["points"][0]) == {"batch_size", "measured", "predicted", "error", "computed"}
    microbatch.save(told, tmp_path / "told.json")
    assert load_profile(tmp_path / "told.json") == PREDICTED.profile
