"""Tokens chosen: the right distribution, the same token whatever the batch, and nothing dropped."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare  # type: ignore[import-untyped]
from transformers import LogitsProcessorList
from transformers.generation import logits_process as theirs

from microbatch.errors import InvalidOutput, InvalidRequest, ModelFailed
from microbatch.llm.candidates import largest, least_kept, pick
from microbatch.llm.random_numbers import answer_seed, philox4x32, uniforms
from microbatch.llm.sampling import Choosing, Chosen, choose, logprobs_of
from microbatch.llm.sampling_params import SamplingParams

VOCABULARY = 1000
PROMPT, OUTPUT = (3, 5, 5, 8, 900), [8, 8, 13, 21, 900]


def logits_of(seed: int, rows: int = 1, vocabulary: int = VOCABULARY, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * spread


def row_of(params: SamplingParams, seed: int = 0, **changes: Any) -> Choosing:
    return Choosing(**{"params": params, "prompt_ids": PROMPT, "output_ids": OUTPUT, "seed": seed, **changes})


def only(found: list[Chosen | Exception]) -> Chosen:
    (one,) = found
    assert isinstance(one, Chosen), one
    return one


def drawn(logits: torch.Tensor, params: SamplingParams, count: int) -> list[int]:
    """Tokens of `count` seeds for one row of logits."""
    found = choose(
        logits.expand(count, -1), [row_of(params, seed, prompt_ids=(), output_ids=()) for seed in range(count)]
    )
    return [only([each]).token_id for each in found]


def reference(params: SamplingParams, logits: torch.Tensor) -> torch.Tensor:
    """The distribution as the classes of transformers make it, in the order that vLLM has."""
    processors: list[Any] = []
    if params.repetition_penalty != 1:
        processors.append(theirs.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.temperature != 1:
        processors.append(theirs.TemperatureLogitsWarper(params.temperature))
    if params.min_p > 0:
        processors.append(theirs.MinPLogitsWarper(params.min_p))
    if params.top_k:
        processors.append(theirs.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        processors.append(theirs.TopPLogitsWarper(params.top_p))
    ids: Any = torch.tensor([[*PROMPT, *OUTPUT]])
    edited: torch.Tensor = LogitsProcessorList(processors)(ids, cast(Any, logits.double()))
    return torch.softmax(edited[0], -1)


FILTERS = [
    SamplingParams(),
    SamplingParams(temperature=0.5),
    SamplingParams(temperature=1.7, top_k=7),
    SamplingParams(top_k=300),
    SamplingParams(top_p=0.6),
    SamplingParams(top_p=0.95, temperature=1.3),
    SamplingParams(top_p=1e-6),
    SamplingParams(min_p=0.1),
    SamplingParams(min_p=0.02, top_k=50, top_p=0.8, temperature=0.9),
    SamplingParams(repetition_penalty=1.4, top_p=0.9),
    SamplingParams(repetition_penalty=0.7, top_k=20),
]


@pytest.mark.parametrize("params", FILTERS, ids=lambda p: "-".join(f"{k}={v}" for k, v in vars_of(p).items()))
def test_the_line_of_weights_is_the_distribution_of_transformers(
    params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each token's share of the line from 0 to 1, read off its two ends, is its probability."""
    logits = logits_of(5, spread=2.0)
    probabilities = reference(params, logits).numpy()
    ends = np.concatenate(([0], np.cumsum(probabilities)))
    kept = np.flatnonzero(probabilities > 1e-6)
    inside = 1e-3 * probabilities[kept]  # a thousandth within each end: beyond what fp32 rounds
    for numbers in (ends[kept] + np.maximum(inside, 2e-7), ends[kept + 1] - np.maximum(inside, 2e-7)):
        wide = probabilities[kept] > 1e-6 * 4
        monkeypatch.setattr("microbatch.llm.sampling.uniforms", lambda *_, given=numbers: given)
        found = choose(logits.expand(len(kept), -1), [row_of(params) for _ in kept])
        ids = np.array([only([each]).token_id for each in found])
        assert ids[wide].tolist() == kept[wide].tolist()


def vars_of(params: SamplingParams) -> dict[str, Any]:
    return {key: value for key, value in params.to_json().items() if value != SamplingParams().to_json()[key]}


@pytest.mark.parametrize("params", FILTERS[:9], ids=lambda p: "-".join(f"{k}={v}" for k, v in vars_of(p).items()))
def test_tokens_of_many_seeds_have_the_distribution(params: SamplingParams) -> None:
    logits = logits_of(1, vocabulary=40, spread=1.5)
    probabilities = reference(params, logits).numpy()
    count = 4000
    seen = Counter(drawn(logits, params, count))
    assert all(probabilities[token] > 0 for token in seen)
    often = [token for token in range(40) if probabilities[token] * count >= 5]
    rest = 1 - sum(probabilities[token] for token in often)
    observed = [seen[token] for token in often] + ([count - sum(seen[t] for t in often)] if rest > 1e-9 else [])
    expected = np.array([probabilities[token] for token in often] + ([rest] if rest > 1e-9 else []))
    if len(observed) > 1:
        assert chisquare(observed, expected / expected.sum() * count).pvalue > 1e-3


