"""What a replay tells, what fails a pipeline, and what the command refuses. Without a server."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner
from tests.ruleengine.rehearsing import RULES
from tests.ruleengine.replaying import switched_on

from gpuwarden.errors import InvalidInput, ServiceUnavailable
from gpuwarden.ruleengine.dry_runs import DryRun
from gpuwarden.ruleengine.loading import load_rule_files
from gpuwarden.ruleengine.replay_arms import Arm
from gpuwarden.ruleengine.replay_columns import Cost
from gpuwarden.ruleengine.replay_grids import variants
from gpuwarden.ruleengine.replay_incidents import End, Entered, Incident, Stale
from gpuwarden.ruleengine.replay_policies import outcomes, parse_policies
from gpuwarden.ruleengine.replay_reports import document
from gpuwarden.ruleengine.replay_runs import Plan, Replay
from gpuwarden.ruleengine.replay_texts import blocks, markdown
from gpuwarden.ruleengine.rule_cli import rules as rules_command

if TYPE_CHECKING:
    from pathlib import Path

    from gpuwarden.ruleengine.model import RuleSet

BEGIN = 1_772_438_400.0
HOUR = 3600.0


@pytest.fixture
def rule_set(tmp_path: Path) -> RuleSet:
    """Three rules, switched on."""
    path = tmp_path / "rules.yaml"
    path.write_text(RULES)
    return switched_on(load_rule_files([path]))


def _incident(subject: str, detected: float, **more: Any) -> Incident:
    given = {"rule": "idle", "user": "ana", "team": "vision", "gpus": 2, "instances": ("n1:9835",)}
    at = BEGIN + detected
    return Incident(subject=subject, begun=at - 300, detected=at, **{**given, **more})


def _arm(rules: RuleSet, *incidents: Incident) -> Arm:
    return Arm("replayed", DryRun(rules, 5.0), incidents=list(incidents))


def _report(*arms: Arm, **more: Any) -> dict[str, Any]:
    plan = Plan("http://127.0.0.1:9090", BEGIN, BEGIN + 7 * 86400)
    return document(Replay(plan, list(arms), Cost(), jobs=3), **more)


def _ended(**more: Any) -> End:
    given = {"at": BEGIN + 3 * HOUR, "gpus": 2, "work_lost": 1800.0}
    return End(**{**given, "seen_until": BEGIN + 30 * HOUR, **more})


def test_hours_regret_and_reaction_are_counted(rule_set: RuleSet) -> None:
    """Freed up to the real end, or at least to what is known; regret by who was at work again."""
    arm = _arm(
        rule_set,
        _incident("proc-1", HOUR, idle_since=BEGIN, end=_ended(over=BEGIN + 8 * HOUR)),
        _incident("proc-2", 2 * HOUR, idle_since=BEGIN + HOUR, end=_ended(gpus=1)),
        _incident("proc-3", HOUR, end=_ended(active_again=BEGIN + 4 * HOUR, active_by="steps")),
    )
    report = _report(arm)
    assert report["totals"] | {"verdicts": 0} == {
        "verdicts": 0,
        "unknown": 0,
        "coverage": None,
        "incidents": 3,
        "flapping": 0,
        "terminations": 3,
        "requests": {"checkpoint": 0, "yield": 0},
        "gpu_hours_freed": 2 * 5 + 27 + 2 * 27,
        "gpu_hours_lost": 2.5,
        "regretted": 1,
        "regret_rate": round(1 / 3, 6),
    }
    assert [row["at_least"] for row in report["terminations"]] == [False, True, True]
    idle = next(row for row in report["rules"] if row["rule"] == "idle")
    assert idle["seconds_from_idle"] == {
        "detected": {"median": HOUR, "most": HOUR},
        "ended": {"median": 2.5 * HOUR, "most": 3 * HOUR},
    }


def test_what_comes_back_within_an_hour_flaps_and_notices_are_per_week(rule_set: RuleSet) -> None:
    """Of one rule and job; a notice that the mode only records counts as well."""
    told = [Entered("moderate-notify", "moderate", "notify", BEGIN)]
    would = [Entered("moderate-notify", "moderate", "would_notify", BEGIN)]
    arm = _arm(
        rule_set,
        _incident("proc-1", HOUR, closed=BEGIN + 2 * HOUR, stages=told),
        _incident("proc-1", 2.5 * HOUR, closed=BEGIN + 3 * HOUR, stages=would),
        _incident("proc-1", 9 * HOUR),
        _incident("proc-2", 9.1 * HOUR, user="ben"),
    )
    report = _report(arm)
    assert report["totals"]["flapping"] == 1
    assert report["notices"] == [{"owner": "ana", "notices": 2, "per_week": 2.0}]


def test_two_rule_sets_differ_by_incidents_and_by_ends(rule_set: RuleSet) -> None:
    """New, gone, earlier, later; an end is the job's, whichever rule came to it."""
    new = _arm(
        rule_set,
        _incident("proc-new", HOUR, end=_ended()),
        _incident("proc-same", HOUR, closed=BEGIN + 2 * HOUR),
        _incident("proc-early", HOUR, closed=BEGIN + 3 * HOUR, end=_ended(at=0.0)),
        _incident("proc-late", 3 * HOUR),
    )
    old = _arm(
        rule_set,
        _incident("proc-same", HOUR, closed=BEGIN + 2 * HOUR),
        _incident("proc-early", 2 * HOUR, rule="many", end=_ended()),
        _incident("proc-late", HOUR),
        _incident("proc-gone", HOUR, end=_ended()),
    )
    found = _report(new, old, against=True)["difference"]
    jobs = {
        (kind, word): [row["job"] for row in rows]
        for kind, words in found.items()
        for word, rows in words.items()
        if rows
    }
    assert jobs == {
        ("incidents", "new"): ["proc-new", "proc-early"],
        ("incidents", "gone"): ["proc-early", "proc-gone"],
        ("incidents", "later"): ["proc-late"],
        ("terminations", "new"): ["proc-new"],
        ("terminations", "gone"): ["proc-gone"],
        ("terminations", "earlier"): ["proc-early"],
    }
    assert found["incidents"]["later"][0]["seconds"] == 2 * HOUR


