"""The linter finds each fault that it is for, and nothing else in a board that has one."""

from __future__ import annotations

from typing import Any

import pytest
from grafana import lint

SELECTOR = 'gpu_up{job="gpuwarden",cluster=~"$cluster",instance=~"$node"}'
COUNTER = 'gpu_idle_detected_total{job="gpuwarden-engine",cluster=~"$cluster"}'
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
            "expr": SELECTOR,
            "legendFormat": "{{gpu}}",
        }
    ],
}
NODE: dict[str, Any] = {
    "name": "node",
    "type": "query",
    "datasource": {"uid": "${datasource}"},
    "refresh": 2,
    "query": f"label_values({SELECTOR}, instance)",
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
            {"name": "cluster", "type": "constant"},
            NODE,
        ]
    },
    "panels": [PANEL],
}

BUCKETS = 'gpuwarden_decision_wait_seconds_bucket{job="gpuwarden-engine",cluster=~"$cluster"}'
LOKI = {"type": "loki", "uid": "logs"}
TABLE = {
    "type": "table",
    "targets": [PANEL["targets"][0] | {"instant": True}],
    "transformations": [{"id": "organize", "options": {"renameByName": {"user": "User"}}}],
}


def without(name: str) -> dict[str, Any]:
    """The board without this variable."""
    kept = [one for one in BOARD["templating"]["list"] if one["name"] != name]
    return BOARD | {"templating": {"list": kept}}


def changed(name: str, **values: object) -> dict[str, Any]:
    """The board with other values in this variable."""
    kept = [one | values if one["name"] == name else one for one in BOARD["templating"]["list"]]
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
        ("template-datasource", changed("datasource", query="loki")),
        ("template-unknown", without("cluster")),
        ("template-job", without("job")),
        ("template-instance", without("instance")),
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
        (
            "target-instance",
            target(expr=f"count by (gpu) ({SELECTOR})".replace(',instance=~"$node"', "")),
        ),
        ("target-cluster", target(expr=SELECTOR.replace('cluster=~"$cluster",', ""))),
        ("target-counter-agg", target(expr=f"sum({COUNTER})", legendFormat="all")),
        ("target-counter-agg", target(expr=f"sum by (le) ({BUCKETS})", legendFormat="{{le}}")),
        ("target-counter-agg", target(expr=f"rate({SELECTOR}[$__rate_interval])")),
        (
            "target-rate-interval",
            target(expr=f"rate({COUNTER}[5m])", legendFormat="all"),
        ),
        (
            "target-rate-interval",
            target(expr=f'rate({COUNTER[:-1]},instance!~"a(b)"}}[$__range])', legendFormat="all"),
        ),
        ("target-series", changed("node", multi=True)),
        ("target-count-values", target(expr=f'count_values by (uuid) ("gpu", {SELECTOR})')),
        ("target-column", panel(**TABLE)),
        ("target-instant", panel(type="table")),
        ("target-legend", target(legendFormat="")),
        ("target-legend", target(legendFormat="{{user}}")),
        ("target-legend", target(expr=f"sum by (uuid) ({SELECTOR})")),
        ("target-ref", panel(targets=PANEL["targets"] * 2)),
        ("target-logql", target(datasource=LOKI, expr="error")),
        ("target-logql-auto", target(datasource=LOKI, expr='rate({job_id="a"}[5m])')),
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


def test_rows_are_few_where_they_are_chosen_for_the_whole_range() -> None:
    """A fleet of 10,000 cards fits where topk chooses for the whole range, and nowhere else."""
    every = SELECTOR.replace("gpu_up", "gpu_temperature_celsius")
    several = changed("node", multi=True)

    def rules(expression: str) -> set[str]:
        shown = PANEL | {"targets": [PANEL["targets"][0] | {"expr": expression}]}
        return {one.rule for one in lint.check(several | {"panels": [shown]})}

    assert rules(f"topk(5, {every})") == {"target-series"}
    assert rules(f"{every} and on (uuid) topk(5, {every})") == {"target-series"}
    assert rules(f"{every} and on (uuid) topk(5, {every} @ end())") == set()
    assert rules(f"quantile by (gpu) (0.5, {every})") == set()


@pytest.mark.parametrize("uid", ["gpuwarden-x?var-node=a", "gpuwarden-y?var-nodes=a", "other"])
def test_links_lead_to_a_board_and_hand_on_what_it_has(uid: str) -> None:
    """A link to a board that is none of ours, or with a variable that it has not, is found."""
    boards = [
        panel(links=[{"url": f"/d/{uid}"}]),
        BOARD | {"uid": "gpuwarden-y"},
    ]
    found = [finding.rule for finding in lint.links(boards)]
    assert found == ([] if uid == "gpuwarden-x?var-node=a" else ["link-board"])


def test_an_exclusion_covers_what_it_names_and_no_more() -> None:
    """By rule, by board and by place; what is left empty is any."""
    finding = lint.Finding("panel-units", "gpuwarden-x", "T", "text")
    assert lint.Exclusion("panel-units", "why").covers(finding)
    assert lint.Exclusion("panel-units", "why", "gpuwarden-x", "T").covers(finding)
    assert not lint.Exclusion("panel-units", "why", "gpuwarden-y").covers(finding)
    assert not lint.Exclusion("panel-units", "why", place="U").covers(finding)
    assert not lint.Exclusion("panel-id", "why").covers(finding)


def test_an_exclusion_without_use_is_an_error() -> None:
    """What is mended takes its exclusion with it."""
    finding = lint.Finding("panel-units", "gpuwarden-x", "T", "text")
    excuse = lint.Exclusion("panel-units", "why")
    assert lint.unexcused([finding], [excuse]) == []
    (left,) = lint.unexcused([finding], [])
    assert "panel-units" in left
    (unused,) = lint.unexcused([], [excuse])
    assert "is not needed" in unused
