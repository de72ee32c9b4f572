"""What `microbatch load` does, with many bodies: ``python -m benchmarks.peer_servers.open_loop URL FILE RATE SECONDS``.

The command itself takes items and makes bodies as this library's servers take them; other servers want others.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from microbatch.cli.quick import without_collecting
from microbatch.web.load.requests import Body, Question
from microbatch.web.load.run import generate
from microbatch.web.load.settings import Load
from microbatch.web.load.target import target_of

TIMEOUT = 5.0
"""Seconds after which a request has failed: a server that falls behind shall not be waited for."""


def main() -> None:
    """One run; its figures as JSON."""
    url, file, rate, seconds = sys.argv[1:]
    bodies = tuple(Body(line) for line in Path(file).read_bytes().splitlines())
    load = Load(rates=(float(rate),), duration=float(seconds), warmup=1.0, timeout=TIMEOUT)
    with without_collecting():
        report = generate(Question(target=target_of(url), bodies=bodies), load)
    json.dump(report.to_json(), sys.stdout)


if __name__ == "__main__":
    main()
