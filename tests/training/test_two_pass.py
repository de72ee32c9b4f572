"""Losses of the whole batch in pieces: the gradients of one whole pass, or of all pieces' graphs kept."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD

from microbatch.errors import InvalidLoss, InvalidModel, InvalidSettings
from microbatch.measure.memory import measure_peak_bytes
from microbatch.models.torchvision_operators import make_torchvision_importable
from microbatch.training.joint.terms import JointTerm
from microbatch.training.step import TrainStep
from tests.reference.joint_step import joint_step
from tests.reference.training_step import full_batch_step
from tests.training.jobs import Reference, difference, gradients_of, reference
from tests.training.joint_jobs import (
    BALANCED,
    ITEMS,
    JOBS,
    Job,
    TwoTowers,
    balanced_whole,
    both,
    clip,
    experts,
    info_nce,
    pairs,
    token_batch,
    towers,
)

SIZES = (1, 5, ITEMS, 100)


def step_of(model: nn.Module, loss: Any, forward: Any, size: int, **options: Any) -> TrainStep:
    options.setdefault("joint", "outputs")
    return TrainStep(model, SGD(model.parameters(), lr=0.1), loss, forward=forward, micro_batch_size=size, **options)


def pieces_of(batch: dict[str, Tensor], size: int) -> list[dict[str, Tensor]]:
    items = len(next(iter(batch.values())))
    return [{name: value[start : start + size] for name, value in batch.items()} for start in range(0, items, size)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", JOBS)
def test_gradients_of_joint_losses(name: str, size: int) -> None:
    model, batch, job = towers(), pairs(), JOBS[name]
    expected = of_whole_batch(model, job, batch)
    step = step_of(model, job.loss(model), job.forward, size)
    step.accumulate(batch)
    assert difference(gradients_of(model), expected.gradients) <= 1e-13
    result = step(batch)
    assert result.loss == pytest.approx(expected.loss, rel=1e-13)
    assert difference({n: p.detach() for n, p in model.named_parameters()}, expected.weights) <= 1e-13


def of_whole_batch(model: TwoTowers, job: Job, batch: Any) -> Reference:
    own = copy.deepcopy(model)
    step = full_batch_step(own, SGD(own.parameters(), lr=0.1), job.loss(own), job.forward, batch)
    return Reference(step.pop("loss"), step, {name: p.detach() for name, p in own.named_parameters()})


@pytest.mark.parametrize("size", [1, 5])
@pytest.mark.parametrize("name", [name for name in JOBS if "data class" not in name])
def test_the_second_pass_draws_what_the_first_drew(name: str, size: int) -> None:
    model, batch, job = towers(dropout=0.4), pairs(), JOBS[name]
    own = copy.deepcopy(model)
    torch.manual_seed(7)
    expected = joint_step(own, job.loss(own), job.forward, pieces_of(batch, size), batch)
    torch.manual_seed(7)
    step = step_of(model, job.loss(model), job.forward, size)
    done = step.accumulate(batch)
    assert sum(total.loss for total in done.totals.values()) == pytest.approx(expected.pop("loss"), rel=1e-13)
    assert difference(gradients_of(model), expected) <= 1e-13


@settings(max_examples=8)
@given(seed=st.integers(0, 10**6), items=st.integers(2, 17), size=st.integers(1, 20), name=st.sampled_from(list(JOBS)))
def test_any_split_of_any_batch(seed: int, items: int, size: int, name: str) -> None:
    model, batch, job = towers(seed=seed), pairs(seed, items), JOBS[name]
    whole, pieces = copy.deepcopy(model), copy.deepcopy(model)
    step_of(whole, job.loss(whole), job.forward, items).accumulate(batch)
    assume(gradients_of(whole))  # there may be no two rows of one label
    step_of(pieces, job.loss(pieces), job.forward, size).accumulate(batch)
    assert difference(gradients_of(pieces), gradients_of(whole)) <= 1e-12


@pytest.mark.parametrize("size", [1, 5])
def test_float32_is_as_good_as_its_full_batch(size: int) -> None:
    model, batch = towers(dtype=torch.float32), pairs(dtype=torch.float32)
    exact, whole = copy.deepcopy(model).double(), copy.deepcopy(model)
    step_of(exact, clip(exact), both, ITEMS).accumulate(
        {n: v.double() if n != "labels" else v for n, v in batch.items()}
    )
    step_of(whole, clip(whole), both, ITEMS).accumulate(batch)
    step_of(model, clip(model), both, size).accumulate(batch)
    full = difference(gradients_of(whole), gradients_of(exact))
    assert difference(gradients_of(model), gradients_of(exact)) <= 4 * full


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", BALANCED)
def test_balancing_terms_of_experts(name: str, size: int) -> None:
    def forward(model: Any, batch: Any) -> Any:
        return model(batch["tokens"])

    model, batch = experts(), token_batch()
    expected = reference(model, balanced_whole, batch, run=forward)
    step = step_of(model, BALANCED[name], forward, size, joint="terms")
    step.accumulate(batch)
    assert difference(gradients_of(model), expected.gradients) <= 1e-13
    result = step(batch)
    assert result.loss == pytest.approx(expected.loss, rel=1e-13)
    assert result.weights == {"tokens": batch["mask"].sum(), "balance": 1.0}


def test_a_mean_over_nothing_has_no_weight() -> None:
    model, batch = experts(), token_batch()
    batch["mask"][:] = False
    result = step_of(model, BALANCED["means"], lambda m, b: m(b["tokens"]), 4, joint="terms")(batch)
    assert result.skipped == "the batch has no weight"


@pytest.mark.parametrize("kind", ["mixtral", "qwen"])
@pytest.mark.parametrize("masked", [False, True])
def test_the_balancing_loss_of_transformers(kind: str, masked: bool) -> None:
    make_torchvision_importable()  # transformers imports it where it is installed
    transformers = pytest.importorskip("transformers")
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    sizes = {
        "vocab_size": 29, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "num_experts_per_tok": 2, "attention_dropout": 0.0,
    }  # fmt: skip
    if kind == "mixtral":
        config = transformers.MixtralConfig(**sizes, num_local_experts=4)
        model = transformers.MixtralForCausalLM(config)
    else:
        config = transformers.Qwen3MoeConfig(**sizes, num_experts=4, moe_intermediate_size=12, head_dim=8)
        model = transformers.Qwen3MoeForCausalLM(config)
    torch.manual_seed(0)
    model.double().train()
    model.config._experts_implementation = "eager"  # others have no float64
    ids = torch.randint(29, (7, 6))
    mask = (torch.arange(6) < torch.randint(2, 7, (7, 1))).long() if masked else torch.ones(7, 6, dtype=torch.long)
    batch = {"input_ids": ids, "attention_mask": mask}

    def forward(m: Any, b: Any) -> Any:
        return m(**b, output_router_logits=True, use_cache=False)

    def tokens(output: Any, b: Any) -> Any:
        scores, targets = (
            output.logits[:, :-1].flatten(0, 1),
            b["input_ids"][:, 1:].masked_fill(b["attention_mask"][:, 1:] == 0, -100),
        )
        losses = nn.functional.cross_entropy(scores, targets.flatten(), ignore_index=-100, reduction="sum")
        return losses, (targets != -100).sum()

    def balance(values: Any) -> Any:
        return 0.1 * load_balancing_loss_func(values[0], 4, 2, values[1]), 1

    def whole(output: Any, b: Any) -> Any:
        return {"tokens": tokens(output, b), "balance": balance((output.router_logits, b["attention_mask"]))}

    def in_pieces(output: Any, b: Any) -> Any:
        return {"tokens": tokens(output, b), "balance": JointTerm((output.router_logits, b["attention_mask"]), balance)}

    expected = reference(model, whole, batch, run=forward)
    step_of(model, in_pieces, forward, 3, joint="terms").accumulate(batch)
    assert difference(gradients_of(model), expected.gradients) <= 1e-13


def test_a_two_tower_model_of_transformers() -> None:
    make_torchvision_importable()
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    words = {"vocab_size": 31, "max_position_embeddings": 8, "bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 30}
    config = transformers.CLIPConfig(
        text_config=small | words, vision_config=small | {"image_size": 8, "patch_size": 4}, projection_dim=10,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.CLIPModel(config).double().train()
    batch = {"input_ids": torch.randint(2, 30, (7, 6)), "pixel_values": torch.randn(7, 3, 8, 8).double()}

    def loss(output: Any, b: Any) -> Any:
        return info_nce(output.image_embeds, output.text_embeds, 5.0), len(output.image_embeds)

    expected = reference(model, loss, batch, run=lambda m, b: m(**b))
    step_of(model, loss, None, 3).accumulate(batch)
    assert difference(gradients_of(model), expected.gradients) <= 1e-13
    with pytest.raises(InvalidLoss, match=r"logits_per_image, which has the shapes \[1, 1\], \[3, 3\]"):
        step_of(model, lambda o, b: (o.logits_per_image.sum(), 1), None, 3).accumulate(batch)


@contextmanager
def out_of_memory(module: nn.Module, call: int, phase: str) -> Iterator[list[int]]:
    calls = [0]

    def fail(*_: Any) -> None:
        calls[0] += 1
        if calls[0] == call:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    register = module.register_forward_pre_hook if phase == "forward" else module.register_full_backward_hook
    handle = register(fail)
    yield calls
    handle.remove()


@pytest.mark.parametrize(
    ("phase", "call"), [("forward", call) for call in range(1, 9)] + [("backward", c) for c in (1, 3)]
)
def test_out_of_memory_in_either_pass(phase: str, call: int) -> None:
    model, batch = towers(dropout=0.4), pairs()
    plain = copy.deepcopy(model)
    torch.manual_seed(3)
    step_of(plain, clip(plain), both, 2)(batch)
    torch.manual_seed(3)
    with out_of_memory(model.image[2], call, phase):
        result = step_of(model, clip(model), both, 4)(batch)
    assert [attempt.micro_batch_size for attempt in result.attempts] == [4, 2]
    assert result.attempts[0].phase == phase
    after = {n: p.detach() for n, p in model.named_parameters()}
    assert difference(after, {n: p.detach() for n, p in plain.named_parameters()}) == 0.0


def test_scaling_clipping_and_autocast() -> None:
    model, batch = towers(dtype=torch.float32), pairs(dtype=torch.float32)
    whole = copy.deepcopy(model)
    norms = []
    for one, size in ((whole, ITEMS), (model, 4)):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        norms.append(step_of(one, clip(one), both, size, scaler=scaler, max_norm=0.01)(batch).grad_norm)
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)
    after = {n: p.detach() for n, p in model.named_parameters()}
    assert difference(after, {n: p.detach() for n, p in whole.named_parameters()}) <= 1e-6
    seen = []
    model.image.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    loss = clip(model)
    step_of(model, lambda o, b: loss({k: v.float() for k, v in o.items()}, b), both, 4, autocast=torch.bfloat16)(batch)
    assert set(seen) == {torch.bfloat16}


def test_compiled_encoders_compile_no_more_than_once_for_a_tail() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    model, batch = nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3)).double(), pairs()["image"]
    compiled: Any = torch.compile(model, backend=counter)
    expected = reference(model, spread, batch, run=lambda m, b: m(b))
    step = step_of(compiled, spread, None, 5)
    step.accumulate(batch)
    assert difference(gradients_of(model), expected.gradients) <= 1e-13
    step.accumulate(batch)
    assert counter.frame_count <= 2


def spread(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return output.var(0).sum() * output.mean(0).square().sum(), 1


def test_memory_holds_one_piece_and_the_representations() -> None:
    items, width = 128, 64
    model = nn.Sequential(nn.Linear(8, width), *(nn.Tanh() for _ in range(60)))
    gradients = sum(p.nbytes for p in model.parameters())
    x = torch.randn(items, 8)
    peaks = {}
    for size in (items, 16):
        step = step_of(model, spread, lambda m, b: m(b)[:, :4], size)  # a view of a whole layer
        step.accumulate(x)
        model.zero_grad()
        peaks[size] = measure_peak_bytes(partial(step.accumulate, x)) - gradients
        model.zero_grad()
    representations = 3 * items * 4 * 4  # joined, as a leaf of the graph, and its gradient
    assert peaks[16] <= (peaks[items] / 8) * 1.05 + representations


class Drawn(nn.Module):
    """Chance from every generator that a forward may use."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        import random

        import numpy as np

        out: Tensor = self.linear(x) * (1 + random.random()) + float(np.random.rand())
        return out * torch.rand_like(out)


