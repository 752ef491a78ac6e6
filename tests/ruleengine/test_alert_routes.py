"""`gpuwarden alerting check`: what keeps a notice from its owner is found before it does."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from tests.ruleengine.test_settings import MINIMAL, write
from tests.servers import binary

from gpuwarden.ruleengine.alert_route_checks import check_routes
from gpuwarden.ruleengine.alert_routes import read_matchers, read_routes
from gpuwarden.ruleengine.alerting_cli import alerting
from gpuwarden.yaml_files import load_located

ROOT = Path(__file__).parents[2]
SHIPPED = (ROOT / "alerting/alertmanager.yml", ROOT / "deploy/compose/alertmanager.yml")
GOOD = """
route:
  receiver: operators
  routes:
  - matchers: ['alertname="Watchdog"']
    receiver: dead-man
    group_interval: 1m
  - matchers: ['service="gpuwarden-jobs"']
    receiver: owner
    group_interval: 30s
    routes:
    - {matchers: ['level="page"'], receiver: operators}
    - {matchers: ['team="vision"'], receiver: team, continue: true}
    - {matchers: ['level="light"'], receiver: owner}
    - {matchers: ['level=~"moderate|severe|ended"'], receiver: owner}
inhibit_rules:
- source_matchers: ['service="gpuwarden-jobs"', 'level="severe"']
  target_matchers: ['service="gpuwarden-jobs"', 'level=~"light|moderate"']
  equal: [job_id, rule]
receivers:
- {name: operators, email_configs: [{to: ops@example.org}]}
- {name: dead-man, webhook_configs: [{url: "http://deadman/"}]}
- name: team
  webhook_configs: [{url: "http://engine:9837/v1/notify/slack?channel=%23vision"}]
- name: owner
  webhook_configs:
  - url: http://engine:9837/v1/notify/slack+email
    http_config: {authorization: {credentials_file: token}}
- {name: nobody}
"""
LIGHT = """{matchers: ['level="light"'], receiver: owner}"""
SEVERE = """{matchers: ['level=~"moderate|severe|ended"'], receiver: owner}"""


def codes(text: str, **options: Any) -> list[str]:
    """Findings on a file, as codes with the severity's first letter."""
    document = load_located(text, name="alertmanager.yml")
    assert document.root is not None
    found = check_routes(document.root, **options)
    return sorted(f"{item.code}{item.severity[0]}" for item in found)


@pytest.mark.parametrize("path", SHIPPED, ids=str)
def test_the_shipped_files_let_everything_through(path: Path) -> None:
    """Nothing is found in them."""
    assert codes(path.read_text()) == []


def test_a_file_that_is_right_has_no_findings() -> None:
    """A team reads along, levels have routes, the higher level silences the lower."""
    assert codes(GOOD, channels=("slack", "email")) == []


