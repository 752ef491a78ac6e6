"""Backups of the ledger, and putting one back, as commands and while an engine runs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
import threading
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner, Result
from tests.ruleengine.engines import World, running
from tests.ruleengine.test_ledger import add, authorise, decision
from tests.ruleengine.test_ledger_upkeep import many_closed
from tests.ruleengine.test_settings import MINIMAL, write

from gpuwarden.errors import GpuwardenError
from gpuwarden.ruleengine.cases import CaseState
from gpuwarden.ruleengine.ledger import Ledger, LedgerUnusable
from gpuwarden.ruleengine.ledger_cli import ledger as command
from gpuwarden.ruleengine.ledger_upkeep import prune

if TYPE_CHECKING:
    from pathlib import Path

NOW = 1_800_000_000.0


def called(*arguments: object) -> Result:
    """Run a command in this process."""
    return CliRunner().invoke(command, [str(item) for item in arguments])


def status(result: Result) -> int:
    """The exit status that `gpuwarden` would have."""
    error = result.exception
    return error.exit_code if isinstance(error, GpuwardenError) else result.exit_code


def test_a_running_engines_ledger_is_copied_whole(tmp_path: Path) -> None:
    """One file for its owner's eyes, which another engine could start on."""
    copy = tmp_path / "copies" / "monday"
    copy.parent.mkdir()
    with Ledger(tmp_path / "l") as ledger:
        stored = add(ledger)
        authorise(ledger, stored, decision(stored))
        done = called("backup", copy, "--ledger", tmp_path / "l")
        assert done.exit_code == 0, done.output
        assert "1 cases (1 open), 1 decisions (1 open)" in done.output
        assert [item.name for item in copy.parent.iterdir()] == ["monday"]
        assert copy.stat().st_mode & 0o777 == 0o600
    with Ledger(copy) as again:
        assert [made.id for made in again.open_decisions()] == ["d1"]
        assert [event["kind"] for event in again.events("proc-1")] == ["detected", "authorised"]


def test_a_copy_is_of_one_moment_while_the_engine_writes(tmp_path: Path) -> None:
    """Cases and their events agree in every copy, whatever was written meanwhile."""
    stop, failed = threading.Event(), []
    begun = threading.Event()

    def write_on() -> None:
        with Ledger(tmp_path / "l") as ledger:
            for number in range(100_000):
                if stop.is_set():
                    return
                add(ledger, f"proc-{number}")
                begun.set()

    def guarded() -> None:
        try:
            write_on()
        except (GpuwardenError, sqlite3.Error) as error:
            failed.append(error)  # told by the test, not by the thread

    writer = threading.Thread(target=guarded)
    writer.start()
    try:
        assert begun.wait(30)
        counts = []
        for number in range(5):
            copy = tmp_path / f"copy-{number}"
            done = called("backup", copy, "--ledger", tmp_path / "l")
            assert done.exit_code == 0, done.output
            with contextlib.closing(sqlite3.connect(copy)) as db:
                counts.append(
                    db.execute(
                        "SELECT (SELECT count(*) FROM cases), (SELECT count(*) FROM events)"
                    ).fetchone()
                )
    finally:
        stop.set()
        writer.join(30)
    assert not failed
    assert all(cases == events > 0 for cases, events in counts), counts


def test_a_copy_is_not_overwritten_by_a_slip(tmp_path: Path) -> None:
    """Only with --overwrite; what fails leaves nothing behind."""
    Ledger(tmp_path / "l").close()
    (tmp_path / "copy").write_text("precious")
    refused = called("backup", tmp_path / "copy", "--ledger", tmp_path / "l")
    assert status(refused) == 3
    assert (tmp_path / "copy").read_text() == "precious"
    done = called("backup", tmp_path / "copy", "--ledger", tmp_path / "l", "--overwrite")
    assert done.exit_code == 0
    missing = called("backup", tmp_path / "c2", "--ledger", tmp_path / "none")
    assert status(missing) == 3
    assert "which ledger is meant?" in str(missing.exception)
    assert {item.name for item in tmp_path.iterdir()} - {"l-shm", "l-wal"} == {
        "copy",
        "l",
        "l.lock",
    }


