"""`rules attack`: which tricks escape which rules, and that the command can tell."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gpuwarden.hours import within
from gpuwarden.ruleengine.attack_offenders import OFFENDERS, disguised, example, moment_for
from gpuwarden.ruleengine.attack_reports import report_lines, tricks_markdown
from gpuwarden.ruleengine.attack_runs import Outcome, attack
from gpuwarden.ruleengine.attack_tricks import TRICKS, plays, rests_on_word
from gpuwarden.ruleengine.attacks import Target
from gpuwarden.ruleengine.loading import check_rule_files
from gpuwarden.ruleengine.model import Rule
from gpuwarden.ruleengine.rule_cli import rules as command

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "attacks.md"
DEFAULTS = ROOT / "ruleengine" / "rules" / "defaults.yaml"
SOUND = """\
version: 1
limits:
  terminate: {per_tick: 1, per_hour: 6, per_user_per_day: 3, halt_above_share_of_running: 10%}
whitelist:
- {match: {executable: /usr/bin/tensorboard}, rules: [idle], reason: service, approved_by: ops,
   expires: 2030-01-01T00:00:00Z}
rules:
- id: idle
  mode: enforce
  target: job
  match: {}
  cold_start: 1m
  ignore_phases: {validate: 4m, export: 20m}
  when:
    all:
    - {signal: gpu_utilization, agg: max, window: 2m, at_most: 5%, gpus: all}
    - {signal: gpu_memory_share, agg: min, window: 2m, above: 5%, gpus: any}
    - {silent_for: 2m, signals: [cpu, log, heartbeat]}
  for: 2m
  clear_after: 1m
  trust_for: 8m
  stages:
  - {level: light, after: 0s, do: log}
  - {level: moderate, after: 1m, do: notify, owner_may: {keep: 5m, times: 2}}
  - {level: severe, after: 7m, do: terminate, notice_delivered_for: 5m, grace: 60s,
     max_work_lost: 1h}
"""
DODGED = """\
version: 1
rules:
- id: silent
  target: job
  match: {framework: "torch|jupyter"}
  cold_start: 1m
  when:
    all:
    - {signal: gpu_utilization, agg: max, window: 2m, at_most: 5%, gpus: all}
    - {silent_for: 2m, signals: [heartbeat]}
  for: 1m
  trust_for: 3m
  stages:
  - {level: light, after: 0s, do: log}
  - {level: moderate, after: 1m, do: notify}
- id: hot
  target: gpu
  cold_start: 0s
  when: {signal: card_temperature, agg: min, window: 2m, above: 80C}
  for: 2m
  stages: [{level: light, after: 0s, do: log}]
