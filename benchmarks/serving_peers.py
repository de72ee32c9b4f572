"""This library's server beside LitServe, mosec, BentoML, Ray Serve, batched, infinity and plain FastAPI, in one run.

    PYTHONPATH=src:. python benchmarks/serving_peers.py --out benchmarks/results/serving_peers.json
    python -m scripts.compare_serving      # writes docs/compare-serving.md from it

Two models: an fp32 MLP of depth 8 and width 1024, and all-MiniLM-L6-v2 with docstrings of Python's standard library,
which are from one word to several pages long. Two tables: every server runs the same callable in one thread; and ours
as it is installed. Servers stand in `peer_servers/table.py`, each in an environment of its own, made on first use.

The server has core 0 and the client core 1: wrk for 1, 8 and 32 clients, and Poisson arrivals at 50 % and 90 % of the
capacity of the best of the other servers. First every setting of every peer under every load, briefly (windows of 0, 1,
2, 5 and 10 ms × batches of 8 and 32 where a server has them); then three full rounds, in each of which all servers take
turns, each at the settings that were the best for it under each load. Rows whose client was above 90 % busy are void.

Each row is appended to a file beside the result as it comes: a run that ends early, or after ``--minutes``, goes on
where it stopped. For a quick try: ``--only mlp --peers mosec,fastapi --rounds 1 --seconds 2``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peer_servers.callables import CALLABLES
from benchmarks.peer_servers.environments import environment, minilm, versions
from benchmarks.peer_servers.items import ITEMS, SOURCE
from benchmarks.peer_servers.loads import CLOSED, LOADS, Row, measure, wrk
from benchmarks.peer_servers.plan import Visit, capacity, visits
from benchmarks.peer_servers.running import DidNotStart, Server, ask, free_port, serving
from benchmarks.peer_servers.summary import summary
from benchmarks.peer_servers.table import MODELS, OURS, PEERS, Peer, command_of, settings_in_environment
from microbatch.models.torchvision_operators import make_torchvision_importable

CHECKED = 8
"""Answers of each server that are compared with the callable's own before it is measured."""
TOLERANCE = 2e-4
LONGER = {"mlp": 1.0, "minilm": 2.0}
"""Times as long as was asked for: so that slow models answer enough requests."""
IDLE_AFTER, IDLE_FOR = 1.0, 2.0
"""Seconds of rest before, and of, the measurement of an idle server."""


class Run:
    """One run: its settings, and the rows so far."""

    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self.peers: list[Peer] = [*OURS, *(peer for peer in PEERS if not given.peers or peer.name in given.peers)]
        self.seconds: dict[str, float] = {"tuning": given.tuning_seconds, "round": given.seconds}
        self._until: float = time.monotonic() + 60 * given.minutes
        self._raw: Path = given.out.with_suffix(".jsonl")
        self.rows: list[Row] = (
            [json.loads(line) for line in self._raw.read_text().splitlines()] if self._raw.exists() else []
        )
        self._expected: dict[str, list[Any]] = {}
        self._folder = folder

    @property
    def over(self) -> bool:
        """Whether the time is used up."""
        return time.monotonic() > self._until

    def make(self, visit: Visit) -> None:
        """Start the server, check its answers, measure, end it; rows are written as they come."""
        port = free_port()
        interpreter = sys.executable if visit.peer.ours else str(environment(visit.peer.name))
        command = command_of(visit.peer, visit.model, visit.setting, port, interpreter)
        variables = settings_in_environment(visit.model, visit.setting, port)
        first = visit.peer.body(ITEMS[visit.model]()[0])
        start = time.monotonic()
        try:
            with serving(command, port, visit.peer.path, first, variables=variables) as server:
                started = time.monotonic() - start
                self._check(visit, port)
                self._measure(visit, server, started)
        except (DidNotStart, WrongAnswers, RuntimeError, OSError) as error:
            self._write(visit, "start", {"why": f"{type(error).__name__}: {error}"[:2000]})

    def _measure(self, visit: Visit, server: Server, started: float) -> None:
        url, bodies = f"http://127.0.0.1:{server.port}{visit.peer.path}", self._bodies(visit)
        wrk(url, bodies, CLOSED[-1].clients, 1.0)  # what warms a server, and whatever it learns from first requests
        first = visit.peer.body(ITEMS[visit.model]()[0])
        most = capacity(visit.phase, visit.model, self.rows, self.peers)
        for load in visit.loads:
            if not (load.clients or most):
                continue  # no other server whose capacity could be shared
            ask(server.port, visit.peer.path, first)  # what an earlier client left behind is done before it is answered
            row = measure(load, url, bodies, LONGER[visit.model] * self.seconds[visit.phase], most)
            self._write(visit, load.name, row)
        if visit.phase == "round":
            time.sleep(IDLE_AFTER)
            self._write(visit, "idle", {"share": server.idle_share(IDLE_FOR), "started": started})

    def _check(self, visit: Visit, port: int) -> None:
        if visit.model not in self._expected:
            make_torchvision_importable()  # transformers looks for it
            run = CALLABLES[visit.model]()
            self._expected[visit.model] = [run([item])[0] for item in ITEMS[visit.model]()[:CHECKED]]
        for item, expected in zip(ITEMS[visit.model](), self._expected[visit.model]):
            status, document = ask(port, visit.peer.path, visit.peer.body(item))
            if status != 200 or not _alike(visit.peer, document, expected):
                raise WrongAnswers(f"{status}: {str(document)[:200]} is not what the callable answers")

    def _bodies(self, visit: Visit) -> Path:
        file = self._folder / f"{visit.model}-{visit.peer.name.replace(' ', '-').replace(',', '')}.jsonl"
        if not file.exists():
            lines = [json.dumps(visit.peer.body(item)) for item in ITEMS[visit.model]()]
            file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return file

    def _write(self, visit: Visit, load: str, row: Row) -> None:
        about = dict(zip(("phase", "round", "model", "peer", "setting", "load"), visit.key(load)))
        self.rows.append(about | row)
        with self._raw.open("a", encoding="utf-8") as file:
            file.write(json.dumps(self.rows[-1]) + "\n")
        print(
            " ".join(f"{value:.5g}" if isinstance(value, float) else str(value) for value in self.rows[-1].values()),
            flush=True,
        )


