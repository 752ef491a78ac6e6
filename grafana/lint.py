"""Checks of the built boards: Grafana's dashboard-linter in Python, with the house's own rules.

The names of the rules are those of the linter where it has one, and each holds for every type of
panel. Two are adapted: it asks for variables `job` and `instance`; here the scrape job is a
contract and the node a variable. Run by the tests, or `python -m grafana.lint`.

An exclusion stands in lint.yaml with its reason; one that is not needed is an error itself.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import promql_parser
import yaml

from gpuwarden.catalogue import MetricType, Source, metric_of
from gpuwarden.ruleengine.expressions import FUNCTIONS
from grafana.answers import Answer, answer, badly_counted
from grafana.expressions import VALUES, Selector, calls, recorded, selectors, substituted, walk

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpuwarden.catalogue import Metric

FOLDER = Path(__file__).parent

MOST_SERIES = 100
"""More lines or rows nobody reads, and no browser draws them fast; in a fleet of 10,000 cards."""

COUNTERS_IN = frozenset({"rate", "increase", "irate", "resets", "changes"})
UNITS = frozenset(
    {"none", "short", "percentunit", "bytes", "Bps", "s", "h", "watt", "celsius", "hertz"}
)
"""Ids of Grafana's units that the boards use: a misspelt unit shows as its own text."""

SCRAPE_JOBS = {
    Source.EXPORTER: "gpuwarden",
    Source.ENGINE: "gpuwarden-engine",
    Source.SCHEDULER: "gpuwarden-scheduler",
}
WINDOWS = {name: float(VALUES[name].removesuffix("s")) for name in ("$__range", "$__rate_interval")}
ANNOTATION_WINDOW = "2m"
"""Annotations are asked every minute: each event falls into one window, or two."""

RATES = frozenset({"rate", "increase", "irate"})

MOMENTS = frozenset({"stat", "gauge", "bargauge", "table"})
LEGENDS = frozenset(
    {
        "timeseries",
        "bargauge",
        "barchart",
        "piechart",
        "status-history",
        "state-timeline",
        "heatmap",
    }
)
"""Types of panels that show the names of series."""

SERVERS = frozenset({"up", "ALERTS"})
"""Series that Prometheus itself makes."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        rule: name of the check.
        board: uid of the board.
        place: title of the panel, name of the variable or annotation, or empty for the board.
        text: what is wrong.
    """

    rule: str
    board: str
    place: str
    text: str

    def __str__(self) -> str:
        return f"{self.board}: {self.place or 'board'}: {self.rule}: {self.text}"


def check(board: dict[str, Any]) -> Iterator[Finding]:
    """Every finding of one board (classic JSON)."""
    uid = board.get("uid", "")

    def finding(rule: str, text: str, place: str = "") -> Finding:
        return Finding(rule, uid, place, text)

    if board.get("editable", True):
        yield finding("uneditable", "editable must be false: the code is the source")
    if not re.fullmatch(r"gpuwarden-[a-z]+", uid):
        yield finding("board-uid", f"{uid!r} is not gpuwarden-<name>")
    if "gpuwarden" not in board.get("tags", []):
        yield finding("board-tag", "lacks the tag by which boards find each other")
    yield from _variables(board, finding)
    yield from _names(board, finding)
    yield from _layout(board, finding)
    for annotation in board["annotations"]["list"]:
        if annotation["datasource"]["uid"] != "${datasource}":
            yield finding("panel-datasource", "not ${datasource}", annotation["name"])
        for rule, text in _expression(annotation["expr"], ANNOTATION_WINDOW):
            yield finding(rule, text, annotation["name"])
    for panel in every_panel(board):
        if panel["type"] != "row":
            yield from _panel(panel, single(board), finding)


def single(board: dict[str, Any]) -> frozenset[str]:
    """Variables of the board that allow one choice, and always have one."""
    return frozenset(
        f"${one['name']}"
        for one in board["templating"]["list"]
        if one["type"] == "query" and not one.get("multi") and not one.get("includeAll")
    )


