"""Many requests that come, leave and stop in any order: blocks as at the start, every stream its offline answer.

    python -m benchmarks.generation_exactness [--requests 1000] [--model NAME] [--seed 0]

Each stream must be what the same request gives offline, up to where it was left; and greedy answers must be those of
transformers' `generate`, one by one. Prints one JSON document; exit status 1 where anything differs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from typing import Any

from microbatch.llm.engine import LLMEngine
from microbatch.llm.sampling_params import SamplingParams
from tests.llm.engines import TEXT, an_engine, model_of, prompts_of
from tests.llm.test_engine_answers import chaos, same, some_params
from tests.llm.test_engine_exactness import alone, equal

COMPARED = 100
"""Greedy requests that are compared with transformers, which runs them one by one."""
TOKENS = 24


def main() -> int:
    """Run both parts and print what came of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--model", default=TEXT, help="of tests.llm.tiny_models")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    start = time.perf_counter()
    with an_engine(asked.model, num_blocks=40, max_num_tokens=32, max_num_sequences=12, max_waiting=10**6) as engine:
        found = {**streams(engine, asked.requests, asked.seed), **greedy(engine, asked.model, asked.seed)}
        now = engine.metrics()
    names = ("free_blocks", "num_blocks", "num_preemptions", "prefix_cache_hits", "steps")
    found |= {name: getattr(now, name) for name in names} | {"seconds": round(time.perf_counter() - start, 1)}
    print(json.dumps(found, indent=2))
    happened = now.num_preemptions and now.prefix_cache_hits and now.free_blocks == now.num_blocks
    return int(not happened or bool(found["different_streams"] or found["different_from_generate"]))


def streams(engine: LLMEngine, requests: int, seed: int) -> dict[str, Any]:
    """Requests of every kind, some cancelled, some left early, beside their offline answers."""
    random_ = random.Random(seed)
    prompts = prompts_of(requests, seed=seed, longest=40)
    asked = [(prompt, some_params(random_)) for prompt in prompts]
    offline = engine.generate(prompts, [params for _, params in asked])
    found = asyncio.run(chaos(engine, asked, random_))
    cancelled = sum(isinstance(each, asyncio.CancelledError) for each in found)
    different = [
        number
        for number, (each, wanted) in enumerate(zip(found, offline))
        if not isinstance(each, asyncio.CancelledError) and (isinstance(each, BaseException) or not same(each, wanted))
    ]
    stopped = sum(each.finish_reason == "stop" for answer in offline for each in answer.completions)
    engine.generate([prompts[0]], SamplingParams(max_tokens=1))  # aborts that were under way have been seen by now
    return {"requests": requests, "cancelled": cancelled, "stopped": stopped, "different_streams": different}


def greedy(engine: LLMEngine, model: str, seed: int) -> dict[str, Any]:
    """Greedy answers beside transformers' own, with the places where the two largest logits tie."""
    prompts = prompts_of(COMPARED, seed=seed + 1, longest=40)
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    answers = engine.generate(prompts, params)
    references = [alone(model_of(model), prompt, TOKENS, 1.0) for prompt in prompts]
    different = [
        number for number, (a, b) in enumerate(zip(answers, references)) if not equal(a.token_ids, b)
    ]  # fmt: skip
    ties = {number: reference.ties for number, reference in enumerate(references) if reference.ties}
    return {"compared_with_generate": COMPARED, "different_from_generate": different, "ties": ties}


if __name__ == "__main__":
    sys.exit(main())
