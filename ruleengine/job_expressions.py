"""Expressions of rules, asked of some jobs alone: of which that is the same, and how. Pure.

An expression can be asked of some jobs if no job's rows depend on the series of another: every
series has a `job_id`, every aggregation keeps it, and every pair of series is matched by it. Then
a matcher at each selector leaves out rows and changes none. `card_expressions` knows those that
can be asked of some cards; all others are asked of the fleet.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Final

import promql_parser as promql

from gpuwarden.catalogue import CATALOGUE
from gpuwarden.ruleengine.expressions import FUNCTIONS, parsed
from gpuwarden.ruleengine.signals import one_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

MAX_QUERY_BYTES: Final = 15_000
"""Of a query that names jobs or cards: VictoriaMetrics reads up to 16 KiB of one (its
-search.maxQueryLen)."""
MAX_SELECTORS: Final = 5
"""With more, naming the jobs at each would make a query longer than some servers read."""

NOT_EACH_FOR_ITSELF: Final = frozenset(
    {
        "absent",
        "absent_over_time",
        "histogram_quantile",
        "label_join",
        "label_replace",
        "scalar",
        "sort",
        "sort_desc",
        "vector",
    }
)
"""Functions whose rows have other labels than what they are given, or depend on all of it."""
_JOBS: Final = "<jobs>"
_SELECTOR: Final = re.compile(r"[A-Za-z_:][A-Za-z0-9_:]*\{")


def of_jobs(text: str, jobs: Collection[str]) -> str:
    """An expression, asked of some jobs alone.

    Args:
        text: of which `separable` is true.
        jobs: their ids.
    """
    template = _template(text)
    if template is None:
        raise ValueError(f"{text!r} cannot be asked of some jobs alone")
    return template.replace(f'"{_JOBS}"', one_of(jobs))


def separable(text: str) -> bool:
    """Whether each job's row is the same whatever other jobs there are.

    Args:
        text: of an expression.
    """
    return _template(text) is not None


@functools.lru_cache(maxsize=512)
def _template(text: str) -> str | None:
    """The expression with a stand-in for the jobs at each selector, or None."""
    try:
        root = parsed(text)
    except ValueError:
        return None
    if not _by_job(root):
        return None
    template = templated(root, lambda _: f'job_id=~"{_JOBS}"')
    if template is None or template.count(_JOBS) > MAX_SELECTORS:
        return None
    return template


def templated(root: promql.Expr, matcher: Callable[[promql.VectorSelector], str]) -> str | None:
    """An expression with one matcher more at each selector; None where it cannot be written so.

    Args:
        root: of the expression.
        matcher: gives what to add to a selector.
    """
    found: list[promql.VectorSelector] = []
    if not _plain(root, found):
        return None
    rest = iter(found)
    # The parser writes every selector with its braces.
    template, number = _SELECTOR.subn(lambda match: f"{match[0]}{matcher(next(rest))},", str(root))
    return template if number == len(found) else None


def _plain(root: promql.Expr, found: list[promql.VectorSelector]) -> bool:
    """Whether all selectors, which are collected, can be written down again as they were."""

    def look(node: promql.Expr) -> bool:
        if isinstance(node, promql.StringLiteral):
            return False
        if isinstance(node, promql.VectorSelector):
            found.append(node)
            # The parser does not escape what it writes.
            values = [matcher.value for matcher in node.matchers.matchers]
            return not node.matchers.or_matchers and not any(
                sign in value for value in values for sign in ('"', "\\", "\n", "{")
            )
        return True

    return bool(promql.walk(root, look))


def _by_job(node: promql.Expr) -> bool:
    """Whether a node gives rows of jobs, each by the series of its own job alone."""
    match node:
        case promql.VectorSelector():
            known = CATALOGUE.get(node.name or "")
            own = known is not None and "job_id" in known.labels
        case promql.MatrixSelector():
            own = _by_job(node.vector_selector)
        case promql.ParenExpr() | promql.UnaryExpr() | promql.SubqueryExpr():
            own = _by_job(node.expr)
        case promql.Call():
            rows = [argument for argument in node.args if not is_number(argument)]
            own = node.func.name in FUNCTIONS - NOT_EACH_FOR_ITSELF and bool(rows)
            own = own and all(_by_job(argument) for argument in rows)
        case promql.AggregateExpr():
            number = node.param is None or is_number(node.param)
            own = number and _of_each_job(node) and _by_job(node.expr)
        case promql.BinaryExpr():
            own = _pairs_by_job(node)
        case _:
            own = False
    return own


def _of_each_job(node: promql.AggregateExpr) -> bool:
    """Whether an aggregation is of each job for itself; of `topk` without labels it is of all."""
    if node.modifier is None:
        return False
    by = bool(node.modifier.type == promql.AggModifierType.By)
    return ("job_id" in node.modifier.labels) is by


def _pairs_by_job(node: promql.BinaryExpr) -> bool:
    sides = [side for side in (node.lhs, node.rhs) if not is_number(side)]
    if not sides or not all(_by_job(side) for side in sides):
        return False
    matching = None if node.modifier is None else node.modifier.matching
    if len(sides) == 1 or matching is None:
        return True
    on = bool(matching.type == promql.LabelModifierType.Include)
    return ("job_id" in matching.labels) is on


def is_number(node: promql.Expr) -> bool:
    """Whether a node is a number that depends on no series.

    Args:
        node: of an expression.
    """
    match node:
        case promql.NumberLiteral():
            return True
        case promql.ParenExpr() | promql.UnaryExpr():
            return is_number(node.expr)
        case promql.BinaryExpr():
            return is_number(node.lhs) and is_number(node.rhs)
        case promql.Call():
            return node.func.name in ("pi", "time")
    return False
