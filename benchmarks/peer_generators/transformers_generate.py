"""transformers: `generate` one by one, in static left-padded batches, and `generate_batch`'s continuous batching."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.peer_generators.protocol import Request, serve
from microbatch.models.torchvision_operators import make_torchvision_importable

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
NO_END = -1
"""As the id of the end of text: no token has it."""


class Transformers:
    """With `rows` 1 one by one, with more in static batches in order of arrival; without, in continuous batches."""

    def __init__(self, folder: Path, dtype: str, setting: dict[str, Any]) -> None:
        make_torchvision_importable()  # transformers looks for it
        transformers: Any = importlib.import_module("transformers")
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype]).eval()
        greedy = transformers.GenerationConfig(do_sample=False, eos_token_id=NO_END, pad_token_id=0)
        model.generation_config = greedy
        self._model = model
        self._rows: int | None = setting.get("rows")
        if self._rows is None:
            config = transformers.ContinuousBatchingConfig(allow_block_sharing=False, **setting)
            self._batching = model.continuous_batching_context_manager(greedy, continuous_batching_config=config)
            self._manager = self._batching.__enter__()  # as long as this process

    def generate(self, requests: Sequence[Request]) -> list[list[int]]:
        """See `Generator`."""
        if self._rows is None:
            return self._in_continuous_batches(requests)
        outputs: list[list[int]] = []
        for start in range(0, len(requests), self._rows):
            outputs += self._static_batch(requests[start : start + self._rows])
        return outputs

    def _static_batch(self, requests: Sequence[Request]) -> list[list[int]]:
        """All run until the longest is done; what the others have too much is cut off."""
        longest = max(len(ids) for ids, _ in requests)
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt, _ in requests])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt, _ in requests])
        with torch.inference_mode():
            most = max(tokens for _, tokens in requests)
            found = self._model.generate(ids, attention_mask=mask, max_new_tokens=most)
        return [row[longest : longest + tokens].tolist() for row, (_, tokens) in zip(found, requests)]

    def _in_continuous_batches(self, requests: Sequence[Request]) -> list[list[int]]:
        """What `generate_batch` does, which has one length for all requests: here each has its own."""
        manager, outputs = self._manager, dict[str, list[int]]()
        keys = [manager.add_request(ids, max_new_tokens=tokens, eos_token_id=NO_END) for ids, tokens in requests]
        while len(outputs) < len(keys):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                outputs[result.request_id] = list(result.generated_tokens)
            elif result is None and not manager.is_running():
                raise RuntimeError("the thread of generate_batch has ended")
        return [outputs[key] for key in keys]

    def margins(self, asked: Sequence[tuple[list[int], int, int]]) -> list[float]:
        """By how much the logit of one token exceeds that of another after some ids."""
        found = []
        for ids, one, other in asked:
            with torch.inference_mode():
                logits = self._model(torch.tensor([ids])).logits[0, -1].double()
            found.append(float(logits[one] - logits[other]))
        return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(Transformers)
