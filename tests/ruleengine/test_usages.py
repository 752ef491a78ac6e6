"""GPU time by team: who holds what, what was not seen, and the budgets that it is held against."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from pydantic import ValidationError
from tests.ruleengine.engines import DIRECTORY, TICK, World, running
from tests.ruleengine.fleets import a_job, cards, fleet_of

from gpuwarden.ruleengine.directories import Budget, Directory
from gpuwarden.ruleengine.expressions import check
from gpuwarden.ruleengine.metrics import EngineCollector, render
from gpuwarden.ruleengine.usages import Usage

if TYPE_CHECKING:
    from gpuwarden.ruleengine.verdicts import FleetFacts


def _fleet(**fields: object) -> FleetFacts:
    return fleet_of(a_job(team="vision", gpus=cards("g0", "g1"), **fields))


def test_cards_are_counted_for_the_time_between_ticks() -> None:
    """Nothing for the first: nobody knows since when."""
    usage = Usage(45.0)
    for now in (100.0, 115.0, 130.0):
        usage.add(_fleet(), now)
    assert usage.seconds(["speech"]) == {"speech": 0.0, "vision": 60.0}


def test_what_was_not_seen_is_not_charged() -> None:
    """Of an hour's outage three ticks at most; of a dark node nothing."""
    usage = Usage(45.0)
    usage.add(_fleet(), 0.0)
    usage.add(_fleet(), 3600.0)
    assert usage.seconds([]) == {"vision": 90.0}
    usage.add(_fleet(fresh=False), 3615.0)
    assert usage.seconds([]) == {"vision": 90.0}


def test_a_shared_card_is_shared_out_and_without_a_team_nothing_is_counted() -> None:
    """Teams are the directory's; an unknown user has none."""
    usage = Usage(45.0)
    shared = a_job(team="vision", gpus=cards("g0", tenants=2))
    nobody = replace(shared, job_id="k", team="")
    for now in (0.0, 10.0):
        usage.add(fleet_of(shared, nobody), now)
    assert usage.seconds([]) == {"vision": 5.0}


def _page(world: World) -> dict[str, str]:
    body, _ = render(EngineCollector(world.engine), "")
    rows = (line.rpartition(" ") for line in body.decode().splitlines() if line[:1] != "#")
    return {name: value for name, _, value in rows}


def test_the_engine_exports_usage_and_budgets(servers: World) -> None:
    """A budget that changes is the new one at the next tick; time held goes on."""
    text = DIRECTORY + "teams:\n  vision: {budget: 500 GPU-hours per month}\n"
    (servers.folder / "directory.yaml").write_text(text)

    async def story() -> None:
        async with running(servers) as world:
            await world.tick(5)
            page = _page(world)
            month = 'gpuwarden_budget_gpu_hours{period="month",team="vision"}'
            assert page[month] == "500.0"
            used = 'gpuwarden_team_gpu_seconds_total{team="vision"}'
            assert float(page[used]) == 4 * TICK
            assert page['gpuwarden_team_gpu_seconds_total{team="speech"}'] == "0.0"
            changed = text.replace("500 GPU-hours per month", "[9.5 GPU-hours per day]")
            (world.folder / "directory.yaml").write_text(changed)
            await world.tick()
            page = _page(world)
            assert month not in page
            assert page['gpuwarden_budget_gpu_hours{period="day",team="vision"}'] == "9.5"
            assert float(page[used]) == 5 * TICK

    asyncio.run(story())


@pytest.mark.parametrize(
    ("budget", "read"),
    [
        ("500 GPU-hours per month", [Budget(500.0, "month")]),
        ("0 GPU-hours per day", [Budget(0.0, "day")]),
        (["1 GPU-hour per day", "5.5 GPU-hours per week"], [Budget(1, "day"), Budget(5.5, "week")]),
    ],
)
def test_a_budget_has_its_unit_and_its_period(budget: object, read: list[Budget]) -> None:
    """One, or one for each period; 0 is none."""
    found = Directory.model_validate({"version": 1, "teams": {"vision": {"budget": budget}}})
    assert list(found.teams["vision"].budget) == read


@pytest.mark.parametrize(
    "budget",
    [
        500,
        "500",
        "500 per month",
        "500 hours per month",
        "500 GPU-hours",
        "-5 GPU-hours per month",
        "500 GPU-hours per year",
        ["5 GPU-hours per day", "6 GPU-hours per day"],
    ],
)
def test_a_budget_without_unit_or_period_is_an_error(budget: object) -> None:
    """A bare number would be hours to one and cards to another."""
    with pytest.raises(ValidationError):
        Directory.model_validate({"version": 1, "teams": {"vision": {"budget": budget}}})


@pytest.mark.parametrize(
    ("expression", "codes"),
    [
        ("max by (job_id) (gpu_job_info * on (user) group_left (team) gpuwarden_user_info)", []),
        ("gpuwarden_team_gpu_seconds_total", ["GW217"]),
        ("max by (job_id) (gpuwarden_violation_active)", ["GW216"]),
        ("max by (job_id) (gpuwarden_expected_throughput_images_per_second)", ["GW216"]),
    ],
)
def test_rules_may_judge_by_what_the_engine_counts_and_not_by_what_it_concludes(
    expression: str, codes: list[str]
) -> None:
    """A rule on a rule's conclusion would feed itself."""
    assert [finding.code for finding in check(expression)] == codes
