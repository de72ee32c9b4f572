"""The summary in its promised form, and what it says when something is not known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from microbatch.curves.explanation import Explanation, Ridge
from microbatch.curves.profile import Peaks
from microbatch.errors import InvalidSettings
from microbatch.hardware.device_spec import DeviceSpec
from microbatch.profiling.compare import compare
from microbatch.reporting.text import WIDTH, to_details, to_text
from microbatch.units import THIN_SPACE
from tests.reporting import examples

SUMMARY = """\
Use batch 392.  7 000 rows/s (98 % of best), 56 ms, 30 % of memory.     noise 1.8 %, confidence high
  best trade-off 112 (ridge 109, 101-118)   90 % of best from 256   under 30 ms: 128   largest that fits: 1 024
Avoid 129-160: +31 % time for +0.8 % rows. Another wave: 86 -> 172 tiles on 108 multiprocessors. Pad to 168 or stay at 128.
Avoid 257-288: +17 % time for +0.4 % rows. Cause unknown. Times alone do not tell the cause. Stay at 256.
At 392: compute-bound, 62 % of peak. At 1: memory-bound, 80 % of bandwidth. Dominant layer: layers.0.up (23 %).
Note: Other processes used 12 % of the processor during the run."""  # noqa: E501


def text_of(explanation: Explanation) -> str:
    return to_text(explanation).replace(THIN_SPACE, " ")


def test_summary_has_the_promised_form() -> None:
    assert text_of(examples.rich()) == SUMMARY


@pytest.mark.parametrize("name", ["rich", "from_csv", "empty", "many_cliffs"])
def test_lines_of_figures_stay_short(name: str) -> None:
    first, second, *_ = to_text(getattr(examples, name)()).split("\n")
    assert max(len(first), len(second)) <= WIDTH


def test_names_the_three_worst_of_many_cliffs_and_counts_the_rest() -> None:
    lines = text_of(examples.many_cliffs(9)).split("\n")
    assert [line.split(":")[0] for line in lines if line.startswith("Avoid")] == [
        "Avoid 257-264", "Avoid 289-296", "Avoid 321-328",
    ]  # fmt: skip
    assert "6 smaller cliffs are listed in the details." in lines


UNKNOWN = (
    ("from_csv", "no interval: one time per size, confidence low"),
    ("from_csv", "(ridge 109, no interval)"),
    ("from_csv", "largest that fits: unknown (memory was not measured)"),
    ("from_csv", "What binds is unknown: the device's peaks were not given."),
    ("empty", "best trade-off unknown (no ridge: one size cannot show a ridge)"),
    ("empty", "under 30 ms: no size (the fastest call takes 250 ms, at batch 8)"),
    ("empty", "Throughput still rises at the largest size tried: 8 was the limit given."),
    ("empty", "One size cannot show a cliff"),
)


@pytest.mark.parametrize(("name", "sentence"), UNKNOWN)
def test_says_what_is_not_known(name: str, sentence: str) -> None:
    assert sentence in text_of(getattr(examples, name)())


def test_memory_that_was_only_predicted_is_called_so() -> None:
    explanation = examples.rich()
    memory = replace(explanation.profile.memory, predicted_largest=190_234)  # type: ignore[type-var]
    explanation = replace(explanation, largest_that_fits=None, profile=replace(explanation.profile, memory=memory))
    assert "memory allows about 190 000 (predicted, not run)" in text_of(explanation)


def test_a_prediction_is_called_so() -> None:
    explanation = examples.rich()
    chosen = replace(explanation.recommended, measured=False)
    assert text_of(replace(explanation, recommended=chosen)).startswith("Use batch 392 (predicted, not run).")


def test_a_ridge_from_overhead_is_called_so() -> None:
    explanation = replace(examples.rich(), ridge=Ridge(value=20.0, low=18.0, high=22.0, overhead_bound=True))
    assert "(ridge 20, 18-22, overhead-bound)" in text_of(explanation)


def test_an_inexact_edge_proposes_sizes_to_measure() -> None:
    cliff = replace(examples.rich_cliffs()[0], from_size=96, exact=False, proposed=(104, 112, 120))
    told = text_of(replace(examples.rich(), cliffs=(cliff,)))
    assert "The edge lies after 96, up to 129: measure 104, 112, 120 to find it." in told


SAMPLED = (
    (
        (*range(1, 9), *(round(8 * 1.1**step) for step in range(1, 42)), 392),
        "No zone to avoid: no cliff of 5 % or more",
    ),
    ((1, 2, 64, 128, 392), "too few sizes to exclude one: nothing was run between 2 and 64"),
)


@pytest.mark.parametrize(("sizes", "told"), SAMPLED)
def test_only_sizes_close_together_exclude_a_cliff(sizes: tuple[int, ...], told: str) -> None:
    explanation = examples.of_profile(examples.rich_profile(sizes=tuple(sorted(set(sizes)))))
    assert told in text_of(replace(explanation, cliffs=()))


def test_peaks_without_counted_operators_bind_nothing() -> None:
    explanation = examples.from_csv()
    profile = replace(explanation.profile, peaks=Peaks(flops=1e12, bandwidth=1e9))
    assert "the operators of the model were not counted" in text_of(replace(explanation, profile=profile))


def test_nothing_that_does_not_print_reaches_a_terminal() -> None:
    told = to_text(examples.hostile()) + to_details(examples.hostile())
    assert all(character.isprintable() or character in {"\n", THIN_SPACE} for character in told)


def test_details_hold_every_table() -> None:
    details = to_details(examples.rich())
    for title in ("Sizes to avoid", "Sizes where the time falls", "Sizes worth padding", "Memory", "Layers", "Experts",
                  "Sizes that did not run", "Environment", "All sizes", "Utilisation", "Notes"):  # fmt: skip
        assert f"\n{title}\n" in f"\n{details}"
    for figure in (
        "× 1.3 (1.27-1.33)",
        "108 run at once",
        "period of 128",
        "7 of 8",
        "900 µs",
        "cgroup limit",
        "2.13.0",
    ):
        assert figure in details


def test_details_of_nothing_are_the_points_alone() -> None:
    assert to_details(examples.empty()).split("\n")[0] == "All sizes"


def test_comparison_in_words() -> None:
    profile = examples.rich_profile(repeats=12)
    slower = tuple(
        replace(point, samples=tuple(s * (1.4 if point.batch_size == 64 else 1.0) for s in point.samples))
        for point in profile.points
    )
    told = to_text(compare(profile, replace(profile, points=slower)))
    assert "1 size is slower by" in told
    assert "batch 64: 1.400 × the time (" in told
    assert "No size is faster" in told


def test_profile_as_a_short_table() -> None:
    lines = to_text(examples.rich_profile()).split("\n")
    assert lines[0] == "mlp:depth=8,width=1024, inference, fp32, Intel Xeon 8375C"
    assert len(lines) == 2 + len(examples.SIZES)


def test_device_with_its_ridges() -> None:
    """4·8.1e12/(2·300e9) = 54 and 65e12/300e9 = 217, the figures for a T4."""
    device = DeviceSpec(name="t4", flops={"fp32": 8.1e12, "fp16": 65e12}, bandwidth=3e11, sources={"flops": "vendor"})
    rows = [line.split()[-1] for line in to_text(device).split("\n")[2:4]]
    assert rows == ["54", "217"]
    assert "source of flops: vendor" in to_text(device)


def test_a_result_without_a_form_as_text_is_refused() -> None:
    with pytest.raises(InvalidSettings, match="A dict has no form as text"):
        to_text({})
