"""What others send to the engine: messages, forms, headers, links and saved audits."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from click.testing import CliRunner
from starlette.requests import Request
from tests.ruleengine.schedules import document as schedule_document

from bench.fuzz.edges import JSON_WORDS, Attack, require
from gpuwarden.clock import SystemClock
from gpuwarden.errors import GpuwardenError, ServiceUnavailable
from gpuwarden.node_api import Goodbye, Registration, RegistrationRefused, Target, node_key
from gpuwarden.refusals import Refusal, authorise
from gpuwarden.ruleengine import bodies, booking_weeks, schedule_rows
from gpuwarden.ruleengine.audit_cli import audit
from gpuwarden.ruleengine.calendars import icalendar
from gpuwarden.ruleengine.deliveries import LastHop, MalformedMessage
from gpuwarden.ruleengine.directories import Directory
from gpuwarden.ruleengine.layouts import Message, slack_blocks
from gpuwarden.ruleengine.leave_routes import order_of
from gpuwarden.ruleengine.ledger import Ledger
from gpuwarden.ruleengine.links import Links
from gpuwarden.ruleengine.roles import Person, Role
from gpuwarden.ruleengine.schedules import decoded
from gpuwarden.ruleengine.sign_ins import SignIns, Token
from gpuwarden.ruleengine.web_settings import WebSettings
from gpuwarden.schedule_api import ScheduleError

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack

DIRECTORY = Directory.model_validate(
    {
        "version": 1,
        "operators": {"email": ["ops@example.org"], "slack": "#gpu-ops"},
        "users": {"alice": {"email": "alice@example.org", "slack": "U0ALICE01"}, "nobody": {}},
    }
)


class _Taken:
    """A channel that takes everything."""

    async def send(self, recipient: str, message: Message) -> str:
        """See Channel; every form of the message is made."""
        json.dumps(slack_blocks(message))
        message.plain()
        message.html()
        return f"taken {recipient}"

    async def aclose(self) -> None:
        """See Channel."""


def _messages(folder: Path, stack: ExitStack) -> Callable[[bytes], None]:
    ledger = Ledger(folder / "ledger.db")
    stack.callback(ledger.close)
    runner = stack.enter_context(asyncio.Runner())
    hop = LastHop(
        ledger,
        {"email": _Taken(), "slack": _Taken()},
        directory=lambda: DIRECTORY,
        clock=SystemClock(),
    )

    def attack(data: bytes) -> None:
        try:
            body = json.loads(data)
        except (ValueError, RecursionError):
            return
        with suppress(MalformedMessage):
            runner.run(hop.receive(body, ["email", "slack"]))

    return attack


def _request(body: bytes, headers: list[tuple[bytes, bytes]]) -> Request:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/keeps",
        "query_string": b"",
        "scheme": "http",
        "server": ("127.0.0.1", 9837),
        "client": ("10.0.0.9", 5),
        "headers": headers,
    }
    return Request(scope, receive)


def _forms(_folder: Path, stack: ExitStack) -> Callable[[bytes], None]:
    runner = stack.enter_context(asyncio.Runner())
    kind = [(b"content-type", b"application/x-www-form-urlencoded")]

    async def read(data: bytes) -> None:
        with suppress(Refusal):
            form = await bodies.read_form(_request(data, kind))
            for name in form:
                with suppress(Refusal):
                    bodies.word(form, name).encode()
                with suppress(Refusal):
                    bodies.seconds(form, name)
        with suppress(Refusal):
            found = await bodies.read_object(_request(data, []), bodies.MAX_BODY_BYTES)
            for name in found:
                with suppress(Refusal):
                    bodies.word(found, name).encode()
                with suppress(Refusal):
                    bodies.optional_seconds(found, name)
            for decode in (Registration.decode, Goodbye.decode):
                with suppress(RegistrationRefused):
                    decode(found)

    return lambda data: runner.run(read(data))


def _leaves(_folder: Path, stack: ExitStack) -> Callable[[bytes], None]:
    """What a scheduler asks for, which may be anybody's by now."""
    runner = stack.enter_context(asyncio.Runner())

    async def read(data: bytes) -> None:
        with suppress(Refusal):
            order = order_of(await bodies.read_object(_request(data, []), bodies.MAX_BODY_BYTES))
            require(holds=1 <= order.deadline <= 3600, what="a deadline beyond all bounds")
            require(holds=bool(order.job_id or order.run_id), what="nobody was meant")
            require(holds=order.reason.isprintable(), what="a reason that obeys")
            json.dumps([order.key, order.reason, order.successor]).encode()

    return lambda data: runner.run(read(data))


