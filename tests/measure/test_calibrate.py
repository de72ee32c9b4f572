"""This machine measured into a device: quickly and for real, and with planted times."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch

from microbatch.curves.profile import Environment
from microbatch.errors import InvalidSettings, TooNoisy
from microbatch.hardware.catalogue import parse_device
from microbatch.hardware.constants import DEFAULTS, MOST_CONSTANTS
from microbatch.hardware.device_spec import DeviceSpec
from microbatch.hardware.writer import device_toml
from microbatch.measure import calibrate, calibrate_cpu, peaks
from microbatch.measure.calibrate import measure_device, slug
from microbatch.measure.calibration import fit_constants
from microbatch.measure.findings import Findings
from microbatch.measure.fresh_pages import measure_fresh_bandwidth
from microbatch.measure.host_work import Launch, find_launch, launch_calls
from microbatch.measure.rounds import Call, time_rounds
from microbatch.roofline.time import time_call

pytestmark = pytest.mark.alone


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that a test has time for, and nothing measured before."""
    monkeypatch.setattr(peaks, "_measured", {})
    monkeypatch.setattr(peaks, "_LARGEST_WEIGHTS", 4 << 20)
    monkeypatch.setattr(calibrate_cpu, "_LARGEST_WEIGHTS", 4 << 20)
    monkeypatch.setattr(calibrate, "TOO_BUSY", (1e9, 0.0))  # the machine of a test may be busy
    monkeypatch.setattr(calibrate_cpu, "WORST_FIT", 1e9)
    monkeypatch.setattr(calibrate_cpu, "PASSES", 1)
    monkeypatch.setattr(calibrate, "DTYPES", {"cpu": ("fp32", "fp64"), "cuda": ("fp32",)})


def test_this_machine_becomes_a_device(small: None) -> None:
    threads, shown = torch.get_num_threads(), list[tuple[float, str]]()
    spec, _ = measure_device(threads=1, budget=0.5, name="here", progress=lambda done, what: shown.append((done, what)))
    assert torch.get_num_threads() == threads
    assert parse_device(device_toml(spec), origin="here") == spec
    assert spec.kind == "cpu" and set(spec.constants) == set(DEFAULTS["cpu"])
    assert set(spec.flops) == {"fp32", "fp64"} and spec.multiprocessors == 1
    assert 1e8 < spec.flops["fp64"] < 1.5 * spec.flops["fp32"] < 1e14
    assert spec.launch_seconds is not None and 1e-7 < spec.launch_seconds < 1e-3
    assert all("measured 20" in text and "1 threads" in text for text in spec.sources.values())
    shares = [done for done, _ in shown]
    assert shares == sorted(shares) and shares[0] == 0.0 and shares[-1] < 1.0


def test_no_device_has_more_constants_than_allowed() -> None:
    assert len(DEFAULTS["cpu"]) <= MOST_CONSTANTS
    names = [name for group in calibrate_cpu.GROUPS for name in group.names]
    assert sorted([*names, "fresh_bandwidth_share"]) == sorted(DEFAULTS["cpu"])


TRUE = {
    name: value * factor for (name, value), factor in zip(DEFAULTS["cpu"].items(), np.tile([0.9, 1.6, 0.7, 1.2], 3))
}