def test_numbers_of_neighbouring_seeds_and_positions_are_uniform_and_independent() -> None:
    seeds, positions = np.divmod(np.arange(40_000), 200)
    numbers = uniforms(seeds.tolist(), positions.tolist())
    assert numbers.min() >= 0 and numbers.max() < 1
    assert chisquare(np.bincount((numbers * 50).astype(int), minlength=50)).pvalue > 1e-3
    for shift in (1, 200):  # the next position; the next seed
        cells = (numbers[:-shift] * 10).astype(int) * 10 + (numbers[shift:] * 10).astype(int)
        assert chisquare(np.bincount(cells, minlength=100)).pvalue > 1e-3


def test_philox_gives_the_known_answers_of_its_authors() -> None:
    """From ``kat_vectors`` of Random123, for philox4x32 with 10 rounds."""
    table = [
        ("00000000 " * 4, "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff " * 4, "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ]
    for counter, key, answer in table:
        words = [np.array([int(word, 16)], np.uint64) for word in f"{counter} {key}".split()]
        found = philox4x32((words[0], words[1], words[2], words[3]), (words[4], words[5]))
        assert " ".join(f"{int(word[0]):08x}" for word in found) == answer


def test_answers_to_one_prompt_have_seeds_of_their_own() -> None:
    seeds = {answer_seed(seed, index) for seed in (7, 8, -1) for index in range(100)}
    assert len(seeds) == 300
    assert answer_seed(7, 0) == 7


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    top_k=st.sampled_from([0, 1, 5, 700]),
    min_p=st.sampled_from([0.0, 0.05]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 1.0]),
    frequency_penalty=st.sampled_from([0.0, -0.5]),
    logprobs=st.sampled_from([None, 0, 3]),
    min_tokens=st.sampled_from([0, 9]),
)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), vocabulary=st.sampled_from([65, 1000, 4099]), rows=st.integers(1, 9))
def test_a_row_alone_gives_what_it_gives_in_any_batch(data: st.DataObject, vocabulary: int, rows: int) -> None:
    logits = logits_of(rows, rows, vocabulary)
    each = [
        Choosing(
            data.draw(PARAMS), (1, 2, 3), list(range(data.draw(st.integers(0, 12)))), data.draw(st.integers()), (4, 5)
        )
        for _ in range(rows)
    ]
    together = choose(logits, each)
    assert together == [choose(logits[place : place + 1], each[place : place + 1])[0] for place in range(rows)]
    order = data.draw(st.permutations(range(rows)))
    assert choose(logits[list(order)], [each[place] for place in order]) == [together[place] for place in order]


@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams(top_k=5), SamplingParams(top_p=0.5)])
def test_the_logits_are_left_as_they_were(params: SamplingParams) -> None:
    logits = logits_of(0, 2)
    before = logits.clone()
    changed = SamplingParams(**{**vars_of(params), "logit_bias": {3: 5}, "frequency_penalty": 1.0})
    choose(logits, [row_of(params), row_of(changed)])
    assert torch.equal(logits, before)


def edited(params: SamplingParams, logits: torch.Tensor, **changes: Any) -> torch.Tensor:
    """The logits after every edit, as a processor that comes last sees them."""
    seen: list[torch.Tensor] = []

    def look(ids: Any, row: torch.Tensor) -> torch.Tensor:
        assert ids == [*PROMPT, *changes.get("output_ids", OUTPUT)]
        seen.append(row.clone())
        return row

    given = {name: getattr(params, name) for name in vars_of(params)}
    only(choose(logits, [row_of(SamplingParams(**{**given, "logits_processors": (look,)}), **changes)]))
    return seen[0]


def test_penalties_follow_the_published_formulas() -> None:
    logits = logits_of(2)
    params = SamplingParams(
        temperature=0,
        repetition_penalty=1.3,
        frequency_penalty=0.7,
        presence_penalty=0.4,
        logit_bias={8: 2.5, 77: -100},
    )
    expected = logits[0].double()
    expected[8] += 2.5
    expected[77] -= 100
    for token in {*PROMPT, *OUTPUT}:
        expected[token] = expected[token] / 1.3 if expected[token] > 0 else expected[token] * 1.3
    for token, times in Counter(OUTPUT).items():
        expected[token] -= 0.7 * times + 0.4
    torch.testing.assert_close(edited(params, logits).double(), expected, rtol=1e-6, atol=1e-6)


def test_counts_kept_from_step_to_step_are_those_of_the_whole_output() -> None:
    params = SamplingParams(temperature=0, frequency_penalty=0.5, repetition_penalty=1.1)
    output: list[int] = []
    kept = row_of(params, output_ids=output)
    for step in range(60):
        logits = logits_of(step, spread=0.5)
        anew = row_of(params, output_ids=list(output))
        found = only(choose(logits, [kept]))
        assert found == only(choose(logits, [anew]))
        output.append(found.token_id if step % 3 else step % 5)


