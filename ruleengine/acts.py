"""What is done to a job, from the softest to the hardest, and what became of each act.

::

    checkpoint   the trainer is asked to save now; nobody loses a card
    yield        it is asked to finish its epoch, save, leave and be queued again; no signal follows
    requeue      its platform ends it, and starts it again later
    terminate    it is ended, and held

One stage does each at most once to a job, and none is followed by a softer one. Whoever does not
heed a request goes on to the next stage at that stage's own time, and not before.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from gpuwarden.ruleengine.model import Action

if TYPE_CHECKING:
    from collections.abc import Sequence


CHECKPOINT_SECONDS = 300.0
"""How long a request to save stands where the stage does not say."""
MAX_SOFT_TRIES = 2
"""How often a request that is refused, or that never arrives, is made in all: then the case goes
on, so that a node which cannot ask protects nobody for ever."""
LAST_STAGE = "severe-terminate"
"""Key of the only stage that may terminate; the one stage that acted before there were others."""


class ActState(StrEnum):
    """What has become of an act; also the words of a decision's state."""

    AUTHORISED = "authorised"
    """On disk; it may or may not have reached whoever carries it out."""
    ACTING = "acting"
    """It was taken on."""
    VERIFIED = "verified"
    """The job has let go of its cards, by NVML."""
    DONE = "done"
    """What was asked for was done: a state is saved."""
    INCOMPLETE = "incomplete"
    """Something survived, or NVML still lists it."""
    FAILED = "failed"
    """Whoever should carry it out met an error of its own."""
    REFUSED = "refused"
    """It was not taken on."""
    LAPSED = "lapsed"
    """It never arrived, and cannot arrive any more."""
    UNHEEDED = "unheeded"
    """The job was asked, and had not done so when its time was over."""
    UNDELIVERABLE = "undeliverable"
    """No trainer that could be asked is known in the job, or it cannot read requests."""
    WITHDRAWN = "withdrawn"
    """The request was taken back, since its reason is gone."""
    SKIPPED = "skipped"
    """It cannot be done to this job at all, and was not tried."""


OPEN_ACT = frozenset({ActState.AUTHORISED, ActState.ACTING})
_AGAIN = frozenset({ActState.REFUSED, ActState.LAPSED})
_NOT_PUT = frozenset({ActState.SKIPPED})


@dataclass(frozen=True, slots=True)
class Act:
    """What a stage has done to the job of a case; the last try counts.

    Attributes:
        key: name of the stage within its rule.
        do: checkpoint, yield, requeue or terminate.
        decision_id: the decision, or "" where none was made.
        at: Unix time of the decision.
        state: what has become of it.
        tries: decisions of this stage that were refused or never arrived, this one included.
    """

    key: str
    do: str
    decision_id: str
    at: float
    state: ActState = ActState.AUTHORISED
    tries: int = 0

    @property
    def open(self) -> bool:
        """Whether its outcome is not known yet."""
        return self.state in OPEN_ACT

    @property
    def spent(self) -> bool:
        """Whether its stage is over for this case, once it is not open any more."""
        if self.open or self.state is ActState.WITHDRAWN:
            return False
        if self.state in _AGAIN:
            return self.do != Action.TERMINATE and self.tries >= MAX_SOFT_TRIES
        return True

    def became(self, state: ActState) -> Act:
        """The act with its next state."""
        more = 1 if state in _AGAIN and self.state not in _AGAIN else 0
        return dataclasses.replace(self, state=state, tries=self.tries + more)


@dataclass(frozen=True, slots=True)
class Promise:
    """What the owner was told of a stage: no rule that is changed later falls short of it. Seconds.

    Attributes:
        after: since the rule's `for` was met; keeps not included.
        notice_delivered_for: age that the notice will have.
        grace: time for leaving.
        key: name of the stage.
    """

    after: float
    notice_delivered_for: float
    grace: float
    key: str = LAST_STAGE


def hardest(acts: Sequence[Act]) -> int:
    """Rank of the hardest act that was decided, 0 if none was."""
    return max((Action(a.do).rank for a in acts if a.state not in _NOT_PUT), default=0)


def with_act(acts: Sequence[Act], act: Act) -> tuple[Act, ...]:
    """The acts with one in the place of its stage's last."""
    return (*(other for other in acts if other.key != act.key), act)
