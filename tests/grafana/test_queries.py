"""Every query, variable and annotation of every board on a Prometheus with a generated day.

The day is of a fleet at work. Brief windows are of fleets of which something is wrong: absence must
be seen as absence there.
"""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING, Any

import promql_parser
import pytest
from grafana import expressions
from tests.grafana.asking import (
    BOARDS,
    CHOSEN,
    PANELS,
    TABLES,
    TARGETS,
    Target,
    ask,
    offered,
    target_of,
    value,
)
from tests.grafana.scenarios import (
    DEAD,
    ENGINE_DEAD,
    HEALTHY,
    NOBODY,
    ONE_DEAD,
    SCENARIOS,
    SCHEDULER_DEAD,
    Scenario,
)

from gpuwarden.catalogue import Source, metric_of

if TYPE_CHECKING:
    from tests.servers import Server

HOUR = "50m"
"""A shown time in which the engine is the same all along but for the middle of its last hour."""
MOST_SERIES = 100
"""More lines than this nobody reads, and no browser draws them fast."""

ALL = [pytest.param(Target(*panel, {}), id=f"{panel[0]}: {panel[1]['title']}") for panel in PANELS]


def targets(panel: Target) -> list[Target]:
    """Every query of a panel."""
    return [Target(panel.board, panel.panel, target) for target in panel.panel["targets"]]


def values(series: list[dict[str, Any]]) -> list[str]:
    """Every value of an answer."""
    return [pair[1] for one in series for pair in one.get("values", [one.get("value")])]


@pytest.mark.parametrize("panel", ALL)
def test_a_fleet_at_work_fills_every_panel(past: Server, panel: Target) -> None:
    """Each query answers, with a readable number of series that bear the labels of its legend."""
    for target in targets(panel):
        series = target.ask(past)
        assert 0 < len(series) <= MOST_SERIES, str(target)
        wanted = set(re.findall(r"\{\{(\w+)\}\}", target.target.get("legendFormat", "")))
        assert all(wanted <= set(one["metric"]) for one in series), str(target)
        assert not {"NaN", "+Inf", "-Inf"} & set(values(series)), str(target)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=[one.window.name for one in SCENARIOS])
def test_no_board_breaks_when_something_is_wrong(past: Server, scenario: Scenario) -> None:
    """Whatever is there or missing, every query still is one, and shows numbers or nothing."""
    for target in TARGETS:
        series = target.ask(past, scenario)
        assert len(series) <= MOST_SERIES, str(target)
        assert not {"NaN", "+Inf", "-Inf"} & set(values(series)), str(target)


@pytest.mark.parametrize(
    ("scenario", "source"),
    [(DEAD, Source.EXPORTER), (ENGINE_DEAD, Source.ENGINE), (SCHEDULER_DEAD, Source.SCHEDULER)],
    ids=["exporters", "engine", "scheduler"],
)
def test_a_figure_of_the_dead_is_no_figure(
    past: Server, scenario: Scenario, source: Source
) -> None:
    """What rests on nobody who lives is empty ("No data") or n/a, never a number or a calm nought.

    Sums over the shown time are of the past, and may be numbers.
    """
    seen = 0
    for target in TARGETS:
        expression = target.target["expr"]
        asked = {
            metric_of(found.metric)
            for found in expressions.selectors(
                promql_parser.parse(expressions.substituted(expression))
            )
            # asked whether the engine lives; of an exporter it can say that it does not
            if source is Source.EXPORTER or found.metric != "up"
        }
        dead = all(metric is not None and metric.source is source for metric in asked)
        if target.panel["type"] == "stat" and dead and "$__range" not in expression:
            seen += 1
            assert set(values(target.ask(past, scenario))) <= {"-1"}, str(target)
    assert seen


@pytest.mark.parametrize("panel", [panel for _, panel in TABLES], ids=lambda one: one["title"])
def test_columns_of_a_table_exist(past: Server, panel: dict[str, Any]) -> None:
    """Each column is a label of an answer, or the value of one of the queries."""
    have = set()
    for target in [one for one in TARGETS if one.panel is panel]:
        # the values of a lone query have no letter
        have |= {f"Value #{target.target['refId']}", "Value"}
        for row in target.ask(past):
            have |= set(row["metric"])
    organise = panel["transformations"][1]["options"]
    assert set(organise["renameByName"]) <= have


@pytest.mark.parametrize("panel", [panel for _, panel in TABLES], ids=lambda one: one["title"])
def test_rows_of_several_queries_merge(past: Server, panel: dict[str, Any]) -> None:
    """Every query has one row per key, and no label but the key that another query has too.

    Grafana merges two rows only if all the columns that they share are equal.
    """
    asked = [one for one in TARGETS if one.panel is panel]
    answers = [[row["metric"] for row in target.ask(past)] for target in asked]
    labels = [set().union(*answer) for answer in answers]
    assert "__name__" not in set().union(*labels)
    if len(answers) > 1:
        key = set.intersection(*labels)
        for one, other in itertools.combinations(labels, 2):
            assert one & other == key
        for answer in answers:
            keys = [tuple(row[label] for label in sorted(key)) for row in answer]
            assert len(set(keys)) == len(keys)


def test_one_node_and_one_user_can_be_chosen(past: Server) -> None:
    """With variables set, every query still is one, and shows no other node's or user's series."""
    for target in TARGETS:
        series = target.ask(past, node="n1:9835", user="cho")
        if "$node" in target.target["expr"]:
            nodes = {one["metric"].get("instance", "n1:9835") for one in series}
            assert nodes <= {"n1:9835"}, str(target)
        if "$user" in target.target["expr"]:
            assert {one["metric"].get("user", "cho") for one in series} <= {"cho"}, str(target)


