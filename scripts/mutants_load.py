"""Breaks of the load generator; see `scripts.mutants_table`."""

from __future__ import annotations

from scripts.mutant import Mutant
from scripts.mutant import rows_of as _rows

LOAD: tuple[Mutant, ...] = (
    *_rows(
        "web/load/histogram.py",
        "web/test_load_histogram.py",
        ("(bucket + 0.5)", "bucket", "a quantile is the middle of its bucket"),
        ("rank >= self.count", "rank > self.count", "the largest is exact"),
        ("share * self.count - 1e-9", "share * self.count + 1", "the p99 of a hundred is the 99th"),
    ),
    *_rows(
        "web/load/schedule.py",
        "web/test_load_schedule.py",
        ("times[: warm + requests]", "times[:requests]", "warm-up is beside the number that is measured"),
        ("times[times < duration]", "times[times < 2 * duration]", "nothing is due after the end"),
        ("times = times - warmup", "pass", "what is measured begins at 0"),
        ("/ times[-1] / rate)", "/ times[-1])", "a file is stretched to the rate"),
        ("if count > MOST:", "if False:", "no run is endless"),
    ),
    *_rows(
        "web/load/tally.py",
        "web/test_load_tally.py",
        ("else 0 <= now <= self.window", "else now <= self.window", "what ended before the start is in no rate"),
        ("due >= 0 if self.window is None", "True if self.window is None", "warm-up is in no rate without a window"),
        ("self.lateness.add(now - due)", "pass", "a client that sends late is seen"),
        ("self.ended += 0 <= now <= self.until", "self.ended += 0 <= now", "a queue that grows is seen"),
        ("now - due <= self.target", "True", "goodput has a target"),
    ),
    *_rows(
        "web/load/verdict.py",
        "web/test_load_tally.py",
        ("if run.client_cpu > BUSY:", "if False:", "a busy client voids its figures"),
        ("LATE_SHARE * (run.latency", "0 * (run.latency", "lateness is judged beside the latency"),
        ("return not (grows or run.errors)", "return not grows", "a server that refuses does not keep up"),
        ("max(GROWTH_SHARE * run.requests, BURST)", "0", "a burst is no growing queue"),
    ),
    *_rows(
        "web/load/sender.py",
        "web/test_load_runs.py",
        (
            "connection.ask(next(self._requests), self._waiting.popleft())",
            "connection.ask(next(self._requests), self._loop.time() + 0 * self._waiting.popleft())",
            "latency counts from when a request was due",
        ),
        ("and one.due <= late]", "and False]", "what never comes times out"),
    ),
    *_rows(
        "web/load/connection.py",
        "web/test_load_connection.py",
        ("and exc is None and not _has_length(self._first)", "", "an answer that is cut off is an error"),
        ("self._parser.get_status_code() >= 200", "True", "an announcement is no answer"),
    ),
    *_rows(
        "web/load/precise.py",
        "web/test_load_precise.py",
        (
            "asyncio.SelectorEventLoop(PreciseSelector())",
            "asyncio.SelectorEventLoop()",
            "timers do not wait whole milliseconds",
        ),
    ),
    *_rows(
        "web/load/target.py",
        "web/test_load_requests.py",
        ('host == "localhost" or host.endswith(".localhost")', '"localhost" in host', "other machines need a word"),
        ("address.is_loopback or", "True or", "other addresses need a word"),
    ),
    *_rows(
        "web/load/published.py",
        "web/test_load_requests.py",
        ("if depth == 0 or", "if", "a schema that goes in a circle ends"),
        ('"{" not in path', "True", "a path with a parameter cannot be asked"),
    ),
    *_rows(
        "web/connections.py",
        "web/test_hard_clients.py",
        ("len(self.connections) > self.most", "False", "a flood of connections is bounded"),
        ("cycle.disconnected = True", "pass", "all requests in a row are told that their client has gone"),
        (
            "self._refuse(400, msg",
            "super().send_400_response(msg) if True else (400, msg",
            "no answer comes out of turn",
        ),
    ),
)
