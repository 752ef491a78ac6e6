"""A replay knows what people did: keeps and pauses of a ledger hold as of then."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner
from tests.ruleengine.rehearsing import RULES, engine_over
from tests.ruleengine.replaying import made, plan, replayed, switched_on
from tests.ruleengine.worlds import OwnedClock

from gpuwarden.errors import InvalidInput
from gpuwarden.ruleengine import replay_people
from gpuwarden.ruleengine.cases import CaseState, Delivery
from gpuwarden.ruleengine.histories import history
from gpuwarden.ruleengine.keeps import KeepDesk
from gpuwarden.ruleengine.ledger import Ledger
from gpuwarden.ruleengine.ledger_files import backup
from gpuwarden.ruleengine.ledger_schema import MIGRATIONS
from gpuwarden.ruleengine.loading import load_rule_files
from gpuwarden.ruleengine.pauses import Pauses
from gpuwarden.ruleengine.records import Keep
from gpuwarden.ruleengine.replay_people import People, Promises
from gpuwarden.ruleengine.replay_policies import outcomes, parse_policies
from gpuwarden.ruleengine.replay_reports import document
from gpuwarden.ruleengine.replay_texts import blocks, markdown
from gpuwarden.ruleengine.roles import Role
from gpuwarden.ruleengine.rule_cli import rules as rules_command
from gpuwarden.ruleengine.settings import load_settings
from gpuwarden.ruleengine.temporary_servers import temporary_prometheus

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from gpuwarden.ruleengine.model import RuleSet
    from gpuwarden.ruleengine.replay_runs import Replay
    from gpuwarden.ruleengine.rule_tests import RuleTest

KEEPABLE = (
    RULES[: RULES.index("- id: hot")]
    .replace("do: notify}", "do: notify, owner_may: {keep: 15m, times: 2}}")
    .replace("per_tick: 1, per_hour: 6", "per_tick: 9, per_hour: 99")
)
"""One rule: idle for 5 minutes, a notice 5 minutes later, the end after 20."""
MINUTE = 60.0
SAVED = {"like": "idle", "age": "5h", "run": {"saves_every": "10m"}}


def rules_of(folder: Path, text: str = KEEPABLE) -> RuleSet:
    """Rules of a file, switched on."""
    path = folder / "rules.yaml"
    path.write_text(text)
    return switched_on(load_rule_files([path]))


def idle(*jobs: str, **more: Any) -> list[dict[str, Any]]:
    """Jobs that do nothing, each of another user."""
    return [{"job": f"proc-{name}", "user": name, **SAVED, **more} for name in jobs]


def keep(job: str, at: float, seconds: float, **more: Any) -> Keep:
    """A keep of the rule `idle`, with 10 minutes left when it was granted."""
    given = {"rule_id": "idle", "run_id": None, "role": "owner", "by": job[5:], "reason": "a demo"}
    until = at + 10 * MINUTE + seconds
    return Keep(
        **{"job_id": job, "seconds": seconds, "granted_at": at, "until": until, **given, **more}
    )


def ledger_of(
    folder: Path, *keeps: Keep, people: Callable[[Pauses, OwnedClock], None] | None = None
) -> Path:
    """A ledger in which people have done something."""
    path = folder / "ledger.sqlite"
    clock = OwnedClock(0.0)
    with Ledger(path) as ledger:
        for item in keeps:
            ledger.add_keep(item, None, time=item.granted_at)
        if people is not None:
            people(Pauses(ledger, clock), clock)
    return path


def ends(result: Replay, number: int = 0) -> dict[str, float]:
    """Job -> minutes from the beginning at which a rule set would have ended it."""
    arm = result.arms[number]
    return {job: (at - result.plan.begin) / MINUTE for job, at in arm.ended.items()}


def told(result: Replay) -> dict[str, Any]:
    """The document of a replay."""
    return document(result)


def replays(test: RuleTest, *sets: RuleSet, **more: Any) -> Replay:
    """The replay of a test's history."""

    async def run() -> Replay:
        async with temporary_prometheus(history(test)) as url:
            return await replayed(plan(url, test, **more), *sets)

    return asyncio.run(run())


