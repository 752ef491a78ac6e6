"""One slot of a booking, as an engine is told of it, and what an engine says of its use."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Slot:
    """Cards of one team, from a moment to another.

    Attributes:
        id: `<booking>` or `<booking>.<n>`; `[a-z0-9.]`, at most 40 characters, never used twice.
        team: of the policy.
        who: the user who made it.
        gpus: whole cards.
        card: name of the policy's kind of cards.
        start: Unix time.
        end: Unix time, after `start`.
        lead_seconds: how long before `start` whoever must leave is told.
    """

    id: str
    team: str
    who: str
    gpus: int
    card: str
    start: float
    end: float
    lead_seconds: float

    @property
    def gpu_hours(self) -> float:
        """What it costs."""
        return self.gpus * (self.end - self.start) / 3600.0


@dataclass(frozen=True, slots=True)
class SlotUse:
    """What an engine sees of a slot whose time has come.

    Attributes:
        slot: its id.
        held: whether the engine keeps the cards for it now.
        gpus: cards of it that jobs of the team hold now.
        first_used: Unix time at which a job of the team first held one, or None.
        used_gpu_seconds: so far, or None where the engine cannot tell.
    """

    slot: str
    held: bool
    gpus: int
    first_used: float | None = None
    used_gpu_seconds: float | None = None
