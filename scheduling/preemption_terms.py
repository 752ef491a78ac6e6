"""What preemption is about: cards, requests, jobs that run, terms, and choices.

Also what can be said of one job alone. Times are Unix seconds; `now` is passed in.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gpuwarden.scheduling.policies import Policy

At = Literal["step", "epoch"]
TRUST_SECONDS = 7200.0
"""How long an epoch may keep a job from being told: how long one takes is its owner's own word."""


@dataclass(frozen=True, slots=True, order=True)
class Pool:
    """Cards of one kind that can serve one job together.

    Attributes:
        kind: name of the kind of cards, as the policy has it.
        host: the machine that they are in; empty where an engine counts a kind as a whole.
    """

    kind: str
    host: str = ""


@dataclass(frozen=True, slots=True)
class Terms:
    """What the policy says of preemption.

    Attributes:
        values: priority -> its value; higher goes first.
        preempts: priority -> the priorities whose jobs may be asked to leave for it.
        minimum_run: seconds that an attempt may run undisturbed.
        at: where a job that is asked leaves: at the next `step`, or the end of its `epoch`.
        deadline: seconds from the notice to the end of patience.
        back_off: seconds for which a job that had to leave is not asked again after it came back;
            doubled with each further time within `per`.
        times: a job that had to leave so often within `per` is not asked again.
        per: seconds.
    """

    values: Mapping[str, int]
    preempts: Mapping[str, frozenset[str]]
    minimum_run: float
    at: At
    deadline: float
    back_off: float
    times: int
    per: float

    def value(self, priority: str) -> int:
        """Of a priority; one that the policy does not know (any more) is worth nothing."""
        return self.values.get(priority, 0)


@dataclass(frozen=True, slots=True)
class Request:
    """A job, or a booking, that wants cards.

    Attributes:
        id: of the job or booking.
        gpus: how many cards, all of one kind.
        kinds: names of the kinds that will do.
        priority: of a job; None for a booking: it may ask any job that has no booking itself, and
            neither `minimum_run` nor `times` holds it off, for it was announced.
        team: whose quota counts.
        spread: whether the cards may be in several hosts.
        reclaims: whether its team stays within its own quota with it: then jobs of its class and
            below that run on borrowed cards may be asked as well.
    """

    id: str
    gpus: int
    kinds: frozenset[str]
    priority: str | None = None
    team: str | None = None
    spread: bool = False
    reclaims: bool = False


@dataclass(frozen=True, slots=True)
class Told:
    """A notice that stands.

    Attributes:
        successor: id of the request that it was given for; None: for another cause.
        deadline: Unix time.
    """

    successor: str | None
    deadline: float


@dataclass(frozen=True, slots=True)
class Running:
    """A job that holds cards.

    Attributes:
        id: of the job.
        priority: its class.
        holds: pool -> cards.
        started: when this attempt began to train, or, where that is not known, was started.
        saved: when its newest durable state was taken; None: not known, so everything since the
            start counts as lost.
        team: whose quota it counts against.
        epoch_seconds: how long its epochs take, or None.
        told: the notice that stands, or None.
        booked: whether it runs in a booking of its team's: nobody may ask it to leave.
        borrowed: whether its team holds more than its own cards with it.
        deaf: whether it cannot be asked: it is ending by itself, or its files cannot be written.
    """

    id: str
    priority: str
    holds: Mapping[Pool, int]
    started: float
    saved: float | None = None
    team: str | None = None
    epoch_seconds: float | None = None
    told: Told | None = None
    booked: bool = False
    borrowed: bool = False
    deaf: bool = False

    @property
    def gpus(self) -> int:
        """How many cards it holds."""
        return sum(self.holds.values())

    def lost_gpu_seconds(self, now: float) -> float:
        """Work that is lost if it ends now without saving."""
        # A state of before this attempt is what it was resumed from.
        since = self.started if self.saved is None else max(self.started, self.saved)
        return max(0.0, now - since) * self.gpus


