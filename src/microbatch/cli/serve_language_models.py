"""Language models among what ``microbatch serve`` serves: their options, and how a folder becomes an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from microbatch.cli.options import BYTES, DURATION
from microbatch.errors import InvalidSettings
from microbatch.serving.loading.folder_kind import LANGUAGE_MODEL, kind_of
from microbatch.serving.loading.load import name_and_text
from microbatch.serving.loading.served import Given, Served

Function = TypeVar("Function", bound=Callable[..., Any])

COUNT = click.IntRange(min=1)
DTYPES = ("fp32", "bf16", "fp16")

OPTIONS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "time_per_output_token_target": ("--tpot-target", {
        "type": DURATION, "metavar": "DURATION", "help": "Language models: seconds between two tokens, as in 50ms."}),
    "time_to_first_token_target": ("--ttft-target", {
        "type": DURATION, "metavar": "DURATION", "help": "Language models: seconds to the first token."}),
    "dtype": ("--dtype", {
        "type": click.Choice(DTYPES), "help": "Language models: of weights and cache; the folder's when left out."}),
    "memory_limit": ("--memory-limit", {
        "type": BYTES, "metavar": "SIZE", "help": "Language models: for the cache and the work of a step."}),
    "max_num_sequences": ("--max-num-sequences", {
        "type": COUNT, "metavar": "N", "help": "Language models: most sequences in a step."}),
    "max_num_tokens": ("--max-num-tokens", {
        "type": COUNT, "metavar": "N", "help": "Language models: most tokens in a step."}),
    "invariant": ("--invariant", {
        "is_flag": True, "default": None, "help": "Language models: the same bits whatever the batch; slower."}),
}  # fmt: skip
"""Settings of `microbatch.LLMEngine` by their names in it: the option of each, and how it is read."""

ALSO_KNOWN = {"max_queue": "max_waiting", "profile": "profile", "devices": "device"}
"""Settings of `DynamicBatcher` that a language model has as well, and what it calls them."""


def language_model_options(function: Function) -> Function:
    """All of `OPTIONS`, in this order."""
    for name, (flag, how) in reversed(list(OPTIONS.items())):
        function = click.option(flag, name, **how)(function)
    return function


def taken_from(options: dict[str, Any]) -> dict[str, Any]:
    """Settings of language models that were given; all of theirs are taken out of the options."""
    found = {name: options.pop(name) for name in OPTIONS}
    return {name: value for name, value in found.items() if value is not None}


def loader(settings: Mapping[str, Any], *, alone: bool) -> Callable[[str, str, Given], Served]:
    """What makes an engine of a folder with a language model.

    Args:
        settings: of language models.
        alone: nothing but language models is served, so that every other setting is meant for them.
    """

    def load(text: str, name: str, given: Given) -> Served:
        from microbatch.llm.engine import LLMEngine

        chosen = {**settings, **_translated(given, alone=alone)}
        engine = LLMEngine.from_pretrained(Path(text), name=name, **chosen)
        return Served(
            name=name, text=text, kind=LANGUAGE_MODEL, engine=engine,
            takes="prompts and conversations, as OpenAI's clients send them",
        )  # fmt: skip

    return load


def only_language_models(models: Sequence[str], as_kind: str | None) -> bool:
    """Whether every text names a folder with one, as far as the files tell before anything is loaded."""
    folders = [Path(name_and_text(text)[1]) for text in models]
    return all(folder.is_dir() and kind_of(folder, as_kind) == LANGUAGE_MODEL for folder in folders)


def check_used(settings: Mapping[str, Any], served: Sequence[Served]) -> None:
    """Check that settings of language models have one to be for.

    Raises:
        InvalidSettings: they have not.
    """
    if settings and not any(each.kind == LANGUAGE_MODEL for each in served):
        flags = ", ".join(OPTIONS[name][0] for name in settings)
        raise InvalidSettings(f"{flags}: for language models, and none is served.", "Leave it out.")


def _translated(given: Given, *, alone: bool) -> dict[str, Any]:
    """Settings that are not only of language models, by the names that these have for them.

    Raises:
        InvalidSettings: one that no language model has, with no other model that it could be for; several devices.
    """
    if alone and (unknown := sorted(given.keys() - ALSO_KNOWN.keys())):
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in unknown)
        known = ", ".join(flag for flag, _ in OPTIONS.values())
        raise InvalidSettings(f"{flags}: not for a language model.", f"It has {known}; see microbatch serve --help.")
    found = {ALSO_KNOWN[name]: value for name, value in given.items() if name in ALSO_KNOWN}
    if "device" in found:
        if len(found["device"]) > 1:
            raise InvalidSettings(f"A language model runs on one device, not {len(found['device'])}.", "Name one.")
        found["device"] = found["device"][0]
    return found
