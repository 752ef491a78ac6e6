"""What the scheduler tells, on the engine's pages: fresh, bounded, veiled, and never invented."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime as dt
import itertools
import re
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from tests.ruleengine.engines import World, running
from tests.ruleengine.schedules import DAY, HOUR, Told, document, scheduler, schedules

from gpuwarden.errors import InvalidInput
from gpuwarden.ruleengine import booking_weeks, schedule_rows
from gpuwarden.ruleengine.app import EngineApp
from gpuwarden.ruleengine.calendars import CalendarAddresses, icalendar
from gpuwarden.ruleengine.roles import Person, Role
from gpuwarden.ruleengine.schedules import client_for
from gpuwarden.ruleengine.sign_ins import Token
from gpuwarden.schedule_api import BookingEntry, Card, EntryState, QueueEntry

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

KEY = b"k" * 32
TOKENS = (
    Token("alice", Role.OWNER, "alices-token-00001"),
    Token("bob", Role.OWNER, "bobs-token-0000001"),
    Token("olga", Role.OPERATOR, "operators-token-01"),
)
OLGA = Person("olga", Role.OPERATOR)
ALICE = Person("alice", Role.OWNER, teams=("vision",))
NOW = 1_800_000_000.0
PATHS = ("/queue", "/calendar", "/receipts", "/budgets")


@contextlib.asynccontextmanager
async def shown(servers: World) -> AsyncIterator[tuple[World, Told, Any]]:
    """An engine beside a scheduler, and its pages: `await read(path, who)`."""
    with scheduler(servers.clock) as (told, sink):
        servers.web = f"scheduler: {{url: {sink.url}}}\n"
        async with running(servers) as world:
            asked = schedules(sink.url, servers.clock)
            app = EngineApp(
                world.engine,
                world.hop,
                notify_token=None,
                operator_token=None,
                ticket_key=KEY,
                tokens=TOKENS,
                schedules=asked,
            )
            transport = httpx.ASGITransport(app=app.starlette())
            async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:

                async def read(path: str, who: str = "olga", status: int = 200) -> str:
                    secret = next((t.secret for t in TOKENS if t.name == who), "")
                    headers = {"Authorization": f"Bearer {secret}"} if secret else {}
                    answer = await client.get(path, headers=headers)
                    assert answer.status_code == status, answer.text
                    return answer.text

                yield world, told, read
            await asked.aclose()


def words(page: str) -> str:
    """What a page says, without its tags."""
    return " ".join(re.sub(r"<[^>]+>", " ", page).split())


def test_the_queue_says_who_waits_for_what_and_until_when(servers: World) -> None:
    """An interval with what it rests on, why, and who would have to end first."""

    async def story() -> None:
        async with shown(servers) as (_, told, read):
            said = words(await read("/queue"))
            assert "2 jobs wait for 5 cards; 1 runs on 8, and 1 is leaving 2." in said
            assert "speech-large-2 waits for 2 more a100-40: coco-m-14 is leaving" in said
            assert "as 12 like it" in said
            assert "would have to end first: coco-m-14 of alice (2), 1 more" in said
            assert "came back 1 time" in said
            assert "nobody can tell" in said
            assert "4600 came back three times" in said
            assert said.index("speech-large-2") < said.index("lane-s") < said.index("night-sweep")
            one = words(await read("/queue?team=speech"))
            assert "lane-s" not in one
            assert told.asked[0].headers["authorization"] == f"Bearer {'t' * 16}"

    asyncio.run(story())


def test_others_jobs_are_seen_and_not_named(servers: World) -> None:
    """An owner sees that somebody waits before them, and not who, for what, or in which words."""

    async def story() -> None:
        async with shown(servers) as (_, _, read):
            for path in PATHS:
                page = await read(path, "alice")
                for secret in ("bob", "speech-large-2", "keynote", "carol", "night-sweep"):
                    assert secret not in page, (path, secret)
            mine = words(await read("/queue", "alice"))
            assert "lane-s waits for the window off-peak" in mine
            assert "4712" in mine
            assert "came back three times" not in mine
            assert "nightly regression" in words(await read("/calendar", "alice"))
            budgets = words(await read("/budgets", "alice"))
            assert "3120.5 of 5000.0 GPU-hours" in budgets
            assert "310.0" not in budgets

    asyncio.run(story())


def test_receipts_are_a_timeline_with_gaps_and_say_what_was_not_seen(servers: World) -> None:
    """From the notice to the start; a step that is missing is not made up."""

    async def story() -> None:
        async with shown(servers) as (_, _, read):
            said = words(await read("/receipts"))
            assert "3 jobs were asked to leave for others." in said
            assert "From notice to start: 8m19s." in said
            assert "+ 8m8s" in said
            first = said[said.index("coco-m-14") : said.index("night-sweep")]
            assert first.count("not yet") == 4
            last = said[said.index("over of carol") :]
            assert last.count("not seen") == 5
            mine = words(await read("/receipts", "alice"))
            assert "1 job was asked to leave" in mine

    asyncio.run(story())


def test_while_the_scheduler_is_away_its_last_word_is_shown_with_its_age(servers: World) -> None:
    """For an hour; then nothing is shown. It is asked once in five seconds, however many look."""

    async def story() -> None:
        async with shown(servers) as (_, told, read):
            await asyncio.gather(*(read(path) for path in PATHS for _ in range(3)))
            assert len(told.asked) == 1
            told.status = 503
            servers.clock.pass_(6.0)
            said = words(await read("/queue"))
            assert "does not answer (HTTP 503" in said
            assert "speech-large-2" in said
            await read("/receipts")
            assert len(told.asked) == 2
            servers.clock.pass_(3600.0)
            gone = words(await read("/queue"))
            assert "tells nothing: HTTP 503" in gone
            assert "speech-large-2" not in gone
            told.status, told.body = 200, document(servers.clock.wall() - 500).encode()
            servers.clock.pass_(6.0)
            assert "read its slurm last 508 s ago" in words(await read("/queue"))

    asyncio.run(story())


@pytest.mark.parametrize(
    ("status", "body", "why"),
    [
        (401, b"{}", "give scheduler.token_file"),
        (404, b"<html>", "HTTP 404: is http"),
        (200, b"<html>", "not JSON"),
        (200, b'{"version": "gpuwarden.schedule/v2"}', "is not"),
        (200, dataclasses.replace(document(NOW), taken=1e18).encode(), "beyond the year 3000"),
        (200, b"[" * 100_000, "not JSON"),
    ],
)
def test_an_answer_that_is_none_is_said_and_shown_nowhere(
    servers: World, status: int, body: bytes, why: str
) -> None:
    """Every page still answers."""

    async def story() -> None:
        async with shown(servers) as (_, told, read):
            told.status, told.body = status, body
            for path in PATHS:
                assert why in words(await read(path)), path
            assert why in words(await read("/calendar.ics", status=503))

    asyncio.run(story())


def test_a_hostile_documents_texts_stay_texts(servers: World) -> None:
    """Names and sentences come from users: no markup, no link, no field of iCalendar."""
    evil = '<script>alert(1)</script>"\r\nX:1'
    entry = QueueEntry("slurm", "1", evil, evil, EntryState.PENDING, 1, NOW, words=evil, why=evil)
    booking = BookingEntry(evil, evil, evil, 1, "a100-40", NOW, NOW + HOUR, words=evil)
    told_document = dataclasses.replace(document(NOW), entries=(entry,), bookings=(booking,))

    async def story() -> None:
        async with shown(servers) as (_, told, read):
            told.body = told_document.encode()
            for path in PATHS:
                assert "<script" not in await read(path)
            calendar = await read("/calendar.ics")
            assert not re.search(r"^X:1", calendar, re.MULTILINE)

    asyncio.run(story())


def test_without_a_scheduler_pages_say_so_and_the_menu_names_none(servers: World) -> None:
    """Whoever opens the address learns what is missing."""

    async def story() -> None:
        async with running(servers) as world:
            app = EngineApp(
                world.engine,
                world.hop,
                notify_token=None,
                operator_token=None,
                ticket_key=None,
                tokens=TOKENS,
            )
            transport = httpx.ASGITransport(app=app.starlette())
            headers = {"Authorization": "Bearer operators-token-01"}
            async with httpx.AsyncClient(
                transport=transport, base_url="http://engine", headers=headers
            ) as client:
                page = (await client.get("/queue")).text
                assert "engine.yaml names no scheduler" in page
                assert 'href="/queue"' not in page.partition("<main")[0]

    asyncio.run(story())


def test_a_calendar_program_reads_what_an_owner_reads(servers: World) -> None:
    """By an address that is bound to a name, has an end, and cannot be made up."""

    async def story() -> None:
        async with shown(servers) as (_, _, read):
            page = await read("/calendar", "olga")
            (address,) = re.findall(r'href="(/calendar\.ics\?token=[^"]+)"', page)
            calendar = await read(address, "nobody")
            assert calendar.startswith("BEGIN:VCALENDAR\r\n")
            assert "SUMMARY:speech: 8 x a100-40" in calendar
            # An operator's address is no operator's sight.
            assert "keynote" not in calendar
            assert "bob" not in calendar
            await read(address[:-3] + "abc", "nobody", status=403)
            servers.clock.pass_(500 * DAY)
            await read(address, "nobody", status=403)

    asyncio.run(story())


def test_addresses_of_calendars_last_and_are_the_same_all_month() -> None:
    """A copied address is the one that is shown next week; none without a key or a name."""
    addresses = CalendarAddresses(KEY)
    first = addresses.make("alice", now=NOW)
    assert first == addresses.make("alice", now=NOW + DAY)
    assert addresses.read(first, now=NOW + 360 * DAY) == "alice"
    assert addresses.read(first, now=NOW + 401 * DAY) is None
    assert CalendarAddresses(b"other" * 8).read(first, now=NOW) is None
    assert (CalendarAddresses(None).make("alice", now=NOW), addresses.make("", now=NOW)) == ("", "")


def test_calendar_files_fold_their_lines_and_escape_their_texts() -> None:
    """By RFC 5545: 75 bytes a line, no character cut in two."""
    entry = BookingEntry("b;1", "vision", "ana", 8, "a100", NOW, NOW + HOUR, words="画像認識," * 30)
    slots = booking_weeks.slot_rows(dataclasses.replace(document(NOW), bookings=(entry,)), OLGA)
    body = icalendar(slots, name="x", stamp=NOW)
    assert max(len(line) for line in body.split(b"\r\n")) <= 75
    whole = body.replace(b"\r\n ", b"").decode()
    assert "UID:b\\;1@gpuwarden\r\n" in whole
    assert "画像認識\\,画像認識" in whole
    assert "DTSTART:20270115T080000Z\r\n" in whole


@pytest.mark.parametrize(
    ("zone", "week", "hours"),
    [
        ("Europe/Berlin", "2027-W12", [24] * 6 + [23]),
        ("Europe/Berlin", "2026-W43", [24] * 6 + [25]),
        ("Asia/Shanghai", "2027-W12", [24] * 7),
        ("America/New_York", "2026-W44", [24] * 6 + [25]),
        ("America/Santiago", "2026-W36", [24] * 6 + [23]),
    ],
)
def test_days_are_as_long_as_the_zone_makes_them(zone: str, week: str, hours: list[int]) -> None:
    """Also where midnight itself does not exist; a week is always whole."""
    first = booking_weeks.week_of(week)
    assert first is not None
    days = booking_weeks.week_days(zone, first)
    assert [day.hours for day in days] == hours
    assert all(one.span.end == other.span.begin for one, other in itertools.pairwise(days))
    assert booking_weeks.week_name(first) == week


@pytest.mark.parametrize(
    "name", ["", "2026-W54", "2026-W00", "0000-W01", "9999-W52", "x" * 8, "\uff12026-W01"]
)
def test_a_week_that_is_none_is_none(name: str) -> None:
    """And no error of a calendar's."""
    assert booking_weeks.week_of(name) is None


