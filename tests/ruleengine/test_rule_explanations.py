"""Explanations are true: the queries are the engine's, and the times are when things happen."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.ruleengine.fleets import a_rule
from tests.ruleengine.rehearsing import RULES, checked, failures, run

from gpuwarden.ruleengine.loading import load_rule_files
from gpuwarden.ruleengine.model import RuleSet
from gpuwarden.ruleengine.needs import condition_keys
from gpuwarden.ruleengine.rule_cli import rules
from gpuwarden.ruleengine.rule_explanations import earliest, explain_rule, explanation_lines
from gpuwarden.ruleengine.signals import query

SHIPPED = sorted((Path(__file__).parents[2] / "ruleengine" / "rules").glob("*.yaml"))


def _queries(condition: dict[str, object]) -> list[str]:
    found = [str(item["promql"]) for item in condition.get("queries", ())]  # type: ignore[attr-defined]
    for part in condition.get("conditions", ()):  # type: ignore[attr-defined]
        found += _queries(part)
    return found


def test_the_queries_are_those_that_the_engine_asks() -> None:
    """Of every shipped rule, in the order of its conditions."""
    known = load_rule_files(SHIPPED)
    for rule in known.rules:
        explained = explain_rule(rule, known, scrape_interval=5)
        asked = [query(key, scrape_interval=5) for key in condition_keys(rule.when)]
        assert _queries(explained["when"]) == asked
        lines = list(explanation_lines(explained))
        assert all(any(text in line for line in lines) for text in asked)
        assert all(stage["key"] in "\n".join(lines) for stage in explained["stages"])


def test_things_happen_when_the_explanation_says(tmp_path: Path) -> None:
    """A job that breaks the rule from its first moment on is found, told and ended just then."""
    found = checked(tmp_path, "")
    assert found.rules is not None
    rule = next(rule for rule in found.rules.rules if rule.id == "idle")
    explained = explain_rule(rule, found.rules, scrape_interval=5)
    stages = {stage["key"]: stage["earliest"] for stage in explained["stages"]}
    moments = [(explained["earliest"]["violation"], "verdict: unknown", "verdict: yes")]
    keys = ["none", *stages]
    moments += [
        (stages[key], f"stage: {before}", f"stage: {key}")
        for before, key in itertools.pairwise(keys)
    ]
    tick = 15
    expect = "".join(
        f"  - {{at: {at - tick:.0f}s, rule: idle, job: proc-1, {before}}}\n"
        f"  - {{at: {at:.0f}s, rule: idle, job: proc-1, {after}}}\n"
        for at, before, after in moments
    )
    tests = f"""
tests:
- name: just then
  tick: {tick}s
  jobs: [{{job: proc-1, like: idle}}]
  expect:
{expect}"""
    assert len(moments) == 4
    assert failures(run(tmp_path, tests)) == []


WINDOW = {"signal": "job_cpu_cores", "window": "10m", "below": "1 cores"}
SILENCE = {"silent_for": "20m", "signals": ["cpu"]}


@pytest.mark.parametrize(
    ("when", "seconds"),
    [
        (WINDOW, 600),
        (SILENCE, 1200),
        ({"all": [WINDOW, SILENCE]}, 1200),
        ({"any": [WINDOW, SILENCE]}, 600),
        ({"not": {"all": [WINDOW, SILENCE]}}, 0),
        ({"not": {"any": [WINDOW, SILENCE]}}, 600),
        ({"not": {"not": SILENCE}}, 1200),
        ({"no_progress_for": "15m"}, 900),
        ({"needs_memory": "80%"}, 0),
        ({"promql": "max by (job_id) (gpu_job_info)", "above": 0}, 0),
    ],
)
def test_a_condition_is_known_once_its_windows_are_full(when: object, seconds: float) -> None:
    """All of several take the longest, any of them the shortest, and `not` turns that around."""
    assert earliest(a_rule(when).when, 5) == seconds


def test_hours_and_progress_are_said_in_words() -> None:
    """With whose clocks they are, and whose word it is."""
    hours = {"days": ["sat"], "from": "22:00", "to": "06:00", "zone": "Europe/Berlin"}
    rule = a_rule({"no_progress_for": "15m"}, only_during=[hours])
    explained = explain_rule(rule, RuleSet(version=1, rules=(rule,)), scrape_interval=5)
    lines = [line.strip() for line in explanation_lines(explained)]
    when = "sat 22:00 to 06:00 Europe/Berlin"
    assert f"during {when}; outside of these hours it is NO" in lines
    assert "- the trainer counted no step in 15m of training" in lines
    assert "as the job's trainer says" in lines
    assert explained["only_during"] == [when]


def test_explanations_are_for_people_or_one_document(tmp_path: Path) -> None:
    """Of all rules, or of those that are named; a misspelt name is an error with a hint."""
    path = tmp_path / "rules.yaml"
    path.write_text(RULES)

    def call(*words: str) -> tuple[int, str, str]:
        done = CliRunner().invoke(rules, ["explain", *words, str(path)])
        return done.exit_code, done.stdout, done.stderr

    status, text, _ = call()
    assert status == 0
    assert "It judges jobs of which framework is 'torch'," in text
    assert "  It spares user root until 2030-01-01T00:00:00+00:00: service\n" in text
    assert "the lowest value of the last 2m of card_temperature is above 80 C\n" in text
    assert "    after 20m: severe-terminate: the job is ended (the mode only records it)\n" in text
    status, text, _ = call("--rule", "hot", "-o", "json")
    document = json.loads(text)
    assert document["schema"] == "gpuwarden.rule-explanations/v1"
    assert [rule["id"] for rule in document["rules"]] == ["hot"]
    assert document["rules"][0]["when"]["queries"][0]["min_samples"] == 19
    status, _, errors = call("--rule", "ideal")
    assert status == 2
    assert 'did you mean "idle"?' in errors
    path.write_text(RULES.replace("80C", "80"))
    status, text, _ = call()
    assert status == 2
    assert "error[GW107]" in text
