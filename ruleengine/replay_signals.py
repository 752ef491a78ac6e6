"""Signals over a stretch of history, put together from parts that are cheap over many steps.

In a range query Prometheus evaluates an operator anew at each step, and hashes the labels of every
row for it; a function over a window it evaluates series by series. So a replay asks for windows
alone, each once for all signals that share it, and joins them here by the rules of PromQL: sample
for sample what the whole expression (`signals.query`) would have answered. Where rows are compared
with one another and one of them is no finite number, the whole expression is asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import numpy as np

from gpuwarden.quantities import Unit
from gpuwarden.ruleengine import signals
from gpuwarden.ruleengine.replay_columns import Columns

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from gpuwarden.ruleengine.verdicts import SignalKey

    Bools = NDArray[np.bool_]
    Floats = NDArray[np.float64]
    Key = tuple[tuple[str, str], ...]

_Table = TypeVar("_Table", "Bools", "Floats")

RUN = ("instance", "job_id", "run_id")
CARD = ("instance", "uuid")
JOB = ("job_id",)


def texts_of(key: SignalKey, scrape_interval: float) -> list[str]:
    """The expressions that a signal is put together from.

    An expression of a rule is its own; what is divided by another series is asked whole.

    Args:
        key: what to measure.
        scrape_interval: of the nodes, in seconds.
    """
    if _asked_whole(key):
        return [signals.query(key, scrape_interval=scrape_interval)]
    made = signals.parts(key, scrape_interval=scrape_interval)
    texts = [_fresh(made), made.trained, made.count]
    return [text for text in ([*texts, made.value] if made.value != made.series else texts) if text]


def put_together(
    key: SignalKey, found: Mapping[str, Columns], scrape_interval: float
) -> Columns | None:
    """What the whole expression of a signal would have answered.

    Args:
        key: what to measure.
        found: the answers to each of `texts_of`.
        scrape_interval: of the nodes, in seconds.

    Returns:
        None where only the server can tell, or refused a part.
    """
    texts, spec = texts_of(key, scrape_interval), signals.SIGNALS.get(key.signal)
    if _asked_whole(key):
        return found[texts[0]]
    if any(found[text].failures for text in texts):
        return None
    made = signals.parts(key, scrape_interval=scrape_interval)
    fresh = found[_fresh(made)]
    if spec is None or spec.training:
        value, trained = found[made.value], found[made.trained]
        if _odd(value) or _odd(trained):
            return None
        shown = _steps(value, trained) if spec is None else _pace(value, trained, spec.unit)
        return largest(_gated(shown, found[made.count], made.least, fresh, RUN), JOB)
    if made.value == made.series:
        return fresh
    names = CARD if spec.combined else None
    count = found[made.count] if made.count else None
    shown = _gated(found[made.value], count, made.least, fresh, names)
    return largest(shown, CARD) if spec.combined else shown


def shares(amounts: Columns, totals: Sequence[tuple[Columns, str]]) -> Columns:
    """Amounts of memory as shares of their card's, which the live engine looks up as well.

    Args:
        amounts: with the labels `instance` and `uuid`.
        totals: bytes of cards, and the label that names the card; a later one stands before.
    """
    whole: dict[tuple[str, str], Floats] = {}
    for columns, label in totals:
        for row, own in zip(columns.labels, columns.values, strict=True):
            card = row.get("instance", ""), row.get(label, "")
            earlier = whole.get(card)
            whole[card] = own if earlier is None else np.where(np.isnan(own), earlier, own)
    values = np.full_like(amounts.values, np.nan)
    with np.errstate(divide="ignore", invalid="ignore"):
        for number, row in enumerate(amounts.labels):
            total = whole.get((row.get("instance", ""), row.get("uuid", "")))
            if total is not None:
                known = np.isfinite(total) & (total != 0)
                values[number] = np.where(known, amounts.values[number] / total, np.nan)
    return Columns(amounts.labels, values, amounts.failures)


def largest(columns: Columns, names: Sequence[str]) -> Columns | None:
    """`max by` of these labels; None where a sample is no finite number, and it may not count."""
    if _odd(columns):
        return None
    rows = _by(columns.labels, columns.values, names, np.fmax)
    return _table(rows, columns.values.shape[1])


def _asked_whole(key: SignalKey) -> bool:
    spec = signals.SIGNALS.get(key.signal)
    return bool(key.promql or (spec is not None and spec.divisor))


def _fresh(made: signals.Parts) -> str:
    """The series itself, where its sample is fresh."""
    return f"{made.series} and {made.fresh}"


def _odd(columns: Columns) -> bool:
    return bool(np.isinf(columns.values).any())


def _key(row: Mapping[str, str], names: Sequence[str] | None) -> Key:
    """The labels by which PromQL matches; a label that is empty is none."""
    return tuple(
        sorted(pair for pair in row.items() if pair[1] and (names is None or pair[0] in names))
    )


def _by(
    labels: Sequence[Mapping[str, str]],
    table: _Table,
    names: Sequence[str] | None,
    function: np.ufunc,
) -> dict[Key, _Table]:
    """Rows with the same labels, of two each made one."""
    rows: dict[Key, _Table] = {}
    for row, own in zip(labels, table, strict=True):
        key = _key(row, names)
        rows[key] = function(rows[key], own) if key in rows else own
    return rows


def _table(rows: Mapping[Key, Floats], ticks: int) -> Columns:
    there = {key: own for key, own in rows.items() if not np.isnan(own).all()}
    values = np.vstack(list(there.values())) if there else np.empty((0, ticks))
    return Columns([dict(key) for key in there], values)


def _gated(
    value: Columns, count: Columns | None, least: int, fresh: Columns, names: Sequence[str] | None
) -> Columns:
    """`value and count >= least and fresh`, each matched on these labels, or on all."""
    enough = there = _by(fresh.labels, ~np.isnan(fresh.values), names, np.logical_or)
    if count is not None:
        with np.errstate(invalid="ignore"):
            enough = _by(count.labels, count.values >= least, names, np.logical_or)
    rows: dict[Key, Floats] = {}
    for row, own in zip(value.labels, value.values, strict=True):
        key = _key(row, names)
        if key in there and key in enough:
            rows[_key(row, None)] = np.where(there[key] & enough[key], own, np.nan)
    return _table(rows, value.values.shape[1])


def _pace(rate: Columns, trained: Columns, unit: Unit) -> Columns:
    """What a run does per second of its training, where it trained for a part of the window."""
    paces = _by(rate.labels, rate.values, RUN, np.fmax)
    times = _by(trained.labels, trained.values, RUN, np.fmax)
    rows: dict[Key, Floats] = {}
    with np.errstate(divide="ignore", invalid="ignore"):
        for key in paces.keys() & times.keys():
            known = times[key] >= signals.MIN_TRAIN_SHARE
            found = np.where(known, paces[key] / times[key], np.nan)
            rows[key] = np.minimum(found, 1.0) if unit is Unit.RATIO else found
    return _table(rows, rate.values.shape[1])


def _steps(increase: Columns, trained: Columns) -> Columns:
    """Steps in the window; without any, only where the run was in `train` all the time."""
    always = _by(trained.labels, trained.values == 1, RUN, np.logical_or)
    rows: dict[Key, Floats] = {}
    with np.errstate(invalid="ignore"):
        for row, own in zip(increase.labels, increase.values, strict=True):
            counts = own > 0
            if (key := _key(row, RUN)) in always:
                counts |= always[key]
            rows[_key(row, None)] = np.where(counts, own, np.nan)
    return _table(rows, increase.values.shape[1])
