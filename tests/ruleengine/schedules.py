"""A schedule worth looking at, and a scheduler on the loopback that tells it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import httpx
from tests.ruleengine.worlds import Received, Sink

from gpuwarden.ruleengine import booking_weeks
from gpuwarden.ruleengine.schedules import Schedules
from gpuwarden.schedule_api import (
    BookingEntry,
    BookingState,
    BudgetEntry,
    Card,
    Cause,
    EntryState,
    Interval,
    Outcome,
    Preemption,
    Problem,
    QueueEntry,
    ScheduleDocument,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpuwarden.clock import Clock

ZONE = "Europe/Berlin"
HOUR, DAY = 3600.0, 86400.0


def entries(now: float) -> tuple[QueueEntry, ...]:
    """Two that run, one that leaves, three that wait."""
    return (
        QueueEntry(
            id="4711",
            name="coco-m-14",
            user="alice",
            team="vision",
            priority="low",
            state=EntryState.LEAVING,
            gpus=2,
            submitted=now - 5 * HOUR,
            started=now - 4 * HOUR,
            run_id="coco-m-14",
            job_id="slurm-c1-4711-0",
            requeues=1,
            words="coco-m-14 was asked to leave at the end of its epoch",
            finish=Interval(now + 2 * HOUR, now + 3 * HOUR, 7),
            engine="slurm",
            gpu_type="a100-40",
        ),
        QueueEntry(
            id="4712",
            name="speech-large-2",
            user="bob",
            team="speech",
            priority="high",
            state=EntryState.PENDING,
            gpus=4,
            submitted=now - 600,
            position=1,
            start=Interval(now + 300, now + 1200, 12),
            why="cards",
            words="speech-large-2 waits for 2 more a100-40: coco-m-14 is leaving",
            must_end=("4711", "none-of-ours"),
            engine="slurm",
            gpu_type="a100-40",
        ),
        QueueEntry(
            id="4713",
            name="lane-s",
            user="alice",
            team="vision",
            priority="low",
            state=EntryState.HELD,
            gpus=1,
            submitted=now - 1200,
            position=2,
            why="window",
            words="lane-s waits for the window off-peak, which opens at 20:00",
            engine="slurm",
            gpu_type="a100-40",
        ),
        QueueEntry(
            id="4714",
            name="night-sweep",
            user="carol",
            team="robots",
            priority="low",
            state=EntryState.RUNNING,
            gpus=8,
            submitted=now - 9 * HOUR,
            started=now - 8 * HOUR,
            engine="slurm",
            gpu_type="a100-40",
        ),
        QueueEntry(
            id="4600",
            name="over",
            user="carol",
            state=EntryState.DONE,
            gpus=8,
            submitted=now - 30 * HOUR,
            engine="slurm",
        ),
    )


def preemptions(now: float) -> tuple[Preemption, ...]:
    """One under way, one that went as it should, one that is overdue."""
    done = {
        "notified": now - 7200,
        "acknowledged": now - 7198,
        "saved": now - 6710,
        "left": now - 6706,
        "freed": now - 6705,
        "started": now - 6701,
    }
    return (
        Preemption(
            "p-3",
            victim="4711",
            successor="4712",
            cause=Cause.PRIORITY,
            at="epoch",
            deadline=now + 900,
            run_id="coco-m-14",
            steps={"notified": now - 240, "acknowledged": now - 238},
            words="4711 ends its epoch in about 6 minutes",
        ),
        Preemption(
            "p-2",
            victim="4714",
            successor="speech.1",
            cause=Cause.BOOKING,
            at="epoch",
            deadline=now - 6000,
            steps=done,
            outcome=Outcome.DONE,
            lost_seconds=0.0,
        ),
        Preemption(
            "p-1",
            victim="4600",
            successor="4712",
            cause=Cause.PRIORITY,
            at="step",
            deadline=now - 80_000,
            steps={"notified": now - 82_000},
            outcome=Outcome.OVERDUE,
            lost_seconds=None,
        ),
    )


def document(now: float, monday: float | None = None) -> ScheduleDocument:
    """What a Slurm cluster's scheduler would tell.

    Args:
        now: Unix time.
        monday: first moment of the week of its bookings; the day before `now` by default.
    """
    begin = now - DAY if monday is None else monday
    return ScheduleDocument(
        engine="slurm",
        cluster="c1",
        taken=now - 2,
        entries=entries(now),
        preemptions=preemptions(now),
        bookings=(
            BookingEntry(
                "speech",
                "speech",
                "bob",
                8,
                "a100-40",
                begin + DAY + 9 * HOUR,
                begin + DAY + 17 * HOUR,
                state=BookingState.BOOKED,
                cost=64.0,
                words="the demo of the keynote",
            ),
            BookingEntry(
                "vision.2",
                "vision",
                "alice",
                16,
                "a100-40",
                begin + 2 * DAY + 20 * HOUR,
                begin + 3 * DAY + 7 * HOUR,
                repeat="weekly",
                state=BookingState.BOOKED,
                cost=176.0,
                words="nightly regression",
            ),
            BookingEntry(
                "robots",
                "robots",
                "carol",
                4,
                "h100-80",
                begin + 8 * HOUR,
                begin + 12 * HOUR,
                state=BookingState.RELEASED,
            ),
        ),
        budgets=(
            BudgetEntry(
                "vision", "month", 5000.0, "hard", now - 20 * DAY, now + 10 * DAY, 3120.5, 5400.0
            ),
            BudgetEntry("speech", "day", 300.0, "soft", now - HOUR, now + 23 * HOUR, 310.0, 640.0),
            BudgetEntry("robots", "month", 800.0, "soft", now - 20 * DAY, now + 10 * DAY),
        ),
        problems=(Problem("requeue_loop", "4600 came back three times: it is held", now - HOUR),),
        cards=(Card("a100-40", 32), Card("h100-80", 8)),
        timezone=ZONE,
    )


class Told:
    """What a scheduler answers; change it as a test goes on."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.status = 200
        self.body: bytes | None = None
        self.asked: list[Received] = []

    def answer(self, _method: str, request: Received) -> tuple[int, bytes]:
        """Answer `GET /v1/schedule`."""
        self.asked.append(request)
        now = self.clock.wall()
        first = booking_weeks.week_days(ZONE, booking_weeks.monday(ZONE, now))[0]
        told = document(now, first.span.begin).encode()
        body = told if self.body is None else self.body
        return self.status, body


@contextlib.contextmanager
def scheduler(clock: Clock) -> Iterator[tuple[Told, Sink]]:
    """A scheduler on the loopback."""
    told = Told(clock)
    with Sink(told.answer) as sink:
        yield told, sink


def schedules(url: str, clock: Clock, token: str = "t" * 16) -> Schedules:
    """What an engine asks it with."""
    client = httpx.AsyncClient(headers={"Authorization": f"Bearer {token}"}, trust_env=False)
    return Schedules(url, client, clock, timeout=5.0)
