"""`microbatch load --clients` beside wrk and hey on the same server: requests/s within 5 %, p50 beside.

    python benchmarks/load_agreement.py [--rounds 3] [--seconds 5] [--out benchmarks/results/load_agreement.json]

The server runs on core 0, the client on core 1. Each round runs every client once at every number of connections, in
turn; a second of warm-up comes before each. Ratios are taken within a round. A row in which load says that its own core
was more than 90 % busy is void and judged by nobody. Servers: `mlp`, an MLP of depth 8 and width 1024 behind the
batching engine; `sum`, a function that adds 64 numbers, whose answers come as fast as the front can give them; and
`echo`, which answers without reading, so that its rows show what each client can do at most. Those are not judged, nor
is a lone client of `sum`: it is answered in a tenth of a millisecond, of which a client in Python is a good part.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SERVER_CORE, CLIENT_CORE = "0", "1"
AGREES = 0.05
BODY = json.dumps([round(0.01 * k, 2) for k in range(64)])

SERVE = """
import sys
from microbatch.serving.engine.batcher import DynamicBatcher
from microbatch.web.application import application
from microbatch.web.server import serve
{make}
serve(application({{"model": engine}}), port=0, started=print)
"""
SERVERS = {
    "mlp": """
import torch
from torch import nn
torch.set_num_threads(1)
torch.manual_seed(0)
layers = [part for _ in range({depth}) for part in (nn.Linear({width}, {width}), nn.ReLU())]
model = nn.Sequential(nn.Linear(64, {width}), *layers, nn.Linear({width}, 10)).eval()
engine = DynamicBatcher(model, examples=[torch.randn(64)], max_batch_size=32)
""",
    "sum": """
engine = DynamicBatcher(lambda items: [sum(item) for item in items], examples=[[0.5] * 64], max_batch_size=32)
""",
}

ECHO = """
import asyncio
import uvloop

ANSWER = b"HTTP/1.1 200 OK\\r\\ncontent-type: application/json\\r\\ncontent-length: 14\\r\\n\\r\\n" + b'{"result":1.0}'

