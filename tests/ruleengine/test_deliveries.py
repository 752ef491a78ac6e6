"""The last hop against a real mail server and a Slack that can refuse."""

from __future__ import annotations

import asyncio
import contextlib
import email
import email.policy
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from aiosmtpd.controller import Controller
from tests.ruleengine.test_ledger import add
from tests.ruleengine.worlds import OwnedClock, Sink, slack, webhook
from tests.servers import free_port

from gpuwarden.clock import SystemClock
from gpuwarden.ruleengine.channels import EmailChannel, SlackChannel
from gpuwarden.ruleengine.deliveries import (
    AT_ONCE,
    NO_ADDRESS,
    LastHop,
    MalformedMessage,
    Receipt,
)
from gpuwarden.ruleengine.directories import Directory
from gpuwarden.ruleengine.ledger import Ledger
from gpuwarden.ruleengine.records import Change
from gpuwarden.ruleengine.settings import SlackSettings, SmtpSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from gpuwarden.clock import Clock
    from gpuwarden.ruleengine.layouts import Message

STAGE = "moderate-notify:enforce"
DIRECTORY = Directory.model_validate(
    {
        "version": 1,
        "operators": {"email": ["ops@example.org"], "slack": "#gpu-ops"},
        "users": {
            "alice": {"email": "alice@example.org", "slack": "U0ALICE01"},
            "mailonly": {"email": "mail@example.org"},
            "nobody": {},
        },
    }
)


@dataclass
class Mailbox:
    """What aiosmtpd hands over; `refuse` is its answer instead of 250."""

    mails: list[tuple[list[str], str]] = field(default_factory=list)
    refuse: str = ""
    refuse_recipient: str = ""

    async def handle_RCPT(  # noqa: N802 - aiosmtpd's interface
        self, _server: Any, _session: Any, envelope: Any, address: str, _options: Any
    ) -> str:
        """Take or refuse a recipient."""
        if self.refuse_recipient:
            return self.refuse_recipient
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(  # noqa: N802 - aiosmtpd's interface
        self, _server: Any, _session: Any, envelope: Any
    ) -> str:
        """Take or refuse a mail."""
        if self.refuse:
            return self.refuse
        self.mails.append((envelope.rcpt_tos, envelope.content.decode()))
        return f"250 queued as {len(self.mails)}"


@dataclass
class Post:
    """A last hop between its ledger, a mail server and Slack."""

    hop: LastHop
    ledger: Ledger
    case_id: int
    mailbox: Mailbox
    slack: Sink
    reply: dict[str, Any]

    async def send(
        self, *channels: str, target: str | None = None, status: str = "firing", **labels: str
    ) -> Receipt:
        """Deliver one alert of the case through the channels."""
        alert = {
            "labels": {
                "alertname": "GpuwardenJobNotice",
                "rule": "idle",
                "job_id": "proc-1",
                "user": "alice",
                "level": "moderate",
                "mode": "enforce",
                "stage": "moderate-notify",
                **labels,
            },
            "annotations": {"summary": "Job proc-1: idle", "description": "It is idle.\nReally."},
            "startsAt": "2026-01-01T00:00:00Z",
            "generatorURL": "http://engine:9837/jobs/proc-1",
        }
        return await self.hop.receive(
            webhook([alert], status), list(channels), channel_target=target
        )

    def complete(self) -> bool:
        """Whether the ledger has every proof."""
        return self.ledger.delivery(self.case_id, [STAGE]).complete

    def states(self) -> dict[str, str]:
        """State of each channel's notice."""
        return {n.channel: n.state for n in self.ledger.notices(self.case_id)}


@pytest.fixture
def mail() -> Iterator[tuple[int, Mailbox]]:
    """A mail server on the loopback."""
    mailbox, port = Mailbox(), free_port()
    controller = Controller(mailbox, hostname="127.0.0.1", port=port)
    controller.start()
    try:
        yield port, mailbox
    finally:
        controller.stop()


@contextlib.asynccontextmanager
async def post(
    folder: Path,
    port: int,
    mailbox: Mailbox,
    user: str = "alice",
    *,
    patience: str = "20s",
    clock: Clock | None = None,
) -> AsyncIterator[Post]:
    """A last hop with both channels, whose mail server has so much time for a message."""
    with Ledger(folder / "l") as ledger, slack() as (sink, reply):
        stored = add(ledger)
        owned = msgspec.structs.replace(stored.case, user=user)
        ledger.save([Change(stored.id, owned, "enforce")], time=2.0)
        clock = clock or SystemClock()
        smtp = SmtpSettings.model_validate(
            {
                "host": "127.0.0.1",
                "port": port,
                "tls": "none",
                "sender": "gpuwarden@example.org",
                "timeout": patience,
            }
        )
        channels = {
            "email": EmailChannel(smtp, password=None, ca_file=None, clock=clock),
            "slack": SlackChannel(
                SlackSettings(url=sink.url, token_file="t"), "xoxb-1", clock=clock
            ),
        }
        hop = LastHop(ledger, channels, directory=lambda: DIRECTORY, clock=clock)
        try:
            yield Post(hop, ledger, stored.id, mailbox, sink, reply)
        finally:
            for channel in channels.values():
                await channel.aclose()


