"""What an end costs: foretold from what is saved, and counted by the node afterwards."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import httpx
import pytest
from pydantic import ValidationError
from tests.ruleengine.browsing import OLGA, WEB, application
from tests.ruleengine.engines import World, running
from tests.ruleengine.fleets import NOW_FACTS, a_job, a_run, cards
from tests.ruleengine.worlds import A100, Fleet
from tests.servers import free_port

from gpuwarden.errors import ServiceUnavailable
from gpuwarden.ruleengine.cases import CaseState
from gpuwarden.ruleengine.losses import Loss, Money, Risk, at_risk, counted, risk_line
from gpuwarden.ruleengine.prices import Prices
from gpuwarden.ruleengine.prometheus import Sample

if TYPE_CHECKING:
    from gpuwarden.ruleengine.verdicts import JobFacts

PRICES = Prices.model_validate({"currency": "EUR", "per_gpu_hour": {A100: 2.0}})
HOUR = 3600.0
STARTED = {"start_time": NOW_FACTS - 2 * HOUR}
RISKS = (
    ("a state saved an hour ago", {"run": a_run(checkpoint_time=NOW_FACTS - HOUR)}, HOUR, True),
    ("none saved", {"run": a_run()}, 2 * HOUR, False),
    ("no trainer", {}, 2 * HOUR, False),
    ("a state of the future", {"run": a_run(checkpoint_time=NOW_FACTS + 60)}, 2 * HOUR, False),
    (
        "a state of an earlier attempt",
        {"run": a_run(checkpoint_time=NOW_FACTS - 9 * HOUR)},
        2 * HOUR,
        False,
    ),
)


@pytest.mark.parametrize(("_case", "job", "seconds", "saved"), RISKS)
def test_work_counts_from_the_last_saved_state(
    _case: str, job: dict, seconds: float, saved: bool
) -> None:
    """Of this attempt and of the past; else from the start, which is said."""
    risk = at_risk(a_job(**{**STARTED, "gpus": cards("g0", "g1"), **job}), NOW_FACTS, PRICES)
    assert risk is not None
    assert (risk.seconds, risk.saved, risk.cards) == (seconds, saved, 2)
    assert risk.gpu_seconds == 2 * seconds
    assert str(risk.cost) == f"{2 * 2.0 * seconds / HOUR:.2f} EUR"
    assert ("everything since its start" in risk_line(risk.document())) is not saved


def test_without_a_start_nothing_is_foretold() -> None:
    """Not zero: not known."""
    assert at_risk(a_job(start_time=None), NOW_FACTS, PRICES) is None


def cost(job: JobFacts, prices: Prices | None) -> str | None:
    """What an end of a job that began an hour ago would cost."""
    risk = at_risk(job, NOW_FACTS, prices)
    assert risk is not None
    return None if risk.cost is None else str(risk.cost)


def test_no_money_is_named_where_a_price_is_not_known() -> None:
    """A sum that leaves a card out would be wrong, and a price of 0 is a price."""
    job = a_job(start_time=NOW_FACTS - HOUR, gpus=(*cards("g0"),))
    other = Prices.model_validate({"currency": "CNY", "per_gpu_hour": {"H200": 30}})
    default = Prices.model_validate({"currency": "CNY", "default": 0})
    assert cost(job, PRICES) == "2.00 EUR"
    assert cost(job, other) is None
    assert cost(job, default) == "0.00 CNY"
    assert cost(job, None) is None
    assert cost(a_job(start_time=NOW_FACTS - HOUR, gpus=()), PRICES) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"currency": "EUR"},
        {"currency": "euro", "default": 1},
        {"currency": "EUR", "default": -1},
        {"currency": "EUR", "default": True},
        {"currency": "EUR", "per_gpu_hour": {"": 1}},
    ],
)
def test_prices_are_strict(wrong: dict) -> None:
    """A wrong one would be found in a notice: too late."""
    with pytest.raises(ValidationError):
        Prices.model_validate(wrong)


COUNTS = (
    ([{}], [{"hold": 60.0}], 60.0),
    ([{"hold": 5.0}], [{"hold": 60.0, "died": 2.0}], 57.0),
    ([{"hold": 5.0}], [{"hold": 5.0}], 0.0),
    ([{}] * 2, [{"hold": 6.0}, {"hold": 4.0}], 10.0),
    ([None], [{"hold": 60.0}], None),
    ([{}], [None], None),
    ([{"hold": 70.0}], [{"hold": 60.0}], None),
)


@pytest.mark.parametrize(("before", "after", "lost"), COUNTS)
def test_what_was_lost_is_what_the_node_counted_meanwhile(
    before: list, after: list, lost: float | None
) -> None:
    """A counter that is born with the end counts from 0; one that fell tells nothing."""
    found, why_not = counted(before, after)
    assert found == lost
    assert bool(why_not) is (lost is None)


def test_what_was_counted_is_told_in_the_money_of_the_decision() -> None:
    """The price of then, whatever engine.yaml says now."""
    loss = Loss(
        Risk(HOUR, 4, saved=True, hourly=Money(8.0, "EUR")), gpu_seconds=1800.0, counted_at=1.0
    )
    assert str(loss.cost) == "1.00 EUR"


@dataclass
class Counting:
    """The fleet's Prometheus, whose node counts what an end has cost."""

    fleet: Fleet
    at: float = 0.0
    lost: float = 5400.0
    down: bool = False

    async def clock_skew(self) -> float:
        """Of the fleet."""
        return await self.fleet.clock_skew()

    async def instant(self, query: str, time: float) -> list[Sample]:
        """Rows of the fleet, and of the counter."""
        if query.startswith(("gpuwarden_lost", "gpuwarden_nvml_up")) and self.down:
            raise ServiceUnavailable("down")
        if query.startswith("gpuwarden_nvml_up{"):
            return [Sample({"instance": "n"}, 1.0)]
        if query.startswith("gpuwarden_lost_gpu_seconds_total{"):
            assert 'user="alice"' in query
            return [Sample({"reason": "hold"}, self.lost)] if time >= self.at else []
        return await self.fleet.instant(query, time)


