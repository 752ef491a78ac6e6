"""What changed between two rule sets in meaning: rules, thresholds, windows, stages, protections.

Stricter means: what was a violation, or was told or ended, still is, and perhaps more. Laxer is
the opposite. Where neither can be said for every job, the change is `different`. Texts for people
(descriptions, reasons), the order of things and inline tests mean nothing here.
"""

from __future__ import annotations

import datetime as dt
import json
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from gpuwarden import durations, quantities
from gpuwarden.ruleengine.condition_differences import condition_changes, words
from gpuwarden.ruleengine.deadlines import grace_of
from gpuwarden.ruleengine.effects import Change, Effect, flipped, longer, more, overall
from gpuwarden.ruleengine.model import Action, Mode

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from gpuwarden.fields import Strict
    from gpuwarden.ruleengine.canary_terms import Canary
    from gpuwarden.ruleengine.model import (
        LimitGroup,
        Profile,
        Rule,
        RuleSet,
        Stage,
        TerminateLimits,
        WhitelistEntry,
    )

SCHEMA = "gpuwarden.rule-differences/v1"


class Fate(StrEnum):
    """What became of a rule as a whole."""

    NEW = "new"
    GONE = "gone"
    STRICTER = "stricter"
    LAXER = "laxer"
    DIFFERENT = "different"


@dataclass(frozen=True, slots=True)
class Difference:
    """What changed of one rule, or of what holds for all of them.

    Attributes:
        rule: its id, or an empty string for limits, profiles, protections and the time zone.
        fate: what became of it.
        changes: each single change; none for a rule that is new or gone.
    """

    rule: str
    fate: Fate
    changes: tuple[Change, ...] = ()


def differences(old: RuleSet, new: RuleSet) -> list[Difference]:
    """Everything that changed in meaning, rules in the order of their ids, the rest first."""
    shared = tuple(_shared(old, new))
    found = [Difference("", Fate(overall(shared).value), shared)] if shared else []
    before = {rule.id: rule for rule in old.rules}
    after = {rule.id: rule for rule in new.rules}
    for rule_id in sorted(before.keys() | after.keys()):
        if rule_id not in before:
            found.append(Difference(rule_id, Fate.NEW))
        elif rule_id not in after:
            found.append(Difference(rule_id, Fate.GONE))
        else:
            changes = (
                *_rule(before[rule_id], after[rule_id]),
                *_group(old.limits_of(rule_id), new.limits_of(rule_id)),
            )
            if changes:
                found.append(Difference(rule_id, Fate(overall(changes).value), changes))
    return found


# -- rules

_COMPARED = frozenset(
    {
        "id",
        "description",
        "mode",
        "team",
        "match",
        "only_during",
        "only_if_waiting",
        "canary",
        "cold_start",
        "ignore_phases",
        "when",
        "for_",
    }
    | {"clear_after", "trust_for", "stages"}
)


def _canary(old: Canary | None, new: Canary | None) -> Iterator[Change]:
    """Enforcement on more owners, or with more against it, is stricter."""
    if old == new:
        return
    if old is None or new is None:
        effect = more(new is None)
    else:
        before, after = old.back_to_warn, new.back_to_warn
        ways = {
            more(now > then)
            for then, now in (
                (old.share, new.share),
                (before.appeals, after.appeals),
                (before.regrets, after.regrets),
                (after.within, before.within),
            )
            if then != now
        }
        effect = ways.pop() if len(ways) == 1 else Effect.DIFFERENT
    yield Change("canary", effect, *(str(each or "none") for each in (old, new)))


def _rule(old: Rule, new: Rule) -> Iterator[Change]:
    modes = list(Mode)
    if old.mode is not new.mode:
        raised = modes.index(new.mode) > modes.index(old.mode)
        yield Change("mode", more(raised), old.mode.value, new.mode.value)
    yield from _mapping(
        "match",
        _criteria(old),
        _criteria(new),
    )
    if old.only_during != new.only_during:
        effect = Effect.DIFFERENT
        if not old.only_during or not new.only_during:
            effect = more(not new.only_during)
        texts = ("; ".join(map(str, rule.only_during)) or "always" for rule in (old, new))
        yield Change("only_during", effect, *texts)
    if old.only_if_waiting != new.only_if_waiting:
        effect = Effect.DIFFERENT
        if old.only_if_waiting is None or new.only_if_waiting is None:
            effect = more(new.only_if_waiting is None)
        texts = (str(rule.only_if_waiting or "whether or not") for rule in (old, new))
        yield Change("only_if_waiting", effect, *texts)
    yield from _canary(old.canary, new.canary)
    yield from longer("cold_start", old.cold_start, new.cold_start, Effect.LAXER)
    for phase in sorted(old.ignore_phases.keys() | new.ignore_phases.keys()):
        limits = (old.ignore_phases.get(phase, 0.0), new.ignore_phases.get(phase, 0.0))
        yield from longer(f"ignore_phases.{phase}", *limits, Effect.LAXER)
    yield from condition_changes(old.when, new.when)
    yield from longer("for", old.for_, new.for_, Effect.LAXER)
    yield from longer("clear_after", old.clear_after, new.clear_after, Effect.STRICTER)
    yield from longer("trust_for", old.trust_for, new.trust_for, Effect.LAXER)
    yield from _stages(old, new)
    yield from _others(old, new, _COMPARED)