def damage(path: Path) -> None:
    """Write over a page in the middle of a file."""
    with Ledger(path) as ledger:
        many_closed(ledger, 200, 2.0)
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(size // 2 // 4096 * 4096)
        file.write(b"\xff" * 8192)


@pytest.mark.parametrize("body", ["", "{", "[]", "null", '{"state": "nowhere"}', "[" * 100_000])
def test_a_case_that_is_damaged_is_told_with_what_to_do(tmp_path: Path, body: str) -> None:
    """The file is sound for SQLite and holds nonsense: nothing is done without what it knew."""
    path = tmp_path / "ledger"
    with Ledger(path) as ledger:
        stored = add(ledger)
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as beside:
            beside.execute("UPDATE cases SET body=?", (body,))
        for look in (ledger.open_cases, lambda: ledger.open_case("idle", "proc-1")):
            with pytest.raises(LedgerUnusable, match=rf"case {stored.id} is damaged.*restore"):
                look()


def test_a_damaged_ledger_is_told_and_never_copied_as_whole(tmp_path: Path) -> None:
    """`check` says 1 and what to do; a backup that could not be used gets no name."""
    damage(tmp_path / "l")
    checked = called("check", "--ledger", tmp_path / "l")
    assert status(checked) == 1, checked.output
    copied = called("backup", tmp_path / "copy", "--ledger", tmp_path / "l")
    assert status(copied) == 1
    assert "is damaged" in str(copied.exception)
    assert not (tmp_path / "copy").exists()
    Ledger(tmp_path / "good").close()
    restored = called("restore", tmp_path / "l", "--ledger", tmp_path / "good")
    assert status(restored) == 1
    assert status(called("check", "--ledger", tmp_path / "good")) == 0


def test_check_knows_what_is_no_ledger(tmp_path: Path) -> None:
    """A text, another program's database, and one of a newer gpuwarden."""
    (tmp_path / "text").write_text("these are not the bytes of a database" * 100)
    with contextlib.closing(sqlite3.connect(tmp_path / "other")) as db:
        db.execute("CREATE TABLE t (x)")
    Ledger(tmp_path / "newer").close()
    with contextlib.closing(sqlite3.connect(tmp_path / "newer")) as db:
        db.execute("PRAGMA user_version=999")
    for name in ("text", "other", "newer"):
        assert status(called("check", "--ledger", tmp_path / name)) == 3, name


def test_the_ledger_is_found_by_the_engines_file(tmp_path: Path) -> None:
    """As the engine finds it; both ways at once are a slip."""
    path = write(tmp_path, MINIMAL + "ledger: l\n")
    with Ledger(tmp_path / "l") as ledger:
        add(ledger)
    checked = called("check", "--config", path, "-o", "json")
    document = json.loads(checked.output)
    assert (document["rows"]["cases"], document["open_cases"], document["problems"]) == (1, 1, [])
    assert called("check").exit_code == 2
    assert called("check", "--config", path, "--ledger", tmp_path / "l").exit_code == 2


def test_a_backup_is_put_back_and_the_former_ledger_is_kept(tmp_path: Path) -> None:
    """Not under a running engine; the epoch does not go back behind what agents have heard."""
    path, copy = tmp_path / "l", tmp_path / "copy"
    with Ledger(path) as ledger:
        add(ledger, "proc-1")
        heard = ledger.next_epoch(NOW)
        assert called("backup", copy, "--ledger", path).exit_code == 0
        for _ in range(5):
            heard = ledger.next_epoch(NOW)
        add(ledger, "proc-2")
        refused = called("restore", copy, "--ledger", path)
        assert status(refused) == 3
        assert "in use by another engine" in str(refused.exception)
    done = called("restore", copy, "--ledger", path)
    assert done.exit_code == 0, done.output
    with Ledger(path) as ledger:
        assert [stored.case.job_id for stored in ledger.open_cases()] == ["proc-1"]
        assert ledger.next_epoch(NOW + 60) > heard
    (former,) = [item for item in tmp_path.iterdir() if item.name.startswith("l.before-")]
    with Ledger(former) as ledger:
        assert len(ledger.open_cases()) == 2


def test_a_ledger_that_is_lost_is_begun_anew_ahead_of_what_agents_heard(tmp_path: Path) -> None:
    """With epochs counted from 1 every agent would refuse the new engine for ever."""
    with Ledger(tmp_path / "l") as ledger:
        assert ledger.next_epoch(NOW) == int(NOW)
        assert ledger.next_epoch(NOW - 3600) == int(NOW) + 1


def test_space_is_given_back_when_asked(tmp_path: Path) -> None:
    """The engine must not run meanwhile; the file is smaller, and whole."""
    path = tmp_path / "l"
    with Ledger(path) as ledger:
        many_closed(ledger, 200, 2.0)
        prune(ledger, now=NOW, keep=86400.0, jobs=(), runs=())
        assert ledger.sizes()["free"] > 0
        assert status(called("compact", "--ledger", path)) == 3
    before = path.stat().st_size
    done = called("compact", "--ledger", path)
    assert done.exit_code == 0, done.output
    assert path.stat().st_size < before
    assert status(called("check", "--ledger", path)) == 0


@pytest.mark.parametrize("fault", ["epoch", "replaced", "gone"])
def test_an_engine_whose_ledger_is_not_its_own_does_nothing_and_says_so(
    servers: World, fault: str
) -> None:
    """What it wrote there, nobody might know later: no end, no notice, and not ready."""

    async def story() -> None:
        async with running(servers) as world:
            await world.until(CaseState.NOTIFIED)
            path = world.folder / "ledger.sqlite"
            notices = len(world.slack.received)
            if fault == "epoch":
                with contextlib.closing(sqlite3.connect(path)) as other, other:
                    other.execute("UPDATE meta SET value = value + 1 WHERE name='epoch'")
            else:
                path.rename(world.folder / "aside")
            if fault == "replaced":
                path.write_bytes((world.folder / "aside").read_bytes())
            await world.tick(40)
            assert world.agent.requests == []
            assert len(world.slack.received) == notices
            (block,) = world.engine.view.halted
            assert block.reason == "another_engine"
            assert block.sentence in world.engine.problems
            if fault == "gone":
                (world.folder / "aside").rename(path)
                await world.tick(40)
                assert world.agent.requests != []

    asyncio.run(story())


def test_an_agent_that_has_heard_another_engine_is_told_to_operators(servers: World) -> None:
    """The engine is not ready while the last agent said so; no agent's word stops it elsewhere."""
    servers.agent.refuse = (403, "stale_epoch")

    async def story() -> None:
        async with running(servers) as world:
            await world.until(CaseState.REFUSED)
            (problem,) = world.engine.problems
            assert problem.startswith("another engine has spoken to the agent of 127.0.0.1")
            world.agent.refuse = None
            while not world.agent.ended:
                await world.tick()
            await world.settled()
            assert world.engine.problems == []

    asyncio.run(story())
