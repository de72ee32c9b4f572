"""Runs one load after the other against a server, and says what they showed."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from microbatch.batch.progress import Progress
from microbatch.errors import InvalidSettings
from microbatch.web.load.loops import closed_loop, open_loop
from microbatch.web.load.precise import precise_loop
from microbatch.web.load.requests import Question
from microbatch.web.load.result import LoadReport, Run
from microbatch.web.load.sender import room
from microbatch.web.load.settings import Load
from microbatch.web.load.target import address_of
from microbatch.web.load.verdict import keeps_up, sentence

MOST_RUNS = 16
"""Of a ramp: 32 768 times its first rate."""


def generate(question: Question, load: Load, progress: Progress | None = None) -> LoadReport:
    """All runs of a load. An interrupt from the keyboard ends them and keeps what was measured.

    Raises:
        InvalidSettings: traffic that cannot be made, more clients than files, or a server that takes no connection.
    """
    if max(load.clients, default=0) > room():
        raise InvalidSettings(
            f"{max(load.clients)} clients need more than the {room()} connections that open files allow.",
            "Ask for fewer, or raise ulimit -n.",
        )
    load = replace(load, connections=min(load.connections, room()))
    address = address_of(question.target)
    with asyncio.Runner(loop_factory=precise_loop) as runner:
        if load.clients:
            runs = _closed(runner, question, address, load, progress)
        else:
            runs = _open(runner, question, address, load, progress)
    return LoadReport(
        url=question.target.url,
        traffic=None if load.clients else load.traffic,
        target=load.target,
        runs=tuple(runs),
        verdict=sentence(tuple(runs), load.target),
    )


def _closed(
    runner: asyncio.Runner, question: Question, address: str, load: Load, progress: Progress | None
) -> list[Run]:
    runs: list[Run] = []
    for clients in load.clients:
        runs.append(runner.run(closed_loop(question, address, load, clients, progress)))
        if runs[-1].interrupted:
            break
    return runs


def _open(runner: asyncio.Runner, question: Question, address: str, load: Load, progress: Progress | None) -> list[Run]:
    """One run for each rate; a ramp goes on doubling until the server or the client no longer keeps up."""
    runs: list[Run] = []
    rates: list[float | None] = list(load.rates) or [None]
    for rate in rates:
        runs.append(runner.run(open_loop(question, address, load, rate, progress)))
        if runs[-1].interrupted:
            break
        if load.ramp and rate is not None and keeps_up(runs[-1]) and not runs[-1].void and len(runs) < MOST_RUNS:
            rates.append(2 * rate)
    return runs
