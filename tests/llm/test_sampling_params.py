"""Parameters are checked when they are made, in the user's own words."""

from __future__ import annotations

from typing import Any

import pytest

from microbatch.errors import InvalidRequest
from microbatch.llm.sampling_params import SamplingParams, check_params, check_token_ids

NAN, INFINITY = float("nan"), float("inf")
WRONG: dict[str, list[Any]] = {
    "max_tokens": [0, -1, 1.5, "4", True],
    "min_tokens": [-1, None, 0.5, 17],
    "temperature": [-0.1, NAN, INFINITY, "hot", True],
    "top_p": [0, -1, 1.01, NAN],
    "top_k": [-1, 1.5],
    "min_p": [-0.1, 1.1],
    "repetition_penalty": [0, -1, INFINITY],
    "presence_penalty": [2.1, -2.1, NAN],
    "frequency_penalty": [2.1, -2.1, None],
    "logit_bias": [5, {"a": 1}, {-1: 1.0}, {1: NAN}, {1: INFINITY}, {True: 1}],
    "seed": [1.5, "x", True],
    "n": [0, None, 1.0],
    "logprobs": [-1, 1001, 1.0],
    "prompt_logprobs": [-1],
    "stop": ["", [""], [1], 5, ["x"] * 65],
    "stop_token_ids": [[-1], "3", ["a"], 3, [1] * 65],
    "include_stop_in_output": [1, None],
    "ignore_eos": ["yes"],
    "logits_processors": [[5], 5, None],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_wrong_value_is_named_with_what_is_allowed(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{name: value})
    assert name in caught.value.message
    assert caught.value.remedy


def test_every_parameter_that_has_values_is_in_the_table() -> None:
    assert set(WRONG) == set(SamplingParams().to_json())


def test_bounds_themselves_are_allowed() -> None:
    SamplingParams(
        temperature=0, top_p=1.0, min_p=1, presence_penalty=-2, frequency_penalty=2, logprobs=1000, seed=-(2**70)
    )
    SamplingParams(max_tokens=None, min_tokens=10**6, top_k=10**9, n=1)
    one: Any = "END"
    assert SamplingParams(stop=one).stop == ("END",)
    lists: dict[str, Any] = {"stop": ["a", "b"], "stop_token_ids": [1]}
    assert SamplingParams(**lists).stop_token_ids == (1,)


def test_a_bias_is_copied() -> None:
    bias = {1: 2}
    params = SamplingParams(logit_bias=bias)
    bias[1] = 5
    assert params.logit_bias == {1: 2.0}


@pytest.mark.parametrize("ids", [[0, 9, 10], [-1], [True], ["3"], [2.0]])
def test_ids_that_the_model_has_not_are_named(ids: list[Any]) -> None:
    with pytest.raises(InvalidRequest, match="prompt"):
        check_token_ids(ids, 10, "prompt")


def test_parameters_are_held_against_the_vocabulary() -> None:
    check_params(SamplingParams(logit_bias={9: 1}, stop_token_ids=(9,)), 10)
    for params in (SamplingParams(logit_bias={10: 1}), SamplingParams(stop_token_ids=(10,))):
        with pytest.raises(InvalidRequest, match="vocabulary of 10"):
            check_params(params, 10)
