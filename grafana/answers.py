"""What an expression answers: which labels its series have, and how many there are at most.

Nothing is asked: labels come from the catalogue and from the recording rules, numbers from the size
of the fleet that the boards are made for. The number is an upper bound: an expression is not blamed
for labels that depend on one another, as a card's number on its uuid.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import promql_parser

from gpuwarden.catalogue import MetricType, metric_of
from grafana.expressions import VALUES, recorded, walk

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

FLEET = MappingProxyType(
    {
        "instance": 1_250, "gpu": 8, "uuid": 10_000, "mig_uuid": 10_000, "pid": 20_000,
        "job_id": 10_000, "run_id": 10_000, "user": 1_000, "team": 60, "project": 500,
        "rule": 40, "level": 3, "cause": 8, "reason": 8, "action": 6, "mode": 3, "outcome": 8,
        "currency": 3, "model": 12, "name": 12, "job": 1, "cluster": 1, "le": 16, "collector": 12,
        "alertname": 40, "node": 1_250, "window": 3,
    }
)  # fmt: skip
"""Different values of each label in a fleet of 10,000 cards; of others `OTHERS`."""

OTHERS = 8

NARROW: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        # one node, which MIG may have cut into seven instances a card
        "$node": {"instance": 1, "node": 1, "uuid": 56, "mig_uuid": 56, "job_id": 56, "user": 56,
                  "pid": 500, "run_id": 56},
            # one job over some nodes, of which few rules have a case
        "$job_id": {"job_id": 1, "run_id": 1, "user": 1, "team": 1, "project": 1, "instance": 8,
                    "uuid": 64, "pid": 500, "rule": 5},
    }
)  # fmt: skip
"""Likewise where the board's variable allows one choice."""

OWNERS = MappingProxyType(
    {
        "pid": {"instance", "gpu", "uuid", "job_id", "user"},
        "mig_uuid": {
            "instance", "gpu", "uuid", "name", "gpu_instance_id", "compute_instance_id", "profile",
        },
        "uuid": {"instance", "gpu", "name", "model", "driver_version", "simulated", "pci_bus_id"},
        "instance": {"driver_version", "simulated"},
        "job_id": {"user", "team", "project", "run_id", "framework", "interactive", "source"},
        "user": {"team"},
        "node": {"result"},
    }
)  # fmt: skip
"""Labels that another one decides."""

SERVERS = MappingProxyType(
    {
        "up": frozenset({"job", "instance"}),
        "ALERTS": frozenset({"alertname", "alertstate", "severity", "service", "instance"}),
    }
)
"""Labels of the series that Prometheus itself makes."""

NOTHING_NEW = frozenset({"and", "unless"})


@dataclass(frozen=True)
class Answer:
    """The series of an expression.

    Attributes:
        labels: that they may have.
        most: how many there are at most at one moment.
        sizes: different values of a label at most, where it differs from the fleet's.
        steady: whether it is the same at every moment of a range.
        scalar: whether it is a number without labels, and no series.
    """

    labels: frozenset[str]
    most: int
    sizes: Mapping[str, int]
    steady: bool = False
    scalar: bool = False

    def size(self, label: str) -> int:
        """Different values of a label."""
        return min(self.sizes.get(label, FLEET.get(label, OTHERS)), max(1, self.most))

    def combinations(self, labels: Iterable[str], given: Iterable[str] = ()) -> int:
        """Different values of several labels together, for each of those given."""
        kept = {*labels, *given}
        for label, decided in OWNERS.items():
            if label in kept:
                kept -= decided
        kept -= set(given)
        of_node = NARROW["$node"] if "instance" in given else {}

        def size(label: str) -> int:
            return min(self.size(label), of_node.get(label, 10**9))

        cards = kept & {"instance", "gpu", "uuid"}
        if "job_id" in kept and cards:
            # a job has few cards and a card few jobs: not every job has every card
            held = size("job_id") + math.prod(size(label) for label in cards) - 1
            return held * math.prod(size(label) for label in kept - cards - {"job_id"})
        return math.prod(size(label) for label in kept)

    def by(self, labels: Iterable[str]) -> Answer:
        """The same with these labels alone."""
        kept = self.labels & set(labels)
        return replace(self, labels=kept, most=min(self.most, self.combinations(kept)))


def answer(node: Any, single: frozenset[str] = frozenset(), *, ranged: bool = True) -> Answer:
    """What an expression answers.

    Args:
        node: its tree.
        single: the board's variables that allow one choice, with their dollar.
        ranged: whether it is asked over a range, where `topk` chooses anew at each moment.
    """
    return _Reader(single, ranged=ranged).read(node)


