"""This library's engine, with its own defaults; a setting may give more arguments of `LLMEngine.from_pretrained`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peer_generators.protocol import Request, serve
from microbatch import LLMEngine, SamplingParams


class Ours:
    """Its prefix cache is off, as everybody's: each round asks the same."""

    def __init__(self, folder: Path, dtype: str, setting: dict[str, Any]) -> None:
        self._engine = LLMEngine.from_pretrained(folder, dtype=dtype, prefix_caching=False, **setting).start()

    def generate(self, requests: Sequence[Request]) -> list[list[int]]:
        """See `Generator`."""
        params = [SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True) for _, tokens in requests]
        answers = self._engine.generate([ids for ids, _ in requests], params)
        return [list(answer.token_ids) for answer in answers]


if __name__ == "__main__":
    serve(Ours)