def _criteria(rule: Rule) -> dict[str, str]:
    """What a job must be: the labels of `match`, and the rule's team apart from the label's."""
    found: dict[str, str] = dict(rule.match.items())
    if rule.team:
        found["team of the file"] = rule.team
    return found


def _mapping(name: str, old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[Change]:
    """Criteria that must all be met: each one more leaves fewer jobs."""
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key), new.get(key)
        if before != after:
            effect = Effect.DIFFERENT
            if before is None or after is None:
                effect = Effect.LAXER if before is None else Effect.STRICTER
            yield Change(f"{name}.{key}", effect, before or "any", after or "any")


def _others(old: Strict, new: Strict, known: frozenset[str]) -> Iterator[Change]:
    """Fields that this module knows no direction of."""
    for name in type(new).model_fields:
        before, after = getattr(old, name), getattr(new, name)
        if name not in known and before != after:
            yield Change(name, Effect.DIFFERENT, str(before), str(after))


def _stages(old: Rule, new: Rule) -> Iterator[Change]:
    before, after = dict(old.keyed_stages), dict(new.keyed_stages)
    ends = old.takes or new.takes
    for key in sorted(before.keys() | after.keys()):
        part = f"stages.{key}"
        first, second = before.get(key), after.get(key)
        if first is None or second is None:
            stage = first or second
            # A notice, or a softer act, is also what stands between a job and its end.
            warns = stage is not None and _before_harder(stage, old, new)
            effect = Effect.DIFFERENT if warns else more(first is None)
            yield Change(part, effect, _short(first), _short(second))
            continue
        for change in (*_stage(first, second), *_grades(first, second, ends=ends)):
            yield replace(change, part=f"{part}.{change.part}")


def _before_harder(stage: Stage, old: Rule, new: Rule) -> bool:
    """Whether a rule takes cards in a harder way in any case, told or asked before or not."""
    if stage.do is Action.NOTIFY:
        return old.takes or new.takes
    hardest = (max(each.do.rank for each in rule.stages) for rule in (old, new))
    return stage.do.acts and all(rank > stage.do.rank for rank in hardest)


def _short(stage: Stage | None) -> str:
    return "none" if stage is None else f"{stage.do.value} after {durations.render(stage.after)}"


def _grades(old: Stage, new: Stage, *, ends: bool) -> Iterator[Change]:
    """How far it must have come for a stage."""
    if old.when is None or new.when is None:
        if old.when is not new.when:
            warns = new.do is Action.NOTIFY and ends
            effect = Effect.DIFFERENT if warns else more(new.when is None)
            texts = ("none" if s.when is None else words(s.when) for s in (old, new))
            yield Change("when", effect, *texts)
        return
    yield from condition_changes(old.when, new.when)


def _stage(old: Stage, new: Stage) -> Iterator[Change]:
    yield from longer("after", old.after, new.after, Effect.LAXER)
    nothing = 0.0
    for name, effect in (
        ("notice_delivered_for", Effect.LAXER),
        ("max_work_lost", Effect.STRICTER),
    ):
        values = (getattr(old, name) or nothing, getattr(new, name) or nothing)
        yield from longer(name, *values, effect)
    yield from longer("grace", grace_of(old), grace_of(new), Effect.LAXER)
    keeps = [_allowance(stage) for stage in (old, new)]
    yield from longer("owner_may.keep", keeps[0][0], keeps[1][0], Effect.LAXER)
    yield from _number("owner_may.times", keeps[0][1], keeps[1][1], Effect.LAXER)
    known = {"level", "after", "do", "owner_may", "when"}
    known |= {"notice_delivered_for", "grace", "max_work_lost"}
    yield from _others(old, new, frozenset(known))


def _allowance(stage: Stage) -> tuple[float, int]:
    """How long one keep is, and how many there are."""
    may = stage.owner_may
    return (0.0, 0) if may is None else (may.keep, may.times)


def _number(part: str, old: float, new: float, effect: Effect) -> Iterator[Change]:
    """A number whose growth has this effect."""
    if old != new:
        yield Change(part, effect if new > old else flipped(effect), f"{old:g}", f"{new:g}")


# -- what holds for all rules


def _shared(old: RuleSet, new: RuleSet) -> Iterator[Change]:
    if old.timezone != new.timezone:
        yield Change("timezone", Effect.DIFFERENT, old.timezone, new.timezone)
    yield from _limits(old, new)
    yield from _profiles(old.profiles, new.profiles)
    yield from _whitelists(old.whitelist, new.whitelist)
    known = {"version", "timezone", "limits", "overall_limits"}
    known |= {"rules", "profiles", "whitelist", "tests"}
    yield from _others(old, new, frozenset(known))


