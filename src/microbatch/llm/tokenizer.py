"""The tokenizer of a model's folder: text to ids, ids to text and to bytes, and its chat template. Loads no torch.

Only the package tokenizers is needed, and nothing of the folder is run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from microbatch.errors import InvalidModel, InvalidRequest
from microbatch.llm.chat import ChatTemplate, find_template
from microbatch.models.json_file import json_of
from microbatch.models.tokenizer_file import read_tokenizer

_ONE_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Tokens with a name, which templates refer to."""


class Tokenizer:
    """Text and tokens of one model.

    Args:
        tokenizer: of the package tokenizers.
        eos_ids: tokens that end an answer.
        vocab_size: of the model; by default the tokenizer's own.
        special_tokens: by name, as in ``{"bos_token": "<s>"}``.
        templates: chat templates by name; "default" is the usual one.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        eos_ids: Sequence[int] = (),
        vocab_size: int | None = None,
        special_tokens: Mapping[str, str] | None = None,
        templates: Mapping[str, str] | None = None,
    ) -> None:
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        self.eos_ids = tuple(eos_ids)
        self.vocab_size = vocab_size or max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.special_tokens = dict(special_tokens or {})
        self._templates = {name: ChatTemplate(text) for name, text in (templates or {}).items()}
        self._special_ids = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """Reads tokenizer.json and what stands beside it.

        Raises:
            InvalidModel: tokenizers is not installed, or a file is missing or broken.
        """
        folder = Path(path)
        settings = json_of(folder / "tokenizer_config.json")
        tokenizer = read_tokenizer(folder)
        special = _special_tokens({**json_of(folder / "special_tokens_map.json"), **settings})
        return cls(
            tokenizer,
            eos_ids=_eos_ids(folder, tokenizer, special),
            vocab_size=_vocab_size(json_of(folder / "config.json")),
            special_tokens=special,
            templates=find_template(folder, settings),
        )

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The ids of a text.

        Args:
            special: whether to put before and after it what the model expects there, such as a token for the beginning.

        Raises:
            InvalidRequest: it is no text, or holds half of a surrogate pair.
        """
        if not isinstance(text, str):
            raise InvalidRequest(f"A {type(text).__name__} is no text to tokenise.", "Give text.")
        try:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special).ids
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidRequest("The text holds half of a surrogate pair.", "Send valid Unicode.") from error
        return ids

    def text_of(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of ids by themselves, as at the beginning of a text."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special)
        return text

    def token_text(self, token_id: int) -> str:
        """What a token stands for in the middle of a text; U+FFFD where it is a part of a character only."""
        return self.bytes_of_token(token_id).decode("utf-8", "replace")

    def bytes_of_token(self, token_id: int, *, first: bool = False) -> bytes:
        """The bytes that a token adds to a text; none where the id has no token.

        Args:
            first: the text begins with it: some tokenizers leave the leading space of the first word out.
        """
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._look_up(token_id)
        if first and (found.startswith(b" ") or "WordPiece" in self._decoders):
            return self.text_of([token_id], skip_special=False).encode()
        return found

    def bytes_shown(self, token_id: int, *, first: bool = False) -> bytes:
        """The same; special tokens add nothing."""
        return b"" if token_id in self._special_ids else self.bytes_of_token(token_id, first=first)

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **arguments: Any,
    ) -> str:
        """The prompt that the model's chat template makes of messages. Encode it with ``special=False``.

        Args:
            messages: each with a role and content.
            tools: descriptions of functions in OpenAI's form.
            add_generation_prompt: whether it ends where the assistant begins to speak.
            arguments: whatever else the template knows, as in ``enable_thinking=False``.

        Raises:
            InvalidRequest: there is no template, it refuses the messages, or they are none.
            InvalidModel: the template is broken, does what templates must not, or takes too long.
        """
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        template = self._templates.get(name)
        if template is None:
            raise InvalidRequest("This model has no chat template.", "Send a prompt to /v1/completions instead.")
        given = {"tools": tools, "add_generation_prompt": add_generation_prompt, **self.special_tokens, **arguments}
        return template.render(messages, given)

    def _look_up(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        if token is None:
            return b""
        if "ByteLevel" in self._decoders:
            return _byte_level(token)
        one_byte = _ONE_BYTE.fullmatch(token) if "ByteFallback" in self._decoders else None
        if one_byte:
            return bytes([int(one_byte[1], 16)])
        before = self.text_of([self._anchor], skip_special=False)
        return self.text_of([self._anchor, token_id], skip_special=False)[len(before) :].encode()

    @cached_property
    def _decoders(self) -> frozenset[str]:
        """The kinds of decoder at work, those inside a sequence included."""
        decoder = json.loads(self._tokenizer.to_str())["decoder"] or {}
        return frozenset(part["type"] for part in (decoder, *decoder.get("decoders", ())) if "type" in part)

    @cached_property
    def _anchor(self) -> int:
        """A token with letters: what comes after it is in the middle of a text."""
        vocabulary: list[int] = sorted(self._tokenizer.get_vocab(with_added_tokens=False).values())
        return next((i for i in vocabulary if self.text_of([i]).strip().isalpha()), vocabulary[0])


def _byte_level(token: str) -> bytes:
    """GPT-2 writes each byte as a character that can be seen; what holds others is an added token as it is."""
    try:
        return bytes(_BYTES[character] for character in token)
    except KeyError:
        return token.encode()


def _byte_characters() -> dict[str, int]:
    """Visible characters of Latin-1 stand for themselves; the other bytes follow from U+0100 on, in order."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + place): byte for place, byte in enumerate(hidden)}


_BYTES = _byte_characters()


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Each is a text, or an object with its text as content."""
    found = {name: settings.get(name) for name in SPECIAL}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in found.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _eos_ids(folder: Path, tokenizer: Any, special: Mapping[str, str]) -> tuple[int, ...]:
    """As transformers finds them: generation_config.json first, then config.json; else the tokenizer's own."""
    config = json_of(folder / "config.json")
    for settings in (json_of(folder / "generation_config.json"), config, config.get("text_config") or {}):
        named = settings.get("eos_token_id")
        if named is not None:
            ids = named if isinstance(named, list) else [named]
            if not all(type(each) is int and each >= 0 for each in ids):
                raise InvalidModel(f"eos_token_id in {folder} is {named!r}.", "Give a token id, or a list of them.")
            return tuple(ids)
    own = tokenizer.token_to_id(special.get("eos_token", ""))
    return () if own is None else (own,)


def _vocab_size(config: Mapping[str, Any]) -> int | None:
    found = (config.get("text_config") or config).get("vocab_size")
    return found if type(found) is int and found > 0 else None