def test_policies_are_exceeded_only_beyond_their_limit(rule_set: RuleSet) -> None:
    """Each is named with what was found."""
    arm = _arm(
        rule_set,
        _incident("proc-1", HOUR, end=_ended(active_again=BEGIN, exempt="demo")),
        _incident("proc-2", HOUR, end=_ended()),
    )
    arm.counts["idle"].judged, arm.counts["idle"].unknown = 100, 5
    arm.caps = [("limit_per_tick", BEGIN, 2), ("limit_per_hour", BEGIN, 1)]
    arm.stale = [Stale("idle", "proc-3", BEGIN), Stale("idle", "proc-1", BEGIN + 9 * HOUR)]
    arm.ended = {"proc-1": BEGIN + 3 * HOUR}
    report = _report(arm)

    def exceeded(text: str) -> list[str]:
        found = outcomes(report, parse_policies(text))
        return [item.sentence for item in found if item.exceeded]

    assert exceeded("regret>50%, unknown>5%, terminations>2, stale>1, flapping>0") == []
    assert exceeded("regret>49.5%,unknown>4%,terminations>1,stale>0,new-terminations>1") == [
        "regret>49.5%: exceeded: 1 of 2 ended jobs",
        "unknown>4%: exceeded: 5.0% of 100 verdicts",
        "terminations>1: exceeded: 2 jobs",
        "stale>0: exceeded: proc-3",
        "new-terminations>1: exceeded: proc-1, proc-2",
    ]
    assert exceeded("exempt,caps") == [
        "exempt: exceeded: proc-1",
        "caps: exceeded: limit_per_hour",
    ]
    arm.caps = arm.caps[:1]
    assert [item.exceeded for item in outcomes(_report(arm), parse_policies("caps"))] == [False]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("regrets>5%", "is no policy: there are regret>5%"),
        ("regret", "needs a limit: write regret>5%"),
        ("regret>5", "in per cent"),
        ("terminations>5%", "as a number"),
        ("caps>1", "takes no limit"),
        ("regret<5%", "is no policy"),
    ],
)
def test_a_policy_that_is_not_understood_is_refused(text: str, why: str) -> None:
    """A typing mistake must not let everything pass."""
    with pytest.raises(ValueError, match=why):
        parse_policies(text)


def test_a_grid_changes_one_signal_and_nothing_else(rule_set: RuleSet) -> None:
    """Each combination is a rule set with the one rule, its limits and whitelist kept."""
    grid = variants(rule_set, "idle:gpu_utilization=3%,10%@1m,3 samples")
    assert [name for name, _ in grid] == [
        "idle: gpu_utilization 3% over 1m",
        "idle: gpu_utilization 10% over 1m",
        "idle: gpu_utilization 3% over 3 samples",
        "idle: gpu_utilization 10% over 3 samples",
    ]
    old = rule_set.rules[0].model_dump()
    for _, found in grid:
        assert (found.limits, found.whitelist) == (rule_set.limits, rule_set.whitelist)
        (rule,) = found.rules
        new = rule.model_dump()
        assert {name for name in new if new[name] != old[name]} == {"when"}
        assert new["when"]["all"][1:] == old["when"]["all"][1:]
    assert len({str(found.rules[0].when) for _, found in grid}) == 4


