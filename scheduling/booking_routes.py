"""Bookings over HTTP: make, list, show, lengthen, cancel; and the calendar for other programs."""

from __future__ import annotations

import asyncio
import datetime as dt
import math
from typing import TYPE_CHECKING, Any

from starlette.responses import JSONResponse, Response

from gpuwarden import durations
from gpuwarden.refusals import Refusal
from gpuwarden.scheduling.bodies import flag, known_team, read_fields, text, whole
from gpuwarden.scheduling.bookings import Wish
from gpuwarden.scheduling.calendars import calendar_of
from gpuwarden.scheduling.documents import booking_entry
from gpuwarden.scheduling.moments import MomentUnclear, read_last, read_moment, show_moment
from gpuwarden.scheduling.recurrences import Repeat

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from zoneinfo import ZoneInfo

    from starlette.requests import Request

    from gpuwarden.scheduling.booking_desks import BookingDesk, Outcome
    from gpuwarden.scheduling.callers import Caller
    from gpuwarden.scheduling.feeds import Feeds
    from gpuwarden.scheduling.schedulers import Scheduler
    from gpuwarden.scheduling.stores import Booked

    Handler = Callable[[Request], Awaitable[Response]]
    Reader = Callable[..., float]

MAX_CARDS = 100_000
FEED_BACK_SECONDS = 30 * 86400.0
"""How long what is over stays in a calendar that others subscribe to."""
_FIELDS = (
    "team", "gpus", "card", "from", "for", "repeat", "until", "words", "key", "dry_run",
)  # fmt: skip