# -- the same as live


class TellingLedger(Ledger):
    """A ledger by which every notice arrives at once."""

    def __init__(self, path: Path, clock: OwnedClock) -> None:
        super().__init__(path)
        self._clock = clock
        self._proven: dict[tuple[int, str | None, str], float] = {}

    def delivery(self, case_id: int, stages: Sequence[str], owner: str | None = None) -> Delivery:
        """Proven when it was first asked for."""
        now = self._clock.wall()
        times = [self._proven.setdefault((case_id, owner, name), now) for name in stages]
        return Delivery(complete=bool(times), proven_at=max(times, default=None))


async def _live_ends(folder: Path, url: str, test: RuleTest) -> dict[str, float]:
    """When nothing spoke any more against the end of each job, in a live engine, in minutes.

    Ana keeps hers twice, Ben pays no attention, an operator keeps Cyd's; enforcement is paused for
    a while, and again by somebody else while that still holds.
    """
    (folder / "engine.yaml").write_text(
        "version: 1\nprometheus: {url: http://127.0.0.1:1}\nrules: [rules.yaml]\n"
        f"ledger: ledger.sqlite\ntick: {test.tick:.0f}s\nkill_switch: halt\n"
        f"scrape_interval: {test.interval:.0f}s\ncool_down: 0s\n"
    )
    begin = test.start.timestamp()
    settings, clock = load_settings(folder / "engine.yaml"), OwnedClock(begin)
    found: dict[str, float] = {}
    ledger = TellingLedger(settings.path(settings.values.ledger), clock)
    async with engine_over(url, settings, ledger, clock) as engine:
        desk = KeepDesk(engine)

        def kept(job: str, role: Role, minutes: float) -> None:
            desk.grant(
                "idle", job, role=role, by="somebody", reason="why", seconds=minutes * MINUTE
            )

        deeds: dict[int, Callable[[], object]] = {
            9: lambda: kept("proc-ana", Role.OWNER, 12),
            11: lambda: kept("proc-cyd", Role.OPERATOR, 30),
            26: lambda: engine.pauses.begin(
                by="root", role="admin", reason="an upgrade", seconds=None
            ),
            29: lambda: engine.pauses.begin(
                by="olga", role="admin", reason="a look", seconds=5 * MINUTE
            ),
            33: lambda: kept("proc-ana", Role.OWNER, 15),
        }
        for number in range(int(test.length // test.tick) + 1):
            await engine.tick()
            facts = engine.view.facts
            for stored in engine.cases.all():
                rule = engine.rulebook.rule("idle")
                if stored.case.state is not CaseState.DUE or rule is None or facts is None:
                    continue
                if not engine.objections(stored, rule, facts):
                    found.setdefault(stored.case.job_id, (clock.wall() - begin) / MINUTE)
            # People act between two ticks.
            clock.pass_(test.tick / 3)
            deeds.get(number, lambda: None)()
            clock.pass_(test.tick - test.tick / 3)
        copy = folder / "copy.sqlite"
        backup(settings.path(settings.values.ledger), copy)
        assert replay_people.read(copy).keeps == replay_people.read(ledger.path).keeps
    return found


def test_keeps_and_pauses_hold_as_in_the_live_engine(tmp_path: Path) -> None:
    """Over the same history every end comes at the same tick; without the ledger none is held."""
    text = KEEPABLE.replace("target: job\n  match", "mode: enforce\n  target: job\n  match")
    rules = rules_of(tmp_path, text)
    test = made("90m", idle("ana", "ben", "cyd"), tick="60s", interval="15s")

    async def both() -> tuple[dict[str, float], Replay, Replay]:
        async with temporary_prometheus(history(test)) as url:
            live = await _live_ends(tmp_path, url, test)
            people = replay_people.read(tmp_path / "copy.sqlite")
            where = plan(url, test, cool_down=0.0, people=people)
            with_it = await replayed(where, rules)
            return live, with_it, await replayed(plan(url, test, cool_down=0.0), rules)

    live, replay, without = asyncio.run(both())
    assert ends(replay) == live
    assert set(live) == {"proc-ana", "proc-ben", "proc-cyd"}
    assert len(set(live.values())) == 3
    assert set(ends(without).values()) == {27.0}


# -- what a keep is worth


def test_the_rules_that_are_replayed_say_what_a_keep_is_worth(tmp_path: Path) -> None:
    """How far and how often: an owner gets what they allow, an operator's keep is not theirs."""
    day = keep("proc-ana", 0.0, 86400.0)
    keeps = (
        keep("proc-ana", 100.0, 600.0),
        keep("proc-ana", 200.0, 3600.0, until=5400.0),
        keep("proc-ana", 300.0, 60.0, until=5460.0),
        keep("proc-ana", 400.0, 7200.0, role="operator", by="olga"),
        keep("proc-ben", 500.0, 600.0),
        keep("proc-ana", 600.0, 600.0, rule_id="gone"),
    )
    rules = rules_of(tmp_path)
    found = Promises(People("a ledger", keeps), rules).grants
    assert [(grant.seconds, grant.why) for grant in found] == [
        (600.0, ""),
        (900.0, "the rule idle allows 15m at a time"),
        (0.0, "the rule idle can be put off 2 times"),
        (7200.0, ""),
        (600.0, ""),
    ]
    # The second one followed on the first, and lost three quarters of an hour.
    assert [grant.until for grant in found[:3]] == [1300.0, 5400.0 - 2700.0, 300.0]
    strict = rules_of(tmp_path, KEEPABLE.replace(", owner_may: {keep: 15m, times: 2}", ""))
    (none,) = Promises(People("a ledger", (day,)), strict).grants
    assert (none.seconds, none.until) == (0.0, 0.0)
    assert none.why == "the rule idle cannot be put off by owners"


def test_a_keep_that_follows_on_one_that_was_cut_ends_as_much_earlier(tmp_path: Path) -> None:
    """What its owner was told was counted from the earlier one's end."""
    first = keep("proc-ana", 0.0, 3600.0)
    second = keep("proc-ana", 60.0, 600.0, until=first.until + 600.0)
    later = keep("proc-ben", 9e4, 600.0)
    grants = Promises(People("a ledger", (first, second, later)), rules_of(tmp_path)).grants
    assert [grant.until for grant in grants] == [1500.0, 2100.0, later.until]


def test_the_attempts_of_a_run_share_its_keeps(tmp_path: Path) -> None:
    """They protect the next attempt, and count for it; another run of the user has its own."""
    first = keep("proc-1", 0.0, 900.0, run_id="r")
    promises = Promises(
        People(
            "a ledger",
            (
                first,
                keep("proc-2", 2000.0, 900.0, run_id="r"),
                keep("proc-3", 3000.0, 900.0, run_id="r"),
                keep("proc-4", 3000.0, 900.0, run_id="other"),
                keep("proc-4", 3000.0, 900.0),
                keep("proc-5", 3000.0, 900.0),
            ),
        ),
        rules_of(tmp_path),
    )
    assert [bool(grant.seconds) for grant in promises.grants] == [True, True, False, *[True] * 3]
    pair = ("idle", "proc-9")
    assert promises.granted(pair, None, 1e9) == []
    assert [grant.keep.job_id for grant in promises.granted(pair, "r", 2500.0)] == [
        "proc-1",
        "proc-2",
    ]
    assert [grant.keep.job_id for grant in promises.granted(pair, "r", 1e9)] == ["proc-3"]
    assert promises.kept("proc-9", "r", first.until - 1).startswith("by 1 from idle until ")
    assert promises.kept("proc-9", None, first.until - 1) == ""
    assert promises.kept("proc-1", None, first.until) == ""


def test_each_keep_is_told_once_however_many_there_are(tmp_path: Path) -> None:
    """A script that keeps a job every minute, by its attempt and its run; the run is known late."""
    keeps = [
        keep(f"proc-{number % 2}", 60.0 * number, 600.0, run_id="r", role="operator")
        for number in range(2000)
    ]
    promises = Promises(People("a ledger", tuple(keeps)), rules_of(tmp_path))
    pair, told_at = ("idle", "proc-0"), []
    for minute in range(2000):
        run_id = "r" if minute >= 1000 else None
        told_at += [grant.keep for grant in promises.granted(pair, run_id, 60.0 * minute)]
    assert sorted(told_at, key=lambda item: item.granted_at) == keeps
    now = keeps[-1].granted_at
    # In force are those of the last twenty minutes.
    assert promises.held(pair, "kept", now) == [item.by for item in keeps if item.until > now]
    assert promises.held(pair, "deadline", now) == []


# -- over history


@pytest.mark.parametrize("stretch", [86400.0, 420.0])
def test_keeps_begin_end_and_are_refused_in_the_middle(tmp_path: Path, stretch: float) -> None:
    """Jobs that would all be ended after 27 minutes, whatever the cuts.

    Kept before history begins, in the middle, too late, by the earlier attempt of the run, from a
    rule that has another name now, and longer than the rule allows.
    """
    rules = rules_of(tmp_path)
    users = ("early", "middle", "late", "renamed", "longer", "nobody")
    jobs = idle(*users)
    jobs += idle("again", run={"saves_every": "10m", "id": "r"})
    test = made("90m", jobs, interval="15s")
    begin = test.start.timestamp()

    def at(minutes: float) -> float:
        return begin + minutes * MINUTE

    path = ledger_of(
        tmp_path,
        keep("proc-early", at(-20), 600.0, until=at(40)),
        keep("proc-middle", at(20.5), 600.0, until=at(37.5)),
        keep("proc-late", at(28), 600.0),
        keep("proc-renamed", at(20), 600.0, rule_id="idle-old", until=at(70)),
        keep("proc-longer", at(20.5), 7200.0),
        keep("proc-before", at(-50), 900.0, run_id="r", by="again", until=at(45)),
    )
    result = replays(test, rules, cool_down=0.0, stretch=stretch, people=replay_people.read(path))
    assert ends(result) == {
        "proc-nobody": 27.0,
        "proc-late": 27.0,
        "proc-renamed": 27.0,
        "proc-middle": 38.0,
        "proc-early": 40.0,
        "proc-longer": 43.0,
        "proc-again": 45.0,
    }
    report = told(result)
    put_off = {item["job"]: (item["put_off"], item["why_less"]) for item in report["keeps"]}
    assert put_off == {
        "proc-early": (["proc-early"], ""),
        "proc-middle": (["proc-middle"], ""),
        "proc-late": ([], ""),
        "proc-longer": (["proc-longer"], "the rule idle allows 15m at a time"),
        "proc-before": (["proc-again"], ""),
    }
    assert {item["job"]: item["kept_by"] for item in report["incidents"] if item["kept_by"]} == {
        "proc-early": ["early"],
        "proc-middle": ["middle"],
        "proc-longer": ["longer"],
        "proc-again": ["again"],
    }
    spited = {item["job"]: item["kept"] for item in report["terminations"] if item["kept"]}
    assert set(spited) == {"proc-renamed", "proc-longer"}
    assert spited["proc-renamed"] == "by renamed from idle-old until 2026-03-02T09:10:00Z"
    (outcome,) = outcomes(report, parse_policies("kept"))
    assert (outcome.exceeded, outcome.value) == (True, 2)
    assert any("idle-old (1)" in caution for caution in report["cautions"])
    assert json.loads(json.dumps(report)) == report
    text = markdown(blocks(report, []))
    assert "| longer (owner) |" in text
    assert "by renamed from idle-old" in text


def test_a_pause_holds_what_is_due_and_says_how_many(tmp_path: Path) -> None:
    """Deadlines go on meanwhile, so that all come at once when it is over, as far as limits let.

    A pause that a later one has replaced is over with it; one that ended by itself does not come
    back. Rules that would have been slower are not held by it.
    """
    rules = rules_of(tmp_path)
    slow = rules_of(tmp_path, KEEPABLE.replace("after: 20m", "after: 60m"))
    test = made("100m", idle("ana", "ben"), interval="15s")
    begin = test.start.timestamp()

    def deeds(pauses: Pauses, clock: OwnedClock) -> None:
        clock.pass_(begin - 3600)
        pauses.begin(by="root", role="admin", reason="long ago", seconds=600)
        clock.pass_(3600 + 10 * MINUTE)
        pauses.begin(by="root", role="admin", reason="an upgrade", seconds=None)
        clock.pass_(20 * MINUTE)
        pauses.begin(by="olga", role="admin", reason="a look", seconds=8 * MINUTE)
        clock.pass_(30 * MINUTE)
        pauses.begin(by="root", role="admin", reason="a slip", seconds=None)
        clock.pass_(10.0)
        pauses.end(by="root", role="admin", reason="a slip")

    people = replay_people.read(ledger_of(tmp_path, people=deeds))
    result = replays(test, rules, slow, cool_down=0.0, people=people)
    assert ends(result) == {"proc-ana": 38.0, "proc-ben": 38.0}
    assert ends(result, 1) == {"proc-ana": 67.0, "proc-ben": 67.0}
    report = told(result)
    assert [(item["by"], item["reason"], item["ends_held"]) for item in report["pauses"]] == [
        ("root", "an upgrade", 2),
        ("olga", "a look", 2),
        ("root", "a slip", 0),
    ]
    assert report["pauses"][0]["to"] == report["pauses"][1]["from"]
    assert not any(result.arms[1].promises.pauses.values())
    assert "| an upgrade | 2 |" in markdown(blocks(report, []))


# -- the file


def test_a_ledger_is_read_while_its_engine_runs_and_left_as_it_is(tmp_path: Path) -> None:
    """What is still in its log counts; nothing is locked, and no file is put beside it."""
    path = ledger_of(tmp_path, keep("proc-1", 10.0, 60.0))
    with Ledger(path) as ledger:
        Pauses(ledger, OwnedClock(20.0)).begin(by="r", role="admin", reason="x", seconds=None)
        found = replay_people.read(path)
        assert (len(found.keeps), [item.holds(21.0) for item in found.pauses]) == (1, [True])
        ledger.add_keep(keep("proc-2", 30.0, 60.0), None, time=30.0)
        assert len(replay_people.read(path).keeps) == 2
    copy = tmp_path / "away" / "copy.sqlite"
    copy.parent.mkdir()
    copy.write_bytes(path.read_bytes())
    before = copy.stat()
    assert len(replay_people.read(copy).keeps) == 2
    assert [item.name for item in copy.parent.iterdir()] == ["copy.sqlite"]
    assert (copy.stat().st_mtime_ns, copy.stat().st_size) == (before.st_mtime_ns, before.st_size)


def test_a_ledger_of_an_older_version_is_read_as_it_is(tmp_path: Path) -> None:
    """Before there were pauses; it is not migrated."""
    path = tmp_path / "old.sqlite"
    with sqlite3.connect(path) as db:
        for number, script in enumerate(MIGRATIONS[:2], start=1):
            db.executescript(f"{script};PRAGMA user_version={number};")
        db.execute(
            "INSERT INTO keeps (rule_id, job_id, role, by, reason, seconds, granted_at, until) "
            "VALUES ('idle', 'proc-1', 'owner', 'ana', 'why', 60, 10, 70)"
        )
    db.close()
    found = replay_people.read(path)
    assert ([item.job_id for item in found.keeps], found.pauses) == (["proc-1"], ())
    assert any("knew no pauses" in text for text in Promises(found).cautions(10.0, 20.0, ()))
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (2,)
    db.close()


def test_what_a_ledger_does_not_reach_is_told(tmp_path: Path) -> None:
    """A period before its first line, or behind its last one; one that holds nothing at all."""
    (early, late) = Promises(People("f", since=100.0, newest=200.0)).cautions(50.0, 9000.0, ())
    assert early.startswith("f begins at 1970-01-01T00:01:40Z")
    assert late.startswith("the newest line of f is of 1970-01-01T00:03:20Z")
    assert Promises(People("f", since=100.0, newest=200.0)).cautions(100.0, 300.0, ()) == []
    empty = replay_people.read(ledger_of(tmp_path))
    (nothing,) = Promises(empty).cautions(50.0, 9000.0, ())
    assert "holds nothing" in nothing
    assert Promises().cautions(0.0, 9000.0, ()) == []


def test_the_ledger_of_another_cluster_is_doubted(tmp_path: Path) -> None:
    """Its keeps are of jobs that nobody has seen here; a case too few proves nothing."""
    keeps = (keep("proc-1", 100.0, 60.0), keep("proc-2", 100.0, 60.0), keep("proc-2", 150.0, 60.0))
    promises = Promises(People("f", keeps, since=0.0, newest=9000.0), rules_of(tmp_path))
    (doubt,) = promises.cautions(50.0, 9000.0, {"proc-9"})
    assert doubt.startswith("of the 2 jobs that somebody kept then none was seen here: is f the")
    assert promises.cautions(50.0, 9000.0, {"proc-9", "proc-2"}) == []
    assert promises.cautions(5000.0, 9000.0, {"proc-9"}) == []


def _foreign(path: Path, version: int) -> None:
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE cookies (name TEXT)")
        db.execute(f"PRAGMA user_version={version}")
    db.close()


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda path: path.unlink(missing_ok=True), "does not exist|is not a file"),
        (lambda path: path.write_text("version: 1\n" * 99), "file is not a database"),
        (lambda path: path.write_bytes(b""), "is no ledger that this gpuwarden knows"),
        (lambda path: _foreign(path, 0), "is no ledger that this gpuwarden knows"),
        (lambda path: _foreign(path, 5), "no such table: keeps"),
        (lambda path: _foreign(path, 999), "version 999; it knows 1 to"),
    ],
)
def test_a_file_that_is_no_ledger_ends_the_command_before_anything_is_asked(
    tmp_path: Path, make: Callable[[Path], None], why: str
) -> None:
    """Exit status 2, with the file's name."""
    (tmp_path / "rules.yaml").write_text(KEEPABLE)
    path = tmp_path / "engine.sqlite"
    make(path)
    words = ["replay", str(tmp_path / "rules.yaml"), "--ledger", str(path)]
    result = CliRunner().invoke(rules_command, [*words, "--prometheus", "http://127.0.0.1:1"])
    assert isinstance(result.exception, InvalidInput), result.exception
    assert "engine.sqlite" in str(result.exception)
    with pytest.raises(InvalidInput, match=why):
        replay_people.read(path)


def test_a_damaged_ledger_says_so(tmp_path: Path) -> None:
    """And is not taken for one in which nobody kept anything."""
    path = ledger_of(tmp_path, *(keep(f"proc-{n}", float(n), 60.0) for n in range(2000)))
    data = bytearray(path.read_bytes())
    data[len(data) // 3 : 2 * len(data) // 3] = b"\xa5" * (2 * len(data) // 3 - len(data) // 3)
    path.write_bytes(data)
    with pytest.raises(InvalidInput, match=r"--ledger: .*ledger\.sqlite is damaged"):
        replay_people.read(path)


def test_a_made_up_week_has_no_ledger(tmp_path: Path) -> None:
    """Its people are made up, too."""
    (tmp_path / "rules.yaml").write_text(KEEPABLE)
    words = ["replay", str(tmp_path / "rules.yaml"), "--made-up-week", "--ledger", "x"]
    result = CliRunner().invoke(rules_command, words)
    assert "leave --ledger out" in str(result.exception)
