"""Lints of custom PromQL: what Prometheus 2.42 would refuse, and what would not mean a value."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import promql_parser as promql

from gpuwarden.catalogue import CATALOGUE
from gpuwarden.diagnostics import Severity, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

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
_NUMBERS = frozenset({"pi", "scalar", "time"})
_WITHOUT_LABELS = _NUMBERS | {"absent", "absent_over_time", "vector"}
_LABELLING = frozenset({"label_join", "label_replace"})
_GIVEN = frozenset(
    {"gpuwarden_user_info", "gpuwarden_budget_gpu_hours", "gpuwarden_team_gpu_seconds_total"}
)
"""What the engine exports and does not conclude: it is in the directory, or counted."""
_SAME_UNIT = frozenset({"min", "max", "avg", "quantile", "last", "topk", "bottomk"})
"""Aggregations, also over time, of which the result is no larger than what they are given."""
_OF_TARGETS = frozenset({"instance", "job"})
"""Labels that Prometheus gives to every series that it scrapes."""
_ALL_BUT_THE_SAME = 0.8
"""How much of two labels is alike (difflib) where one is meant to be the other."""
_OUR_PREFIXES = ("gpu_", "yolo_", "gpuwarden_")


@dataclass(frozen=True, slots=True)
class ExpressionFinding:
    """What is wrong with an expression; as in `diagnostics.Diagnostic`, without a place."""

    code: str
    severity: Severity
    message: str
    hint: str | None = None


def parsed(text: str) -> promql.Expr:
    """The tree of an expression.

    Raises:
        ValueError: it is none, or the parser does not get through it. A panic of the parser, which
            is written in Rust, is no Exception: let through, a rule file would end the engine.
    """
    try:
        return promql.parse(text)
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(str(error)) from error


def check(text: str, *, per_job: bool = True) -> list[ExpressionFinding]:
    """Lint an expression that should give one number for each `job_id`, or one in all.

    Args:
        text: of the expression.
        per_job: whether its rows belong to jobs.
    """
    try:
        root = parsed(text)
    except ValueError as error:
        return [ExpressionFinding("GW213", Severity.ERROR, f"this is not PromQL: {error}")]
    found = [finding for node in _walk(root) for finding in _node_findings(node)]
    value = _value_findings(root) if per_job else _bare(root)
    return [*value, *dict.fromkeys(found)]


def ratio_metric(text: str) -> str | None:
    """The metric of ratios, one for a whole, whose values an expression gives as they are; or None.

    Args:
        text: of the expression.
    """
    try:
        node = parsed(text)
    except ValueError:
        return None
    while not isinstance(node, promql.VectorSelector):
        match node:
            case promql.ParenExpr():
                node = node.expr
            case promql.MatrixSelector():
                node = node.vector_selector
            case promql.AggregateExpr() if str(node.op) in _SAME_UNIT:
                node = node.expr
            case promql.Call() if node.func.name.removesuffix("_over_time") in _SAME_UNIT:
                node = node.args[-1]
            case _:
                return None
    known = CATALOGUE.get(node.name or "")
    return known.name if known is not None and known.unit == "ratio" else None


def _bare(root: promql.Expr) -> Iterator[ExpressionFinding]:
    """A comparison of a number that belongs to no job."""
    while isinstance(root, promql.ParenExpr):
        root = root.expr
    if isinstance(root, promql.BinaryExpr) and str(root.op).split()[0] in _COMPARISONS:
        yield from _comparison(root)


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
        case promql.VectorSelector() if (
            node.name and node.name not in _GIVEN and (CATALOGUE[node.name].source == "engine")
        ):
            yield ExpressionFinding(
                "GW216",
                Severity.ERROR,
                f"{node.name} is a conclusion of the engine itself, not a fact to judge by",
            )
        case promql.VectorSelector() if node.name:
            yield from _misspelt_labels(node, CATALOGUE[node.name].labels)
        case _:
            pass


def _misspelt_labels(
    node: promql.VectorSelector, labels: Collection[str]
) -> Iterator[ExpressionFinding]:
    """Matchers that find all series or none; labels like no other may be those of the scrape."""
    for matcher in node.matchers.matchers:
        if matcher.name in labels or matcher.name in _OF_TARGETS or matcher.name == "__name__":
            continue
        # `cluster` is like `user`, and of the scrape: only what is all but the same is misspelt.
        close = difflib.get_close_matches(matcher.name, labels, n=1, cutoff=_ALL_BUT_THE_SAME)
        hint = did_you_mean(matcher.name, close)
        if hint is not None:
            message = f"{node.name} has no label {matcher.name}: it is matched as an empty text"
            yield ExpressionFinding("GW302", Severity.WARNING, message, hint)


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
    """Follow what gives the value and its labels, down to what loses them or drops rows."""
    lost = _loses_job_id(root)
    if lost is not None:
        yield lost
        return
    match root:
        case promql.ParenExpr() | promql.UnaryExpr() | promql.AggregateExpr():
            yield from _value_findings(root.expr)
        case promql.BinaryExpr():
            yield from _binary(root)
        case promql.Call() if root.func.name not in _LABELLING:
            for argument in root.args:
                yield from _argument(argument)
        case _:
            pass


def _loses_job_id(node: promql.Expr) -> ExpressionFinding | None:
    """Why a node's rows belong to no job, or None."""
    message, hint = "", None
    match node:
        case promql.AggregateExpr() if not _keeps_job_id(node):
            message = f"{node.op} drops the label job_id, so that no row belongs to a job"
            hint = f"write {node.op} by (job_id) (...)"
        case promql.NumberLiteral() | promql.StringLiteral():
            message = "a constant belongs to no job"
        case promql.Call() if node.func.name in _WITHOUT_LABELS or not node.args:
            message = f"{node.func.name}() has no labels, so that its value belongs to no job"
        case promql.VectorSelector() if _lacks_job_id(node):
            message = f"{node.name} has no label job_id: it is not measured of a job"
        case promql.MatrixSelector() | promql.SubqueryExpr():
            message = "a range of samples is not one number"
            hint = "wrap it in a function such as avg_over_time"
    return ExpressionFinding("GW217", Severity.ERROR, message, hint) if message else None