def test_planted_constants_are_found_again(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times as the model would have them with other constants lead back to those."""
    true = DeviceSpec(
        name="true", kind="cpu", flops={"fp32": 1e11}, bandwidth=2e10, launch_seconds=5e-6, cache_bytes=8 << 20,
        constants=TRUE,
    )  # fmt: skip
    monkeypatch.setattr(calibrate_cpu, "cache_bytes", lambda: 8 << 20)
    monkeypatch.setattr(calibrate_cpu, "find_launch", lambda times: Launch(in_model=9e-6, alone=5e-6, how="planted"))
    monkeypatch.setattr(calibrate_cpu, "measure_fresh_bandwidth", lambda size: TRUE["fresh_bandwidth_share"] * 2e10)
    found = Findings(conditions="planted", values={"flops.fp32": 1e11, "bandwidth": 2e10})
    made: dict[str, float] = dict.fromkeys(launch_calls(), 1.0)
    for group in calibrate_cpu.GROUPS:
        for probe in group.make():
            launch = 5e-6 if group.alone else 9e-6
            made[probe.name] = time_call(probe.work, replace(true, launch_seconds=launch), batch=2).seconds
    monkeypatch.setattr(calibrate_cpu, "time_rounds", lambda calls, *_, **__: {name: made[name] for name in calls})
    list(calibrate_cpu.find_constants(found, torch.device("cpu"), 1.0))
    assert found.table("constants") == pytest.approx(TRUE, rel=0.03)
    assert found.values["launch_seconds"] == pytest.approx(9e-6, rel=0.03)


def test_probes_of_a_group_have_names_of_their_own(small: None) -> None:
    for group in calibrate_cpu.GROUPS:
        names = [probe.name for probe in group.make()]
        assert len(set(names)) == len(names)


def test_every_probe_runs_what_its_work_says(small: None) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    for group in calibrate_cpu.GROUPS:
        for probe in group.make():
            products = [o for o in probe.work.operators if o.kind in ("matmul", "convolution")]
            if products:
                with FlopCounterMode(display=False) as counter:
                    probe.call()
                assert counter.get_total_flops() == sum(o.repeat * o.flops(1) for o in products)


def test_a_fit_keeps_what_nothing_depends_on() -> None:
    def predict(constants: Mapping[str, float]) -> list[float]:
        return [constants["a"] * x for x in (1.0, 2.0, 3.0)]

    assert fit_constants({"a": 1.0, "idle": 7.0}, predict, [5.0, 10.0, 15.0]) == pytest.approx({"a": 5.0, "idle": 7.0})


def test_one_disturbed_time_does_not_pull_a_fit() -> None:
    sizes = np.arange(1.0, 12.0)
    measured = 2.0 * sizes + 3.0
    measured[4] *= 10
    found = fit_constants(
        {"slope": 1.0, "start": 1.0}, lambda c: list(c["slope"] * sizes + c["start"]), measured.tolist()
    )
    assert found == pytest.approx({"slope": 2.0, "start": 3.0}, rel=0.02)


def test_rounds_alternate_and_the_lower_quartile_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    calls: dict[str, Call] = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    times = iter([1.0, 9.0, 8.0, 2.0, 3.0, 7.0, 6.0, 4.0, 5.0, 5.0])

    def timed(call: Call, device: object) -> float:
        call()
        return next(times)

    monkeypatch.setattr("microbatch.measure.rounds.time_call", timed)
    assert time_rounds(calls, 0.0) == {"a": 2.0, "b": 6.0}
    assert order[2:] == ["a", "b", "b", "a", "a", "b", "b", "a", "a", "b"]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("AMD EPYC 7763 64-Core Processor", "amd-epyc-7763-64-core-processor"),
        ("Intel(R) Xeon(R) CPU @ 2.70GHz", "intel-xeon-cpu-2-70ghz"),
        ("  ", "this-machine"),
    ],
)
def test_a_processor_names_its_device(text: str, name: str) -> None:
    assert slug(text) == name


@pytest.mark.parametrize(
    ("device", "threads", "budget", "says"),
    [("cpu", 0, 1.0, "0 threads"), ("cpu", None, 0.0, "budget of 0"), ("meta", None, 1.0, "no meta device")],
)
def test_bad_requests(device: str, threads: int | None, budget: float, says: str) -> None:
    with pytest.raises(InvalidSettings, match=says):
        measure_device(device, threads=threads, budget=budget)


def test_new_pages_cost_more_than_old_ones() -> None:
    assert 1e7 < measure_fresh_bandwidth(16 << 20) < 1e12


def test_what_a_first_fill_takes_longer_is_the_price_of_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.cycle([0.0, 3.0, 10.0, 11.0])  # 3 s new, 1 s again
    monkeypatch.setattr("microbatch.measure.fresh_pages.time.perf_counter", lambda: next(clock))
    assert measure_fresh_bandwidth(8192) == pytest.approx(4096.0)


@pytest.mark.parametrize(
    ("cores", "threads", "busy", "bearable"),
    [
        (2, 2, 0.0, True),
        (2, 2, 0.2, True),
        (2, 2, 0.4, False),
        (8, 4, 0.5, True),
        (8, 4, 0.65, False),
        (8, 8, 0.2, False),
    ],
)
def test_a_machine_that_others_use_is_not_measured(cores: int, threads: int, busy: float, bearable: bool) -> None:
    environment = Environment(cores=cores, threads=threads, busy_elsewhere=busy)
    if bearable:
        assert calibrate._bearable(environment) == busy
    else:
        with pytest.raises(TooNoisy, match=f"{busy:.0%} of the cores"):
            calibrate._bearable(environment)


def test_passes_in_which_others_were_busy_are_left_out() -> None:
    passes = [(0.1, {"x": 3.0}), (1.5, {"x": 99.0}), (0.0, {"x": 1.0}), (0.3, {"x": 2.0})]
    assert calibrate_cpu._typical(passes) == {"x": 2.0}
    assert calibrate_cpu._typical([(1.5, {"x": 99.0}), (0.9, {"x": 7.0})]) == {"x": 7.0}


def test_times_that_no_constants_explain_are_refused() -> None:
    found = Findings(conditions="planted", values={"flops.fp32": 1e11, "bandwidth": 2e10, "launch_seconds": 5e-6})
    group = calibrate_cpu.GROUPS[0]
    launch = Launch(in_model=5e-6, alone=5e-6, how="")
    with pytest.raises(TooNoisy, match="what any constants predict"):
        calibrate_cpu._fit_group(found, group, group.make(), [1e-6, 1.0, 1e-6], launch)


def test_host_work_is_what_the_layers_between_do_not_take() -> None:
    units = find_launch({"products": 0.0, "both": 0.0, "alone": 1.0}).alone ** -1
    found = find_launch({"products": 1.0, "both": 1.0 + 8 * units * 6e-6, "alone": units * 2e-6})
    assert found.in_model == pytest.approx(6e-6) and found.alone == pytest.approx(2e-6)
