"""Tokens that each tenant has been served, for tenants to share alike. No torch, no clock.

Who was served least begins next (virtual token counters: Y. Sheng et al., "Fairness in Serving Large Language Models",
OSDI 2024). A tenant that comes back with less than anybody present begins beside the least served of
them: nothing is saved up by staying away, and nothing owed is forgotten by going for a moment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

FEW = 16
"""Tenants that are remembered beside those present."""


class Served:
    """Counters of the tenants; those that have something under way are present."""

    def __init__(self) -> None:
        self._present = Counter[str]()
        self._tokens: dict[str, float] = {}

    @property
    def tokens(self) -> Mapping[str, float]:
        """Computed for each tenant; what `SchedulerView.served` takes. Empty while one is present alone."""
        return self._tokens if len(self._present) > 1 else {}

    def came(self, tenant: str) -> None:
        """One more sequence of a tenant waits or runs."""
        if not self._present[tenant]:
            least = min([self._tokens[each] for each in self._present if each != tenant], default=0.0)
            self._tokens[tenant] = max(least, self._tokens.get(tenant, 0.0))
        self._present[tenant] += 1

    def computed(self, tenant: str, tokens: int) -> None:
        """So many tokens were computed for a tenant that is present."""
        self._tokens[tenant] += tokens

    def left(self, tenant: str) -> None:
        """One of its sequences has ended."""
        self._present[tenant] -= 1
        if not self._present[tenant]:
            del self._present[tenant]
            if len(self._tokens) > 2 * len(self._present) + FEW:
                self._tokens = {each: self._tokens[each] for each in self._present}
