"""What people write: rule files, directories, settings, scenarios, and durations in all of them."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import click

from bench.fuzz.edges import YAML_WORDS, Attack, require
from gpuwarden import durations, option_values, quantities
from gpuwarden.diagnostics import render_json
from gpuwarden.errors import InvalidInput
from gpuwarden.exporter import scenarios
from gpuwarden.ruleengine import expressions, notations
from gpuwarden.ruleengine.alert_route_checks import check_routes
from gpuwarden.ruleengine.directory_checks import check_directory
from gpuwarden.ruleengine.loading import check_documents, rule_set_hash
from gpuwarden.ruleengine.replay_policies import parse_policies
from gpuwarden.ruleengine.rule_explanations import explain_rules
from gpuwarden.ruleengine.settings import EngineSettings
from gpuwarden.scheduling.policies import Engine
from gpuwarden.scheduling.policy_checks import check_document
from gpuwarden.scheduling.policy_differences import differences
from gpuwarden.scheduling.policy_texts import policy_yaml
from gpuwarden.yaml_files import load_file, load_located

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack

_ROOT = Path(__file__).parents[2]
NOW = 1_800_000_000.0
SCRAPE = 5.0
ENGINES = get_args(Engine)


def _rules(_folder: Path, _stack: ExitStack) -> Callable[[bytes], None]:
    """Checked, told in every form, and where they can be used: explained."""

    def attack(data: bytes) -> None:
        document = load_located(data.decode(errors="replace"), name="rules.yaml")
        checked = check_documents([document], scrape_interval=SCRAPE, now=NOW)
        checked.render().encode()
        render_json(checked.diagnostics)
        require(
            holds=checked.rules is not None or bool(checked.errors), what="refused without a reason"
        )
        if checked.rules is not None:
            rule_set_hash(checked.rules)
            rules = checked.rules
            json.loads(explain_rules(rules, rules.rules, scrape_interval=SCRAPE))

    return attack


def _directories(folder: Path, _stack: ExitStack) -> Callable[[bytes], None]:
    path = folder / "directory.yaml"

    def attack(data: bytes) -> None:
        path.write_bytes(data)
        checked = check_directory(path, now=NOW)
        checked.render().encode()
        if checked.content is not None:
            checked.content.user("alice")

    return attack


def _policies(folder: Path, _stack: ExitStack) -> Callable[[bytes], None]:
    """Checked for every engine; what can be used is written back and reads as the same."""
    path = folder / "policy.yaml"

    def attack(data: bytes) -> None:
        document = load_located(data.decode(errors="replace"), name="policy.yaml")
        for engine in ENGINES:
            checked = check_document(path, document, now=NOW, engine=engine)
            checked.render().encode()
            require(
                holds=checked.content is not None or bool(checked.errors),
                what="refused without a reason",
            )
            if checked.content is None:
                continue
            again = load_located(policy_yaml(checked.content), name="again.yaml")
            require(
                holds=check_document(path, again, now=NOW, engine=engine).content
                == checked.content,
                what="written back as something else",
            )
            require(holds=not differences(checked.content, checked.content), what="unlike itself")

    return attack


def _settings(folder: Path, _stack: ExitStack) -> Callable[[bytes], None]:
    path = folder / "engine.yaml"

    def attack(data: bytes) -> None:
        path.write_bytes(data)
        # Not its patterns of rule files: those may walk all of this machine's disks.
        with suppress(InvalidInput):
            load_file(EngineSettings, path)

    return attack


def _routes(_folder: Path, _stack: ExitStack) -> Callable[[bytes], None]:
    def attack(data: bytes) -> None:
        document = load_located(data.decode(errors="replace"), name="alertmanager.yml")
        if document.root is not None:
            render_json(check_routes(document.root))

    return attack


def _expressions(_folder: Path, _stack: ExitStack) -> Callable[[bytes], None]:
    def attack(data: bytes) -> None:
        for finding in expressions.check(data.decode(errors="replace")):
            str(finding).encode()

    return attack


def _notations(_folder: Path, _stack: ExitStack) -> Callable[[bytes], None]:
    def attack(data: bytes) -> None:
        text = data.decode(errors="replace")
        with suppress(notations.MalformedNotation):
            require(
                holds=len(notations.parse_values(text)) <= notations.MAX_VALUES, what="too many"
            )
        with suppress(notations.MalformedNotation):
            notations.parse_selector(text)

    return attack


def _quantities(_folder: Path, _stack: ExitStack) -> Callable[[bytes], None]:
    readers = (
        quantities.parse_duration,
        quantities.parse_ratio,
        quantities.parse_bytes,
        quantities.parse_throughput,
        quantities.parse_quantity,
        quantities.parse_window,
        quantities.parse_deviation,
        durations.parse,
    )

    def attack(data: bytes) -> None:
        text = data.decode(errors="replace")
        for read in readers:
            with suppress(ValueError):
                found = read(text)
                require(
                    holds=not isinstance(found, float) or math.isfinite(found), what="not finite"
                )
        with suppress(InvalidInput, click.UsageError, ValueError):
            require(
                holds=math.isfinite(option_values.parse_moment(text, now=NOW)), what="not finite"
            )
        with suppress(InvalidInput, ValueError):
            parse_policies(text)

    return attack


def _scenarios(_folder: Path, _stack: ExitStack) -> Callable[[bytes], None]:
    def attack(data: bytes) -> None:
        with suppress(InvalidInput):
            scenarios.parse(data.decode(errors="surrogateescape"))

    return attack


def _file(name: str) -> bytes:
    return (_ROOT / name).read_bytes()


_RULE = b"""version: 1
timezone: Asia/Shanghai
limits:
  terminate: {per_tick: 1, per_hour: 6, per_user_per_day: 3, halt_above_share_of_running: 10%}
