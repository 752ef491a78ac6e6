"""Forgetting a person: no byte of their name is left, and nothing else is lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
from typing import TYPE_CHECKING

import pytest
from tests.ruleengine.engines import World, running
from tests.ruleengine.leaves import a_leave
from tests.ruleengine.reclaim.scenes import JOB, Scene
from tests.ruleengine.reclaim.test_ladders import decided, over
from tests.ruleengine.test_ledger import add
from tests.ruleengine.test_ledger_files import called, status
from tests.ruleengine.worlds import GIB, Job

from gpuwarden.errors import RefusedAction
from gpuwarden.ruleengine.cases import CaseState
from gpuwarden.ruleengine.erasures import Person, erase
from gpuwarden.ruleengine.leave_records import LeaveState, LeaveStore
from gpuwarden.ruleengine.ledger import Ledger
from gpuwarden.ruleengine.records import Keep

if TYPE_CHECKING:
    from pathlib import Path

ALICE = Person("alice", ("U0ALICE01",), "erased")
HOUR, DAY = 3600.0, 86400.0


def take_out(folder: Path, now: float, person: Person = ALICE, **more: bool) -> dict[str, int]:
    """Erase a person from the ledger of a world."""
    options = {"everywhere": False, "dry_run": False, **more}
    return erase(
        folder / "ledger.sqlite",
        person,
        others=("U0BOB0001",),
        now=now,
        by="olga",
        reason="asked for it",
        **options,
    ).rows


def bytes_with(folder: Path, *words: str) -> list[str]:
    """Files of the ledger that hold one of the words, whatever its case."""
    return [
        f"{path.name}: {word}"
        for path in sorted(folder.glob("ledger.sqlite*"))
        for word in words
        if word.lower().encode() in path.read_bytes().lower()
    ]


async def lived(world: World) -> None:
    """A job of alice's is kept once and ended; one of bob's is told."""
    world.fleet.jobs[0].run = {"run_id": "Alice_yolo-3", "model": "yolov8m"}
    world.fleet.jobs.append(
        Job("proc-2", user="bob", uuid="GPU-2", memory=31 * GIB, activity={"cpu": 1_799_990_000.0})
    )
    await world.until(CaseState.NOTIFIED)
    stored = world.engine.cases.get("idle-held", "proc-1")
    rule = world.engine.rulebook.rule("idle-held")
    assert stored is not None
    assert rule is not None
    world.engine.keep(stored, rule, role="owner", by="alice", reason="my thesis", seconds=60.0)
    await world.until(CaseState.VERIFIED)
    world.engine.pauses.begin(by="bob", role="admin", reason="alice asked me", seconds=1.0)
    world.fleet.jobs = [job for job in world.fleet.jobs if job.job_id != "proc-1"]
    await world.until(None)


def test_no_byte_of_a_person_is_left_while_the_engine_runs_on(servers: World) -> None:
    """Name, address, run and words; of bob everything stays, and so do the counters."""

    async def story() -> None:
        async with running(servers) as world:
            await lived(world)
            assert len({line.split(": ")[1] for line in bytes_with(world.folder, *TRACES)}) == 3
            before = world.told()
            with pytest.raises(RefusedAction) as refused:
                take_out(world.folder, world.clock.wall())
            assert refused.value.reason == "counts_for_limits"
            world.clock.pass_(DAY)
            rows = take_out(world.folder, world.clock.wall(), everywhere=True)
            assert {"cases", "events", "notices", "deliveries", "decisions", "keeps"} <= rows.keys()
            assert bytes_with(world.folder, *TRACES) == []
            await world.tick(3)
            after = world.told()
            counters = [name for name in before if "_total" in name and "decisions" in name]
            assert counters
            assert all(after[name] >= before[name] for name in counters)
            (decision,) = world.engine.ledger.job_decisions("proc-1")
            assert (decision.user, decision.state) == ("erased", "verified")
            assert world.engine.ledger.rows(
                "SELECT count(*) FROM events WHERE detail LIKE '%U0BOB0001%' OR job_id='proc-2'"
            ) != [(0,)]

    asyncio.run(story())


TRACES = ("alice", "U0ALICE01", "my thesis")


def test_the_audit_says_that_somebody_was_erased_and_not_who(servers: World) -> None:
    """By whom, when, why and how many rows."""

    async def story() -> None:
        async with running(servers) as world:
            await lived(world)
            world.clock.pass_(2 * DAY)
            rows = take_out(world.folder, world.clock.wall())
            (event,) = world.engine.ledger.rows("SELECT detail FROM events WHERE kind = 'erased'")
            assert json.loads(event[0]) == {
                "by": "olga",
                "reason": "asked for it",
                "rows": sum(rows.values()),
            }

    asyncio.run(story())


def test_afterwards_the_audit_can_only_be_added_to_again(servers: World) -> None:
    """What kept others from rewriting it is back, and so is what counts."""

    async def story() -> None:
        async with running(servers) as world:
            await lived(world)
            world.clock.pass_(2 * DAY)
            take_out(world.folder, world.clock.wall())
            with (
                contextlib.closing(sqlite3.connect(world.folder / "ledger.sqlite")) as db,
                pytest.raises(sqlite3.IntegrityError, match="append-only"),
            ):
                db.execute("UPDATE events SET detail='{}'")
            counted = world.engine.ledger.count_events("detected")
            await world.tick(2)
            world.fleet.jobs.append(
                Job("proc-3", user="bob", uuid="GPU-3", activity={"cpu": 1_799_990_000.0})
            )
            for _ in range(80):
                if world.state("proc-3") is CaseState.DETECTED:
                    break
                await world.tick()
            assert world.engine.ledger.count_events("detected") == counted + 1

    asyncio.run(story())


def test_a_dry_run_changes_nothing_and_says_what_would_change(servers: World) -> None:
    """The same figures as the erasure itself."""

    async def story() -> None:
        async with running(servers) as world:
            await lived(world)
            world.clock.pass_(2 * DAY)
            now = world.clock.wall()
            foretold = take_out(world.folder, now, dry_run=True)
            assert bytes_with(world.folder, "alice")
            assert take_out(world.folder, now) == foretold

    asyncio.run(story())


def test_texts_about_others_keep_a_word_that_may_mean_something_else(servers: World) -> None:
    """They are counted; names in fields that name people go all the same."""

    async def story() -> None:
        async with running(servers) as world:
            await lived(world)
            world.clock.pass_(2 * DAY)
            found = erase(
                world.folder / "ledger.sqlite",
                ALICE,
                others=(),
                everywhere=False,
                dry_run=False,
                now=world.clock.wall(),
                by="olga",
                reason="x",
            )
            # Of bob's pause: the table's row, and the event.
            assert found.mentions == 2
            (pause,) = world.engine.ledger.rows("SELECT by, reason FROM pauses")
            assert pause == ("bob", "alice asked me")
            assert found.compacted

    asyncio.run(story())


def test_what_is_open_is_not_erased(tmp_path: Path) -> None:
    """An open case, and a keep that still holds."""
    path = tmp_path / "ledger.sqlite"
    with Ledger(path) as ledger:
        stored = add(ledger)
        name = stored.case.user
        person = Person(name, (), "erased")
        with pytest.raises(RefusedAction) as refused:
            take_out(tmp_path, 2e9, person)
        assert refused.value.reason == "open_cases"
    with Ledger(path) as ledger:
        ledger.add_keep(
            Keep("idle", stored.case.job_id, None, "owner", name, "why", 60.0, 1e9, 3e9),
            None,
            time=1e9,
        )
        with ledger.transaction() as db:
            db.execute("UPDATE cases SET closed_at=1, closed_because='cleared'")
        with pytest.raises(RefusedAction) as refused:
            take_out(tmp_path, 2e9, person)
        assert refused.value.reason == "keeps"


@pytest.mark.parametrize(("by", "reason"), [("olga", "Alice asked"), ("alice", "asked")])
def test_the_audit_does_not_name_the_person_anew(tmp_path: Path, by: str, reason: str) -> None:
    """The erasure's own line is for ever."""
    with Ledger(tmp_path / "l"):
        pass
    with pytest.raises(RefusedAction) as refused:
        erase(
            tmp_path / "l",
            ALICE,
            others=(),
            everywhere=False,
            dry_run=False,
            now=1e9,
            by=by,
            reason=reason,
        )
    assert refused.value.reason == "named_anew"


