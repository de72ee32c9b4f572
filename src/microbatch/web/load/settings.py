"""What is asked of a server, checked before anything is sent."""

from __future__ import annotations

from dataclasses import dataclass

from microbatch.errors import InvalidSettings
from microbatch.serving.decisions.traffic import TRAFFIC, Times
from microbatch.web.load.schedule import arrivals


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is asked of a server.

    Attributes:
        clients: closed loops of so many, one run after the other.
        rates: open loops of so many requests a second, one run after the other; a file may keep its own.
        traffic: of open loops: a name of `TRAFFIC` or a file of times.
        ramp: double the rate as long as the server keeps up.
        duration: seconds of each run; None where `requests` or a file end it.
        requests: of each run; where a duration is given too, whatever ends first.
        warmup: seconds before each run, which are not counted.
        target: seconds within which an answer is a good one.
        timeout: seconds from the moment a request was due after which it has failed.
        connections: that an open loop may have at once.
        seed: of random traffic.
    """

    clients: tuple[int, ...] = ()
    rates: tuple[float, ...] = ()
    traffic: str = "poisson"
    ramp: bool = False
    duration: float | None = 10.0
    requests: int | None = None
    warmup: float = 1.0
    target: float | None = None
    timeout: float = 30.0
    connections: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        has_end = self.duration is not None or self.requests is not None
        is_recorded = self.traffic not in TRAFFIC
        if bool(self.clients) == bool(self.rates or is_recorded):
            raise InvalidSettings("A load is either of clients or of a rate.", "Give one of them.")
        if self.ramp and len(self.rates) != 1:
            raise InvalidSettings("A ramp starts at one rate.", "Give one, as in --rate 50 --ramp.")
        if not (has_end or is_recorded):
            raise InvalidSettings("The load would never end.", "Give a duration or a number of requests.")

    @property
    def window(self) -> float | None:
        """Seconds that rates are taken over; None: until the last answer, as a file may end before its time."""
        return self.duration if self.requests is None and self.traffic in TRAFFIC else None

    def times(self, rate: float | None) -> Times:
        """When the requests of an open loop are due.

        Raises:
            InvalidSettings: traffic that there is not, or a file that cannot be used.
        """
        return arrivals(
            self.traffic, rate, duration=self.duration, requests=self.requests, warmup=self.warmup, seed=self.seed
        )
