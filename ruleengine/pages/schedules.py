"""The pages about who goes first: the queue, the calendar of bookings, and receipts."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from starlette.responses import Response
from starlette.routing import Route

from gpuwarden.refusals import Refusal
from gpuwarden.ruleengine import booking_weeks, schedule_rows
from gpuwarden.ruleengine.calendars import CONTENT_TYPE, CalendarAddresses, icalendar
from gpuwarden.ruleengine.leave_documents import leave_document, sees
from gpuwarden.ruleengine.pages.readings import PER_PAGE, turning
from gpuwarden.ruleengine.pages.rendering import HEADERS
from gpuwarden.ruleengine.queries import page_number
from gpuwarden.ruleengine.roles import Person, Role
from gpuwarden.ruleengine.schedules import Schedule

if TYPE_CHECKING:
    from starlette.requests import Request

    from gpuwarden.ruleengine.access import Access
    from gpuwarden.ruleengine.engine import Engine
    from gpuwarden.ruleengine.pages.rendering import Pages
    from gpuwarden.ruleengine.schedules import Schedules

LEAVES = 200
"""Leaves of the engine that are looked at for one page."""
NONE = Schedule(None, "engine.yaml names no scheduler: give `scheduler`")


class SchedulePages:
    """Handlers of these pages.

    Args:
        engine: whose leaves stand beside the scheduler's receipts.
        access: who may see what.
        pages: renders them.
        schedules: what the scheduler tells, or None: engine.yaml names none.
        key: that calendars' addresses are signed with, or None.
    """

    def __init__(
        self,
        engine: Engine,
        access: Access,
        pages: Pages,
        *,
        schedules: Schedules | None,
        key: bytes | None,
    ) -> None:
        self._engine = engine
        self._access = access
        self._pages = pages
        self._schedules = schedules
        self._addresses = CalendarAddresses(key)

    def routes(self) -> list[Route]:
        """What to serve."""
        return [
            Route("/queue", self.queue),
            Route("/calendar", self.calendar),
            Route("/calendar.ics", self.icalendar),
            Route("/receipts", self.receipts),
        ]

    async def schedule(self) -> Schedule:
        """What is known of the schedule now."""
        return NONE if self._schedules is None else await self._schedules.now()

    async def queue(self, request: Request) -> Response:
        """Who waits for what, why, and until when."""
        person, query = self._access.page(request), request.query_params
        found = await self.schedule()
        document, team = found.document, query.get("team", "")
        number = page_number(query.get("page"))
        every = [] if document is None else schedule_rows.queued(document, team=team)
        shown = every[(number - 1) * PER_PAGE : number * PER_PAGE]
        return self._pages.render(
            "queue.html",
            request,
            person,
            problem=found.problem,
            document=_head(found),
            troubles=[] if document is None or not person.sees_all else _problems(found),
            figures={} if document is None else schedule_rows.queue_figures(document),
            rows=[] if document is None else schedule_rows.queue_rows(document, shown, person),
            team=team,
            teams=[] if document is None else sorted({e.team for e in document.entries if e.team}),
            **turning("/queue", query, number, shown=len(shown), total=len(every)),
        )

    async def calendar(self, request: Request) -> Response:
        """A week of bookings."""
        person, query = self._access.page(request), request.query_params
        found = await self.schedule()
        document, now = found.document, self._engine.clock.wall()
        zone = self._pages.zone(person) if document is None else _zone(document.timezone)
        first = booking_weeks.monday(zone, now)
        if query.get("week"):
            chosen = booking_weeks.week_of(query["week"])
            if chosen is None:
                raise Refusal(400, "malformed", "week is not a week like 2026-W49")
            first = chosen
        days = booking_weeks.week_days(zone, first)
        week = dt.timedelta(days=booking_weeks.DAYS)
        token = self._addresses.make(person.name, now=now)
        return self._pages.render(
            "calendar.html",
            request,
            person,
            zone=zone,
            problem=found.problem,
            document=_head(found),
            week=booking_weeks.week_name(first),
            days=(
                [] if document is None else booking_weeks.week_rows(document, days, person, now=now)
            ),
            earlier=f"/calendar?week={booking_weeks.week_name(first - week)}",
            later=f"/calendar?week={booking_weeks.week_name(first + week)}",
            address=f"/calendar.ics?token={quote(token)}" if token else "/calendar.ics",
        )

    async def icalendar(self, request: Request) -> Response:
        """The bookings for a calendar program, by the address that a person was shown."""
        token, now = request.query_params.get("token"), self._engine.clock.wall()
        if token is None:
            person = self._access.page(request)
        else:
            name = self._addresses.read(token, now=now)
            if name is None:
                text = "this calendar's address is not ours, or has ended: copy it again"
                raise Refusal(403, "bad_address", text)
            user = self._engine.rulebook.directory.user(name)
            person = Person(name, Role.OWNER, teams=user.member_of, sees_teams=user.sees_team)
        found = await self.schedule()
        document = found.document
        if document is None:
            raise Refusal(503, "no_schedule", found.problem)
        slots = self._access.names.veil(person, booking_weeks.slot_rows(document, person))
        body = icalendar(slots, name=f"GPUs of {document.cluster}", stamp=document.taken)
        return Response(body, media_type=CONTENT_TYPE, headers=HEADERS)

    async def receipts(self, request: Request) -> Response:
        """Who was asked to leave for whom, and every step with its time."""
        person, query = self._access.page(request), request.query_params
        found = await self.schedule()
        leaves = [
            {**leave_document(self._engine, leave), "asked_seconds": leave.created_at}
            for leave in self._engine.leaves.store.newest(LEAVES)
            if sees(self._engine, person, leave)
        ]
        number = page_number(query.get("page"))
        rows = schedule_rows.receipt_rows(found.document, leaves, person)
        shown = rows[(number - 1) * PER_PAGE : number * PER_PAGE]
        return self._pages.render(
            "receipts.html",
            request,
            person,
            problem=found.problem if self._schedules is not None else "",
            document=_head(found),
            rows=shown,
            total=len(rows),
            **turning("/receipts", query, number, shown=len(shown), total=len(rows)),
        )


def _head(found: Schedule) -> dict[str, Any]:
    document = found.document
    if document is None:
        return {}
    return {
        "engine": document.engine,
        "cluster": document.cluster,
        "taken": document.taken,
        "left_out": document.left_out,
    }


def _problems(found: Schedule) -> list[dict[str, Any]]:
    document = found.document
    return [
        {"words": each.words or each.code, "since": each.since}
        for each in (() if document is None else document.problems)
    ]


def _zone(name: str) -> str:
    """A zone that is known here: the scheduler's machine may know more."""
    return name if booking_weeks.known_zone(name) else "UTC"
