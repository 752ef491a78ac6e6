"""Which GPU time teams have held, as a counter for Prometheus, which knows it over any time.

A card that several jobs hold is shared out among them; a MIG instance counts as a card. What the
engine did not see (it or Prometheus was down, a node was dark) nobody is charged for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuwarden.ruleengine.reclaimed_hours import ReclaimedHours

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpuwarden.ruleengine.engine import Engine
    from gpuwarden.ruleengine.verdicts import FleetFacts


class Usage:
    """GPU seconds by team since the engine's start; Prometheus bridges restarts by `increase`.

    Args:
        longest: seconds between two ticks of which more are not counted.
    """

    def __init__(self, longest: float) -> None:
        self.reclaimed = ReclaimedHours(longest)
        """What came back of cards that were taken."""
        self._longest = longest
        self._seen_at: float | None = None
        self._seconds: dict[str, float] = {}

    def count(self, facts: FleetFacts, engine: Engine) -> None:
        """Count for a tick of an engine, what was reclaimed as well."""
        self.add(facts, engine.clock.monotonic())
        self.reclaimed.count(facts, engine)

    def add(self, facts: FleetFacts, now: float) -> None:
        """Count what jobs hold now for the time since the last tick that knew anything.

        Args:
            facts: of the tick.
            now: seconds of the monotonic clock.
        """
        last, self._seen_at = self._seen_at, now
        passed = 0.0 if last is None else min(now - last, self._longest)
        for job in facts.jobs.values():
            if job.team and job.fresh:
                held = sum(1.0 / max(gpu.tenants, 1) for gpu in job.gpus)
                self._seconds[job.team] = self._seconds.get(job.team, 0.0) + passed * held

    def seconds(self, teams: Iterable[str]) -> dict[str, float]:
        """Team -> GPU seconds; also of these teams that have held nothing: a counter from 0 on."""
        names = {team for team in teams if team} | self._seconds.keys()
        return {team: self._seconds.get(team, 0.0) for team in sorted(names)}
