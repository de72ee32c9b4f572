"""How long streams stand still, who waits for whom, whether a target is met, and what a step takes outside the model.

    PYTHONPATH=src:. python benchmarks/generation_latency.py --out benchmarks/results/generation_latency.json

On the Llama of 58.5 million random weights of `generation.py`, in bf16, on one thread. Four questions:

- gaps: the largest gap of a running stream, when a newcomer brings a prompt of 64 to 1,900 tokens, for budgets of 64
  and 256 tokens a step. It should follow the budget and not the prompt;
- starts: eight short prompts that come behind a long one. Steps until the first token of each, in the engine and in the
  simulator: 3 at most (one more in the engine, where a step is under way when they come);
- target: Poisson arrivals at 90 % of what the simulator can serve within a target of 1.5 times the step of 8 sequences.
  The share of steps with generation that took no longer: in reality (bar 95 %), and in the simulator on the step times
  that were measured there (bar 99 %);
- outside: share of a step outside of the model, at 8, 16, 32 and 64 sequences (bar 5 %).

About four minutes. For a quick try: `--quick`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.peer_generators.models import LLAMA, folder
from microbatch import LLMEngine, SamplingParams
from microbatch.llm.simulate import SimulatedRequest, SimulatedRun, simulate
from microbatch.llm.step_model import StepModel, StepSample, fit

Row = dict[str, Any]
BLOCKS = 1200
LONGEST = 1900
SHORT = 16
INSIDE = 0.9
"""Share of the capacity."""


def engine(**settings: Any) -> LLMEngine:
    """Without a prefix cache, so that every prompt is computed."""
    return LLMEngine.from_pretrained(
        folder("llama-58m"), dtype="bf16", num_blocks=BLOCKS, prefix_caching=False, **settings
    ).start()


def prompt(tokens: int, seed: int) -> list[int]:
    """Random ids."""
    draw = random.Random(seed)
    return [draw.randrange(3, LLAMA["vocab_size"]) for _ in range(tokens)]


def greedy(tokens: int) -> SamplingParams:
    """Exactly so many tokens."""
    return SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)


def steps_of(running: LLMEngine) -> list[StepSample]:
    """Filled with every step from now on: its own budget is told of each."""
    assert running._prepared is not None
    follower, seen = running._prepared.loop.follower, list[StepSample]()
    observe = follower.observe

    def also(sample: StepSample) -> str | None:
        seen.append(sample)
        return observe(sample)

    follower.observe = also  # type: ignore[method-assign]
    return seen


async def times_of(
    running: LLMEngine, ids: list[int], tokens: int, at: Callable[[int], None] | None = None
) -> list[float]:
    """When each token came; `at` is told how many there are."""
    times = list[float]()
    async for piece in running.stream(ids, greedy(tokens)):
        times += [time.perf_counter()] * len(piece.token_ids)
        if at is not None:
            at(len(times))
    return times


def gaps(quick: bool) -> list[Row]:
    """Of a stream, by the newcomer's prompt."""
    rows = []
    for budget in (64, 256):
        with engine(max_num_tokens=budget) as running:
            for newcomer in (64, LONGEST) if quick else (64, 256, 1024, LONGEST):
                largest = min(asyncio.run(_gap(running, newcomer, seed)) for seed in range(1 if quick else 3))
                rows.append({"budget": budget, "newcomer": newcomer, "largest_gap": largest})
    return rows


async def _gap(running: LLMEngine, newcomer: int, seed: int) -> float:
    begun = asyncio.Event()
    stream = asyncio.create_task(
        times_of(running, prompt(32, seed), 120, lambda count: begun.set() if count == 20 else None)
    )
    await begun.wait()
    await times_of(running, prompt(newcomer, 1000 + seed), 2)
    times = await stream
    return max(after - before for before, after in pairwise(times[10:]))


def starts() -> list[Row]:
    """Steps until the first token of short prompts behind a long one."""
    with engine(max_num_tokens=256) as running:
        found = asyncio.run(_starts(running))
        assert running._prepared is not None
        model = running._prepared.loop.follower.model
    assert model is not None
    trace = [SimulatedRequest(0.0, LONGEST, 4), *[SimulatedRequest(0.0, SHORT, 4) for _ in range(8)]]
    waited = [answer.waited for answer in simulate(trace, model, num_blocks=BLOCKS, max_tokens=256).answers[1:]]
    return [{"where": "engine", "steps": found}, {"where": "simulator", "steps": waited}]


async def _starts(running: LLMEngine) -> list[int]:
    long = asyncio.create_task(times_of(running, prompt(LONGEST, 1), 4))
    await asyncio.sleep(0)
    before = running.metrics().steps

    async def one(seed: int) -> int:
        async for _ in running.stream(prompt(SHORT, seed), greedy(4)):
            return running.metrics().steps - before
        raise RuntimeError("no token came")

    found = list(await asyncio.gather(*[one(seed) for seed in range(10, 18)]))
    await long
    return found


