"""Clients over HTTP whose answers are looked at one by one."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

PATIENCE = 30.0
"""Seconds after which an answer counts as none."""
PATH = "/predict"


@dataclass(frozen=True)
class Reply:
    """An answer, its headers, and when it was there.

    Attributes:
        status: of HTTP; 0 for none.
        document: as it was decoded.
        headers: with names in lower case.
        sent, came: seconds of the monotonic clock.
    """

    status: int
    document: Any
    headers: Mapping[str, str]
    sent: float
    came: float


class Client:
    """One connection that is kept."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)

    def connect(self) -> None:
        """Before the first request, which would do it too."""
        self._connection.connect()

    def ask(self, body: Any, headers: Mapping[str, str] = {}, path: str = PATH) -> Reply:
        """One request; a connection that breaks is an answer too, with status 0."""
        sent = time.monotonic()
        try:
            self._connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json", **headers})
            response = self._connection.getresponse()
            content = response.read()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            return Reply(0, repr(error), {}, sent, time.monotonic())
        came = time.monotonic()
        with suppress(ValueError):
            content = json.loads(content)
        return Reply(response.status, content, {k.lower(): v for k, v in response.getheaders()}, sent, came)


def together(port: int, bodies: Sequence[Any], headers: Mapping[str, str] = {}, path: str = PATH) -> list[Reply]:
    """Answers to requests that are sent at once, each on a connection that is there already."""
    barrier = threading.Barrier(len(bodies))

    def one(body: Any) -> Reply:
        client = Client(port)
        client.connect()
        barrier.wait()
        return client.ask(body, headers, path)

    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(one, bodies))


def metric(port: int, name: str, label: str = "") -> float:
    """A number of `/metrics`, summed over those of its labels that have `label` in them."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    rows = [line for line in lines if line.partition("{")[0].partition(" ")[0] == name and label in line]
    return sum(float(line.rpartition(" ")[2]) for line in rows)
