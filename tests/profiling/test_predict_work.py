"""Predicted profiles of works made by hand: figures, limits, memory, and what `explain` makes of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import microbatch
from microbatch.curves.codec import dump_profile, load_profile
from microbatch.curves.explanation import Explanation
from microbatch.curves.micro_batch_choice import choose_micro_batches
from microbatch.errors import InvalidDevice, InvalidSettings
from microbatch.hardware.catalogue import load_device
from microbatch.hardware.device_spec import DeviceSpec
from microbatch.profiling.explain import explain
from microbatch.profiling.predict import find_device, predict
from microbatch.profiling.predict_clock import Settings
from microbatch.profiling.predict_work import predict_work
from microbatch.roofline.balance import with_rates
from microbatch.roofline.time import time_call
from microbatch.roofline.training import with_optimizer
from microbatch.work.operators import Work
from tests.roofline import works
from tests.roofline.test_training import training_work

T4 = works.plain("t4")


def explained(work: Work, device: str | DeviceSpec = T4, **options: object) -> Explanation:
    return explain(predict(work, device, **options))  # type: ignore[arg-type]


def test_the_ridges_of_the_article() -> None:
    for width, dtype, weights, full in ((1024, "fp16", 217, 376), (2048, "fp16", 217, 275), (1024, "fp32", 54, 60)):
        ridge = explained(works.mlp(width=width, dtype=dtype)).ridge
        assert (round(ridge.predicted_weights or 0), round(ridge.predicted_with_activations or 0)) == (weights, full)
    assert explained(works.mlp(width=256)).ridge.predicted_with_activations is None


def test_each_point_is_the_time_of_the_operators() -> None:
    work = works.mlp()
    profile = predict(work, T4)
    for point in profile.points[::7]:
        assert point.samples == (time_call(work, T4, batch=point.batch_size).seconds,)
        assert point.flops == work.flops(point.batch_size)
        assert point.moved_bytes == work.moved_bytes(point.batch_size)
    assert profile.source == "predicted"
    assert profile.peaks.flops == 65e12
    assert "vendor" in profile.peaks.source


def test_no_size_is_called_measured() -> None:
    found = explained(works.mlp())
    assert not found.recommended.measured
    assert found.noise is None
    assert any("no size was run" in warning for warning in found.profile.warnings)
    assert not any("one time" in warning for warning in found.profile.warnings)


def test_every_answer_that_explain_gives_is_there() -> None:
    document = explained(works.mlp()).to_json()
    for key in ("recommended", "balanced", "b90", "largest_that_fits", "fit", "bound", "points", "prediction"):
        assert document[key] not in (None, [], ""), key
    for key in ("cliffs", "padding", "surface", "warnings", "uncounted", "layers"):
        assert isinstance(document[key], list | tuple), key
    json.dumps(document, allow_nan=False)


def test_a_smooth_time_model_has_no_cliffs() -> None:
    found = explained(works.mlp())
    assert (found.cliffs, found.drops, found.period) == ((), (), None)


def test_saved_and_read_back_it_says_the_same(tmp_path: Path) -> None:
    profile = predict(works.decoding(works.LLAMA_3_8B), works.plain("h100"), sequence=512, surface=(128, 512))
    assert load_profile(_written(tmp_path / "raw.json", dump_profile(profile))) == profile
    told = explain(profile)
    microbatch.save(told, tmp_path / "told.json")
    assert explain(tmp_path / "told.json") == told


def _written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_memory_is_weights_cache_and_what_an_operator_touches() -> None:
    shape, context = works.LLAMA_2_7B, 2048
    work = works.decoding(shape)
    memory = predict(work, works.plain("a100"), sequence=context).memory
    assert memory is not None
    assert memory.fixed_bytes == work.weight_bytes
    cache = context * 2 * 32 * 32 * 128 * 2
    touched = 2 * (4096 + 32000)  # the head's input and output are the most
    assert memory.bytes_per_item == pytest.approx(cache + touched)
    room = 0.9 * 85_899_345_920 - work.weight_bytes
    assert memory.largest_that_fits == int(room // (cache + touched))


def test_the_largest_size_is_computed_and_limits_the_choice() -> None:
    found = explained(works.decoding(works.LLAMA_2_7B), works.plain("a100"), sequence=2048)
    assert found.profile.stopped_by == "memory"
    assert found.profile.batch_sizes[-1] == found.largest_that_fits == 59
    assert found.recommended.limited_by == "memory"


def test_a_model_that_does_not_fit_says_so() -> None:
    found = explained(works.decoding(works.LLAMA_3_70B), works.plain("a100"), sequence=2048)
    assert found.largest_that_fits == 0
    assert found.profile.batch_sizes == (1,)
    assert found.recommended.limited_by == "memory"
    assert any(warning.startswith("It does not fit: 141 GB") for warning in found.profile.warnings)


def test_eight_devices_hold_and_speed_up_what_one_cannot() -> None:
    work = works.decoding(works.LLAMA_3_70B)
    h200 = works.plain("h200")
    one = explain(predict_work(work, replace(h200, memory_bytes=None), Settings(sequence=2048)))
    eight = explain(predict_work(work, h200, Settings(sequence=2048, devices=8, kv_heads=8)))
    assert (eight.largest_that_fits or 0) > 100
    assert eight.profile.environment.device == "8 x h200"
    assert 4 < one.points[0].seconds / eight.points[0].seconds < 8
    assert {layer.kind for layer in eight.profile.layers} >= {"matmul", "attention"}
    # Neither limit of decoding depends on how many share the model.
    assert eight.profile.prediction is not None and eight.profile.prediction.decode is not None
    assert one.profile.prediction is not None and one.profile.prediction.decode is not None
    assert eight.profile.prediction.decode.context_limit == one.profile.prediction.decode.context_limit
    assert eight.profile.prediction.decode.half_batch == one.profile.prediction.decode.half_batch


def test_decode_limits_are_told() -> None:
    decode = predict(works.decoding(works.LLAMA_2_7B), works.plain("a100"), sequence=2048).prediction
    assert decode is not None and decode.decode is not None
    assert round(decode.decode.context_limit or 0) == 169
    assert decode.decode.half_batch == pytest.approx(2 * 6.738e9 / (2048 * 524288), rel=1e-3)
    assert predict(works.mlp(), "t4").prediction.decode is None  # type: ignore[union-attr]


def test_training_pays_the_optimizer_once_for_its_micro_batches() -> None:
    one, eight = (predict(training_work(), works.plain("a100"), accumulation=k).prediction for k in (1, 8))
    assert one is not None and one.optimizer is not None
    assert eight is not None and eight.optimizer is not None
    assert one.optimizer.bound_up_to is not None
    assert one.optimizer.seconds > 3 * eight.optimizer.seconds
    assert one.ridge_weights == pytest.approx(44 / 6 * 19.5e12 / 2.039e12, rel=1e-3)
    memory = predict(training_work(), works.plain("a100")).memory
    assert memory is not None
    assert memory.parts == {"weights": 1 << 20, "gradients": 1 << 20, "optimizer": 2 << 20}


def test_the_surface_has_every_length_until_memory_ends() -> None:
    profile = predict(works.decoding(works.LLAMA_2_7B), works.plain("a100"), sequence=2048, surface=(4096, 128, 2048))
    assert sorted({point.sequence for point in profile.surface}) == [128, 2048, 4096]
    largest = {s: max(p.batch_size for p in profile.surface if p.sequence == s) for s in (128, 2048, 4096)}
    assert largest[128] > largest[2048] > largest[4096]
    for point in profile.surface:
        assert point.throughput == pytest.approx(point.batch_size / point.seconds)
        assert point.fits
    at = next(point for point in profile.surface if (point.sequence, point.batch_size) == (2048, 8))
    assert at.seconds == next(p.samples[0] for p in profile.points if p.batch_size == 8)


def test_layers_add_up_to_the_call() -> None:
    profile = predict(works.decoding(works.LLAMA_3_8B), works.plain("h100"), sequence=1024)
    for column, size in enumerate(profile.layer_batch_sizes):
        seconds = next(point.samples[0] for point in profile.points if point.batch_size == size)
        assert sum(layer.seconds[column] for layer in profile.layers) == pytest.approx(seconds)
    rows = {layer.name: layer for layer in profile.layers}
    assert rows["layers.0.mlp.up"].repeat == 32
    assert rows["layers.0.mlp.up"].parameter_bytes == 32 * 2 * 4096 * 14336


def test_devices_are_found_by_name_file_and_number(tmp_path: Path) -> None:
    assert find_device("8xh200") == (8, load_device("h200"))
    assert find_device(T4) == (1, T4)
    with pytest.raises(InvalidDevice, match="Nearest: h200"):
        find_device("8xh20")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "infer"}, "There is no mode 'infer'"),
        ({"dtype": "fp12"}, "There is no dtype 'fp12'"),
        ({"weights_dtype": "int3"}, "There is no dtype 'int3'"),
        ({"sequence": 0}, "A sequence of 0"),
        ({"max_batch_size": 0}, "A largest batch of 0"),
        ({"surface": (128,)}, "no surface"),
    ],
)
def test_mistakes_are_named(options: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidSettings, match=words):
        predict(works.mlp(), "t4", **options)  # type: ignore[arg-type]


def test_a_dtype_that_the_device_lacks_is_named_with_those_it_has() -> None:
    with pytest.raises(InvalidDevice, match=r"t4 has no rate for 'bf16'\. Rates are known for fp32, fp16, int8\."):
        predict(works.mlp(), "t4", dtype="bf16")
    with pytest.raises(InvalidDevice, match=r"t4 has no rate for 'bf16'"):
        predict(works.mlp(dtype="bf16"), "t4")


def test_training_on_several_devices_is_refused() -> None:
    with pytest.raises(InvalidSettings, match="several devices"):
        predict(training_work(), "8xh200")


def test_a_predicted_step_counts_its_update_once() -> None:
    spec = works.plain("a100")
    own = with_optimizer(with_rates(training_work(), spec), "adam")
    call = time_call(own, spec, batch=16)
    update = call.operators[-1].seconds
    assert update > 0.05 * call.seconds
    found = choose_micro_batches(predict(training_work(), spec, sizes=(16,)), 64)
    row = next(row for row in found.rows if row.micro_batch_size == 16)
    assert row.step_seconds == pytest.approx(4 * (call.seconds - update) + update, rel=1e-9)
    shared = choose_micro_batches(predict(training_work(), spec, sizes=(16,), accumulation=4), 64)
    row = next(row for row in shared.rows if row.micro_batch_size == 16)
    assert row.step_seconds == pytest.approx(4 * (call.seconds - update) + update, rel=0.02)