class BookingRoutes:
    """Handlers of bookings.

    Args:
        scheduler: whose calendar it is.
        desk: takes them.
        feeds: signs addresses of the calendar.
        caller: says who asks.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        desk: BookingDesk,
        feeds: Feeds,
        caller: Callable[[Request], Caller],
    ) -> None:
        self._scheduler = scheduler
        self._desk = desk
        self._feeds = feeds
        self._caller = caller
        # Whoever books in a loop must not have all the threads that others are answered by.
        self._busy = asyncio.Semaphore(2)

    def routes(self) -> Iterator[tuple[str, str, Handler]]:
        """Method, path and handler of each."""
        yield "POST", "/v1/bookings", self._book
        yield "GET", "/v1/bookings", self._list
        yield "GET", "/v1/bookings/{name}", self._show
        yield "DELETE", "/v1/bookings/{name}", self._cancel
        yield "POST", "/v1/bookings/{name}/end", self._lengthen
        yield "GET", "/v1/calendar.ics", self._calendar
        yield "GET", "/v1/calendar-address", self._address

    @property
    def _zone(self) -> ZoneInfo:
        return self._scheduler.policy.zone

    async def _book(self, request: Request) -> Response:
        caller = self._caller(request)
        body = await read_fields(request, *_FIELDS)
        policy, now = self._scheduler.policy, self._scheduler.clock.wall()
        team = await asyncio.to_thread(caller.team, policy, text(body, "team", default=""))
        card = text(body, "card", default="")
        if not card and len(policy.cards) > 1:
            known = ", ".join(each.name for each in policy.cards)
            raise Refusal(400, "malformed", f"say which cards: {known}")
        until = text(body, "until", default="")
        repeat = _repeat(text(body, "repeat", default="none"))
        if until and repeat is Repeat.NONE:
            kinds = ", ".join(each for each in Repeat if each is not Repeat.NONE)
            raise Refusal(400, "malformed", f"until is for what comes again: say repeat ({kinds})")
        wish = Wish(
            team=team,
            who=caller.name,
            gpus=whole(body, "gpus", most=MAX_CARDS),
            card=card or policy.cards[0].name,
            # Slots begin with a whole minute: what is shown can be typed again.
            start=math.ceil(self._moment(body, "from", now) / 60) * 60.0,
            seconds=_duration(body, "for"),
            repeat=repeat,
            until=self._moment(body, "until", now, read=read_last) if until else None,
        )
        _see_weekday(wish, self._zone)
        words, key = text(body, "words", default=""), body.get("key")
        key = None if key is None else text(body, "key")
        dry_run = flag(body, "dry_run")
        async with self._busy:
            found = await asyncio.to_thread(
                self._desk.book, wish, caller, words=words, key=key, dry_run=dry_run
            )
        return self._answered(found, wish, dry_run=dry_run)

    async def _list(self, request: Request) -> Response:
        self._caller(request)
        now = self._scheduler.clock.wall()
        begin = self._query_moment(request, "from", now)
        end = self._query_moment(request, "to", begin + 90 * 86400.0)
        if end <= begin:
            raise Refusal(400, "malformed", "to is not after from")
        slots = await asyncio.to_thread(self._scheduler.store.slots_between, begin, end)
        team = request.query_params.get("team")
        rows = [
            self._document(item)
            for item in slots
            if team in (None, item.slot.team)
            and (item.released is None or request.query_params.get("all") == "true")
        ]
        if not rows:
            known_team(self._scheduler.policy, team)
        return JSONResponse({"schema": "gpuwarden.bookings/v1", "slots": rows})

    async def _show(self, request: Request) -> Response:
        self._caller(request)
        name = request.path_params["name"]
        found = await asyncio.to_thread(self._scheduler.store.slots_of, name)
        if not found:
            raise Refusal(404, "unknown", "no booking has this name: see gpuwarden book list")
        return JSONResponse(
            {
                "schema": "gpuwarden.bookings/v1",
                "slots": [self._document(item) for item in found],
            }
        )

    async def _cancel(self, request: Request) -> Response:
        caller = self._caller(request)
        async with self._busy:
            found = await asyncio.to_thread(self._desk.cancel, request.path_params["name"], caller)
        return JSONResponse(
            {
                "schema": "gpuwarden.bookings/v1",
                "slots": [self._document(item) for item in found],
            }
        )

    async def _lengthen(self, request: Request) -> Response:
        caller = self._caller(request)
        body = await read_fields(request, "to", "by", "dry_run")
        now, name = self._scheduler.clock.wall(), request.path_params["name"]
        if ("to" in body) == ("by" in body):
            raise Refusal(400, "malformed", "say either to or by")
        if "to" in body:
            end = self._moment(body, "to", now)
        else:
            slots = await asyncio.to_thread(self._scheduler.store.slots_of, name)
            ahead = [item.slot.end for item in slots if item.slot.end > now]
            if not ahead:
                raise Refusal(404, "unknown", "no such slot is ahead: see gpuwarden book list")
            end = ahead[0] + _duration(body, "by")
        dry_run = flag(body, "dry_run")
        async with self._busy:
            found = await asyncio.to_thread(
                self._desk.lengthen, name, caller, end=end, dry_run=dry_run
            )
        return self._answered(found, dry_run=dry_run)

    # -- the calendar for other programs

    async def _calendar(self, request: Request) -> Response:
        team = request.query_params.get("team", "")
        key = request.query_params.get("key")
        # Programs that show calendars send no token: the address itself is the secret.
        if key is None:
            self._caller(request)
        elif not self._feeds.right(team, key):
            raise Refusal(
                403, "address", "this address of the calendar is not, or no longer, right"
            )
        known_team(self._scheduler.policy, team)
        now = self._scheduler.clock.wall()
        bookings = self._scheduler.policy.bookings
        ahead = 0.0 if bookings is None else bookings.ahead + bookings.longest
        found = await asyncio.to_thread(
            self._scheduler.store.slots_between, now - FEED_BACK_SECONDS, now + ahead
        )
        body = await asyncio.to_thread(
            calendar_of,
            [item for item in found if team in ("", item.slot.team)],
            cluster=self._scheduler.driver.cluster,
            team=team,
            zone=self._zone,
        )
        return Response(body, media_type="text/calendar; charset=utf-8")

    async def _address(self, request: Request) -> Response:
        self._caller(request)
        team = request.query_params.get("team", "")
        known_team(self._scheduler.policy, team)
        return JSONResponse({"path": self._feeds.path(team)})

    # -- parts

    def _moment(
        self, body: dict[str, Any], name: str, now: float, *, read: Reader = read_moment
    ) -> float:
        try:
            return read(text(body, name), now=now, zone=self._zone)
        except MomentUnclear as error:
            raise Refusal(400, "malformed", f"{name}: {error}") from error

    def _query_moment(self, request: Request, name: str, default: float) -> float:
        given = request.query_params.get(name)
        if given is None:
            return default
        return self._moment({name: given}, name, self._scheduler.clock.wall())

    def _document(self, item: Booked) -> dict[str, Any]:
        now = self._scheduler.clock.wall()
        use = self._scheduler.uses.get(item.slot.id)
        remark = self._scheduler.remarks.get(item.slot.id)
        entry = booking_entry(item, use, now, remark=remark)
        return {
            "id": entry.id,
            "booking": item.booking,
            "team": entry.team,
            "who": entry.who,
            "gpus": entry.gpus,
            "card": entry.gpu_type,
            "start": entry.start,
            "end": entry.end,
            "shown": f"{show_moment(entry.start, self._zone)} to "
            f"{show_moment(entry.end, self._zone)}",
            "repeat": entry.repeat,
            "state": entry.state,
            "gpu_hours": entry.cost,
            "used_gpu_hours": None
            if entry.used_gpu_seconds is None
            else entry.used_gpu_seconds / 3600.0,
            "words": entry.words,
            "made": item.made,
            "released": item.released,
            "released_by": item.released_by,
        }

    def _answered(self, found: Outcome, wish: Wish | None = None, *, dry_run: bool) -> Response:
        answer = found.answer
        document = {
            "schema": "gpuwarden.booking/v1",
            "timezone": self._zone.key,
            "start": None if wish is None else wish.start,
            "until": None if wish is None else wish.until,
            "booking": found.booking,
            "repeated": found.repeated,
            "slots": [self._document(item) for item in found.slots],
            "would": [
                {
                    "gpus": slot.gpus,
                    "card": slot.card,
                    "start": slot.start,
                    "end": slot.end,
                    "shown": self._shown(slot.start, slot.end),
                }
                for slot in answer.slots
            ],
            "gpu_hours": answer.gpu_hours,
            "cost": {currency: round(amount, 2) for currency, amount in found.cost.items()},
            "objections": [{"code": each.code, "words": each.words} for each in answer.objections],
            "warnings": [*answer.warnings, *self._remarks(found.slots)],
            "proposals": [
                {"start": at, "shown": show_moment(at, self._zone)} for at in answer.proposals
            ],
        }
        if answer.objections:
            return JSONResponse(document, status_code=409)
        return JSONResponse(document, status_code=200 if dry_run or found.repeated else 201)

    def _remarks(self, slots: tuple[Booked, ...]) -> list[str]:
        """What the engine has to say of these slots, each sentence once."""
        remarks = self._scheduler.remarks
        said = [remarks[item.slot.id] for item in slots if item.slot.id in remarks]
        return list(dict.fromkeys(said))

    def _shown(self, start: float, end: float) -> str:
        return f"{show_moment(start, self._zone)} to {show_moment(end, self._zone)}"


def _duration(body: dict[str, Any], name: str) -> float:
    try:
        return durations.parse(text(body, name))
    except ValueError as error:
        raise Refusal(400, "malformed", f"{name}: {error}") from error


def _see_weekday(wish: Wish, zone: ZoneInfo) -> None:
    """See that what comes again on weekdays begins on one.

    Raises:
        Refusal: it begins on a weekend, on which it would not come again.
    """
    first = dt.datetime.fromtimestamp(wish.start, zone)
    if wish.repeat is Repeat.WEEKDAYS and first.weekday() > 4:
        raise Refusal(
            400,
            "malformed",
            f"from: {first:%Y-%m-%d} is a {first:%A}, and repeat weekdays is Monday to Friday: "
            "begin on one of them, or say repeat daily",
        )


def _repeat(word: str) -> Repeat:
    try:
        return Repeat(word)
    except ValueError:
        raise Refusal(400, "malformed", f"repeat is none of {', '.join(Repeat)}") from None
