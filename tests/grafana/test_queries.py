"""Every query of every board on a real Prometheus that holds an hour of a fleet.

No Grafana server runs here. What Grafana would do with an expression is done by hand: variables are
replaced, stats and tables ask for one moment, graphs for a range.
"""

from __future__ import annotations

import itertools
import json
import re
import urllib.parse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from grafana import build
from tests.grafana import histories
from tests.servers import Server, prometheus

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

EVERYTHING = dict.fromkeys(("$cluster", "$node", "$gpu", "$team", "$user", "$job_id"), ".*")
RANGE = {"$__range": "50m", "$__rate_interval": "1m", "$__interval": "1m"}
MOST_SERIES = 100
"""More lines than this nobody reads, and no browser draws them fast."""


@dataclass(frozen=True)
class Target:
    """A query of a panel."""

    panel: dict[str, Any]
    target: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.panel['title']}: {self.target['refId']}"

    def ask(self, server: Server, variables: dict[str, str] | None = None) -> list[dict[str, Any]]:
        """The series that the panel gets."""
        return ask(
            server,
            self.target["expr"],
            instant=self.target.get("instant", False),
            **(variables or {}),
        )


BOARDS = [json.loads(path.read_text()) for path in sorted(build.FOLDER.glob("*.json"))]
PANELS = [panel for board in BOARDS for panel in board["panels"]]
TARGETS = [Target(panel, target) for panel in PANELS for target in panel["targets"]]
TABLES = [panel for panel in PANELS if panel["type"] == "table"]


def ask(
    server: Server, expression: str, *, instant: bool, **variables: str
) -> list[dict[str, Any]]:
    """The series of an expression with its variables replaced."""
    values = EVERYTHING | RANGE | variables
    for name in sorted(values, key=len, reverse=True):
        expression = expression.replace(name, values[name])
    assert "$" not in expression
    if instant:
        return server.query(expression, at=histories.END)
    words = {
        "query": expression,
        "start": histories.START + 600,
        "end": histories.END,
        "step": 60,
    }
    answer = server.json("/api/v1/query_range?" + urllib.parse.urlencode(words))
    result: list[dict[str, Any]] = answer["data"]["result"]
    return result


def value(server: Server, title: str, ref: str = "A") -> list[float]:
    """The values of one query of the panel with this title, at the end of the hour."""
    (target,) = [
        one for one in TARGETS if one.panel["title"] == title and one.target["refId"] == ref
    ]
    return [float(row["value"][1]) for row in target.ask(server)]


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_a_fleet_at_work_fills_every_panel(healthy: Server, target: Target) -> None:
    """Each query answers, with a readable number of series that bear the labels of its legend."""
    series = target.ask(healthy)
    assert 0 < len(series) <= MOST_SERIES
    wanted = set(re.findall(r"\{\{(\w+)\}\}", target.target.get("legendFormat", "")))
    assert all(wanted <= set(one["metric"]) for one in series)
    values = [pair[1] for one in series for pair in one.get("values", [one.get("value")])]
    assert "NaN" not in values
    assert "+Inf" not in values


@pytest.mark.parametrize("panel", TABLES, ids=[panel["title"] for panel in TABLES])
def test_columns_of_a_table_exist(healthy: Server, panel: dict[str, Any]) -> None:
    """Each column is a label of an answer, or the value of one of the queries."""
    have = set()
    for target in panel["targets"]:
        have |= {f"Value #{target['refId']}"}
        for row in Target(panel, target).ask(healthy):
            have |= set(row["metric"])
    organise = panel["transformations"][1]["options"]
    assert set(organise["renameByName"]) <= have


@pytest.mark.parametrize("panel", TABLES, ids=[panel["title"] for panel in TABLES])
def test_rows_of_several_queries_merge(healthy: Server, panel: dict[str, Any]) -> None:
    """Every query has one row per key, and no label but the key that another query has too.

    Grafana merges two rows only if all the columns that they share are equal.
    """
    answers = [
        [row["metric"] for row in Target(panel, target).ask(healthy)] for target in panel["targets"]
    ]
    labels = [set().union(*answer) for answer in answers]
    assert "__name__" not in set().union(*labels)
    if len(answers) > 1:
        key = set.intersection(*labels)
        for one, other in itertools.combinations(labels, 2):
            assert one & other == key
        for answer in answers:
            keys = [tuple(row[label] for label in sorted(key)) for row in answer]
            assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_one_node_and_one_user_can_be_chosen(healthy: Server, target: Target) -> None:
    """With variables set, every query still is one, and shows no other node's or user's series."""
    series = target.ask(healthy, {"$node": "n1:9835", "$user": "cho"})
    if "$node" in target.target["expr"]:
        assert {one["metric"].get("instance", "n1:9835") for one in series} <= {"n1:9835"}
    if "$user" in target.target["expr"]:
        assert {one["metric"].get("user", "cho") for one in series} <= {"cho"}


