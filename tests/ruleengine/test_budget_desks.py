"""Budgets in the engine: what is used, who is told once, and what rules may make of it."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import httpx
import pytest
from click.testing import CliRunner
from tests.ruleengine.browsing import ALICE, OLGA, WEB, application
from tests.ruleengine.engines import DIRECTORY, World, running, serving
from tests.ruleengine.fleets import END, NOW, START, History, a_job, a_rule, fleet_of, until
from tests.ruleengine.test_unheard_news import OVER_THE_NEWS
from tests.servers import backfill, free_port, prometheus

from gpuwarden.errors import ServiceUnavailable
from gpuwarden.ruleengine.alertmanager import rfc3339
from gpuwarden.ruleengine.budget_cli import budgets as command
from gpuwarden.ruleengine.budget_desks import BudgetDesk
from gpuwarden.ruleengine.budget_queries import used_share
from gpuwarden.ruleengine.evaluation import evaluate
from gpuwarden.ruleengine.prometheus import PrometheusClient, Sample
from gpuwarden.ruleengine.verdicts import Truth

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.ruleengine.worlds import Fleet

BUDGETS = """
version: 1
zone: Europe/Berlin
budgets:
- {team: vision, per: month, limit: 100 GPU-hours, kind: hard}
- {team: speech, per: week, limit: 10 GPU-hours, kind: soft}
"""
TEAMS = 'teams:\n  vision: {contact: {slack: "#vision"}}\n  speech: {}\n'
USED = 'gpuwarden_budget_used{period="month",team="vision",unit="GPU-hours"}'
BEARER = {"Authorization": f"Bearer {OLGA}"}
SHARE = 'gpuwarden_budget_used_ratio{kind="hard",period="month",team="vision"}'


@dataclass
class Recorded:
    """A `Source`: the fleet, and what was recorded of GPU-hours and euros."""

    fleet: Fleet
    used: dict[str, float] = field(default_factory=dict)
    cost: dict[str, float] = field(default_factory=dict)
    seen: bool = True
    down: bool = False
    asked: list[str] = field(default_factory=list)

    async def clock_skew(self) -> float:
        """The fleet's."""
        return await self.fleet.clock_skew()

    async def instant(self, query: str, time: float) -> list[Sample]:
        """Rows of one query."""
        if "fleet:gpus_seen" in query:
            if self.down:
                raise ServiceUnavailable("it is away")
            return [Sample({}, 3.0)] if self.seen else []
        if "team:gpu_hours" in query:
            self.asked.append(query)
            return [Sample({"team": team}, used) for team, used in self.used.items()]
        if "team:gpu_cost" in query:
            return [Sample({"team": t, "currency": "EUR"}, n) for t, n in self.cost.items()]
        return await self.fleet.instant(query, time)


@pytest.fixture
def recorded(servers: World) -> Recorded:
    """Vision has used 40 of its 100 GPU-hours."""
    (servers.folder / "budgets.yaml").write_text(BUDGETS)
    (servers.folder / "directory.yaml").write_text(DIRECTORY + TEAMS)
    servers.web = "budgets: budgets.yaml\n"
    source = Recorded(servers.fleet, {"vision": 40.0})
    servers.source = source
    return source


def news(world: World) -> list[dict[str, str]]:
    """Labels of the alerts about budgets that Alertmanager was last sent and that fire."""
    newest, now = world.alerts.received[-1].json(), rfc3339(world.clock.wall())
    return [
        alert["labels"]
        for alert in newest
        if alert["labels"]["alertname"] == "GpuwardenBudget" and alert["endsAt"] > now
    ]


def messages(world: World) -> int:
    """How many the team's channel got: of budgets alone, the jobs' owners have their own."""
    bodies = [request.json() for request in world.slack.received]
    return sum(body["channel"] == "#vision" for body in bodies)


