"""Prompts from a file of JSON lines: a text, token ids or a conversation each, with settings of its own. No torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from microbatch.errors import InvalidRequest, InvalidSettings, UserError
from microbatch.llm.sampling_params import SamplingParams

NAMED = 10
"""Bad lines that an error names one by one."""
_NOT_IN_FILES = ("logits_processors",)
_SETTINGS = tuple(each.name for each in fields(SamplingParams) if each.name not in _NOT_IN_FILES)
_CONTENT = ("prompt", "messages")
_REMEDY = 'Write each line as {"prompt": "..."}, {"messages": [...]} or a JSON string.'


@dataclass(frozen=True, slots=True)
class PromptLine:
    """A line that asks for something.

    Attributes:
        number: of the line, from 1.
        prompt: text or token ids; None for a conversation.
        messages: of a conversation; None for a prompt.
        settings: of `SamplingParams`, those that this line gives.
        name: the line's own ``id``; None without one.
        digest: tells whether an answer belongs to this line and these settings.
    """

    number: int
    prompt: str | tuple[int, ...] | None
    messages: tuple[Mapping[str, Any], ...] | None
    settings: Mapping[str, Any]
    name: Any
    digest: str

    @property
    def asked(self) -> str | tuple[int, ...] | tuple[Mapping[str, Any], ...]:
        """What the engine gets as a prompt."""
        return self.messages or self.prompt or ()

    def params(self, common: Mapping[str, Any]) -> SamplingParams:
        """What it is answered with: its own settings before the common ones.

        Raises:
            InvalidRequest: settings outside their range.
        """
        return SamplingParams(**{**common, **self.settings})


def read_prompts(path: Path, common: Mapping[str, Any], model: str) -> list[PromptLine]:
    """Every line but the empty ones.

    Args:
        path: of the file.
        common: settings of every line that does not give its own.
        model: what tells this model from another, for the digests.

    Raises:
        InvalidSettings: lines that cannot be read, by their numbers; all of them are looked at first.
    """
    lines, wrong = [], list[tuple[int, str]]()
    for number, text in _lines(path):
        try:
            line = _line(number, text, common, model)
            line.params(common)
        except UserError as error:
            wrong.append((number, error.message))
        else:
            lines.append(line)
    if wrong:
        raise _bad(path, wrong)
    return lines


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, text in enumerate(file, 1):
                if text.strip():
                    yield number, text
    except UnicodeDecodeError as error:
        raise InvalidSettings(f"{path} is no UTF-8 text: {error}.", "Write it as UTF-8.") from None


def _line(number: int, text: str, common: Mapping[str, Any], model: str) -> PromptLine:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"no JSON ({error})", _REMEDY) from None
    value = {"prompt": value} if isinstance(value, str | list) else value
    if not isinstance(value, dict) or sum(name in value for name in _CONTENT) != 1:
        raise InvalidRequest("neither a prompt nor messages, or both", _REMEDY)
    unknown = sorted(set(value) - {*_SETTINGS, *_CONTENT, "id"})
    if unknown:
        raise InvalidRequest(f"unknown key {unknown[0]!r}", f"Known are {', '.join((*_CONTENT, 'id', *_SETTINGS))}.")
    settings = {name: _setting(name, value[name]) for name in _SETTINGS if name in value}
    asked = json.dumps([model, value, common], sort_keys=True, default=str)
    digest = hashlib.sha256(asked.encode()).hexdigest()[:16]
    return PromptLine(number, _prompt(value), _messages(value), settings, value.get("id"), digest)


def _prompt(value: Mapping[str, Any]) -> str | tuple[int, ...] | None:
    prompt = value.get("prompt")
    if "prompt" not in value or (isinstance(prompt, str) and prompt):
        return prompt
    if isinstance(prompt, list) and prompt and all(type(each) is int for each in prompt):
        return tuple(prompt)
    raise InvalidRequest("a prompt that is no text and no list of token ids, or empty", _REMEDY)


def _messages(value: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...] | None:
    messages = value.get("messages")
    if "messages" not in value:
        return None
    if isinstance(messages, list) and messages and all(isinstance(each, dict) for each in messages):
        return tuple(messages)
    raise InvalidRequest("messages that are no list of objects, or none", _REMEDY)


def _setting(name: str, value: Any) -> Any:
    """As `SamplingParams` takes it: JSON knows no numbers as keys."""
    if name == "logit_bias" and isinstance(value, dict):
        try:
            return {int(token_id): bias for token_id, bias in value.items()}
        except ValueError:
            raise InvalidRequest("a logit_bias whose keys are no token ids", _REMEDY) from None
    return value


def _bad(path: Path, wrong: list[tuple[int, str]]) -> InvalidSettings:
    said = "; ".join(f"line {number}: {text.rstrip('.')}" for number, text in wrong[:NAMED])
    more = f"; and {len(wrong) - NAMED} more" if len(wrong) > NAMED else ""
    return InvalidSettings(f"{path} has {len(wrong)} bad lines: {said}{more}.", _REMEDY)