class Code(StrEnum):
    """Why nobody is told."""

    FITS = "fits"
    COMING = "coming"
    TOO_LARGE = "too_large"
    QUOTA = "quota"
    NO_VICTIM = "no_victim"
    NOT_YET = "not_yet"
    OVERDUE = "overdue"


@dataclass(frozen=True, slots=True)
class Victim:
    """A job to be told now.

    Attributes:
        id: of the job.
        cards: that it holds.
        lost_gpu_seconds: that end without a save would cost now.
        at: step or epoch.
        last: whether it is not asked again for a while, since it then had to leave as often as the
            policy allows.
        deadline: Unix time.
        words: one sentence for its owner.
    """

    id: str
    cards: int
    lost_gpu_seconds: float
    at: At
    last: bool
    deadline: float
    words: str


@dataclass(frozen=True, slots=True)
class Choice:
    """The decision on one request.

    Attributes:
        victims: to be told now; empty unless the whole request fits once they have left.
        coming: ids of jobs that were told for this request before, and have time left.
        overdue: ids of jobs that were told for it and are past their deadline: an alert each, and
            no second notice.
        code: why nobody is told; None if somebody is.
        words: one sentence: who leaves, or why nobody does.
        again: Unix time from which on the answer may differ by time alone, or None.
        pools: where the request will have its cards.
    """

    victims: tuple[Victim, ...] = ()
    coming: tuple[str, ...] = ()
    overdue: tuple[str, ...] = ()
    code: Code | None = None
    words: str = ""
    again: float | None = None
    pools: tuple[Pool, ...] = ()


@dataclass(frozen=True, slots=True)
class Room:
    """What there is.

    Attributes:
        total: pool -> cards that could ever serve a job (not off limits, not broken).
        free: pool -> cards that this request may take now: nobody's, with their memory free, and
            not kept for somebody before it.
        quota: (team, kind) -> cards that the team may hold at once, borrowed ones included; a
            pair that is not there is not limited.
    """

    total: Mapping[Pool, int]
    free: Mapping[Pool, int]
    quota: Mapping[tuple[str, str], int] = field(default_factory=dict)


# ---------------------------------------------------------------------------------------------
# Questions about one job


def recent(history: Sequence[float], terms: Terms, now: float) -> tuple[float, ...]:
    """A job's preemptions that still count, oldest first.

    Args:
        history: when it was told to leave and left, in Unix time, in any order.
        terms: of the policy.
        now: Unix time.
    """
    return tuple(sorted(time for time in history if now - terms.per < time <= now))


def is_worn_out(history: Sequence[float], terms: Terms, now: float) -> bool:
    """Whether a job had to leave as often as allowed, and so is not told again for a while."""
    return len(recent(history, terms, now)) >= terms.times


def earliest_notice(
    job: Running, terms: Terms, *, history: Sequence[float] = (), now: float
) -> float:
    """From when on a job may be told, in Unix time.

    After its minimum run, one epoch past the state that it began from, and the back-off, which
    doubles with each time that it had to leave: so it never comes back for nothing.

    Args:
        job: that runs.
        terms: of the policy.
        history: when it had to leave before.
        now: Unix time.
    """
    left = len(recent(history, terms, now))
    # 2**20 back-offs are longer than any `per`; the exponent is bounded for odd policies.
    rest = min(terms.back_off * 2.0 ** min(left - 1, 20), terms.per) if left else 0.0
    epoch = min(job.epoch_seconds or 0.0, TRUST_SECONDS)
    return job.started + max(terms.minimum_run, epoch, rest)


def terms_of(policy: Policy) -> Terms | None:
    """What a policy says of preemption; None where it lets nobody be asked."""
    said = policy.preemption
    if said is None:
        return None
    return Terms(
        values={each.name: each.value for each in policy.priorities},
        preempts={each.name: frozenset(each.preempts) for each in policy.priorities},
        minimum_run=said.minimum_run,
        at=said.notice,
        deadline=said.deadline,
        back_off=said.back_off,
        times=said.at_most.times,
        per=said.at_most.per,
    )
