"""What rules in force can come to, before any of it has happened. Pure.

A counter that is born with its first event hides that event from `increase()`: what can be counted
is on the page of metrics from the moment its rule is in force, as 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuwarden.ruleengine.model import Action, Mode

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from gpuwarden.ruleengine.model import Rule

_ENDS = ("verified", "incomplete", "failed", "refused", "lapsed")
_ASKED = ("unheeded", "undeliverable", "withdrawn", "failed", "refused", "lapsed")
OUTCOMES = {
    Action.LOG: ("done",),
    Action.NOTIFY: ("done",),
    Action.CHECKPOINT: ("done", *_ASKED),
    Action.YIELD: ("verified", *_ASKED),
    Action.REQUEUE: _ENDS,
    Action.TERMINATE: _ENDS,
}
"""How each action may end where it is carried out."""


def decisions(rules: Iterable[Rule]) -> Iterator[tuple[str, str, str, str]]:
    """(rule, action, mode, outcome) of every decision that the rules may come to."""
    for rule in rules:
        for action in {stage.do for stage in rule.stages}:
            for outcome in OUTCOMES[action] if _does(rule, action) else ("would",):
                yield rule.id, action.value, rule.mode.value, outcome


def acts(rules: Iterable[Rule]) -> Iterator[tuple[str, str]]:
    """(rule, action) of what the rules may do to jobs."""
    for rule in rules:
        if rule.mode is Mode.ENFORCE:
            yield from {(rule.id, stage.do.value) for stage in rule.stages if stage.do.acts}


def _does(rule: Rule, action: Action) -> bool:
    """Whether the rule's mode lets it: observe only writes down, warn only says."""
    if action is Action.LOG or rule.mode is Mode.ENFORCE:
        return True
    return action is Action.NOTIFY and rule.mode is Mode.WARN
