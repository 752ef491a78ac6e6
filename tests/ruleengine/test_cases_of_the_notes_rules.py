"""Public reports of rules that ran on after they were changed, removed or broken, by kind."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from tests.ruleengine.engines import World, running

from gpuwarden.ruleengine.alertmanager import rfc3339
from gpuwarden.ruleengine.cases import CaseState

if TYPE_CHECKING:
    from collections.abc import Callable

BROKEN = {
    "not YAML": lambda text: text + "\n  - {",
    "an unknown key": lambda text: text.replace("cold_start", "cold_strat"),
    "a duplicate key": lambda text: text + "\nversion: 1\n",
    "a bare number": lambda text: text.replace("for: 1m", "for: 60"),
    "no deadline": lambda text: text.replace("after: 8m, do: terminate", "do: terminate"),
    "no notice": lambda text: text.replace(", notice_delivered_for: 5m", ""),
    "no grace": lambda text: text.replace(", grace: 60s", ""),
    "no limits": lambda text: text.replace("limits:", "limitz:"),
    "a whitelist without an end": lambda text: (
        text + "\nwhitelist:\n- {match: {user: alice}, rules: [idle-held], reason: x, "
        "approved_by: y}\n"
    ),
    "an end without an offset": lambda text: (
        text + "\nwhitelist:\n- {match: {user: alice}, rules: [idle-held], reason: x, "
        "approved_by: y, expires: 2099-01-01T00:00:00}\n"
    ),
    "a zone that is an abbreviation": lambda text: text + "\ntimezone: CEST\n",
    "nothing at all": lambda _text: "",
}
"""T31, T45, T46: what must not come into force, and what is missing must not be a default."""


@pytest.mark.parametrize("spoil", BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_file_is_said_until_it_is_mended(
    servers: World, spoil: Callable[[str], str]
) -> None:
    """T31: the old rules stay, every tick says so, the hash in force stands; then it is over."""
    path = servers.folder / "rules.yaml"
    good = path.read_text()

    async def story() -> None:
        async with running(servers) as world:
            before = {name for name in world.told() if "gpuwarden_rules_info" in name}
            path.write_text(spoil(good))
            for _ in range(3):
                await world.tick()
                told = world.told()
                assert told["gpuwarden_rules_reload_success"] == 0
                assert {name for name in told if "gpuwarden_rules_info" in name} == before
                assert any("rules.yaml" in text for text in world.engine.problems)
            path.write_text(good)
            await world.tick()
            assert world.told()["gpuwarden_rules_reload_success"] == 1
            assert world.engine.problems == []

    asyncio.run(story())


def _deleted(world: World) -> None:
    (world.folder / "more.yaml").unlink()


def _observed(world: World) -> None:
    path = world.folder / "more.yaml"
    path.write_text(path.read_text().replace("mode: enforce", "mode: observe"))


def _renamed(world: World) -> None:
    path = world.folder / "more.yaml"
    path.write_text(path.read_text().replace("id: idle-held", "id: idle-again"))


async def _due_by_a_second_file(world: World) -> None:
    (world.folder / "halt").touch()
    await world.until(CaseState.DUE)
    (world.folder / "halt").unlink()


@pytest.mark.parametrize("change", [_deleted, _observed, _renamed], ids=lambda f: f.__name__)
def test_what_is_no_longer_a_rule_in_force_ends_nobody_from_the_next_tick_on(
    servers: World, change: Callable[[World], None]
) -> None:
    """T32, T33: deleted, observing or renamed it has no deadline left, and owners hear that."""
    path = servers.folder / "rules.yaml"
    limits, rule = path.read_text().split("rules:\n", 1)
    path.write_text(limits)
    (servers.folder / "more.yaml").write_text(f"version: 1\nrules:\n{rule}")

    async def story() -> None:
        async with running(servers) as world:
            await _due_by_a_second_file(world)
            change(world)
            await world.tick(3)
            assert world.agent.requests == []
            firing = [
                one["labels"]["rule"]
                for one in world.alerts.received[-1].json()
                if one["endsAt"] > one["startsAt"] and one["labels"]["level"] == "moderate"
            ]
            assert len([rule.id for rule in world.engine.rulebook.rules.rules]) == (
                0 if change is _deleted else 1
            )
            assert firing.count("idle-again") <= 1
            if change is not _observed:
                assert world.state() is None
                assert world.kinds()[-1] == "closed"
            texts = [message.json()["text"] for message in world.slack.received]
            assert [text.count("is not ended after all") for text in texts] == [0, 1]
            assert "called off" in texts[1]
            await world.tick(int(15 * 60 / 15))
            last = world.alerts.received[-1].json()
            now = rfc3339(world.clock.wall())
            stands = [one["labels"]["alertname"] for one in last if one["endsAt"] > now]
            assert "GpuwardenNoticeWithdrawn" not in stands

    servers.rule_files = "[rules.yaml, more*.yaml]"
    asyncio.run(story())


def test_a_rule_that_comes_back_begins_anew(servers: World) -> None:
    """T33: taken out and put back, its deadlines begin anew, and its owner is told again."""
    path = servers.folder / "rules.yaml"
    good = path.read_text()

    async def story() -> None:
        async with running(servers) as world:
            (world.folder / "halt").touch()
            await world.until(CaseState.DUE)
            path.write_text(good.replace("id: idle-held", "id: idle-other"))
            await world.tick(2)
            assert world.state() is None
            path.write_text(good)
            (world.folder / "halt").unlink()
            await world.tick(8)
            assert world.agent.requests == []
            assert world.case().elapsed < 120
            assert world.case().notified_at is None

    asyncio.run(story())


def test_who_was_told_of_no_end_hears_of_none(servers: World) -> None:
    """T32: a rule that only warned, or whose notice was not due yet, is taken out in silence."""
    path = servers.folder / "rules.yaml"
    good = path.read_text()

    async def story(mode: str, state: CaseState) -> None:
        servers.rules(mode)
        async with running(servers) as world:
            await world.until(state)
            before = len(world.slack.received)
            path.write_text(good.replace("id: idle-held", "id: idle-other"))
            await world.tick(2)
            assert world.state() is None
            texts = [message.json()["text"] for message in world.slack.received[before:]]
            assert not any("after all" in text for text in texts)

    asyncio.run(story("warn", CaseState.NOTIFIED))
    asyncio.run(story("enforce", CaseState.DETECTED))