def _limits(old: RuleSet, new: RuleSet) -> Iterator[Change]:
    if old.limits is None or new.limits is None:
        if old.limits is not new.limits:
            word = "given"
            before, after = ("none", word) if old.limits is None else (word, "none")
            # Without limits nothing may be ended.
            yield Change("limits.terminate", more(old.limits is None), before, after)
        return
    yield from _ends("limits.terminate", old.limits.terminate, new.limits.terminate)


def _group(old: LimitGroup | None, new: LimitGroup | None) -> Iterator[Change]:
    """The limits of the file that a rule is in, beside those over all."""
    part = "limits of its file"
    if old is None or new is None:
        if old is not new:
            words_ = ("none", "given") if old is None else ("given", "none")
            yield Change(part, more(new is None), *words_)
        return
    yield from _ends(part, old.limits, new.limits)


def _ends(part: str, old: TerminateLimits, new: TerminateLimits) -> Iterator[Change]:
    for name in ("per_tick", "per_hour", "per_user_per_day"):
        yield from _number(
            f"{part}.{name}", getattr(old, name), getattr(new, name), Effect.STRICTER
        )
    shares = [limits.halt_above_share_of_running for limits in (old, new)]
    if shares[0] != shares[1]:
        texts = [quantities.render(share, quantities.Unit.RATIO) for share in shares]
        yield Change(f"{part}.halt_above_share_of_running", more(shares[1] > shares[0]), *texts)


def _profiles(old: Sequence[Profile], new: Sequence[Profile]) -> Iterator[Change]:
    before = {_training(profile): profile for profile in old}
    after = {_training(profile): profile for profile in new}
    for key in sorted(before.keys() | after.keys()):
        first, second = before.get(key), after.get(key)
        part = f"profiles[{key}]"
        if first is None or second is None:
            word = "given"
            values = ("none", word) if first is None else (word, "none")
            yield Change(part, Effect.DIFFERENT, *values)
            continue
        for name in ("gpu_memory", "gpu_utilization", "throughput"):
            values_ = (getattr(first, name), getattr(second, name))
            if values_[0] != values_[1]:
                texts = ["none" if value is None else f"{value:g}" for value in values_]
                yield Change(f"{part}.{name}", Effect.DIFFERENT, texts[0], texts[1])
        tolerances = [profile.tolerance or 0.0 for profile in (first, second)]
        yield from _number(f"{part}.tolerance", tolerances[0], tolerances[1], Effect.LAXER)


def _training(profile: Profile) -> str:
    amp = "" if profile.amp is None else f", amp {str(profile.amp).lower()}"
    team = f", team {profile.team}" if profile.team else ""
    return (
        f"{profile.model}, batch {profile.batch}, {profile.imgsz} px, "
        f"{profile.gpus} x {profile.hardware}{amp}{team}"
    )


def _whitelists(old: Sequence[WhitelistEntry], new: Sequence[WhitelistEntry]) -> Iterator[Change]:
    before, after = _spared(old), _spared(new)
    for key in sorted(before.keys() | after.keys()):
        first, second = before.get(key), after.get(key)
        if first == second:
            continue
        who, rule_id = key
        more_protected = second is not None and (first is None or second > first)
        effect = Effect.LAXER if more_protected else Effect.STRICTER
        part = f"whitelist[{who}].{rule_id}"
        yield Change(part, effect, first or "not protected", second or "not protected")


def _spared(entries: Sequence[WhitelistEntry]) -> dict[tuple[str, str], str]:
    """(who, rule) -> until when, the latest of several, in UTC."""
    found: dict[tuple[str, str], str] = {}
    for entry in entries:
        given = entry.match.model_dump(exclude_none=True)
        who = ", ".join(f"{name} {text}" for name, text in given.items())
        until = entry.expires.astimezone(dt.UTC).isoformat()
        for rule_id in entry.rules:
            found[who, rule_id] = max(until, found.get((who, rule_id), ""))
    return found


# -- told


def difference_lines(found: Sequence[Difference]) -> Iterator[str]:
    """What changed, for people, and a summary."""
    for item in found:
        yield f"{item.rule or 'all rules'}: {item.fate}"
        for change in item.changes:
            yield f"  {change.effect:9}  {change.part}: {change.old} -> {change.new}"
    fates = [item.fate for item in found if item.rule]
    counts = [f"{fates.count(fate)} {fate}" for fate in Fate if fate in fates]
    yield f"rules: {', '.join(counts) or 'none changed'}" if found else "no difference in meaning"


def differences_json(found: Sequence[Difference]) -> str:
    """One versioned JSON document."""
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "differences": [
            {
                "rule": item.rule or None,
                "fate": item.fate.value,
                "changes": [
                    {
                        "part": change.part,
                        "effect": change.effect.value,
                        "old": change.old,
                        "new": change.new,
                    }
                    for change in item.changes
                ],
            }
            for item in found
        ],
    }
    return json.dumps(document, indent=2, ensure_ascii=False)
