"""OpenVINO GenAI's continuous batching over a model that optimum-intel converted; settings are of its scheduler."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai

from benchmarks.peer_generators.protocol import Request, serve

DTYPES = {"fp32": "f32", "bf16": "bf16"}


class OpenVino:
    """Its prefix cache is off, as everybody's: each round asks the same."""

    def __init__(self, folder: Path, dtype: str, setting: dict[str, Any]) -> None:
        precision = DTYPES[dtype]
        scheduler = openvino_genai.SchedulerConfig()
        for name, value in ({"cache_size": 2, "enable_prefix_caching": False} | setting).items():
            setattr(scheduler, name, value)
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            _converted(folder), scheduler, "CPU",
            {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": precision, "INFERENCE_NUM_THREADS": 1},
        )  # fmt: skip

    def generate(self, requests: Sequence[Request]) -> list[list[int]]:
        """See `Generator`."""
        configs = []
        for _, tokens in requests:
            config = openvino_genai.GenerationConfig()
            config.max_new_tokens, config.ignore_eos, config.do_sample = tokens, True, False
            configs.append(config)
        prompts = [openvino.Tensor(np.array([ids], dtype=np.int64)) for ids, _ in requests]
        return [list(each.m_generation_ids[0]) for each in self._pipeline.generate(prompts, configs)]


def _converted(folder: Path) -> Path:
    """Weights stay in fp32: the precision is chosen where it runs."""
    target = folder / "openvino"
    if not (target / "openvino_model.xml").exists():
        subprocess.run(
            [Path(sys.executable).parent / "optimum-cli", "export", "openvino", "--model", folder, "--task",
             "text-generation-with-past", "--weight-format", "fp32", target],
            check=True, stdout=sys.stderr,
        )  # fmt: skip
    return target


if __name__ == "__main__":
    serve(OpenVino)
