"""Whose turn it is: by class, by what teams and users hold, and by who came first. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpuwarden.scheduling.local.slot_users import value_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpuwarden.scheduling.local.scenes import Waiting, Working
    from gpuwarden.scheduling.policies import Policy


@dataclass(slots=True)
class Turns:
    """What is held, which grows while a plan is made, and the order that follows from it.

    Attributes:
        policy: in force.
        first: jobs for which somebody leaves, or has left: they go before others of their class, or
            the cards would be another's, and somebody else would have to leave as well.
        held: (team, kind) -> cards, those that the plan gives or promises included.
        by_user: (team, user) -> cards.
    """

    policy: Policy
    first: frozenset[str] = frozenset()
    held: dict[tuple[str, str], int] = field(default_factory=dict)
    by_user: dict[tuple[str, str], int] = field(default_factory=dict)

    def read(self, working: Iterable[Working]) -> None:
        """Count what is held already."""
        for job in working:
            for pool, cards in job.holds.items():
                self.count(job, pool.kind, cards)

    def count(self, job: Waiting | Working, kind: str, cards: int) -> None:
        """Count cards for a job."""
        for counts, key in ((self.held, (job.team, kind)), (self.by_user, (job.team, job.user))):
            counts[key] = counts.get(key, 0) + cards

    def own(self, team: str, kind: str) -> int:
        """A team's own cards of a kind."""
        known = self.policy.team(team)
        return 0 if known is None else known.own(kind)

    def kinds(self, job: Waiting) -> list[str]:
        """Names of the kinds that will do, the cheapest first."""
        return [job.kind] if job.kind is not None else [card.name for card in self.policy.cards]

    def is_own(self, job: Waiting, kind: str) -> bool:
        """Whether a team stays within its own cards of a kind with a job."""
        return self.held.get((job.team, kind), 0) + job.gpus <= self.own(job.team, kind)

    def turn(self, job: Waiting) -> tuple[float, ...]:
        """What is smallest goes first."""
        team = self.policy.team(job.team)
        held = sum(count for (name, _kind), count in self.held.items() if name == job.team)
        share = 1 if team is None else team.share
        value = value_of(self.policy, job.priority)
        return (-value, job.id not in self.first, held / share, job.submitted)

    def line_up(self, jobs: list[Waiting]) -> None:
        """Put jobs of one class and team in order, the next one last.

        The user who holds least goes first, then whoever came first: nobody keeps colleagues
        waiting by submitting a thousand jobs before theirs.
        """
        jobs.sort(
            key=lambda job: (
                job.id not in self.first,
                self.by_user.get((job.team, job.user), 0),
                job.submitted,
                job.id,
            ),
            reverse=True,
        )
