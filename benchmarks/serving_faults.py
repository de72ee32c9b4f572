"""What a request can rely on, over HTTP and in numbers: neighbours that are bad or leave, killed workers, deadlines.

    PYTHONPATH=src:. python benchmarks/serving_faults.py [CASE ...] [--requests 10000] [--peers mosec,...] [--out FILE]

Without a case all are run (some ten minutes, most of them for the starts of other servers). Each prints its figures and
whether its bar is kept:

- poison: 1 of 8 simultaneous requests is malformed, for us and each peer: how many of the other 7 are right. Bar: 7.
- vanish: 200 clients ask and leave while the worker is busy. Bar: nothing is run for them, and 20 new clients are
  served as 20 were before.
- kills: 10 000 requests from 50 clients while two worker processes are killed at random, 200 times. Bar: each request
  gets exactly one answer, right or 503.
- deadlines: a worker process busy for 3 s, 100 requests with a deadline of 0.5 s. Bar: 504 at 0.5 s, p95 within 20 ms.
- bound: at most 4 may wait and 10 come. Bar: 4 are answered and 6 refused at once, with Retry-After.
- retry: a full queue; Retry-After against the time until the queue was really empty. Bar: within max(1 s, 20 %).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peer_servers.asking import PATH, PATIENCE, Client, Reply, metric, together
from benchmarks.peer_servers.callables import CALLABLES
from benchmarks.peer_servers.environments import environment
from benchmarks.peer_servers.items import ITEMS
from benchmarks.peer_servers.running import DidNotStart, Server, ask, free_port, processes, serving
from benchmarks.peer_servers.table import OURS, PEERS, Peer, command_of, settings_in_environment

Found = dict[str, Any]
TRIES = 5
"""Of the malformed request."""


@contextmanager
def ours(name: str, body: Any) -> Iterator[Server]:
    """A server with one of the engines of `peer_servers/fault_apps.py`, in a process of its own."""
    port = free_port()
    app = f"benchmarks/peer_servers/fault_apps.py:{name}"
    command = [sys.executable, "-m", "microbatch", "serve", app, "--host", "127.0.0.1", "--port", str(port)]
    with serving(command, port, PATH, body, core=None) as server:
        yield server


def poison(given: argparse.Namespace) -> Found:
    """The other seven, for us and for each peer."""
    found: Found = {}
    run = CALLABLES["mlp"]()
    items = ITEMS["mlp"]()[:8]
    expected = [run([item])[0] for item in items]
    for peer in (*OURS, *PEERS):
        if "mlp" in peer.models and (peer.ours or not given.peers or peer.name in given.peers):
            found[peer.name] = _poisoned(peer, items, expected)
            print(f"  {peer.name}: {json.dumps(found[peer.name])}", flush=True)
    kept = all(row.get("right_of_7") == 7 for name, row in found.items() if name.startswith("microbatch"))
    return {"servers": found, "kept": kept}


def _poisoned(peer: Peer, items: list[Any], expected: list[Any]) -> Found:
    """The worst of some tries; the window is the widest, so that the eight meet in a batch."""
    setting = next(
        (each for each in peer.settings if each.batch == 8 and each.window in (None, 0.01)), peer.settings[0]
    )
    port = free_port()
    interpreter = sys.executable if peer.ours else str(environment(peer.name))
    variables = settings_in_environment("mlp", setting, port)
    bad = random.Random(0).sample(range(8), TRIES)
    try:
        with serving(command_of(peer, "mlp", setting, port, interpreter), port, peer.path, peer.body(items[0]),
                     core=None, variables=variables):  # fmt: skip
            tries = [_poisoned_once(peer, port, items, expected, place) for place in bad]
            after = ask(port, peer.path, peer.body(items[0]), timeout=PATIENCE)[0]
    except (DidNotStart, OSError) as error:
        return {"error": f"{type(error).__name__}: {error}"[:500]}
    rights, statuses = zip(*tries)
    return {"setting": setting.label, "right_of_7": min(rights), "tries": rights,
            "status_of_the_bad": sorted(set(statuses)), "status_afterwards": after}  # fmt: skip


def _poisoned_once(peer: Peer, port: int, items: list[Any], expected: list[Any], place: int) -> tuple[int, int]:
    bodies = [peer.body(item[:-1] if number == place else item) for number, item in enumerate(items)]
    replies = together(port, bodies, path=peer.path)
    right = [
        reply.status == 200 and np.allclose(peer.answer(reply.document), answer, atol=2e-4)
        for number, (reply, answer) in enumerate(zip(replies, expected))
        if number != place
    ]
    return sum(right), replies[place].status


def vanish(_: argparse.Namespace) -> Found:
    """Who leaves costs nothing."""
    with ours("left", 0.0) as server:
        port = server.port
        before = _seconds_of(together(port, [0.01] * 20))
        run_before, gone_before = metric(port, "microbatch_items_run_total"), _cancelled(port)
        busy = threading.Thread(target=lambda: Client(port).ask(2.0))
        busy.start()
        time.sleep(0.3)
        for connection in [_asked_and_left_open(port, 0.01) for _ in range(200)]:
            connection.close()
        end = time.monotonic() + 1.0
        while _cancelled(port) - gone_before < 200 and time.monotonic() < end:
            time.sleep(0.02)
        gone = _cancelled(port) - gone_before
        busy.join()
        replies = together(port, [0.01] * 20)
        run = metric(port, "microbatch_items_run_total") - run_before
    after = _seconds_of(replies)
    good = gone == 200 and run == 21 and all(reply.status == 200 for reply in replies) and after <= 2 * before + 0.05
    return {
        "noticed": gone,
        "run_for_21_who_stayed": run,
        "seconds_before": before,
        "seconds_after": after,
        "kept": good,
    }


def _cancelled(port: int) -> float:
    """Items that nobody waited for any more."""
    return metric(port, "microbatch_items_total", 'outcome="cancelled"')


def _asked_and_left_open(port: int, item: float) -> socket.socket:
    body = json.dumps(item).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
    connection.sendall(head.encode() + body)
    return connection


def _seconds_of(replies: Sequence[Reply]) -> float:
    return max(reply.came for reply in replies) - min(reply.sent for reply in replies)


def kills(given: argparse.Namespace) -> Found:
    """Exactly one answer each."""
    requests: int = given.requests
    draw, answers = random.Random(0), dict[int, list[Reply]]()
    points = sorted(draw.sample(range(requests), max(1, requests // 50)))
    with ours("killed", 1) as server:

        def client(numbers: range) -> None:
            own = Client(server.port)
            for number in numbers:
                answers.setdefault(number, []).append(own.ask(number))

        def kill() -> None:
            for point in points:
                while len(answers) < point:
                    time.sleep(1e-3)
                if workers := _workers(server):
                    with suppress(ProcessLookupError):
                        os.kill(draw.choice(workers), signal.SIGKILL)

        killer = threading.Thread(target=kill, daemon=True)
        killer.start()
        with ThreadPoolExecutor(50) as pool:
            list(pool.map(client, [range(start, requests, 50) for start in range(50)]))
        restarts = metric(server.port, "microbatch_worker_restarts_total")
    statuses = Counter(reply.status for replies in answers.values() for reply in replies)
    right = sum(replies[0].status == 200 and replies[0].document == {"result": 2 * number}
                for number, replies in answers.items())  # fmt: skip
    once = all(len(replies) == 1 for replies in answers.values()) and len(answers) == requests
    good = once and right + statuses[503] == requests and restarts > 0
    return {"requests": requests, "right": right, "statuses": dict(statuses), "restarts": restarts, "kept": good}


def _workers(server: Server) -> list[int]:
    """Worker processes: those that were spawned, without multiprocessing's own helper."""
    found = []
    for pid in processes(server.mark):
        with suppress(OSError):
            if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def deadlines(_: argparse.Namespace) -> Found:
    """On time, whatever the worker does."""
    late: list[float] = []
    statuses = Counter[int]()
    with ours("busy", 0.0) as server:
        for _turn in range(2):
            with ThreadPoolExecutor(51) as pool:
                busy = pool.submit(Client(server.port).ask, 3.0)
                time.sleep(0.2)
                asked = []
                for _number in range(50):
                    asked.append(pool.submit(Client(server.port).ask, 0.0, {"Microbatch-Deadline": "0.5"}))
                    time.sleep(0.02)
                replies = [each.result() for each in asked]
                statuses.update([reply.status for reply in replies] + [busy.result().status])
                late += [reply.came - reply.sent - 0.5 for reply in replies if reply.status == 504]
    p95 = float(np.percentile(late, 95)) if late else None
    good = len(late) == 100 and p95 is not None and p95 <= 0.02 and min(late) >= -0.005
    return {
        "tries": len(late),
        "late_p95": p95,
        "late_max": max(late, default=None),
        "statuses": dict(statuses),
        "kept": good,
    }