NAMES = (r"EXAMPLE\alice", "ali-ce@example.org", "müller", "a.b")


@pytest.mark.parametrize("name", NAMES)
def test_names_that_json_writes_otherwise_are_found(tmp_path: Path, name: str) -> None:
    """A backslash, an umlaut and what a pattern would take for a sign of its own."""
    path = tmp_path / "ledger.sqlite"
    with Ledger(path) as ledger:
        stored = add(ledger)
        with ledger.transaction() as db:
            db.execute(
                "UPDATE cases SET closed_at=1, closed_because='cleared', body=json_set(body, "
                "'$.user', ?)",
                (name,),
            )
            detail = json.dumps({"by": name, "reason": "axb", "note": f"of {name}, here"})
            db.execute(
                "INSERT INTO events (time, case_id, rule_id, job_id, kind, mode, detail) "
                "VALUES (1, ?, 'r', 'j', 'kept', '', ?)",
                (stored.id, detail),
            )
    take_out(tmp_path, 2e9, Person(name, (), "erased-1"))
    with Ledger(path) as ledger:
        (row,) = ledger.rows("SELECT detail FROM events WHERE kind='kept'")
    assert json.loads(row[0]) == {"by": "erased-1", "reason": "erased", "note": "of erased-1, here"}


def test_every_column_of_every_table_is_gone_through(tmp_path: Path) -> None:
    """Also of tables that come later: whatever a row of the person's case says."""
    path = tmp_path / "ledger.sqlite"
    with Ledger(path) as ledger:
        stored = add(ledger)
        with ledger.transaction() as db:
            db.execute(
                "UPDATE cases SET closed_at=1, closed_because='cleared by zoë', body=json_set("
                "body, '$.user', 'zoë')"
            )
            db.execute(
                "CREATE TABLE of_tomorrow (case_id INTEGER, told TEXT, more BLOB, "
                "recipient TEXT, PRIMARY KEY (case_id, recipient)) STRICT"
            )
            for to in ("zoë", "zoë@example.org"):
                db.execute(
                    "INSERT INTO of_tomorrow VALUES (?, 'to Zoë', ?, ?)",
                    (stored.id, b'{"of": {"zo\\u00eb": ["zo\\u00eb"]}}', to),
                )
    take_out(tmp_path, 2e9, Person("zoë", ("zoë@example.org",), "erased"))
    with Ledger(path) as ledger:
        rows = ledger.rows("SELECT told, more, recipient FROM of_tomorrow ORDER BY rowid")
        assert [row[2] for row in rows] == ["erased", "erased-2"]
        assert {row[:2] for row in rows} == {("to erased", b'{"of": {"erased": ["erased"]}}')}
        assert ledger.rows("SELECT closed_because FROM cases") == [("cleared by erased",)]


