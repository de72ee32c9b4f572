"""The row of ``gpu_check.py`` for sentence embeddings: every pooling, with texts of mixed length in a batch."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any


def sentences(device: str, *, tiny: bool) -> dict[str, Any]:
    """A row of token ids has the vector that it has alone on the CPU in float64, whatever is in its batch.

    Args:
        device: where the model runs.
        tiny: small sizes, for a CPU.
    """
    import numpy as np
    import torch
    from torch import Tensor, nn

    from microbatch.serving.engine.batcher import DynamicBatcher
    from microbatch.serving.loading.sentences import POOLINGS, SentenceModel
    from microbatch.serving.loading.texts import PaddedRows

    width, vocabulary = (16, 50) if tiny else (384, 30_000)

    class Encoder(nn.Module):
        """Attention with a mask, in torch alone: transformers is not needed here."""

        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(vocabulary, width)
            block = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
            self.layers = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
            hidden = self.layers(self.embed(input_ids), src_key_padding_mask=attention_mask == 0)
            return SimpleNamespace(last_hidden_state=hidden)

    torch.manual_seed(0)
    encoder, generator = Encoder().eval(), np.random.default_rng(0)
    rows = [generator.integers(1, vocabulary, length) for length in generator.integers(2, 60, 24 if tiny else 200)]
    largest = 0.0
    for name in POOLINGS:
        model = SentenceModel(encoder, (name,), normalised=True).eval()
        engine = DynamicBatcher(model, collate=PaddedRows(), examples=rows[:4], devices=[device], max_batch_size=16)
        found = asyncio.run(engine.submit_many(rows))
        assert max(engine.metrics().batch_sizes) > 1, "nothing shared a batch"
        engine.close()
        exact = SentenceModel(encoder, (name,), normalised=True).double().eval()
        with torch.no_grad():
            expected = [exact(**PaddedRows()([row]))[0] for row in rows]
        encoder.float()
        largest = max(largest, *(float((a.double() - b).abs().max()) for a, b in zip(found, expected)))
    assert largest < 1e-3, f"vectors differ by {largest}"
    return {"largest_difference": largest, "rows": len(rows), "poolings": list(POOLINGS)}
