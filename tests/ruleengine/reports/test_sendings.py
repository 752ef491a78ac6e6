"""The weekly mail: whoever asked for it gets it once, with proof; failures reach the operators."""

from __future__ import annotations

import asyncio
import datetime as dt
import email
import email.policy
import sqlite3
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import yaml
from aiosmtpd.controller import Controller
from tests.ruleengine.reports.stocks import ledger
from tests.ruleengine.test_deliveries import Mailbox
from tests.ruleengine.worlds import OwnedClock, Sink
from tests.servers import free_port

from gpuwarden.errors import InvalidInput
from gpuwarden.ruleengine.reports.mailings import Mailings
from gpuwarden.ruleengine.reports.runs import Sources
from gpuwarden.ruleengine.reports.sendings import Order, Result, record_path, send_due
from gpuwarden.ruleengine.serving import check_files
from gpuwarden.ruleengine.settings import load_settings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from email.message import EmailMessage
    from pathlib import Path

    from tests.servers import Server

MONDAY = dt.datetime(2025, 6, 16, 8, tzinfo=dt.UTC).timestamp()
"""The day after the one that Prometheus knows, an hour after the report is due."""
RULES = """
version: 1
timezone: Europe/Berlin
rules: []
"""


@dataclass
class Office:
    """An engine.yaml, a mail server and an Alertmanager around it, and a clock."""

    config: Path
    mailbox: Mailbox
    alerts: Sink
    clock: OwnedClock

    def send(self, **order: Any) -> dict[str, Result]:
        """What `gpuwarden report --send` does, by team and address."""

        async def sent() -> list[Result]:
            settings = load_settings(self.config)
            async with httpx.AsyncClient(trust_env=False) as client:
                sources = Sources.of(settings, client)
                return await send_due(settings, sources, self.clock, Order(**order))

        return {f"{r.mailing.team} {r.mailing.recipient}": r for r in asyncio.run(sent())}

    def states(self, **order: Any) -> dict[str, str]:
        """The same without words."""
        return {key: result.state for key, result in self.send(**order).items()}

    @property
    def mails(self) -> list[EmailMessage]:
        """What arrived."""
        return [
            email.message_from_string(text, policy=email.policy.default)
            for _, text in self.mailbox.mails
        ]  # type: ignore[misc]

    def change(self, **values: Any) -> None:
        """Change engine.yaml."""
        config = yaml.safe_load(self.config.read_text())
        self.config.write_text(yaml.safe_dump(config | values))


@pytest.fixture
def office(tmp_path: Path, server: Server) -> Iterator[Office]:
    """Two teams with a contact, of which one wants reports."""
    mailbox, port = Mailbox(), free_port()
    controller = Controller(mailbox, hostname="127.0.0.1", port=port)
    controller.start()
    (tmp_path / "rules.yaml").write_text(RULES)
    ledger(tmp_path / "ledger.sqlite")
    people = {name: {"team": team} for name, team in (("ana", "vision"), ("ben", "robotics"))}
    people["cho"] = {"team": "vision", "email": "cho@example.org"}
    people["gone"] = {"team": "vision", "email": "gone@example.org", "left": "2025-01-01"}
    directory = {
        "version": 1,
        "operators": {"email": ["ops@example.org"]},
        "users": people,
        "teams": {
            "vision": {"contact": {"email": "lead@example.org"}},
            "robotics": {"contact": {"email": "other@example.org"}},
        },
    }
    (tmp_path / "directory.yaml").write_text(yaml.safe_dump(directory))
    config = tmp_path / "engine.yaml"
    with Sink(lambda _method, _request: (200, b"{}")) as alerts:
        config.write_text(
            yaml.safe_dump(
                {
                    "version": 1,
                    "prometheus": {"url": server.url},
                    "rules": ["rules.yaml"],
                    "directory": "directory.yaml",
                    "ledger": "ledger.sqlite",
                    "alertmanagers": [alerts.url],
                    "smtp": {
                        "host": "127.0.0.1",
                        "port": port,
                        "tls": "none",
                        "sender": "gw@example.org",
                    },
                    "reports": {"teams": ["vision"]},
                    "external_url": "https://engine.example.org",
                }
            )
        )
        yield Office(config, mailbox, alerts, OwnedClock(MONDAY))
    controller.stop()


def test_each_gets_theirs_once(office: Office) -> None:
    """The team's contact and the operators, with the server's word as proof; never again."""
    office.change(reports={"teams": ["vision"], "operators": True})
    first = office.send()

    assert {key: result.state for key, result in first.items()} == {
        "vision lead@example.org": "proven",
        " ops@example.org": "proven",
    }
    assert all("queued as" in result.words for result in first.values())
    assert set(office.states().values()) == {"known"}
    office.clock.pass_(3 * 86400)
    assert set(office.states().values()) == {"known"}
    assert len(office.mails) == 2


def test_the_mail_says_the_answer_and_brings_the_page(office: Office) -> None:
    """Text, HTML and an attachment; the week is that of the zone, and names are the team's."""
    office.send()
    (mail,) = office.mails

    assert mail["Subject"] == "[gpuwarden] Team vision, 9 to 15 June 2025"
    text = mail.get_body(("plain",)).get_content()  # type: ignore[union-attr]
    # until midnight in Berlin: 11 h, 5 h shared, and 8 h on the node that then went dark
    assert "Team vision: 2 people held cards for 24.0 card-hours" in text
    assert "cannot be compared with the time before" in text
    (attached,) = mail.iter_attachments()
    assert attached.get_filename() == "gpuwarden-vision-2025-06-09.html"
    page = attached.get_content()
    assert page.startswith("<!doctype html>")
    assert "ben" not in text + mail.get_body(("html",)).get_content()  # type: ignore[union-attr]
    assert ">ben<" not in page
    assert mail["Auto-Submitted"] == "auto-generated"