@pytest.mark.parametrize("word", ["30", "date"])
def test_a_server_that_asks_to_be_left_alone_is(
    tmp_path: Path, mail: tuple[int, Mailbox], word: str
) -> None:
    """Slack's 429 says for how long; the mail goes out meanwhile, and nobody is lost."""
    clock = OwnedClock()
    said = word if word == "30" else formatdate(clock.wall() + 30, usegmt=True)

    async def story() -> None:
        async with post(tmp_path, *mail, clock=clock) as office:
            office.slack.headers, good = {"Retry-After": said}, dict(office.reply)
            office.reply.update(status=429, body={"ok": False, "error": "ratelimited"})
            assert (await office.send("slack", "email")).retry
            office.reply.update(good)
            clock.pass_(29)
            receipt = await office.send("slack", "email")
            assert receipt.retry
            assert "left alone for another 1 s" in receipt.failed[0]
            assert len(office.slack.received) == 1
            assert office.states() == {"email": "proven", "slack": "failed"}
            clock.pass_(1)
            assert not (await office.send("slack", "email")).failed
            assert office.states() == {"email": "proven", "slack": "proven"}

    asyncio.run(story())


def test_both_servers_answers_are_the_proof(tmp_path: Path, mail: tuple[int, Mailbox]) -> None:
    """The mail server's reply and Slack's ts stand in the ledger; the notice is complete."""

    async def story() -> None:
        async with post(tmp_path, *mail) as office:
            receipt = await office.send("slack", "email")
            assert receipt == Receipt(delivered=2, failed=(), retry=False)
            proofs = {n.channel: n.proof for n in office.ledger.notices(office.case_id)}
            assert "queued as 1" in proofs["email"]
            assert "ts=1800000000." in proofs["slack"]
            assert office.complete()
            ((to, text),) = office.mailbox.mails
            assert to == ["alice@example.org"]
            assert "Subject: [gpuwarden] Job proc-1: idle" in text
            message = office.slack.received[0]
            assert message.json()["channel"] == "U0ALICE01"
            assert message.headers["authorization"] == "Bearer xoxb-1"

    asyncio.run(story())


def test_words_that_are_no_text_are_a_proof_that_is_kept(
    tmp_path: Path, mail: tuple[int, Mailbox]
) -> None:
    """Or the message would be sent again at each repeat; mail servers answer in GBK, say."""

    async def story() -> None:
        async with post(tmp_path, *mail) as office:
            office.reply.update(body={"ok": True, "channel": "C1", "ts": "1800000000.\ud800"})
            assert (await office.send("slack")).delivered == 1
            (notice,) = office.ledger.notices(office.case_id)
            assert notice.proof == "slack channel=C1 ts=1800000000.?"
            await office.send("slack")
            assert len(office.slack.received) == 1

    asyncio.run(story())


def test_a_repeat_sends_nothing_again(tmp_path: Path, mail: tuple[int, Mailbox]) -> None:
    """Alertmanager repeats itself; people get one message."""

    async def story() -> None:
        async with post(tmp_path, *mail) as office:
            for _ in range(3):
                await office.send("slack", "email")
            assert len(office.mailbox.mails) == 1
            assert len(office.slack.received) == 1

    asyncio.run(story())


def test_overlapping_repeats_send_once(tmp_path: Path, mail: tuple[int, Mailbox]) -> None:
    """A retry that overtakes the first try waits for its result."""

    async def story() -> None:
        async with post(tmp_path, *mail) as office:
            receipts = await asyncio.gather(*(office.send("email") for _ in range(4)))
            assert {receipt.delivered for receipt in receipts} == {1}
            assert len(office.mailbox.mails) == 1

    asyncio.run(story())


