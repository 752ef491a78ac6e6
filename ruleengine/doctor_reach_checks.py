"""`gpuwarden doctor engine`: Alertmanager and its routes, every node's agent, Grafana."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from gpuwarden.catalogue import SCRAPE_JOB
from gpuwarden.clock import SystemClock
from gpuwarden.diagnostics import Severity
from gpuwarden.errors import GpuwardenError, InvalidInput, RefusedAction
from gpuwarden.findings import CannotCheck, Check
from gpuwarden.ruleengine import doctor_findings as known
from gpuwarden.ruleengine.alert_route_checks import DEFAULT_LONGEST, check_routes
from gpuwarden.ruleengine.reclaim.node import AgentClient, Signer, host_of
from gpuwarden.ruleengine.schedules import from_settings
from gpuwarden.yaml_files import load_located

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpuwarden.agent_api import NodeInfo
    from gpuwarden.findings import Finding
    from gpuwarden.ruleengine.doctor_centres import Centre
    from gpuwarden.ruleengine.schedules import Schedule, Schedules

_AT_ONCE = 16
_NAMED = 20
BOARDS = ("gpuwarden-fleet", "gpuwarden-node", "gpuwarden-job", "gpuwarden-governance")
SCHEDULING_BOARD = "gpuwarden-scheduling"


def reach_checks(centre: Centre) -> list[Check]:
    """Every check of who is told, who acts, and who looks on."""
    return [
        Check(known.ALERTMANAGER, lambda: _alertmanagers(centre), 20.0),
        Check(known.ROUTES, lambda: _routes(centre), 20.0),
        Check(known.PAGED, lambda: _paged(centre), 15.0),
        Check(known.AGENTS, lambda: _agents(centre), 120.0),
        Check(known.KEYS, lambda: _keys(centre), 120.0),
        Check(known.GRAFANA, lambda: _grafana(centre), 15.0),
        Check(known.SCHEDULER, lambda: _scheduler(centre), 45.0),
    ]


def _status(centre: Centre, url: str) -> Any:
    return centre.get(f"{url}/api/v2/status")


def _alertmanagers(centre: Centre) -> Iterator[Finding]:
    urls = centre.settings.values.alertmanagers
    if not urls:
        yield known.ALERTMANAGER.warning("engine.yaml names none: nobody is told of anything")
    for url in urls:
        try:
            status = _status(centre, url)
            version = status["versionInfo"]["version"]
            peers = len(status["cluster"].get("peers") or ())
        except (CannotCheck, KeyError, TypeError) as error:
            yield known.ALERTMANAGER.failed(f"{error}", url)
            continue
        if len(urls) > 1 and peers != len(urls):
            text = f"it knows {peers} members of its cluster, and engine.yaml names {len(urls)}"
            yield known.ALERTMANAGER.warning(text, url)
        else:
            yield known.ALERTMANAGER.ok(f"version {version}", url)


def _routes(centre: Centre) -> Iterator[Finding]:
    values, asked = centre.settings.values, 0
    for url in values.alertmanagers:
        try:
            text = str(_status(centre, url)["config"]["original"])
        except (CannotCheck, KeyError, TypeError) as error:
            yield known.ROUTES.unchecked(str(error), url)
            continue
        asked += 1
        document = load_located(text, name=url)
        findings = list(document.diagnostics)
        if document.root is not None and not findings:
            findings = check_routes(
                document.root,
                channels=values.channels,
                reading_along=values.reading_along,
                longest=DEFAULT_LONGEST,
            )
        for item in findings:
            severe = item.severity is Severity.ERROR
            make = known.ROUTES.failed if severe else known.ROUTES.warning
            yield make(f"line {item.span.line}: {item.message} [{item.code}]", url)
        if not findings:
            yield known.ROUTES.ok("the file in force lets every notice through", url)
    if not values.alertmanagers:
        raise CannotCheck("engine.yaml names no Alertmanager", needed=False)


def _paged(centre: Centre) -> Iterator[Finding]:
    wanted = {_place(url) for url in centre.settings.values.alertmanagers}
    for url in centre.prometheus:
        try:
            data = centre.prometheus_api(url, "/api/v1/alertmanagers")
            active = {_place(item["url"]) for item in data["activeAlertmanagers"]}
        except (CannotCheck, KeyError, TypeError) as error:
            text = f"this server does not tell whom it alerts ({error})"
            yield known.PAGED.unchecked(text, url, needed=False)
            continue
        if not active:
            yield known.PAGED.failed("it sends alerts to nobody", url)
        elif len(active) < len(wanted):
            text = f"it sends alerts to {len(active)} of {len(wanted)} Alertmanagers"
            yield known.PAGED.warning(text, url)
        else:
            yield known.PAGED.ok(f"it sends alerts to {', '.join(sorted(active))}", url)


def _place(url: str) -> str:
    return urlsplit(url).netloc


# ---------------------------------------------------------------------------------------------
# Agents


def _hosts(centre: Centre) -> tuple[list[str], int]:
    """Hosts of the nodes that are scraped, as many as are to be asked, and how many there are."""
    if centre.settings.values.agents is None:
        raise CannotCheck("engine.yaml has no agents: nothing can be ended", needed=False)
    hosts = set()
    for row in centre.rows(f'up{{job="{SCRAPE_JOB}"}}'):
        try:
            hosts.add(host_of(row.labels.get("instance", "")))
        except RefusedAction:
            continue
    names = sorted(hosts)
    if len(names) <= centre.agents:
        return names, len(names)
    # Others each time: what is sampled again and again is found at last.
    return sorted(random.SystemRandom().sample(names, centre.agents)), len(names)


def _asked(centre: Centre, hosts: list[str]) -> dict[str, NodeInfo | str]:
    """What each agent says of itself, or why it does not."""
    agents = centre.settings.values.agents
    if agents is None:
        return {}

    async def story() -> dict[str, NodeInfo | str]:
        ca_file = None if agents.ca_file is None else centre.settings.path(agents.ca_file)
        client, gate = AgentClient(agents.url, ca_file), asyncio.Semaphore(_AT_ONCE)

        async def one(host: str) -> tuple[str, NodeInfo | str]:
            async with gate:
                try:
                    return host, await client.node(host)
                except GpuwardenError as error:
                    return host, str(error)

        try:
            return dict(await asyncio.gather(*map(one, hosts)))
        finally:
            await client.aclose()

    return asyncio.run(story())


def _agents(centre: Centre) -> Iterator[Finding]:
    hosts, known_hosts = _hosts(centre)
    answers = _asked(centre, hosts)
    away = {host: said for host, said in answers.items() if isinstance(said, str)}
    for host, why in list(away.items())[:_NAMED]:
        yield known.AGENTS.failed(why, host)
    if len(away) > _NAMED:
        yield known.AGENTS.failed(f"and {len(away) - _NAMED} more")
    if not hosts:
        raise CannotCheck("Prometheus has no nodes")
    asked = "" if len(hosts) == known_hosts else f" of {known_hosts} (--agents asks more)"
    if not away:
        yield known.AGENTS.ok(f"{len(hosts)} agents answer{asked}")


def _keys(centre: Centre) -> Iterator[Finding]:
    hosts, _ = _hosts(centre)
    agents = centre.settings.values.agents
    try:
        own = "" if agents is None else Signer.load(centre.settings.path(agents.key_file)).key_id
    except InvalidInput as error:
        raise CannotCheck(str(error)) from error
    refused = 0
    answers = {h: said for h, said in _asked(centre, hosts).items() if not isinstance(said, str)}
    for host, info in answers.items():
        if own not in info.key_ids:
            refused += 1
            theirs = ", ".join(info.key_ids) or "none"
            yield known.KEYS.failed(f"it accepts {theirs}; the engine's key is {own}", host)
    if not answers:
        raise CannotCheck("no agent answers")
    if not refused:
        yield known.KEYS.ok(f"{len(answers)} agents accept {own}")


# ---------------------------------------------------------------------------------------------
# Grafana


def _grafana(centre: Centre) -> Iterator[Finding]:
    if centre.grafana is None:
        raise CannotCheck("no --grafana-url was given", needed=False)
    token = centre.grafana_token
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    try:
        version = centre.get(f"{centre.grafana}/api/health").get("version", "unknown")
    except (CannotCheck, AttributeError) as error:
        yield known.GRAFANA.failed(str(error), centre.grafana)
        return
    schedules = centre.settings.values.scheduler is not None
    boards = (*BOARDS, SCHEDULING_BOARD) if schedules else BOARDS
    missing = []
    for board in boards:
        try:
            centre.get(f"{centre.grafana}/api/dashboards/uid/{board}", headers)
        except CannotCheck as error:
            if "404" not in str(error):
                text = f"boards cannot be read ({error}): --grafana-token-file"
                yield known.GRAFANA.unchecked(text, centre.grafana)
                return
            missing.append(board)
    if missing:
        yield known.GRAFANA.failed(f"it lacks {', '.join(missing)}", centre.grafana)
    else:
        yield known.GRAFANA.ok(f"version {version}, {len(boards)} boards", centre.grafana)


# ---------------------------------------------------------------------------------------------
# The scheduler


def _scheduler(centre: Centre) -> Iterator[Finding]:
    values, path = centre.settings.values, centre.settings.path
    planners = [token.name for token in values.web.tokens if token.role == "scheduler"]
    if values.leaves is not None and not planners:
        yield known.SCHEDULER.warning(
            "engine.yaml says `leaves`, and no token has the role scheduler: only operators can ask"
        )
    if planners and values.leaves is None:
        yield known.SCHEDULER.warning(
            f"{planners[0]} is a scheduler, and engine.yaml says no `leaves`: it may ask nobody"
        )
    chosen = values.scheduler
    if chosen is None:
        if values.leaves is None and not planners:
            raise CannotCheck("engine.yaml names no scheduler", needed=False)
        return
    try:
        asked = from_settings(chosen, path, SystemClock())
        found = asyncio.run(_told(asked))
    except GpuwardenError as error:
        yield known.SCHEDULER.failed(str(error), chosen.url)
        return
    document = found.document
    if document is None:
        yield known.SCHEDULER.failed(found.problem, chosen.url)
        return
    if found.problem:
        yield known.SCHEDULER.warning(found.problem, chosen.url)
    for problem in document.problems[:_NAMED]:
        yield known.SCHEDULER.warning(problem.words or problem.code, chosen.url)
    if not found.problem and not document.problems:
        text = f"{document.engine} of {document.cluster}: {len(document.entries)} jobs"
        yield known.SCHEDULER.ok(text, chosen.url)


async def _told(schedules: Schedules) -> Schedule:
    try:
        return await schedules.now()
    finally:
        await schedules.aclose()
