"""What a model is cut between, what crosses a cut, and which order is run; without processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from microbatch.errors import InvalidBatch, InvalidBatchSizes, InvalidModel, InvalidSchedule, InvalidSettings
from microbatch.pipeline.execution.calls import Call, call_of, finished, recorded
from microbatch.pipeline.execution.cutting import cut, divide, modelled_costs, tied_parameters
from microbatch.pipeline.execution.ordering import PER_RANK, ordering_of
from microbatch.pipeline.execution.probe import Probe, Record
from microbatch.pipeline.execution.runtime import forwards
from microbatch.pipeline.execution.shapes import Meta, Returned, Shapes
from microbatch.pipeline.execution.sharing import fingerprint, joined, source_of
from microbatch.pipeline.execution.units import unit_names
from microbatch.pipeline.placement import loop, zigzag
from microbatch.pipeline.schedule import Schedule
from tests.pipeline.execution.jobs import chain, decoder, outside, points, sentences

CPU = torch.device("cpu")


def probe_of(model: nn.Module) -> Probe:
    return Probe(model, CPU)


def of_sentences(batch: Any) -> Call:
    return Call((batch["tokens"],), {"attention_mask": batch["attention_mask"]})


def test_units_are_numbered_blocks_and_modules_with_weights() -> None:
    assert unit_names(decoder()) == ["embed", *(f"blocks.{i}" for i in range(6)), "norm", "head"]
    assert unit_names(chain()) == [str(i) for i in range(9)]


def test_a_parameter_of_the_model_itself_goes_to_the_stage_that_works_with_it() -> None:
    model = decoder()
    probe = probe_of(model)
    record = probe.run(of_sentences(sentences(4)), follow=True)
    assert list(record.returned) == probe.units and probe.loose == ["positions"]
    found = cut(record, [probe.units[:4], probe.units[4:]], [], probe.loose)
    assert found.crossing == (("blocks.2",),)
    assert found.loose == (("positions",), ())


def test_a_stream_outside_of_layers_crosses_with_all_that_it_is_made_of() -> None:
    probe = probe_of(outside())
    record = probe.run(Call((points(3)["x"],)), follow=True)
    found = cut(record, [probe.units[:3], probe.units[3:6], probe.units[6:]], [], [])
    assert found.crossing == (("first", "layers.0", "layers.1"), ("first", *(f"layers.{i}" for i in range(5))))


def a_row(**needs: set[str]) -> Record:
    """A record of layers, each with what it needs; ``at_end`` is what the output is made of."""
    nothing = Returned.of(None)
    at_end = frozenset(needs.pop("at_end"))
    return Record(
        returned=dict.fromkeys(needs, nothing),
        needs={one: frozenset(all_) for one, all_ in needs.items()},
        at_end=at_end,
    )


def test_what_a_later_stage_needs_passes_through_those_between() -> None:
    record = a_row(a=set(), b={"a"}, c={"b"}, d={"c", "a"}, at_end={"d"})
    assert cut(record, [["a", "b"], ["c"], ["d"]], [], []).crossing == (("a", "b"), ("a", "c"))


def test_what_the_output_is_made_of_reaches_the_last_stage() -> None:
    record = a_row(a=set(), b={"a"}, c={"b"}, at_end={"c", "a"})
    assert cut(record, [["a"], ["b"], ["c"]], [], []).crossing == (("a",), ("a", "b"))


def test_a_parameter_that_nothing_works_with_stays_in_the_first_stage() -> None:
    record = a_row(a=set(), b={"a", "used"}, at_end={"b"})
    assert cut(record, [["a"], ["b"]], [], ["used", "idle"]).loose == (("idle",), ("used",))


def test_outputs_that_the_next_layer_changes_in_place_are_noticed() -> None:
    record = probe_of(chain()).run(Call((points(3)["x"],)), follow=True)
    assert record.changed == {"0", "2", "4"}


def test_shapes_of_messages_follow_each_call() -> None:
    probe = probe_of(decoder())
    seen: list[int] = []

    def returned(call: Any) -> Any:
        seen.append(len(call.args[0]))
        return probe.returned(call)

    shapes = Shapes(returned, [("blocks.2",)])
    plans = shapes.of([of_sentences(sentences(items, longest=length)) for items, length in ((3, 7), (1, 2), (3, 7))])
    assert [plan.messages[0] for plan in plans] == [
        (Meta((items, length, 16), torch.float64, True),) for items, length in ((3, 7), (1, 2), (3, 7))
    ]
    assert seen == [3, 1]


def test_frozen_layers_need_no_gradient_back() -> None:
    probe = probe_of(decoder())
    call = of_sentences(sentences(2))
    probe.train_only({name: name.startswith("head") for name, _ in probe.twin.named_parameters()})
    assert not probe.returned(call)["blocks.2"].metas[0].requires_grad


def test_weights_that_two_stages_share_are_found() -> None:
    model = decoder(tied=True)
    probe = probe_of(model)
    record = probe.run(of_sentences(sentences(2)), follow=True)
    found = cut(record, [probe.units[:4], probe.units[4:]], [], probe.loose)
    assert tied_parameters(model, found) == {"embed.weight": ((0, "embed.weight"), (1, "head.weight"))}


class Again(nn.Module):
    """Goes through one layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6)])

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers[0](self.layers[0](x))
        return result