def bound(_: argparse.Namespace) -> Found:
    """Exactly four wait."""
    with ours("narrow", 0.0) as server:
        busy = threading.Thread(target=lambda: Client(server.port).ask(1.5))
        busy.start()
        time.sleep(0.3)
        replies = together(server.port, [0.01] * 10)
        busy.join()
    refused = [reply for reply in replies if reply.status == 429]
    answered = sum(reply.status == 200 for reply in replies)
    slowest = max((reply.came - reply.sent for reply in refused), default=None)
    told = [reply.headers.get("retry-after") for reply in refused]
    good = (answered, len(refused)) == (4, 6) and slowest is not None and slowest < 0.5 and all(told)
    return {
        "answered": answered,
        "refused": len(refused),
        "slowest_refusal": slowest,
        "retry_after": told,
        "kept": good,
    }


def retry(_: argparse.Namespace) -> Found:
    """When to come back."""
    with ours("draining", 1.0) as server:
        together(server.port, [1.0] * 100)  # so that its latency has been seen
        replies = together(server.port, [1.0] * 450)
    refused = [reply for reply in replies if reply.status == 429]
    if not refused:
        return {"refused": 0, "kept": False}
    first = min(refused, key=lambda reply: reply.came)
    took = max(reply.came for reply in replies if reply.status == 200) - first.came
    told = float(first.headers["retry-after"])
    return {"refused": len(refused), "told": told, "took": took, "kept": abs(told - took) <= max(1.0, 0.2 * took)}


CASES: dict[str, Callable[[argparse.Namespace], Found]] = {
    "poison": poison,
    "vanish": vanish,
    "kills": kills,
    "deadlines": deadlines,
    "bound": bound,
    "retry": retry,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[[], *CASES])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--peers", type=lambda text: text.split(","), help="names of peers for poison")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found = dict[str, Found]()
    for name in given.cases or CASES:
        found[name] = CASES[name](given)
        print(f"{name}: {json.dumps(found[name])}", flush=True)
    if given.out:
        document = {"found": found, "machine": platform.platform(), "load": os.getloadavg()}
        given.out.write_text(json.dumps(document, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
