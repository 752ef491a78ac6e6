"""Limits of single files beside those over all, and what a team's file cannot do."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
from tests.ruleengine.engines import TICK, World, running
from tests.ruleengine.fleets import a_job, a_profile, a_run
from tests.ruleengine.test_guards import LIMITS, NOW, facts, situation
from tests.ruleengine.test_invariants import due, more_jobs
from tests.ruleengine.worlds import Job

from gpuwarden.diagnostics import Severity
from gpuwarden.ruleengine import guards
from gpuwarden.ruleengine.guards import PastEnd
from gpuwarden.ruleengine.loading import check_rule_files, load_rule_files, rule_set_hash
from gpuwarden.ruleengine.model import LimitGroup, TerminateLimits
from gpuwarden.ruleengine.profiles import expectation
from gpuwarden.ruleengine.rule_differences import differences
from gpuwarden.ruleengine.rule_explanations import explain_rule, explanation_lines

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Write = Callable[..., list[Path]]


def _limits(**changes: object) -> str:
    given: dict[str, object] = {
        "per_tick": 5,
        "per_hour": 10,
        "per_user_per_day": 9,
        "halt_above_share_of_running": "50%",
    }
    inner = ", ".join(f"{name}: {value}" for name, value in (given | changes).items())
    return "{terminate: {" + inner + "}}\n"


def _rule(rule_id: str, **fields: str) -> str:
    extra = "".join(f"  {name}: {value}\n" for name, value in fields.items())
    return (
        f"- id: {rule_id}\n  mode: enforce\n  target: job\n  match: {{}}\n  cold_start: 60s\n"
        "  ignore_phases: {}\n  for: 1m\n"
        "  when: {silent_for: 5m, signals: [cpu]}\n"
        "  stages:\n  - {level: light, after: 0s, do: notify}\n"
        "  - {level: severe, after: 10m, do: terminate, notice_delivered_for: 5m, grace: 60s,\n"
        "     max_work_lost: 1h}\n" + extra
    )


def _file(*rules: str, **keys: str) -> str:
    heads = "".join(f"{name}: {text.strip()}\n" for name, text in keys.items())
    return f"version: 1\n{heads}" + ("rules:\n" + "".join(rules) if rules else "")


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write rule files a.yaml, b.yaml, ... and give their paths."""

    def files(*texts: str) -> list[Path]:
        found = []
        for name, text in zip("abcdef", texts, strict=False):
            path = tmp_path / f"{name}.yaml"
            path.write_text(text)
            found.append(path)
        return found

    return files


def _codes(paths: list[Path]) -> list[str]:
    checked = check_rule_files(paths, now=NOW)
    return [item.code for item in checked.diagnostics if item.severity is Severity.ERROR]


# -- merging


def test_a_files_limits_are_those_of_its_rules_and_the_overall_ones_of_all(write: Write) -> None:
    """A file that is wider than what holds over all adds nothing."""
    rules = load_rule_files(
        write(
            _file(overall_limits=_limits()),
            _file(_rule("narrow"), _rule("narrow-too"), limits=_limits(per_hour=2)),
            _file(_rule("wide"), limits=_limits(per_hour=99)),
            _file(_rule("none")),
        )
    )
    assert rules.limits is not None
    assert rules.limits.terminate.per_hour == 10
    (group,) = rules.groups
    assert (group.name, group.rules) == ("b.yaml", {"narrow", "narrow-too"})
    assert group.limits.per_hour == 2
    assert rules.limits_of("narrow") is group
    assert rules.limits_of("wide") is None


def test_of_several_overall_limits_the_strictest_count(write: Write) -> None:
    """In each number; a second file cannot widen what the first allows."""
    rules = load_rule_files(
        write(
            _file(overall_limits=_limits(per_tick=0)),
            _file(_rule("x"), overall_limits=_limits(per_hour=1), limits=_limits(per_hour=50)),
        )
    )
    assert rules.limits is not None
    assert (rules.limits.terminate.per_tick, rules.limits.terminate.per_hour) == (0, 1)


def test_without_overall_limits_the_strictest_file_limits_all(write: Write) -> None:
    """Nobody is without limits because another file came to be."""
    rules = load_rule_files(
        write(
            _file(_rule("a"), limits=_limits(per_hour=2)),
            _file(_rule("b"), limits=_limits(per_tick=1)),
        )
    )
    assert rules.limits is not None
    assert (rules.limits.terminate.per_tick, rules.limits.terminate.per_hour) == (1, 2)
    assert rules.groups == ()


def test_overall_limits_are_enough_for_a_rule_that_enforces(write: Write) -> None:
    """And no limits at all are not."""
    assert _codes(write(_file(_rule("x")))) == ["GW218"]
    assert _codes(write(_file(_rule("x")), _file(overall_limits=_limits()))) == []


