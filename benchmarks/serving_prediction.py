"""Simulated against measured: the maximum rate, p50 and p99 of the server, from its own curve, before the load comes.

    PYTHONPATH=src:. python benchmarks/serving_prediction.py [--rounds 3] [--seconds 15] [--out FILE.json]

The MLP is served over HTTP in this process, which keeps to core 0; the client has core 1. The server warms up under 8
and 64 clients, as its curve is corrected by what it runs. Then, in each round: the maximum rate is simulated from the
curve as it stands, and measured with so many clients that every batch is full; and for 50, 70 and 90 % of it p50 and
p99 are simulated, then measured with Poisson arrivals from `microbatch load`. Bars, for medians over the rounds: the
maximum rate and p50 within 10 %, p99 within 25 %.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.peer_servers import ours_app
from benchmarks.peer_servers.items import ITEMS
from benchmarks.peer_servers.loads import opened, wrk
from microbatch.serving.decisions.dry_run import dry_run
from microbatch.serving.decisions.latency import Latency
from microbatch.serving.decisions.limits import Wishes
from microbatch.serving.decisions.simulate import simulate
from microbatch.serving.decisions.traffic import poisson
from microbatch.serving.engine.batcher import DynamicBatcher
from microbatch.web.application import application
from microbatch.web.server import serve

Row = dict[str, Any]
SHARES = (0.5, 0.7, 0.9)
BARS = {"rate": 0.10, "p50": 0.10, "p99": 0.25}
SIMULATED = 50_000
"""Requests of a simulation: 500 of them lie above the p99."""


def fast() -> DynamicBatcher:
    """The module with the fast linear layers."""
    model, example = ours_app.mlp_fast()
    return DynamicBatcher(model, examples=list(example))


WAYS: dict[str, Callable[[], DynamicBatcher]] = {"same callable": ours_app.mlp_same, "as installed": fast}


def expected(engine: DynamicBatcher, rate: float) -> Row:
    """On the curve as it stands, with the times of batches varying as those of the last launches did."""
    metrics, limits = engine.metrics(), engine.limits
    assert limits is not None
    latency = Latency(dict(metrics.curve))
    ratios = [launch.seconds / latency.seconds(launch.cost) for launch in metrics.launches if launch.calls == 1]
    found = simulate(poisson(rate, SIMULATED, 1), latency, limits, ratios=ratios)
    return {"p50": found.p50, "p99": found.p99, "mean_batch": found.mean_batch}


def most(engine: DynamicBatcher) -> float:
    """Requests a second, as `serve --dry-run` tells them from this curve."""
    limits = engine.limits
    assert limits is not None
    return dry_run(Latency(dict(engine.metrics().curve)), Wishes(max_batch_size=limits.max_batch_size)).max_rate


def one_round(engine: DynamicBatcher, url: str, bodies: Path, seconds: float) -> list[Row]:
    """Rows of what was expected and what came."""
    limits = engine.limits
    assert limits is not None
    told, before, start = most(engine), engine.metrics(), time.monotonic()
    found = wrk(url, bodies, 2 * limits.max_batch_size, seconds)
    if not found["rate"]:
        raise RuntimeError(f"nothing was answered in {seconds} s; this machine is too busy")
    after, took = engine.metrics(), time.monotonic() - start
    served = max(1, after.answered - before.answered)
    between = (took - (after.busy_seconds - before.busy_seconds)) / served
    rows: list[Row] = [
        {"what": "rate", "share": 1.0, "expected": told, "measured": found["rate"], "void": found["void"]}
        | {"mean_batch": served / max(1, after.batches - before.batches), "seconds_beside_batches": between}
    ]
    for share in SHARES:
        rate = share * found["rate"]
        guess = expected(engine, rate)
        came = opened(url, bodies, rate, seconds)
        for name in ("p50", "p99"):
            row = {"what": name, "share": share, "expected": guess[name], "measured": came[name]}
            rows.append(row | {"void": came["void"], "behind": came["behind"]})
    return rows


def measured(make: Callable[[], DynamicBatcher], rounds: int, seconds: float) -> list[Row]:
    """All rows of one way to serve; the server runs here, in the foreground, and its client elsewhere."""
    engine, rows = make(), list[Row]()
    began, failed = threading.Event(), list[BaseException]()
    urls: list[str] = []

    def drive() -> None:
        try:
            began.wait()
            with tempfile.TemporaryDirectory() as folder:
                bodies = Path(folder) / "bodies.jsonl"
                bodies.write_text("".join(json.dumps(item) + "\n" for item in ITEMS["mlp"]()), encoding="utf-8")
                url = f"{urls[0]}/predict"
                for clients in (8, 64):
                    wrk(url, bodies, clients, max(1.0, seconds / 5))
                for number in range(rounds):
                    rows.extend(row | {"round": number + 1} for row in one_round(engine, url, bodies, seconds))
        except BaseException as error:
            failed.append(error)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    def started(url: str) -> None:
        urls.append(url)
        began.set()

    driver = threading.Thread(target=drive, daemon=True)
    driver.start()
    serve(application({"mlp": engine}), port=0, started=started)
    driver.join()
    if failed:
        raise failed[0]
    return rows


def judged(rows: list[Row]) -> list[Row]:
    """Medians over rounds, how far apart they are, and whether that is within the bar."""
    found = []
    for what, share in dict.fromkeys((row["what"], row["share"]) for row in rows):
        each = [
            row for row in rows if (row["what"], row["share"]) == (what, share) and not row["void"] and row["measured"]
        ]
        if not each:
            found.append({"what": what, "share": share, "kept": False, "why": "no valid row"})
            continue
        off = median(row["expected"] / row["measured"] for row in each) - 1
        found.append({"what": what, "share": share, "expected": median(row["expected"] for row in each),
                      "measured": median(row["measured"] for row in each), "off": off, "bar": BARS[what],
                      "kept": abs(off) <= BARS[what]})  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each load")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if (os.cpu_count() or 1) < 2:
        sys.exit("The server needs one core and the client another.")
    os.sched_setaffinity(0, {0})
    torch.set_num_threads(1)
    found: dict[str, Row] = {}
    for name in given.ways:
        rows = measured(WAYS[name], given.rounds, given.seconds)
        found[name] = {"judged": judged(rows), "rows": rows}
        for row in found[name]["judged"]:
            print(name, json.dumps(row), flush=True)
    if given.out:
        document = {"found": found, "machine": platform.platform(), "torch": torch.__version__, "load": os.getloadavg()}
        given.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
