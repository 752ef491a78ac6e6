"""Checks of the built boards: Grafana's dashboard-linter in Python, with the house's own rules.

The names of the rules are those of the linter where it has one. Two of its rules are adapted: it
asks for variables `job` and `instance`; here the scrape job is a contract and the node a variable.
Run by the tests, or `python -m grafana.lint`.

An exclusion stands in lint.yaml with its reason; one that is not needed is an error itself.
"""

from __future__ import annotations

import functools
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

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpuwarden.catalogue import Metric

FOLDER = Path(__file__).parent
RULES = FOLDER.parent / "alerting" / "rules"

VALUES = {
    "$__rate_interval": "4m",
    "$__interval": "1m",
    "$__range_s": "21600",
    "$__range": "6h",
    "$node": "n1:9835",
    "$gpu": "0",
    "$user": "ana",
    "$team": "vision",
    "$job_id": "slurm-a-1-0",
    "$cluster": "east",
    "$rule": "idle-held",
}
"""What stands for each variable when an expression is parsed."""


COUNTERS_IN = frozenset({"rate", "increase", "irate", "resets", "changes"})
UNITS = frozenset(
    {"none", "short", "percentunit", "bytes", "Bps", "s", "h", "watt", "celsius", "hertz"}
)
"""Ids of Grafana's units that the boards use: a misspelt unit shows as its own text."""

SCRAPE_JOBS = {Source.EXPORTER: "gpuwarden", Source.ENGINE: "gpuwarden-engine"}
ANNOTATION_WINDOW = "2m"
"""Annotations are asked every minute: each event falls into one window, or two."""

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


@dataclass(frozen=True, slots=True)
class Selector:
    """A vector selector in an expression.

    Attributes:
        metric: its name.
        labels: label -> value of its matchers.
        call: the innermost function around it, or an empty string.
        window: text of its range, or an empty string.
    """

    metric: str
    labels: dict[str, str]
    call: str
    window: str


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
    yield from _layout(board, finding)
    for annotation in board["annotations"]["list"]:
        if annotation["datasource"]["uid"] != "${datasource}":
            yield finding("panel-datasource", "not ${datasource}", annotation["name"])
        for rule, text in _expression(annotation["expr"], ANNOTATION_WINDOW):
            yield finding(rule, text, annotation["name"])
    for panel in every_panel(board):
        if panel["type"] != "row":
            yield from _panel(panel, finding)


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


def _panel(panel: dict[str, Any], finding: Any) -> Iterator[Finding]:
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
    yield from _targets(panel, finding)


def _targets(panel: dict[str, Any], finding: Any) -> Iterator[Finding]:
    title = panel.get("title", "")
    refs = [target["refId"] for target in panel.get("targets", [])]
    if len(set(refs)) < len(refs):
        yield finding("target-ref", "two queries have one refId", title)
    for target in panel.get("targets", []):
        if target["datasource"]["uid"] != "${datasource}":
            yield finding("panel-datasource", "a query is not on ${datasource}", title)
        if target["datasource"]["type"] != "prometheus":
            yield finding("target-logql", "only Prometheus is checked here", title)
            continue
        if panel["type"] in {"stat", "bargauge", "table"} and not target.get("instant"):
            yield finding("target-instant", "shows one moment and asks for a range", title)
        # One moment sums up the whole range; a line needs the window that fits its step.
        window = "$__range" if target.get("instant") else "$__rate_interval"
        for rule, text in _expression(target["expr"], window):
            yield finding(rule, text, title)
        if panel["type"] in {
            "timeseries",
            "bargauge",
            "status-history",
            "state-timeline",
            "heatmap",
        }:
            legend = target.get("legendFormat", "")
            if not legend or "__auto" in legend:
                yield finding("target-legend", "a series without a name of its own", title)


def _expression(text: str, window: str) -> Iterator[tuple[str, str]]:
    """(rule, text) of what is wrong with one expression whose rates must be over `window`."""
    try:
        parsed = promql_parser.parse(substituted(text))
    except ValueError as error:
        yield "target-promql", str(error)
        return
    for name in sorted(calls(parsed) - FUNCTIONS):
        yield "target-function", f"Prometheus 2.42 has no {name}()"
    for selector in selectors(parsed):
        yield from _selector(selector)
    # The parser saw the variables' values: the windows themselves are in the text.
    for function, over in re.findall(r"\b(rate|increase|irate)\([^()]*\[([^\]]+)\]", text):
        if over != window:
            yield "target-rate-interval", f"{function} over {over}, not {window}"


def _selector(selector: Selector) -> Iterator[tuple[str, str]]:
    name = selector.metric
    if selector.labels.get("cluster") != VALUES["$cluster"]:
        yield "target-cluster", f"{name} lacks cluster=~'$cluster'"
    known = metric_of(name)
    if known is None and name not in recorded() | SERVERS:
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
        if known.type is MetricType.GAUGE and selector.call in {"rate", "increase", "irate"}:
            yield "target-counter-agg", f"{name} is no counter"


def _labels_of(metric: Metric) -> set[str]:
    """Labels of the metric's series; `le` is that of a histogram's buckets."""
    own = {"job", "instance", "cluster"}
    return {*metric.labels, *own} | ({"le"} if metric.type is MetricType.HISTOGRAM else set())


def substituted(text: str) -> str:
    """The expression with every variable replaced by a value."""
    for name in sorted(VALUES, key=len, reverse=True):
        text = text.replace(name, VALUES[name])
    return text


@functools.cache
def recorded() -> frozenset[str]:
    """Names of the recorded series, of every file of rules."""
    return frozenset(
        rule["record"]
        for path in sorted(RULES.glob("*.yml"))
        for group in yaml.safe_load(path.read_text())["groups"]
        for rule in group["rules"]
        if "record" in rule
    )


def selectors(node: Any, call: str = "") -> Iterator[Selector]:
    """Every vector selector below a node of promql_parser's tree."""
    if isinstance(node, promql_parser.VectorSelector):
        yield _read(node, call, "")
    elif isinstance(node, promql_parser.MatrixSelector):
        yield _read(node.vector_selector, call, str(node.range))
    else:
        inner = node.func.name if isinstance(node, promql_parser.Call) else call
        for child in _children(node):
            yield from selectors(child, inner)


def calls(node: Any) -> set[str]:
    """Names of the functions called below a node."""
    own = {node.func.name} if isinstance(node, promql_parser.Call) else set()
    return own.union(*(calls(child) for child in _children(node)))


def _read(node: Any, call: str, window: str) -> Selector:
    labels = {matcher.name: matcher.value for matcher in node.matchers.matchers}
    return Selector(node.name or "", labels, call, window)


def _children(node: Any) -> list[Any]:
    found = []
    for name in ("lhs", "rhs", "expr", "param"):
        child = getattr(node, name, None)
        if isinstance(child, promql_parser.Expr):
            found.append(child)
    if isinstance(node, promql_parser.Call):
        found += node.args
    return found


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


def report() -> list[str]:
    """What is wrong with the boards on disk, exclusions applied, unused exclusions included."""
    entries = yaml.safe_load((FOLDER / "lint.yaml").read_text())
    exclusions = [Exclusion(**entry) for entry in entries]
    findings = [
        finding
        for path in sorted((FOLDER / "dashboards").glob("*.json"))
        for finding in check(json.loads(path.read_text()))
    ]
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