def test_the_hash_and_the_differences_know_a_files_limits(write: Write) -> None:
    """A change of them is a change of what may be ended."""
    texts = [_file(_rule("x"), limits=_limits(per_hour=hour)) for hour in (2, 3, 99)]
    sets = [load_rule_files(write(_file(overall_limits=_limits()), text)) for text in texts]
    assert len({rule_set_hash(each) for each in sets}) == 3
    (difference,) = differences(sets[0], sets[1])
    (change,) = difference.changes
    assert (difference.rule, change.part, change.effect) == (
        "x",
        "limits of its file.per_hour",
        "stricter",
    )
    (difference,) = differences(sets[1], sets[2])
    assert [(c.effect, c.old, c.new) for c in difference.changes] == [("stricter", "given", "none")]
    assert differences(sets[0], sets[0]) == []


def test_an_explanation_tells_of_both(write: Write) -> None:
    """Of the file's limits and of those over all."""
    rules = load_rule_files(
        write(_file(overall_limits=_limits()), _file(_rule("x"), limits=_limits(per_hour=2)))
    )
    lines = list(explanation_lines(explain_rule(rules.rules[0], rules, scrape_interval=5)))
    text = " ".join(line.strip() for line in lines)
    assert "The rules of b.yaml together end at most 5 jobs in a tick, 2 in an hour" in text
    assert "All rules together end at most 5 jobs in a tick, 10 in an hour" in text


# -- guards

OWN = LimitGroup(
    "own.yaml",
    frozenset({"own", "own-too"}),
    TerminateLimits(per_tick=1, per_hour=2, per_user_per_day=1, halt_above_share_of_running="5%"),
)
WIDE = TerminateLimits(
    per_tick=99, per_hour=99, per_user_per_day=99, halt_above_share_of_running="100%"
)


def _blocks(rule_id: str, **changes: Any) -> list[str]:
    found = situation(limits=WIDE, groups=(OWN,), cool_down=0.0, **changes)
    return [block.reason for block in guards.limit_blocks(found, "alice", rule_id)]


@pytest.mark.parametrize(
    ("changes", "reasons"),
    [
        ({}, []),
        ({"ended_this_tick": 1, "ended_rules": ["own-too"]}, ["limit_per_tick"]),
        ({"ended_this_tick": 3, "ended_rules": ["other"] * 3}, []),
        ({"ends": [PastEnd(NOW - 3599, "b", "own")] * 2}, ["limit_per_hour"]),
        ({"ends": [PastEnd(NOW - 3601, "b", "own")] * 2}, []),
        ({"ends": [PastEnd(NOW - 10, "b", "other")] * 9}, []),
        ({"ends": [PastEnd(NOW - 80000, "alice", "own-too")]}, ["limit_per_user_per_day"]),
        ({"ends": [PastEnd(NOW - 80000, "alice", "other")]}, []),
        (
            {"facts": facts(20), "due_rules": {"own": {"u:1"}, "own-too": {"u:2"}}},
            ["share_of_running"],
        ),
        ({"facts": facts(20), "due_rules": {"own": {"u:1"}, "own-too": {"u:1"}}}, []),
        ({"facts": facts(20), "due_rules": {"other": {"u:1", "u:2", "u:3"}}}, []),
    ],
)
def test_a_files_limits_count_its_own_rules_and_bind_no_others(
    changes: dict[str, Any], reasons: list[str]
) -> None:
    """Each number by itself; and a rule of another file is never held back by them."""
    assert _blocks("own", **changes) == reasons
    assert _blocks("other", **changes) == []


def test_zero_in_a_file_is_none_for_its_rules() -> None:
    """Never unlimited."""
    none = dataclasses.replace(OWN, limits=LIMITS.model_copy(update={"per_hour": 0}))
    found = situation(limits=WIDE, groups=(none,))
    assert "limit_per_hour" in {b.reason for b in guards.limit_blocks(found, "alice", "own")}
    assert guards.limit_blocks(found, "alice", "other") == []


def test_the_limits_of_a_file_survive_a_restart(servers: World) -> None:
    """What an earlier life ended by the file's rules counts; the other file's rules go on."""
    more_jobs(servers, "bob")
    path = servers.folder / "rules.yaml"
    own = path.read_text().replace("per_hour: 3", "per_hour: 1")
    path.write_text(own + "overall_limits: " + _limits(per_tick=9))

    async def story() -> None:
        async with due(servers) as world:
            await world.tick()
            await world.settled()
            (first,) = world.agent.ended
            world.fleet.jobs = [job for job in world.fleet.jobs if job.job_id != first]
        (second,) = (job.job_id for job in servers.fleet.jobs)
        async with running(servers) as world:
            await world.tick(10)
            assert world.why(second) == {"limit_per_hour"}
            await world.tick(1, 3600 - 11 * TICK)
            await world.tick(4)
            assert world.agent.ended == [first, second]

    asyncio.run(story())


