"""What is known of one request to leave, from before it is sent to a day after. Pure.

A request is written down before it is sent, for whoever is ended in between must not send it twice:
a second signal makes a training hurry. One that was begun and of which nobody knows whether it was
sent is in doubt. What the trainer says ends the doubt; where no trainer tells, the deadline does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from gpuwarden.schedule_api import STEPS, Outcome, Preemption

if TYPE_CHECKING:
    from gpuwarden.schedule_api import Cause
    from gpuwarden.scheduling.slurm.receipts import Signs

DOUBT_SECONDS: Final = 600.0
"""How long one in doubt counts as sent where no policy gives it a deadline."""
HEED_SECONDS: Final = 10.0
"""A trainer that has got on for so long since, and says nothing of a notice, was sent none."""


@dataclass(frozen=True, slots=True)
class Asking:
    """One request.

    Attributes:
        number: Slurm's, of the job.
        cause: for what it has to leave.
        successor: the slot, the window or the budget's account.
        at: step or epoch, by the policy.
        signal: its name, such as USR1.
        intended: Unix time at which it was written down.
        sent: Unix time at which Slurm had passed it on; None: not known, or not yet.
        deadline: Unix time by which it has to be gone, or None.
        run_id: of its trainer, or None.
        acknowledged: Unix time at which the trainer took note of it, or None.
        saved: Unix time at which the state with which it left was on disk, or None.
        left: Unix time at which it was first seen without its cards, or None.
    """

    number: str
    cause: Cause
    successor: str
    at: str
    signal: str
    intended: float
    sent: float | None = None
    deadline: float | None = None
    run_id: str | None = None
    acknowledged: float | None = None
    saved: float | None = None
    left: float | None = None

    @property
    def certain(self) -> bool:
        """Whether it is known to have been sent."""
        return self.sent is not None or self.acknowledged is not None

    def counts(self, now: float) -> bool:
        """Whether it counts as sent; one in doubt does so until its deadline.

        Beyond it a second signal makes nobody hurry who should not, and without one a job that got
        none would stay for ever.
        """
        if self.certain:
            return True
        until = self.intended + DOUBT_SECONDS if self.deadline is None else self.deadline
        return now <= until


def hear(asking: Asking, signs: Signs | None) -> Asking | None:
    """Take in what a job's trainer says, if anybody can tell.

    Returns:
        The request with it; None where it shows that none was sent.
    """
    if signs is None:
        return asking
    noticed = signs.acknowledged
    if noticed is not None and noticed >= asking.intended:
        return replace(asking, acknowledged=asking.acknowledged or noticed)
    heard = signs.heard
    if not asking.certain and heard is not None and heard > asking.intended + HEED_SECONDS:
        return None
    return asking


def leave(asking: Asking, signs: Signs | None, now: float) -> Asking:
    """Take in that a job has left, with what its trainer said of that."""
    heard = hear(asking, signs) or asking
    saved = None if signs is None else signs.saved
    if saved is None and signs is not None and signs.durable is not None:
        # Where only states are known, one that was taken after the notice is that of the end.
        saved = signs.on_disk if signs.durable >= asking.intended else None
    return replace(heard, saved=saved, left=now)


def told(asking: Asking, attempt: str, now: float) -> Preemption:
    """A request in the words of the contract; what was not seen is no step.

    Args:
        asking: which.
        attempt: of the job that was asked.
        now: Unix time.
    """
    times = {
        "notified": asking.sent,
        "acknowledged": asking.acknowledged,
        "saved": asking.saved,
        "left": asking.left,
    }
    outcome, words = _judged(asking, now)
    return Preemption(
        id=f"{asking.cause}-{attempt}",
        victim=asking.number,
        successor=asking.successor,
        cause=asking.cause,
        at=asking.at,
        deadline=asking.deadline,
        run_id=asking.run_id,
        steps={name: at for name in STEPS if (at := times.get(name)) is not None},
        outcome=outcome,
        lost_seconds=None if asking.saved is None else 0.0,
        words=words,
    )


def _judged(asking: Asking, now: float) -> tuple[Outcome, str]:
    if asking.left is not None:
        if not asking.certain:
            return Outcome.DONE, "It left; whether its notice had reached it, nobody knows."
        return Outcome.DONE, "It left."
    if asking.deadline is not None and now > asking.deadline:
        return Outcome.OVERDUE, (
            "Its deadline passed and it is still there: its owner or an operator ends it."
        )
    if not asking.certain:
        return Outcome.OPEN, (
            f"It was to get its signal {asking.signal}, and whether it did is not known: the "
            "scheduler or Slurm's controller went away meanwhile."
        )
    return Outcome.OPEN, f"It was asked to leave by its signal {asking.signal}."
