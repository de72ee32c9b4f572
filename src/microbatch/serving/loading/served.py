"""What is behind one name of a server. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Given = Mapping[str, Any]
"""Settings of `DynamicBatcher` by name: those that the user gave, and no others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One engine with its name.

    Attributes:
        name: in paths and requests.
        text: the MODEL or function as the user wrote it.
        kind: function, module, embeddings or language-model.
        engine: a `DynamicBatcher`, a `Reading`, or what a kind from above this room brings; not started yet.
        takes: what one item is, in a few words.
        notes: what the user must know, one sentence each.
    """

    name: str
    text: str
    kind: str
    engine: Any
    takes: str
    notes: tuple[str, ...] = ()
