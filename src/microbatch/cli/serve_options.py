"""The options of ``microbatch serve`` that become settings of an engine, and those that contradict each other."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from microbatch.cli.options import DURATION
from microbatch.errors import InvalidSettings

Function = TypeVar("Function", bound=Callable[..., Any])

COUNT = click.IntRange(min=1)
FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
AS_LIST = "Write a list of items, as in [[1, 2], [3, 4]]."

ENGINE_OPTIONS = (
    click.option("--policy", help="When a batch is launched: marginal_gain, launch_when_free, fixed_window, "
                 "deadline_aware or token_budget.  [default: marginal_gain]"),
    click.option("--max-batch-size", type=COUNT, metavar="N",
                 help="Most items in a batch; from the latency when left out."),
    click.option("--max-queue-delay", type=DURATION, metavar="DURATION",
                 help="Longest that an item waits beside a free worker, as in 5ms."),
    click.option("--latency-target", type=DURATION, metavar="DURATION",
                 help="Seconds from request to answer, as in 50ms; bounds the batch."),
    click.option("--max-queue", type=COUNT, metavar="N", help="Most items that wait; then 429.  [default: 1024]"),
    click.option("--max-queue-per-tenant", type=COUNT, metavar="N", help="Most of them of one API key."),
    click.option("--token-budget", type=COUNT, metavar="N", help="Most padded tokens in a batch."),
    click.option("--workers", type=COUNT, metavar="N", help="Batches that run at once, on each device.  [default: 1]"),
    click.option("--processes", is_flag=True, help="Each worker is a process of its own."),
    click.option("--device", "devices", multiple=True, metavar="DEVICE",
                 help="Where a module runs: cpu, cuda, cuda:1. May be repeated.  [default: cpu]"),
    click.option("--profile", type=FILE, metavar="FILE", help="Measured curve; measured at the start when left out."),
    click.option("--examples", type=FILE, metavar="FILE",
                 help="JSON list of items for a function: to warm up, measure and compare answers with."),
    click.option("--stateful", is_flag=True, help="Items must not run twice: nothing measured, no repeats."),
    click.option("--check", type=click.Choice(["raise", "warn", "off"]),
                 help="When an item gets another answer in a batch than alone.  [default: raise]"),
    click.option("--no-fast", is_flag=True, help="Leave the linear layers of a module as they are on a CPU."),
)  # fmt: skip
"""One for each setting of `microbatch.DynamicBatcher`; see `settings_of`."""


def engine_options(function: Function) -> Function:
    """All of `ENGINE_OPTIONS`, in this order."""
    for option in reversed(ENGINE_OPTIONS):
        function = option(function)
    return function


def settings_of(
    *,
    policy: str | None,
    max_batch_size: int | None,
    max_queue_delay: float | None,
    latency_target: float | None,
    max_queue: int | None,
    max_queue_per_tenant: int | None,
    token_budget: int | None,
    workers: int | None,
    processes: bool,
    devices: Sequence[str],
    profile: Path | None,
    examples: Path | None,
    stateful: bool,
    check: str | None,
    no_fast: bool,
) -> dict[str, Any]:
    """Settings of `DynamicBatcher`: those that were given, so that what a function brings itself stays.

    Raises:
        InvalidSettings: the examples are no JSON list.
    """
    given: dict[str, Any] = {
        "policy": policy,
        "max_batch_size": max_batch_size,
        "max_queue_delay": max_queue_delay,
        "latency_target": latency_target,
        "max_queue": max_queue,
        "max_queue_per_tenant": max_queue_per_tenant,
        "token_budget": token_budget,
        "workers": workers,
        "processes": processes or None,
        "devices": tuple(devices) or None,
        "profile": profile,
        "examples": None if examples is None else _items(examples),
        "stateful": stateful or None,
        "check": check,
        "fast": False if no_fast else None,
    }
    return {name: value for name, value in given.items() if value is not None}


def application_options(api_key_file: Path | None, body_limit: int | None, deadline: float | None) -> dict[str, Any]:
    """Settings of the application: those that were given.

    Raises:
        InvalidSettings: see `read_keys`.
    """
    given = {"body_limit": body_limit, "deadline": deadline}
    keys = {} if api_key_file is None else read_keys(api_key_file)
    return {"keys": keys, **{name: value for name, value in given.items() if value is not None}}


def read_keys(path: Path) -> dict[str, str]:
    """From each key in a file to the name of whose it is, or none: a line ``NAME KEY`` or ``KEY``.

    Lines that begin with # are remarks.

    Raises:
        InvalidSettings: no keys, which would let everybody in; a line of three words; a key twice; or no text.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise InvalidSettings(f"{path} is no text: {error}.", "Write KEY or NAME KEY a line.") from None
    keys: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) > 2 or words[-1] in keys:
            raise InvalidSettings(f"Line {number} of {path} is not a key that is new.", "Write KEY or NAME KEY.")
        keys[words[-1]] = words[0] if len(words) == 2 else ""
    if not keys:
        raise InvalidSettings(f"There is no key in {path}.", "Write one key a line, or leave out --api-key-file.")
    return keys


def _items(path: Path) -> list[Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidSettings(f"{path} is no JSON: {error}.", AS_LIST) from None
    if not isinstance(found, list) or not found:
        raise InvalidSettings(f"{path} holds no list of items.", AS_LIST)
    return found
