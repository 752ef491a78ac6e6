"""What the ticks of one life of the engine came to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpuwarden.ruleengine.verdicts import Truth

if TYPE_CHECKING:
    from collections.abc import Iterable

OUTAGE_TICKS = 3
"""More than this many ticks without a completed one is an outage; time in it does not count."""
BUDGET_SHARE = 0.5
"""Of its interval a tick may take this much until enforcement: what is later ends nothing."""
FAILURES = 3
"""After so many ticks in a row without facts Prometheus is asked less often."""
MAX_BACK_OFF_SECONDS = 60.0


class Breaker:
    """Spares a Prometheus that fails: it is asked less often then, at least once a minute.

    Args:
        tick: seconds between two ticks.
    """

    def __init__(self, tick: float) -> None:
        self._tick = tick
        self._retry_at: float | None = None
        self.failures = 0
        """Ticks in a row for which it was asked and gave no facts."""

    def wait(self, now: float) -> float:
        """Seconds until it may be asked again; 0 if now.

        Args:
            now: monotonic time.
        """
        return 0.0 if self._retry_at is None else max(0.0, self._retry_at - now)

    def failed(self, now: float) -> None:
        """It was asked at this monotonic time, and gave no facts."""
        self.failures += 1
        if self.failures >= FAILURES:
            longer = self._tick * 2.0 ** min(self.failures - FAILURES + 1, 8)
            self._retry_at = now + min(MAX_BACK_OFF_SECONDS, longer)

    def succeeded(self) -> None:
        """It gave facts: it is asked every tick again."""
        self.failures, self._retry_at = 0, None


@dataclass(slots=True)
class TickCounts:
    """What ticks came to, since the start."""

    outcomes: dict[str, int] = field(default_factory=dict)
    unknown: dict[tuple[str, str], int] = field(default_factory=dict)
    verdicts: dict[tuple[str, str], int] = field(default_factory=dict)
    last_completed: float | None = None
    last_seconds: float = 0.0
    late: str = ""
    """Why the last tick came too late to end anything, or an empty string."""
    last_failure: str = ""
    """What Prometheus last said instead of facts."""
    last_error: str = ""
    """Why the last tick was discarded, or an empty string."""

    def count(self, outcome: str) -> None:
        """One more tick of this outcome: completed, discarded, failed_rule or overrun."""
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1

    def count_verdicts(
        self, rule_id: str, truth: Truth, reasons: Iterable[str] = (), *, times: int = 1
    ) -> None:
        """More verdicts of a rule; those that could not be reached also under each reason."""
        pair = (rule_id, truth.word)
        self.verdicts[pair] = self.verdicts.get(pair, 0) + times
        if truth is not Truth.UNKNOWN:
            return
        for reason in tuple(reasons) or ("unknown",):
            key = (rule_id, reason)
            self.unknown[key] = self.unknown.get(key, 0) + times