class WrongAnswers(Exception):
    """A server that answers something else than the callable."""


def _alike(peer: Peer, document: Any, expected: list[float]) -> bool:
    try:
        found = peer.answer(document)
        return len(found) == len(expected) and max(abs(a - b) for a, b in zip(found, expected)) <= TOLERANCE
    except (KeyError, IndexError, TypeError):
        return False


def conditions(peers: Sequence[Peer], given: argparse.Namespace) -> Row:
    """Where, with what and how long."""
    found = {
        peer.name: versions(environment(peer.name), peer.distributions or (peer.name,))
        for peer in peers
        if not peer.ours
    }
    wrk_says = subprocess.run(["wrk", "-v"], capture_output=True, text=True, check=False).stdout.split("\n")[0]
    found["microbatch"] = versions(sys.executable, ("torch", "transformers", "uvicorn"))
    return {
        "machine": {"cpus": os.cpu_count(), "platform": platform.platform(), "python": platform.python_version()},
        "versions": found | {"wrk": {"wrk": wrk_says.split()[1]} if wrk_says else {}},
        "seconds": {"round": given.seconds, "tuning": given.tuning_seconds},
        "texts": SOURCE,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="rows go to the same name with .jsonl")
    parser.add_argument("--only", choices=MODELS, help="one of the models")
    parser.add_argument("--peers", type=lambda text: text.split(","), help="names of peers; this library always runs")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each load in a round")
    parser.add_argument("--tuning-seconds", type=float, default=1.0, help="of each load in the tuning")
    parser.add_argument("--minutes", type=float, default=90.0, help="begin nothing new after so long")
    given = parser.parse_args()
    if (os.cpu_count() or 1) < 2:
        sys.exit("The server needs one core and the client another.")
    minilm()
    start, complete = time.monotonic(), True
    with tempfile.TemporaryDirectory(prefix="serving-peers-") as folder:
        run = Run(given, Path(folder))
        for visit in visits([given.only] if given.only else MODELS, run.peers, run.rows, given.rounds):
            if run.over:
                complete = False
                break
            run.make(visit)
    document = conditions(run.peers, given) | summary(run.rows, run.peers)
    document |= {"complete": complete, "minutes": round((time.monotonic() - start) / 60, 1), "loads": list(LOADS)}
    given.out.write_text(written(document | {"rows": run.rows}), encoding="utf-8")


def written(document: Row) -> str:
    """JSON with a line for each row, so that a change shows."""
    rows = document.pop("rows")
    lines = ",\n".join(json.dumps(row) for row in rows)
    return json.dumps(document, indent=1)[:-2] + f',\n "rows": [\n{lines}\n ]\n}}\n'


if __name__ == "__main__":
    main()
