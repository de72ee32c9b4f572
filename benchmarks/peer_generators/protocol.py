"""How a generator is asked: JSON lines in, JSON lines out. Standard library only, for it runs in every environment.

The child is started as `python -m benchmarks.peer_generators.NAME FOLDER DTYPE SETTING`, says {"ready": true, ...} when
it has loaded and warmed up, then answers {"requests": [[prompt ids, number of tokens], ...]} with {"outputs": [ids,
...]}. What its libraries print goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

Request = tuple[list[int], int]
"""Prompt ids, and how many tokens shall follow."""
WARM_UP: list[Request] = [([5, 6, 7, 8, 9, 10, 11, 12][: 4 + place % 5], 4 + place % 3) for place in range(16)]
"""Before a generator says that it is ready: whatever is compiled, packed or allocated at first use."""


class Generator(Protocol):
    """What a peer's file makes of a folder."""

    def generate(self, requests: Sequence[Request]) -> list[list[int]]:
        """Exactly so many tokens for each request, greedy, the end of text being an ordinary token."""
        ...


def serve(start: Callable[[Path, str, dict[str, Any]], Generator]) -> None:
    """Load, warm up, and answer until the parent closes the pipe.

    Args:
        start: makes the generator of a model's folder, a dtype ("fp32" or "bf16") and a setting.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(document: dict[str, Any]) -> None:
        answers.write(json.dumps(document) + "\n")
        answers.flush()

    generator = start(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
    generator.generate(WARM_UP)
    say({"ready": True})
    for line in sys.stdin:
        asked = json.loads(line)
        if "margins" in asked:
            say({"margins": generator.margins(asked["margins"])})  # type: ignore[attr-defined]
        else:
            say({"outputs": generator.generate([(ids, tokens) for ids, tokens in asked["requests"]])})
    os._exit(0)  # whatever threads its libraries have
