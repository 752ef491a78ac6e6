"""Making one report: its sources asked one after the other, put together into its document."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import httpx

from gpuwarden.errors import InvalidInput, ServiceUnavailable
from gpuwarden.ruleengine import tickets
from gpuwarden.ruleengine.names import Pseudonyms
from gpuwarden.ruleengine.replay_columns import HistoryClient
from gpuwarden.ruleengine.reports import rulings, waits
from gpuwarden.ruleengine.reports.documents import document
from gpuwarden.ruleengine.reports.gatherings import Gatherer
from gpuwarden.ruleengine.reports.readers import Reader
from gpuwarden.ruleengine.rulebooks import RuleBook
from gpuwarden.ruleengine.serving import read_secrets
from gpuwarden.ruleengine.slurm_settings import slurm_commands

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from gpuwarden.ruleengine.directories import Directory
    from gpuwarden.ruleengine.reports.gatherings import Outlook
    from gpuwarden.ruleengine.reports.periods import Period
    from gpuwarden.ruleengine.settings import Settings

    Progress = Callable[[str, int, int], None]
    """What is being done, how far it is, and how far it goes."""

QUERY_SECONDS: Final = 120.0
"""For one query; Prometheus' own limit (`--query.timeout`) is as long."""
_TEAMS: Final = "max by (user, team) (last_over_time(gpuwarden_user_info[1d]))"
_NO_LEDGER: Final = "no ledger was given: --config names it, or --ledger"


@dataclass(frozen=True)
class Sources:
    """Where a report comes from.

    Attributes:
        url: of Prometheus.
        client: with its credentials; whoever made it closes it.
        settings: of engine.yaml, or None.
        ledger: the engine's file or a backup of it, or None.
        ledger_optional: whether a report is made where there is no such file.
        directory: who is of which team, or None: Prometheus says it.
        chunk: seconds that one query may cover, or None.
        others: replicas of the server, which hold the same.
    """

    url: str
    client: httpx.AsyncClient
    settings: Settings | None = None
    ledger: Path | None = None
    directory: Directory | None = None
    chunk: float | None = None
    pseudonyms: Pseudonyms | None = None
    ledger_optional: bool = False
    others: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        settings: Settings,
        client: httpx.AsyncClient,
        *,
        url: str | None = None,
        ledger: Path | None = None,
        chunk: float | None = None,
    ) -> Sources:
        """What engine.yaml names, or what is given in its place.

        Raises:
            InvalidInput: a file that it names cannot be used, or it has several shards.
        """
        values = settings.values
        shards = values.prometheus.groups
        if url is None and len(shards) > 1:
            raise InvalidInput(
                "prometheus.shards: a report asks one server: give one that sees all of them "
                "(Thanos, Mimir, ...) by --prometheus"
            )
        token = read_secrets(settings).notify_token
        return cls(
            url or shards[0][0],
            client,
            settings,
            ledger or settings.path(values.ledger),
            None if values.directory is None else RuleBook(settings).directory,
            chunk,
            None if token is None else Pseudonyms(tickets.key_from(token)),
            ledger_optional=ledger is None,
            others=() if url else shards[0][1:],
        )

    @property
    def history(self) -> HistoryClient:
        """A client of the server, with a count of its own."""
        # The server ends what takes too long; what it says of that is waited for.
        self.client.timeout = httpx.Timeout(2 * QUERY_SECONDS, connect=10.0)
        return HistoryClient(self.url, self.client, timeout=QUERY_SECONDS)

    async def answering(self) -> Sources:
        """The same with a server that answers, in the order of engine.yaml.

        Raises:
            ServiceUnavailable: none does; the text is the last one's.
        """
        *first, last = self.url, *self.others
        for number, url in enumerate(first):
            chosen = replace(self, url=url, others=self.others[number:])
            with contextlib.suppress(ServiceUnavailable):
                await chosen.history.now()
                return chosen
        chosen = replace(self, url=last, others=())
        try:
            await chosen.history.now()
        except ServiceUnavailable as error:
            raise ServiceUnavailable(
                f"{error}: is it running, and is its address (--config, --prometheus) right?"
            ) from error
        return chosen

    async def reader(self, team: str | None, end: float) -> Reader:
        """Whose names are told, and who is of which team.

        Args:
            team: whose report it is, or None.
            end: Unix time as of which Prometheus is asked for teams.

        Raises:
            InvalidInput: there is no such team.
            ServiceUnavailable: Prometheus does not answer.
        """
        if self.directory is not None:
            teams = {name: user.team for name, user in self.directory.users.items() if user.team}
        else:
            rows = await self.history.instant(_TEAMS, end)
            teams = {row.labels.get("user", ""): row.labels.get("team", "") for row in rows}
        if team is not None and team not in teams.values():
            known = ", ".join(sorted({*teams.values()})) or "none"
            raise InvalidInput(f'--team: nobody is of team "{team}"; there are: {known}')
        web = None if self.settings is None else self.settings.values.web
        reader = Reader(
            teams,
            team,
            names="team" if web is None else web.names,
            opened=web is None or web.operator_names == "always",
        )
        if self.pseudonyms is None:
            return reader
        return Reader(teams, team, reader.names, reader.opened, self.pseudonyms)


