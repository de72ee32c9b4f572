"""Chat templates: what a model's folder says about how messages become a prompt. Loads no torch.

A template is a program of strangers. It runs in jinja2's sandbox, sees plain data only, and has no loader, so it can
read nothing and reach no Python object; `sandbox` also counts what it does, so it ends in bounded time and memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError

from microbatch.errors import InvalidModel, InvalidRequest
from microbatch.llm.sandbox import Refused, TooMuch, compiled, rendered

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names under which a message carries its reasoning; templates read the first, some the second."""
_DEEPEST = 64
"""Lists and objects inside each other at most, in messages and tools."""
LONGEST_TEMPLATE = 1 << 20
"""Characters of a template at most; those of large families have 20,000."""


class ChatTemplate:
    """A template, compiled at its first use.

    Args:
        source: in jinja2's language, with what transformers adds: ``{% generation %}``, ``{% break %}``,
            ``raise_exception``, ``strftime_now``, ``tojson`` with its options.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self._compiled: Any = None

    def render(self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any] | None = None) -> str:
        """The prompt.

        Args:
            messages: each with a role.
            arguments: what the template may refer to.

        Raises:
            InvalidRequest: the template refuses the messages, they are none, or they hold what is no plain data.
            InvalidModel: the template is broken, does what templates must not, or does too much.
        """
        chat = _checked_messages(messages)
        plain = {name: _plain(value, name) for name, value in (arguments or {}).items()}
        try:
            if self._compiled is None:
                self._compiled = self._compile()
            return rendered(self._compiled, {"documents": None, **plain, "messages": chat})
        except Refused as error:
            raise InvalidRequest(f"The chat template refuses these messages: {error}", "Change them.") from error
        except SecurityError as error:
            raise InvalidModel(f"The chat template does what templates must not: {error}", _NOT_YOURS) from error
        except (TooMuch, RecursionError, MemoryError) as error:
            raise InvalidModel(f"The chat template does too much: {error}", _NOT_YOURS) from error
        except InvalidModel:
            raise
        except Exception as error:  # a template can raise whatever its expressions do: KeyError, TypeError, ...
            raise InvalidRequest(
                f"The chat template cannot render these messages: {type(error).__name__}: {error}",
                "Check the role and content of each message, and what the template expects besides.",
            ) from error

    def _compile(self) -> Any:
        if len(self.source) > LONGEST_TEMPLATE:
            raise InvalidModel(f"The chat template has {len(self.source)} characters.", _NOT_YOURS)
        try:
            return compiled(self.source)
        except TemplateSyntaxError as error:
            raise InvalidModel(
                f"The chat template cannot be read: {error.message} (line {error.lineno}).", _NOT_YOURS
            ) from error
        except (TemplateError, SyntaxError, RecursionError, MemoryError) as error:
            raise InvalidModel(f"The chat template cannot be read: {error}.", _NOT_YOURS) from error


_NOT_YOURS = "Look at chat_template in the model's folder, or send a prompt to /v1/completions instead."


def find_template(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """The chat templates of a folder by name: from a file of their own, else from tokenizer_config.json (`settings`).

    Raises:
        InvalidModel: what stands there is no template.
    """
    file = folder / "chat_template.jinja"
    if file.is_file():
        more = sorted((folder / "additional_chat_templates").glob("*.jinja"))
        return {"default": _text(file), **{each.stem: _text(each) for each in more}}
    found = settings.get("chat_template")
    if isinstance(found, list):  # several, each an object with name and template
        named = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
    else:
        named = {} if found is None else {"default": found}
    wrong = [name for name, text in named.items() if not isinstance(name, str) or not isinstance(text, str)]
    if wrong:
        raise InvalidModel(f"chat_template in {folder} is no text.", "Download or write tokenizer_config.json again.")
    return {str(name): str(text) for name, text in named.items()}


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except ValueError as error:
        raise InvalidModel(f"{file} is not UTF-8: {error}.", "Download or write it again.") from error


def _checked_messages(messages: object) -> list[dict[str, Any]]:
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise InvalidRequest(
            f"messages is a {type(messages).__name__}.", 'Give a list: [{"role": "user", "content": "..."}].'
        )
    if not messages:
        raise InvalidRequest("There are no messages.", "Give at least one.")
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidRequest(
                f"Message {place} has no role.", 'Give each as an object: {"role": "user", "content": "..."}.'
            )
    return [_message(_plain(message, f"message {place}")) for place, message in enumerate(messages)]


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """As transformers hands it on: without what is null, and with its reasoning under each name."""
    known = {key: value for key, value in message.items() if value is not None}
    reasoning = next((known[name] for name in _REASONING if name in known), None)
    return known if reasoning is None else {"thinking": reasoning, **known, "reasoning_content": reasoning}


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """A copy out of nothing but what JSON has, so that the template can call no method of anybody's object."""
    if depth > _DEEPEST:
        raise InvalidRequest(f"{where} is nested more than {_DEEPEST} deep.", "Flatten it.")
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {_plain(key, where, depth + 1): _plain(item, where, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, where, depth + 1) for item in value]
    raise InvalidRequest(f"{where} holds a {type(value).__name__}.", "Give text, numbers, lists and objects.")