def test_what_is_used_and_will_be_is_exported(servers: World, recorded: Recorded) -> None:
    """A team that held nothing has used nothing; who has no budget is not there."""

    async def story() -> None:
        async with running(servers) as world:
            recorded.used["nobody"] = 7.0
            await world.tick(2)
            told = world.told()
            assert told[USED] == 40.0
            assert told[SHARE] == 0.4
            assert told['gpuwarden_budget_used{period="week",team="speech",unit="GPU-hours"}'] == 0
            limit = (
                'gpuwarden_budget_limit{kind="soft",period="week",team="speech",unit="GPU-hours"}'
            )
            assert told[limit] == 10.0
            series = [name for name in told if name.startswith("gpuwarden_budget_forecast{")]
            assert len(series) == 2 * 3
            assert not any("nobody" in name for name in told)
            lengths = {
                int(found) for text in recorded.asked for found in re.findall(r"\[(\d+)ms\]", text)
            }
            assert 86400_000 - 1 in lengths

    asyncio.run(story())


@pytest.mark.parametrize(
    ("silence", "words"), [("down", "it is away"), ("seen", "load alerting/rules/money.yml")]
)
def test_a_use_that_is_not_known_is_not_zero(
    servers: World, recorded: Recorded, silence: str, words: str
) -> None:
    """Neither before the first answer nor a quarter of an hour after the last one."""

    async def story() -> None:
        async with running(servers) as world:
            setattr(recorded, silence, silence == "down")
            await world.tick(2)
            assert USED not in world.told()
            assert words in world.engine.budgets.standings()[0].why_not
            setattr(recorded, silence, silence != "down")
            await world.tick(5)
            assert world.told()[USED] == 40.0
            setattr(recorded, silence, silence == "down")
            await world.tick(20)
            assert world.told()[USED] == 40.0
            world.clock.pass_(10 * 60)
            await world.tick(2)
            assert USED not in world.told()
            assert SHARE not in world.told()

    asyncio.run(story())


def test_a_unit_that_nobody_asked_for_yet_is_not_zero(servers: World, recorded: Recorded) -> None:
    """A budget in money that is new in the file is not known until the next question."""

    async def story() -> None:
        servers.web += "prices: {currency: EUR, default: 2.0}\n"
        async with running(servers) as world:
            await world.tick(2)
            path = world.folder / "budgets.yaml"
            path.write_text(BUDGETS.replace("100 GPU-hours", "900 EUR"))
            await world.tick()
            (money, _) = world.engine.budgets.standings()
            assert (money.budget.unit, money.used, money.forecast) == ("EUR", None, None)
            assert "new" in money.why_not
            assert SHARE not in world.told()
            recorded.cost["vision"] = 450.0
            await world.tick(13)
            assert world.told()[SHARE] == 0.5

    asyncio.run(story())


def test_what_shards_recorded_is_added_up(servers: World, recorded: Recorded) -> None:
    """And is not known while one of them records nothing."""
    hall = Recorded(servers.fleet, {"vision": 20.0})

    async def story() -> None:
        async with running(servers) as world:
            desk = BudgetDesk(world.engine.rulebook, world.engine.ledger, world.clock)
            hall.seen = False
            await desk.refresh([recorded, hall])
            assert desk.standings()[0].used is None
            assert "every shard" in desk.standings()[0].why_not
            hall.seen = True
            world.clock.pass_(60)
            await desk.refresh([recorded, hall])
            assert desk.standings()[0].used == 60.0

    asyncio.run(story())


def test_a_period_has_what_was_used_in_it(servers: World, recorded: Recorded) -> None:
    """The first sample that is written in a month tells of the one before."""

    async def story() -> None:
        async with running(servers) as world:
            await world.tick(2)
            (begin, *_) = (each.span.begin for each in world.engine.budgets.standings())
            longest = max(
                int(found) for text in recorded.asked for found in re.findall(r"\[(\d+)ms\]", text)
            )
            since = (world.clock.wall() - begin - longest / 1000) % 86400
            assert since == pytest.approx(165, abs=30)

    asyncio.run(story())


