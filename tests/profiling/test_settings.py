"""Settings for other stacks: valid in their own format, and about the size that was recommended."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import replace

import pytest

from microbatch.curves.explanation import Binding, Cliff, Explanation, Recommendation, Ridge
from microbatch.curves.micro_batches import MicroBatch, MicroBatches
from microbatch.curves.profile import Environment, Point, Profile
from microbatch.errors import InvalidSettings
from microbatch.profiling.settings import STACKS, emit

SIZES = (1, 128, 136, 392)
SECONDS = (0.0035, 0.010, 0.013, 0.030)
CLIFF = Cliff(batch_size=136, from_size=128, to_size=160, ratio=1.3, excess=1.22, cause="wave")


def _explanation(mode: str = "inference", unit: str = "rows", latency_target: float | None = None) -> Explanation:
    points = tuple(Point(batch_size=size, samples=(seconds,)) for size, seconds in zip(SIZES, SECONDS))
    bindings = tuple(Binding(batch_size=size, seconds=seconds, low=seconds, high=1.1 * seconds)
                     for size, seconds in zip(SIZES, SECONDS))  # fmt: skip
    recommended = Recommendation(
        batch_size=392, objective="throughput", reason="smallest size within 2 % of the best", limited_by="saturated",
        measured=True, seconds=0.030, throughput=7020.0, share_of_best=0.98, confidence="high",
    )  # fmt: skip
    return Explanation(
        profile=Profile(points=points, model="mlp", mode=mode, unit=unit, dtype="fp32",
                        environment=Environment(device="A processor")),
        recommended=recommended, balanced=109, b90=264, latency_target=latency_target, largest_within_target=None,
        largest_that_fits=None, ridge=Ridge(), fit=None, bound="", cliffs=(CLIFF,), drops=(), padding=(), period=None,
        noise=0.01, points=bindings,
    )  # fmt: skip


def _fitting(stack: str) -> Explanation:
    target = STACKS[stack]
    return _explanation(target.modes[0], (target.units or ("rows",))[0])


def _comments(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.lstrip().startswith("#")]


def test_triton() -> None:
    text = emit(_explanation(), "triton")
    assert re.search(r"^max_batch_size: 392$", text, re.MULTILINE)
    assert re.search(r"^dynamic_batching \{$.*^\}$", text, re.MULTILINE | re.DOTALL)
    assert re.search(r"^  preferred_batch_size: \[ 128, 392 \]$", text, re.MULTILINE)
    assert re.search(r"^  max_queue_delay_microseconds: 3500$", text, re.MULTILINE)
    assert "Slow from 136 to 160: wave." in text


@pytest.mark.parametrize(("target", "delay"), [(0.1, 34_000), (0.05, 0)])
def test_triton_waits_for_what_a_target_leaves(target: float, delay: int) -> None:
    """Less two calls at their upper interval: 33 ms each."""
    assert f"max_queue_delay_microseconds: {delay}\n" in emit(_explanation(latency_target=target), "triton")


def test_triton_prefers_no_size_above_its_largest() -> None:
    beyond = replace(CLIFF, batch_size=520, from_size=512, to_size=600)
    text = emit(replace(_explanation(), cliffs=(beyond,)), "triton")
    assert "preferred_batch_size: [ 392 ]" in text and "no jump in time below it" in text


@pytest.mark.parametrize(
    ("mode", "unit", "option"),
    [("decode", "sequences", "max-num-seqs"), ("prefill", "tokens", "max-num-batched-tokens")],
)
def test_vllm(mode: str, unit: str, option: str) -> None:
    text = emit(_explanation(mode, unit), "vllm")
    settings = [line for line in text.splitlines() if not line.startswith("#")]
    assert settings == [f"{option}: 392"]
    assert f"vllm serve MODEL --{option} 392" in text


@pytest.mark.parametrize(
    ("mode", "settings"),
    [
        ("training", {"per_device_train_batch_size": 392, "gradient_accumulation_steps": 1}),
        ("inference", {"batch_size": 392}),
    ],
)
def test_transformers(mode: str, settings: dict[str, int]) -> None:
    tree = ast.parse(emit(_explanation(mode), "transformers"))
    assert isinstance(tree.body[0], ast.Assign)
    assert ast.literal_eval(tree.body[0].value) == settings


def test_lightning() -> None:
    training = emit(_explanation("training"), "lightning")
    plain = [line for line in training.splitlines() if not line.lstrip().startswith("#")]
    assert plain == ["trainer:", "  accumulate_grad_batches: 1", "data:", "  batch_size: 392"]
    assert "accumulate_grad_batches" not in emit(_explanation("inference"), "lightning")


def test_deepspeed_is_strict_json() -> None:
    settings = json.loads(emit(_explanation("training"), "deepspeed"))
    assert settings == {"train_micro_batch_size_per_gpu": 392, "gradient_accumulation_steps": 1}


def cut(*numbers: tuple[int, int, float]) -> Explanation:
    """A global batch of 1000 in pieces of some sizes: (size, number, seconds)."""
    rows = tuple(
        MicroBatch(
            micro_batch_size=size, num_micro_batches=number, tail=1000 - (number - 1) * size if 1000 % size else 0,
            step_seconds=seconds, samples_per_second=1000 / seconds, chosen=index == 0,
        )
        for index, (size, number, seconds) in enumerate(numbers)
    )  # fmt: skip
    found = MicroBatches(global_batch_size=1000, rows=rows, limited_by="saturated", reason="Larger ones gain nothing.")
    return replace(_explanation("training"), micro_batches=found)


def test_a_global_batch_is_written_in_its_equal_pieces() -> None:
    """128 would be the fastest, and 125 the smallest within 2 % of the fastest among those that divide 1000."""
    explanation = cut((128, 8, 1.0), (125, 8, 1.1), (200, 5, 1.09))
    assert json.loads(emit(explanation, "deepspeed")) == {
        "train_micro_batch_size_per_gpu": 125, "gradient_accumulation_steps": 8,
    }  # fmt: skip
    text = emit(explanation, "transformers")
    assert '"per_device_train_batch_size": 125' in text and '"gradient_accumulation_steps": 8' in text
    assert "# 125 x 8 = 1000: the fastest of equal pieces, 909 rows/s. Larger ones gain nothing." in text
    assert "accumulate_grad_batches: 8\n" in emit(explanation, "lightning")


def test_a_global_batch_without_equal_pieces_is_refused() -> None:
    with pytest.raises(InvalidSettings, match="cuts 1000 into equal pieces"):
        emit(cut((128, 8, 1.0)), "deepspeed")


@pytest.mark.parametrize("stack", STACKS)
def test_every_stack_names_the_size_and_where_it_can_the_reason(stack: str) -> None:
    text = emit(_fitting(stack), stack)
    assert "392" in text and text.endswith("\n") and text.isascii()
    if stack != "deepspeed":
        assert any("smallest size within 2 % of the best (7 020" in line for line in _comments(text))


@pytest.mark.parametrize("stack", [name for name in STACKS if name != "deepspeed"])
def test_nothing_breaks_out_of_a_comment(stack: str) -> None:
    fitting = _fitting(stack)
    hostile = replace(fitting, profile=replace(fitting.profile, model="mlp\nmax_batch_size: 7\r\x00\u2028x"))
    assert "\x00" not in emit(hostile, stack)
    plain, attacked = (emit(one, stack).splitlines() for one in (fitting, hostile))
    assert [line for line in plain if not line.lstrip().startswith("#")] == [
        line for line in attacked if not line.lstrip().startswith("#")
    ]


def test_a_prediction_and_a_noisy_run_say_so() -> None:
    chosen = replace(_explanation().recommended, measured=False, confidence="low")
    text = emit(replace(_explanation(), recommended=chosen), "triton")
    assert "Predicted, not measured" in text and "confidence is low" in text


@pytest.mark.parametrize(
    ("stack", "mode", "unit", "says"),
    [
        ("triton", "training", "rows", "triton serves a trained model, but this profile was measured in mode training"),
        ("vllm", "training", "sequences", "vllm serves a language model, but"),
        ("deepspeed", "inference", "rows", "deepspeed trains a model, but"),
        ("vllm", "inference", "rows", "vllm batches sequences and tokens, but this profile counts rows"),
        ("transformers", "inference", "tokens", "transformers counts whole items, but this profile counts tokens"),
        ("tritn", "inference", "rows", "no stack 'tritn'"),
    ],
)
def test_what_makes_no_sense_is_refused(stack: str, mode: str, unit: str, says: str) -> None:
    with pytest.raises(InvalidSettings) as caught:
        emit(_explanation(mode, unit), stack)
    assert says in caught.value.message and caught.value.remedy


def test_an_unknown_stack_gets_the_names() -> None:
    with pytest.raises(InvalidSettings, match=r"Did you mean triton.*transformers, lightning, deepspeed"):
        emit(_explanation(), "tritn")