def every_panel(board: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Headings and panels, also those under a folded heading."""
    for panel in board["panels"]:
        yield panel
        yield from panel.get("panels", [])


def _variables(board: dict[str, Any], finding: Any) -> Iterator[Finding]:
    variables = {one["name"]: one for one in board["templating"]["list"]}
    source = variables.get("datasource", {})
    if (source.get("type"), source.get("query")) != ("datasource", "prometheus"):
        yield finding("template-datasource", "no variable `datasource` of type prometheus")
    for name in ("job", "instance"):
        if name not in variables:
            yield finding(f"template-{name}", f"no variable `{name}`")
    for name, variable in variables.items():
        if variable["type"] != "query":
            continue
        if variable["datasource"]["uid"] != "${datasource}":
            yield finding("panel-datasource", "not ${datasource}", name)
        if variable.get("refresh") != 2:
            yield finding("template-on-time-change-reload", "refresh is not 2", name)
        query = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"])
        if query is None:
            yield finding("template-label-promql", "is not label_values(<selector>, <label>)", name)
            continue
        for rule, text in _listed(query[1]):
            yield finding(rule, text, name)


def _names(board: dict[str, Any], finding: Any) -> Iterator[Finding]:
    """Variables that are used and not declared: Grafana would leave their names in the query."""
    declared = {one["name"] for one in board["templating"]["list"]}
    used = set(re.findall(r"\$\{?([a-zA-Z]\w*)", json.dumps(board)))
    for name in sorted(used - declared):
        yield finding("template-unknown", f"${name} is used, and no variable of the board")


def _listed(selector: str) -> Iterator[tuple[str, str]]:
    """(rule, text) of what is wrong with a selector whose labels are listed, not its values."""
    for rule, text in _expression(selector, ""):
        if rule != "target-counter-agg":
            yield rule.replace("target-promql", "template-label-promql"), text


def _layout(board: dict[str, Any], finding: Any) -> Iterator[Finding]:
    for number, count in Counter(panel.get("id") for panel in every_panel(board)).items():
        if count > 1 or number is None:
            yield finding("panel-id", f"{count} panels have the id {number}")
    taken: dict[tuple[int, int], str] = {}
    for panel in every_panel(board):
        place = panel["gridPos"]
        if place["x"] + place["w"] > 24:
            yield finding("panel-grid", "reaches beyond the 24 columns", panel["title"])
        cells = [
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        ]
        over = {taken[cell] for cell in cells if cell in taken}
        if over:
            yield finding("panel-grid", f"lies on {', '.join(sorted(over))}", panel["title"])
        taken |= dict.fromkeys(cells, panel["title"])


def _panel(panel: dict[str, Any], chosen: frozenset[str], finding: Any) -> Iterator[Finding]:
    title = panel.get("title", "")
    if not title or not panel.get("description"):
        yield finding("panel-title-description", "lacks a title or a description", title)
    if panel["type"] == "text":
        return
    if panel.get("datasource", {}).get("uid") != "${datasource}":
        yield finding("panel-datasource", "not ${datasource}", title)
    defaults = panel["fieldConfig"]["defaults"]
    units = [defaults.get("unit")] + [
        one["value"]
        for override in panel["fieldConfig"]["overrides"]
        for one in override["properties"]
        if one["id"] == "unit"
    ]
    for unit in units:
        if unit not in UNITS:
            yield finding("panel-units", f"{unit!r} is not a unit that the boards use", title)
    if not panel.get("targets"):
        yield finding("panel-no-targets", "asks nothing", title)
    yield from _targets(panel, chosen, finding)


def _targets(panel: dict[str, Any], chosen: frozenset[str], finding: Any) -> Iterator[Finding]:
    title = panel.get("title", "")
    refs = [target["refId"] for target in panel.get("targets", [])]
    if len(set(refs)) < len(refs):
        yield finding("target-ref", "two queries have one refId", title)
    answers = []
    for target in panel.get("targets", []):
        if target["datasource"]["type"] == "loki":
            for rule, text in _logql(target["expr"]):
                yield finding(rule, text, title)
            continue
        if target["datasource"]["uid"] != "${datasource}":
            yield finding("panel-datasource", "a query is not on ${datasource}", title)
        instant = bool(target.get("instant"))
        if panel["type"] in MOMENTS and not instant:
            yield finding("target-instant", "shows one moment and asks for a range", title)
        # One moment sums up the whole range; a line needs the window that fits its step.
        wrong = list(_expression(target["expr"], "$__range" if instant else "$__rate_interval"))
        for rule, text in wrong:
            yield finding(rule, text, title)
        if not {"target-promql", "target-metric"} & {rule for rule, _ in wrong}:
            tree = promql_parser.parse(substituted(target["expr"]))
            answers.append((target, answer(tree, chosen, ranged=not instant)))
    for rule, text in _answers(panel, answers):
        yield finding(rule, text, title)


def _answers(
    panel: dict[str, Any], answers: list[tuple[dict[str, Any], Answer]]
) -> Iterator[tuple[str, str]]:
    """Whether the panel stays readable in a large fleet, and the labels that it names are there."""
    for target, given in answers:
        if panel["type"] in LEGENDS:
            yield from _legend(target.get("legendFormat", ""), given)
        if given.most > MOST_SERIES:
            yield "target-series", f"up to {given.most} series by {sorted(given.labels)}"
    columns = {
        name
        for one in panel.get("transformations", [])
        if one["id"] == "organize"
        for name in one["options"].get("renameByName", {})
        if not name.startswith("Value")
    }
    for name in sorted(columns - {label for _, given in answers for label in given.labels}):
        yield "target-column", f"no series has the label {name} of a column"


def _legend(legend: str, given: Answer) -> Iterator[tuple[str, str]]:
    if not legend or "__auto" in legend:
        yield "target-legend", "a series without a name of its own"
    for label in re.findall(r"\{\{\s*(\w+)\s*\}\}", legend):
        if label not in given.labels:
            yield "target-legend", f"no series has the label {label} of the legend"


def _logql(text: str) -> Iterator[tuple[str, str]]:
    """What can be seen of a Loki query without its parser."""
    if not re.search(r'\{[^{}]*\w+\s*(=|=~|!=|!~)\s*"[^{}]*\}', text):
        yield "target-logql", "selects no stream"
    for window in re.findall(r"\[([^\]]+)\]", text):
        if window != "$__auto":
            yield "target-logql-auto", f"over {window}, not $__auto"


def _expression(text: str, window: str) -> Iterator[tuple[str, str]]:
    """(rule, text) of what is wrong with one expression whose rates must be over `window`."""
    try:
        parsed = promql_parser.parse(substituted(text))
    except ValueError as error:
        yield "target-promql", str(error)
        return
    for name in sorted(calls(parsed) - FUNCTIONS):
        yield "target-function", f"Prometheus 2.42 has no {name}()"
    for label in badly_counted(parsed):
        yield "target-count-values", f"{label} must sort after the labels that are grouped by"
    for selector in selectors(parsed):
        yield from _selector(selector)
    wanted = WINDOWS.get(window, 120.0)
    for node in walk(parsed):
        rate = isinstance(node, promql_parser.Call) and node.func.name in RATES
        if rate and node.args[0].range.total_seconds() != wanted:
            yield "target-rate-interval", f"{node.func.name} is not over {window}"


def _selector(selector: Selector) -> Iterator[tuple[str, str]]:
    name = selector.metric
    if selector.labels.get("cluster") != VALUES["$cluster"]:
        yield "target-cluster", f"{name} lacks cluster=~'$cluster'"
    known = metric_of(name)
    if known is None and name not in {*recorded(), *SERVERS}:
        yield "target-metric", f"{name} is neither in the catalogue nor recorded"
        return
    if known is not None:
        for label in sorted(set(selector.labels) - _labels_of(known)):
            yield "target-label", f"{name} has no label {label}"
        if selector.labels.get("job") != SCRAPE_JOBS[known.source]:
            yield "target-job", f"{name} lacks job={SCRAPE_JOBS[known.source]!r}"
        if known.source is Source.EXPORTER and selector.labels.get("instance") != VALUES["$node"]:
            yield "target-instance", f"{name} lacks instance=~'$node'"
        if known.type is not MetricType.GAUGE and selector.call not in COUNTERS_IN:
            yield "target-counter-agg", f"{name} only grows, and is not in a rate or increase"
        if known.type is MetricType.GAUGE and selector.call in RATES:
            yield "target-counter-agg", f"{name} is no counter"


def _labels_of(metric: Metric) -> set[str]:
    """Labels of the metric's series; `le` is that of a histogram's buckets."""
    own = {"job", "instance", "cluster"}
    return {*metric.labels, *own} | ({"le"} if metric.type is MetricType.HISTOGRAM else set())


@dataclass(frozen=True, slots=True)
class Exclusion:
    """A finding that is meant to be so.

    Attributes:
        rule: name of the check.
        reason: why.
        board: uid of the board; empty excludes it on all of them.
        place: as in `Finding`; empty excludes the whole board.
    """

    rule: str
    reason: str
    board: str = ""
    place: str = ""

    def covers(self, finding: Finding) -> bool:
        """Whether it excludes this finding."""
        return (
            self.rule == finding.rule
            and self.board in {"", finding.board}
            and self.place in {"", finding.place}
        )


def links(boards: list[dict[str, Any]]) -> Iterator[Finding]:
    """Links to a board that is none of these, or that hand on a variable which it has not."""
    variables = {
        board["uid"]: {one["name"] for one in board["templating"]["list"]} for board in boards
    }
    for board in boards:
        found = re.findall(r"/d/([\w-]+)([^\s\"']*)", json.dumps(board).replace('\\"', ""))
        for uid, rest in sorted(set(found)):
            if uid not in variables:
                yield Finding("link-board", board["uid"], "", f"there is no board {uid}")
                continue
            for name in re.findall(r"var-(\w+)=", rest):
                if name not in variables[uid]:
                    yield Finding("link-board", board["uid"], "", f"{uid} has no variable {name}")


def report() -> list[str]:
    """What is wrong with the boards on disk, exclusions applied, unused exclusions included."""
    entries = yaml.safe_load((FOLDER / "lint.yaml").read_text())
    boards = [json.loads(path.read_text()) for path in sorted(FOLDER.glob("dashboards/*.json"))]
    findings = [finding for board in boards for finding in check(board)] + list(links(boards))
    return unexcused(findings, [Exclusion(**entry) for entry in entries])


def unexcused(findings: list[Finding], exclusions: list[Exclusion]) -> list[str]:
    """Findings that no exclusion covers, and exclusions that cover none."""
    left = [str(one) for one in findings if not any(mark.covers(one) for mark in exclusions)]
    unused = [mark for mark in exclusions if not any(mark.covers(one) for one in findings)]
    return left + [
        f"lint.yaml: the exclusion of {mark.rule} {mark.board} {mark.place} is not needed"
        for mark in unused
    ]


if __name__ == "__main__":
    wrong = report()
    print("\n".join(wrong) or "no findings")
    sys.exit(1 if wrong else 0)
