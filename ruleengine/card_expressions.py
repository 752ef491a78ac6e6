"""Expressions of rules, asked of some cards alone: of which that is the same, and how. Pure.

Some expressions join a job's series with those of others on its cards, such as of its user: no job
can be asked for itself. But where cards and nodes are matched with themselves alone, a job's row
depends on the series of its cards, and of its nodes where these have no `uuid`; then naming all
cards of a job and their nodes leaves its row as it is. Rows of other jobs, of which a part of the
cards is named, mean nothing.
"""

from __future__ import annotations

import functools
from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple

import promql_parser as promql

from gpuwarden.catalogue import CATALOGUE
from gpuwarden.metric_entries import Source
from gpuwarden.ruleengine.expressions import FUNCTIONS, parsed
from gpuwarden.ruleengine.job_expressions import (
    MAX_QUERY_BYTES,
    NOT_EACH_FOR_ITSELF,
    is_number,
    templated,
)
from gpuwarden.ruleengine.signals import one_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_OF_NODES: Final = frozenset({"gpuwarden_snapshot_timestamp_seconds"})
"""Series of a node, without a job or a card; others may be those of an engine, on no node."""
_CARDS, _NODES = "<cards>", "<nodes>"
_NAMED_CARDS: Final = f'uuid=~"{_CARDS}"'
_NAMED_NODES: Final = f'instance=~"{_NODES}"'

Card = tuple[str, str]
"""(instance, uuid)."""


class _Kind(Enum):
    """What rows are true of although some cards and their nodes alone were asked."""

    NODES = "those nodes; there is no uuid"
    CARDS = "those cards; each has its uuid"
    JOBS = "jobs of which all cards were asked"


class _Rows(NamedTuple):
    """Rows of a node.

    Attributes:
        kind: what they are true of.
        present: whether what is on a card or node now decides whether a job has such a row. What it
            held before is not asked.
    """

    kind: _Kind
    present: bool


_IDENTITY: Final = {
    _Kind.NODES: {"instance"},
    _Kind.CARDS: {"instance", "uuid"},
    _Kind.JOBS: {"job_id"},
}
"""The labels that tell such rows apart: who adds up or matches rows without them mixes them."""
_TELLING: Final = frozenset({"instance", "uuid", "job_id"})


def by_card(text: str) -> bool:
    """Whether a job's row is the same if only its cards and their nodes are asked.

    Args:
        text: of an expression.
    """
    return _template(text) is not None


def of_cards(text: str, held: Iterable[Iterable[Card]]) -> str:
    """An expression, asked of the cards of some jobs alone; rows of other jobs mean nothing.

    Args:
        text: of which `by_card` is true.
        held: for each job all its cards.
    """
    template = _template(text)
    if template is None:
        raise ValueError(f"{text!r} cannot be asked of some cards alone")
    cards = [card for each in held for card in each]
    query = template.replace(f'"{_CARDS}"', one_of(_named(cards)))
    return query.replace(f'"{_NODES}"', one_of({node for node, _ in cards}))


def _named(cards: Iterable[Card]) -> set[str]:
    """The cards that have a name: to match series without one Prometheus looks at all there are."""
    return {uuid for _, uuid in cards if uuid}


def parts(text: str, jobs: Iterable[tuple[str, Sequence[Card]]]) -> Iterator[dict[str, list[Card]]]:
    """Jobs with their cards, in parts that a query can name.

    Args:
        text: of which `by_card` is true.
        jobs: each with all its cards.

    Yields:
        Job -> its cards; one job at least, however many cards it has.
    """
    template = _template(text) or ""
    of_card, of_node = template.count(_CARDS), template.count(_NODES)
    part: dict[str, list[Card]] = {}
    size = 0
    for job, held in jobs:
        named = len(one_of(_named(held)).encode()) * of_card
        named += len(one_of({node for node, _ in held}).encode()) * of_node
        if part and len(template.encode()) + size + named > MAX_QUERY_BYTES:
            yield part
            part, size = {}, 0
        part[job] = list(held)
        size += named
    if part:
        yield part