GRADED = """
version: 1
rules:
- id: hog
  target: job
  match: {}
  cold_start: 1m
  when: {signal: gpu_memory_share, agg: min, window: 5m, above: 70%, gpus: all}
  for: 5m
  stages:
  - {level: light, after: 0s, do: log}
  - level: moderate
    after: 5m
    do: notify
    when:
      all:
      - {signal: gpu_memory_share, agg: min, window: 5m, above: 80%, gpus: all}
      - {signal: gpu_utilization, agg: max, window: 5m, below: 50%, gpus: all}
"""


@pytest.fixture
def graded(tmp_path: Path) -> RuleSet:
    """A rule with a stage that asks for more."""
    path = tmp_path / "graded.yaml"
    path.write_text(GRADED)
    return switched_on(load_rule_files([path]))


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("hog:gpu_memory_share=60%,75%", "when"),
        ("hog/moderate-notify:gpu_memory_share=82%,85%", "stages"),
        ("hog/moderate-notify:gpu_utilization=20%,30%@5m", "stages"),
    ],
)
def test_a_grid_changes_the_rule_or_one_of_its_stages(
    graded: RuleSet, text: str, changed: str
) -> None:
    """Each combination is another rule, and differs in nothing but that."""
    old, found = (
        graded.rules[0].model_dump(),
        [rules.rules[0] for _, rules in variants(graded, text)],
    )
    assert len({str(rule) for rule in found} - {str(graded.rules[0])}) == len(found) == 2
    for rule in found:
        new = rule.model_dump()
        assert {name for name in new if new[name] != old[name]} == {changed}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("hog:gpu_utilization=5%", "write hog/moderate-notify:gpu_utilization="),
        ("hog/light-log:gpu_memory_share=5%", "in stage light-log: write hog:gpu_memory_share"),
        ("hog:card_power=3W", "it compares gpu_memory_share, gpu_utilization"),
    ],
)
def test_a_grid_of_what_is_compared_elsewhere_says_where(
    graded: RuleSet, text: str, why: str
) -> None:
    """A grid that changed nothing would look as if nothing hung on the limit."""
    with pytest.raises(InvalidInput, match=why):
        variants(graded, text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("idle", "is no grid"),
        ("idel:gpu_utilization=3%", "there is no rule"),
        ("idle:card_power=3W", "does not compare card_power: it compares gpu_utilization"),
        ("idle:gpu_utilization=3W", "is in ratio: write limits like"),
        ("idle:gpu_utilization=many", "--sensitivity: "),
        ("idle:gpu_utilization=3%@5", "lacks a unit"),
        (f"idle:gpu_utilization={','.join(['3%'] * 40)}", "at most 36"),
    ],
)
def test_a_grid_that_makes_no_sense_is_refused(rule_set: RuleSet, text: str, why: str) -> None:
    """With how to write it."""
    with pytest.raises(InvalidInput, match=why):
        variants(rule_set, text)


@pytest.mark.parametrize(("seen", "warned"), [(None, 0), (5.0, 0), (6.5, 0), (15.0, 1), (1.0, 1)])
def test_nodes_that_were_scraped_at_another_pace_are_told(
    rule_set: RuleSet, seen: float | None, warned: int
) -> None:
    """Else a replay that knows nothing passes for one that found nothing."""
    plan = Plan("http://127.0.0.1:9090", BEGIN, BEGIN + HOUR, scrape_interval=5.0)
    result = Replay(plan, [_arm(rule_set)], Cost(), seen_interval=seen)
    lines = markdown(blocks(document(result), [])).splitlines()
    told = [line for line in lines if "--scrape-interval" in line]
    assert len(told) == warned
    assert all(f"every {seen:g} s" in line for line in told)


def test_rules_that_history_cannot_judge_are_told(tmp_path: Path) -> None:
    """A team of which nobody is known, and Slurm's queue: no end there means nothing."""
    path = tmp_path / "rules.yaml"
    waits = "  only_if_waiting: {slurm: {}, above: 0}\n  match:"
    text = RULES[: RULES.index("- id: hot")].replace("  match:", waits, 1)
    path.write_text(f"team: vision\n{text}")
    rules = switched_on(load_rule_files([path]))
    plan = Plan("http://127.0.0.1:9090", BEGIN, BEGIN + HOUR)
    first, second = document(Replay(plan, [_arm(rules)], Cost()))["cautions"]
    assert "of team vision" in first
    assert second.startswith("idle: history does not tell who waited")
    known = dataclasses.replace(plan, teams={"ana": "vision"})
    assert document(Replay(known, [_arm(rules)], Cost()))["cautions"] == [second]