class _Reader:
    def __init__(self, single: frozenset[str], *, ranged: bool) -> None:
        self._single, self._ranged = single, ranged

    def read(self, node: Any) -> Answer:
        for kind, reader in (
            (promql_parser.VectorSelector, self._selector),
            (promql_parser.AggregateExpr, self._aggregate),
            (promql_parser.BinaryExpr, self._binary),
            (promql_parser.Call, self._call),
        ):
            if isinstance(node, kind):
                return reader(node)
        if isinstance(node, promql_parser.MatrixSelector):
            return self._selector(node.vector_selector)
        if _is_literal(node):
            return _NUMBER
        inner = self.read(node.expr)
        steady = isinstance(node, promql_parser.SubqueryExpr) and node.at is not None
        return replace(inner, steady=inner.steady or steady)

    def _selector(self, node: Any) -> Answer:
        whole = _series(node.name or "")
        sizes = dict(whole.sizes)
        for matcher in node.matchers.matchers:
            operator, value = str(matcher.op), matcher.value
            variable = next((name for name, text in VALUES.items() if text == value), None)
            if variable in self._single:
                sizes |= NARROW.get(variable, {matcher.name: 1})
            elif operator == "MatchOp.Equal":
                sizes[matcher.name] = 1
            elif operator == "MatchOp.Re" and variable is None and value.replace("|", "").isalnum():
                sizes[matcher.name] = value.count("|") + 1
        narrowed = replace(whole, sizes=sizes, steady=node.at is not None)
        return narrowed.by(narrowed.labels)

    def _aggregate(self, node: Any) -> Answer:
        inner, operator = self.read(node.expr), str(node.op)
        modifier = node.modifier
        named = set(modifier.labels) if modifier is not None else set()
        without = modifier is not None and modifier.type == promql_parser.AggModifierType.Without
        groups = inner.by(inner.labels - named if without else named)
        if operator in {"topk", "bottomk"}:
            count = int(getattr(node.param, "val", 1)) * groups.most
            chosen = inner.steady or not self._ranged
            return replace(inner, most=min(inner.most, count) if chosen else inner.most)
        if operator == "count_values":
            return replace(inner, labels=groups.labels | {node.param.val})
        return groups

    def _binary(self, node: Any) -> Answer:
        left, right, operator = self.read(node.lhs), self.read(node.rhs), str(node.op)
        if right.scalar or left.scalar:
            return right if left.scalar else left
        steady = left.steady and right.steady
        if operator == "or":
            sizes = {
                label: max(left.size(label), right.size(label))
                for label in left.labels | right.labels
            }
            whole = Answer(left.labels | right.labels, left.most + right.most, sizes, steady)
            # what both sides have is there once
            return whole.by(whole.labels)
        modifier = node.modifier
        on = _matched(modifier, left.labels)
        if operator in NOTHING_NEW:
            if operator == "unless":
                return replace(left, steady=steady)
            most = min(left.most, right.most * left.combinations(left.labels, on))
            sizes = {**left.sizes, **{label: min(left.size(label), right.most) for label in on}}
            return replace(left, most=most, sizes=sizes, steady=steady)
        card = str(modifier.card) if modifier is not None else "OneToOne"
        if card.endswith(("ManyToOne", "OneToMany")):
            many, one = (left, right) if card.endswith("ManyToOne") else (right, left)
            labels = many.labels | set(modifier.group_labels or ())
            return Answer(labels, many.most, {**one.sizes, **many.sizes}, steady)
        both = replace(left, most=min(left.most, right.most), steady=steady)
        return both.by(on) if modifier is not None and modifier.matching is not None else both

    def _call(self, node: Any) -> Answer:
        name = node.func.name
        if name in {"time", "pi", "scalar"}:
            return _NUMBER
        if name in {"vector", "absent", "absent_over_time"}:
            return Answer(frozenset(), 1, {})
        inner = self.read(next(arg for arg in node.args if not _is_literal(arg)))
        if name in {"label_replace", "label_join"}:
            label = node.args[1].val
            sizes = {**inner.sizes, label: max(1, inner.most)}
            return replace(inner, labels=inner.labels | {label}, sizes=sizes)
        if name == "histogram_quantile":
            return inner.by(inner.labels - {"le"})
        return inner


_NUMBER = Answer(frozenset(), 1, {}, steady=True, scalar=True)


def _is_literal(node: Any) -> bool:
    return isinstance(node, promql_parser.NumberLiteral | promql_parser.StringLiteral)


def _matched(modifier: Any, labels: frozenset[str]) -> frozenset[str]:
    """Labels that two sides are matched on."""
    if modifier is None or modifier.matching is None:
        return labels
    named = frozenset(modifier.matching.labels)
    include = modifier.matching.type == promql_parser.LabelModifierType.Include
    return named if include else labels - named


@functools.cache
def _series(name: str) -> Answer:
    """Every series of a metric, or of a recording rule."""
    if name in recorded():
        tree = promql_parser.parse(recorded()[name])
        # rules are asked for one moment each time
        found = answer(tree, ranged=False)
        return replace(found, labels=found.labels - {"job"}, steady=False)
    metric = metric_of(name)
    if metric is None:
        labels = SERVERS.get(name, frozenset())
    else:
        bucket = {"le"} if metric.type is MetricType.HISTOGRAM and name.endswith("_bucket") else ()
        labels = frozenset({*metric.labels, "job", "instance", *bucket})
        if metric.source.value == "engine":
            return _of_engine(labels)
    whole = Answer(labels, 10**9, {})
    return whole.by(labels)


def _of_engine(labels: frozenset[str]) -> Answer:
    """Series of an engine: there is one."""
    whole = Answer(labels, 10**9, {"instance": 1})
    return whole.by(labels)


def badly_counted(node: Any) -> Iterable[str]:
    """Labels of `count_values` that sort before one that it groups by.

    Over a range Prometheus 2.42 then loses the last of those, from the second moment on.
    """
    for one in walk(node):
        if isinstance(one, promql_parser.AggregateExpr) and str(one.op) == "count_values":
            named = one.modifier.labels if one.modifier is not None else []
            if any(one.param.val < label for label in named):
                yield one.param.val
