"""Needs: which values of the fleet a set of rules must be told, by the conditions in it. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuwarden.ruleengine.conditions import (
    NoProgress,
    OverBudget,
    ProfileCondition,
    Promql,
    Signal,
    SilentFor,
    leaves,
)
from gpuwarden.ruleengine.verdicts import SignalKey

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpuwarden.ruleengine.conditions import Condition
    from gpuwarden.ruleengine.model import Rule, RuleSet

ACTIVITY = SignalKey("activity", "last", 0.0)
"""Stands for the signs of life that `silent_for` reads: rows of the inventory, and no number."""
SAVES = SignalKey("saves", "last", 0.0)
"""Stands for what runs have saved and how they were resumed, likewise: it concerns jobs that
something may be done about, and those that people look at."""
CAUSE_WINDOW_SECONDS = 300.0
"""The longest window that is asked only so that causes can be told."""
SHARED_CAUSE_SECONDS = 900.0
"""The longest window of a rule that tells causes as well, in place of one of their own."""

CAUSE_SIGNALS = (
    "gpu_utilization",
    "gpu_memory",
    "throughput",
    "data_wait_share",
    "job_cpu_cores",
    "job_io_wait",
    "job_loader_workers",
)
LATE_CAUSES = frozenset({"data_wait_share", "job_cpu_cores", "job_io_wait", "job_loader_workers"})
"""Those that nobody looks at but who is told a cause; the others stand on pages, too."""


def needed_keys(rules: RuleSet) -> set[SignalKey]:
    """Every query that the rules need, and those that tell causes where none of theirs does."""
    keys: set[SignalKey] = set()
    for rule in rules.rules:
        for condition in rule.conditions:
            keys |= set(condition_keys(condition))
        if rule.only_if_waiting is not None and rule.only_if_waiting.promql is not None:
            keys.add(rule.only_if_waiting.key)
    windows = [key.window_seconds for key in keys if key.window_seconds]
    # Rules with short windows would be explained too late by a long one.
    window = min(CAUSE_WINDOW_SECONDS, max(windows, default=CAUSE_WINDOW_SECONDS))
    asked = {
        key.signal
        for key in keys
        if key.agg == "avg" and 0 < key.window_seconds <= SHARED_CAUSE_SECONDS
    }
    return keys | {SignalKey(name, "avg", window) for name in CAUSE_SIGNALS if name not in asked}


def condition_keys(condition: Condition) -> Iterable[SignalKey]:
    """The queries behind a condition."""
    for leaf in leaves(condition):
        match leaf:
            case Signal() | NoProgress() | Promql() | OverBudget():
                yield leaf.key
            case ProfileCondition():
                yield from leaf.keys
            case _:
                pass  # silence is read from the inventory


def listening(rules: RuleSet) -> list[Rule]:
    """The rules that ask for signs of life."""
    return [
        rule
        for rule in rules.rules
        if any(isinstance(leaf, SilentFor) for each in rule.conditions for leaf in leaves(each))
    ]
