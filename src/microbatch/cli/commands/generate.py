"""``microbatch generate``: answers to a file of prompts, in a file that a later run goes on with."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from microbatch.cli.app import ANSWER_IS_NO, DONE
from microbatch.cli.options import BYTES, DURATION, as_json_option
from microbatch.cli.output import print_json
from microbatch.cli.progress import measuring
from microbatch.errors import InvalidSettings

if TYPE_CHECKING:
    from microbatch.batch.progress import Progress
    from microbatch.llm.answer_file import AnswerFile
    from microbatch.llm.prompt_file import PromptLine
    from microbatch.llm.results import Generation

DTYPES = ("fp32", "bf16", "fp16")
_ENGINE = ("dtype", "device", "memory_limit", "time_per_output_token_target")
"""Options that are settings of the engine; the others are of `SamplingParams`."""
MODEL_FILES = (".json", ".safetensors", ".jinja")
"""Files of a folder that make the model."""
SAMPLED = 1 << 20
"""Bytes at each end of such a file that tell it from another of its size."""
_SAID = 10
"""Failed lines that are named one by one."""


@click.command(short_help="Answers of a language model to a file of prompts.")
@click.argument("model", metavar="MODEL", type=click.Path(path_type=Path))
@click.argument("prompts", metavar="PROMPTS.jsonl", type=click.Path(path_type=Path))
@click.option("--out", "out", type=click.Path(path_type=Path, dir_okay=False), required=True, metavar="FILE.jsonl",
              help="Where answers go, one JSON line each; where some are there already it goes on.")  # fmt: skip
@click.option(
    "--max-tokens", type=click.IntRange(min=1), default=256, show_default=True, help="Most tokens of an answer."
)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="0 always takes the likeliest token.",
)
@click.option("--top-p", type=float, help="Only the likeliest tokens that make up this share.")
@click.option("--top-k", type=int, help="Only so many of the likeliest tokens.")
@click.option("--seed", type=int, help="Of random choices: the same answers in every run.")
@click.option("--stop", multiple=True, metavar="TEXT", help="End an answer before this text; may be repeated.")
@click.option("--n", type=click.IntRange(min=1), help="Answers to each prompt.")
@click.option("--dtype", type=click.Choice(DTYPES), help="Of weights and cache; the model's own when left out.")
@click.option("--device", metavar="DEVICE", help="Where it runs, as in cuda; the CPU when left out.")
@click.option("--memory-limit", type=BYTES, metavar="SIZE", help="For the cache and the work of a step, as in 4GB.")
@click.option("--tpot-target", "time_per_output_token_target", type=DURATION, metavar="DURATION",
              help="Seconds between two tokens, which bounds the batch; without it throughput counts.")  # fmt: skip
@as_json_option
def command(*, model: Path, prompts: Path, out: Path, as_json: bool, **asked: Any) -> int:
    """Answer every line of PROMPTS.jsonl with the language model in the folder MODEL.

    A line is {"prompt": "text"}, {"prompt": [token ids]}, {"messages": [...]} or a JSON string; it may give an "id" and
    settings of its own (max_tokens, temperature, top_p, seed, stop, n, logprobs, ...). Each answer is written as it is
    complete, so a run that was ended in any way is gone on with by the same command; at the end the answers stand in
    the order of the prompts. Lines that failed hold an "error" and are tried again by the next run.

    \b
    Example:
      microbatch generate smollm2 prompts.jsonl --out answers.jsonl
      microbatch generate smollm2 prompts.jsonl --out answers.jsonl --temperature 0.8 --seed 7 --stop "\\n\\n" --json
    """
    from microbatch.llm.answer_file import AnswerFile
    from microbatch.llm.prompt_file import read_prompts
    from microbatch.llm.sampling_params import SamplingParams

    _check_folder_of(out)
    engine, common = _settings(**asked)
    SamplingParams(**common)  # a mistake of the command line is none of the lines
    lines = read_prompts(prompts, common, _told_apart(model, engine.get("dtype")))
    start = time.monotonic()
    with AnswerFile(out, lines) as answers, measuring() as progress:
        before = len(answers.answered)
        left = [line for line in lines if line.number not in answers.answered]
        tokens, failed = _answer(model, engine, common, left, answers, progress) if left else (0, {})
        answers.finish()
    _say(out, len(lines), before, tokens, failed, time.monotonic() - start, as_json=as_json)
    return ANSWER_IS_NO if failed else DONE


def _settings(**asked: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Those of the engine, and those that every line has which gives no others; only what was asked for."""
    given = {name: value for name, value in asked.items() if value not in (None, ())}
    engine = {name: given.pop(name) for name in _ENGINE if name in given}
    return engine, given


