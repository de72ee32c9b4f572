"""The two limits of continuous batching, printed beside a profile in decode mode: sequences, and tokens in a step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from microbatch.errors import MicrobatchError
from microbatch.units import format_seconds

if TYPE_CHECKING:
    from microbatch.llm.budget import Limits

CONTEXT = 512
"""Tokens that a sequence has in the cache, where the user names none."""


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """What was found, or why nothing was.

    Attributes:
        found: the limits; None where the model or the target allows none.
        context: tokens that each sequence has in the cache.
        target: seconds of a step; None for the best throughput.
        reason: where they come from, or why there are none.
    """

    found: Limits | None
    context: int
    target: float | None
    reason: str

    def to_json(self) -> dict[str, Any]:
        """Under the names of `LLMEngine`'s settings."""
        found = self.found
        return {
            "max_num_sequences": found and found.max_sequences, "max_num_tokens": found and found.max_tokens,
            "limited_by": found and found.limited_by, "seconds": found and found.seconds,
            "context": self.context, "target": self.target, "reason": self.reason,
        }  # fmt: skip

    def __str__(self) -> str:
        aim = f"for a target of {format_seconds(self.target)}" if self.target else "for the best throughput"
        if self.found is None:
            return f"Continuous batching {aim}: no limits. {self.reason}"
        return (
            f"Continuous batching {aim}: max_num_sequences={self.found.max_sequences}, "
            f"max_num_tokens={self.found.max_tokens}.\n  {self.reason}."
        )


def limits_in_mode(
    mode: str, model: str, dtype: str | None, device: str, context: int | None, memory: int | None, target: float | None
) -> DecodeLimits | None:
    """Those of a folder in decode mode; None for anything else. See `decode_limits`."""
    if mode != "decode" or not Path(model).is_dir():
        return None
    return decode_limits(
        Path(model), dtype=dtype, device=device, context=context, memory_limit=memory, target=target
    )  # fmt: skip


def decode_limits(
    folder: Path, *, dtype: str | None, device: str, context: int | None, memory_limit: int | None, target: float | None
) -> DecodeLimits:
    """Measured on the steps of this library's own engine, a second or two, with the memory that it would take.

    Args:
        folder: of a language model.
        dtype, device, memory_limit: as for the engine.
        context: tokens that each sequence has in the cache.
        target: seconds of a step, which is the time per output token; None for the best throughput.
    """
    from microbatch.batch.oom import is_out_of_memory

    held = context or CONTEXT
    try:
        found = _measured(folder, dtype, device, held, memory_limit, target)
    except Exception as error:  # it is beside the profile, which must not be lost with it
        if not isinstance(error, MicrobatchError) and not is_out_of_memory(error):
            raise
        return DecodeLimits(None, held, target, str(error).splitlines()[0])
    return DecodeLimits(found, held, target, found.reason)


def _measured(
    folder: Path, dtype: str | None, device: str, context: int, memory_limit: int | None, target: float | None
) -> Limits:
    from microbatch.llm.budget import limits
    from microbatch.llm.limits import Limits as Bounds
    from microbatch.llm.measure_steps import measure_steps
    from microbatch.llm.models import load
    from microbatch.llm.prepare import MOST_SEQUENCES, MOST_TOKENS
    from microbatch.llm.runner import Runner, blocks_for
    from microbatch.llm.step_model import fit
    from microbatch.measure.dtypes import torch_dtype

    decoder, _ = load(folder, dtype=torch_dtype(dtype) if dtype else None, device=device)
    size = 16
    blocks, _ = blocks_for(decoder, size, memory_limit, num_sequences=MOST_SEQUENCES, max_num_tokens=MOST_TOKENS)
    runner = Runner(decoder, blocks, size)
    runner.warm_up()
    bounds = Bounds(
        vocab_size=decoder.vocab_size, context=decoder.context, num_blocks=blocks, block_size=size,
        max_num_sequences=MOST_SEQUENCES, max_num_tokens=MOST_TOKENS, notes=(),
    )  # fmt: skip
    with runner.every_block_written():
        samples = measure_steps(runner, bounds, device=device)
    return limits(fit(samples), target, min(context, decoder.context), blocks * size, most=MOST_SEQUENCES)
