"""What every kind of several ranks has: a place to meet, what went over the wire, and errors told to all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from microbatch.errors import RankFailed
from microbatch.training.ranks.meeting import Meeting

MARKED = "_microbatch_told"
"""Set on an error that all ranks have heard of already."""


class Several:
    """See `microbatch.training.ranks.one_process.Ranks`."""

    alone = False
    _meeting: Meeting

    @property
    def rank(self) -> int:
        return self._meeting.rank

    @property
    def number(self) -> int:
        return self._meeting.size

    @property
    def meeting(self) -> Meeting:
        return self._meeting

    @property
    def sent_bytes(self) -> int:
        return round(self._meeting.traffic.bytes)

    @property
    def calls(self) -> int:
        return self._meeting.traffic.calls

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """An error of this rank reaches the others, once."""
        try:
            yield
        except RankFailed:
            raise
        except Exception as error:
            if not getattr(error, MARKED, False):
                self._meeting.tell(error)
            raise
