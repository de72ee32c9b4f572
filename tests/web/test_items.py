"""Items take the form of the engine's examples, or of the function's annotation, and what cannot is refused."""

from __future__ import annotations

from typing import Any, TypedDict

import numpy as np
import pytest
import torch

from microbatch.errors import DeadlineExceeded, InvalidRequest
from microbatch.serving.engine.batcher import DynamicBatcher
from microbatch.web.items import blamed, form_of
from tests.web.engines import Instant


def form(*examples: Any) -> Any:
    return form_of(Instant(lambda item: item, examples))


MASKED = {"input_ids": torch.zeros(5, dtype=torch.long), "attention_mask": torch.ones(5, dtype=torch.long)}

READ: list[tuple[tuple[Any, ...], Any, Any]] = [
    ((), {"any": [1, "x"]}, {"any": [1, "x"]}),
    ((1.0,), 3, 3.0),
    ((1,), 3, 3),
    ((1, 2.5), 3, 3.0),
    ((True,), False, False),
    (("text",), "other", "other"),
    (([1.0, 2.0],), [1, 2, 3], [1.0, 2.0, 3.0]),
    (([5, 7],), [], []),
    (([],), ["anything"], ["anything"]),
    (([[1.0]],), [[1], [2, 3]], [[1.0], [2.0, 3.0]]),
    (([1.0, 2.0],), np.array([1, 2], np.float32), [1.0, 2.0]),
    ((1.0, "text"), [None], [None]),
    (({"a": 1.0, "b": "x"}, {"a": 2.0}), {"a": 1}, {"a": 1.0}),
    (({"a": {"b": [1]}},), {"a": {"b": [2, 3]}}, {"a": {"b": [2, 3]}}),
    (((1.0, "x"),), [1, "y"], (1.0, "y")),
]


@pytest.mark.parametrize(("examples", "value", "item"), READ)
def test_a_value_becomes_what_the_examples_are(examples: tuple[Any, ...], value: Any, item: Any) -> None:
    found = form(*examples).read(value)
    assert found == item
    assert type(found) is type(item)


TENSORS: list[tuple[Any, Any, torch.Tensor]] = [
    (torch.zeros(3), [1, 2, 3], torch.tensor([1.0, 2.0, 3.0])),
    (torch.zeros(3), np.array([1, 2, 3]), torch.tensor([1.0, 2.0, 3.0])),
    (torch.zeros(2, 2, dtype=torch.bfloat16), [[1, 2], [3, 4]], torch.tensor([[1, 2], [3, 4]], dtype=torch.bfloat16)),
    (torch.zeros(2, dtype=torch.long), [1, 2], torch.tensor([1, 2])),
    (torch.tensor(1.0), 3, torch.tensor(3.0)),
    (torch.zeros(2, dtype=torch.bool), [True, False], torch.tensor([True, False])),
]


@pytest.mark.parametrize(("example", "value", "tensor"), TENSORS)
def test_numbers_become_tensors_of_the_dtype_of_the_examples(example: Any, value: Any, tensor: torch.Tensor) -> None:
    found = form(example).read(value)
    assert found.dtype == tensor.dtype
    assert torch.equal(found, tensor)
    found += 1 if found.dtype != torch.bool else True  # its own memory, not the body's


def test_arrays_stay_arrays() -> None:
    found = form(np.zeros(2, np.float32)).read([1, 2])
    assert isinstance(found, np.ndarray) and found.dtype == np.float32


def test_a_side_that_differs_among_the_examples_is_free() -> None:
    read = form(torch.zeros(3, 4), torch.zeros(3, 5)).read
    assert read(np.zeros((3, 9))).shape == (3, 9)
    with pytest.raises(InvalidRequest, match=r"\(2, 9\).*\(3, any\)"):
        read(np.zeros((2, 9)))


def test_beside_a_mask_the_length_is_free() -> None:
    item = form(MASKED).read({"input_ids": [1, 2], "attention_mask": [1, 1]})
    assert item["input_ids"].tolist() == [1, 2]


