"""What the user wants to serve, by its text: a function of their own, or any MODEL.

To support a further kind of folder, write a function and its row in `KINDS_OF_FOLDER`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from microbatch.errors import InvalidModel, InvalidSettings
from microbatch.serving.loading.folder_kind import EMBEDDINGS, LANGUAGE_MODEL, MODULE, kind_of
from microbatch.serving.loading.named import from_named, is_local
from microbatch.serving.loading.served import Given, Served

Loader = Callable[[str, str, Given], Served]
"""From a folder, a name and settings to an engine."""

NAMED = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*)=(?P<text>.+)", re.S)
"""``name=MODEL``; a setting of a built-in model comes after a colon, and a path with = in it after a slash."""


def name_and_text(text: str) -> tuple[str, str]:
    """``name=MODEL`` or a MODEL alone, whose name is made of it: the callable, the folder or the model's own name."""
    match = NAMED.fullmatch(text)
    if match:
        return match["name"], match["text"]
    return _made_name(text), text


def load_all(
    texts: Sequence[str], given: Given, *, as_kind: str | None = None, more: Mapping[str, Loader] | None = None
) -> list[Served]:
    """Every text as an engine of its own name; see `load_served`.

    Raises:
        InvalidModel, InvalidSettings: see `load_served`; or two have one name.
    """
    named = [name_and_text(text) for text in texts]
    names = [name for name, _ in named]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InvalidSettings(f"Two models are called {twice[0]!r}.", f"Name them, as in {twice[0]}-2=MODEL.")
    return [load_served(text, name, given, as_kind=as_kind, more=more) for name, text in named]


def load_served(
    text: str, name: str, given: Given, *, as_kind: str | None = None, more: Mapping[str, Loader] | None = None
) -> Served:
    """The engine of a text, not started.

    Args:
        text: a function, decorated or not, an nn.Module or an engine, by module:name or file.py:name; or a MODEL.
        name: under which it is served.
        given: settings of the engine.
        as_kind: what a folder is served as; by default what it looks like.
        more: further kinds of folder, or others in the place of those in `KINDS_OF_FOLDER`.

    Raises:
        InvalidModel: there is nothing of that name, or it cannot be served.
        InvalidSettings: settings that contradict each other, or `as_kind` for what is no folder.
    """
    if Path(text).is_dir():
        kinds = {**KINDS_OF_FOLDER, **(more or {})}
        return kinds[kind_of(Path(text), as_kind)](text, name, given)
    if as_kind is not None:
        raise InvalidSettings(f"--as {as_kind} chooses what a folder is; {text} is none.", "Leave it out.")
    if is_local(text):
        return from_named(text, name, given)
    from microbatch.models.built_in import BUILT_IN
    from microbatch.models.named_object import is_named
    from microbatch.models.vision import PACKAGES

    if is_named(text) and text.partition(":")[0] not in {*BUILT_IN, *PACKAGES}:
        return from_named(text, name, given)
    return _module(text, name, given)


def _made_name(text: str) -> str:
    """``file.py:embed`` → embed; ``models/minilm`` → minilm; ``timm:resnet50`` → resnet50; ``mlp:depth=8`` → mlp."""
    place, _, rest = text.partition(":")
    if Path(text).exists() or not rest:
        stem = Path(text).resolve().name
        return _cleaned(stem.removesuffix(".pt2"))
    return _cleaned(place if "=" in rest and "," not in rest.partition("=")[0] else rest.partition(",")[0])


def _cleaned(text: str) -> str:
    return re.sub(r"[^\w.-]+", "-", text).strip("-.") or "model"


def _module(text: str, name: str, given: Given) -> Served:
    from microbatch.models.load import load_model
    from microbatch.serving.loading.modules import from_loaded

    return from_loaded(text, name, load_model(text), given)


def _folder_module(text: str, name: str, given: Given) -> Served:
    from microbatch.serving.loading.tokens import from_folder

    return from_folder(text, name, given)


def _sentences(text: str, name: str, given: Given) -> Served:
    from microbatch.serving.loading.sentences import from_sentences

    return from_sentences(text, name, given)


def _language_model(text: str, name: str, given: Given) -> Served:  # noqa: ARG001 (one form for all)
    raise InvalidModel(
        f"{text} holds a language model that generates text, which is no answer to an item.",
        "Serve it, or use microbatch.LLMEngine; --as module gives the logits of one forward, --as embeddings a vector.",
    )


KINDS_OF_FOLDER: dict[str, Loader] = {
    EMBEDDINGS: _sentences,
    MODULE: _folder_module,
    LANGUAGE_MODEL: _language_model,
}
"""What a folder can be served as, by the name that ``--as`` takes."""