def test_the_command_erases_and_refuses(tmp_path: Path) -> None:
    """Exit status 0 done, 1 refused, 3 no ledger."""
    path, words = tmp_path / "ledger.sqlite", ("--reason", "asked", "--by", "olga")
    assert status(called("erase", "--user", "ana", *words, "--ledger", path)) == 3
    with Ledger(path) as ledger:
        name = add(ledger).case.user
    assert status(called("erase", "--user", name, *words, "--ledger", path)) == 1
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE cases SET closed_at=1, closed_because='cleared'")
    done = called("erase", "--user", name, "--pseudonym", *words, "--ledger", path)
    assert done.exit_code == 0, done.output
    assert "1 of cases" in done.output
    with Ledger(path) as ledger:
        (row,) = ledger.rows("SELECT json_extract(body, '$.user') FROM cases")
    assert f"In the place of the name stands {row[0]}\n" in done.output
    assert row[0].startswith("erased-")


def test_what_a_platform_did_is_gone_through_as_well(servers: World) -> None:
    """Parts on nodes, the platform's claim, looks and texts of the audit: no table is missed."""
    scene = Scene.of(servers)

    async def story() -> None:
        async with decided(scene) as world:
            await over(world)
            (decision,) = world.engine.ledger.job_decisions(JOB)
            world.fleet.jobs = [job for job in world.fleet.jobs if job.job_id != JOB]
            for _ in range(80):
                if world.engine.cases.get("idle-held", JOB) is None:
                    break
                await world.tick()
            world.clock.pass_(2 * DAY)
            owner = world.engine.rulebook.directory.user(decision.user)
            person = Person(decision.user, owner.addresses, "erased")
            with world.engine.ledger.transaction() as db:
                db.execute("UPDATE platform_acts SET claim = ?, detail = ?", CLAIMS)
            assert bytes_with(world.folder, decision.user)
            rows = take_out(world.folder, world.clock.wall(), person, everywhere=True)
            assert {"decisions", "platform_acts", "cases"} <= rows.keys()
            assert bytes_with(world.folder, decision.user, *owner.addresses) == []
            assert world.engine.ledger.decision(decision.id) is not None
            await world.tick(3)

    asyncio.run(story())


CLAIMS = (
    '{"namespace": "alice", "name": "train-alice-1", "uid": "u"}',
    '{"key": "user=alice", "condition": "alice\'s quota"}',
)
"""What a platform calls after a person."""


def test_who_was_only_asked_to_leave_is_forgotten_as_well(tmp_path: Path) -> None:
    """Name and run, in the leave and in its audit; not while the request stands."""
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        store, now = LeaveStore(ledger), 1_800_000_000.0
        leave = a_leave(now, run_id="Alice_yolo-3", reason="alice goes last")
        store.add(leave, [], time=now)
        with pytest.raises(RefusedAction) as refused:
            take_out(tmp_path, now + 2 * DAY)
        assert refused.value.reason == "open_leaves"
        store.settle(leave, LeaveState.LEFT, "", steps={}, time=now)
        assert {"leaves", "events"} <= take_out(tmp_path, now + 2 * DAY).keys()
        found = store.get("leave-1")
        assert found is not None
        assert (found.user, found.by) == ("erased", "planner")
    assert bytes_with(tmp_path, "alice") == []
