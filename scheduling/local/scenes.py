"""What a plan is made from, and what it is: jobs that wait and work, cards, starts and notices.

Times are Unix seconds. Nothing here knows a process or a card's number.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpuwarden.schedule_api import Cause
from gpuwarden.scheduling.preemption_terms import Running

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gpuwarden.scheduling.preemption_terms import At, Pool, Told
    from gpuwarden.scheduling.slots import Slot


PROMISED_SECONDS = 3600.0
"""How long a job goes first for which others have left: where it could not start by then, what they
left is somebody else's, and it waits like all."""
LATE_SECONDS = 60.0
"""That a job which should have ended is expected to take at least."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A job without cards.

    Attributes:
        id: of the job.
        priority: name of the policy's.
        team: likewise.
        gpus: cards, all of one kind.
        submitted: when it came; it keeps its place when it comes back.
        kind: the only kind of cards that will do; None: any that the policy has.
        spread: whether its cards may be in several hosts.
        seconds: that it is expected to run from its start; None: nobody can tell.
        window: name of the policy's, outside of which it does not run.
        not_before: it does not start before.
        held: why somebody, or the engine, holds it; empty: nobody does.
        unmet: ids of jobs that must have succeeded, and are not done.
        broken: ids of such jobs that have failed.
        ran: whether it ran before and comes back.
        user: whose it is: in a slot, jobs of whoever booked it go first.
    """

    id: str
    priority: str
    team: str
    gpus: int
    submitted: float
    kind: str | None = None
    spread: bool = False
    seconds: float | None = None
    window: str | None = None
    not_before: float | None = None
    held: str = ""
    unmet: tuple[str, ...] = ()
    broken: tuple[str, ...] = ()
    ran: bool = False
    user: str = ""


@dataclass(frozen=True, slots=True)
class Working:
    """A job that holds cards.

    Attributes:
        id, priority, team, window: as of `Waiting`.
        holds: pool -> cards.
        since: when it got them.
        began: when this attempt began to train; None: not seen yet, and `since` counts.
        saved: when its newest durable state was taken; None: not known.
        epoch_seconds: how long its epochs take, or None.
        ends: when it was expected to end by itself, or None; see `expected_end`.
        told: the notice that stands, or None.
        cause: of that notice.
        final: whether the notice cannot be taken back any more: it was followed, or overdue.
        deaf: whether it cannot be asked.
        user: as of `Waiting`.
    """

    id: str
    priority: str
    team: str
    holds: Mapping[Pool, int]
    since: float
    window: str | None = None
    began: float | None = None
    saved: float | None = None
    epoch_seconds: float | None = None
    ends: float | None = None
    told: Told | None = None
    cause: Cause = Cause.PRIORITY
    final: bool = False
    deaf: bool = False
    user: str = ""

    @property
    def gpus(self) -> int:
        """How many cards it holds."""
        return sum(self.holds.values())

    def cards(self, kind: str) -> int:
        """How many of a kind."""
        return sum(count for pool, count in self.holds.items() if pool.kind == kind)

    def expected_end(self, now: float) -> float | None:
        """When it should end by itself, as far as that can be told at a moment; None: it cannot.

        One that takes longer than it was expected to is taken to need as long again as it is late:
        a prediction that was too short grows step by step (as in Tsafrir, Etsion and Feitelson,
        IEEE TPDS 18, 2007). Were it to end at any moment, cards would be kept beside it for whoever
        waits, for as long as it runs, and nobody could use them meanwhile.
        """
        if self.ends is None or self.ends > now:
            return self.ends
        return now + max(LATE_SECONDS, now - self.ends)

    def running(self, *, booked: bool, borrowed: bool) -> Running:
        """As the choice of victims sees it."""
        return Running(
            id=self.id,
            priority=self.priority,
            holds=self.holds,
            started=self.since if self.began is None else self.began,
            saved=self.saved,
            team=self.team,
            epoch_seconds=self.epoch_seconds,
            told=self.told,
            booked=booked,
            borrowed=borrowed,
            deaf=self.deaf or self.final,
        )


@dataclass(frozen=True, slots=True)
class Scene:
    """Everything that a plan depends on, besides the policy and the time.

    Attributes:
        total: pool -> cards that could ever serve a job.
        free: pool -> cards that are nobody's now, with their memory free.
        waiting: jobs without cards, in any order.
        working: jobs with cards, in any order.
        slots: of bookings, active and ahead.
        history: job id -> when it had to leave for others.
        spent: team -> why it starts nothing: its hard budget.
        leaving: teams whose running jobs are asked to leave for that.
        promised: jobs that wait, and for which others have left a moment ago.
    """

    total: Mapping[Pool, int]
    free: Mapping[Pool, int]
    waiting: Sequence[Waiting] = ()
    working: Sequence[Working] = ()
    slots: Sequence[Slot] = ()
    history: Mapping[str, Sequence[float]] = field(default_factory=dict)
    spent: Mapping[str, str] = field(default_factory=dict)
    leaving: frozenset[str] = frozenset()
    promised: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Start:
    """A job that gets its cards now: pool -> how many."""

    id: str
    holds: Mapping[Pool, int]


@dataclass(frozen=True, slots=True)
class Notice:
    """A job that is asked to leave now.

    Attributes:
        victim: id of the job.
        cause: why.
        successor: id of the job or slot that wants its cards; the window's or team's name else.
        at: step or epoch.
        deadline: Unix time.
        words: one sentence for its owner.
    """

    victim: str
    cause: Cause
    successor: str
    at: At
    deadline: float
    words: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Why a job does not start.

    Attributes:
        code: a stable word.
        words: one sentence.
        held: whether no card would help: somebody, a window, or a budget must let it go first.
        must_end: ids of jobs that would have to end.
        again: Unix time from which on time alone may change the answer, or None.
    """

    code: str
    words: str
    held: bool = False
    must_end: tuple[str, ...] = ()
    again: float | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be done now.

    Attributes:
        starts: in their order.
        notices: to be given.
        withdrawn: ids of jobs whose notice is taken back.
        waits: job id -> why it waits.
        order: ids of jobs that wait, the next one first.
        kept: slot id -> cards that are kept for it now, free or used by its team.
        used: slot id -> ids of jobs that use it.
        overdue: ids of jobs that were told for somebody and are past their deadline.
        again: Unix time at which to plan anew though nothing happened, or None.
    """

    starts: tuple[Start, ...] = ()
    notices: tuple[Notice, ...] = ()
    withdrawn: tuple[str, ...] = ()
    waits: Mapping[str, Wait] = field(default_factory=dict)
    order: tuple[str, ...] = ()
    kept: Mapping[str, int] = field(default_factory=dict)
    used: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    overdue: tuple[str, ...] = ()
    again: float | None = None
