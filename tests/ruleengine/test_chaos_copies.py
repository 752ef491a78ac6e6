"""Ledgers that were put back, copied or taken over: what nobody can know is not gone by."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import shutil
import sqlite3
from typing import TYPE_CHECKING

import pytest
from tests.ruleengine.engines import World, running
from tests.ruleengine.test_cases import due as due_case
from tests.ruleengine.test_invariants import due

from gpuwarden.ruleengine import ledger_files
from gpuwarden.ruleengine.cases import CaseState
from gpuwarden.ruleengine.keeps import KeepDesk
from gpuwarden.ruleengine.ledger import Ledger
from gpuwarden.ruleengine.ledger_handles import LedgerTaken
from gpuwarden.ruleengine.records import Change
from gpuwarden.ruleengine.roles import Role

if TYPE_CHECKING:
    from pathlib import Path

DEADLINE_SECONDS = 8 * 60.0


def keep(world: World) -> None:
    """An operator keeps the job for an hour."""
    desk = KeepDesk(world.engine)
    desk.grant("idle-held", "proc-1", role=Role.OPERATOR, by="ops", reason="demo", seconds=3600)


def _by_command(path: Path, copy: Path) -> None:
    ledger_files.restore(copy, path, aside=".before")


def _by_hand(path: Path, copy: Path) -> None:
    for name in ("-wal", "-shm"):
        path.with_name(path.name + name).unlink(missing_ok=True)
    shutil.copyfile(copy, path)


@pytest.mark.parametrize("how", ["backup, restored", "backup, by hand", "plain copy, by hand"])
def test_what_a_restored_ledger_does_not_know_of_is_not_broken(
    servers: World, tmp_path: Path, how: str
) -> None:
    """The job was kept after the copy was made: its owner is told anew, and has the whole time."""
    path, copy = servers.folder / "ledger.sqlite", tmp_path / "copy.sqlite"

    async def story() -> None:
        (servers.folder / "halt").touch()
        async with running(servers) as world:
            await world.until(CaseState.DUE)
            if how.startswith("backup"):
                ledger_files.backup(path, copy)
                keep(world)
        if how.startswith("plain"):
            shutil.copyfile(path, copy)
            async with running(servers) as world:
                keep(world)
        heard = len(servers.slack.received)
        (_by_command if how.endswith("restored") else _by_hand)(path, copy)
        (servers.folder / "halt").unlink()
        async with running(servers) as world:
            since = world.clock.wall()
            while not world.agent.requests:
                await world.tick()
            assert world.clock.wall() - since >= DEADLINE_SECONDS
            assert len(world.slack.received) >= heard + 1
            (closed,) = [e for e in world.engine.ledger.events("proc-1") if e["kind"] == "closed"]
            assert closed["detail"] == {"reason": "restored", "state": "due"}
        async with running(servers) as world:
            # The next life goes on as any other does.
            assert world.state() is not None

    asyncio.run(story())


def test_an_engine_on_a_copy_elsewhere_ends_nobody_on_what_another_has_told(
    servers: World, tmp_path: Path
) -> None:
    """Its file holds the proofs of the other's notices, and none of the keeps granted since."""
    other = tmp_path / "other"
    other.mkdir()

    async def story() -> None:
        (servers.folder / "halt").touch()
        async with running(servers) as first:
            await first.until(CaseState.DUE)
            ledger_files.backup(servers.folder / "ledger.sqlite", other / "ledger.sqlite")
            for name in ("rules.yaml", "directory.yaml"):
                shutil.copy(servers.folder / name, other / name)
            keep(first)
            # Its alerts go to the same Alertmanager, which passes on to the first engine.
            mistaken = dataclasses.replace(servers, folder=other, forwarding=False)
            async with running(mistaken) as second:
                await second.tick(80)
                assert second.state() is CaseState.DETECTED
                assert servers.agent.requests == []

    asyncio.run(story())


def test_a_ledger_of_a_version_without_homes_goes_on(tmp_path: Path) -> None:
    """An upgrade is no restore: nobody is told anew for it, then or later."""
    path = tmp_path / "l"
    with Ledger(path) as ledger:
        ledger.save([Change(None, due_case(), "enforce", ())], time=1.0)
    for now in (10.0, 20.0):
        with Ledger(path) as ledger:
            ledger.next_epoch(now)
            assert len(ledger.open_cases()) == 1


def test_a_lock_that_cannot_be_read_costs_the_proofs_and_nothing_else(tmp_path: Path) -> None:
    """Half written, or of another program: the file counts as put back, once."""
    path = tmp_path / "l"
    with Ledger(path) as ledger:
        ledger.next_epoch(10.0)
        ledger.save([Change(None, due_case(), "enforce", ())], time=11.0)
    (tmp_path / "l.lock").write_bytes(b"\xff\x00 ?")
    with Ledger(path) as ledger:
        ledger.next_epoch(20.0)
        assert ledger.open_cases() == []
        ledger.save([Change(None, due_case(), "enforce", ())], time=21.0)
    with Ledger(path) as ledger:
        ledger.next_epoch(30.0)
        assert len(ledger.open_cases()) == 1


@pytest.mark.parametrize("fault", ["epoch", "replaced"])
def test_whose_ledger_is_taken_in_the_act_decides_nothing(servers: World, fault: str) -> None:
    """Between the tick's first look and its decision; and what is asked of it is refused."""

    async def story() -> None:
        async with due(servers) as world:
            path = world.folder / "ledger.sqlite"

            def take() -> None:
                world.agent.on_node = None
                if fault == "epoch":
                    with contextlib.closing(sqlite3.connect(path)) as other, other:
                        other.execute("UPDATE meta SET value = value + 1 WHERE name='epoch'")
                else:
                    path.rename(world.folder / "aside")
                    path.write_bytes((world.folder / "aside").read_bytes())

            world.agent.on_node = take
            await world.tick()
            assert world.agent.requests == []
            with pytest.raises(LedgerTaken):
                # Else its owner would believe in it, and the other engine know nothing of it.
                keep(world)
            await world.tick()
            assert world.agent.requests == []
            (block,) = world.engine.view.halted
            assert block.reason == "another_engine"

    asyncio.run(story())
