"""The machine as it was: from counters that the test makes up, and from this machine."""

from __future__ import annotations

import getpass
import os
import platform
from pathlib import Path

import msgspec
import pytest
import torch

from microbatch.measure import load
from microbatch.measure.load import CpuTimes, LoadWatch, shares

pytestmark = pytest.mark.alone


def times(busy: float, steal: float, total: float, own: float) -> CpuTimes:
    return CpuTimes(busy=busy, steal=steal, total=total, own=own)


def test_shares_of_other_processes_and_of_other_machines() -> None:
    before, after = times(10, 1, 100, 4), times(18, 3, 120, 9)
    assert shares(before, after) == pytest.approx((3 / 20, 2 / 20))


def test_own_work_is_not_load() -> None:
    assert shares(times(0, 0, 0, 0), times(10, 0, 20, 10.01)) == (0.0, 0.0)


def test_a_span_too_short_to_count_gives_none() -> None:
    assert shares(times(1, 0, 5, 1), times(1, 0, 5.02, 1)) == (None, None)


def test_clocks_and_throttling_are_collected_at_every_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks, throttling = iter([2e9, 1.5e9, 2.1e9]), iter([False, True, False])
    monkeypatch.setattr(load, "_clock", lambda device: next(clocks))
    monkeypatch.setattr(load, "_throttled", lambda device: next(throttling))
    watch = LoadWatch()
    watch.start()
    watch.sample()
    environment = watch.stop()
    assert environment.clock_hz == (2e9, 1.5e9, 2.1e9)
    assert environment.throttled is True


def test_a_machine_that_hides_its_clock_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def hidden() -> None:
        raise NotImplementedError

    monkeypatch.setattr("psutil.cpu_freq", hidden)
    watch = LoadWatch()
    watch.start()
    assert watch.stop().clock_hz == ()


def test_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_PROC_BIND", "true")
    monkeypatch.setenv("LD_PRELOAD", "/opt/secret/libtcmalloc.so.4")
    watch = LoadWatch("cpu", settings={"torch.compile": "on"})
    watch.start()
    environment = watch.stop()
    assert environment.device
    assert environment.threads == torch.get_num_threads()
    assert environment.memory_bytes is not None and environment.memory_bytes > 1 << 28
    assert environment.versions["torch"] == torch.__version__
    assert environment.versions["python"] == platform.python_version()
    assert {"numpy", "microbatch"} <= set(environment.versions)
    assert environment.settings["torch.compile"] == "on"
    assert environment.settings["OMP_PROC_BIND"] == "true"
    assert environment.settings["LD_PRELOAD"] == "libtcmalloc.so.4"


def test_nothing_tells_who_or_where() -> None:
    watch = LoadWatch()
    watch.start()
    text = msgspec.json.encode(watch.stop()).decode()
    for secret in (platform.node(), os.getcwd(), str(Path.home())):
        assert secret not in text
    assert f'"{getpass.getuser()}"' not in text


def test_the_processor_is_read_from_the_kernel() -> None:
    text = "processor\t: 0\nmodel name\t: Some CPU @ 2.70GHz\nprocessor\t: 1\nmodel name\t: Other\n"
    assert load._processor_name(text) == "Some CPU @ 2.70GHz"
    assert load._processor_name("Hardware: none") == ""


def test_the_math_libraries_are_read_from_torch() -> None:
    config = (
        "  - Intel(R) oneAPI Math Kernel Library Version 2024.2-Product Build 20240605\n"
        "  - Intel(R) MKL-DNN v3.12.0 (Git Hash 80afa71)\n  - OpenMP 201511 (a.k.a. OpenMP 4.5)\n"
        "  - CPU capability usage: AVX2\n"
    )
    wanted = {"mkl": "2024.2", "onednn": "3.12.0", "openmp": "201511", "capability": "AVX2"}
    assert load._libraries(config) == wanted
