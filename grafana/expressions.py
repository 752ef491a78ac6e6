"""Expressions of the boards as trees: which series they ask, by which functions and windows.

Grafana's variables are replaced by values before parsing. The lengths of time among them occur
nowhere else, so that the tree still tells which variable a window is.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import promql_parser
import yaml

if TYPE_CHECKING:
    from collections.abc import Iterator

RULES = Path(__file__).parents[1] / "alerting" / "rules"

VALUES = {
    "$__rate_interval": "241s",
    "$__interval": "61s",
    "$__range_s": "21601",
    "$__range": "21601s",
    "$node": "n1:9835",
    "$gpu": "0",
    "$user": "ana",
    "$team": "vision",
    "$job_id": "slurm-a-1-0",
    "$cluster": "east",
}
"""What stands for each variable when an expression is parsed."""


@dataclass(frozen=True, slots=True)
class Selector:
    """A vector selector in an expression.

    Attributes:
        metric: its name.
        labels: label -> value of its matchers.
        call: the innermost function around it, or an empty string.
        seconds: length of its range, 0 without one.
    """

    metric: str
    labels: dict[str, str]
    call: str
    seconds: float


def substituted(text: str) -> str:
    """The expression with every variable replaced by a value."""
    for name in sorted(VALUES, key=len, reverse=True):
        text = text.replace(name, VALUES[name])
    return text


@functools.cache
def recorded() -> dict[str, str]:
    """Recorded series of every file of rules, with their expressions."""
    return {
        rule["record"]: rule["expr"]
        for path in sorted(RULES.glob("*.yml"))
        for group in yaml.safe_load(path.read_text())["groups"]
        for rule in group["rules"]
        if "record" in rule
    }


def walk(node: Any) -> Iterator[Any]:
    """The node and every node below it."""
    yield node
    for child in _children(node):
        yield from walk(child)


def selectors(node: Any, call: str = "") -> Iterator[Selector]:
    """Every vector selector below a node of promql_parser's tree."""
    if isinstance(node, promql_parser.VectorSelector):
        yield _read(node, call, 0)
    elif isinstance(node, promql_parser.MatrixSelector):
        yield _read(node.vector_selector, call, node.range.total_seconds())
    else:
        inner = node.func.name if isinstance(node, promql_parser.Call) else call
        for child in _children(node):
            yield from selectors(child, inner)


def calls(node: Any) -> set[str]:
    """Names of the functions called in a tree."""
    return {one.func.name for one in walk(node) if isinstance(one, promql_parser.Call)}


def _read(node: Any, call: str, seconds: float) -> Selector:
    labels = {matcher.name: matcher.value for matcher in node.matchers.matchers}
    return Selector(node.name or "", labels, call, seconds)


def _children(node: Any) -> list[Any]:
    found = []
    for name in ("lhs", "rhs", "expr", "param"):
        child = getattr(node, name, None)
        if isinstance(child, promql_parser.Expr):
            found.append(child)
    if isinstance(node, promql_parser.Call):
        found += node.args
    return found
