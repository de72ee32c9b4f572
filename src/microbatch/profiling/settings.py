"""The settings of other stacks, from one measured curve. No torch.

Every figure says in a comment why it is what it is, where the format allows comments (DeepSpeed's JSON does not).
Names follow each stack's own documentation: Triton's model configuration (dynamic batcher), vLLM's engine arguments,
transformers' TrainingArguments and pipeline, Lightning's Trainer and LightningCLI, DeepSpeed's configuration JSON.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass

from microbatch.curves.explanation import Cliff, Explanation
from microbatch.curves.micro_batch_choice import smallest_near_fastest
from microbatch.errors import InvalidSettings
from microbatch.units import THIN_SPACE, format_number, format_seconds

_INFERENCE = ("inference", "prefill", "decode")
_LANGUAGE_UNITS = ("sequences", "tokens")


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """One target of `emit`.

    Attributes:
        write: the settings as text.
        modes: modes of a profile that say something about this stack.
        why: what the stack does, to tell a user whose profile has another mode.
        units: what an item of the batch may be; empty when anything but tokens is.
    """

    write: Callable[[Explanation], str]
    modes: tuple[str, ...]
    why: str
    units: tuple[str, ...] = ()


def emit(explanation: Explanation, stack: str) -> str:
    """The settings of `stack` for the recommended batch size, ready to be saved as a file.

    Raises:
        InvalidSettings: an unknown stack, or a profile whose mode or unit says nothing about that stack.
    """
    if stack not in STACKS:
        near = difflib.get_close_matches(stack, STACKS, n=1)
        hint = f"Did you mean {near[0]}? " if near else ""
        raise InvalidSettings(f"There is no stack {stack!r}.", f"{hint}Known: {', '.join(STACKS)}.")
    target = STACKS[stack]
    _check_mode(explanation, stack, target)
    _check_unit(explanation, stack, target)
    return target.write(explanation)


def _check_mode(explanation: Explanation, stack: str, target: Stack) -> None:
    mode = explanation.profile.mode
    if mode not in target.modes:
        raise InvalidSettings(
            f"{stack} {target.why}, but this profile was measured in mode {mode}.",
            f"Profile the model with --mode {target.modes[0]}.",
        )


def _check_unit(explanation: Explanation, stack: str, target: Stack) -> None:
    unit = explanation.profile.unit
    if target.units and unit not in target.units:
        raise InvalidSettings(
            f"{stack} batches {' and '.join(target.units)}, but this profile counts {unit}.",
            "Profile a language model, as in `microbatch profile decoder --mode decode`.",
        )
    if not target.units and unit == "tokens":
        raise InvalidSettings(
            f"{stack} counts whole items, but this profile counts tokens.",
            "Profile the model over a batch of sequences.",
        )


def _triton(explanation: Explanation) -> str:
    """config.pbtxt. A preferred size is one that Triton would rather wait for: the last size before each cliff."""
    size = explanation.recommended.batch_size
    delay, why = _queue_delay(explanation)
    preferred = sorted({cliff.from_size for cliff in _cliffs_below(explanation)} | {size})
    several = "the last sizes before a jump in time, and the largest"
    return _lines(
        *_because(explanation),
        f"max_batch_size: {size}",
        "dynamic_batching {",
        f"  # {several if len(preferred) > 1 else 'no jump in time below it'}",
        f"  preferred_batch_size: [ {', '.join(map(str, preferred))} ]",
        f"  # {why}",
        f"  max_queue_delay_microseconds: {math.floor(delay * 1e6)}",
        "}",
    )


def _queue_delay(explanation: Explanation) -> tuple[float, str]:
    """Seconds that a request may wait for others, and why.

    With a latency target T: T − 2·t(b), for a request that just missed a batch waits for that one and runs in the
    next. Without a target: the time of the smallest size, so that waiting at most doubles the time of a lone request.
    """
    size, target = explanation.recommended.batch_size, explanation.latency_target
    if target is None:
        first = explanation.points[0]
        text = f"a lone request takes {_seconds(first.seconds)} (batch {first.batch_size}); waiting at most doubles it"
        return first.seconds, text
    point = explanation.point(size)
    call = point.high or point.seconds
    delay = target - 2 * call
    if delay <= 0:
        return 0.0, f"the target of {_seconds(target)} leaves no time to wait: two calls take {_seconds(2 * call)}"
    return delay, f"target {_seconds(target)} less two calls of {_seconds(call)}: the one just missed and its own"


def _vllm(explanation: Explanation) -> str:
    """A file for ``vllm serve MODEL --config FILE``; its keys are the long options of the command line."""
    size = explanation.recommended.batch_size
    if explanation.profile.unit == "tokens":
        option, note = "max-num-batched-tokens", "max-num-seqs stays at its default: this profile counts tokens"
    else:
        option, note = "max-num-seqs", "max-num-batched-tokens stays at its default: this profile counts sequences"
    return _lines(
        *_because(explanation),
        f"# The same on the command line: vllm serve MODEL --{option} {size}",
        f"# {note}",
        f"{option}: {size}",
    )


def _transformers(explanation: Explanation) -> str:
    size, pieces = sizes_of(explanation)
    if explanation.profile.mode != "training":
        return _lines(
            *_because(explanation),
            "# pipeline(task, model=..., **pipeline_settings)",
            f'pipeline_settings = {{"batch_size": {size}}}',
        )
    return _lines(
        *_because(explanation),
        "# TrainingArguments(output_dir=..., **training_settings)",
        "training_settings = {",
        f'    "per_device_train_batch_size": {size},',
        f"    # {_accumulation(explanation)}",
        f'    "gradient_accumulation_steps": {pieces},',
        "}",
    )


def _lightning(explanation: Explanation) -> str:
    """A file for LightningCLI (``--config FILE``); by hand, Trainer(accumulate_grad_batches=...) and a DataModule."""
    size, pieces = sizes_of(explanation)
    data = ("data:", "  # for a LightningDataModule that takes batch_size", f"  batch_size: {size}")
    if explanation.profile.mode != "training":
        return _lines(*_because(explanation), *data)
    trainer = ("trainer:", f"  # {_accumulation(explanation)}", f"  accumulate_grad_batches: {pieces}")
    return _lines(*_because(explanation), *trainer, *data)


def _deepspeed(explanation: Explanation) -> str:
    """Two of its three sizes; DeepSpeed computes train_batch_size from them and the number of devices."""
    size, pieces = sizes_of(explanation)
    settings = {"train_micro_batch_size_per_gpu": size, "gradient_accumulation_steps": pieces}
    return json.dumps(settings, indent=2) + "\n"


def sizes_of(explanation: Explanation) -> tuple[int, int]:
    """Items in one piece and pieces in one optimizer step; those of a global batch are equal, as these stacks need.

    Raises:
        InvalidSettings: no size that is known cuts the global batch into equal pieces that fit.
    """
    found = explanation.micro_batches
    if found is None:
        return explanation.recommended.batch_size, 1
    row = smallest_near_fastest([row for row in found.rows if row.fits is not False and not row.tail])
    if row is None:
        raise InvalidSettings(
            f"No size of the profile that fits cuts {found.global_batch_size} into equal pieces.",
            "Measure it with --global-batch, or choose a global batch with more divisors.",
        )
    return row.micro_batch_size, row.num_micro_batches


def _accumulation(explanation: Explanation) -> str:
    found = explanation.micro_batches
    if found is None:
        return "raise it to keep the global batch: global = size x accumulation x devices"
    return f"for a global batch of {found.global_batch_size} on one device; divide it by the number of devices"


def _because(explanation: Explanation) -> list[str]:
    """The reason for the recommended size, as comment lines."""
    profile, chosen = explanation.profile, explanation.recommended
    what = [text for text in (profile.model, profile.environment.device, profile.dtype, profile.mode) if text]
    rate = f"{format_number(chosen.throughput)} {profile.unit}/s, {format_seconds(chosen.seconds)} a call"
    found = "Measured" if chosen.measured else "Predicted, not measured"
    lines = [f"{found} by microbatch: {', '.join(what)}."]
    if explanation.micro_batches is None:
        lines.append(f"{chosen.batch_size} {profile.unit}: {chosen.reason} ({rate}).")
    else:
        lines.append(_because_of_cut(explanation))
    for cliff in _cliffs_below(explanation):
        lines.append(f"Slow from {cliff.batch_size} to {cliff.to_size}: {cliff.cause}.")
    if chosen.confidence == "low":
        lines.append("The measurement was noisy: confidence is low.")
    return [f"# {_one_line(line)}" for line in lines]


def _because_of_cut(explanation: Explanation) -> str:
    found, (size, pieces) = explanation.micro_batches, sizes_of(explanation)
    assert found is not None
    row = next(row for row in found.rows if row.micro_batch_size == size)
    rate = f"{format_number(row.samples_per_second)} {explanation.profile.unit}/s"
    return f"{size} x {pieces} = {found.global_batch_size}: the fastest of equal pieces, {rate}. {found.reason}"


def _cliffs_below(explanation: Explanation) -> list[Cliff]:
    return [cliff for cliff in explanation.cliffs if cliff.batch_size <= explanation.recommended.batch_size]


def _one_line(text: str) -> str:
    """A comment must not end early: a model's name may hold anything."""
    plain = text.replace(THIN_SPACE, " ").replace("\u00a0", " ")
    return " ".join("".join(letter if letter.isprintable() else " " for letter in plain).split())


def _seconds(seconds: float) -> str:
    return _one_line(format_seconds(seconds))


def _lines(*lines: str) -> str:
    return "\n".join(lines) + "\n"


STACKS: dict[str, Stack] = {
    "triton": Stack(write=_triton, modes=_INFERENCE, why="serves a trained model"),
    "vllm": Stack(write=_vllm, modes=("decode", "prefill", "inference"), why="serves a language model",
                  units=_LANGUAGE_UNITS),
    "transformers": Stack(write=_transformers, modes=("training", *_INFERENCE), why="trains and runs models"),
    "lightning": Stack(write=_lightning, modes=("training", *_INFERENCE), why="trains and runs models"),
    "deepspeed": Stack(write=_deepspeed, modes=("training",), why="trains a model"),
}  # fmt: skip
"""One row per stack that `emit` can write for."""