class Echo(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport = transport
    def data_received(self, data):
        self.transport.write(ANSWER)

async def main():
    server = await asyncio.get_running_loop().create_server(Echo, "127.0.0.1", 0)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()

uvloop.run(main())
"""

Figures = dict[str, Any]
"""rate in requests/s, p50 and p99 in seconds, cpu as a share of the client's core, failed, void."""


@contextmanager
def served(code: str) -> Iterator[str]:
    """The URL of a server on its own core."""
    command = ["taskset", "-c", SERVER_CORE, sys.executable, "-u", "-c", code]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child:
        try:
            assert child.stdout is not None
            yield child.stdout.readline().strip() + "/predict"
        finally:
            child.terminate()
            child.wait(60)


def run(*command: str) -> str:
    """What a client prints."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        ["taskset", "-c", CLIENT_CORE, *command], capture_output=True, text=True, check=True, env=environment
    )
    return done.stdout


def by_wrk(url: str, clients: int, seconds: float, folder: Path) -> Figures:
    script = folder / "post.lua"
    script.write_text(f"wrk.method = 'POST'\nwrk.body = '{BODY}'\nwrk.headers['Content-Type'] = 'application/json'\n")
    words = ("-t1", f"-c{clients}", "--latency", "-s", str(script), url)
    run("wrk", "-d1s", *words)
    text = run("wrk", f"-d{round(seconds)}s", *words)
    failed = re.search(r"Non-2xx or 3xx responses: (\d+)", text)
    return {
        "rate": float(_found(r"Requests/sec:\s+([\d.]+)", text)),
        "p50": _seconds(_found(r"50%\s+([\d.]+\w+)", text)),
        "p99": _seconds(_found(r"99%\s+([\d.]+\w+)", text)),
        "failed": int(failed[1]) if failed else 0,
    }


def by_hey(url: str, clients: int, seconds: float, folder: Path) -> Figures:  # noqa: ARG001 (one form for all)
    words = ("-c", str(clients), "-cpus", "1", "-m", "POST", "-T", "application/json", "-d", BODY, url)
    run("hey", "-z", "1s", *words)
    text = run("hey", "-z", f"{round(seconds)}s", *words)
    statuses = dict(re.findall(r"\[(\d+)\]\s+(\d+) responses", text))
    return {
        "rate": float(_found(r"Requests/sec:\s+([\d.]+)", text)),
        "p50": float(_found(r"50%+ in ([\d.]+) secs", text)),
        "p99": float(_found(r"99%+ in ([\d.]+) secs", text)),
        "failed": sum(int(count) for status, count in statuses.items() if not status.startswith("2")),
    }


def by_load(url: str, clients: int, seconds: float, folder: Path) -> Figures:  # noqa: ARG001
    words = ("--clients", str(clients), "--duration", f"{round(seconds)}s", "--warmup", "1s", "--body", BODY, "--json")
    found = json.loads(run(sys.executable, "-m", "microbatch", "load", url, *words))
    return {
        "rate": found["throughput"],
        "p50": found["latency"]["p50"],
        "p99": found["latency"]["p99"],
        "failed": sum(found["errors"].values()),
        "void": found["void"],
    }


CLIENTS: dict[str, Callable[[str, int, float, Path], Figures]] = {"wrk": by_wrk, "hey": by_hey, "load": by_load}


def measured(client: str, url: str, clients: int, seconds: float, folder: Path) -> Figures:
    """The figures of one client, with the processor time that it used."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    figures = CLIENTS[client](url, clients, seconds, folder)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"void": None, "cpu": used / (seconds + 1)} | figures


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    if match is None:
        raise RuntimeError(f"{pattern} is not in:\n{text}")
    return match[1]


def _seconds(text: str) -> float:
    number, unit = re.fullmatch(r"([\d.]+)(\w+)", text).groups()  # type: ignore[union-attr]
    return float(number) * {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0}[unit]


def table(rounds: list[dict[str, Figures]], clients: list[str]) -> dict[str, Figures]:
    """Medians, and load's rate over each other client's within a round, by server and number of connections."""
    found: dict[str, Figures] = {}
    for case in rounds[0]:
        rows = {name: [each[case][name] for each in rounds] for name in clients}
        kept = [number for number, row in enumerate(rows["load"]) if not row["void"]]
        found[case] = {
            name: {key: statistics.median(row[key] for row in rows[name]) for key in ("rate", "p50", "p99", "cpu")}
            for name in clients
        }
        found[case]["ratios"] = {
            name: [rows["load"][number]["rate"] / rows[name][number]["rate"] for number in kept]
            for name in clients
            if name != "load"
        }
    return found


def told(case: str, row: Figures, clients: list[str]) -> str:
    cells = [
        f"{name} {row[name]['rate']:7.0f}/s p50 {1e3 * row[name]['p50']:6.2f} p99 {1e3 * row[name]['p99']:6.2f} ms "
        f"({100 * row[name]['cpu']:.0f} %)"
        for name in clients
    ]
    ratios = "; ".join(
        f"load/{name} {statistics.median(values):.3f}" if values else f"load/{name} void"
        for name, values in row["ratios"].items()
    )
    return f"{case:16} {'  '.join(cells)}  {ratios}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    clients = [name for name in CLIENTS if name == "load" or shutil.which(name)]
    codes = {
        name: SERVE.format(make=make.format(depth=given.depth, width=given.width)) for name, make in SERVERS.items()
    } | {"echo": ECHO}
    rounds: list[dict[str, Figures]] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(given.rounds):
            print(f"round {number + 1} of {given.rounds}", flush=True)
            rounds.append({})
            for server, code in codes.items():
                with served(code) as url:
                    for count in given.connections:
                        order = clients[number % len(clients) :] + clients[: number % len(clients)]
                        rounds[-1][f"{server} {count}"] = {
                            name: measured(name, url, count, given.seconds, Path(folder)) for name in order
                        }
    found = table(rounds, clients)
    for case, row in found.items():
        print(told(case, row, clients))
    judged = [statistics.median(row["ratios"]["wrk"]) for case, row in found.items()
              if not case.startswith("echo") and case != "sum 1" and row["ratios"].get("wrk")]  # fmt: skip
    agrees = all(abs(ratio - 1) <= AGREES for ratio in judged)
    print(f"within 5 % of wrk: {'yes' if agrees else 'NO'}, {len(judged)} of {len(found)} cases judged")
    if given.out:
        document = {"table": found, "rounds": rounds, "agrees": agrees, "machine": platform.platform(),
                    "load": os.getloadavg(), "seconds": given.seconds}  # fmt: skip
        given.out.write_text(json.dumps(document, indent=1), encoding="utf-8")
    return 0 if agrees else 1


if __name__ == "__main__":
    sys.exit(main())