"""


def played(folder: Path, text: str, *words: str) -> tuple[int, Any]:
    """Exit status and document of the command on a rule file."""
    path = folder / "rules.yaml"
    path.write_text(text)
    result = CliRunner().invoke(command, ["attack", str(path), "-o", "json", *words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result.exit_code, json.loads(result.stdout)


def outcomes(attacked: dict[str, Any]) -> dict[str, str]:
    """Trick -> outcome."""
    return {item["trick"]: item["outcome"] for item in attacked["tricks"]}


def test_what_a_job_says_delays_a_sound_rule_by_no_more_than_it_is_trusted(tmp_path: Path) -> None:
    """Log, heartbeat, phases, future times: later by trust_for; names and helpers: not at all."""
    status, document = played(tmp_path, SOUND)
    (attacked,) = document["rules"]
    found = outcomes(attacked)
    delayed = {name for name, outcome in found.items() if outcome == "delayed"}
    assert delayed == {
        "touch-log",
        "fake-heartbeat",
        "frozen-phase",
        "alternating-phases",
        "say-everything",
        "future-times",
        "forged-throughput",
        "last-words",
        "claim-run",
    }
    for item in attacked["tricks"]:
        if item["outcome"] == "delayed":
            assert 0 < item["later"] <= 8 * 60 + 3 * 24
    assert {name for name, outcome in found.items() if outcome == "held"} >= {
        "disguise",
        "renamed",
        "shared-card",
    }
    assert found["keep-abuse"] == "granted"
    # What really changes on card and CPU, and who never stays, needs another rule: it is named.
    escaped = {item["trick"] for item in attacked["tricks"] if item["hint"]}
    assert escaped == {
        *("hidden", "restart", "restart-believed", "decoy-card"),
        *("trickle", "last-step", "cpu-spin", "memory-dips"),
    }
    assert found["just-under"] == "obeys"
    assert status == 1


def test_one_step_before_each_deadline_buys_no_more_than_its_window_where_clear_after_is_longer(
    tmp_path: Path,
) -> None:
    """The ladder goes on where it was: it is due as soon as the step is forgotten."""
    path = tmp_path / "rules.yaml"
    path.write_text(SOUND.replace("clear_after: 1m", "clear_after: 4m"))
    rules = check_rule_files([path]).rules
    assert rules is not None
    tricks = [trick for trick in TRICKS if trick.name in ("last-step", "last-words")]
    (attacked,) = asyncio.run(attack(rules, (), tell=lambda _: None, tricks=tricks))
    found = {item.trick.name: item for item in attacked.results}
    assert {item.outcome for item in found.values()} <= {Outcome.DELAYED, Outcome.HELD}
    step = found["last-step"].later
    assert step is not None
    assert step <= 4 * 60


@pytest.mark.parametrize(
    ("match", "outcome"),
    [("run: demo", Outcome.ESCAPES), ("run: demo, user: ana", Outcome.HELD)],
)
def test_a_protected_runs_name_protects_others_unless_its_user_stands_beside_it(
    tmp_path: Path, match: str, outcome: Outcome
) -> None:
    """Who calls his run so is not ana."""
    path = tmp_path / "rules.yaml"
    path.write_text(SOUND.replace("executable: /usr/bin/tensorboard", match))
    rules = check_rule_files([path]).rules
    assert rules is not None
    tricks = [trick for trick in TRICKS if trick.name == "borrowed-run"]
    (attacked,) = asyncio.run(attack(rules, (), tell=lambda _: None, tricks=tricks))
    assert [item.outcome for item in attacked.results] == [outcome]


def test_who_hides_from_the_node_is_found_by_his_card(tmp_path: Path) -> None:
    """Where no rule about jobs tells his owner; operators see memory that belongs to nobody."""
    path = tmp_path / "rules.yaml"
    orphans = """\
- id: orphans
  target: gpu
  cold_start: 0s
  when: {signal: card_unattributed_memory, agg: min, window: 2m, above: 1GiB}
  for: 1m
  stages: [{level: light, after: 0s, do: log}]
