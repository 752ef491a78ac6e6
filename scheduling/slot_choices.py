"""Which slot a task is submitted for: it starts when the slot does, on cards of its kind. Pure.

Nothing else ties a job to a slot: every engine gives a slot's cards to its team's jobs, and the
local one to those of whoever booked it first.
"""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING

from gpuwarden.errors import InvalidInput, RefusedAction
from gpuwarden.schedule_api import BookingState

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from zoneinfo import ZoneInfo

    from gpuwarden.schedule_api import BookingEntry

_GONE = (BookingState.RELEASED, BookingState.OVER)


def chosen(bookings: Sequence[BookingEntry], name: str, *, now: float) -> BookingEntry:
    """The slot that is meant: by its own id, or the next one of a booking that repeats.

    Args:
        bookings: as the daemon tells them.
        name: of a slot or a booking.
        now: Unix time.

    Raises:
        RefusedAction: there is none of that name ahead.
    """
    named = [each for each in bookings if name in (each.id, each.id.partition(".")[0])]
    ahead = [each for each in named if each.end > now and each.state not in _GONE]
    if ahead:
        return min(ahead, key=lambda each: each.start)
    if named:
        raise RefusedAction("booking_over", f"--booking {name}: it is over, or was given back")
    raise RefusedAction(
        "no_booking", f"--booking {name}: gpuwarden book list shows those there are"
    )


def refuse_misfit(
    slot: BookingEntry, *, team: str | None, card: str | None, gpus: int, window: str | None
) -> None:
    """Refuse a task that cannot be for a slot.

    Args:
        slot: that was chosen.
        team: that was said, or None.
        card: likewise.
        gpus: cards that the task asks for.
        window: that was said, or None.

    Raises:
        InvalidInput: every reason, one a line.
    """
    found = []
    if team not in (None, slot.team):
        found.append(f"--team {team}: slot {slot.id} is team {slot.team}'s")
    if card not in (None, slot.gpu_type):
        found.append(f"--card {card}: slot {slot.id} has cards {slot.gpu_type}")
    if gpus > slot.gpus:
        found.append(f"--gpus {gpus}: slot {slot.id} has {slot.gpus}")
    if window is not None:
        found.append(f"--window {window}: a slot has hours of its own; say one of both")
    if found:
        raise InvalidInput("\n".join(found))


def doubts(
    slot: BookingEntry, *, user: str, seconds: float | None, now: float, zone: ZoneInfo
) -> Iterator[str]:
    """What whoever submits for a slot should know.

    Args:
        slot: that was chosen.
        user: who submits.
        seconds: how long the task may take, or None.
        now: Unix time.
        zone: the policy's.
    """
    if user != slot.who:
        yield f"slot {slot.id} was booked by {slot.who}, whose jobs go first in it"
    left = slot.end - max(slot.start, now)
    if seconds is not None and seconds > left:
        end = dt.datetime.fromtimestamp(slot.end, zone)
        yield (
            f"slot {slot.id} ends {end:%a %m-%d %H:%M}, and this may take longer: from then on it "
            "counts for the team's quota, and may be asked to leave; it goes on where it was"
        )
