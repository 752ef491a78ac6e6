"""GPU time that came back: how long others hold the cards of jobs that were ended.

Counted for a day after each proven end, and only while another user's job holds the card. What
stays free has been given back to nobody; what would have become of the job is not known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from gpuwarden.ruleengine.model import Action
from gpuwarden.ruleengine.slices import share_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from gpuwarden.ruleengine.engine import Engine
    from gpuwarden.ruleengine.records import Decision
    from gpuwarden.ruleengine.verdicts import FleetFacts

HORIZON_SECONDS = 86400.0
"""How long after an end its cards are watched."""
PROVEN = frozenset({"verified", "done"})
"""Results of decisions after which the cards are free."""


class Taken(NamedTuple):
    """From whom a card was taken, and by which rule."""

    job_id: str
    user: str
    team: str
    rule: str


class ReclaimedHours:
    """GPU seconds by whom they were taken from, since the engine's start.

    Prometheus bridges restarts: a counter that begins anew loses nothing there.

    Args:
        longest: seconds between two ticks of which more are not counted.
    """

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self._seen_at: float | None = None
        self._seconds: dict[Taken, float] = {}

    def count(self, facts: FleetFacts, engine: Engine) -> None:
        """Count for a tick of an engine, by its ledger and its directory."""
        drills = engine.drills.rule_id
        self.add(
            facts,
            engine.ledger.finished_since(engine.clock.wall() - HORIZON_SECONDS),
            teams={name: user.team for name, user in engine.rulebook.directory.users.items()},
            apart={drills} if drills else (),
            now=engine.clock.monotonic(),
        )

    def add(
        self,
        facts: FleetFacts,
        decisions: Iterable[Decision],
        *,
        teams: Mapping[str, str],
        apart: Collection[str],
        now: float,
    ) -> None:
        """Count what others hold now for the time since the last tick that knew anything.

        Args:
            facts: of the tick.
            decisions: those that had their result within `HORIZON_SECONDS`, oldest first.
            teams: user -> team, of the directory.
            apart: rules whose ends free nothing that anybody waited for: drills.
            now: seconds of the monotonic clock.
        """
        last, self._seen_at = self._seen_at, now
        passed = 0.0 if last is None else min(now - last, self._longest)
        taken: dict[str, Taken] = {}
        for each in decisions:
            if each.state in PROVEN and Action(each.action).takes and each.rule_id not in apart:
                whose = Taken(each.job_id, each.user, teams.get(each.user) or "none", each.rule_id)
                # A card that was reclaimed again came back by the later end alone.
                taken |= dict.fromkeys(each.gpus, whose)
        known = set(taken.values())
        self._seconds = {whose: n for whose, n in self._seconds.items() if whose in known}
        self._seconds |= {whose: 0.0 for whose in known if whose not in self._seconds}
        if not taken:
            return
        for job in facts.jobs.values():
            if not job.fresh:
                continue
            for gpu in job.gpus:
                lost = taken.get(gpu.uuid)
                if lost is not None and job.user and job.user != lost.user:
                    held = share_of(gpu.name) / max(gpu.tenants, 1)
                    self._seconds[lost] += passed * held

    def seconds(self) -> Mapping[Taken, float]:
        """GPU seconds; also of ends whose cards nobody has taken yet: a counter from 0 on."""
        return dict(sorted(self._seconds.items()))
