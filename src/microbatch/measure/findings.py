"""What was found out about a machine, figure by figure, each with how."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Findings:
    """Figures with their sources, as they come in.

    Attributes:
        conditions: what holds for all of them, as in ``measured 2026-11-30, 2 threads``.
    """

    conditions: str
    values: dict[str, float] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)

    def add(self, key: str, value: float, how: str) -> None:
        """One figure, to four digits; ``constants.NAME`` and ``flops.DTYPE`` for those in tables."""
        self.values[key] = float(f"{value:.4g}") if isinstance(value, float) else value
        self.sources[key] = f"{how}; {self.conditions}"

    def table(self, name: str) -> dict[str, float]:
        """What was added under ``name.``, without that."""
        return {key.removeprefix(f"{name}."): value for key, value in self.values.items() if key.startswith(f"{name}.")}
