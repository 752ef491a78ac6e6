"""The ledger full, locked or damaged, and an engine that dies at any write.

Nothing takes effect that is not on disk, nothing is lost that is, and it is said what to do.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from tests.ruleengine.engines import World, running
from tests.ruleengine.test_settings import MINIMAL, write
from tests.servers import free_port

from gpuwarden.ruleengine.cases import CaseState
from gpuwarden.ruleengine.ledger import Ledger, LedgerUnusable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

HOLD = """
import sqlite3, sys
held = sqlite3.connect(sys.argv[1], isolation_level=None)
held.execute("BEGIN EXCLUSIVE")
print("held", flush=True)
sys.stdin.read()
"""
GRACE_OF_NOTICE = 5 * 60.0


class Died(BaseException):
    """The process is gone: nothing after this point was done."""


class MortalLedger(Ledger):
    """A ledger whose process dies, or whose disk is full, at one of its writes and ever after."""

    def __init__(self, path: Path, *, at: int, how: str) -> None:
        self.writes, self.dead, self.closed = 0, False, False
        self._at, self._how = at, how
        super().__init__(path)

    def close(self) -> None:
        """Let go, as the end of the process would; again is nothing."""
        if not self.closed:
            self.closed = True
            super().close()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        self.writes += 1
        if self.dead or (self.writes >= self._at and self._how == "before"):
            self.dead = True
            raise Died
        if self.writes >= self._at and self._how == "full":
            self._db.execute("PRAGMA query_only=ON")
        with super()._transaction() as db:
            yield db
        if self.writes >= self._at and self._how == "after":
            self.dead = True
            raise Died


async def lives(
    world: World,
    *,
    at: int = sys.maxsize,
    how: str = "before",
    after_tick: Callable[[World], None] = lambda _world: None,
) -> int:
    """Ticks until the job is ended and proven, or the engine dies; how often it wrote."""
    made: list[MortalLedger] = []

    def open_ledger(path: Path) -> Ledger:
        made.append(MortalLedger(path, at=at, how=how))
        return made[-1]

    world.open_ledger = open_ledger
    with contextlib.suppress(Died, LedgerUnusable):
        async with running(world):
            for _ in range(160):
                await world.tick()
                after_tick(world)
                if made[-1].dead:
                    break
                if world.agent.requests and not world.engine.ledger.open_decisions():
                    break
                await asyncio.sleep(0)
    made[-1].close()
    return made[-1].writes


async def _dies_and_lives(world: World, at: int, how: str) -> None:
    await lives(world, at=at, how=how)
    early = world.clock.wall()
    world.clock.pass_(45)  # longer than a request lives
    await lives(world)
    assert world.agent.ended == ["proc-1"], (at, how)
    with contextlib.closing(sqlite3.connect(world.folder / "ledger.sqlite")) as db:
        results = db.execute("SELECT state FROM decisions ORDER BY created_at").fetchall()
        (proven,) = db.execute("SELECT min(time) FROM notices WHERE state='proven'").fetchone()
        decided = [row[0] for row in db.execute("SELECT created_at FROM decisions").fetchall()]
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert [state for (state,) in results if state != "lapsed"] == ["verified"], (at, how)
    assert min(decided) >= proven + GRACE_OF_NOTICE, (at, how)
    # A message whose proof could not be written is sent once more, and never a third time.
    assert len(world.slack.received) <= 4, (at, how, early)


def begin_again(servers: World, tmp_path: Path, number: int) -> None:
    """The world as it was, on a ledger of its own."""
    (tmp_path / "ledger.sqlite").rename(tmp_path / f"ledger-{number}.sqlite")
    for name in ("ledger.sqlite-wal", "ledger.sqlite-shm"):
        (tmp_path / name).unlink(missing_ok=True)
    servers.agent.ended.clear()
    servers.agent.requests.clear()
    servers.agent.reports.clear()
    servers.agent.first_end.clear()
    servers.slack.received.clear()
    servers.alerts.received.clear()
    for job in servers.fleet.jobs:
        job.activity["cpu"] = servers.clock.wall() - 7200
        job.started = servers.clock.wall() - 7200


def _story(servers: World, tmp_path: Path, choose: Callable[[int], list[int]]) -> None:
    async def story() -> None:
        writes = await lives(servers)
        for number, at in enumerate(choose(writes)):
            for how in ("before", "after", "full"):
                begin_again(servers, tmp_path, 3 * number + len(how))
                await _dies_and_lives(servers, at, how)

    asyncio.run(story())


def test_an_engine_that_dies_around_a_decision_ends_the_job_once(
    servers: World, tmp_path: Path
) -> None:
    """Killed before or after a write, or its disk full: the next life finishes, and only once."""
    _story(servers, tmp_path, lambda writes: [writes - 2])


@pytest.mark.sweep
@pytest.mark.timeout(900)
def test_an_engine_that_dies_at_any_write_ends_the_job_once(servers: World, tmp_path: Path) -> None:
    """At each single write of the whole story."""
    _story(servers, tmp_path, lambda writes: list(range(1, writes + 1)))


def test_a_damaged_ledger_ends_the_engine_and_no_job(servers: World) -> None:
    """Its pages are overwritten while it runs: it says so instead of going on without."""

    async def story() -> None:
        (servers.folder / "halt").touch()
        async with running(servers) as world:
            await world.until(CaseState.DUE)
            db, path = world.engine.ledger._db, world.engine.ledger.path
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            with path.open("r+b") as file:
                file.seek(4096)
                file.write(b"\xff" * (path.stat().st_size - 4096))
            db.execute("PRAGMA shrink_memory")
            (world.folder / "halt").unlink()
            with pytest.raises(LedgerUnusable, match="replaced by its newest backup"):
                await world.engine.run()
            assert world.agent.requests == []

    asyncio.run(story())
    with pytest.raises(LedgerUnusable, match=r"damaged|not a usable ledger"):
        Ledger(servers.folder / "ledger.sqlite")


@pytest.mark.parametrize("table", ["events", "decisions", "notices"])
def test_a_ledger_with_one_bad_page_is_not_begun_on(tmp_path: Path, table: str) -> None:
    """The file opens, and what it holds of one table is lost: found at the start, not at an end."""
    path = tmp_path / "ledger.sqlite"
    Ledger(path).close()
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        (root,) = db.execute("SELECT rootpage FROM sqlite_master WHERE name=?", (table,)).fetchone()
        (size,) = db.execute("PRAGMA page_size").fetchone()
    with path.open("r+b") as file:
        file.seek((root - 1) * size)
        file.write(b"\x5a" * size)
    with pytest.raises(LedgerUnusable, match=r"is damaged .* newest backup"):
        Ledger(path)


@contextlib.contextmanager
def _held(path: Path) -> Iterator[None]:
    """Another process has the file to itself."""
    command = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        yield


def test_a_ledger_that_somebody_holds_ends_the_engine_and_no_job(servers: World) -> None:
    """Another program has it open for writing; once it lets go, nothing is missing."""
    path = servers.folder / "ledger.sqlite"

    async def story() -> None:
        (servers.folder / "halt").touch()
        async with running(servers) as world:
            await world.until(CaseState.DUE)
            world.engine.ledger._db.execute("PRAGMA busy_timeout=50")
            (world.folder / "halt").unlink()
            with _held(path), pytest.raises(LedgerUnusable, match="end what else has it open"):
                await world.tick()
            assert world.agent.requests == []
        async with running(servers) as world:
            while not world.agent.requests:
                await world.tick()
            assert world.kinds().count("notified") == 1

    asyncio.run(story())


def test_an_engine_without_room_for_its_ledger_does_not_start(tmp_path: Path) -> None:
    """Exit status 3 and a sentence, no traceback; with room, the same files serve."""
    port = free_port()
    path = write(
        tmp_path, MINIMAL + f"ledger: ledger.sqlite\nweb: {{listen: '127.0.0.1:{port}'}}\n"
    )
    command = ["prlimit", "--fsize=1000", sys.executable, "-m", "gpuwarden"]
    done = subprocess.run(
        [*command, "engine", "--config", str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    assert "ledger" in done.stderr
    assert "Traceback" not in done.stderr
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        assert ledger.next_epoch() == 1