def target(quick: bool) -> list[Row]:
    """Steps within a target under a load just inside capacity."""
    with engine() as running:
        assert running._prepared is not None
        known = running._prepared.loop.follower.model
    assert known is not None
    aim = 1.5 * known.seconds(8, 8 * 128, 8)
    rate = INSIDE * _capacity(known, aim)
    trace = arrivals(rate, 10.0 if quick else 60.0)
    with engine(time_per_output_token_target=aim) as running:
        seen = steps_of(running)
        asyncio.run(_play(running, trace))
    generating = [sample for sample in seen if sample.tokens - (sample.prefill or 0) > 0]
    measured = fit(seen)
    ratios = [s.seconds / measured.seconds(s.tokens, s.cached, s.sequences, s.pairs) for s in seen]
    run = _simulated(trace, measured, aim, ratios)
    return [
        {"where": "engine", "target": aim, "rate": rate, "steps": len(generating),
         "within": sum(s.seconds <= aim for s in generating) / len(generating)},
        {"where": "simulator", "target": aim, "rate": rate, "steps": len(run.steps), "within": run.within_target},
    ]  # fmt: skip


def arrivals(rate: float, seconds: float, seed: int = 3) -> list[SimulatedRequest]:
    """Poisson; prompts of 8 to 256 tokens and answers of 4 to 128."""
    draw, now, found = random.Random(seed), 0.0, list[SimulatedRequest]()
    while (now := now + draw.expovariate(rate)) < seconds:
        found.append(SimulatedRequest(now, draw.randint(8, 256), draw.randint(4, 128)))
    return found or [SimulatedRequest(0.0, 64, 64)]


def _capacity(model: StepModel, aim: float) -> float:
    """Requests per second that a crowd is served at within the target."""
    crowd = [SimulatedRequest(0.0, r.prompt_tokens, r.output_tokens) for r in arrivals(1.0, 200.0)]
    run = _simulated(crowd, model, aim, ())
    return len(crowd) / max(step.start + step.seconds for step in run.steps)


def _simulated(trace: list[SimulatedRequest], model: StepModel, aim: float, ratios: Any) -> SimulatedRun:
    return simulate(
        trace, model, num_blocks=BLOCKS, time_per_output_token_target=aim, max_tokens=1024, max_sequences=128,
        prefix_caching=False, ratios=ratios,
    )  # fmt: skip


async def _play(running: LLMEngine, trace: list[SimulatedRequest]) -> None:
    start = time.perf_counter()

    async def one(number: int, request: SimulatedRequest) -> None:
        await asyncio.sleep(max(0.0, start + request.arrived - time.perf_counter()))
        await times_of(running, prompt(request.prompt_tokens, number), request.output_tokens)

    await asyncio.gather(*[one(number, request) for number, request in enumerate(trace)])


def outside(quick: bool) -> list[Row]:
    """Share of a step's time outside of the model, choosing tokens apart."""
    rows = []
    with engine(max_num_sequences=64) as running:
        for batch in (8, 64) if quick else (8, 16, 32, 64):
            running.generate([prompt(64, seed) for seed in range(batch)], greedy(8))
            before = running.metrics()
            running.generate([prompt(64, seed) for seed in range(batch)], greedy(32 if quick else 128))
            after = running.metrics()
            step, model, chosen = (
                getattr(after, name) - getattr(before, name)
                for name in ("step_seconds", "model_seconds", "sampling_seconds")
            )
            steps = after.steps - before.steps
            rows.append({"sequences": batch, "step": step / steps, "outside": 1 - model / step,
                         "choosing": chosen / step})  # fmt: skip
    return rows


def main() -> None:
    """Run the parts and print them; write the result when asked, other parts of it as they were."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--parts", nargs="+", choices=("gaps", "starts", "target", "outside"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    parts: dict[str, Callable[[], list[Row]]] = {
        "gaps": lambda: gaps(given.quick), "starts": starts, "target": lambda: target(given.quick),
        "outside": lambda: outside(given.quick),
    }  # fmt: skip
    document: Row = json.loads(given.out.read_text()) if given.out and given.out.exists() else {}
    for part in given.parts or parts:
        document[part] = parts[part]()
        print(part)
        for row in document[part]:
            print("  ", *(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
                          for name, value in row.items()), flush=True)  # fmt: skip
    document["machine"] = {"cpus": os.cpu_count(), "load": os.getloadavg(), "platform": platform.platform(),
                           "torch": torch.__version__}  # fmt: skip
    if given.out:
        given.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