def test_every_generator_is_replayed_whatever_the_loss_draws() -> None:
    def drawing(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        return spread(output, batch)[0] * torch.rand(()), 1

    torch.manual_seed(0)
    model, x = Drawn().double(), pairs()["image"]
    seen: list[Tensor] = []
    model.register_forward_hook(lambda module, args, output: seen.append(output.detach().clone()))
    step_of(model, drawing, None, 5).accumulate(x)
    assert len(seen) == 6
    assert all(torch.equal(a, b) for a, b in zip(seen[:3], seen[3:]))
    assert not torch.equal(seen[0], seen[1])


def test_a_projection_with_batch_norm_sees_the_joint_batch() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(8, 4).double(), pairs()["image"]
    project = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    states = []
    for size in (ITEMS, 4):
        one, other = copy.deepcopy(model), copy.deepcopy(project)
        optimizer = SGD([*one.parameters(), *other.parameters()], lr=0.1)
        TrainStep(one, optimizer, projected(other), joint="outputs", micro_batch_size=size)(x)
        states.append({**one.state_dict(), **{f"project.{n}": v for n, v in other.state_dict().items()}})
    assert difference(states[1], states[0]) <= 1e-13


def projected(project: nn.Module) -> Callable[[Tensor, Any], Any]:
    return lambda output, batch: (project(output).square().sum(), 1)


WRONG: dict[str, tuple[dict[str, Any], Any, type[Exception], str]] = {
    "unknown choice": ({"joint": "loss"}, spread, InvalidSettings, "one of None, 'outputs', 'terms'"),
    "weights given": ({"joint": "outputs", "weight": len}, spread, InvalidSettings, "Leave weight= out"),
    "noise scale": ({"noise_scale": True}, spread, InvalidSettings, "which are not apart here"),
    "a term without the choice": ({"joint": None}, lambda o, b: JointTerm(o, torch.sum), InvalidLoss, 'joint="terms"'),
    "one number": ({}, lambda o, b: o.mean(), InvalidLoss, "one number"),
    "one number of a term": (
        {"joint": "terms"},
        lambda o, b: JointTerm(o, lambda v: v.mean()),
        InvalidLoss,
        "one number",
    ),
    "no gradient": ({}, lambda o, b: (o.detach().sum(), 1), InvalidModel, "no parameter that is trained"),
}


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_are_told_and_weights_stay(name: str) -> None:
    options, loss, kind, text = WRONG[name]
    model = nn.Linear(8, 3).double()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(kind, match=text):
        step_of(model, loss, None, 4, **options)(pairs()["image"])
    assert difference(model.state_dict(), before) == 0.0
    assert model.weight.grad is None


CANNOT_BE_JOINED: dict[str, tuple[Callable[[Any, Tensor], Any], Callable[[Any], Any], str]] = {
    "differs": (
        lambda m, x: (m(x), x.sum()),
        lambda o: o[0].sum() * o[1],
        r"batch\[1\], which is not one row per item",
    ),
    "widths": (lambda m, x: (m(x), m(x) @ m(x).T), lambda o: o[1] @ o[1], r"the shapes \[1, 1\], \[4, 4\]"),
    "missing": (
        lambda m, x: {"a": m(x), **({"b": x} if len(x) == 4 else {})},
        lambda o: o["b"].sum(),
        "some pieces do not have",
    ),
    "an object": (lambda m, x: (m(x), object()), lambda o: o[1].rows, "which is not one row per item"),
}


@pytest.mark.parametrize("name", CANNOT_BE_JOINED)
def test_what_cannot_be_joined_is_told_where_it_is_used(name: str) -> None:
    forward, use, text = CANNOT_BE_JOINED[name]
    model, x = nn.Linear(8, 3).double(), pairs()["image"]
    step_of(model, lambda o, b: (next(iter(o.values() if isinstance(o, dict) else o)).var(), 1), forward, 4).accumulate(
        x
    )
    with pytest.raises(InvalidLoss, match=text):
        step_of(model, lambda o, b: (use(o), 1), forward, 4).accumulate(x)