def _check_folder_of(out: Path) -> None:
    if not out.parent.is_dir():
        raise InvalidSettings(f"The folder {out.parent} does not exist.", f"Create it: mkdir -p {out.parent}")


def _told_apart(model: Path, dtype: str | None) -> str:
    """What tells this model from another: its settings, and of its weights the sizes and both ends."""
    seen = hashlib.sha256()
    for each in sorted(model.iterdir()) if model.is_dir() else []:
        if each.suffix in MODEL_FILES:
            size = each.stat().st_size
            seen.update(f"{each.name} {size} ".encode())
            with each.open("rb") as file:
                seen.update(file.read(SAMPLED))
                file.seek(max(0, size - SAMPLED))
                seen.update(file.read())
    return f"{seen.hexdigest()} {dtype}"


def _answer(
    model: Path,
    settings: dict[str, Any],
    common: dict[str, Any],
    lines: list[PromptLine],
    answers: AnswerFile,
    progress: Progress | None,
) -> tuple[int, dict[int, str]]:
    """Answer the lines; tokens generated, and what went wrong by line."""
    from microbatch.llm.engine import LLMEngine

    if progress is not None:
        progress(0.0, "loading")
    tokens, failed = 0, dict[int, str]()
    with LLMEngine.from_pretrained(model, **settings) as engine:
        asked = ((line.asked, line.params(common)) for line in lines)
        for done, (number, answer) in enumerate(engine.generate_each(asked), 1):
            line = lines[number]
            if isinstance(answer, Exception):
                failed[line.number] = str(answer)
                answers.add(line, {"error": {"type": type(answer).__name__, "message": str(answer)}})
            else:
                tokens += answer.usage.completion_tokens
                answers.add(line, _document(answer))
            if progress is not None:
                progress(done / len(lines), f"{done} of {len(lines)} answers, {tokens} tokens")
    return tokens, failed


def _document(answer: Generation) -> dict[str, Any]:
    """What is written of an answer: the first text at hand, all of them where there are several."""
    full = answer.to_json()
    first, usage = full["completions"][0], full["usage"]
    several = (
        {} if len(full["completions"]) == 1 and first["logprobs"] is None else {"completions": full["completions"]}
    )
    scored = {} if full["prompt_logprobs"] is None else {"prompt_logprobs": full["prompt_logprobs"]}
    return {"text": first["text"], "finish_reason": first["finish_reason"], "usage": usage, **several, **scored}


def _say(
    out: Path, lines: int, before: int, tokens: int, failed: dict[int, str], seconds: float, *, as_json: bool
) -> None:
    if as_json:
        print_json({
            "out": str(out), "prompts": lines, "answered_before": before, "answered": lines - before - len(failed),
            "generated_tokens": tokens, "seconds": seconds,
            "failed": [{"line": number, "message": text} for number, text in sorted(failed.items())],
        })  # fmt: skip
        return
    from microbatch.units import format_duration

    kept = f", {before} of them by an earlier run" if before else ""
    print(
        f"Wrote {out}: {lines - len(failed)} of {lines} answers{kept}; {tokens} tokens in {format_duration(seconds)}."
    )
    for number, text in sorted(failed.items())[:_SAID]:
        print(f"line {number}: {text}")
    if len(failed) > _SAID:
        print(f"and {len(failed) - _SAID} more lines; their answers in {out} hold an error.")