def test_a_team_is_told_once_of_a_share(servers: World, recorded: Recorded) -> None:
    """Of the highest that is reached; a restart tells nothing again, a new period does."""

    async def story() -> None:
        recorded.used["vision"] = 85.0
        async with running(servers) as world:
            await world.tick(2)
            (labels,) = news(world)
            assert (labels["team"], labels["share"], labels["budget"]) == (
                "vision", "80%", "month, GPU-hours",
            )  # fmt: skip
            await world.tick(OVER_THE_NEWS)
            assert news(world) == []
            recorded.used["vision"] = 130.0
            await world.tick(6)
            assert [labels["share"] for labels in news(world)] == ["100%"]
            assert messages(world) == 2
        async with running(servers) as world:
            world.clock.pass_(18 * 60)
            await world.tick(OVER_THE_NEWS)
            assert news(world) == []
            assert messages(world) == 2  # Alertmanager may be told again, people are not
            world.clock.pass_(35 * 86400)
            await world.tick(6)
            assert [labels["share"] for labels in news(world)] == ["100%"]
            assert messages(world) == 3

    asyncio.run(story())


def test_the_news_goes_to_the_teams_contact(servers: World, recorded: Recorded) -> None:
    """Through the last hop, as every notice; to the operators where a team has none."""

    async def story() -> None:
        recorded.used |= {"vision": 55.0, "speech": 12.0}
        async with running(servers) as world:
            await world.tick(2)
            sent = [message.json() for message in world.slack.received]
            texts = {item["channel"]: json.dumps(item, ensure_ascii=False) for item in sent}
            assert set(texts) == {"#vision", "#gpu-ops"}
            assert "vision has used 50 % of its budget (this month)" in texts["#vision"]
            assert "ends no job" in texts["#vision"]

    asyncio.run(story())


@pytest.mark.usefixtures("recorded")
def test_a_bad_file_changes_nothing_and_is_said(servers: World) -> None:
    """All or nothing, as with rules; a limit that changes holds from the next tick on."""

    async def story() -> None:
        async with running(servers) as world:
            await world.tick(2)
            path = world.folder / "budgets.yaml"
            path.write_text(BUDGETS.replace("100 GPU-hours", "many GPU-hours"))
            await world.tick()
            assert "is not a limit" in world.engine.rulebook.problem
            assert world.told()[SHARE] == 0.4
            path.write_text(BUDGETS.replace("100 GPU-hours", "50 GPU-hours"))
            await world.tick()
            assert world.engine.rulebook.problem == ""
            assert world.told()[SHARE] == 0.8

    asyncio.run(story())


def test_budgets_are_shown_to_their_teams_and_to_operators(
    servers: World, recorded: Recorded
) -> None:
    """By the API, on the page and in the terminal."""
    port = free_port()

    async def story() -> None:
        recorded.used["vision"] = 110.0
        servers.web = WEB + "budgets: budgets.yaml\n"
        servers.external_url = f"http://127.0.0.1:{port}"
        async with running(servers) as world:
            await world.tick(2)
            async with serving(application(world), port), httpx.AsyncClient() as client:
                url = f"http://127.0.0.1:{port}"
                answer = await client.get(f"{url}/v1/budgets", headers=BEARER)
                rows = answer.json()["budgets"]
                assert [(row["team"], row["used"]) for row in rows] == [
                    ("vision", 110.0),
                    ("speech", 0.0),
                ]
                await client.post(f"{url}/sign-in", data={"token": OLGA}, headers={"Origin": url})
                page = await client.get(f"{url}/budgets")
                assert "1 of 2 budgets is used up." in page.text
                assert "110.0 GPU-hours of 100.0 GPU-hours (110 %)" in page.text
                own = await client.get(
                    f"{url}/v1/budgets", headers={"Authorization": f"Bearer {ALICE}"}
                )
                assert [row["team"] for row in own.json()["budgets"]] == ["vision"]
                world.folder.joinpath("token").write_text(OLGA)
                token = str(world.folder / "token")
                words = ["show", "--engine.url", url, "--token-file", token]
                done = await asyncio.to_thread(CliRunner().invoke, command, words)
                assert done.exit_code == 0, done.output
                assert "110.0 GPU-hours of 100.0 GPU-hours (110 %)" in done.output

    asyncio.run(story())


