"""Stop strings in text that comes in pieces. Loads no torch."""

from __future__ import annotations

from collections.abc import Sequence


class StopFilter:
    """Lets text through up to the first stop string; what may be the beginning of one waits.

    The stop string that counts is the one that is complete first, and of those that end together the longest: so the
    answer depends on the text only, not on where it was cut.

    Args:
        stop: the stop strings, none of them empty.
        include: whether the stop string itself is let through.

    >>> stops = StopFilter(["END"])
    >>> stops.push("this is the E"), stops.push("ND of it")
    (('this is the ', None), ('', 'END'))
    """

    def __init__(self, stop: Sequence[str], include: bool = False) -> None:
        self._stops, self._include = tuple(stop), include
        self._longest = max(map(len, stop), default=0)
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """More text.

        Returns:
            What can be shown now, and the stop string once it is complete; nothing is shown after that.
        """
        if self._matched is not None:
            return "", self._matched
        text = self._held + text
        ends = [(place + len(stop), place, stop) for stop in self._stops if (place := text.find(stop)) >= 0]
        if ends:
            end, place, self._matched = min(ends)
            self._held = ""
            return text[: end if self._include else place], self._matched
        keep = self._begun(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def finish(self) -> str:
        """What waited in vain: the text is over."""
        held, self._held = self._held, ""
        return held

    def _begun(self, text: str) -> int:
        """Characters at the end of `text` that may be the beginning of a stop string."""
        sizes = range(min(self._longest - 1, len(text)), 0, -1)
        return next((size for size in sizes if any(each.startswith(text[-size:]) for each in self._stops)), 0)
