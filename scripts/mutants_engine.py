"""Breaks of the engine for generation; see `scripts.mutants_table`."""

from __future__ import annotations

from scripts.mutant import Mutant
from scripts.mutant import rows_of as _rows

ENGINE: tuple[Mutant, ...] = (
    *_rows(
        "llm/loop.py",
        "llm/test_engine_answers.py",
        ("share=not request.scores_wanted", "share=True", "probabilities of a prompt need its logits"),
        ('self._end(request, "abort")', "pass", "who leaves frees its blocks"),
        ("child.opened = first.computed,", "child.opened = 0,", "answers to one prompt begin where it ends"),
    ),
    *_rows(
        "llm/loop.py",
        "llm/test_engine_requests.py",
        ("while self._deadlines and self._deadlines[0][0] <= now:", "while False:", "a deadline ends its request"),
        ("            self.fail(works[place].sequence.request, error)\n", "            pass\n", "who fails is told"),
    ),
    *_rows(
        "llm/compute.py",
        "llm/test_compute.py",
        ("waiting += reversed(halves)", "waiting += halves", "earlier tokens of a row come first"),
        ("if not cut_rows or not half:", "if not half:", "a row that fails is not cut"),
        ("start=row.start + half", "start=row.start", "the second half of a row begins after the first"),
    ),
    *_rows(
        "llm/sequence.py",
        "llm/test_engine_answers.py",
        ("if len(self.output_ids) <= request.params.min_tokens:", "if False:", "nothing ends too early"),
        ("            if self.stop_text is not None:\n", "            if False:\n", "held text is shown at the end"),
    ),
    *_rows(
        "llm/service.py",
        "llm/test_engine_requests.py",
        ("if not patient and self.waiting >= self.max_waiting:", "if False:", "the waiting room is bounded"),
        ("if self._pid != os.getpid():\n            raise", "if False:\n            raise", "a fork has no thread"),
    ),
    *_rows(
        "llm/answer_file.py",
        "llm/test_generate_files.py",
        ("os.truncate(self.path, whole)", "pass", "a torn answer is cut off"),
        ("if known is None or known != digest:", "if False:", "answers to other prompts are not mixed in"),
        ("self._check_torn(content[whole:], whole)", "pass", "nobody's file is shortened by mistake"),
        ("by_line[number] for number in sorted(by_line)", "by_line[number] for number in by_line", "in order"),
    ),
    *_rows(
        "llm/prompt_file.py",
        "llm/test_generate_files.py",
        ("for number, text in enumerate(file, 1):", "for number, text in enumerate(file):", "lines count from 1"),
        ("json.dumps([model, value, common]", "json.dumps([model, value]", "other settings are other answers"),
    ),
)  # fmt: skip