# -- the condition, over a real Prometheus


def _history() -> History:
    """Ana's team is over, bob's is not known, cho's has none, dan's engine page is old."""
    history = History()
    for job, user in (("over", "ana"), ("unknown", "bob"), ("free", "cho"), ("nobody", "eve")):
        history.add("gpu_job_info", 1, job_id=job, user=user)
    engine = {"instance": "engine:9837"}
    for user, team in (("ana", "vision"), ("bob", "speech"), ("cho", "audio")):
        history.add("gpuwarden_user_info", 1, **engine, user=user, team=team)
    for team in ("vision", "speech"):
        where = {"team": team, "period": "month", "unit": "GPU-hours", "kind": "hard"}
        history.add("gpuwarden_budget_limit", 100, **engine, **where)
    kept = {"period": "month", "kind": "hard"}
    history.add("gpuwarden_budget_used_ratio", 1.5, **engine, team="vision", **kept)
    gone = until(END - 120, 0.5)
    history.add("gpuwarden_budget_used_ratio", gone, **engine, team="speech", **kept)
    history.add("gpuwarden_engine_start_timestamp_seconds", until(END - 90, START), **engine)
    history.add(
        "gpuwarden_engine_start_timestamp_seconds", until(END, START), instance="other:9837"
    )
    return history


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a Prometheus with that history."""
    storage = tmp_path_factory.mktemp("budgets") / "tsdb"
    backfill(_history().text(), storage)
    with prometheus("global: {}\n", storage) as served:
        yield served.url


def _asked(url: str, period: str, time: float) -> dict[str, float]:
    async def ask() -> dict[str, float]:
        async with httpx.AsyncClient() as client:
            source = PrometheusClient(url, timeout=10.0, client=client)
            rows = await source.instant(used_share(period), time)
            return {row.labels["job_id"]: row.value for row in rows}

    return asyncio.run(ask())


def test_each_job_has_its_teams_share(server: str) -> None:
    """No budget is a share of 0; a use that is not known is no row, nor is any without engine."""
    assert _asked(server, "month", NOW) == {"over": 1.5, "free": 0.0, "nobody": 0.0}
    assert _asked(server, "week", NOW) == {"over": 0, "unknown": 0, "free": 0, "nobody": 0}
    assert _asked(server, "month", NOW + 120) == {}


@pytest.mark.parametrize(
    ("share", "truth"), [(1.5, Truth.YES), (1.0, Truth.NO), (0.2, Truth.NO), (None, Truth.UNKNOWN)]
)
def test_the_condition_is_three_valued(share: float | None, truth: Truth) -> None:
    """Exactly at the limit is not above it; not known is UNKNOWN, and told in per cent."""
    rule = a_rule({"over_budget": "month", "above": "100%"})
    key = rule.when.key
    job = a_job({key: {"": share}} if share is not None else {}, team="vision")
    found = evaluate(rule, job, fleet_of(job), profiles=(), whitelist=(), now=1_000_000.0)
    assert found.truth is truth
    (evidence,) = found.evidence
    assert "the team's budget of this month" in evidence.condition
    assert evidence.measured == ("150 %" if share == 1.5 else evidence.measured)


def test_the_file_can_be_checked_before(tmp_path: Path) -> None:
    """With the teams and the currencies of an engine.yaml."""
    (tmp_path / "rules.yaml").write_text("version: 1\n")
    (tmp_path / "engine.yaml").write_text(
        "version: 1\nprometheus: {url: http://127.0.0.1:1}\nrules: [rules.yaml]\n"
    )
    path = tmp_path / "budgets.yaml"
    path.write_text(BUDGETS.replace("100 GPU-hours", "100 EUR"))
    words = ["check", str(path), "--config", str(tmp_path / "engine.yaml")]
    done = CliRunner().invoke(command, words)
    assert done.exit_code == 2
    assert "no price in engine.yaml is in EUR" in done.output
    path.write_text(BUDGETS)
    done = CliRunner().invoke(command, ["check", str(path)])
    assert (done.exit_code, "2 budgets" in done.output) == (0, True)