def _binary(root: promql.BinaryExpr) -> Iterator[ExpressionFinding]:
    operator = str(root.op).split()[0]
    if operator in _COMPARISONS:
        yield from _comparison(root)
    elif operator in ("and", "unless"):
        yield from _value_findings(root.lhs)
    elif operator == "or":
        yield from _value_findings(root.lhs)
        yield from _value_findings(root.rhs)
    else:
        # One side brings the label; a comparison may keep a divisor from being zero.
        lost = [
            [item for item in _value_findings(side) if item.code == "GW217"]
            for side in (root.lhs, root.rhs)
        ]
        yield from lost[0] if all(lost) else ()


def _argument(node: promql.Expr) -> Iterator[ExpressionFinding]:
    """What an argument of a function gives: a range is in its place there, and so is a number."""
    match node:
        case promql.MatrixSelector():
            yield from _value_findings(node.vector_selector)
        case promql.SubqueryExpr():
            yield from _value_findings(node.expr)
        case promql.NumberLiteral() | promql.StringLiteral():
            pass
        case promql.Call() if node.func.name in _NUMBERS:
            pass
        case _:
            yield from _value_findings(node)


def _lacks_job_id(node: promql.VectorSelector) -> bool:
    known = CATALOGUE.get(node.name or "")
    judged = known is not None and (known.source != "engine" or known.name in _GIVEN)
    return known is not None and judged and "job_id" not in known.labels


def _comparison(root: promql.BinaryExpr) -> Iterator[ExpressionFinding]:
    if root.modifier is not None and root.modifier.return_bool:
        return
    yield ExpressionFinding(
        "GW215",
        Severity.ERROR,
        f"a bare comparison ({root.op}) drops the rows for which it is false: they are UNKNOWN",
        "leave the comparison out and write above, at_least, below or at_most beside promql, "
        f"or write {str(root.op).split()[0]} bool",
    )


def _keeps_job_id(node: promql.AggregateExpr) -> bool:
    if str(node.op) in ("topk", "bottomk"):
        return True
    if node.modifier is None:
        return False
    named = "job_id" in node.modifier.labels
    by = bool(node.modifier.type == promql.AggModifierType.By)
    return named is by