PRICED = "prices: {currency: EUR, default: 4}\n"


async def ended(world: World, source: Counting) -> str:
    """The number of the decision that ended alice's training."""
    await world.until(CaseState.VERIFIED)
    source.at = world.clock.wall() + 600
    world.fleet.jobs = []
    (decision,) = world.engine.ledger.job_decisions("proc-1")
    return decision.id


def told(world: World, decision: str) -> Loss:
    """What is known of its cost."""
    found = world.engine.losses.of(decision)
    assert found is not None
    return found


def test_an_end_is_foretold_counted_and_shown(servers: World) -> None:
    """With the decision an estimate, after ten minutes what the node says, and both on the page."""
    servers.web = WEB + PRICED
    servers.fleet.jobs[0].run = {"run_id": "run1", "model": "yolov8m"}
    source = Counting(servers.fleet)
    servers.source = source

    async def story() -> None:
        async with running(servers) as world:
            decision = await ended(world, source)
            before = told(world, decision)
            assert before.risk is not None
            assert before.risk.seconds > HOUR
            assert before.gpu_seconds is None
            await world.tick(20, seconds=60.0)
            after = told(world, decision)
            assert after.risk == before.risk
            assert (after.gpu_seconds, str(after.cost)) == (5400.0, "6.00 EUR")
            assert world.kinds()[-1] == "lost"
            transport = httpx.ASGITransport(app=application(world).starlette())
            async with httpx.AsyncClient(
                transport=transport,
                base_url=f"http://127.0.0.1:{free_port()}",
                headers={"Authorization": f"Bearer {OLGA}"},
            ) as client:
                page = (await client.get(f"/decisions/{decision}")).text
                document = (await client.get(f"/v1/decisions/{decision}")).json()
            assert "counted by the node: 1.50 GPU-hours, 6.00 EUR" in page
            assert document["loss"]["lost_gpu_seconds"] == 5400.0
            assert document["loss"]["estimated"]["since"] == "start"

    asyncio.run(story())


def test_a_decision_that_ended_nothing_costs_nothing(servers: World) -> None:
    """The agent refused: the node is not asked, and the page says why."""
    servers.fleet.jobs[0].run = {"run_id": "run1", "model": "yolov8m"}
    servers.agent.refuse = (409, "protected")

    async def story() -> None:
        async with running(servers) as world:
            await world.until(CaseState.REFUSED)
            await world.tick()
            (decision, *_) = world.engine.ledger.job_decisions("proc-1")
            assert told(world, decision.id).why_not == "nothing was ended"

    asyncio.run(story())


def test_the_notice_says_what_an_end_would_cost(servers: World) -> None:
    """In GPU time and in money, before it comes to that."""
    servers.web = PRICED

    async def story() -> None:
        async with running(servers) as world:
            await world.until(CaseState.NOTIFIED)
            text = world.slack.received[0].body.decode()
            assert " EUR" in text
            assert "GPU-hours" in text

    asyncio.run(story())


def test_without_a_trainer_nobody_counts(servers: World) -> None:
    """The node knows saved states from trainers only; nothing is asked."""
    source = Counting(servers.fleet)
    servers.source = source

    async def story() -> None:
        async with running(servers) as world:
            decision = await ended(world, source)
            await world.tick(20, seconds=60.0)
            assert told(world, decision).why_not == "no trainer said what it had saved"

    asyncio.run(story())


def test_a_prometheus_that_is_away_is_asked_again_and_holds_up_nothing(servers: World) -> None:
    """For a day; then it is said that nobody knows. A restart forgets nothing."""
    servers.fleet.jobs[0].run = {"run_id": "run1", "model": "yolov8m"}
    source = Counting(servers.fleet, down=True)
    servers.source = source

    async def story() -> None:
        async with running(servers) as world:
            decision = await ended(world, source)
            done = world.engine.ticks.outcomes["completed"]
            await world.tick(20, seconds=60.0)
            assert world.engine.ticks.outcomes["completed"] == done + 20
            assert told(world, decision).counted_at is None
        async with running(servers) as world:
            source.down = False
            await world.tick()
            assert told(world, decision).gpu_seconds == 5400.0

    asyncio.run(story())


def test_after_a_day_nobody_knows(servers: World) -> None:
    """It is not asked for ever."""
    servers.fleet.jobs[0].run = {"run_id": "run1", "model": "yolov8m"}
    source = Counting(servers.fleet, down=True)
    servers.source = source

    async def story() -> None:
        async with running(servers) as world:
            decision = await ended(world, source)
            world.clock.pass_(90_000)
            await world.tick()
            assert told(world, decision).why_not == "Prometheus did not say within a day"

    asyncio.run(story())


def test_prices_are_on_the_page_of_metrics(servers: World) -> None:
    """For the boards: of the models that are named, and of those that are seen."""
    servers.web = "prices: {currency: EUR, default: 4, per_gpu_hour: {H200: 9.5}}\n"

    async def story() -> dict[str, float]:
        async with running(servers) as world:
            await world.tick()
            return world.told()

    found = asyncio.run(story())
    name = "gpuwarden_price_per_gpu_hour"
    assert found[f'{name}{{currency="EUR",model="H200"}}'] == 9.5
    assert found[f'{name}{{currency="EUR",model="{A100}"}}'] == 4.0