@pytest.mark.parametrize(
    ("reply", "retry"),
    [
        ({"status": 200, "body": {"ok": False, "error": "channel_not_found"}}, False),
        ({"status": 200, "body": {"ok": False, "error": "ratelimited"}}, True),
        ({"status": 200, "body": {"ok": True}}, True),
        ({"status": 200, "body": ["ok"]}, True),
        ({"status": 500, "body": None}, True),
        ({"status": 429, "body": None}, True),
    ],
)
def test_slack_took_it_only_with_ok_and_ts(
    tmp_path: Path, mail: tuple[int, Mailbox], reply: dict[str, Any], retry: bool
) -> None:
    """Everything else is a failure, also with HTTP 200; the mail is not held up by it."""

    async def story() -> None:
        async with post(tmp_path, *mail) as office:
            office.reply.update(reply)
            receipt = await office.send("slack", "email")
            assert receipt.delivered == 1
            assert receipt.retry is retry
            assert office.states() == {"slack": "failed", "email": "proven"}
            assert not office.complete()
            office.reply.update(status=200, body=None)
            await office.send("slack", "email")
            assert office.complete()
            assert len(office.mailbox.mails) == 1

    asyncio.run(story())


@pytest.mark.parametrize(
    ("refuse", "recipient", "retry"),
    [
        ("550 no such user", "", False),
        ("451 try later", "", True),
        ("", "550 unknown recipient", False),
        ("", "450 greylisted", True),
    ],
)
def test_a_refused_mail_is_no_delivery(
    tmp_path: Path, mail: tuple[int, Mailbox], refuse: str, recipient: str, *, retry: bool
) -> None:
    """5xx is final, 4xx may be tried again; neither is a proof."""
    mail[1].refuse, mail[1].refuse_recipient = refuse, recipient

    async def story() -> None:
        async with post(tmp_path, *mail) as office:
            receipt = await office.send("email")
            assert receipt.delivered == 0
            assert receipt.retry is retry
            assert not office.complete()
            (notice,) = office.ledger.notices(office.case_id)
            assert (refuse or recipient)[4:] in notice.error

    asyncio.run(story())


def test_a_mail_server_that_is_down_is_tried_again(
    tmp_path: Path, mail: tuple[int, Mailbox]
) -> None:
    """Nobody listens: temporary."""

    async def story() -> None:
        async with post(tmp_path, free_port(), mail[1]) as office:
            receipt = await office.send("email")
            assert receipt.retry
            assert office.states() == {"email": "failed"}

    asyncio.run(story())


def test_without_any_address_the_notice_is_required_and_failed(
    tmp_path: Path, mail: tuple[int, Mailbox]
) -> None:
    """So that it can never count as complete, and the operators can read why."""

    async def story() -> None:
        async with post(tmp_path, *mail, user="nobody") as office:
            receipt = await office.send("slack", "email")
            assert receipt.failed
            assert not receipt.retry
            assert not office.complete()
            assert {n.error for n in office.ledger.notices(office.case_id)} == {NO_ADDRESS}

    asyncio.run(story())


def test_a_channel_without_address_is_no_hindrance(
    tmp_path: Path, mail: tuple[int, Mailbox]
) -> None:
    """Who has only mail is reached by mail."""

    async def story() -> None:
        async with post(tmp_path, *mail, user="mailonly") as office:
            await office.send("slack", "email")
            assert office.complete()
            assert office.slack.received == []

    asyncio.run(story())


def test_the_ledger_knows_the_owner_better_than_the_message(
    tmp_path: Path, mail: tuple[int, Mailbox]
) -> None:
    """A label that names another user redirects nothing."""

    async def story() -> None:
        async with post(tmp_path, *mail, user="mailonly") as office:
            await office.send("slack", "email", user="alice")
            assert [to for to, _ in office.mailbox.mails] == [["mail@example.org"]]

    asyncio.run(story())


def test_a_team_channel_reads_along_and_counts_for_nothing(
    tmp_path: Path, mail: tuple[int, Mailbox]
) -> None:
    """Only the owner's proof starts the deadline."""

    async def story() -> None:
        async with post(tmp_path, *mail) as office:
            await office.send("slack", target="#vision")
            assert office.slack.received[0].json()["channel"] == "#vision"
            assert office.ledger.notices(office.case_id) == []
            assert not office.complete()

    asyncio.run(story())


def test_pages_go_to_the_operators(tmp_path: Path, mail: tuple[int, Mailbox]) -> None:
    """An alert of the level page is not the owner's."""

    async def story() -> None:
        async with post(tmp_path, *mail) as office:
            await office.send("slack", "email", level="page")
            assert [to for to, _ in office.mailbox.mails] == [["ops@example.org"]]
            assert office.slack.received[0].json()["channel"] == "#gpu-ops"

    asyncio.run(story())


def test_resolved_alerts_are_no_messages(tmp_path: Path, mail: tuple[int, Mailbox]) -> None:
    """The news of an end is an alert of its own."""

    async def story() -> None:
        async with post(tmp_path, *mail) as office:
            assert await office.send("email", status="resolved") == Receipt(0, (), retry=False)
            assert office.mailbox.mails == []

    asyncio.run(story())


