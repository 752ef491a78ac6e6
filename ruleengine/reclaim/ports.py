"""The port behind which a platform that owns jobs recognises, asks and ends them.

A platform's own tool ends what it owns; the nodes' agents only ask the trainer, watch, and prove by
NVML that the processes have let go. An adapter decides nothing: it recognises one attempt, does to
that attempt, and to no other, what it is told, and says what became of it. Every call has a
timeout of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from gpuwarden.ruleengine.guards import Blocked
    from gpuwarden.ruleengine.verdicts import JobFacts


class Deed(StrEnum):
    """What a platform can be told to do to an attempt."""

    TERMINATE = "terminate"
    """End it, and keep it from coming back by itself."""
    REQUEUE = "requeue"
    """End it, and let the platform start it again later."""


class Standing(StrEnum):
    """What has become of an attempt."""

    RUNNING = "running"
    """It is there, and was not told to go."""
    ENDING = "ending"
    """It was told to go, and still has its nodes."""
    ENDED = "ended"
    """The platform has taken its nodes back, and does not start it again by itself."""
    RETURNED = "returned"
    """The attempt is over, and the platform has started, or queues, another one of the job."""


@dataclass(frozen=True, slots=True)
class Claim:
    """How a platform recognises one attempt; written into the decision before anything is done.

    Attributes:
        platform: `slurm` or `kubernetes`.
        identity: what names this very attempt and no other, as JSON can hold it.
        nodes: where it runs, by the platform's names.
        grace: seconds that the platform itself waits between its SIGTERM and SIGKILL, or None
            where the adapter can set it.
        also: what else would end with it, in words; empty if nothing.
        company: the same as job ids, as far as what ends is a job of its own.
        returns: whether the platform would start it again by itself if its processes just ended.
    """

    platform: str
    identity: Mapping[str, str | int | None]
    nodes: tuple[str, ...] = ()
    grace: float | None = None
    also: str = ""
    returns: bool = False
    company: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Order:
    """One decision, as a platform's adapter carries it out.

    Attributes:
        decision_id: the engine's; marks what the platform keeps of it (a comment, an annotation).
        claim: the attempt.
        deed: what is to be done.
        grace: seconds that the job has for leaving, by the rule or what its owner was told.
        reason: one line for the owner and the platform's records.
    """

    decision_id: str
    claim: Claim
    deed: Deed
    grace: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class State:
    """What a platform says of an attempt.

    Attributes:
        standing: see `Standing`.
        word: the platform's own words, such as `CANCELLED` or `Terminating`.
        obstacle: what holds the end up (`blocked_by_finalizer`, `disruption_budget`, ...), or "".
        successor: the attempt that has come in its place, in the platform's words, or "".
        detail: more for the record, as JSON can hold it.
    """

    standing: Standing
    word: str = ""
    obstacle: str = ""
    successor: str = ""
    detail: Mapping[str, str | int | float | None] = field(
        default_factory=lambda: MappingProxyType({})
    )


class Platform(Protocol):
    """A platform that owns jobs.

    Attributes:
        name: as in `Claim.platform`.
        prefix: how the job ids of its attempts begin, such as `slurm-`.
    """

    name: str
    prefix: str

    async def find(
        self, job: JobFacts, deed: Deed, *, offenders: Collection[str] = ()
    ) -> Claim | Blocked:
        """Recognise a job's attempt, and say whether the deed can be done to it as it stands now.

        Args:
            job: by the tick's facts.
            deed: what is to be done.
            offenders: ids of all jobs that are due by the same rule now: what would end together
                with this one may only be ended if all of it is among them.

        Returns:
            The claim, or why not: not known, another attempt by now, not ours to end, would end
            what is not meant, the platform does not answer.
        """

    async def ask(self, order: Order) -> bool:
        """Give the notice that the job itself asked its platform for, if it did (Slurm's --signal).

        Safe to repeat. Returns whether something was sent.

        Raises:
            RefusedAction: it will not be done: the attempt is another one by now, or not ours.
            ServiceUnavailable: not known whether it was done.
        """

    async def end(self, order: Order) -> None:
        """Do the deed. Safe to repeat: never acts on another attempt, never counts twice.

        Raises:
            RefusedAction: it will not be done; `reason` is a word such as `target_changed`,
                `gone`, `disruption_budget`, `forbidden`.
            ServiceUnavailable: not known whether it was done; it may be asked for again.
        """

    async def state(self, order: Order) -> State:
        """What has become of the attempt.

        Raises:
            ServiceUnavailable: not known; "cannot see the job" never means that it has ended.
        """

    async def aclose(self) -> None:
        """Close connections."""
