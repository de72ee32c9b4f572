"""What policies see of an item: its work, its length, and whom it may share a batch with."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from microbatch.errors import InvalidSettings
from microbatch.serving.decisions.view import NEVER, Waiting


class Describe:
    """Asks the user's callbacks about an item.

    The key of the first item counts as none: requests that are all of one form take the short way through a policy.
    """

    def __init__(
        self,
        cost: Callable[[Any], int] | None,
        length: Callable[[Any], int] | None,
        key: Callable[[Any], object] | None,
        *,
        by_form: bool,
    ) -> None:
        """
        Args:
            cost, length, key: see `DynamicBatcher`.
            by_form: without `key` items share a batch when their shapes and dtypes agree.
        """
        self._cost, self._length, self._key = cost, length, key
        self.by_cost = cost is not None or length is not None
        if key is None and by_form:
            from microbatch.serving.engine.collating import kind_of

            self._key = kind_of
        self._first = threading.Lock()
        self._usual: list[object] = []

    def facts(
        self, item: Any, arrived: float = 0.0, deadline: float = NEVER, priority: int = 0, tenant: str = ""
    ) -> Waiting:
        """The item's cost, length and key, beside what the caller knows of its request; see `Waiting`.

        Raises:
            InvalidSettings: a callback returned no whole number of 1 or more.
            Exception: whatever a callback raises.
        """
        length = 1 if self._length is None else _positive("length", self._length(item))
        cost = length if self._cost is None else _positive("cost", self._cost(item))
        key = None if self._key is None else self._short(self._key(item))
        return Waiting(arrived, cost, length, deadline, priority, key, tenant)

    def _short(self, key: object) -> object:
        if not self._usual:
            with self._first:
                if not self._usual:
                    self._usual.append(key)
        return None if key == self._usual[0] else (key,)


def _positive(name: str, value: Any) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = 0
    if number < 1 or number != value:
        raise InvalidSettings(f"{name}(item) returned {value!r}.", "Return a whole number of 1 or more.")
    return number


def length_by_mask(examples: Sequence[Any]) -> Callable[[Any], int] | None:
    """How long items are that bring a mask, and so may be padded; None for other items."""
    if not len(examples) or not isinstance(examples[0], Mapping):
        return None
    from microbatch.batch.lengths import length_of
    from microbatch.serving.engine.collating import MASK

    return length_of if MASK in examples[0] else None
