"""What every board shares: its variables, annotations and links, and how it is put together.

A board is a module with a function `board`, named in `grafana.build.BOARDS`. A variable has one
name on all boards, so that a choice travels with the links between them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    VariableHide,
    VariableRefresh,
    VariableSort,
)

from grafana import sites
from grafana.panels import BLUE, ORANGE, RED, SOURCE
from grafana.selectors import CLUSTER, ENDS, ENGINE, NODE, RECORDED

if TYPE_CHECKING:
    from collections.abc import Sequence

TAG = "gpuwarden"
"""On every board; the drop-down of boards lists what carries it."""


def begin(
    name: str, description: str, *, variables: Sequence[object], hours: int = 6
) -> dashboard.Dashboard:
    """An empty board.

    Args:
        name: word of the title and, in lower case, of the uid: `Fleet` is `gpuwarden-fleet`.
        description: the question that the board answers.
        variables: what a reader can choose, from the functions below; the data source, the cluster
            and the engine's address are on every board.
        hours: shown at first.
    """
    board = (
        dashboard.Dashboard(f"gpuwarden / {name}")
        .uid(f"gpuwarden-{name.lower()}")
        .description(description)
        .tags([TAG])
        .readonly()
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .time(f"now-{hours}h", "now")
        .refresh("30s")
        .timezone("browser")
        .link(
            dashboard.DashboardLink("gpuwarden")
            .type(DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .as_dropdown(as_dropdown=True)
            .include_vars(include_vars=True)
            .keep_time(keep_time=True)
        )
    )
    for variable in (_source(), _clusters(), *variables, _engine()):
        board = board.with_variable(variable)
    for annotation in _annotations():
        board = board.annotation(annotation)
    return board


def add(board: dashboard.Dashboard, panels: Sequence[object], title: str = "") -> None:
    """Put panels below what the board has; a `title` makes a heading of its own above them."""
    if title:
        board.with_row(dashboard.Row(title))
    for panel in panels:
        board.with_panel(panel)


def add_folded(board: dashboard.Dashboard, title: str, panels: Sequence[object]) -> None:
    """Put panels under a heading that is folded: Grafana asks their queries when it is opened."""
    row = dashboard.Row(title)
    for panel in panels:
        row.with_panel(panel)
    board.with_row(row)


def nodes(*, single: bool = False) -> object:
    """`node`: scrape targets, for what `instance` stands in the queries; `single` allows one."""
    return _labels(
        "node",
        "Node",
        f'label_values(gpuwarden_nvml_up{{job="gpuwarden",{CLUSTER}}}, instance)',
        # they come and go rarely, and a list that reloads flickers while one chooses
        refresh=VariableRefresh.ON_DASHBOARD_LOAD,
        single=single,
    )


def gpus() -> object:
    """`gpu`: numbers of the cards of the chosen nodes."""
    return _labels("gpu", "GPU", f"label_values(gpu_up{{{NODE}}}, gpu)")


def teams() -> object:
    """`team`: those whose users run jobs; `none` is of users whom the directory does not know."""
    return _labels("team", "Team", f"label_values(user:team:info{{{RECORDED}}}, team)")


def users() -> object:
    """`user`: who runs jobs on the chosen nodes."""
    return _labels("user", "User", f"label_values(gpu_job_info{{{NODE}}}, user)")


def job_ids(*, single: bool = False) -> object:
    """`job_id`: jobs of the shown time; `single` allows one and offers no "All"."""
    definition = f'label_values(gpu_job_info{{job="gpuwarden",{CLUSTER}}}, job_id)'
    return _labels("job_id", "Job", definition, single=single)


def rules() -> object:
    """`rule`: those that judge."""
    definition = f"label_values(gpuwarden_verdicts_total{{{ENGINE}}}, rule)"
    return _labels("rule", "Rule", definition)


def _source() -> object:
    return dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")


def _clusters() -> object:
    hide = VariableHide.DONT_HIDE if sites.SEVERAL_CLUSTERS else VariableHide.HIDE_VARIABLE
    variable = _labels(
        "cluster",
        "Cluster",
        'label_values(gpuwarden_nvml_up{job="gpuwarden"}, cluster)',
        refresh=VariableRefresh.ON_DASHBOARD_LOAD,
    )
    # joins are by instance, which two clusters may have in common: one at a time, or all
    return variable.multi(multi=False).hide(hide)


def _engine() -> object:
    return (
        dashboard.ConstantVariable("engine")
        .description("Address of the engine's pages, as a browser reaches them.")
        .value(sites.ENGINE)
    )


def _labels(
    name: str,
    title: str,
    definition: str,
    *,
    refresh: VariableRefresh = VariableRefresh.ON_TIME_RANGE_CHANGED,
    single: bool = False,
) -> Any:
    variable = (
        dashboard.QueryVariable(name)
        .label(title)
        .datasource(SOURCE)
        .query(definition)
        .refresh(refresh)
        .sort(VariableSort.NATURAL_ASC)
    )
    if single:
        return variable
    return variable.multi(multi=True).include_all(include_all=True).all_value(".*")


def annotation(name: str, colour: str, expression: str, title: str) -> dashboard.AnnotationQuery:
    """Marks on every graph of a board, at the moments at which an expression has series."""
    return (
        dashboard.AnnotationQuery()
        .name(name)
        .datasource(SOURCE)
        .enable(enable=True)
        .icon_color(colour)
        .expr(expression)
        .step("60s")
        .title_format(title)
    )


def _annotations() -> tuple:
    return (
        annotation(
            "Decisions",
            RED,
            "sum by (rule, action, outcome) "
            f"(increase(gpuwarden_decisions_total{{{ENGINE},{ENDS}}}[2m])) > 0",
            "{{action}} by {{rule}}: {{outcome}}",
        ),
        # not by changes(): an engine that was away for longer than the window shows none
        annotation(
            "Engine starts",
            ORANGE,
            "max by (instance) (time() - "
            f"gpuwarden_engine_start_timestamp_seconds{{{ENGINE}}}) < 120",
            "engine {{instance}} started",
        ),
        annotation(
            "Rule sets",
            BLUE,
            f"max by (hash) (gpuwarden_rules_info{{{ENGINE}}}) unless on (hash) "
            f"max by (hash) (gpuwarden_rules_info{{{ENGINE}}} offset 2m)",
            "rules {{hash}} in force",
        ),
    )
