"""The servers that are compared: how each is started, at which settings it is tried, and what it takes and gives."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.peer_servers.callables import MINILM

WINDOWS = (0.0, 0.001, 0.002, 0.005, 0.01)
"""Seconds."""
BATCHES = (8, 32)
MODELS = ("mlp", "minilm")
SAME, INSTALLED = "same callable", "as installed"
"""The two tables."""


@dataclass(frozen=True)
class Setting:
    """One configuration of a server.

    Attributes:
        batch: items in a batch, at most; None where the server decides, or does not batch.
        window: seconds that a batch waits for more; None where there is no such setting.
        way: another choice, by name.
    """

    batch: int | None = None
    window: float | None = None
    way: str = ""

    @property
    def label(self) -> str:
        """``5 ms × 32``"""
        parts = [] if self.window is None else [f"{1e3 * self.window:g} ms"]
        parts += [] if self.batch is None else [str(self.batch)]
        return " × ".join(parts) or self.way or "as it is"


def by_hand(*, windows: bool) -> tuple[Setting, ...]:
    """Settings of a server whose batches, and perhaps windows, are tuned by hand; the widest and the shortest first."""
    if not windows:
        return tuple(Setting(batch) for batch in reversed(BATCHES))
    first = (Setting(BATCHES[-1], WINDOWS[-1]), Setting(BATCHES[-1], WINDOWS[0]))
    return first + tuple(s for b in BATCHES for w in WINDOWS if (s := Setting(b, w)) not in first)


def _bare(item: Any) -> Any:
    return item


def _result(document: Any) -> Any:
    return document["result"]


@dataclass(frozen=True)
class Peer:
    """A server.

    Attributes:
        name: in the tables.
        command: after the interpreter; ``{port}``, ``{batch}``, ``{milliseconds}``, ``{model}`` and ``{minilm}`` are
            filled in.
        path: that is asked.
        settings: configurations that are tried.
        body: of a request about one item.
        answer: the result in an answer.
        tables: that it stands in.
        models: that it serves.
        note: what a reader should know.
        distributions: whose versions are told; the environment's name otherwise.
    """

    name: str
    command: tuple[str, ...]
    path: str = "/predict"
    settings: tuple[Setting, ...] = (Setting(),)
    body: Callable[[Any], Any] = _bare
    answer: Callable[[Any], Any] = _result
    tables: tuple[str, ...] = (SAME, INSTALLED)
    models: tuple[str, ...] = MODELS
    note: str = ""
    distributions: tuple[str, ...] = field(default=())

    @property
    def ours(self) -> bool:
        """Whether it is this library, which runs in the environment of the benchmark."""
        return self.name.startswith("microbatch")


_APPS = "benchmarks.peer_servers."
_WHERE = ("--host", "127.0.0.1", "--port", "{port}")
_UVICORN = (*_WHERE, "--log-level", "error", "--no-access-log")
_SERVE = ("-m", "microbatch", "serve", "benchmarks/peer_servers/ours_app.py:{model}_")


def _serve(name: str) -> tuple[str, ...]:
    return (*_SERVE[:-1], _SERVE[-1] + name, *_WHERE)


OURS = (
    Peer("microbatch", _serve("same"), tables=(SAME,), note="No setting; of a text it is told the length."),
    Peer("microbatch, as installed", _serve("fast"), tables=(INSTALLED,), models=("mlp",),
         note="The nn.Module handed over, with the fast linear layers."),
    Peer("microbatch, as installed", ("-m", "microbatch", "serve", "{minilm}", *_WHERE), tables=(INSTALLED,),
         models=("minilm",), note="The model's folder handed over."),
    Peer("microbatch, by arrival", _serve("arrival"), tables=(), models=("minilm",),
         note="Told no lengths: batches in the order of arrival."),
)  # fmt: skip

PEERS = (
    Peer("fastapi", ("-m", "uvicorn", _APPS + "fastapi_app:app", *_UVICORN),
         settings=(Setting(way="async def"), Setting(way="def")), note="No batching.",
         distributions=("fastapi", "uvicorn")),
    Peer("mosec", ("-m", _APPS + "mosec_app", "--address", "127.0.0.1", "--port", "{port}", "--log-level", "error",
                   "--timeout", "60000", "--capacity", "4096", "--wait", "{milliseconds}"),
         "/inference", by_hand(windows=True), answer=_bare),
    Peer("litserve", ("-m", _APPS + "litserve_app"), settings=by_hand(windows=True),
         body=lambda item: {"item": item}),
    Peer("bentoml", ("-m", "bentoml", "serve", _APPS + "bentoml_app:Service", "--host", "127.0.0.1", "--port", "{port}",
                     "--api-workers", "1"),
         settings=by_hand(windows=False), body=lambda item: {"items": [item]}, answer=lambda document: document[0],
         note="Adapts its waiting itself; its latency limit is no window and would drop requests."),
    Peer("ray", ("-m", _APPS + "ray_app"), settings=by_hand(windows=True)),
    Peer("batched", ("-m", "uvicorn", _APPS + "batched_app:app", *_UVICORN), settings=by_hand(windows=True),
         distributions=("batched", "fastapi", "uvicorn")),
    Peer("infinity", ("-m", "infinity_emb.cli", "v2", "--model-id", "{minilm}", "--served-model-name", "minilm",
                      "--engine", "torch", "--device", "cpu", "--dtype", "float32", "--no-bettertransformer",
                      "--no-model-warmup", "--batch-size", "{batch}", "--host", "127.0.0.1", "--port", "{port}",
                      "--log-level", "error"),
         "/embeddings", by_hand(windows=False), lambda item: {"model": "minilm", "input": [item]},
         lambda document: document["data"][0]["embedding"], models=("minilm",),
         note="Runs the model through its own code (sentence-transformers), not the callable of the others.",
         distributions=("infinity-emb", "sentence-transformers", "transformers")),
)  # fmt: skip


def command_of(peer: Peer, model: str, setting: Setting, port: int, interpreter: str = sys.executable) -> list[str]:
    """The whole command line."""
    filled = {
        "port": port, "model": model, "minilm": MINILM, "batch": setting.batch or "",
        "milliseconds": round(1e3 * (setting.window or 0.0)),
    }  # fmt: skip
    return [interpreter, *(part.format(**filled) for part in peer.command)]


def settings_in_environment(model: str, setting: Setting, port: int) -> dict[str, str]:
    """The same for servers that are Python files: what `benchmarks.peer_servers.callables` reads."""
    return {
        "PEER_MODEL": model,
        "PEER_BATCH": str(setting.batch or 1),
        "PEER_WINDOW": str(setting.window or 0.0),
        "PEER_WAY": setting.way,
        "PEER_PORT": str(port),
    }