rules:
- id: idle
  mode: enforce
  target: job
  match: {framework: "torch|jupyter"}
  cold_start: 60s
  ignore_phases: {scan: 30m, validate: 30m, checkpoint: 10m, export: 1h}
  when:
    all:
    - {signal: gpu_utilization, agg: max, window: 3 samples, at_most: 5%, gpus: all}
    - {silent_for: 5m, signals: [log, heartbeat, cpu]}
    - {promql: "max by (job_id) (gpu_job_threads)", above: 3}
  for: 5m
  clear_after: 2m
  stages:
  - {level: light, after: 0s, do: log}
  - {level: moderate, after: 5m, do: notify, owner_may: {keep: 2h, times: 2}}
  - level: severe
    after: 15m
    do: terminate
    notice_delivered_for: 10m
    grace: 60s
    max_work_lost: 1h
whitelist:
- match: {cgroup: "/x.service"}
  rules: [idle]
  reason: "shared"
  approved_by: ops
  expires: 2027-06-30T00:00:00+08:00
"""

ATTACKS = (
    Attack(
        "rule files",
        _rules,
        (_RULE, _file("deploy/examples/drill.yaml"), _file("deploy/compose/rules.yaml")),
        (*YAML_WORDS, b"when:", b"promql: ", b"1e999%", b"signal: ", b"any:", b"not:", b"share: "),
        of="files",
    ),
    Attack(
        "directories",
        _directories,
        (_file("deploy/examples/directory.yaml"), _file("deploy/compose/directory.yaml")),
        (*YAML_WORDS, b"deputy: ", b"timezone: ", b"until: ", b"2027-02-30", b"users:"),
        of="files",
    ),
    Attack(
        "policies",
        _policies,
        (_file("deploy/examples/policy.yaml"),),
        (*YAML_WORDS, b"preempts: [", b"from: ", b"24:00", b"1e9%", b"per: day", b"quota: {", b"@"),
        of="files",
    ),
    Attack(
        "engine.yaml",
        _settings,
        (_file("deploy/examples/engine.yaml"), _file("deploy/compose/engine.yaml")),
        (*YAML_WORDS, b"rules: ", b"**", b"http://[", b"peers: ", b"/0", b"${X}", b"{host}"),
        of="files",
    ),
    Attack(
        "alertmanager.yml",
        _routes,
        (_file("deploy/compose/alertmanager.yml"), _file("alerting/alertmanager.yml")),
        (*YAML_WORDS, b"routes:", b"matchers:", b"=~", b'"(a+)+$"', b"continue: true", b"1y"),
        of="files",
    ),
    Attack(
        "PromQL of rules",
        _expressions,
        (
            b"max by (job_id) (rate(gpu_job_read_bytes_total[5m]))",
            b"gpu_job_threads > on (job_id) group_left (user) gpu_job_info offset 5m",
        ),
        (
            b"(",
            b")",
            b"[5m]",
            b"[5m:1s]",
            b"{",
            b"=~",
            b"@ end()",
            b"by (",
            b"\xe2\x88\x9e",
            b"bool",
        ),
        of="files",
    ),
    Attack(
        "values of tests",
        _notations,
        (b"0+5x100 3x20 _ _x3 stale", b'up{instance="n1:9835",job="gpuwarden"}'),
        (b"x99999999999", b"1e999", b"\\", b'"', b"{", b"}", b"-", b"\\ud800"),
        of="files",
    ),
    Attack(
        "quantities",
        _quantities,
        (b"1h30m", b"10.5GiB", b"15%", b"78 img/s", b"3 samples", b"below 15%", b"now-7d"),
        (b"1e400", b"-", b"ms", b"9" * 400, b"\xd9\xa3", b" ", b".", b"now-", b"2026-02-30"),
        of="files",
    ),
    Attack(
        "scenarios",
        _scenarios,
        (b"card index=0 name=A100 memory=40GiB\nprocess card=0 pid=4242 memory=1GiB\n",),
        (b"\n", b"=", b"mig ", b"xid ", b"\\x", b"#", b"index=", b"99999999999999999999"),
        of="files",
    ),
)
