"""CTranslate2: static batches out of which finished rows are taken."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ctranslate2

from benchmarks.peer_generators.protocol import Request, serve

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


class CTranslate2:
    """`rows` of a batch, of prompts about as long: what is longer than the shortest is computed token by token."""

    def __init__(self, folder: Path, dtype: str, setting: dict[str, Any]) -> None:
        converted = folder / "ctranslate2"
        if not converted.exists():
            ctranslate2.converters.TransformersConverter(str(folder)).convert(str(converted))
        self._model = ctranslate2.Generator(str(converted), compute_type=DTYPES[dtype], intra_threads=1)
        self._texts: list[str] = json.loads((converted / "vocabulary.json").read_text(encoding="utf-8"))
        self._rows: int = setting["rows"]

    def generate(self, requests: Sequence[Request]) -> list[list[int]]:
        """See `Generator`."""
        outputs: list[list[int]] = [[] for _ in requests]
        order = sorted(range(len(requests)), key=lambda place: len(requests[place][0]))
        for start in range(0, len(order), self._rows):
            batch = order[start : start + self._rows]
            for place, output in zip(batch, self._batch([requests[place] for place in batch])):
                outputs[place] = output
        return outputs

    def _batch(self, requests: Sequence[Request]) -> list[list[int]]:
        """Steps are counted from the end of the shortest prompt."""
        shortest = min(len(ids) for ids, _ in requests)
        steps = [len(ids) - shortest + tokens for ids, tokens in requests]
        found = self._model.generate_batch(
            [[self._texts[token] for token in ids] for ids, _ in requests],
            max_length=max(steps), sampling_topk=1, include_prompt_in_result=False, end_token=[],
            callback=lambda result: result.step + 1 >= steps[result.batch_id],
        )  # fmt: skip
        return [list(each.sequences_ids[0]) for each in found]


if __name__ == "__main__":
    serve(CTranslate2)
