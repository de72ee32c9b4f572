"""What happened to the requests of one run, counted as it happens. Told the times; reads no clock."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import inf

from microbatch.web.load.histogram import Histogram

LATE = 1e-3
"""Seconds after which a request counts as sent late: the client itself was busy when it was due."""

NO_CONNECTION, TIMED_OUT, NOT_HTTP = "connection", "timeout", "not HTTP"
"""What stands for a status where there is none."""


@dataclass(slots=True)
class Tally:
    """Times are seconds from the start of what is measured; a request that was due before 0 is warm-up.

    Rates count the answers that came inside a window, those to late warm-up requests too: what is cut off at its end
    is made up for at its beginning, so that a short run is not biased by its latency. Without a window only measured
    requests count.

    Attributes:
        window: seconds; None: until the last answer.
        target: seconds within which an answer is a good one; None: none is asked for.
        until: when the last request is due; up to then it is seen whether what waits grows.
        due: measured requests that were due.
        requests: those of them that came to an end.
        errors: those without an answer of success, by status or one of the words above.
        latency: of the answers, from the moment they were due.
        answered, good: answers that count for rates, and those of them within the target.
        ended: requests that came to an end between 0 and `until`, measured or not, well or not.
        late: requests sent more than `LATE` after they were due.
        lateness: how long after they were due requests were sent.
        waited: requests that found all connections busy, and no more allowed.
        last: when the last request came to an end.
        samples: the first text of each error.
    """

    window: float | None = None
    target: float | None = None
    until: float = inf
    due: int = 0
    requests: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    latency: Histogram = field(default_factory=Histogram)
    answered: int = 0
    good: int = 0
    ended: int = 0
    late: int = 0
    lateness: Histogram = field(default_factory=Histogram)
    waited: int = 0
    last: float = 0.0
    samples: dict[str, str] = field(default_factory=dict)

    def begin(self, due: float, now: float, *, waits: bool = False) -> None:
        """A request is sent, or `waits` for a connection."""
        if due < 0:
            return
        self.due += 1
        self.waited += waits
        self.late += now - due > LATE
        self.lateness.add(now - due)

    def finish(self, due: float, now: float, status: int | str, text: str = "") -> None:
        """A request has come to an end: with a status, or with one of the words above."""
        success = isinstance(status, int) and 200 <= status < 300
        self.ended += 0 <= now <= self.until
        if success and (due >= 0 if self.window is None else 0 <= now <= self.window):
            self.answered += 1
            self.good += self.target is not None and now - due <= self.target
        if due < 0:
            return
        self.requests += 1
        self.last = max(self.last, now)
        if success:
            self.latency.add(now - due)
        else:
            self.errors[str(status)] += 1
            self.samples.setdefault(str(status), text)
