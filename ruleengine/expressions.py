"""Lints of custom PromQL: what Prometheus 2.42 would refuse, and what would not mean a value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import promql_parser as promql

from gpuwarden.catalogue import CATALOGUE
from gpuwarden.diagnostics import Severity, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterator

FUNCTIONS = frozenset(
    [
        "abs",
        "absent",
        "absent_over_time",
        "acos",
        "acosh",
        "asin",
        "asinh",
        "atan",
        "atanh",
        "avg_over_time",
        "ceil",
        "changes",
        "clamp",
        "clamp_max",
        "clamp_min",
        "cos",
        "cosh",
        "count_over_time",
        "day_of_month",
        "day_of_week",
        "day_of_year",
        "days_in_month",
        "deg",
        "delta",
        "deriv",
        "exp",
        "floor",
        "histogram_count",
        "histogram_fraction",
        "histogram_quantile",
        "histogram_sum",
        "holt_winters",
        "hour",
        "idelta",
        "increase",
        "irate",
        "label_join",
        "label_replace",
        "last_over_time",
        "ln",
        "log10",
        "log2",
        "max_over_time",
        "min_over_time",
        "minute",
        "month",
        "pi",
        "predict_linear",
        "present_over_time",
        "quantile_over_time",
        "rad",
        "rate",
        "resets",
        "round",
        "scalar",
        "sgn",
        "sin",
        "sinh",
        "sort",
        "sort_desc",
        "sqrt",
        "stddev_over_time",
        "stdvar_over_time",
        "sum_over_time",
        "tan",
        "tanh",
        "time",
        "timestamp",
        "vector",
        "year",
    ]
)
"""Functions of Prometheus 2.42; later ones fail there at run time, in the night."""

AGGREGATIONS = frozenset(
    [
        "sum",
        "avg",
        "count",
        "min",
        "max",
        "group",
        "stddev",
        "stdvar",
        "topk",
        "bottomk",
        "count_values",
        "quantile",
    ]
)
"""Aggregations of Prometheus 2.42."""

_COMPARISONS = frozenset({"==", "!=", ">", "<", ">=", "<="})
_OUR_PREFIXES = ("gpu_", "yolo_", "gpuwarden_")


@dataclass(frozen=True, slots=True)
class ExpressionFinding:
    """What is wrong with an expression; as in `diagnostics.Diagnostic`, without a place."""

    code: str
    severity: Severity
    message: str
    hint: str | None = None


def check(text: str) -> list[ExpressionFinding]:
    """Lint an expression that should give one number for each `job_id`."""
    try:
        root = promql.parse(text)
    except ValueError as error:
        return [ExpressionFinding("GW213", Severity.ERROR, f"this is not PromQL: {error}")]
    found = [finding for node in _walk(root) for finding in _node_findings(node)]
    return [*_value_findings(root), *dict.fromkeys(found)]


def _walk(node: promql.Expr) -> Iterator[promql.Expr]:
    yield node
    match node:
        case promql.BinaryExpr():
            below = [node.lhs, node.rhs]
        case promql.Call():
            below = list(node.args)
        case promql.AggregateExpr():
            below = [node.expr, *([node.param] if node.param is not None else [])]
        case promql.ParenExpr() | promql.UnaryExpr() | promql.SubqueryExpr():
            below = [node.expr]
        case promql.MatrixSelector():
            below = [node.vector_selector]
        case _:
            below = []
    for child in below:
        yield from _walk(child)


def _node_findings(node: promql.Expr) -> Iterator[ExpressionFinding]:
    match node:
        case promql.Call() if node.func.name not in FUNCTIONS:
            yield ExpressionFinding(
                "GW214",
                Severity.ERROR,
                f"Prometheus 2.42 has no function {node.func.name}",
                did_you_mean(node.func.name, FUNCTIONS),
            )
        case promql.AggregateExpr() if str(node.op) not in AGGREGATIONS:
            yield ExpressionFinding(
                "GW214", Severity.ERROR, f"Prometheus 2.42 has no aggregation {node.op}"
            )
        case promql.VectorSelector() if node.name and node.name not in CATALOGUE:
            yield _unknown_metric(node.name)
        case promql.VectorSelector() if node.name and CATALOGUE[node.name].source == "engine":
            yield ExpressionFinding(
                "GW216",
                Severity.ERROR,
                f"{node.name} is a conclusion of the engine itself, not a fact to judge by",
            )
        case _:
            pass


def _unknown_metric(name: str) -> ExpressionFinding:
    hint = did_you_mean(name, CATALOGUE)
    if name.startswith(_OUR_PREFIXES):
        return ExpressionFinding(
            "GW216", Severity.ERROR, f"the metric {name} is not in the catalogue", hint
        )
    return ExpressionFinding(
        "GW301",
        Severity.WARNING,
        f"the metric {name} is not gpuwarden's: while it is absent the rule is UNKNOWN",
        hint,
    )


def _value_findings(root: promql.Expr) -> Iterator[ExpressionFinding]:
    """Follow what gives the value, past parentheses and set operators."""
    match root:
        case promql.ParenExpr() | promql.UnaryExpr():
            yield from _value_findings(root.expr)
        case promql.BinaryExpr() if str(root.op).split()[0] in _COMPARISONS:
            yield from _comparison(root)
        case promql.BinaryExpr() if str(root.op) in ("and", "unless"):
            yield from _value_findings(root.lhs)
        case promql.BinaryExpr() if str(root.op) == "or":
            yield from _value_findings(root.lhs)
            yield from _value_findings(root.rhs)
        case promql.AggregateExpr() if not _keeps_job_id(root):
            yield ExpressionFinding(
                "GW217",
                Severity.ERROR,
                f"{root.op} drops the label job_id, so that no row belongs to a job",
                f"write {root.op} by (job_id) (...)",
            )
        case promql.NumberLiteral() | promql.StringLiteral():
            yield ExpressionFinding("GW217", Severity.ERROR, "a constant belongs to no job")
        case promql.MatrixSelector() | promql.SubqueryExpr():
            yield ExpressionFinding(
                "GW217",
                Severity.ERROR,
                "a range of samples is not one number",
                "wrap it in a function such as avg_over_time",
            )
        case _:
            pass


def _comparison(root: promql.BinaryExpr) -> Iterator[ExpressionFinding]:
    if root.modifier is not None and root.modifier.return_bool:
        return
    yield ExpressionFinding(
        "GW215",
        Severity.ERROR,
        f"a bare comparison ({root.op}) drops the rows for which it is false: they are UNKNOWN",
        "leave the comparison out and write above, at_least, below or at_most beside promql",
    )


def _keeps_job_id(node: promql.AggregateExpr) -> bool:
    if str(node.op) in ("topk", "bottomk"):
        return True
    if node.modifier is None:
        return False
    named = "job_id" in node.modifier.labels
    by = bool(node.modifier.type == promql.AggModifierType.By)
    return named is by