"""
    path.write_text(SOUND + orphans)
    rules = check_rule_files([path]).rules
    assert rules is not None
    tricks = [trick for trick in TRICKS if trick.name in ("hidden", "trickle")]
    attacked = asyncio.run(attack(rules, ("idle",), tell=lambda _: None, tricks=tricks))
    hidden, trickle = attacked[0].results
    assert (hidden.outcome, hidden.by, hidden.card) == (Outcome.ELSEWHERE, "orphans", True)
    assert hidden.after is not None
    assert hidden.after < 8 * 60
    # Who is seen, and belongs to nobody's rule, is not found because his card is there.
    assert trickle.outcome is Outcome.ESCAPES
    assert any("orphans finds its card after" in line for line in report_lines(attacked))


@pytest.mark.parametrize(("gpus", "more"), [("all", 1), ("75%", 1), ("50%", 3), ("25%", 7)])
def test_so_many_cards_for_show_that_too_few_are_idle(gpus: str, more: int) -> None:
    """Two idle cards are under 75 % of three; of four they are half, of five less."""
    rule = Rule.model_validate(
        {**RULE, "when": {"signal": "gpu_utilization", "agg": "max", "window": "5m",
                          "at_most": "2%", "gpus": gpus}}
    )  # fmt: skip
    job = OFFENDERS[0].job.model_copy(update={"gpus": 2})
    target = Target(rule, OFFENDERS[0], job, 600.0, 900.0, 9000.0, 60.0)
    decoy = next(trick for trick in TRICKS if trick.name == "decoy-card").play(target)
    assert decoy is not None
    (made,) = decoy.jobs
    assert len(made.card_names) == 2 + more
    assert [card.utilization for card in made.cards] == [None, None, *[0.1] * more]


def test_a_rule_that_only_listens_is_dodged_for_good_and_the_command_fails(tmp_path: Path) -> None:
    """Silence without cpu: a heartbeat suffices; a label that the job chooses: it loses it."""
    status, document = played(tmp_path, DODGED)
    silent, hot = document["rules"]
    found = outcomes(silent)
    assert status == 1
    assert {
        found[name] for name in ("fake-heartbeat", "say-everything", "no-labels", "renamed")
    } == {"escapes"}
    assert found["touch-log"] == "held"
    assert hot["skipped"] == "it judges cards, which say nothing of themselves"
    assert hot["tricks"] == []


def test_the_pages_rule_about_the_card_finds_two_accounts_that_hand_it_to_each_other(
    tmp_path: Path,
) -> None:
    """As it stands on the page, with its own test."""
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    path = tmp_path / "idle-card.yaml"
    path.write_text(text)
    for word in ("check", "test"):
        result = CliRunner().invoke(command, [word, str(path)])
        assert result.exit_code == 0, result.output
        assert "0 warnings" in result.output or "1 passed" in result.output


def test_the_page_names_every_trick() -> None:
    """docs/attacks.md has the table of `attack_reports.tricks_markdown()`."""
    assert f"## The tricks\n\n{tricks_markdown()}\n" in PAGE.read_text()


@pytest.mark.sweep
@pytest.mark.timeout(1500)
def test_nothing_escapes_the_default_rules_and_the_page_says_what_bounds_it() -> None:
    """Regenerate with `gpuwarden rules attack -o markdown ruleengine/rules/defaults.yaml`."""
    result = CliRunner().invoke(command, ["attack", str(DEFAULTS), "-o", "markdown"])
    assert PAGE.read_text().endswith(f"## The default rules\n\n{result.stdout}")
    assert result.exit_code == 0


def test_the_help_says_what_each_outcome_means() -> None:
    """One line each, as they are left."""
    lines = CliRunner().invoke(command, ["attack", "--help"]).output.splitlines()
    told = {words[0] for line in lines if (words := line.split())}
    assert {outcome.value for outcome in Outcome} <= told
    assert not any("\\b" in line for line in lines)


def test_an_unknown_rule_is_a_mistake_of_the_command_line(tmp_path: Path) -> None:
    """Exit status 2, with what was meant."""
    path = tmp_path / "rules.yaml"
    path.write_text(SOUND)
    result = CliRunner().invoke(command, ["attack", str(path), "--rule", "idel"])
    assert result.exit_code == 2
    assert 'did you mean "idle"' in result.output


RULE: dict[str, Any] = {
    "id": "r",
    "target": "job",
    "cold_start": "1m",
    "for": "1m",
    "stages": [{"level": "light", "after": "0s", "do": "log"}],
}
BUSY = {"signal": "gpu_utilization", "agg": "avg", "window": "5m", "above": "80%", "gpus": "all"}
SLOW = {"profile": {"throughput": "below 50%"}, "window": "5m"}


@pytest.mark.parametrize(
    ("when", "expected"),
    [
        (BUSY, False),
        (SLOW, True),
        ({"all": [BUSY, SLOW]}, True),
        ({"any": [BUSY, SLOW]}, False),
        ({"not": {"signal": "throughput", "window": "5m", "above": "1 img/s"}}, True),
        ({"silent_for": "5m", "signals": ["heartbeat"]}, False),
        ({"promql": "max by (job_id) (yolo_epoch)", "above": 1}, True),
        ({"promql": "max by (job_id) (gpu_job_threads)", "above": 1}, False),
    ],
)
def test_a_rule_rests_on_the_jobs_word_if_nothing_else_makes_it_true(
    when: dict[str, Any], *, expected: bool
) -> None:
    """One such condition of `all` suffices, of `any` it takes every one."""
    assert rests_on_word(Rule.model_validate({**RULE, "when": when}).when) is expected


@pytest.mark.parametrize(
    ("key", "pattern"),
    [
        ("framework", "ultralytics|torch|jupyter"),
        ("interactive", "true"),
        ("user", "alice"),
        ("user", "(?:bob|carol)"),
        ("user", r"svc-\d+"),
        ("project", r"team\.vision"),
        ("gpu", "NVIDIA A100.*"),
        ("model", "yolo11[nsm]"),
        ("node", "gpu-node-[0-9]+"),
    ],
)
def test_an_offender_is_called_what_a_rule_asks_for(key: str, pattern: str) -> None:
    """Otherwise a rule would be taken for one that nothing breaks."""
    text = example(pattern, key)
    assert text is not None
    rule = Rule.model_validate({**RULE, "when": BUSY, "match": {key: pattern}})
    job = disguised(OFFENDERS[0], rule)
    assert not isinstance(job, str)
    shown = {
        "interactive": str(job.interactive).lower(),
        "gpu": job.hardware,
        "node": job.node.removesuffix(":9835"),
        "model": job.run.model if job.run else "",
        "project": job.run.project if job.run else "",
    }
    assert re.fullmatch(pattern, shown.get(key) or getattr(job, key, ""))


def test_a_rule_that_would_end_no_offender_is_attacked_as_one_that_tells(tmp_path: Path) -> None:
    """Its last stage asks for more than any made-up job does; its others are still escaped."""
    more = "when: {signal: gpu_memory_share, agg: min, window: 2m, above: 99.9%, gpus: any}"
    path = tmp_path / "rules.yaml"
    path.write_text(SOUND.replace("max_work_lost: 1h", f"max_work_lost: 1h, {more}"))
    rules = check_rule_files([path]).rules
    assert rules is not None
    tricks = [trick for trick in TRICKS if trick.name in ("touch-log", "trickle")]
    (attacked,) = asyncio.run(attack(rules, (), tell=lambda _: None, tricks=tricks))
    assert attacked.offender is not None
    assert attacked.offender.name == "crashed training"
    assert not attacked.ends
    assert [item.outcome for item in attacked.results] == [Outcome.DELAYED, Outcome.ESCAPES]


def test_a_rule_that_takes_longer_than_an_attack_is_not_attacked(tmp_path: Path) -> None:
    """It says so, rather than that nothing escapes."""
    status, document = played(tmp_path, DODGED.replace("for: 1m", "for: 40d"))
    assert "attacks are played for at most" in document["rules"][0]["skipped"]
    assert status == 0


def test_a_pattern_that_nothing_made_up_matches_is_said(tmp_path: Path) -> None:
    """Rather than a report that nothing escapes."""
    rule = Rule.model_validate({**RULE, "when": BUSY, "match": {"user": r"(?=z)z{7}[^z]x"}})
    assert disguised(OFFENDERS[0], rule) == "no made-up user matches '(?=z)z{7}[^z]x'"
    text = DODGED.replace('framework: "torch|jupyter"', 'user: "z{7}y"')
    status, document = played(tmp_path, text)
    assert [item["skipped"] != "" for item in document["rules"]] == [True, True]
    assert status == 0


def test_a_rule_of_some_hours_is_attacked_within_them() -> None:
    """Outside of them every job would seem to escape."""
    hours = {"days": ["sat"], "from": "22:00", "to": "06:00", "zone": "Asia/Shanghai"}
    rule = Rule.model_validate({**RULE, "when": BUSY, "only_during": [hours]})
    begin = moment_for(rule).timestamp()
    assert all(within(rule.only_during, begin + hour * 3600) for hour in range(7))


def test_each_trick_is_played_on_cards_of_its_own() -> None:
    """Two tricks on one card would change what is measured of each other."""
    rule = Rule.model_validate({**RULE, "when": {"all": [BUSY, SLOW]}})
    target = Target(
        rule=rule,
        offender=OFFENDERS[3],
        job=OFFENDERS[3].job,
        found=600.0,
        done=900.0,
        length=9000.0,
        interval=60.0,
    )
    made = plays(target)
    assert {trick.name for trick, _ in made} < {trick.name for trick in TRICKS}
    cards = [
        {name for job in (*play.jobs, *play.bystanders) for name in job.card_names}
        for _, play in made
    ]
    assert sum(len(names) for names in cards if "GPU-proc-robbed-0" not in names) + 2 == len(
        set().union(*cards)
    )
    names = [job.job for _, play in made for job in (*play.jobs, *play.bystanders)]
    assert len(names) == len(set(names))