def test_what_is_free_adds_up_with_what_is_booked() -> None:
    """Overlaps are summed; what is released takes nothing; a slot over midnight is in both days."""
    monday = dt.date(2026, 11, 30)
    days = booking_weeks.week_days("Europe/Berlin", monday)
    begin = days[0].span.begin
    made = [
        BookingEntry("1", "a", "u", 10, "c", begin + 20 * HOUR, begin + 30 * HOUR),
        BookingEntry("2", "b", "u", 6, "c", begin + 22 * HOUR, begin + 26 * HOUR),
        BookingEntry("3", "b", "u", 99, "other", begin, begin + 7 * DAY),
    ]
    told = dataclasses.replace(document(begin), bookings=tuple(made), cards=(Card("c", 16),))
    rows = booking_weeks.week_rows(told, days, OLGA, now=begin)
    first, second = rows[0]["cards"][0], rows[1]["cards"][0]
    assert [(span["begin"] - begin, span["cards"]) for span in first["free"]] == [
        (0.0, 16),
        (20 * HOUR, 6),
    ]
    assert [(span["begin"] - begin, span["cards"]) for span in second["free"]] == [
        (26 * HOUR, 6),
        (30 * HOUR, 16),
    ]
    assert [slot["id"] for slot in rows[0]["slots"]] == ["3", "1", "2"]
    assert rows[0]["slots"][1]["goes_on"]
    assert rows[1]["slots"][1]["from_before"]
    past = booking_weeks.week_rows(told, days, OLGA, now=begin + DAY)
    assert past[0]["cards"][0]["free"] == []


def test_a_long_queue_is_shown_in_pages_and_a_receipt_whose_job_is_gone_to_operators() -> None:
    """A row is made only where it is shown."""
    many = tuple(
        QueueEntry("slurm", str(n), f"j{n}", "alice", EntryState.PENDING, 1, NOW + n, team="vision")
        for n in range(250)
    )
    told = dataclasses.replace(document(NOW), entries=many)
    assert len(schedule_rows.queued(told)) == 250
    assert [row["id"] for row in schedule_rows.queue_rows(told, many[:2], ALICE)] == ["0", "1"]
    assert schedule_rows.receipt_rows(told, [], ALICE) == []
    assert len(schedule_rows.receipt_rows(told, [], OLGA)) == 3


def test_a_certificate_that_cannot_be_read_is_said_by_its_setting(tmp_path: Path) -> None:
    """Before the engine starts."""
    with pytest.raises(InvalidInput, match=r"scheduler\.ca_file: .* cannot be read"):
        client_for(token=None, ca_file=tmp_path / "none", timeout=1.0)