def test_a_period_that_is_shorter_than_a_rule_is_told(rule_set: RuleSet) -> None:
    """No end was to be seen in it: that nobody is ended there proves nothing."""
    whole = 25 * 60.0

    def cautions(seconds: float) -> list[str]:
        plan = Plan("http://127.0.0.1:9090", BEGIN, BEGIN + seconds)
        found: list[str] = document(Replay(plan, [_arm(rule_set)], Cost()))["cautions"]
        return found

    assert cautions(whole) == []
    assert cautions(whole - 15) == [
        "idle: takes a job's cards after 25m at the earliest, and 24m45s are replayed"
    ]
    assert [text.split(":")[0] for text in cautions(0.0)] == ["idle", "hot", "many"]
    assert "hot: counts as broken after 2m at the earliest" in cautions(0.0)[1]


def test_a_job_cannot_break_out_of_its_cell(rule_set: RuleSet) -> None:
    """Its name and owner are text, in Markdown as well."""
    evil = "proc-1 | [x](http://evil) `<b>`"
    report = _report(_arm(rule_set, _incident(evil, HOUR, user="a\nb|c")))
    lines = markdown(blocks(report, [])).splitlines()
    (row,) = [line for line in lines if "proc-1" in line]
    assert "proc-1 \\| \\[x\\](http://evil) \\`\\<b\\>\\`" in row
    assert "a b\\|c" in row
    header = next(line for line in lines if line.startswith("| detected"))
    assert row.replace("\\|", "").count("|") == header.count("|")
    assert json.loads(json.dumps(report))["incidents"][0]["job"] == evil


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--from", "yesterday"], "is no moment"),
        (["--step", "15"], "lacks a unit"),
        (["--step", "0s"], "more than 0s"),
        (["--fail-on", "regret>5"], "in per cent"),
        (["--fail-on", "kept"], "give --ledger"),
        (["--rule", "idel"], 'there is no rule "idel"'),
        (["--prometheus", "prom.example:9090"], "write it like http://"),
        (["--against", "src"], "holds no *.yaml"),
        (["--from", "2999-01-01"], "is in the future"),
        (["--from", "1970-01-02"], "ticks are too many"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_flags_that_make_no_sense_end_the_command(
    tmp_path: Path, words: list[str], why: str
) -> None:
    """Exit status 2, before anything is asked."""
    path = tmp_path / "rules.yaml"
    path.write_text(RULES)
    result = CliRunner().invoke(rules_command, ["replay", str(path), *words])
    said = result.output + str(result.exception)
    assert why in said
    assert getattr(result.exception, "exit_code", result.exit_code) == 2


def test_rules_that_are_wrong_and_servers_that_are_away_have_their_status(tmp_path: Path) -> None:
    """2 with the findings; 3 with the server's name."""
    path = tmp_path / "rules.yaml"
    path.write_text(RULES.replace("cold_start: 5m", "cold_start: 5"))
    result = CliRunner().invoke(rules_command, ["replay", str(path)])
    assert (result.exit_code, "GW107" in result.output) == (2, True)
    path.write_text(RULES)
    words = ["replay", str(path), "--prometheus", "http://127.0.0.1:1"]
    result = CliRunner().invoke(rules_command, words)
    assert isinstance(result.exception, ServiceUnavailable)
    assert result.exception.exit_code == 3
    words = ["replay", str(path), "--from", "now", "--to", "now-1h"]
    result = CliRunner().invoke(rules_command, words)
    assert isinstance(result.exception, InvalidInput)


def test_of_shards_a_server_that_sees_all_is_asked_for(tmp_path: Path) -> None:
    """And no half of the fleet is taken for the whole."""
    (tmp_path / "rules.yaml").write_text(RULES)
    (tmp_path / "engine.yaml").write_text(
        "version: 1\nprometheus: {shards: ['http://127.0.0.1:1', 'http://127.0.0.1:2']}\n"
        "rules: [rules.yaml]\nexpected_nodes: 2\n"
    )
    words = ["replay", str(tmp_path / "rules.yaml"), "--config", str(tmp_path / "engine.yaml")]
    result = CliRunner().invoke(rules_command, words)
    assert "that sees all of them" in str(result.exception)