def test_nothing_is_sent_before_it_is_due(office: Office) -> None:
    """At half past six in Berlin the last report is a week old, and nobody lost it."""
    office.clock.jump(-3.5 * 3600)

    assert set(office.states().values()) == {"known"}
    assert office.mails == []
    assert office.alerts.received == []


def test_what_failed_is_tried_again_and_told_to_the_operators(office: Office) -> None:
    """A mail server that refuses for now: a page through Alertmanager, and another try later."""
    office.mailbox.refuse = "451 come back later"
    assert set(office.states().values()) == {"failed"}
    (alert,) = office.alerts.received[-1].json()
    assert alert["labels"] == {
        "alertname": "GpuwardenReportNotSent",
        "service": "gpuwarden-jobs",
        "level": "page",
    }
    assert "come back later" in alert["annotations"]["description"]

    office.mailbox.refuse = ""
    office.clock.pass_(3600)

    assert set(office.states().values()) == {"proven"}
    assert len(office.alerts.received) == 1


def test_an_address_that_is_refused_for_good_is_told_once(office: Office) -> None:
    """Trying again would change nothing."""
    office.mailbox.refuse_recipient = "550 nobody here"

    assert set(office.states().values()) == {"refused"}
    assert set(office.states().values()) == {"known"}
    assert len(office.alerts.received) == 1


def test_it_is_given_up_after_a_while(office: Office) -> None:
    """Once, and with a word to the operators; by hand it still goes."""
    office.mailbox.refuse = "451 come back later"
    office.send()
    office.clock.pass_(2 * 86400 + 3600)

    assert set(office.states().values()) == {"late"}
    assert set(office.states().values()) == {"known"}
    office.mailbox.refuse = ""
    assert set(office.states(again=True).values()) == {"proven"}


def test_who_is_unsure_does_not_send_twice(office: Office) -> None:
    """A process that died between handing a mail over and writing its proof down."""
    office.send()
    with sqlite3.connect(record_path(load_settings(office.config))) as db:
        db.execute("UPDATE mailings SET state='sending', proof='' WHERE team='vision'")
    db.close()

    assert office.states() == {"vision lead@example.org": "unsure"}
    assert len(office.mails) == 1
    again = office.states(again=True, team="vision")
    assert again == {"vision lead@example.org": "proven"}
    first, second = (mail["Message-ID"] for mail in office.mails)
    assert first == second


def test_a_dry_run_sends_and_writes_nothing(office: Office) -> None:
    """It says what is due and to whom."""
    assert set(office.states(dry=True).values()) == {"would"}
    assert office.mails == []
    assert set(office.states().values()) == {"proven"}


def test_members_get_it_where_they_are_asked_for(office: Office) -> None:
    """Those of the team who have an address and are still there."""
    office.change(reports={"teams": ["vision"], "to": "both"})

    assert set(office.states()) == {"vision lead@example.org", "vision cho@example.org"}


def test_without_history_nobody_gets_half_a_report(office: Office, server: Server) -> None:
    """Prometheus is gone: nothing is sent, and it is tried again."""
    office.change(prometheus={"url": f"http://127.0.0.1:{free_port()}"})
    assert set(office.states().values()) == {"failed"}
    assert office.mails == []

    office.change(prometheus={"url": server.url})
    assert set(office.states().values()) == {"proven"}


def test_a_replica_of_prometheus_stands_in(office: Office, server: Server) -> None:
    """The first of two servers is down: the other one holds the same."""
    gone = f"http://127.0.0.1:{free_port()}"
    office.change(prometheus={"replicas": [gone, server.url]})

    assert set(office.states().values()) == {"proven"}


@pytest.mark.parametrize(
    ("reports", "why"),
    [
        ({}, "go to nobody"),
        ({"teams": ["vision", "vision"]}, "names one twice"),
        ({"teams": ["vision"], "weekday": "monday"}, "weekday"),
        ({"teams": ["vision"], "at": 7}, "not a time of day"),
        ({"teams": ["vision"], "zone": "CET"}, "not a time zone"),
        ({"teams": ["vision"], "give_up_after": "7d"}, "give_up_after"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(
    office: Office, reports: dict[str, Any], why: str
) -> None:
    """With the place in engine.yaml."""
    office.change(reports=reports)
    with pytest.raises(InvalidInput, match=why):
        load_settings(office.config)


def test_the_engines_check_knows_a_team_that_is_none(office: Office) -> None:
    """A slip of the pen is found when the file is written, and not on a Monday."""
    check_files(load_settings(office.config))
    office.change(reports={"teams": ["vision", "visoin"]})

    with pytest.raises(InvalidInput, match=r"reports\.teams: nobody in the directory is of visoin"):
        check_files(load_settings(office.config))


def test_two_processes_do_not_send_at_once(office: Office) -> None:
    """The second is told that there is a first."""
    with (
        Mailings(record_path(load_settings(office.config))),
        pytest.raises(Exception, match="another `gpuwarden report --send` runs"),
    ):
        office.send()