WRONG = (
    ("muted at night", SEVERE, SEVERE[:-1] + ", mute_time_intervals: [night]}", ["GW501e"]),
    ("active by day", SEVERE, SEVERE[:-1] + ", active_time_intervals: [day]}", ["GW501e"]),
    ("a mild level muted", LIGHT, LIGHT[:-1] + ", mute_time_intervals: [night]}", ["GW501w"]),
    ("only a team muted", LIGHT,
     "{matchers: ['team=\"speech\"'], receiver: owner, mute_time_intervals: [night]}",
     ["GW501e"]),
    ("only some nodes muted", LIGHT,
     "{matchers: ['node=~\"gpu[0-9]+\"'], receiver: owner, mute_time_intervals: [night]}",
     ["GW501e"]),
    ("a rule's notices go nowhere", LIGHT,
     "{matchers: ['rule=\"idle-held\"'], receiver: nobody}", ["GW504e"]),
    ("only to the team", "continue: true", "continue: false", ["GW504e"]),
    ("to Slack without proof", SEVERE, SEVERE.replace("owner", "operators"), ["GW504e"]),
    ("a receiver that is not there", SEVERE, SEVERE.replace("owner", "ownr"), ["GW504e"]),
    ("budgets told to operators only", LIGHT,
     "{matchers: ['alertname=\"GpuwardenBudget\"'], receiver: operators}", ["GW511w"]),
    ("ends told to operators only", "moderate|severe|ended", "moderate|severe", ["GW511w"]),
    ("long groups", "group_interval: 30s", "group_interval: 10m", ["GW503e", "GW503w"]),
    ("a long first wait", "group_interval: 30s", "group_wait: 1h", ["GW503e", "GW503w"]),
    ("the default interval is long enough to say so", "group_interval: 30s", "group_wait: 0s", []),
    ("no credentials", "http_config: {authorization: {credentials_file: token}}",
     "send_resolved: false", ["GW507e"]),
    ("max_alerts", "http_config:", "max_alerts: 10\n    http_config:", ["GW505e"]),
    ("a channel that is not there", "slack+email\n", "slack+mail\n", ["GW506e"]),
    ("pages to nobody", "receiver: operators}\n    - {matchers: ['team",
     "receiver: nobody}\n    - {matchers: ['team", ["GW508e"]),
    ("pages muted", "receiver: operators}\n    - {matchers: ['team",
     "receiver: operators, mute_time_intervals: [night]}\n    - {matchers: ['team", ["GW501e"]),
    ("no dead man's switch", "receiver: dead-man\n", "receiver: nobody\n", ["GW509w"]),
    ("a slow heart", "group_interval: 1m", "group_interval: 2h", ["GW509w"]),
    ("silenced by a node's alert", "source_matchers: ['service=\"gpuwarden-jobs\"', 'level",
     "source_matchers: ['alertname=\"GpuwardenExporterDown\"', 'level", ["GW502e"]),
    ("silenced by another job", "equal: [job_id, rule]", "equal: [rule]", ["GW502e"]),
    ("silenced by another rule", "equal: [job_id, rule]", "equal: [job_id]", ["GW502e"]),
    ("silenced by a lower level", "'level=\"severe\"']", "'level=\"light\"']", ["GW502e"]),
    ("pages silenced", "'level=~\"light|moderate\"'", "'level=\"page\"'", ["GW502e"]),
    ("no receiver at all", "route:\n  receiver: operators\n", "route:\n", ["GW500e"]),
    ("a broken pattern", 'level=~"moderate|severe|ended"', 'level=~"("', ["GW500e"]),
    ("no matcher", "'level=\"light\"'", "'level is light'", ["GW500e"]),
)  # fmt: skip


@pytest.mark.parametrize(("_case", "old", "new", "found"), WRONG, ids=[case[0] for case in WRONG])
def test_what_stops_a_notice_is_found(_case: str, old: str, new: str, found: list[str]) -> None:
    """Each kind of mistake, one at a time, in a file that is right otherwise."""
    assert old in GOOD
    assert codes(GOOD.replace(old, new, 1), channels=("slack", "email")) == found


def test_an_address_in_a_file_is_not_taken_for_a_mistake() -> None:
    """It may be the engine's; that nobody knows is said."""
    hidden = GOOD.replace("url: http://engine:9837/v1/notify/slack+email", "url_file: /run/url")
    assert codes(hidden) == ["GW510w"]


def test_what_a_file_says_by_merging_is_read() -> None:
    """YAML's `<<`, which Alertmanager takes: of settings, matchers and credentials."""
    merged = GOOD.replace(
        "    http_config: {authorization: {credentials_file: token}}",
        "    http_config: {<<: &with {authorization: {credentials_file: token}}}",
    )
    assert codes(merged) == []
    muted = merged.replace(
        SEVERE,
        "{<<: {matchers: ['level=~\"moderate|severe|ended\"'], mute_time_intervals: [n]}, "
        "receiver: owner}",
    )
    assert codes(muted) == ["GW501e"]


def test_a_second_way_without_a_mute_is_enough() -> None:
    """What is muted in one place and told in another is told."""
    twice = f"{SEVERE[:-1]}, mute_time_intervals: [night], continue: true}}\n    - {SEVERE}"
    assert codes(GOOD.replace(SEVERE, twice)) == []


def test_the_old_way_to_write_conditions_is_understood() -> None:
    """`match` and `match_re`, of which many files are full."""
    old = "{match: {team: speech}, match_re: {level: mod.*}, receiver: nobody}"
    assert codes(GOOD.replace(LIGHT, old)) == ["GW504e"]


def test_too_many_kinds_of_jobs_are_an_error_and_not_a_wait() -> None:
    """The check ends, and says that it could not be made."""
    many = "\n".join(
        f"    - {{matchers: ['{name}=\"{n}\"'], receiver: owner}}"
        for name in ("team", "user", "rule", "node")
        for n in range(30)
    )
    text = GOOD.replace(f"    - {LIGHT}", many)
    assert codes(text) == ["GW500e"]