def test_nothing_in_a_message_becomes_a_mention_or_a_header(
    tmp_path: Path, mail: tuple[int, Mailbox]
) -> None:
    """What a job is called cannot page a channel nor add a recipient."""

    async def story() -> None:
        async with post(tmp_path, *mail) as office:
            alert = {
                "labels": {"user": "alice", "level": "ended", "alertname": "x"},
                "annotations": {
                    "summary": "job <!channel>\r\nBcc: eve@example.org",
                    "description": "<@U1> & <http://evil|click>",
                },
                "startsAt": "2026-01-01T00:00:00Z",
                "generatorURL": "javascript:alert(1)",
            }
            await office.hop.receive(webhook([alert]), ["slack", "email"])
            text = office.slack.received[0].json()["text"]
            assert "<!channel>" not in text
            assert "<@U1>" not in text
            assert "javascript" not in text
            ((to, body),) = office.mailbox.mails
            assert to == ["alice@example.org"]
            assert "\nBcc:" not in body

    asyncio.run(story())


@pytest.mark.parametrize(
    "body",
    [
        None,
        [],
        {},
        {"alerts": {}},
        {"alerts": [1]},
        {"alerts": [{"status": "firing"}]},
        {"alerts": [{"status": "firing", "labels": {}, "annotations": {}}]},
    ],
)
def test_a_body_that_alertmanager_would_not_send_is_refused(
    tmp_path: Path, mail: tuple[int, Mailbox], body: object
) -> None:
    """Before anything of it is believed."""

    async def story() -> None:
        async with post(tmp_path, *mail) as office:
            with pytest.raises(MalformedMessage):
                await office.hop.receive(body, ["email"])

    asyncio.run(story())


@pytest.mark.parametrize(
    "summary",
    [
        "Job proc-1: idle",
        # With its name a little longer than a line, without it not: Python folds right after it.
        "Job proc-1c9f2a7d-30954-4711220 was ended by the rule idle-held",
        "Job proc-1c9f2a7d-30954-4711220 on node-7.example.org:9835: memory held and nothing done",
        "显存被占用但没有任何计算在进行 请检查你的任务",
        "x" * 150,
    ],
)
def test_a_subject_arrives_as_it_was_written(
    tmp_path: Path, mail: tuple[int, Mailbox], summary: str
) -> None:
    """Also for readers that show the fold of a long header as it came."""

    async def story() -> None:
        async with post(tmp_path, *mail) as office:
            alert = {
                "labels": {"user": "alice", "level": "ended", "alertname": "x"},
                "annotations": {"summary": summary, "description": "显存 " * 500},
                "startsAt": "2026-01-01T00:00:00Z",
            }
            await office.hop.receive(webhook([alert]), ["email"])
            ((_, text),) = office.mailbox.mails
            assert text.startswith("Subject: [gpuwarden] ")
            assert text.isascii()
            assert max(len(line) for line in text.splitlines()) < 200
            parsed = email.message_from_string(text, policy=email.policy.default)
            assert parsed["Subject"].strip() == f"[gpuwarden] {summary}"
            plain, rich = parsed.iter_parts()
            assert [part.get_content_type() for part in (plain, rich)] == [
                "text/plain",
                "text/html",
            ]
            assert "显存 显存" in plain.get_content()
            assert "显存 显存" in rich.get_content()

    asyncio.run(story())


class Turnstile:
    """A channel that lets nobody through until it is opened."""

    def __init__(self) -> None:
        self.inside = 0
        self.opened = asyncio.Event()

    async def send(self, recipient: str, message: Message) -> str:
        """Wait inside."""
        self.inside += 1
        await self.opened.wait()
        return f"{recipient}: {message.subject}"

    async def aclose(self) -> None:
        """Nothing is held."""


def test_a_flood_of_alerts_is_sent_a_few_at_a_time(tmp_path: Path) -> None:
    """A thousand alerts are not a thousand connections to the mail server."""

    async def story() -> None:
        with Ledger(tmp_path / "l") as ledger:
            gate = Turnstile()
            hop = LastHop(ledger, {"email": gate}, directory=lambda: DIRECTORY, clock=SystemClock())
            alerts = [
                {
                    "labels": {"user": "alice", "level": "ended", "job_id": f"proc-{number}"},
                    "annotations": {"summary": "s"},
                    "startsAt": "2026-01-01T00:00:00Z",
                }
                for number in range(50)
            ]
            sending = asyncio.create_task(hop.receive(webhook(alerts), ["email"]))
            for _ in range(200):
                await asyncio.sleep(0)
            assert gate.inside == AT_ONCE
            gate.opened.set()
            assert (await sending).delivered == 50

    asyncio.run(story())
