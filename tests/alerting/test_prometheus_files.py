"""prometheus.yml, its rules and the pages that its alerts point at."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml
from tests.servers import binary

from gpuwarden import durations
from gpuwarden.catalogue import CATALOGUE, metric_of

ROOT = Path(__file__).parents[2]
ALERTING = ROOT / "alerting"
HEALTH = yaml.safe_load((ALERTING / "rules" / "health.yml").read_text())
RECORDING = yaml.safe_load((ALERTING / "rules" / "recording.yml").read_text())
SCHEDULING = yaml.safe_load((ALERTING / "rules" / "scheduling.yml").read_text())
MONEY = yaml.safe_load((ALERTING / "rules" / "money.yml").read_text())
ALERTS = [
    rule for file in (HEALTH, SCHEDULING) for group in file["groups"] for rule in group["rules"]
]
RECORDED = [
    rule for file in (RECORDING, MONEY) for group in file["groups"] for rule in group["rules"]
]
TESTS = sorted((ALERTING / "rules" / "tests").glob("*.yml"))

EXAMPLES = sorted((ALERTING / "examples").glob("*.yml"))

FOREIGN = frozenset(
    {
        "up",
        "alertmanager_notification_requests_failed_total",
        "prometheus_notifications_alertmanagers_discovered",
        "prometheus_rule_evaluation_failures_total",
    }
)
"""Metrics of Prometheus and Alertmanager themselves that the health rules read."""


INFORMS = frozenset(
    {
        "gpuwarden_engine_build_info",  # which version it is
        "gpuwarden_engine_failed_ticks",  # the discarded ticks of the moment
    }
)
"""Gauges of the engine that are no sign of trouble, or of one that another tells."""


def promtool(*words: str) -> subprocess.CompletedProcess[str]:
    """Run promtool in alerting/."""
    return subprocess.run(
        [binary(("promtool",)), *words],
        cwd=ALERTING,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_prometheus_takes_the_configuration() -> None:
    """`promtool check config` finds no fault in prometheus.yml and every file it names."""
    done = promtool("check", "config", "prometheus.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 rule files found" in done.stdout


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_prometheus_takes_the_examples(path: Path, tmp_path: Path) -> None:
    """Each example of discovery is a configuration, and its job is scraped as ours is."""
    config = yaml.safe_load(path.read_text())
    (scrape,) = config["scrape_configs"]
    for discovery in scrape.get("kubernetes_sd_configs", []):
        # Debian's Prometheus is built without Kubernetes: the rest is checked by it.
        assert discovery["role"] == "pod"
        assert [set(item) for item in discovery["selectors"]] == [{"role", "label"}]
    plain = {name: value for name, value in scrape.items() if name != "kubernetes_sd_configs"}
    file = tmp_path / path.name
    file.write_text(yaml.safe_dump({**config, "scrape_configs": [plain]}))
    done = promtool("check", "config", "--syntax-only", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    ours = yaml.safe_load((ALERTING / "prometheus.yml").read_text())["scrape_configs"][0]
    same = {name for name in ours if not name.endswith("sd_configs")}
    assert {name: scrape[name] for name in same} == {name: ours[name] for name in same}


@pytest.mark.parametrize("path", TESTS, ids=[path.stem for path in TESTS])
def test_rules_fire_when_they_should_and_not_otherwise(path: Path) -> None:
    """`promtool test rules` passes, the cases that must not fire included."""
    done = promtool("test", "rules", str(path))
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_rule_has_a_test() -> None:
    """Each alert and each recorded series is named in a test file."""
    words = set(re.findall(r"[\w:]+", "\n".join(path.read_text() for path in TESTS)))
    rules = {rule["alert"] for rule in ALERTS} | {rule["record"] for rule in RECORDED}
    assert rules <= words


@pytest.mark.parametrize("alert", [alert["alert"] for alert in ALERTS])
def test_every_alert_is_seen_to_fire_and_not_to_fire(alert: str) -> None:
    """On series that it reads, not on none; the heartbeat alone never falls silent."""
    fires, silent = 0, 0
    for path in TESTS:
        for case in yaml.safe_load(path.read_text())["tests"]:
            for check in case.get("alert_rule_test", ()):
                if check["alertname"] == alert:
                    fires += bool(check.get("exp_alerts"))
                    silent += not check.get("exp_alerts") and bool(case["input_series"])
            for check in case.get("promql_expr_test", ()):
                if f'alertname="{alert}"' in check["expr"]:
                    fires += bool(check.get("exp_samples"))
                    silent += not check.get("exp_samples")
    assert fires
    assert silent or alert == "Watchdog"


def test_every_alert_says_what_it_means_and_what_to_do() -> None:
    """Each alert has a severity, texts and a runbook of its name; no runbook is left over."""
    pages = {path.relative_to(ROOT).as_posix(): path for path in (ROOT / "docs/runbooks").glob("*")}
    for alert in ALERTS:
        assert alert["labels"]["service"] == "gpuwarden"
        assert alert["labels"]["severity"] in {"page", "warn", "none"}
        assert set(alert["annotations"]) == {"summary", "description", "runbook_url"}
        page = pages.pop(alert["annotations"]["runbook_url"]).read_text()
        assert page.startswith(f"# {alert['alert']}\n")
        for part in ("**What it means.**", "**What to do.**\n\n1. ", "**Harmless when** "):
            assert part in page, alert["alert"]
    assert pages == {}


@pytest.mark.parametrize(
    "rule",
    ALERTS + RECORDED,
    ids=[rule.get("alert") or rule["record"] for rule in ALERTS + RECORDED],
)
def test_rules_read_metrics_that_exist(rule: dict) -> None:
    """A rule reads the catalogue, another recorded series, or a known series of the servers."""
    expression = re.sub(r'"[^"]*"|\{[^}]*\}|\[[^\]]*\]', "", rule["expr"])
    # the label lists of on (...), by (...) and group_left (...) are no metrics
    expression = re.sub(r"\b(on|by|group_left)\s*\([^)]*\)", "", expression)
    names = set(re.findall(r"[a-z][\w:]*[_:][\w:]*|\bup\b", expression)) - {
        "label_replace",
        "avg_over_time",
        "count_over_time",
        "count_values",
        "max_over_time",
        "min_over_time",
        "sum_over_time",
        "last_over_time",
        "clamp_min",
        "label_join",
    }
    recorded = {rule["record"] for rule in RECORDED}
    assert {name for name in names if metric_of(name) is None} <= recorded | FOREIGN


def test_what_says_that_the_engine_is_stuck_or_blind_has_an_alert() -> None:
    """Each gauge of the engine about itself is read by a health rule."""
    read = "".join(alert["expr"] for alert in ALERTS)
    own = {name for name in CATALOGUE if name.startswith("gpuwarden_engine_")}
    assert {name for name in own - INFORMS if name not in read} == set()
    assert own >= INFORMS


def test_scrape_jobs_bear_the_names_that_the_rules_ask_for() -> None:
    """Every `job` that a rule selects is a scrape job of prometheus.yml."""
    config = yaml.safe_load((ALERTING / "prometheus.yml").read_text())
    jobs = {scrape["job_name"] for scrape in config["scrape_configs"]}
    asked = {
        name for rule in ALERTS + RECORDED for name in re.findall(r'job="([^"]+)"', rule["expr"])
    }
    assert asked == jobs


def test_reasons_are_words_that_the_engine_uses() -> None:
    """A reason that a rule selects or leaves out is one that the engine exports."""
    sources = "".join(path.read_text() for path in (ROOT / "ruleengine").rglob("*.py"))
    named = {
        word
        for rule in ALERTS
        for words in re.findall(r'reason!?=~?"([^"]+)"', rule["expr"])
        for word in words.split("|")
    }
    assert named
    assert {word for word in named if f'"{word}"' not in sources} == set()


def test_hours_are_counted_with_the_interval_of_what_they_sum() -> None:
    """A sample of a holding stands for one interval: so many of them are an hour."""
    groups = {group["name"]: group for group in MONEY["groups"]}
    holdings, use = groups["gpuwarden-holdings"], groups["gpuwarden-use"]
    own = {rule["record"] for rule in holdings["rules"]}
    seconds = durations.parse(holdings["interval"])
    counted = [rule["expr"] for rule in use["rules"] if any(name in rule["expr"] for name in own)]
    assert len(counted) == len(use["rules"]) - 1
    for expression in counted:
        (factor,) = re.findall(r"/ ([0-9]+)\s*$", expression)
        assert int(factor) * seconds == 3600
        assert "[4m59s999ms]" in expression
        assert use["interval"] == "5m"