def test_the_command_tells_the_place_and_reads_the_channels_of_the_engine(tmp_path: Path) -> None:
    """Exit status 0 with warnings, 2 with errors."""
    path = tmp_path / "alertmanager.yml"
    path.write_text(GOOD.replace("receiver: dead-man\n", "receiver: nobody\n"))
    done = CliRunner().invoke(alerting, ["check", str(path)])
    assert (done.exit_code, done.output.splitlines()[-1]) == (0, f"{path}: 0 errors, 1 warnings")
    config = write(tmp_path, MINIMAL)
    done = CliRunner().invoke(alerting, ["check", str(path), "--config", str(config)])
    assert done.exit_code == 2
    line = GOOD[: GOOD.index("- name: owner")].count("\n") + 1
    assert f'{path}:{line}:3: error[GW506]: the receiver "owner" names email, slack' in done.output


LABELS = {"team": ("a", "b", "c", ""), "level": ("x", "y"), "user": ("u", "v")}


def random_route(dice: random.Random, depth: int, names: list[str]) -> dict[str, Any]:
    """A route with what Alertmanager lets a route have."""
    names.append(f"r{len(names)}")
    route: dict[str, Any] = {"receiver": names[-1]}
    matchers = []
    for name, values in LABELS.items():
        if dice.random() < 0.4:
            op = dice.choice(("=", "!=", "=~", "!~"))
            value = dice.choice(values)
            pattern = dice.choice((f"{value}|a", f"[{value or 'z'}]", ".*", ".+"))
            matchers.append(f'{name}{op}"{value if "~" not in op else pattern}"')
    if matchers:
        route["matchers"] = matchers
    if dice.random() < 0.4:
        route["continue"] = True
    if depth:
        route["routes"] = [random_route(dice, depth - 1, names) for _ in range(dice.randint(0, 3))]
    return route


@pytest.mark.parametrize("seed", range(25))
def test_routes_are_walked_as_alertmanager_walks_them(tmp_path: Path, seed: int) -> None:
    """amtool, of the real one, names the same receivers in the same order."""
    dice, names = random.Random(seed), []  # noqa: S311 - a made-up file, and no secret
    root = random_route(dice, 2, names)
    root.pop("matchers", None)
    root.pop("continue", None)
    path = tmp_path / "alertmanager.yml"
    path.write_text(yaml.safe_dump({"route": root, "receivers": [{"name": n} for n in names]}))
    document = load_located(path)
    assert document.root is not None
    tree = read_routes(document.root)
    for _ in range(3):
        labels = {name: dice.choice(values) for name, values in LABELS.items()}
        done = subprocess.run(
            [binary(("amtool",)), "config", "routes", "test", f"--config.file={path}"]
            + [f"{name}={value}" for name, value in labels.items() if value],
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        )
        found = [route.receiver for route in tree.reached(labels)]
        assert ",".join(found) == done.stdout.strip(), labels


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a=b", [("a", "=", "b")]),
        ("severity =~ warning|critical", [("severity", "=~", "warning|critical")]),
        ("a = foo bar ", [("a", "=", "foo bar")]),
        ("a=", [("a", "=", "")]),
        ("a=~b{2}", [("a", "=~", "b{2}")]),
        ("a=~^(b|c)$", [("a", "=~", "^(b|c)$")]),
        ('{a=b,c!="d,e"}', [("a", "=", "b"), ("c", "!=", "d,e")]),
    ],
)
def test_values_without_quotes_are_read_as_alertmanager_reads_them(
    tmp_path: Path, text: str, expected: list[tuple[str, str, str]]
) -> None:
    """Most public files write them so, and `amtool check-config` takes each of these."""
    file = tmp_path / "alertmanager.yml"
    file.write_text(f"matchers:\n- '{text}'\n", encoding="utf-8")
    root = load_located(file).root
    assert root is not None
    assert [(item.name, item.op, item.value) for item in read_matchers(root)] == expected


@pytest.mark.parametrize(
    "conditions", ["matchers: ['a=\"b\"']", "match: {a: b}", "match_re: {a: b}"]
)
def test_conditions_on_the_first_route_are_refused_as_alertmanager_refuses_them(
    tmp_path: Path, conditions: str
) -> None:
    """An alert that it does not take would leave by no route at all."""
    file = tmp_path / "alertmanager.yml"
    file.write_text(
        f"route: {{receiver: x, {conditions}}}\nreceivers: [{{name: x}}]\n", encoding="utf-8"
    )
    root = load_located(file).root
    assert root is not None
    (only,) = check_routes(root)
    assert only.code == "GW500"
    assert "first route" in only.message
