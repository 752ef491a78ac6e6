"""`gpuwarden drill run` and `status`: each step as it ends, and an exit status that means it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from tests.ruleengine.engines import World, running, serving
from tests.ruleengine.test_drill_desks import NODE, rehearsing, victim
from tests.ruleengine.test_pauses import application
from tests.servers import free_port

if TYPE_CHECKING:
    from pathlib import Path


class Commands:
    """`gpuwarden drill` against an engine on this port, as an admin and as an operator."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self._folder = folder
        (folder / "admin").write_text("admins-token-00001\n")
        (folder / "operator").write_text("operators-token-01\n")

    def __call__(self, *words: str, who: str = "admin", after: tuple[str, ...] = ()) -> Answer:
        """Run a command; what comes `after` stands behind `--`."""
        done = subprocess.run(
            [
                *(sys.executable, "-m", "gpuwarden", "drill", *words),
                *("--engine.url", f"http://127.0.0.1:{self.port}"),
                *("--token-file", str(self._folder / who)),
                *(("--", *after) if after else ()),
            ],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr


Answer = tuple[int, str, str]


@pytest.fixture
def drill(servers: World, tmp_path: Path) -> Commands:
    """The commands, and a world that rehearses."""
    rehearsing(servers)
    return Commands(tmp_path)


async def until_ended(world: World, asked: asyncio.Task[Answer], *, comes: bool) -> Answer:
    """Let time pass in the engine until the command has its answer; a victim comes, or none."""
    came = False
    while not asked.done():
        if world.engine.drills.last():
            await world.tick()
            if comes and not came:
                came, world.fleet.jobs = True, [victim(world)]
            elif "verified" in world.kinds("proc-d1"):
                world.fleet.jobs = []
        await asyncio.sleep(0.2)
    return await asked


def test_run_shows_each_step_and_ends_with_0_only_if_all_were_in_time(
    servers: World, drill: Commands
) -> None:
    """The command after `--` starts the victim; here it only says so."""

    async def story() -> Answer:
        async with running(servers) as world, serving(application(world), drill.port):
            await world.tick()
            words = ("run", "--node", NODE, "--reason", "a try")
            asked = asyncio.create_task(asyncio.to_thread(drill, *words, after=("true",)))
            return await until_ended(world, asked, comes=True)

    status, said, _ = asyncio.run(story())
    words = [line.split()[0] for line in said.splitlines()]
    assert words[:7] == ["seen", "detected", "notified", "due", "authorised", "acting", "proven"]
    assert said.splitlines()[-1] == f"the drill on {NODE} passed"
    assert status == 0


def test_run_tells_that_no_victim_was_seen_and_that_its_starter_failed(
    servers: World, drill: Commands
) -> None:
    """Silence is an answer: no."""

    async def story() -> Answer:
        async with running(servers) as world, serving(application(world), drill.port):
            await world.tick()
            words = ("run", "--node", NODE)
            asked = asyncio.create_task(asyncio.to_thread(drill, *words, after=("false",)))
            return await until_ended(world, asked, comes=False)

    status, said, complained = asyncio.run(story())
    assert (status, f"no victim was seen on {NODE}" in said) == (1, True)
    assert "false ended with status 1" in complained


def test_run_gives_up_when_told_and_says_where_it_goes_on(servers: World, drill: Commands) -> None:
    """The engine follows the drill all the same. An operator may not ask for one."""

    async def story() -> list[Answer]:
        async with running(servers) as world, serving(application(world), drill.port):
            await world.tick()
            words = ("run", "--node", NODE, "--within", "1s")
            return [
                await asyncio.to_thread(drill, *words, who="operator"),
                await asyncio.to_thread(drill, *words, after=("/no/such/command",)),
                await asyncio.to_thread(drill, "status"),
            ]

    refused, missing, status = asyncio.run(story())
    assert (refused[0], "[role]" in refused[2]) == (1, True)
    assert (missing[0], "cannot be started" in missing[2]) == (2, True)
    # What could not be started was not asked for.
    assert "going on" not in status[1]


@pytest.mark.sweep
def test_run_leaves_a_starter_alone_that_hears_no_sigterm(servers: World, drill: Commands) -> None:
    """A victim that only SIGKILL ends holds no terminal up once its drill is over."""
    deaf = ("sh", "-c", "exec >/dev/null 2>&1; trap '' TERM; sleep 110")

    async def story() -> Answer:
        async with running(servers) as world, serving(application(world), drill.port):
            await world.tick()
            words = ("run", "--node", NODE, "--within", "1s")
            return await asyncio.to_thread(drill, *words, after=deaf)

    status, said, complained = asyncio.run(story())
    assert (status, "Given up waiting" in said) == (1, True)
    number = int(complained.removeprefix("Process ").split(",", 1)[0])
    assert "still runs: it is left alone" in complained
    os.kill(number, signal.SIGKILL)


def test_status_is_0_only_where_all_is_well(servers: World, drill: Commands) -> None:
    """Before the first drill is due; afterwards a node is overdue, in the table and in JSON."""

    async def story() -> list[Answer]:
        async with running(servers) as world, serving(application(world), drill.port):
            await world.tick()
            early = await asyncio.to_thread(drill, "status")
            world.clock.pass_(3700)
            late = await asyncio.to_thread(drill, "status")
            return [early, late, await asyncio.to_thread(drill, "status", "-o", "json")]

    early, late, document = asyncio.run(story())
    assert (early[0], late[0], document[0]) == (0, 1, 1)
    assert early[1].splitlines()[1].split()[:2] == [NODE, "never"]
    assert late[1].count("(overdue)") == 2
    read = json.loads(document[1])
    assert [node["overdue"] for node in read["nodes"]] == [True, True]


def test_status_says_that_nothing_is_rehearsed(servers: World, tmp_path: Path) -> None:
    """Without `drill` in engine.yaml the answer is no."""
    drill = Commands(tmp_path)

    async def story() -> Answer:
        async with running(servers) as world, serving(application(world), drill.port):
            return await asyncio.to_thread(drill, "status")

    assert asyncio.run(story())[:2] == (1, "engine.yaml has no drill: nothing is rehearsed.\n")