def test_whose_job_was_ended_is_known_though_a_label_was_missing(servers: World) -> None:
    """Else the owner's limits would forget it, and he would not hear of the end."""

    async def story() -> None:
        async with due(servers) as world:
            world.fleet.jobs[0].user = ""
            await world.tick()
            await world.settled()
            (end,) = world.engine.ledger.ends_since(0.0)
            assert end.user == "alice"

    asyncio.run(story())


def test_what_a_file_takes_for_a_fault_of_the_data_is_paged(servers: World) -> None:
    """Its rules end nobody, those of others go on; that, too, is for a person to look at."""
    idle = {"activity": {"cpu": 1_799_990_000.0}}
    names = [f"user{number}" for number in range(20)]
    servers.fleet.jobs = [
        Job(f"proc-{name}", name, f"GPU-{name}", utilization=0.9 if at > 2 else 0.0, **idle)
        for at, name in enumerate(names)
    ]
    users = "".join(f"  {name}: {{slack: U0{name.upper()}}}\n" for name in names)
    (servers.folder / "directory.yaml").write_text(f"version: 1\nusers:\n{users}")
    with (servers.folder / "rules.yaml").open("a") as rules:
        rules.write("overall_limits: " + _limits())

    async def story() -> None:
        async with running(servers) as world:
            await world.tick(60)
            assert world.agent.requests == []
            assert world.why("proc-user0") == {"share_of_running"}
            assert world.engine.view.halted == ()
            alerts = {
                each["labels"]["alertname"]: each for each in world.alerts.received[-1].json()
            }
            page = alerts["GpuwardenEnforcementHalted"]["annotations"]
            assert page["summary"] == "gpuwarden ends no job by the rules of a file"
            assert "due at once for the rules of rules.yaml among 20 running" in page["description"]

    asyncio.run(story())


# -- teams


@pytest.mark.parametrize(
    ("text", "codes"),
    [
        (_file(_rule("own"), team="vision"), []),
        (_file(_rule("own"), team="vision", limits=_limits(per_hour=999)), []),
        (_file(_rule("own"), team="vision", overall_limits=_limits(per_hour=999)), ["GW223"]),
        (_file(_rule("own"), team="vision", timezone="Asia/Shanghai"), ["GW223"]),
        (_file(_rule("own", team="speech"), team="vision"), ["GW223"]),
        (_file(_rule("operators-own"), team="vision"), ["GW219"]),
        (
            _file(
                "- id: hot\n  target: gpu\n  cold_start: 0s\n  for: 1m\n"
                "  when: {signal: card_temperature, agg: min, window: 1m, above: 88C}\n"
                "  stages: [{level: light, after: 0s, do: log}]\n",
                team="vision",
            ),
            ["GW223"],
        ),
        (
            _file(_rule("own"), team="vision")
            + "whitelist:\n- {match: {user: eve}, rules: [operators-own], reason: r, "
            "approved_by: eve, expires: 2099-01-01T00:00:00Z}\n",
            ["GW223"],
        ),
    ],
)
def test_a_teams_file_touches_nothing_of_anybody_else(
    write: Write, text: str, codes: list[str]
) -> None:
    """Neither limits, zone, cards, ids nor protections."""
    operators = _file(_rule("operators-own"), overall_limits=_limits(per_hour=3))
    paths = write(operators, text)
    assert _codes(paths) == codes
    if not codes:
        rules = load_rule_files(paths)
        assert rules.limits is not None
        assert rules.limits.terminate.per_hour == 3
        assert [rule.team for rule in rules.rules] == ["", "vision"]


def test_conflicts_name_both_files(write: Write) -> None:
    """Who must talk to whom is said."""
    profile = "profiles:\n- {model: m, batch: 1, imgsz: 640, hardware: h, gpu_memory: 1GiB}\n"
    paths = write(
        _file(_rule("x"), limits=_limits(), timezone="UTC") + profile,
        _file(_rule("x"), timezone="Asia/Tokyo") + profile,
    )
    found = {item.code: item.message for item in check_rule_files(paths, now=NOW).diagnostics}
    assert all(str(path) in found["GW222"] for path in paths)
    assert str(paths[0]) in found["GW219"]
    assert str(paths[0]) in found["GW221"]


def test_a_teams_profile_serves_its_own_rules_only(write: Write) -> None:
    """A team that writes down low expectations does not escape the operators' rules by them."""
    job = a_job({}, run=a_run())
    general, own = (
        a_profile(),
        a_profile(throughput="1 img/s").model_copy(update={"team": "vision"}),
    )
    for team, profile in (("", general), ("speech", general), ("vision", own)):
        found = expectation(job, [own, general], team=team).values["throughput"]
        assert found.value == profile.throughput
    text = "profiles:\n- {model: m, batch: 1, imgsz: 640, hardware: h, gpu_memory: 1GiB}\n"
    rules = load_rule_files(write(_file() + text, _file(team="vision") + text))
    assert [profile.team for profile in rules.profiles] == ["", "vision"]
