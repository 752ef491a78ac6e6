"""Who reads what in which language, from the engine over Alertmanager to the reader."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from tests.ruleengine.engines import DIRECTORY, running
from tests.ruleengine.test_texts import CHINESE
from tests.ruleengine.worlds import webhook

from gpuwarden.ruleengine.cases import CaseState

if TYPE_CHECKING:
    from tests.ruleengine.engines import World


def _write(world: World, extra: str = "", alice: str = "language: zh, ") -> None:
    text = DIRECTORY.replace("alice: {", f"alice: {{{alice}")
    (world.folder / "directory.yaml").write_text(text + extra)


async def _notice(world: World) -> dict[str, Any]:
    """The webhook's body of the first notice."""
    world.forwarding = False
    while "notify" not in world.kinds():
        await world.tick()
    return webhook(world.alerts.received[-1].json())


def _texts(world: World) -> list[str]:
    return [str(message.json()["text"]) for message in world.slack.received]


def test_an_owner_reads_the_whole_notice_in_their_own_language(servers: World) -> None:
    """Text and blocks; the alert carries both, the operators' under its plain names."""
    _write(servers)

    async def story() -> None:
        async with running(servers) as world:
            await world.until(CaseState.NOTIFIED)
            (message,) = world.slack.received
            body = message.json()
            assert "您的任务 proc-1" in body["text"]
            assert "Your job" not in str(body)
            assert "观测到" in str(body["blocks"])
            (alert,) = world.alerts.received[-1].json()
            notes = alert["annotations"]
            assert notes["language"] == "en"
            assert notes["summary"].startswith("Job proc-1")
            assert notes["summary_zh"].startswith("任务 proc-1")

    asyncio.run(story())


def test_languages_that_nobody_reads_are_not_written(servers: World) -> None:
    """An alert of an English cluster has each text once."""

    async def story() -> None:
        async with running(servers) as world:
            await world.until(CaseState.NOTIFIED)
            (alert,) = world.alerts.received[-1].json()
            assert not any(name.endswith("_zh") for name in alert["annotations"])

    asyncio.run(story())


def test_a_team_channel_reads_its_own_language_and_gets_no_way_to_keep(servers: World) -> None:
    """The directory's, or what the receiver's address asks for."""
    _write(servers)

    async def story() -> None:
        async with running(servers) as world:
            body = await _notice(world)
            await world.hop.receive(body, ["slack"], channel_target="#one")
            await world.hop.receive(body, ["slack"], channel_target="#two", language="zh")
            english, chinese = _texts(world)
            assert not CHINESE.search(english)
            assert CHINESE.search(chinese)
            for text in (english, chinese):
                assert "--ticket" not in text
                assert "/keep/" not in text

    asyncio.run(story())


def test_operators_are_told_in_theirs(servers: World) -> None:
    """An owner who cannot be told is told of in the operators' language."""
    _write(servers, "language: zh\n", alice="")

    async def story() -> None:
        async with running(servers) as world:
            await _notice(world)
            await world.tick(30)
            pages = [a for a in world.alerts.received[-1].json() if a["labels"]["level"] == "page"]
            await world.hop.receive(webhook(pages), ["slack"])
            (text,) = _texts(world)
            assert "无法通知任务 proc-1 的所有者" in text

    asyncio.run(story())


def test_an_address_that_is_mended_between_two_tries_is_used_at_the_next(servers: World) -> None:
    """The old one's failure is gone with it, and the deadline starts at the new one's proof."""
    _write(servers)

    async def story() -> None:
        async with running(servers) as world:
            body = await _notice(world)
            world.slack_reply["body"] = {"ok": False, "error": "channel_not_found"}
            refused = await world.hop.receive(body, ["slack"])
            assert (refused.delivered, refused.retry) == (0, False)
            text = (world.folder / "directory.yaml").read_text()
            (world.folder / "directory.yaml").write_text(text.replace("U0ALICE01", "U0ALICE02"))
            await world.tick()
            world.slack_reply["body"] = None
            assert (await world.hop.receive(body, ["slack"])).delivered == 1
            stored = world.engine.cases.get("idle-held", "proc-1")
            assert stored is not None
            notices = world.engine.ledger.notices(stored.id)
            assert [(n.recipient, n.state) for n in notices] == [("U0ALICE02", "proven")]
            await world.tick()
            assert world.state() is CaseState.NOTIFIED

    asyncio.run(story())


def test_who_moves_after_the_proof_must_be_told_again(servers: World) -> None:
    """What was proven at the old address stays so; the new one has to have it as well."""
    _write(servers)

    async def story() -> None:
        async with running(servers) as world:
            body = await _notice(world)
            await world.hop.receive(body, ["slack"])
            text = (world.folder / "directory.yaml").read_text()
            (world.folder / "directory.yaml").write_text(text.replace("U0ALICE01", "U0ALICE02"))
            await world.tick()
            await world.hop.receive(body, ["slack"])
            assert [m.json()["channel"] for m in world.slack.received] == ["U0ALICE01", "U0ALICE02"]

    asyncio.run(story())
