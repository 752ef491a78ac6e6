"""The committed boards: built by the code, known to Grafana's types, passed by the linter."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import pytest
import yaml
from grafana import build, lint
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

PATHS = sorted(build.FOLDER.glob("*.json"))


@pytest.fixture(params=PATHS, ids=[path.stem for path in PATHS])
def board(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Each committed board."""
    return json.loads(request.param.read_text())


def test_the_boards_are_what_the_code_builds() -> None:
    """Committed JSON and code agree byte for byte; `python -m grafana.build` mends a difference."""
    assert build.drifted() == []


def test_every_key_is_known_to_grafana(board: dict[str, Any]) -> None:
    """A board survives the SDK's types: a misspelt key would vanish on the way."""
    register_default_plugins()
    again = json.loads(JSONEncoder().encode(Dashboard.from_json(deepcopy(board))))
    assert again == board


def test_the_linter_finds_nothing() -> None:
    """No finding is left, and no exclusion in lint.yaml is without use."""
    assert lint.report() == []


def test_recording_interval_is_what_the_boards_count_with() -> None:
    """Idle GPU-hours multiply samples by 15 s: the interval of the group that records them."""
    groups = yaml.safe_load((lint.RULES / "recording.yml").read_text())["groups"]
    (interval,) = {
        group["interval"]
        for group in groups
        for rule in group["rules"]
        if rule["record"] == "user:gpus_held_idle:count"
    }
    assert interval == "15s"


PANEL: dict[str, Any] = {
    "id": 1,
    "type": "timeseries",
    "title": "T",
    "description": "D",
    "datasource": {"uid": "${datasource}"},
    "gridPos": {"x": 0, "y": 0, "w": 12, "h": 8},
    "fieldConfig": {"defaults": {"unit": "none"}, "overrides": []},
    "targets": [
        {
            "refId": "A",
            "datasource": {"type": "prometheus", "uid": "${datasource}"},
            "expr": 'gpu_up{job="gpuwarden",cluster=~"$cluster",instance=~"$node"}',
            "legendFormat": "{{gpu}}",
        }
    ],
}
BOARD: dict[str, Any] = {
    "uid": "gpuwarden-x",
    "editable": False,
    "tags": ["gpuwarden"],
    "annotations": {"list": []},
    "templating": {
        "list": [
            {"name": "datasource", "type": "datasource", "query": "prometheus"},
            {"name": "job", "type": "constant"},
            {"name": "instance", "type": "constant"},
        ]
    },
    "panels": [PANEL],
}


SELECTOR = 'gpu_up{job="gpuwarden",cluster=~"$cluster",instance=~"$node"}'
COUNTER = 'gpu_idle_detected_total{job="gpuwarden-engine",cluster=~"$cluster"}'
BUCKETS = 'gpuwarden_decision_wait_seconds_bucket{job="gpuwarden-engine",cluster=~"$cluster"}'


def variables(*names: str) -> dict[str, Any]:
    """The board with only these variables."""
    kept = [one for one in BOARD["templating"]["list"] if one["name"] in names]
    return BOARD | {"templating": {"list": kept}}


def panel(**values: object) -> dict[str, Any]:
    """The board with other values in its panel."""
    return BOARD | {"panels": [PANEL | values]}


def target(**values: object) -> dict[str, Any]:
    """The board with other values in its panel's query."""
    return panel(targets=[PANEL["targets"][0] | values])


def test_the_plain_board_passes() -> None:
    """The board that the next test spoils is without findings."""
    assert list(lint.check(BOARD)) == []


@pytest.mark.parametrize(
    ("rule", "board"),
    [
        ("uneditable", BOARD | {"editable": True}),
        ("board-uid", BOARD | {"uid": "x"}),
        ("board-tag", BOARD | {"tags": []}),
        ("template-datasource", variables("job", "instance")),
        ("template-job", variables("datasource", "instance")),
        ("template-instance", variables("datasource", "job")),
        ("panel-datasource", panel(datasource={"uid": "fixed"})),
        ("panel-title-description", panel(description="")),
        ("panel-units", panel(fieldConfig={"defaults": {"unit": "bites"}, "overrides": []})),
        ("panel-no-targets", panel(targets=[])),
        ("panel-id", panel(id=None)),
        ("panel-grid", BOARD | {"panels": [PANEL, PANEL | {"id": 2}]}),
        ("panel-grid", panel(gridPos={"x": 20, "y": 0, "w": 12, "h": 8})),
        ("target-promql", target(expr="sum(")),
        ("target-function", target(expr=f'sort_by_label({SELECTOR}, "gpu")')),
        ("target-metric", target(expr=SELECTOR.replace("gpu_up", "gpu_upp"))),
        ("target-label", target(expr=SELECTOR.replace("{", '{owner="x",'))),
        ("target-job", target(expr=SELECTOR.replace('job="gpuwarden",', ""))),
        ("target-instance", target(expr=SELECTOR.replace(',instance=~"$node"', ""))),
        ("target-cluster", target(expr=SELECTOR.replace('cluster=~"$cluster",', ""))),
        ("target-counter-agg", target(expr=f"sum({COUNTER})")),
        ("target-counter-agg", target(expr=f"sum by (le) ({BUCKETS})")),
        ("target-counter-agg", target(expr=f"rate({SELECTOR}[$__rate_interval])")),
        ("target-rate-interval", target(expr=f"rate({COUNTER}[5m])")),
        ("target-instant", panel(type="table")),
        ("target-legend", target(legendFormat="")),
        ("target-ref", panel(targets=PANEL["targets"] * 2)),
        ("target-logql", target(datasource={"type": "loki", "uid": "${datasource}"})),
    ],
)
def test_the_linter_sees(rule: str, board: dict[str, Any]) -> None:
    """Each rule finds the fault that it is for, and nothing else is wrong with the board."""
    assert {finding.rule for finding in lint.check(board)} == {rule}


@pytest.mark.parametrize(
    ("rule", "variable"),
    [
        ("panel-datasource", {"datasource": {"uid": "fixed"}}),
        ("template-on-time-change-reload", {"refresh": 1}),
        ("template-label-promql", {"query": "label_values(job)"}),
        ("template-label-promql", {"query": "label_values(gpu_up{, gpu)"}),
    ],
)
def test_the_linter_sees_in_variables(rule: str, variable: dict[str, Any]) -> None:
    """Variables are held to the same rules as panels."""
    good = {
        "name": "gpu",
        "type": "query",
        "datasource": {"uid": "${datasource}"},
        "refresh": 2,
        "query": f"label_values({SELECTOR}, gpu)",
    }
    plain = BOARD["templating"]["list"]
    assert list(lint.check(BOARD | {"templating": {"list": [*plain, good]}})) == []
    found = lint.check(BOARD | {"templating": {"list": [*plain, good | variable]}})
    assert {finding.rule for finding in found} == {rule}
