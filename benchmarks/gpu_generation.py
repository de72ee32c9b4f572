"""The GPU check of generation: a decoder's logits beside transformers' own, in pieces, beside mates."""

from __future__ import annotations

import random
import time
from typing import Any

import torch

from microbatch.llm.models import decoder_of
from microbatch.llm.runner import Row, Runner
from microbatch.models.hugging_face import import_transformers


def generation(device: str, *, tiny: bool) -> dict[str, Any]:
    """A prompt in two pieces, then greedy tokens, for rows of several lengths, in each dtype."""
    transformers = import_transformers("The check makes a Llama")
    hidden, layers, rows, steps = (64, 2, 4, 4) if tiny else (1024, 8, 64, 32)
    config = transformers.LlamaConfig(
        vocab_size=1000, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 32, num_key_value_heads=hidden // 64, max_position_embeddings=1024,
        initializer_range=0.1,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = transformers.LlamaForCausalLM(config).to(device).eval()
    found: dict[str, Any] = {}
    for dtype, tolerance in ((torch.float32, 1e-3), (torch.bfloat16, 0.1), (torch.float16, 0.02)):
        model = model.to(dtype)
        runner = Runner(decoder_of(model), 40 * rows)
        texts, seconds = _greedy(runner, rows, steps)
        worst = 0.0
        for text, last in texts:
            with torch.no_grad():
                expected = model(torch.tensor([text], device=device)).logits[0, -1].float()
            worst = max(worst, float((last - expected).abs().max() / expected.abs().max()))
        assert worst < tolerance, f"{dtype}: logits differ by {worst}"
        found[str(dtype)[6:]] = {"largest_difference": worst, "decode_tokens_per_second": rows * steps / seconds}
    return found


def _greedy(runner: Runner, rows: int, steps: int) -> tuple[list[tuple[list[int], torch.Tensor]], float]:
    """Texts with the logits of their last token, and the seconds of the decode steps."""
    numbers = random.Random(0)
    texts = [[numbers.randrange(1000) for _ in range(numbers.randrange(5, 200))] for _ in range(rows)]
    tables = [range(40 * row, 40 * row + 40) for row in range(rows)]
    runner.step([Row(text[:4], 0, table, wants_logits=False) for text, table in zip(texts, tables)])
    last = runner.step([Row(text[4:], 4, table) for text, table in zip(texts, tables)]).last
    start = time.perf_counter()
    for _ in range(steps):
        for text, token in zip(texts, last.argmax(dim=-1).tolist()):
            text.append(token)
        last = runner.step([Row(text[-1:], len(text) - 1, table) for text, table in zip(texts, tables)]).last
    return list(zip(texts, last)), time.perf_counter() - start
