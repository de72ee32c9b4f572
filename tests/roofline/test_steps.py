"""What a rise of the predicted time is put down to."""

from __future__ import annotations

import pytest

from microbatch.hardware.catalogue import load_device
from microbatch.roofline.operator_time import OperatorTime
from microbatch.roofline.steps import Moment, explain_rise
from microbatch.roofline.time import CallTime
from microbatch.work.operators import Work
from tests.roofline import works


def taking(seconds: float, evidence: str = "", *, overhead: float = 0.0, memory: float = 0.0) -> OperatorTime:
    return OperatorTime(
        seconds=seconds, compute_seconds=seconds - overhead - memory, memory_seconds=memory, overhead_seconds=overhead,
        evidence=evidence,
    )  # fmt: skip


def at(size: int, *times: OperatorTime) -> Moment:
    return Moment(size=size, sequence=1.0, call=CallTime(seconds=sum(t.seconds for t in times), operators=times))


T4 = load_device("t4")
ONE = Work(operators=(works.linear(64, 64, "fp16", layer="up"),))

CASES = [
    # before, after, cause, how the evidence begins
    ("8 tiles in 1 wave of 64x256", "9 tiles in 2 waves of 64x256", "wave", "8 -> 9 tiles of 64x256, 1 -> 2 waves "),
    ("8 tiles in 1 wave of 64x64, k in 4 parts", "9 tiles in 2 waves of 64x64, k in 4 parts", "wave", "8 -> 9 tiles"),
    ("8 tiles in 1 wave of 128x64", "33 tiles in 4 waves of 128x64", "tile", "8 -> 33 tiles of 128x64, 1 -> 4 waves"),
    ("86 tiles of 128x64", "99 tiles of 128x64", "tile", "86 -> 99 tiles of 128x64 (up)"),
    ("100 blocks in 1 wave", "140 blocks in 2 waves", "wave", "100 -> 140 blocks, 1 -> 2 waves (up)"),
    ("9 tiles in 1 wave of 64x64", "4 tiles in 1 wave of 128x128", "kernel_switch", "tiles of 128x128 instead of 64x"),
    ("9 tiles in 1 wave of 64x64, k in 3 parts", "9 tiles in 1 wave of 64x64", "kernel_switch",
     "tiles of 64x64, k in 1 parts instead of 3"),
    ("without tiles", "4 tiles in 1 wave of 128x128", "kernel_switch", "without tiles before, 4 tiles in 1 wave"),
    ("9 tiles in 1 wave of 64x64", "9 tiles in 1 wave of 64x64", "unknown", "computing takes 1 s more"),
    ("9 tiles in 1 wave of 64x64", "10 tiles in 1 wave of 64x64", "unknown", "computing takes 1 s more"),
    ("", "", "unknown", "computing takes 1 s more"),
]  # fmt: skip


@pytest.mark.parametrize(("before", "after", "cause", "words"), CASES)
def test_the_evidence_of_the_time_model_gives_the_cause(before: str, after: str, cause: str, words: str) -> None:
    rise = explain_rise(ONE, T4, at(1, taking(1.0, before)), at(2, taking(2.0, after)))
    assert rise.cause == cause
    assert rise.evidence.startswith(words)
    assert rise.layer == "up"


def test_a_rise_around_the_kernel_is_overhead() -> None:
    rise = explain_rise(ONE, T4, at(1, taking(1.0)), at(2, taking(2.0, overhead=0.9)))
    assert rise.cause == "overhead"


def test_the_part_that_rises_is_named() -> None:
    rise = explain_rise(ONE, T4, at(1, taking(1.0)), at(2, taking(2.0, memory=1.2)))
    assert rise.evidence.startswith("moving data takes 1.2 s more in one operator")


def test_operators_alike_count_together() -> None:
    alike = [works.linear(64, 64, "fp16", layer=f"layers.{i}") for i in range(3)]
    work = Work(operators=(works.elementwise(8, "fp16", layer="act"), *alike))
    before = at(1, taking(1.0), *(taking(1.0) for _ in alike))
    after = at(2, taking(1.5), *(taking(1.25) for _ in alike))
    rise = explain_rise(work, T4, before, after)
    assert rise.layer == "layers.0"
    assert "(layers.0 and 2 like it, 60 % of the rise)" in rise.evidence


@pytest.mark.parametrize(
    ("size", "after", "cause", "words"),
    [
        # 1024 columns in tiles of 64x128 on 40 multiprocessors: 5 rows of 8 tiles fill one wave.
        (320, "48 tiles in 2 waves of 64x128", "wave",
         "40 -> 48 tiles of 64x128 on 40 multiprocessors, 1 -> 2 waves (up)."),
        (320, "96 tiles in 3 waves of 64x64", "wave",
         "40 -> 48 tiles of 64x128 on 40 multiprocessors, 1 -> 2 waves (up); 96 tiles in 3 waves of 64x64 is th"),
        (300, "80 tiles in 2 waves of 64x64", "kernel_switch", "tiles of 64x64 instead of 64x128"),
    ],
)  # fmt: skip
def test_a_full_wave_is_the_cause_even_where_another_kernel_takes_over(
    size: int, after: str, cause: str, words: str
) -> None:
    work = Work(operators=(works.linear(1024, 1024, "fp16", layer="up"),))
    before = at(size, taking(1.0, "40 tiles in 1 wave of 64x128"))
    rise = explain_rise(work, T4, before, at(size + 1, taking(2.0, after)))
    assert rise.cause == cause
    assert rise.evidence.startswith(words)
