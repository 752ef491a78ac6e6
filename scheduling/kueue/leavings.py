"""A job that was asked to leave, and how far that has come: kept on its Workload. Pure.

It is written before anything is done, so that whoever comes after a crash finds it and finishes it.
Whoever may write Workloads could forge one: it can only keep a job parked as long as it says, and
asks for nothing that its writer could not do directly.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, Self

from gpuwarden.schedule_api import STEPS, Cause, Outcome, Preemption

if TYPE_CHECKING:
    from collections.abc import Mapping

CANNOT: Final = "-"
"""In place of a request: the engine cannot ask this job, for it does not know it."""
ELSEWHERE: Final = "?"
"""In place of a request: somebody else has asked it already."""
TRYING: Final = "!"
"""In place of a request: the engine was asked for it and did not answer."""
MAX_BYTES: Final = 8 * 1024
MAX_HISTORY: Final = 32


class Phase(StrEnum):
    """Where a leave stands."""

    TOLD = "told"
    """It is to be asked, or was asked; it runs."""
    PARKED = "parked"
    """We have taken it out of the queue: its pods get the signal, and nothing brings it back."""
    RETURNED = "returned"
    """It is in the queue again; what is left is to see the cards free and the successor start."""


@dataclass(frozen=True, slots=True)
class Leaving:
    """A leave. Times are Unix seconds.

    Attributes:
        id: of the decision, and the key of the request to the engine.
        cause: why.
        successor: id of the job, slot, window or budget that wants the cards.
        at: step or epoch.
        begun: when it was decided.
        deadline: when the job is parked at the latest.
        phase: where it stands.
        leave: the engine's id of the request; empty where it was not taken on yet.
        lost: GPU-seconds that an end without a save would have cost, or None.
        parked: when it was taken out of the queue, or None.
        until: it is not brought back before; None: as soon as the successor has its cards.
        steps: of schedule_api.STEPS, each with its time.
        words: one sentence for its owner.
    """

    id: str
    cause: Cause
    successor: str
    at: str
    begun: float
    deadline: float
    phase: Phase = Phase.TOLD
    leave: str = ""
    lost: float | None = None
    parked: float | None = None
    until: float | None = None
    steps: Mapping[str, float] = field(default_factory=dict)
    words: str = ""

    def patience(self, grace: float) -> float:
        """Until when it is counted on, once it has had the signal; before that, without an end.

        Args:
            grace: seconds that its pods have.
        """
        if self.parked is None:
            return math.inf
        return max(self.deadline, self.parked + grace)

    @property
    def request(self) -> str:
        """The engine's id of the request, or empty where there is none."""
        return "" if self.leave in (CANNOT, ELSEWHERE, TRYING) else self.leave

    def encode(self) -> str:
        """As the annotation has it."""
        data = {
            key: value
            for key, value in dataclasses.asdict(self).items()
            if value not in (None, "", {})
        }
        return json.dumps(data, sort_keys=True, separators=(",", ":"))

    @classmethod
    def decode(cls, text: object) -> Self | None:
        """Read an annotation; None where it is none of ours."""
        if not isinstance(text, str) or len(text) > MAX_BYTES:
            return None
        try:
            data = json.loads(text)
            return cls(
                id=_text(data["id"]),
                cause=Cause(data["cause"]),
                successor=_text(data["successor"]),
                at=_text(data["at"]),
                begun=_number(data["begun"]),
                deadline=_number(data["deadline"]),
                phase=Phase(data["phase"]),
                leave=_text(data.get("leave", "")),
                lost=None if data.get("lost") is None else _number(data["lost"]),
                parked=None if data.get("parked") is None else _number(data["parked"]),
                until=None if data.get("until") is None else _number(data["until"]),
                steps={
                    step: _number(moment)
                    for step, moment in data.get("steps", {}).items()
                    if step in STEPS
                },
                words=_text(data.get("words", "")),
            )
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None

    def seen(self, **steps: float | None) -> Self:
        """The same with steps that were seen; the first time of each stays."""
        new = {name: moment for name, moment in steps.items() if moment is not None}
        return dataclasses.replace(self, steps={**new, **self.steps})

    def told(self, victim: str, run_id: str | None, outcome: Outcome) -> Preemption:
        """As the schedule tells it."""
        order = {name: self.steps[name] for name in STEPS if name in self.steps}
        return Preemption(
            id=self.id,
            victim=victim,
            successor=self.successor,
            cause=self.cause,
            at=self.at,
            deadline=self.deadline,
            run_id=run_id,
            steps=order,
            outcome=outcome,
            # What was saved is not lost; what was not is known only where it was counted.
            lost_seconds=0.0 if "saved" in order else self.lost,
            words=self.words,
        )


def history_of(text: object) -> tuple[float, ...]:
    """When a job had to leave before, from its annotation; nothing of what cannot be read."""
    if not isinstance(text, str) or len(text) > MAX_BYTES:
        return ()
    found = []
    for part in text.split(",")[-MAX_HISTORY:]:
        try:
            found.append(_number(float(part)))
        except ValueError:
            continue
    return tuple(found)


def history_text(history: tuple[float, ...], now: float) -> str:
    """The annotation with one more."""
    return ",".join(f"{moment:.0f}" for moment in (*history, now)[-MAX_HISTORY:])


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > 2048:
        raise ValueError("not a text")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError("not a time")
    return float(value)
