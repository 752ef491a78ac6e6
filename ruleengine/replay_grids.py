"""Sensitivity: a rule with other limits and windows, so that one sees how much hangs on them."""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING

from gpuwarden import quantities
from gpuwarden.diagnostics import did_you_mean
from gpuwarden.errors import InvalidInput
from gpuwarden.ruleengine.conditions import All, Any_, Not, Signal, leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gpuwarden.ruleengine.conditions import Condition
    from gpuwarden.ruleengine.model import Rule, RuleSet

MAX_VARIANTS = 36
_GRID = re.compile(
    r"(?P<rule>[a-z0-9][a-z0-9_.-]*)(?:/(?P<stage>[a-z0-9-]+))?:"
    r"(?P<signal>[a-z_]+)=(?P<limits>[^@]+)(?:@(?P<windows>.+))?"
)
HOW_TO = "write it like idle-held:gpu_utilization=3%,5%,10%@3m,10m,30m"


def variants(rules: RuleSet, text: str) -> list[tuple[str, RuleSet]]:
    """The rule sets of a grid, each with only the rule in question.

    Args:
        rules: what the rule is one of; limits, profiles and whitelist stay.
        text: RULE:SIGNAL=LIMIT,LIMIT[@WINDOW,WINDOW], or RULE/STAGE:... for the condition that a
            stage has of its own; without windows the rule's own stays.

    Returns:
        (name, rules) of each combination.

    Raises:
        InvalidInput: it says nothing that the rules have, or gives a rule that is not usable.
    """
    found = _GRID.fullmatch(text.strip())
    if found is None:
        raise InvalidInput(f"--sensitivity: {text!r} is no grid: {HOW_TO}")
    rule = next((rule for rule in rules.rules if rule.id == found["rule"]), None)
    if rule is None:
        known = [rule.id for rule in rules.rules]
        hint = did_you_mean(found["rule"], known) or f"there are {', '.join(known)}"
        raise InvalidInput(f'--sensitivity: there is no rule "{found["rule"]}"; {hint}')
    places = _places(rule)
    stage, signal = found["stage"] or "", found["signal"]
    if signal not in places.get(stage, ()):
        raise InvalidInput(f"--sensitivity: {_nowhere(rule.id, stage, signal, places=places)}")
    limits = _words(found["limits"])
    windows: Sequence[str | None] = _words(found["windows"]) if found["windows"] else [None]
    if len(limits) * len(windows) > MAX_VARIANTS:
        raise InvalidInput(f"--sensitivity: at most {MAX_VARIANTS} combinations at once")
    return [
        (
            f"{rule.id}{stage and f'/{stage}'}: {signal} {limit}"
            + (f" over {window}" if window else ""),
            rules.model_copy(update={"rules": (_variant(rule, stage, signal, (limit, window)),)}),
        )
        for window, limit in itertools.product(windows, limits)
    ]


def _places(rule: Rule) -> dict[str, set[str]]:
    """Signals that are compared: by the rule's `when` (""), and by a stage's, by its key."""
    conditions = {"": rule.when}
    conditions |= {key: stage.when for key, stage in rule.keyed_stages if stage.when is not None}
    return {
        key: {leaf.signal for leaf in leaves(condition) if isinstance(leaf, Signal)}
        for key, condition in conditions.items()
    }


def _nowhere(rule_id: str, stage: str, signal: str, *, places: Mapping[str, set[str]]) -> str:
    """Why there is nothing to change."""
    elsewhere = [key for key, names in places.items() if signal in names]
    if elsewhere:
        ways = " or ".join(f"{rule_id}{key and f'/{key}'}:{signal}=..." for key in elsewhere)
        where = f"stage {stage}" if stage else "its `when`"
        return f"{rule_id} does not compare {signal} in {where}: write {ways}"
    names = ", ".join(sorted(set().union(*places.values()))) or "none"
    return f"{rule_id} does not compare {signal}: it compares {names}"


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _variant(rule: Rule, place: str, signal: str, given: tuple[str, str | None]) -> Rule:
    """The rule with another limit and perhaps window in its `when`, or in that of a stage."""
    limit, window = given
    try:
        quantity = quantities.parse_quantity(limit)
        length = None if window is None else quantities.parse_window(window)
    except quantities.MalformedQuantity as error:
        raise InvalidInput(f"--sensitivity: {error}: {HOW_TO}") from error

    def changed(leaf: Signal) -> Signal:
        if leaf.signal != signal:
            return leaf
        if quantity.unit is not leaf.limit.unit:
            example = quantities.EXAMPLES[leaf.limit.unit]
            raise InvalidInput(
                f"--sensitivity: {signal} is in {leaf.limit.unit}: write limits like {example}"
            )
        update: dict[str, object] = {leaf.comparison: quantity}
        if length is not None and leaf.window is not None:
            update["window"] = length
        return leaf.model_copy(update=update)

    if not place:
        return rule.model_copy(update={"when": _replaced(rule.when, changed)})
    stages = tuple(
        stage.model_copy(update={"when": _replaced(stage.when, changed)})
        if key == place and stage.when is not None
        else stage
        for key, stage in rule.keyed_stages
    )
    return rule.model_copy(update={"stages": stages})


def _replaced(condition: Condition, changed: Callable[[Signal], Signal]) -> Condition:
    """The condition with its signals changed."""
    match condition:
        case Signal():
            return changed(condition)
        case All():
            parts = tuple(_replaced(part, changed) for part in condition.all)
            return condition.model_copy(update={"all": parts})
        case Any_():
            parts = tuple(_replaced(part, changed) for part in condition.any)
            return condition.model_copy(update={"any": parts})
        case Not():
            return condition.model_copy(update={"not_": _replaced(condition.not_, changed)})
        case _:
            return condition