OFFERED = {
    "cluster": [],
    "node": ["n1:9835", "n2:9835"],
    "gpu": ["0", "1", "2", "3"],
    "team": ["none", "robotics", "vision"],
    "user": ["ana", "ben", "cho", "dan", "eve"],
    "rule": ["idle-held", "memory-hog", "off-profile", "starved"],
    "job_id": ["j-ana-1", "j-ana-2", "j-ben", "j-cho", "j-dan", "j-eve"],
}


@pytest.mark.parametrize("board", BOARDS, ids=lambda one: one["uid"])
def test_variables_offer_what_is_there(past: Server, board: dict[str, Any]) -> None:
    """The drop-downs list nodes, teams, users and jobs; one cluster is nothing to choose from."""
    queries = [one for one in board["templating"]["list"] if one["type"] == "query"]
    found = {one["name"]: offered(past, one) for one in queries}
    assert found == {name: OFFERED[name] for name in found}


@pytest.mark.parametrize("board", BOARDS, ids=lambda one: one["uid"])
def test_annotations_mark_what_happened(past: Server, board: dict[str, Any]) -> None:
    """The hour's decision, restart and new rule set are marked where they were, and a job's own."""
    middle, chosen = HEALTHY.window.middle, CHOSEN.get(board["uid"])
    for annotation in board["annotations"]["list"]:
        wanted = set(re.findall(r"\{\{(\w+)\}\}", annotation["titleFormat"]))
        found = ask(past, annotation["expr"], instant=False, over=HOUR, chosen=chosen)
        assert found, annotation["name"]
        for series in found:
            assert wanted <= set(series["metric"])
            times = [int(time) for time, _ in series["values"]]
            assert middle <= times[0] <= times[-1] <= middle + 180


def test_figures_of_the_fleet_at_work(past: Server) -> None:
    """The top row says what the hour was made of."""

    def figure(title: str) -> list[float]:
        return value(past, title, over=HOUR)

    assert figure("GPUs") == [6]
    assert figure("Busy") == [4]
    assert figure("Held idle") == [1]
    assert figure("Unhealthy") == [0]
    assert figure("Dark nodes") == [0]
    assert figure("Jobs") == [5]
    assert figure("Flagged") == [3]
    assert figure("Alerts") == [0]
    assert figure("Idle jobs found") == [pytest.approx(1, rel=0.05)]
    assert figure("Reclaims not proven") == [0]


def test_open_cases_name_owner_and_cause_where_they_are_known(past: Server) -> None:
    """A case without a cause and one whose job is gone are listed like the others."""
    cases = {
        row["metric"]["job_id"]: (row["metric"].get("user"), row["metric"].get("cause"))
        for row in target_of("Open cases").ask(past)
    }
    assert cases == {
        "j-ben": ("ben", "idle"),
        "j-cho": ("cho", "data-loading"),
        "j-gone": (None, None),
    }


def test_lost_work_is_counted_by_team_and_in_money(past: Server) -> None:
    """Also of a counter that was born with it, and of a user whom no team has."""
    for title, price in (("GPU-hours lost", 1.0), ("Lost work in money", 2.5)):
        rows = target_of(title).ask(past, over=HOUR)
        found = {
            (row["metric"]["team"], row["metric"]["reason"]): float(row["value"][1]) for row in rows
        }
        # the last ten of fifteen minutes; what robotics lost at noon is not of this hour
        assert found == {
            ("robotics", "hold"): pytest.approx(2.0 * price * 600 / 900, rel=0.05),
            ("robotics", "requeue"): 0,
            ("none", "hold"): pytest.approx(0.5 * price * 600 / 900, rel=0.05),
        }


def test_nobody_there_is_zero(past: Server) -> None:
    """An idle fleet shows its cards and noughts, not an empty board."""
    assert value(past, "GPUs", "A", NOBODY) == [6]
    for title in ("Busy", "Held idle", "Jobs", "Flagged", "Alerts"):
        assert value(past, title, "A", NOBODY) == [0], title
    assert value(past, "Open cases", "A", NOBODY) == []


def test_dead_exporters_are_not_taken_for_a_calm_fleet(past: Server) -> None:
    """Without exporters figures of cards are empty ("No data"), nodes are dark, ages n/a."""
    for title in ("GPUs", "Busy", "Held idle", "Unhealthy", "Jobs"):
        assert value(past, title, "A", DEAD) == [], title
    assert value(past, "Dark nodes", "A", DEAD) == [2]
    assert value(past, "Flagged", "A", DEAD) == [3]
    assert value(past, "Nodes", "A", DEAD) == [3, 3]
    for ref in "BCDEF":
        assert value(past, "Nodes", ref, DEAD) == [-1, -1], ref


def test_one_dead_exporter_is_dark_among_the_lit(past: Server) -> None:
    """Its cards are missing from the sums, and it is counted and listed as dark."""
    assert value(past, "GPUs", "A", ONE_DEAD) == [2]
    assert value(past, "Dark nodes", "A", ONE_DEAD) == [1]
    assert sorted(value(past, "Nodes", "A", ONE_DEAD)) == [0, 3]
    assert sorted(value(past, "Nodes", "C", ONE_DEAD)) == [-1, 2]


def test_a_dead_engine_has_no_flagged_jobs_and_no_calm_either(past: Server) -> None:
    """What the engine alone knows is empty; the cards are as they were."""
    assert value(past, "Flagged", "A", ENGINE_DEAD) == []
    assert value(past, "Open cases", "A", ENGINE_DEAD) == []
    assert value(past, "GPUs", "A", ENGINE_DEAD) == [6]
