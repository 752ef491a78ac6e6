"""What the ticks of one life of the engine came to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpuwarden.ruleengine.verdicts import Truth

if TYPE_CHECKING:
    from collections.abc import Iterable

OUTAGE_TICKS = 3
"""More than this many ticks without a completed one is an outage; time in it does not count."""


@dataclass(slots=True)
class TickCounts:
    """What ticks came to, since the start."""

    outcomes: dict[str, int] = field(default_factory=dict)
    unknown: dict[tuple[str, str], int] = field(default_factory=dict)
    verdicts: dict[tuple[str, str], int] = field(default_factory=dict)
    last_completed: float | None = None
    last_seconds: float = 0.0
    last_error: str = ""
    """Why the last tick was discarded, or an empty string."""

    def count(self, outcome: str) -> None:
        """One more tick of this outcome: completed, discarded, failed_rule or overrun."""
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1

    def count_verdicts(
        self, rule_id: str, truth: Truth, reasons: Iterable[str] = (), *, times: int = 1
    ) -> None:
        """More verdicts of a rule; those that could not be reached also under each reason."""
        pair = (rule_id, truth.name.lower())
        self.verdicts[pair] = self.verdicts.get(pair, 0) + times
        if truth is not Truth.UNKNOWN:
            return
        for reason in tuple(reasons) or ("unknown",):
            key = (rule_id, reason)
            self.unknown[key] = self.unknown.get(key, 0) + times