def test_a_layer_that_is_called_twice_is_refused() -> None:
    with pytest.raises(InvalidModel, match=r"layers\.0 is called more than once"):
        probe_of(Again()).run(Call((points(2)["x"],)))


def test_stages_by_cost_and_by_name() -> None:
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(6)), nn.Linear(32, 6 * 32))
    probe = probe_of(model)
    costs = modelled_costs(model, probe.run(Call((torch.zeros(64, 32),)), follow=True))
    assert [len(names) for names in divide(costs, loop(2), None, None).stages] == [6, 1]
    assert [len(names) for names in divide(costs, loop(2), ["2"], None).stages] == [2, 5]
    with pytest.raises(InvalidSettings, match="No layer that can begin a stage is called '7'"):
        divide(costs, loop(2), ["7"], None)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_number_of_micro_batches_has_an_order(ranks: int) -> None:
    for name in ("one_f_one_b", "interleaved", "auto"):
        ordering = ordering_of(name, ranks, None, None)
        for count in (1, 2, 5, 8):
            assert ordering.of(count).num_micro_batches == count
            assert ordering.of(count).placement == ordering.placement
        assert ordering.count_of(100, "auto") == PER_RANK * ranks
        assert ordering.count_of(3, 8) == 3
    for placement in (loop(ranks, 2), zigzag(ranks, 2)):
        assert not forwards(placement, 7).has_backward


def test_an_order_of_ones_own_is_cut_short_and_never_made_longer() -> None:
    own = Schedule.of("zb_h1", ranks=2, num_micro_batches=4)
    ordering = ordering_of(own, 2, None, None)
    assert ordering.of(4) is own and ordering.of(2).num_micro_batches == 2
    with pytest.raises(InvalidBatchSizes, match="has 4 micro-batches, not 5"):
        ordering.of(5)


@pytest.mark.parametrize(
    ("schedule", "stages", "chunks", "text"),
    [
        ("one_f_one_b", 3, None, "3 stages do not divide over 2 ranks. Nearest: 2 or 4"),
        ("interleaved", 4, 3, "4 stages on 2 ranks are 2 chunks, not 3"),
        ("dualpipe", None, None, "dualpipe cannot be run"),
        ("forward_only", None, None, "no backward"),
        ("gpip", None, None, "Did you mean gpipe"),
        (Schedule.of("gpipe", ranks=3, num_micro_batches=2), None, None, "for 3 ranks, and there are 2"),
    ],
)
def test_orders_that_cannot_run_are_refused(schedule: Any, stages: Any, chunks: Any, text: str) -> None:
    with pytest.raises(InvalidSchedule, match=text):
        ordering_of(schedule, 2, stages, chunks)


def test_a_forward_function_is_read_without_running_the_model() -> None:
    def forward(model: Any, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["x"], scale=2)["scores"] + batch["y"]  # type: ignore[no-any-return]

    model, batch = nn.Identity(), {"x": torch.ones(2), "y": torch.ones(2)}
    call = recorded(forward, model, batch)
    assert call.args[0] is batch["x"] and call.kwargs == {"scale": 2}
    assert finished(forward, model, batch, {"scores": torch.zeros(2)}).tolist() == [1, 1]
    with pytest.raises(InvalidSettings, match="does not call the model"):
        recorded(lambda _, batch: batch["x"], model, batch)
    with pytest.raises(InvalidSettings, match="calls the model twice"):
        finished(lambda model, batch: model(model(batch["x"])), model, batch, torch.zeros(2))


def test_a_batch_is_called_as_any_model_is() -> None:
    assert call_of({"x": 1}).kwargs == {"x": 1} and call_of((1, 2)).args == (1, 2) and call_of(3).args == (3,)


def test_ranks_with_different_batches_are_told_apart() -> None:
    one, other = points(4), points(4, seed=2)
    assert fingerprint(one) == fingerprint(points(4)) != fingerprint(other)
    assert source_of([1, 1]) is None and source_of([None, 5, None]) == 1
    with pytest.raises(InvalidBatch, match="Ranks 0 and 2"):
        source_of([1, None, 2])


def test_outputs_of_micro_batches_are_joined() -> None:
    parts = [{"scores": torch.zeros(size, 2), "name": "a"} for size in (2, 1)]
    whole = joined(parts)
    assert whole["scores"].shape == (3, 2) and whole["name"] == "a"