def test_a_processor_has_the_last_word_and_its_failure_stays_its_own() -> None:
    def force(ids: Any, row: torch.Tensor) -> torch.Tensor:
        return torch.full_like(row, -torch.inf).index_fill(0, torch.tensor([123]), 0.0)

    def broken(ids: Any, row: torch.Tensor) -> torch.Tensor:
        raise KeyError("mine")

    rows = [
        row_of(SamplingParams(temperature=0, logits_processors=(force,))),
        row_of(SamplingParams(logits_processors=(broken,))),
        row_of(SamplingParams(logits_processors=(lambda ids, row: row[:5],))),
        row_of(SamplingParams(logits_processors=(lambda ids, row: row * -torch.inf * 0,))),
        row_of(SamplingParams(temperature=0)),
    ]
    logits = logits_of(4).expand(5, -1)
    forced, raised, short, nan, plain = choose(logits, rows)
    assert isinstance(forced, Chosen) and forced.token_id == 123
    assert isinstance(raised, KeyError)
    assert isinstance(short, InvalidOutput) and "[5]" in str(short)
    assert isinstance(nan, ModelFailed)
    assert plain == Chosen(int(logits[4].argmax()))


def test_ends_are_held_back_until_min_tokens() -> None:
    logits = torch.zeros(1, 10)
    logits[0, [2, 3]] = torch.tensor([9.0, 8.0])
    params = SamplingParams(temperature=0, min_tokens=2)
    tokens = [only(choose(logits, [row_of(params, output_ids=[1] * n, allowed_eos=(2, 3))])).token_id for n in range(4)]
    assert tokens == [0, 0, 2, 2]
    (found,) = choose(logits[:, :2], [row_of(params, prompt_ids=(), output_ids=[], allowed_eos=(0, 1))])
    assert isinstance(found, InvalidRequest) and "no token" in str(found)


def test_ids_outside_the_vocabulary_end_their_own_row() -> None:
    rows = [row_of(SamplingParams(logit_bias={VOCABULARY: 1})), row_of(SamplingParams(temperature=0))]
    wrong, right = choose(logits_of(0, 2), rows)
    assert isinstance(wrong, InvalidRequest) and "1000" in str(wrong)
    assert isinstance(right, Chosen)


@pytest.mark.parametrize("top", [0, 1, 5, 900, 2000])
def test_logprobs_are_the_models_own(top: int) -> None:
    logits = logits_of(9, 3)
    expected = torch.log_softmax(logits.double(), -1)
    params = SamplingParams(temperature=0.3, top_k=2, frequency_penalty=2.0, logprobs=min(top, 1000))
    found = [only([each]) for each in choose(logits, [row_of(params, seed) for seed in range(3)])]
    for row, each in enumerate(found):
        assert each.logprob == pytest.approx(expected[row, each.token_id].item(), abs=2e-6)
    for row, each in enumerate(logprobs_of(logits, [4, 5, 6], top)):
        values, ids = expected[row].sort(descending=True)
        count = min(top, VOCABULARY)
        assert each.token_id == 4 + row
        assert [token for token, _ in each.top] == ids[:count].tolist()
        assert [value for _, value in each.top] == pytest.approx(values[:count].tolist(), abs=2e-6)


@settings(max_examples=80, deadline=None)
@given(data=st.data(), size=st.sampled_from([1, 63, 64, 65, 640, 2049]))
def test_the_largest_are_those_of_a_sort_with_all_that_tie(data: st.DataObject, size: int) -> None:
    values = torch.randint(
        -9, 9, (size,), generator=torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    ).float()
    values[torch.rand(size) < 0.1] = -torch.inf
    count = data.draw(st.integers(1, size))
    bound = values.sort(descending=True).values[count - 1]
    assert largest(values, count).tolist() == (values >= bound).nonzero()[:, 0].tolist()


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 0.125, 0.25, 1.0, 3.0]), min_size=1, max_size=700), st.floats(0, 1, exclude_max=True)
)
def test_a_number_points_at_the_token_whose_share_holds_it(weights: list[float], number: float) -> None:
    weights[len(weights) // 2] = 1.0
    found = pick(np.array(weights, np.float32), number)
    before = sum(weights[:found])
    assert weights[found] > 0
    assert before <= number * sum(weights) * (1 + 1e-12)
    assert number * sum(weights) <= before + weights[found]


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=300), st.floats(0.001, 0.999))
def test_the_fewest_that_hold_the_share_are_kept(counts: list[int], top_p: float) -> None:
    counts[0] += 1
    weights = np.array(counts, np.float32)
    least = least_kept(weights, top_p)
    assert weights[weights >= least].sum() >= top_p * weights.sum() * (1 - 1e-9)
    assert weights[weights > least].sum() < top_p * weights.sum() * (1 + 1e-9)


def test_a_mismatch_of_rows_is_said() -> None:
    with pytest.raises(ValueError, match="2 rows"):
        choose(logits_of(0, 2), [row_of(SamplingParams())])
