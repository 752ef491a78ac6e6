"""`gpuwarden report --send`: the weekly reports that are due, each once to each address.

It is run every hour by a timer, or by hand. What is due, engine.yaml says; what was sent, a file
beside the ledger knows. It is a process of its own: a report takes minutes of Prometheus' time, and
no tick of the engine waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import structlog

from gpuwarden.errors import GpuwardenError, InvalidInput, ServiceUnavailable
from gpuwarden.ruleengine.alertmanager import Alert, AlertmanagerClient
from gpuwarden.ruleengine.channels import EmailChannel, Undelivered
from gpuwarden.ruleengine.notices import SERVICE
from gpuwarden.ruleengine.recipients import day_of
from gpuwarden.ruleengine.reports import runs
from gpuwarden.ruleengine.reports.mailings import Mailing, Mailings
from gpuwarden.ruleengine.reports.mails import mail
from gpuwarden.ruleengine.reports.periods import last_week, period_of
from gpuwarden.ruleengine.rulebooks import RuleBook
from gpuwarden.ruleengine.serving import read_secrets

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from typing import Any

    from gpuwarden.clock import Clock
    from gpuwarden.ruleengine.directories import Directory
    from gpuwarden.ruleengine.report_settings import ReportSettings
    from gpuwarden.ruleengine.settings import Settings

ALERT_SECONDS: Final = 2.5 * 3600
"""How long operators are told of a failure if the next hourly run does not renew it."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one report to one address.

    Attributes:
        mailing: which.
        state: `proven`, `known` (sent before), `failed`, `refused`, `unsure`, `late` or `would`.
        words: the server's proof, or why not.
    """

    mailing: Mailing
    state: str
    words: str

    @property
    def failed(self) -> bool:
        """Whether a person must look."""
        return self.state in ("failed", "refused", "unsure", "late")

    @property
    def line(self) -> str:
        """For people."""
        whose = self.mailing.team or "the fleet"
        return f"{whose} to {self.mailing.recipient or 'nobody'}: {self.state}: {self.words}"


@dataclass(frozen=True, slots=True)
class Order:
    """What is asked for.

    Attributes:
        team: only this one's report, or None.
        again: also what was sent, or may have been sent, before.
        dry: say it only.
    """

    team: str | None = None
    again: bool = False
    dry: bool = False


def record_path(settings: Settings) -> Path:
    """Where it is written down what was sent."""
    return settings.path(settings.values.ledger).with_name("reports.sqlite")


def addresses(
    chosen: ReportSettings, directory: Directory, team: str, now: float
) -> tuple[str, ...]:
    """Who gets a team's report; of the fleet's (no team) the operators.

    Who has left by the directory gets none.
    """
    if not team:
        return directory.operators.addresses("email")
    found: list[str | None] = []
    if chosen.to in ("contact", "both"):
        contact = directory.team(team).contact
        found.append(None if contact is None else contact.email)
    if chosen.to in ("members", "both"):
        found += [
            user.email
            for user in directory.users.values()
            if team in user.member_of and user.present(day_of(user, now))
        ]
    return tuple(dict.fromkeys(address for address in found if address))


async def send_due(
    settings: Settings, sources: runs.Sources, clock: Clock, order: Order
) -> list[Result]:
    """Send what is due, and tell the operators of what could not be sent.

    Args:
        settings: of engine.yaml, with `reports`.
        sources: of the reports.
        clock: wall time.
        order: what is asked for.

    Raises:
        InvalidInput: engine.yaml has no `reports`, or names nobody as that team.
        LedgerUnusable: what was sent cannot be read or written down: nothing is sent then.
    """
    chosen, smtp = settings.values.reports, settings.values.smtp
    if chosen is None or smtp is None:
        raise InvalidInput("engine.yaml has no `reports`: nobody asked for a weekly report")
    book = RuleBook(settings)
    teams = (*chosen.teams, *(("",) if chosen.operators else ()))
    if order.team is not None:
        if order.team not in teams:
            raise InvalidInput(f'--team: reports.teams of engine.yaml does not name "{order.team}"')
        teams = (order.team,)
    now = clock.wall()
    zone = chosen.zone or book.rules.timezone
    begin, end, due = last_week(now, zone, weekday=chosen.weekday_number, minute=chosen.at)
    late = now > due + chosen.give_up_after and not order.again
    channel = EmailChannel(
        smtp,
        password=read_secrets(settings).smtp_password,
        ca_file=None if smtp.ca_file is None else settings.path(smtp.ca_file),
        clock=clock,
    )
    results: list[Result] = []
    with Mailings(record_path(settings)) as known:
        sender = _Sender(settings, sources, clock, order, channel, known)
        for team in teams:
            to = addresses(chosen, book.directory, team, now)
            mailings = [Mailing(team, begin, address) for address in to]
            if not mailings:
                nobody = Mailing(team, begin, "")
                results.append(Result(nobody, "failed", "the directory has no mail address"))
            elif late:
                results += sender.given_up(mailings)
            else:
                results += await sender.team(team, mailings, (begin, end, zone))
    if not order.dry:
        await _tell(settings, clock, results)
    return results


@dataclass(frozen=True)
class _Sender:
    settings: Settings
    sources: runs.Sources
    clock: Clock
    order: Order
    channel: EmailChannel
    known: Mailings

    def given_up(self, mailings: Sequence[Mailing]) -> list[Result]:
        """Those that were tried and never sent; one whose time passed before is nobody's loss."""
        return [
            self._settled(each, "late", "given up; --again sends it")
            if self.known.state(each) in ("failed", "sending")
            else Result(each, "known", "nothing is due")
            for each in mailings
        ]

    def _settled(self, mailing: Mailing, state: str, words: str) -> Result:
        """One that is told to the operators once, and then left alone."""
        if not self.order.dry:
            self.known.note(mailing, "refused", time=self.clock.wall(), error=words)
        return Result(mailing, state, words)

    async def team(
        self, team: str, mailings: Sequence[Mailing], week: tuple[float, float, str]
    ) -> list[Result]:
        """One report to everybody who has not had it."""
        open_, results = [], []
        for each in mailings:
            state = self.known.state(each)
            if self.order.again or state in ("", "failed"):
                open_.append(each)
            elif state == "sending":
                words = "it may have arrived: --again sends it once more"
                results.append(self._settled(each, "unsure", words))
            else:
                words = "it was sent before" if state == "proven" else "it was given up before"
                results.append(Result(each, "known", words))
        if not open_ or self.order.dry:
            return [*results, *(Result(each, "would", "is due") for each in open_)]
        try:
            found = await self._report(team, week)
        except GpuwardenError as error:
            for each in open_:
                self.known.note(each, "failed", time=self.clock.wall(), error=str(error))
            why = f"the report could not be made: {error}"
            return [*results, *(Result(each, "failed", why) for each in open_)]
        return [*results, *[await self._one(each, found) for each in open_]]

    async def _report(self, team: str, week: tuple[float, float, str]) -> dict[str, Any]:
        begin, end, zone = week
        period = period_of(begin, end, zone)
        sources = await self.sources.answering()
        reader = await sources.reader(team or None, end)
        return await runs.report(
            sources, period, reader, earlier=period.before(), now=self.clock.wall()
        )

    async def _one(self, mailing: Mailing, found: dict[str, Any]) -> Result:
        made = mail(
            self.channel, mailing.recipient, found, engine=self.settings.values.external_url
        )
        self.known.note(mailing, "sending", time=self.clock.wall())
        try:
            proof = await self.channel.deliver(mailing.recipient, made)
        except Undelivered as error:
            state = "refused" if error.permanent else "failed"
            self.known.note(mailing, state, time=self.clock.wall(), error=str(error))
            return Result(mailing, state, str(error))
        self.known.note(mailing, "proven", time=self.clock.wall(), proof=proof)
        log.info("report sent", team=mailing.team, proof=proof)
        return Result(mailing, "proven", proof)


async def _tell(settings: Settings, clock: Clock, results: Sequence[Result]) -> None:
    """Page the operators, by the same way as of every other failure; it ends by itself."""
    failed = [result for result in results if result.failed]
    urls = settings.values.alertmanagers
    if not failed or not urls:
        return
    teams = sorted({result.mailing.team or "the fleet" for result in failed})
    now = clock.wall()
    texts = {
        "summary": f"weekly reports could not be sent: {', '.join(teams)}",
        "description": "; ".join(dict.fromkeys(result.words for result in failed))[:2000]
        + ". They are tried again every hour until reports.give_up_after; `gpuwarden report "
        "--send` shows each.",
    }
    alert = Alert(
        {"alertname": "GpuwardenReportNotSent", "service": SERVICE, "level": "page"},
        texts,
        now,
        now + ALERT_SECONDS,
        settings.values.external_url,
    )
    client = AlertmanagerClient(urls, clock)
    try:
        await client.post([alert])
    except ServiceUnavailable as error:
        log.exception("operators cannot be told", error=str(error), failed=len(failed))
    finally:
        await client.aclose()
