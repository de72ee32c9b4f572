"""From a model and what the user wishes to an engine that can take steps: cache, limits and first measurements."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from microbatch.curves.codec import load_profile
from microbatch.curves.profile import Profile
from microbatch.errors import InvalidSettings
from microbatch.llm.budget import BudgetFollower
from microbatch.llm.decoder import Decoder
from microbatch.llm.kv_blocks import BlockPool
from microbatch.llm.limits import Limits
from microbatch.llm.loop import StepLoop
from microbatch.llm.measure_steps import measure_steps
from microbatch.llm.metrics import Counters
from microbatch.llm.models import decoder_of, load
from microbatch.llm.runner import Runner, blocks_for
from microbatch.llm.step_model import ENOUGH, StepSample, fit
from microbatch.llm.tokenizer import Tokenizer
from microbatch.measure.dtypes import torch_dtype
from microbatch.units import format_bytes

MOST_SEQUENCES, MOST_TOKENS = 128, 1024
"""In a step, where nothing else is asked for: beyond, a CPU gains nothing and everybody waits longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the user asked for; see `microbatch.llm.engine.LLMEngine`."""

    model: Any
    tokenizer: Tokenizer
    dtype: str | torch.dtype | None
    time_per_output_token_target: float | None
    time_to_first_token_target: float | None
    profile: str | Path | Profile | None
    memory_limit: int | None
    num_blocks: int | None
    block_size: int
    max_num_sequences: int | None
    max_num_tokens: int | None
    max_waiting: int
    prefix_caching: bool
    invariant: bool

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "max_num_sequences", "max_num_tokens", "max_waiting", "memory_limit"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise InvalidSettings(f"{name}={value!r} is no whole number of 1 or more.", "Give one.")
        for name in ("time_per_output_token_target", "time_to_first_token_target"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and 0 < value < math.inf):
                raise InvalidSettings(f"{name}={value!r} is no number of seconds above 0.", "Give one, as in 0.05.")


@dataclass(frozen=True, slots=True)
class Prepared:
    """An engine that can take steps."""

    loop: StepLoop
    pool: BlockPool
    counters: Counters
    limits: Limits


def load_parts(
    path: Path, dtype: str | torch.dtype | None, device: str | torch.device | None
) -> tuple[Decoder, Tokenizer]:
    """The model and tokenizer of a folder.

    Raises:
        InvalidModel: a folder that holds no language model that is known, or no tokenizer.
    """
    tokenizer = Tokenizer.from_folder(path)
    decoder, _ = load(path, dtype=_dtype(dtype), device=device)
    return decoder, tokenizer


def prepare(plan: Plan) -> Prepared:
    """Pack the weights, size the cache, warm up and measure.

    Raises:
        InvalidModel: a model that is not known, or that does not fit into memory.
    """
    model = plan.model
    decoder = model if isinstance(model, Decoder) else decoder_of(model, dtype=_dtype(plan.dtype))
    sequences, tokens = plan.max_num_sequences or MOST_SEQUENCES, plan.max_num_tokens or MOST_TOKENS
    num_blocks, why = _num_blocks(plan, decoder, sequences, tokens)
    runner = Runner(decoder, num_blocks, plan.block_size, invariant=plan.invariant)
    runner.warm_up()
    limits = Limits(
        vocab_size=decoder.vocab_size, context=decoder.context, num_blocks=num_blocks, block_size=plan.block_size,
        max_num_sequences=sequences, max_num_tokens=tokens, notes=(why,),
    )  # fmt: skip
    follower = _follower(plan, limits, _samples(plan, runner, limits, decoder.device))
    pool = BlockPool(num_blocks, plan.block_size, prefix_caching=plan.prefix_caching)
    counters = Counters(time.monotonic())
    loop = StepLoop(
        runner, pool, plan.tokenizer, follower, counters, block_size=plan.block_size, device=decoder.device,
        clock=time.monotonic,
    )  # fmt: skip
    return Prepared(loop, pool, counters, limits)


def _num_blocks(plan: Plan, decoder: Decoder, sequences: int, tokens: int) -> tuple[int, str]:
    if plan.num_blocks is not None:
        return plan.num_blocks, f"{plan.num_blocks} blocks of {plan.block_size} tokens: your number."
    found, reason = blocks_for(
        decoder, plan.block_size, plan.memory_limit, num_sequences=sequences, max_num_tokens=tokens
    )
    size = format_bytes(found * plan.block_size * decoder.kv_bytes_per_token)
    return found, f"{found} blocks of {plan.block_size} tokens ({size}): {reason}"


def _samples(plan: Plan, runner: Runner, limits: Limits, device: torch.device | str) -> tuple[StepSample, ...]:
    """Of a profile, where there is one; else measured now."""
    if plan.profile is not None:
        found = samples_of(load_profile(plan.profile))
        if len(found) >= ENOUGH:
            return found
    with runner.every_block_written():
        return measure_steps(runner, limits, device=device)


def _follower(plan: Plan, limits: Limits, samples: tuple[StepSample, ...]) -> BudgetFollower:
    """It knows what was measured, and goes on learning."""
    follower = BudgetFollower(
        time_per_output_token_target=plan.time_per_output_token_target,
        time_to_first_token_target=plan.time_to_first_token_target,
        max_tokens=limits.max_num_tokens, max_sequences=limits.max_num_sequences, model=fit(samples),
    )  # fmt: skip
    for sample in samples:
        follower.observe(sample)
    return follower


def samples_of(profile: Profile) -> tuple[StepSample, ...]:
    """Steps that a profile in decode mode measured: one token of each sequence, with the cache it was measured at.

    Raises:
        InvalidSettings: a profile of another mode.
    """
    if profile.mode != "decode":
        raise InvalidSettings(f"The profile is one of {profile.mode}.", "Measure one with --mode decode.")
    held = profile.sequence or 0
    return tuple(
        StepSample(tokens=point.batch_size, cached=point.batch_size * held, sequences=point.batch_size, seconds=seconds)
        for point in profile.points
        for seconds in point.samples
    )


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    return torch_dtype(dtype) if isinstance(dtype, str) else dtype
