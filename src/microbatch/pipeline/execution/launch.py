"""Ranks on this machine: processes that form one process group over loopback, and end together.

Started by torchrun there is nothing to start: `joined` meets the others, and every process runs the function itself.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from microbatch import errors
from microbatch.errors import InvalidSettings, MicrobatchError, RankFailed

ENDING = 6.0
"""Seconds that the other ranks have to end by themselves when one has failed; they hear of it."""
_LOOPBACK = "127.0.0.1"
_SETTING_UP = timedelta(minutes=5)
_PRELOADED = ["torch", "torch.distributed.fsdp", "torch.distributed.pipelining"]
"""What every rank imports, for seconds; imported once, in a process that ranks are forked from."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a rank ended.

    Attributes:
        result: of the function; None where it failed.
        kind: class of the error; empty where there was none.
        message: of the error.
        remedy: of an error of microbatch.
        notes: what was added to the error: where it happened.
        trace: the traceback as text.
    """

    result: Any = None
    kind: str = ""
    message: str = ""
    remedy: str = ""
    notes: tuple[str, ...] = ()
    trace: str = ""


def under_torchrun() -> bool:
    """Whether somebody else started the ranks and tells each its number."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= set(os.environ)


@contextmanager
def joined() -> Iterator[None]:
    """The process group of a run that torchrun started; one that exists already is left as it is."""
    if dist.is_initialized():
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    dist.init_process_group(_backend(int(os.environ["WORLD_SIZE"])))
    yield
    _leave()


def launch(function: Callable[..., Any], ranks: int, *arguments: Any, threads: int | None = None) -> list[Any]:
    """Run ``function(*arguments)`` in so many processes that form the default process group.

    Args:
        function: of a module, so that a new process can import it; what it returns is pickled.
        ranks: number of processes.
        arguments: pickled.
        threads: of each rank for torch; by default the cores shared out evenly.

    Returns:
        What the function returned on each rank.

    Raises:
        RankFailed: a rank failed or was killed; the error says which, and where.
        MicrobatchError: an error of microbatch that a rank raised is raised as it is.
        InvalidSettings: fewer than one rank.
    """
    if ranks < 1:
        raise InvalidSettings(f"{ranks} ranks cannot run anything.", "Start 1 or more.")
    store = dist.TCPStore(_LOOPBACK, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    threads = threads or max(1, len(os.sched_getaffinity(0)) // ranks)
    processes, pipes = [], []
    try:
        for rank in range(ranks):
            receive, send = context.Pipe(duplex=False)
            job = (function, arguments, rank, ranks, store.port, threads, send)
            process = context.Process(target=_work, args=job, name=f"rank {rank}", daemon=True)
            process.start()
            send.close()  # so that the end of the process is the end of its pipe
            processes.append(process)
            pipes.append(receive)
        ended = _collect(pipes)
        codes = _end(processes)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return _results(ended, codes)


def _collect(pipes: Sequence[Connection]) -> list[Ended | None]:
    """What each rank says at its end; None for one that says nothing. Once one fails, others are waited for briefly."""
    ended: list[Ended | None] = [None] * len(pipes)
    silent = dict(enumerate(pipes))
    until: float | None = None
    while silent:
        left = None if until is None else until - time.monotonic()
        if left is not None and left <= 0:
            break
        ready = wait(list(silent.values()), left)
        for rank in [rank for rank, pipe in silent.items() if pipe in ready]:
            pipe = silent.pop(rank)
            with suppress(EOFError, OSError):
                ended[rank] = pipe.recv()
            one = ended[rank]
            if (one is None or one.kind) and until is None:
                until = time.monotonic() + ENDING
    return ended


def _end(processes: Sequence[Any]) -> list[int | None]:
    """Exit codes; negative numbers are signals, of this function's own making for ranks that were still running."""
    codes = []
    for process in processes:
        process.join(ENDING / 3)
        codes.append(process.exitcode)
    return codes


def _results(ended: Sequence[Ended | None], codes: Sequence[int | None]) -> list[Any]:
    """What all returned, or the one error that started it."""
    failed = [(rank, one) for rank, one in enumerate(ended) if one is not None and one.kind]
    own = [(rank, one) for rank, one in failed if one.kind != RankFailed.__name__]
    if own:
        raise _error_of(*own[0], len(ended))
    dead = [rank for rank, one in enumerate(ended) if one is None and codes[rank] is not None]
    if dead:
        raise RankFailed(
            f"Rank {dead[0]} of {len(ended)} {_end_of(codes[dead[0]] or 0)}.",
            "Look for a lack of memory (dmesg); its own output stands above.",
        )
    if failed:
        raise _error_of(*failed[0], len(ended))
    silent = [rank for rank, one in enumerate(ended) if one is None]
    if silent:
        raise RankFailed(f"Rank {silent[0]} of {len(ended)} did not end.", "Look at its output.")
    return [one.result for one in ended if one is not None]


def _error_of(rank: int, ended: Ended, ranks: int) -> MicrobatchError:
    kind = getattr(errors, ended.kind, None)
    if isinstance(kind, type) and issubclass(kind, MicrobatchError):
        return kind(ended.message, ended.remedy)
    where = ended.notes[-1].rstrip(".") if ended.notes else f"On rank {rank} of {ranks}"
    error = RankFailed(f"{where}: {ended.kind}: {ended.message}".rstrip(": "), "Mend that and start again.")
    error.add_note(ended.trace)
    return error


def _end_of(code: int) -> str:
    if code >= 0:
        return f"ended with exit status {code} and no result"
    name = next((one.name for one in signal.Signals if one == -code), "")
    return f"was killed by signal {-code}{f' ({name})' if name else ''}"


def _work(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    rank: int,
    ranks: int,
    port: int,
    threads: int,
    answer: Connection,
) -> None:
    """One rank, in its own process."""
    sys.stdout = sys.stderr  # the answer on standard output is the caller's
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
        GLOO_SOCKET_IFNAME=os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    )  # fmt: skip
    torch.set_num_threads(threads)
    try:
        backend = _backend(ranks)
        if "nccl" in backend:
            torch.cuda.set_device(rank)
        store = dist.TCPStore(_LOOPBACK, port, is_master=False, timeout=_SETTING_UP)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
        ended = Ended(result=function(*arguments))
    except BaseException as error:
        ended = _failed(error)
    answer.send(ended)
    if not ended.kind:
        _leave()


def _failed(error: BaseException) -> Ended:
    message, remedy = (error.message, error.remedy) if isinstance(error, MicrobatchError) else (str(error), "")
    return Ended(
        kind=type(error).__name__,
        message=message,
        remedy=remedy,
        notes=tuple(getattr(error, "__notes__", ())),
        trace="".join(traceback.format_exception(error)),
    )


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _backend(ranks: int) -> str:
    """NCCL beside gloo where each rank of this machine has a device of its own."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", str(ranks)))
    return "cpu:gloo,cuda:nccl" if torch.cuda.device_count() >= here else "gloo"


def _leave() -> None:
    """Ranks take their groups down together: one that ends earlier makes those of the others fail."""
    with suppress(RuntimeError):  # another failed after this one was done
        dist.barrier()
    dist.destroy_process_group()