def _schedules(_folder: Path, _stack: ExitStack) -> Callable[[bytes], None]:
    """What a scheduler tells, as three readers get it; texts in it are any user's."""
    readers = (
        Person("olga", Role.OPERATOR),
        Person("alice", Role.OWNER, teams=("vision",)),
        Person("", Role.OWNER),
    )
    days = booking_weeks.week_days("Europe/Berlin", dt.date(2026, 11, 30))

    def attack(data: bytes) -> None:
        try:
            document = decoded(data)
        except (ScheduleError, ServiceUnavailable):
            return
        queue = schedule_rows.queued(document)
        for person in readers:
            rows = (
                schedule_rows.queue_rows(document, queue, person),
                schedule_rows.receipt_rows(document, [], person),
                schedule_rows.budget_rows(document, person),
                booking_weeks.week_rows(document, days, person, now=1_796_000_000.0),
            )
            json.dumps(rows, allow_nan=False).encode()
            slots = booking_weeks.slot_rows(document, person)
            lines = icalendar(slots, name=document.cluster, stamp=document.taken).split(b"\r\n")
            require(holds=all(len(line) <= 75 for line in lines), what="a line that is too long")
            require(
                holds=not any(line[:1].islower() for line in lines if line),
                what="a text became a field of the calendar",
            )

    return attack


def _who(_folder: Path, _stack: ExitStack) -> Callable[[bytes], None]:
    """Headers of a request by somebody who knows no secret."""
    web = WebSettings.model_validate(
        {
            "proxy": {
                "user_header": "X-User",
                "email_header": "X-Email",
                "groups_header": "X-Groups",
                "peers": ["10.0.0.0/8"],
                "admins": {"users": ["root"]},
            }
        }
    )
    signs = SignIns(
        web,
        [Token("ops", Role.ADMIN, "secret" * 8)],
        directory=lambda: DIRECTORY,
        clock=SystemClock(),
        external_url="http://engine:9837",
    )

    def attack(data: bytes) -> None:
        headers = []
        for line in data.split(b"\n")[:30]:
            name, _, value = line.partition(b":")
            headers.append((name.strip().lower(), value.strip()))
        request = _request(b"", headers)
        with suppress(Refusal):
            authorise(request, "secret" * 8, "web.tokens")
            require(holds=False, what="somebody without the token was let in")
        calls: tuple[Callable[[], Person | None], ...] = (
            lambda: signs.reader(request, cookies=True),
            lambda: signs.visitor(request),
            lambda: signs.changer(request, Role.OWNER),
        )
        for call in calls:
            with suppress(Refusal):
                person = call()
                if person is not None:
                    require(holds=person.name != "ops", what="somebody was taken for ops")
                    require(
                        holds=person.role is not Role.ADMIN or b"root" in data,
                        what="somebody was taken for an admin",
                    )
        with suppress(Refusal):
            signs.check_origin(request)

    return attack


def _links(_folder: Path, _stack: ExitStack) -> Callable[[bytes], None]:
    links = Links(b"k" * 32, "http://engine:9837")

    def attack(data: bytes) -> None:
        require(
            holds=links.read(data.decode("latin-1"), now=1.0) is None,
            what="a link was believed that nobody signed",
        )

    return attack


def _audits(folder: Path, _stack: ExitStack) -> Callable[[bytes], None]:
    """A saved audit, which anybody may hand in."""
    path = folder / "audit.json"
    runner = CliRunner()

    def attack(data: bytes) -> None:
        path.write_bytes(data)
        for words in (["--verify"], ["--verify", "-o", "json"], []):
            done = runner.invoke(audit, ["--file", str(path), *words])
            error = done.exception
            if error is not None and not isinstance(error, (SystemExit, GpuwardenError)):
                raise error

    return attack


