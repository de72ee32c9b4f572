"""The file that answers go to, a JSON line each, as they come; after a crash at any byte a run goes on. No torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from microbatch.errors import InvalidSettings
from microbatch.llm.prompt_file import PromptLine

_REMEDY = "Name another --out, or delete the file."


class AnswerFile:
    """Open for more answers; those of an earlier run are kept. Answers stand in the order in which they came until
    `finish` puts them into the order of the prompts.
    """

    def __init__(self, path: Path, lines: Iterable[PromptLine]) -> None:
        """
        Args:
            path: where answers go, or went before.
            lines: the prompts.

        Raises:
            InvalidSettings: the file holds something else, or answers to other prompts or other settings.
        """
        self.path = path
        self.answered = self._read({line.number: line.digest for line in lines})
        self._file: BinaryIO = path.open("ab")

    def add(self, line: PromptLine, answer: Mapping[str, Any]) -> None:
        """One more answer, in the file when this returns; a process that is killed then has lost nothing of it."""
        named = {} if line.name is None else {"id": line.name}
        document = {"line": line.number, **named, **answer, "digest": line.digest}
        self._file.write(json.dumps(document, ensure_ascii=False).encode(errors="replace") + b"\n")
        self._file.flush()
        if "error" not in document:
            self.answered.add(line.number)

    def finish(self) -> None:
        """In the order of the prompts; of two answers to one line the later counts. The file is replaced as a whole."""
        self.close()
        rows = self.path.read_bytes().splitlines(keepends=True)
        by_line = {json.loads(row)["line"]: row for row in rows}
        ordered = [by_line[number] for number in sorted(by_line)]
        if ordered == rows:
            return
        beside = self.path.with_name(f".{self.path.name}.sorted")
        try:
            with beside.open("wb") as file:
                file.writelines(ordered)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, self.path)
        finally:
            beside.unlink(missing_ok=True)

    def close(self) -> None:
        """No more answers in this run."""
        self._file.close()

    def __enter__(self) -> AnswerFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, digests: Mapping[int, str]) -> set[int]:
        """Lines that have been answered; a torn end, as a crash leaves it, is cut off."""
        if not self.path.exists():
            return set()
        content = self.path.read_bytes()
        whole = content.rfind(b"\n") + 1
        answered = set()
        for place, row in enumerate(content[:whole].splitlines(), 1):
            number = self._checked(place, row, digests)
            if number is not None:
                answered.add(number)
        if whole < len(content):
            self._check_torn(content[whole:], whole)
            os.truncate(self.path, whole)
        return answered

    def _checked(self, place: int, row: bytes, digests: Mapping[int, str]) -> int | None:
        """The line that a row answers; None where it holds an error, which is tried again."""
        try:
            document = json.loads(row)
            number, digest = document["line"], document["digest"]
            known = digests.get(number)
        except (ValueError, TypeError, KeyError):
            raise InvalidSettings(f"Row {place} of {self.path} is no answer of this command.", _REMEDY) from None
        if known is None or known != digest:
            raise InvalidSettings(
                f"Row {place} of {self.path} answers line {number} of other prompts, another model or other settings.",
                _REMEDY,
            )
        return None if "error" in document else number

    def _check_torn(self, end: bytes, before: int) -> None:
        """What is cut off must be the begin of an answer: nobody's file is shortened by mistake.

        Raises:
            InvalidSettings: it is something else.
        """
        begin = b'{"line": '
        if not (begin.startswith(end) or end.startswith(begin)):
            raise InvalidSettings(f"{self.path} holds something else after byte {before}.", _REMEDY)