async def look(sources: Sources, period: Period, reader: Reader) -> tuple[Gatherer, Outlook]:
    """What would be asked; see `Gatherer.look`."""
    gatherer = Gatherer(sources.history, reader.team, reader.users, sources.chunk)
    return gatherer, await gatherer.look(period)


async def report(
    sources: Sources,
    period: Period,
    reader: Reader,
    *,
    earlier: Period | None = None,
    now: float,
    progress: Progress = lambda _what, _done, _all: None,
) -> dict[str, Any]:
    """The document of a report.

    Args:
        sources: where it comes from.
        period: what it is about.
        reader: for whom it is.
        earlier: the period that it is compared with, or None.
        now: Unix time.
        progress: is told how far it is.

    Raises:
        InvalidInput: Prometheus has nothing of the period.
        ServiceUnavailable: Prometheus fails, or answers in part: there is no report then.
        LedgerUnusable: the ledger cannot be read.
    """
    gatherer, outlook = await look(sources, period, reader)
    gathered = await gatherer.gather(outlook, lambda done, whole: progress("now", done, whole))
    cost = gatherer.cost
    before, why_not = None, ""
    if earlier is not None:
        try:
            other, outlook = await look(sources, earlier, reader)
        except InvalidInput as error:
            why_not = str(error)
        else:
            before = await other.gather(
                outlook, lambda done, whole: progress("before", done, whole)
            )
            cost.queries += other.cost.queries
            cost.samples += other.cost.samples
            cost.received_bytes += other.cost.received_bytes
    found = document(
        gathered,
        reader,
        earlier=before,
        rulings=told_by(sources, period, reader),
        earlier_rulings=None
        if earlier is None or before is None
        else told_by(sources, earlier, reader),
        waiting=await _waiting(sources, period, reader, now),
        made_at=now,
        not_compared=why_not,
    )
    found["cost"] = {
        "queries": cost.queries,
        "samples": cost.samples,
        "received_bytes": cost.received_bytes,
    }
    return found


def told_by(sources: Sources, period: Period, reader: Reader) -> dict[str, Any]:
    """What the ledger says of a period, or why it says nothing.

    Raises:
        LedgerUnusable: it is there and cannot be read, or was asked for and is not there.
    """
    if sources.ledger is None:
        return rulings.unknown(_NO_LEDGER)
    if sources.ledger_optional and not os.path.lexists(sources.ledger):
        return rulings.unknown(
            f"{sources.ledger} is not on this machine: --ledger names a copy of it"
        )
    return rulings.rulings(sources.ledger, period.begin, period.end, reader)


async def _waiting(
    sources: Sources, period: Period, reader: Reader, now: float
) -> Mapping[str, Any]:
    settings = sources.settings
    commands = None if settings is None else slurm_commands(settings, least=waits.TIMEOUT_SECONDS)
    if commands is not None:
        return await waits.slurm_waits(commands, period, reader, now=now)
    if settings is not None and settings.values.kubernetes is not None:
        return waits.unknown(waits.KUBERNETES)
    return waits.unknown(waits.NOBODY)