_WEBHOOK = json.dumps(
    {
        "version": "4",
        "status": "firing",
        "alerts": [
            {
                "status": "firing",
                "labels": {
                    "alertname": "GpuwardenJobNotice",
                    "rule": "idle-held",
                    "job_id": "proc-1",
                    "stage": "moderate-notify:enforce",
                    "user": "alice",
                    "level": "moderate",
                },
                "annotations": {"summary": "idle", "description": "30m", "url": "https://e/1"},
                "startsAt": "2026-11-30T08:00:00.123456789Z",
                "endsAt": "0001-01-01T00:00:00Z",
                "generatorURL": "https://e/jobs/1",
                "fingerprint": "0123456789abcdef",
            }
        ],
    }
).encode()
_LEAVE = json.dumps(
    {
        "job_id": "slurm-c1-7-0",
        "at": "epoch",
        "then": "requeue",
        "deadline_seconds": 600,
        "cause": "priority",
        "reason": "high-1 goes first",
        "successor": "8",
        "key": "pre-1",
    },
    separators=(",", ":"),
).encode()
_TARGET = Target.parse("10.0.0.5:9835")
_REGISTRATION = Registration(
    _TARGET,
    node_key(_TARGET, "0123456789abcdef0123456789abcdef"),
    "01234567-89ab-cdef-0123-456789abcdef",
    exporter="0.1.0",
).encode()

ATTACKS = (
    Attack(
        "Alertmanager's messages",
        _messages,
        (_WEBHOOK, _WEBHOOK.replace(b"firing", b"resolved")),
        (*JSON_WORDS, b'"alerts":', b'"labels":', b'"startsAt": "', b"Z", b"#", b"<b>", b"\\n"),
        pure=False,
        of="engine",
    ),
    Attack(
        "forms and bodies",
        _forms,
        (
            b"rule=idle-held&for=2h&reason=deadline&ticket=abc",
            b'{"rule":"idle-held","for":"2h","reason":"deadline"}',
            _REGISTRATION,
        ),
        (
            *JSON_WORDS,
            b"&",
            b"=",
            b"%",
            b"%ed%a0%80",
            b";",
            b"+",
            b"\xe2\x80\xae",
            b"1e9d",
            b"[::1]",
        ),
        of="engine",
    ),
    Attack(
        "leaves that are asked for",
        _leaves,
        (
            _LEAVE,
            _LEAVE.replace(b'"job_id":"slurm-c1-7-0"', b'"run_id":"run-1"').replace(b"600", b"1.5"),
        ),
        (*JSON_WORDS, b'"deadline_seconds":', b'"reason":"', b"1e999", b"\xe2\x80\xae", b"\\ud800"),
        of="engine",
    ),
    Attack(
        "the scheduler's document",
        _schedules,
        (schedule_document(1_796_000_000.0).encode(),),
        (*JSON_WORDS, b'"start":', b'"earliest":', b'"gpus":', b"1e999", b"1e15", b"-1", b"\\r\\n"),
        of="engine",
    ),
    Attack(
        "who asks",
        _who,
        (
            b"Host: engine:9837\nAuthorization: Bearer abc\nCookie: gpuwarden=abc.def",
            b"Host: engine:9837\nX-User: alice\nX-Email: alice@example.org\nX-Groups: a,b",
            b"Host: [::1]:9837\nOrigin: http://engine:9837",
        ),
        (
            b"Host: ",
            b"Origin: ",
            b"[",
            b"]",
            b"Bearer ",
            b"gpuwarden=",
            b"; ",
            b"\xe9",
            b"X-User: ",
        ),
        of="engine",
    ),
    Attack(
        "signed links",
        _links,
        (b"WyJhIiwiYiIsbnVsbCwiYyIsMV0.sig",),
        (b".", b"-", b"="),
        of="engine",
    ),
    Attack(
        "audits to be verified",
        _audits,
        ((Path(__file__).parent / "seeds/audit.json").read_bytes(),),
        JSON_WORDS,
        of="engine",
    ),
)
