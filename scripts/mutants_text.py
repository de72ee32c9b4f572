"""Breaks of the front for language models; see `scripts.mutants_table`."""

from __future__ import annotations

from scripts.mutant import Mutant
from scripts.mutant import rows_of as _rows

TEXT: tuple[Mutant, ...] = (
    *_rows(
        "web/openai_streams.py",
        "web/test_openai_text.py",
        ("            task.cancel()\n", "            pass\n", "who leaves a stream aborts its answers"),
        ("    yield DONE", "    yield b''", "a stream ends with [DONE]"),
        ("raise errors.exceptions[0] from None", "raise", "one failure is told as itself"),
    ),
    *_rows(
        "web/openai_errors.py",
        "web/test_openai_text.py",
        ("except RequestTooLarge as error:", "except ZeroDivisionError as error:", "too large a request is 400"),
        ('"param": answer.param,', '"param": None,', "the member at fault is named"),
    ),
    *_rows(
        "web/openai_sampling.py",
        "web/test_openai_text.py",
        ("0 if asked.top_k == -1 else asked.top_k", "asked.top_k", "-1 is vLLM's word for all"),
        ("    refuse_not_offered(document, NOT_OFFERED)\n", "", "what is not offered is refused"),
        ("and value not in table[name]:", "and True:", "what asks for nothing is taken"),
        ("        check_params(params, vocabulary)\n", "", "ids of no token are refused"),
    ),
    *_rows(
        "web/openai_completions.py",
        "web/test_openai_text.py",
        (
            "index = place * (asked.n or 1) + piece.index",
            "index = piece.index",
            "choices of several prompts are told apart",
        ),
        ("self._offsets[index] += len(piece.text)", "pass", "probabilities say where in the text they are"),
        ("self.logprobs if self.prompt_logprobs is None and self.echo else", "", "an echo has its probabilities"),
    ),
    *_rows(
        "web/openai_chat.py",
        "web/test_openai_text.py",
        ("SYSTEM if self.role == DEVELOPER else self.role", "self.role", "a developer's message is a system's"),
        ("if taken := sorted(RESERVED & more.keys()):", "if taken := []:", "template arguments are bounded"),
    ),
    *_rows(
        "web/openai_logprobs.py",
        "web/test_openai_text.py",
        ("for each in every:", "for each in every[-1:]:", "likely tokens are told"),
    ),
    *_rows(
        "web/text_metrics_table.py",
        "web/test_metrics.py",
        ('VLLM, MODEL_NAME = "vllm:", "model_name"', 'VLLM, MODEL_NAME = "vllm_", "model_name"', "names are vLLM's"),
        ("accumulate(found.counts)", "found.counts", "buckets are summed up"),
    ),
    *_rows(
        "web/live_text.py",
        "web/test_live_text.py",
        ("look.at >= last.at - WINDOW", "True", "rates are of the last seconds"),
    ),
)
"""Rows of `scripts.mutants_table.MUTANTS`."""
