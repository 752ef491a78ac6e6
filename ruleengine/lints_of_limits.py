"""Lints of limits: conditions that hold for every value, for none, or never together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuwarden.diagnostics import Severity
from gpuwarden.ruleengine.certainties import certain, contradictions, unreachable
from gpuwarden.ruleengine.condition_differences import words
from gpuwarden.ruleengine.conditions import All, OverBudget, ProfileCondition, Promql, Signal
from gpuwarden.ruleengine.expressions import ratio_metric
from gpuwarden.ruleengine.linting import Finding, placed_conditions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpuwarden.ruleengine.conditions import Condition
    from gpuwarden.ruleengine.model import Rule
    from gpuwarden.yaml_files import Step


def lint_limits(rule: Rule) -> Iterator[Finding]:
    """Lint the limits of a rule's conditions; paths begin at the rule."""
    for path, condition in placed_conditions(rule):
        match condition:
            case Signal() | OverBudget():
                yield from _comparison(path, condition)
            case Promql():
                yield from _ratio(path, condition)
            case ProfileCondition():
                for name, deviation in condition.profile.entries.items():
                    if unreachable(deviation):
                        yield _warning(
                            "GW303",
                            (*path, "profile", name),
                            "no value is ever beyond this: 0 is exactly 100 % below",
                        )
            case _:
                pass
    yield from _together(rule)


def _comparison(path: tuple[Step, ...], condition: Signal | OverBudget) -> Iterator[Finding]:
    known = certain(condition)
    place = (*path, condition.comparison)
    if known is False:
        yield _warning("GW303", place, "no value is ever beyond this")
    elif known:
        yield _warning("GW315", place, "every value is within this: it says nothing of a job")


def _ratio(path: tuple[Step, ...], condition: Promql) -> Iterator[Finding]:
    """A limit in per cent for an expression in ratios: 5 would be 500 %."""
    limit = condition.limit.value
    metric = ratio_metric(condition.promql) if limit > 1 else None
    if metric is None:
        return
    code = "GW303" if condition.upward else "GW315"
    what = "no value is ever beyond this" if condition.upward else "every value is within this"
    yield Finding(
        code,
        Severity.WARNING,
        (*path, condition.comparison),
        f"{what}: {metric} is 1 for a whole",
        f"write {limit / 100:g} for {limit:g} %",
    )


def _together(rule: Rule) -> Iterator[Finding]:
    """What is never true together, each pair once, where it is first demanded."""
    wholes: list[tuple[tuple[Step, ...], Condition]] = [(("when",), rule.when)]
    for index, stage in enumerate(rule.stages):
        if stage.when is not None:
            both = All.model_construct(all=(rule.when, stage.when))
            wholes.append((("stages", index, "when"), both))
    said = []
    for path, whole in wholes:
        for pair in contradictions(whole):
            if pair in said:
                continue
            said.append(pair)
            first, second = (words(each) for each in pair)
            yield _warning("GW316", path, f'"{first}" and "{second}" are never true together')


def _warning(code: str, path: tuple[Step, ...], message: str) -> Finding:
    return Finding(code, Severity.WARNING, path, message)
