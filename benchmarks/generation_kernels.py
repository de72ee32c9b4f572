"""What a decoder's step is made of, each part in the forms that were tried, in turn in one process, least times kept.

    python -m benchmarks.generation_kernels [--rounds 7] [--out benchmarks/results/generation_kernels.json]

On one thread, about two minutes. The choices it must bear out: packed linear layers and fp32 arithmetic where the
processor has no 16-bit products (`microbatch.llm.packed`, `models.fast_arithmetic`), keys read in place before keys
gathered, gathered in groups that stay in the processor's cache (`microbatch.llm.row_pieces`).
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from microbatch.llm.models import decoder_of
from microbatch.llm.placement import Placement
from microbatch.llm.runner import Row, Runner
from microbatch.models.hugging_face import import_transformers, quiet
from microbatch.models.packed_linear import is_available, pack

HIDDEN, INNER, LAYERS, HEADS, VOCABULARY = 512, 1408, 8, 8, 32_000
"""Of the Llama with 58.5 million weights."""
LENGTHS = (20, 300)
"""Cached tokens of a row in decode, drawn evenly."""

Forms = dict[str, Callable[[], object]]


def linear_forms(rows: int, into: int, out: int, dtype: torch.dtype) -> Forms:
    """One linear layer."""
    x, weight = torch.randn(rows, into).to(dtype), torch.randn(out, into).to(dtype)
    forms: Forms = {"torch": lambda: linear(x, weight)}
    if is_available(dtype):
        packed = {laid_out: pack(weight, laid_out) for laid_out in sorted({1, 32, rows})}
        for laid_out, found in packed.items():
            forms[f"packed for {laid_out}"] = lambda found=found: packed_linear(x, found)  # type: ignore[misc]
    return forms


def packed_linear(x: Tensor, packed: Tensor) -> Tensor:
    found: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    return found


def attention_forms(rows: int, cached: int) -> Forms:
    """A layer's decode attention over rows of one length, read in place or gathered."""
    width, size = HIDDEN // HEADS, 16
    blocks = rows * cached // size
    keys, values = torch.randn(2, HEADS, blocks * size, width).unbind()
    queries = torch.randn(HEADS, rows, 1, width)
    order = torch.randperm(blocks)

    def gathered(pool: Tensor) -> Tensor:
        by_block = pool.view(HEADS, blocks, size * width).index_select(1, order)
        return by_block.view(HEADS, rows, cached, width)

    def in_place() -> None:
        for row in range(rows):
            here = slice(row * cached, (row + 1) * cached)
            scaled_dot_product_attention(queries[None, :, row], keys[None, :, here], values[None, :, here])

    def products() -> Tensor:
        k, v = gathered(keys), gathered(values)
        return torch.matmul(torch.softmax(torch.matmul(queries * width**-0.5, k.transpose(-1, -2)), dim=-1), v)

    return {
        "in place": in_place,
        "all gathered, SDPA": lambda: scaled_dot_product_attention(queries, gathered(keys), gathered(values)),
        "all gathered, products": products,
        "gathering alone": lambda: (gathered(keys), gathered(values)),
    }


class Scattered(Placement):
    """Blocks lie where their names say."""

    def begin(self, block: int, before: int | None, busy: set[int]) -> None:  # noqa: ARG002
        self._put(block, block)


def step_forms(rows: int) -> Forms:
    """One decode step of the whole model."""
    transformers = import_transformers("The benchmark makes a Llama")
    with quiet():
        config = transformers.LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=LAYERS,
            num_attention_heads=HEADS, num_key_value_heads=HEADS, max_position_embeddings=2048,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config).eval()
    decoder = decoder_of(model)
    forms: Forms = {}
    for name, changed in (("blocks in place", None), ("blocks scattered", Scattered)):
        forms[name] = _decode(Runner(decoder, 32 * rows), rows, changed)
    forms["in tiles (invariant=True)"] = _decode(Runner(decoder_of(model), 32 * rows, invariant=True), rows, None)
    half = model.to(torch.bfloat16)
    forms["bf16, its arithmetic as chosen"] = _decode(Runner(decoder_of(half), 32 * rows), rows, None)
    own = decoder_of(half, arithmetic=torch.bfloat16)
    forms["bf16, products in bf16"] = _decode(Runner(own, 32 * rows), rows, None)
    return forms


def _decode(runner: Runner, rows: int, placement: type[Placement] | None) -> Callable[[], object]:
    """A step that adds the last token of every row, again each time."""
    numbers = random.Random(rows)
    if placement is not None:
        runner._placement = placement(runner.num_blocks)
    free = list(range(runner.num_blocks))
    numbers.shuffle(free)
    lengths = [numbers.randrange(*LENGTHS) for _ in range(rows)]
    tables = [[free.pop() for _ in range(-(-length // 16))] for length in lengths]
    for length, table in zip(lengths, tables):
        runner.step([Row([1] * length, 0, table, wants_logits=False)])
    last = [Row([1], length - 1, table) for length, table in zip(lengths, tables)]
    return lambda: runner.step(last)


def cases() -> Iterator[tuple[str, Forms]]:
    """Each part with its forms, made when its turn comes."""
    for dtype in (torch.float32, torch.bfloat16):
        for into, out in ((HIDDEN, 3 * HIDDEN), (HIDDEN, 2 * INNER), (INNER, HIDDEN), (HIDDEN, VOCABULARY)):
            for rows in (1, 8, 64):
                yield f"linear {into} to {out}, {str(dtype)[6:]}, {rows} rows", linear_forms(rows, into, out, dtype)
    for rows, cached in ((8, 192), (64, 192), (64, 1024)):
        yield f"attention, {rows} rows of {cached} cached tokens", attention_forms(rows, cached)
    for rows in (1, 8, 32, 64):
        yield f"decode step, {rows} rows", step_forms(rows)


def least(forms: Forms, rounds: int) -> dict[str, float]:
    """The least CPU-seconds of each form, all in turn."""
    times: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(rounds + 1):
        for name, run in forms.items():
            start = time.process_time()
            run()
            times[name].append(time.process_time() - start)
    return {name: min(found[1:]) for name, found in times.items()}


def main() -> None:
    """Prints the table, and keeps it where it is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        for part, forms in cases():
            found = least(forms, chosen.rounds)
            first = next(iter(found.values()))
            for name, seconds in found.items():
                print(f"{part:48} {name:32} {seconds * 1e3:9.3f} ms  {seconds / first:5.2f}")
                rows.append({"part": part, "form": name, "cpu_seconds": seconds})
    if chosen.out is not None:
        document = {"torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability(), "rows": rows}
        chosen.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