def test_variables_offer_what_is_there(healthy: Server) -> None:
    """The drop-downs list the nodes, teams and users; of one cluster there is nothing to choose."""
    offered = {}
    for variable in BOARDS[0]["templating"]["list"]:
        if variable["type"] == "query":
            match = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"])
            assert match is not None
            selector = match[1].replace("$node", ".*").replace("$cluster", ".*")
            words = {"match[]": selector, "start": histories.START, "end": histories.END}
            path = f"/api/v1/label/{match[2]}/values?{urllib.parse.urlencode(words)}"
            offered[variable["name"]] = healthy.json(path)["data"]
    assert offered == {
        "cluster": [],
        "node": ["n1:9835", "n2:9835"],
        "team": ["none", "robotics", "vision"],
        "user": ["ana", "ben", "cho", "eve"],
    }


def test_annotations_mark_what_happened(healthy: Server) -> None:
    """The hour's decision, restart and new rule set are marked, each once and where it was."""
    middle = (histories.START + histories.END) // 2
    for annotation in BOARDS[0]["annotations"]["list"]:
        (series,) = ask(healthy, annotation["expr"], instant=False)
        assert set(re.findall(r"\{\{(\w+)\}\}", annotation["titleFormat"])) <= set(series["metric"])
        first = min(float(time) for time, _ in series["values"])
        assert middle <= first <= middle + 120


def test_figures_of_the_fleet_at_work(healthy: Server) -> None:
    """The top row says what the hour was made of."""
    assert value(healthy, "GPUs") == [6]
    assert value(healthy, "Busy") == [4]
    assert value(healthy, "Held but idle") == [1]
    assert value(healthy, "Lost") == [0]
    assert value(healthy, "Dark nodes") == [0]
    assert value(healthy, "Jobs") == [5]
    assert value(healthy, "Flagged jobs") == [3]
    assert value(healthy, "Health alerts") == [0]
    assert value(healthy, "Idle jobs found") == [pytest.approx(1, rel=0.05)]
    assert value(healthy, "Reclaims not proven") == [0]


def test_open_cases_name_owner_and_cause_where_they_are_known(healthy: Server) -> None:
    """A case without a cause and one whose job is gone are listed like the others."""
    (target,) = [one for one in TARGETS if one.panel["title"] == "Open cases"]
    cases = {
        row["metric"]["job_id"]: (row["metric"].get("user"), row["metric"].get("cause"))
        for row in target.ask(healthy)
    }
    assert cases == {
        "j-ben": ("ben", "idle"),
        "j-cho": ("cho", "data-loading"),
        "j-gone": (None, None),
    }


def test_lost_work_is_counted_by_team_and_in_money(healthy: Server) -> None:
    """Also of a counter that was born with it, and of a user whom no team has."""
    for title, price in (("GPU-hours lost", 1.0), ("Lost work in money", 2.5)):
        (target,) = [one for one in TARGETS if one.panel["title"] == title]
        found = {row["metric"]["team"]: float(row["value"][1]) for row in target.ask(healthy)}
        # the last ten of fifteen minutes
        assert found == {
            "robotics": pytest.approx(2.0 * price * 600 / 900, rel=0.05),
            "none": pytest.approx(0.5 * price * 600 / 900, rel=0.05),
        }


def test_what_cannot_be_measured_is_not_a_number(healthy: Server) -> None:
    """A shared card without figures per process is -1 (n/a) in the grid, never 0."""
    (target,) = [one for one in TARGETS if one.panel["title"] == "Who holds which GPU"]
    last = {
        (one["metric"]["instance"], one["metric"]["gpu"], one["metric"]["user"]): one["values"][-1][
            1
        ]
        for one in target.ask(healthy)
    }
    assert last["n2:9835", "1", "eve"] == "-1"
    assert last["n1:9835", "1", "ben"] == "0"
    assert last["n1:9835", "2", "cho"] == "0.95"


def test_nobody_there_is_zero(
    tmp_path: Path, history_of: Callable[[Path, histories.History], None]
) -> None:
    """An idle fleet shows its cards and noughts, not an empty board."""
    history_of(tmp_path / "tsdb", histories.fleet(jobs=()))
    with prometheus("global: {}\n", tmp_path / "tsdb") as server:
        assert value(server, "GPUs") == [6]
        for title in ("Busy", "Held but idle", "Jobs", "Flagged jobs", "Health alerts"):
            assert value(server, title) == [0], title
        assert value(server, "Open cases") == []


def test_dead_exporters_are_not_taken_for_a_calm_fleet(
    tmp_path: Path, history_of: Callable[[Path, histories.History], None]
) -> None:
    """Without exporters figures of cards are empty ("No data"), nodes are dark, ages n/a."""
    history_of(tmp_path / "tsdb", histories.fleet(exporters_die=True))
    with prometheus("global: {}\n", tmp_path / "tsdb") as server:
        for title in ("GPUs", "Busy", "Held but idle", "Lost", "Jobs"):
            assert value(server, title) == [], title
        assert value(server, "Dark nodes") == [2]
        assert value(server, "Flagged jobs") == [3]
        assert value(server, "Nodes", "A") == [0, 0]
        for ref in "BCDE":
            assert value(server, "Nodes", ref) == [-1, -1], ref