REFUSED: list[tuple[tuple[Any, ...], Any, str]] = [
    ((1.0,), "3", "float"),
    ((1.0,), True, "float"),
    ((1,), 2.5, "int"),
    (("text",), 3, "str"),
    (([1.0],), ["x"], r"\$\[0\]"),
    (({"a": 1.0},), {}, "lacks 'a'"),
    (({"a": 1.0},), {"a": 1, "b": 2}, "'b' besides"),
    (({"a": 1.0},), [1], "list"),
    (({"a": {"b": 1}},), {"a": {"b": "x"}}, "'a'.*'b'.*int"),
    (((1.0, 2.0),), [1], "list of 1"),
    ((torch.zeros(3),), [1, 2], r"\(2,\)"),
    ((torch.zeros(3),), [1, 2, "3"], "float"),
    ((torch.zeros(3),), [[1, 2, 3]], "float"),
    ((torch.zeros(2, 2),), [[1, 2], [3]], "no array"),
    ((torch.zeros(3),), np.zeros((3, 1)), r"shape \(3, 1\)"),
    ((torch.zeros(2),), [1e39, 0], "too large"),
    ((torch.zeros(2),), [3.402823466385289e38, 0], "too large"),
    ((torch.zeros(2, dtype=torch.int8),), [200, 0], "int8"),
    ((torch.zeros(2, dtype=torch.long),), np.zeros(2), "float64"),
    ((torch.zeros(2, dtype=torch.long),), [2**80, 0], "no array"),
]


@pytest.mark.parametrize(("examples", "value", "says"), REFUSED)
def test_what_is_no_item_is_refused_with_both_forms(examples: tuple[Any, ...], value: Any, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        form(*examples).read(value)
    assert caught.value.status == 400


class Text(TypedDict):
    words: list[str]


def test_an_annotation_goes_before_the_examples() -> None:
    def lengths(items: list[Text]) -> list[int]:
        return [len(item["words"]) for item in items]

    found = form_of(DynamicBatcher(lengths))
    assert found.read({"words": ["a"]}) == {"words": ["a"]}
    with pytest.raises(InvalidRequest, match="words"):
        found.read({"words": [1]})
    assert found.schema == {"$ref": "#/components/schemas/Text"}
    assert found.components["Text"]["required"] == ["words"]


def test_an_annotation_that_no_document_can_hold_says_nothing() -> None:
    def stack(items: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(items)

    assert form_of(DynamicBatcher(stack)).schema == {}
    assert form_of(DynamicBatcher(stack, examples=[torch.zeros(2)])).read([1, 2]).tolist() == [1.0, 2.0]


@pytest.mark.parametrize(("examples", "value", "item"), READ)
def test_the_schema_takes_what_is_read(examples: tuple[Any, ...], value: Any, item: Any) -> None:
    jsonschema_rs = pytest.importorskip("jsonschema_rs")
    jsonschema_rs.validate(form(*examples).schema, value.tolist() if isinstance(value, np.ndarray) else value)


@pytest.mark.parametrize(
    ("examples", "value", "says"), [case for case in REFUSED if not isinstance(case[1], np.ndarray)]
)
def test_the_schema_refuses_what_is_refused(examples: tuple[Any, ...], value: Any, says: str) -> None:
    jsonschema_rs = pytest.importorskip("jsonschema_rs")
    with pytest.raises(jsonschema_rs.ValidationError):
        jsonschema_rs.validate(form(*examples).schema, value)


def test_who_is_to_blame_is_told_by_the_sizes() -> None:
    like, unlike = [1.0, 2.0], [1.0]
    known, error = form([0.0, 0.0]), IndexError("out of range")
    assert blamed(error, known, like) is error
    told = blamed(error, known, unlike)
    assert isinstance(told, InvalidRequest) and "IndexError" in told.message and "out of range" in told.message
    assert blamed(error, form(), unlike) is error
    late = DeadlineExceeded("Too late.")
    assert blamed(late, known, unlike) is late
    assert blamed("a result", known, unlike) == "a result"
