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

    def is_kept(self, now: float) -> bool:
        """Whether its cards are kept: from lead time on, until its end."""
        return self.start - self.lead_seconds <= now < self.end

    def admits(self, team: str, user: str, since: float) -> bool:
        """Whether a job that got its cards at a moment may have got those of this slot.

        Before its start, from lead time on, only jobs of whoever booked it may; then its team's.
        What the team ran before runs on the team's quota: it uses up nothing of what was booked.
        """
        first = self.start - self.lead_seconds if user == self.who else self.start
        return team == self.team and first <= since < self.end


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
