"""vLLM's CPU backend, its engine in this process so that all its time is seen; settings are arguments of `LLM`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}

from vllm import LLM, SamplingParams

from benchmarks.peer_generators.protocol import Request, serve

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


class Vllm:
    """Its prefix cache is off, as everybody's: each round asks the same."""

    def __init__(self, folder: Path, dtype: str, setting: dict[str, Any]) -> None:
        self._model = LLM(
            str(folder), dtype=DTYPES[dtype], skip_tokenizer_init=True, enable_prefix_caching=False, seed=0,
            max_model_len=512, **setting,
        )  # fmt: skip

    def generate(self, requests: Sequence[Request]) -> list[list[int]]:
        """See `Generator`."""
        params = [
            SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
            for _, tokens in requests
        ]
        found = self._model.generate([{"prompt_token_ids": ids} for ids, _ in requests], params, use_tqdm=False)
        return [list(each.outputs[0].token_ids) for each in found]


if __name__ == "__main__":
    serve(Vllm)
