"""Lints of how far it must have come for a stage: thresholds out of order, or without effect.

What is compared is what both conditions demand of the same measure: a single condition, or a part
of `all`. Of anything else (`any`, another window) nothing can be said before there are data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuwarden.diagnostics import Severity
from gpuwarden.ruleengine.condition_differences import normal, words
from gpuwarden.ruleengine.conditions import (
    All,
    NeedsMemory,
    NoProgress,
    OverBudget,
    ProfileCondition,
    Promql,
    Signal,
    SilentFor,
)
from gpuwarden.ruleengine.linting import Finding
from gpuwarden.ruleengine.model import Action

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence

    from gpuwarden.ruleengine.conditions import Condition
    from gpuwarden.ruleengine.model import Rule, Stage

_Demand = tuple["Hashable", float]
"""What is measured, and how far it must be: more is further."""


def lint_grades(rule: Rule) -> Iterator[Finding]:
    """Lint the conditions of a rule's stages; paths begin at the rule."""
    stages = list(rule.keyed_stages)
    base = dict(_demands(rule.when))
    for index, (key, stage) in enumerate(stages):
        path = ("stages", index, "when")
        if stage.when is not None:
            for earlier_key, earlier in stages[:index]:
                yield from _order(path, stage, earlier_key, earlier)
            yield from _idle(path, stage.when, base)
        if stage.do.takes:
            yield from _untold(index, key, rule.when, stages[: index + 1])


def _order(
    path: tuple[str | int, ...], stage: Stage, key: str, earlier: Stage
) -> Iterator[Finding]:
    """A higher level that is reached before a lower one."""
    if earlier.when is None or stage.when is None or stage.level.rank <= earlier.level.rank:
        return
    before = dict(_demands(earlier.when))
    for what, extent in _demands(stage.when):
        if what in before and extent < before[what]:
            yield Finding(
                "GW225",
                Severity.ERROR,
                path,
                f'"{words(stage.when)}" is reached before "{words(earlier.when)}" of {key}, whose '
                "level is lower",
                "exchange the two, or raise the level of the other",
            )


def _idle(
    path: tuple[str | int, ...], condition: Condition, base: dict[Hashable, float]
) -> Iterator[Finding]:
    """A demand that the rule itself makes already."""
    demands = list(_demands(condition))
    if demands and all(what in base and extent <= base[what] for what, extent in demands):
        message = f'"{words(condition)}" holds whenever the rule does: it changes nothing'
        yield Finding("GW311", Severity.WARNING, path, message)


def _untold(
    index: int, key: str, base: Condition, stages: Sequence[tuple[str, Stage]]
) -> Iterator[Finding]:
    """A job that could come far enough to be ended, and not far enough to be told before."""
    ending = stages[-1][1]
    told = [stage for _, stage in stages[:-1] if stage.do is Action.NOTIFY]
    if not told or any(_implied(stage.when, ending.when, base) for stage in told):
        return
    path: tuple[str | int, ...] = ("stages", index)
    yield Finding(
        "GW312",
        Severity.WARNING,
        path,
        f"a job may come far enough for {key} without its owner having been told: it is then not "
        "ended, however long",
        "leave out the `when` of a stage that notifies, or let this one demand no less",
    )


def _implied(weaker: Condition | None, stronger: Condition | None, base: Condition) -> bool:
    """Whether a condition surely holds where another and the rule's do."""
    if weaker is None or weaker == stronger:
        return True
    known: dict[Hashable, float] = {}
    for condition in (base, stronger) if stronger is not None else (base,):
        for what, extent in _demands(condition):
            known[what] = max(extent, known.get(what, extent))
    wanted = list(_parts(weaker))
    demands = list(_demands(weaker))
    return len(demands) == len(wanted) and all(
        what in known and known[what] >= extent for what, extent in demands
    )


def _parts(condition: Condition) -> Sequence[Condition]:
    """What must all hold, of a condition in its one form."""
    plain = normal(condition)
    return plain.all if isinstance(plain, All) else (plain,)


def _demands(condition: Condition) -> Iterator[_Demand]:
    """What a condition demands of single measures."""
    for part in _parts(condition):
        measure, extent = _demand(part)
        if measure:
            yield measure, extent


def _demand(part: Condition) -> tuple[tuple[Hashable, ...], float]:
    """What is measured and how far it must be; nothing for what cannot be compared."""
    measure: tuple[Hashable, ...] = ()
    extent = 0.0
    match part:
        case Signal():
            how = (part.agg or "avg", part.share, part.window, part.gpus)
            measure, extent = ("signal", part.signal, part.upward, *how), _extent(part)
        case Promql():
            measure, extent = ("promql", part.promql, part.upward), _extent(part)
        case OverBudget():
            measure, extent = ("over_budget", part.over_budget, part.upward), _extent(part)
        case NeedsMemory():
            measure, extent = ("needs_memory",), part.needs_memory
        case SilentFor():
            measure, extent = ("silent_for", frozenset(part.signals)), part.silent_for
        case NoProgress():
            measure, extent = ("no_progress_for",), part.no_progress_for
        case ProfileCondition() if len(part.profile.entries) == 1:
            ((name, deviation),) = part.profile.entries.items()
            like = (deviation.direction, deviation.floor, part.window, part.gpus)
            measure, extent = ("profile", name, *like), deviation.tolerance
        case _:
            pass
    return measure, extent


def _extent(part: Signal | Promql | OverBudget) -> float:
    return part.limit.value if part.upward else -part.limit.value