@functools.lru_cache(maxsize=512)
def _template(text: str) -> str | None:
    """The expression with stand-ins for cards and nodes at each selector, or None."""
    try:
        root = parsed(text)
    except ValueError:
        return None
    rows = _rows(root)
    if rows is None or rows.kind is not _Kind.JOBS:
        return None
    return templated(
        root, lambda node: _NAMED_CARDS if _selected(node) is _Kind.CARDS else _NAMED_NODES
    )


def _rows(node: promql.Expr) -> _Rows | None:
    """What a node's rows are true of, or None where they depend on more than what is asked."""
    found: _Rows | None = None
    match node:
        case promql.VectorSelector():
            kind = _selected(node)
            found = kind and _Rows(kind, node.offset is None and node.at is None)
        case promql.MatrixSelector():
            found = _before(_rows(node.vector_selector))
        case promql.SubqueryExpr():
            found = _before(_rows(node.expr))
        case promql.ParenExpr() | promql.UnaryExpr():
            found = _rows(node.expr)
        case promql.Call():
            rows = [argument for argument in node.args if not is_number(argument)]
            if node.func.name in FUNCTIONS - NOT_EACH_FOR_ITSELF and len(rows) == 1:
                found = _rows(rows[0])
        case promql.AggregateExpr():
            found = _aggregated(node)
        case promql.BinaryExpr():
            found = _paired(node)
    return found


def _before(rows: _Rows | None) -> _Rows | None:
    """Of a stretch of time: a job's row there may be of cards that it has left."""
    return None if rows is None or rows.kind is _Kind.JOBS else _Rows(rows.kind, present=False)


def _selected(node: promql.VectorSelector) -> _Kind | None:
    known = CATALOGUE.get(node.name or "")
    if known is None or known.source is Source.ENGINE:
        return None
    if "uuid" in known.labels:
        return _Kind.CARDS
    return _Kind.NODES if "job_id" in known.labels or known.name in _OF_NODES else None


def _aggregated(node: promql.AggregateExpr) -> _Rows | None:
    rows, by = _rows(node.expr), node.modifier
    if rows is None or by is None or by.type != promql.AggModifierType.By:
        return None
    if not (node.param is None or is_number(node.param)):
        return None
    if _IDENTITY[rows.kind] <= set(by.labels):
        return rows
    whole = "job_id" in by.labels and rows.present
    return _Rows(_Kind.JOBS, present=True) if whole else None


def _paired(node: promql.BinaryExpr) -> _Rows | None:
    sides = [side for side in (node.lhs, node.rhs) if not is_number(side)]
    found = [rows for rows in map(_rows, sides) if rows is not None]
    if not found or len(found) < len(sides):
        return None
    if len(found) == 1:
        return found[0]
    modifier = node.modifier
    matching = None if modifier is None else modifier.matching
    if matching is not None and matching.type != promql.LabelModifierType.Include:
        return None
    labels = None if matching is None else set(matching.labels)
    many, one = found
    if modifier is not None and modifier.card == promql.VectorMatchCardinality.OneToMany:
        one, many = found
    if modifier is not None and modifier.group_labels is not None:
        if _TELLING & set(modifier.group_labels):
            return None  # they would be another row's
    elif many.kind is not one.kind and str(node.op) not in ("and", "unless"):
        return None
    return _matched(str(node.op), many, one, labels)


def _matched(operator: str, many: _Rows, one: _Rows, labels: set[str] | None) -> _Rows | None:
    """Of two sides whose rows are matched on these labels, or on all; the first one's are kept."""
    if many.kind is one.kind:
        fits = labels is None or _IDENTITY[many.kind] <= labels
    else:
        # A node's row stands beside each of its cards'.
        fits = (many.kind, one.kind) == (_Kind.CARDS, _Kind.NODES) and operator != "or"
        fits = fits and labels is not None and "instance" in labels
    if not fits:
        return None
    of_the_job = labels is None or "job_id" in labels
    present = many.present or (of_the_job and one.present)
    if operator == "unless":
        present = many.present
    elif operator == "or":
        present = many.present and one.present
    return _Rows(many.kind, present)
