"""What a rule does, in words and as JSON: conditions with their PromQL, windows, stages, times."""

from __future__ import annotations

import json
import math
import textwrap
from typing import TYPE_CHECKING, Any

from gpuwarden import durations, quantities
from gpuwarden.ruleengine import signals
from gpuwarden.ruleengine.conditions import (
    All,
    Any_,
    Gpus,
    GpuShare,
    NeedsMemory,
    NoProgress,
    Not,
    OverBudget,
    ProfileCondition,
    Promql,
    Signal,
    SilentFor,
)
from gpuwarden.ruleengine.deadlines import grace_of
from gpuwarden.ruleengine.evaluation import listens
from gpuwarden.ruleengine.grade_clocks import UNKNOWN_LIMIT_SECONDS
from gpuwarden.ruleengine.model import Action, Mode, Target, TerminateLimits

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gpuwarden.ruleengine.conditions import Condition, Leaf
    from gpuwarden.ruleengine.model import LimitGroup, Rule, RuleSet, Stage
    from gpuwarden.ruleengine.verdicts import SignalKey

SCHEMA = "gpuwarden.rule-explanations/v1"

_AGGREGATES = {
    "min": "the lowest value of the last {window}",
    "max": "the highest value of the last {window}",
    "avg": "the mean of the last {window}",
    "last": "the newest value",
}
_COMPARISONS = {
    "above": "is above",
    "at_least": "is at least",
    "below": "is below",
    "at_most": "is at most",
}
_MODES = {
    Mode.OBSERVE: "only records what it would do",
    Mode.WARN: "tells owners, and only records what it would end",
    Mode.ENFORCE: "tells owners and ends jobs",
}


def explain_rules(rules: RuleSet, chosen: Sequence[Rule], *, scrape_interval: float) -> str:
    """Explain rules as one versioned JSON document.

    Args:
        rules: the set that they belong to, for limits and protections.
        chosen: those to explain.
        scrape_interval: of the nodes, in seconds.
    """
    found = [explain_rule(rule, rules, scrape_interval=scrape_interval) for rule in chosen]
    return json.dumps({"schema": SCHEMA, "rules": found}, indent=2, ensure_ascii=False)


def explain_rule(rule: Rule, rules: RuleSet, *, scrape_interval: float) -> dict[str, Any]:
    """Everything about one rule, durations in seconds."""
    begin = 0.0 if rule.target is Target.GPU else rule.cold_start
    held = earliest(rule.when, scrape_interval)
    violation = begin + held
    detected = violation + rule.for_
    return {
        "id": rule.id,
        "description": rule.description,
        "mode": rule.mode.value,
        "target": rule.target.value,
        "team": rule.team,
        "match": dict(rule.match),
        "only_during": [str(hours) for hours in rule.only_during],
        "only_if_waiting": (None if rule.only_if_waiting is None else str(rule.only_if_waiting)),
        "canary": None if rule.canary is None else rule.canary.model_dump(),
        "cold_start": rule.cold_start,
        "ignore_phases": dict(rule.ignore_phases),
        "when": _condition(rule.when, rule.target, scrape_interval),
        "for": rule.for_,
        "clear_after": rule.clear_after,
        "trust_for": rule.trust_for if listens(rule) else None,
        "earliest": {"violation": violation, "detected": detected},
        "stages": [
            _stage(key, stage, rule, begin=begin, scrape_interval=scrape_interval)
            for key, stage in rule.keyed_stages
        ],
        "limits": (
            rules.limits.terminate.model_dump() if rules.limits is not None and rule.takes else None
        ),
        "file_limits": _file_limits(rules.limits_of(rule.id) if rule.takes else None),
        "protected": [
            {
                "match": entry.match.model_dump(exclude_none=True),
                "reason": entry.reason,
                "approved_by": entry.approved_by,
                "expires": entry.expires.isoformat(),
            }
            for entry in rules.whitelist
            if rule.id in entry.rules
        ],
    }


def _file_limits(group: LimitGroup | None) -> dict[str, Any] | None:
    if group is None:
        return None
    names = TerminateLimits.model_fields
    return {"file": group.name, **{name: getattr(group.limits, name) for name in names}}


def earliest(condition: Condition, scrape_interval: float, *, negated: bool = False) -> float:
    """Seconds after the cold start before a condition can be known to hold, at the earliest.

    Args:
        condition: the condition.
        scrape_interval: of the nodes, in seconds.
        negated: before it can be known not to hold.
    """
    match condition:
        case All() | Any_():
            whole = isinstance(condition, All) is not negated
            parts = condition.all if isinstance(condition, All) else condition.any
            times = [earliest(part, scrape_interval, negated=negated) for part in parts]
            return max(times) if whole else min(times)
        case Not():
            return earliest(condition.not_, scrape_interval, negated=not negated)
        case SilentFor():
            # One sign of life shows at once that there is no silence.
            return 0.0 if negated else condition.silent_for
        case NeedsMemory():
            return 0.0
        case ProfileCondition():
            return min(signals.window_length(key, scrape_interval) for key in condition.keys)
        case _:
            return signals.window_length(condition.key, scrape_interval)


def _stage(
    key: str, stage: Stage, rule: Rule, *, begin: float, scrape_interval: float
) -> dict[str, Any]:
    detected = begin + earliest(rule.when, scrape_interval) + rule.for_
    at = stage.after
    if stage.when is not None:
        # Its own condition is asked for as long as the rule's, from when it can first be known.
        further = begin + earliest(stage.when, scrape_interval) + rule.for_
        at += max(0.0, further - detected)
    if stage.do.takes:
        # The proof of the last notice counts.
        notices = [s.after for s in rule.stages if s.do is Action.NOTIFY and s.after <= stage.after]
        at = max(at, max(notices, default=0.0) + (stage.notice_delivered_for or 0.0))
    return {
        "key": key,
        "level": stage.level.value,
        "do": stage.do.value,
        "after": stage.after,
        "when": (
            None if stage.when is None else _condition(stage.when, rule.target, scrape_interval)
        ),
        "earliest": detected + at,
        "owner_may": (
            None
            if stage.owner_may is None
            else {"keep": stage.owner_may.keep, "times": stage.owner_may.times}
        ),
        "notice_delivered_for": stage.notice_delivered_for,
        "grace": grace_of(stage) if stage.do.acts else None,
        "max_work_lost": stage.max_work_lost,
        "takes_effect": _takes_effect(stage, rule.mode),
    }


def _takes_effect(stage: Stage, mode: Mode) -> bool:
    """Whether the mode lets the stage do what it says."""
    if stage.do is Action.LOG:
        return True
    return mode is Mode.ENFORCE or (mode is Mode.WARN and stage.do is Action.NOTIFY)


# -- conditions


def _condition(condition: Condition, target: Target, scrape_interval: float) -> dict[str, Any]:
    """A condition as a tree: kind, words, and the queries behind it."""
    match condition:
        case All():
            parts, kind, text = condition.all, "all", "all of these hold"
        case Any_():
            parts, kind, text = condition.any, "any", "at least one of these holds"
        case Not():
            parts, kind, text = (condition.not_,), "not", "this does not hold"
        case _:
            return _leaf(condition, target, scrape_interval)
    inner = [_condition(part, target, scrape_interval) for part in parts]
    return {"kind": kind, "text": text, "conditions": inner}


def _leaf(
    condition: Leaf,
    target: Target,
    scrape_interval: float,
) -> dict[str, Any]:
    match condition:
        case Signal():
            kind, text = "signal", _signal_words(condition, target)
            queries = [_query(condition.key, scrape_interval)]
        case ProfileCondition():
            kind, text = "profile", _profile_words(condition)
            queries = [_query(key, scrape_interval) for key in condition.keys]
        case NoProgress():
            length = durations.render(condition.no_progress_for)
            kind, text = "no_progress_for", f"the trainer counted no step in {length} of training"
            queries = [_query(condition.key, scrape_interval)]
        case NeedsMemory():
            share = quantities.render(condition.needs_memory, quantities.Unit.RATIO)
            text = f"what the job declares needs more than {share} of a card, by estimate"
            kind, queries = "needs_memory", []
        case OverBudget():
            limit = f"{_COMPARISONS[condition.comparison]} {condition.limit}"
            kind = "over_budget"
            text = (
                f"the used share of the team's hard budget of this {condition.over_budget} {limit}"
            )
            queries = [_query(condition.key, scrape_interval)]
        case Promql():
            limit = f"{_COMPARISONS[condition.comparison]} {condition.limit}"
            kind, text = "promql", f"the value of the expression for the job {limit}"
            queries = [_query(condition.key, scrape_interval)]
        case _:
            channels = ", ".join(condition.signals)
            kind = "silent_for"
            length = durations.render(condition.silent_for)
            text = f"there was no sign of life for {length} on any of: {channels}"
            queries = []
    return {"kind": kind, "text": text, "queries": queries}


def _signal_words(condition: Signal, target: Target) -> str:
    limit = f"{_COMPARISONS[condition.comparison]} {condition.limit}"
    window = str(condition.window)
    if condition.share is not None:
        share = quantities.render(condition.share, quantities.Unit.RATIO)
        text = f"{condition.signal} {limit} in at least {share} of the last {window}"
    elif condition.spec.rate:
        text = f"{condition.signal}, over the last {window}, {limit}"
    else:
        how = _AGGREGATES[condition.agg or "avg"].format(window=window)
        text = f"{how} of {condition.signal} {limit}"
    gpus = "" if condition.gpus is None or target is Target.GPU else _where(condition.gpus)
    return text + gpus


def _where(gpus: Gpus | GpuShare) -> str:
    """On how many of a job's cards."""
    if isinstance(gpus, GpuShare):
        share = quantities.render(gpus.share, quantities.Unit.RATIO)
        return f" on at least {share} of the job's cards"
    return " on all cards of the job" if gpus is Gpus.ALL else " on at least one card of the job"


def _profile_words(condition: ProfileCondition) -> str:
    parts = [
        f"{name} is {deviation} of what is expected"
        for name, deviation in condition.profile.entries.items()
    ]
    return f"the mean of the last {condition.window}: {', or '.join(parts)}{_where(condition.gpus)}"


def _query(key: SignalKey, scrape_interval: float) -> dict[str, Any]:
    """A query, and what a value needs to be known; a custom one is asked as it is written."""
    custom = bool(key.promql)
    last = key.agg == "last"
    spec = signals.SIGNALS.get(key.signal)
    return {
        "signal": key.signal,
        "promql": signals.query(key, scrape_interval=scrape_interval),
        "window": signals.window_length(key, scrape_interval),
        "min_samples": None if custom or last else signals.min_samples(key, scrape_interval),
        "max_age": None if custom else signals.FRESH_SCRAPES * scrape_interval,
        "self_report": key.signal == signals.PROGRESS or (spec is not None and spec.self_report),
    }


# -- in words


def explanation_lines(found: dict[str, Any]) -> Iterator[str]:
    """What `explain_rule` found, for people."""
    yield f"{found['id']}: {found['mode']}, {_MODES[Mode(found['mode'])]}"
    if found["description"]:
        yield f"  {found['description']}"
    yield ""
    yield f"  It judges {_whom(found)}"
    yield from _limited_lines(found)
    if found["target"] == Target.JOB.value:
        cold = _time(found["cold_start"])
        yield f"  from {cold} after the first use of a card on; windows begin then as well"
        for phase, limit in found["ignore_phases"].items():
            yield f"  not while its trainer says {phase}, for at most {_time(limit)}"
        if found["trust_for"] is not None:
            trusted = _time(found["trust_for"])
            yield f"  What the job says of itself delays it by at most {trusted} in all."
    for entry in found["protected"]:
        who = ", ".join(f"{name} {text}" for name, text in entry["match"].items())
        yield f"  It spares {who} until {entry['expires']}: {entry['reason']}"
    yield ""
    yield "  It is violated when"
    yield from _condition_lines(found["when"], "    ")
    yield ""
    clear = _time(found["clear_after"])
    limit = _time(UNKNOWN_LIMIT_SECONDS)
    yield f"  A case is detected once that has held for {_time(found['for'])} without a break."
    yield f"  {clear} of NO close it; UNKNOWN stops its clock, and closes it after {limit}."
    yield ""
    yield "  From then on"
    for stage in found["stages"]:
        yield from _stage_lines(stage)
    yield ""
    begin = "the first use of a card" if found["target"] == "job" else "the first sample"
    yield f"  At the earliest, since {begin}"
    times = {**found["earliest"], **{s["key"]: s["earliest"] for s in found["stages"]}}
    width = max(len(name) for name in times)
    for name, at in times.items():
        yield f"    {name:{width}}  {_time(at)}"
    if found["file_limits"] is not None:
        yield from _limit_lines(
            f"The rules of {found['file_limits']['file']}", found["file_limits"]
        )
    if found["limits"] is not None:
        yield from _limit_lines("All rules", found["limits"])


def _canary_lines(canary: dict[str, Any]) -> Iterator[str]:
    back = canary["back_to_warn"]
    share = quantities.render(canary["share"], quantities.Unit.RATIO)
    owners = _counted(back["appeals"], "owner objects", "owners object")
    ends = _counted(back["regrets"], "end is", "ends are")
    within = _time(back["within"])
    first = math.ceil(1 / canary["share"])
    text = (
        f"On trial: it ends jobs of {share} of the owners, and warns all others. It falls back to "
        f"warn by itself once {owners} or {ends} regretted within {within}, until an admin resumes "
        f"it. Of the jobs that it finds within {within}, it ends at most {share} as well"
    )
    text += f": none before it has found {first}." if first > 1 else "."
    yield from textwrap.wrap(text, 88, initial_indent="  ", subsequent_indent="  ")


def _counted(number: int, one: str, several: str) -> str:
    return f"{number} {one if number == 1 else several}"


def _limit_lines(who: str, limits: dict[str, Any]) -> Iterator[str]:
    share = quantities.render(limits["halt_above_share_of_running"], quantities.Unit.RATIO)
    yield ""
    jobs = _counted(limits["per_tick"], "job", "jobs")
    yield f"  {who} together end at most {jobs} in a tick,"
    yield f"  {limits['per_hour']} in an hour, {limits['per_user_per_day']} of a user in a day,"
    yield f"  and nothing while jobs of more than {share} of those that run are due at once."


def _limited_lines(found: dict[str, Any]) -> Iterator[str]:
    """When it counts, and when it may take cards."""
    if found["only_during"]:
        yield f"  during {' and '.join(found['only_during'])}; outside of these hours it is NO"
    if found["only_if_waiting"] is not None:
        yield f"  It takes cards only while {found['only_if_waiting']}"
    if found["canary"] is not None:
        yield from _canary_lines(found["canary"])


def _whom(found: dict[str, Any]) -> str:
    if found["target"] == Target.GPU.value:
        return "every card"
    conditions = [f"{key} is {pattern!r}" for key, pattern in found["match"].items()]
    if found["team"]:
        conditions.insert(0, f"the team is {found['team']!r}")
    return "every job" if not conditions else f"jobs of which {' and '.join(conditions)},"


def _condition_lines(condition: dict[str, Any], indent: str) -> Iterator[str]:
    yield f"{indent}- {condition['text']}"
    for part in condition.get("conditions", ()):
        yield from _condition_lines(part, f"{indent}  ")
    for query in condition.get("queries", ()):
        yield f"{indent}    {query['promql']}"
        if query["min_samples"] is not None:
            known = f"known from {query['min_samples']} samples in {_time(query['window'])} on"
            yield f"{indent}    {known}, the newest at most {_time(query['max_age'])} old"
        elif query["max_age"] is not None:
            yield f"{indent}    known while the newest is at most {_time(query['max_age'])} old"
        if query["self_report"]:
            yield f"{indent}    as the job's trainer says"


_DOES = {
    Action.LOG.value: "it is recorded",
    Action.NOTIFY.value: "the owner is told",
    Action.CHECKPOINT.value: "the trainer is asked to save now",
    Action.YIELD.value: "the trainer is asked to leave after its epoch, and is queued again",
    Action.REQUEUE.value: "the job's platform ends it, and starts it again later",
    Action.TERMINATE.value: "the job is ended",
}
_GRACES = {
    Action.CHECKPOINT.value: "which may take {}; no card is taken meanwhile",
    Action.YIELD.value: "which may take {}; no signal follows",
    Action.REQUEUE.value: "by SIGTERM, and SIGKILL {} later",
    Action.TERMINATE.value: "by SIGTERM, and SIGKILL {} later",
}


def _stage_lines(stage: dict[str, Any]) -> Iterator[str]:
    when = "at once" if stage["after"] == 0 else f"after {_time(stage['after'])}"
    only = "" if stage["takes_effect"] else " (the mode only records it)"
    yield f"    {when}: {stage['key']}: {_DOES[stage['do']]}{only}"
    if stage["when"] is not None:
        yield "      once this, too, has held for as long as the rule asks (`for`), and then for"
        yield f"      {_time(stage['after'])}:"
        yield from _condition_lines(stage["when"], "      ")
    if stage["owner_may"] is not None:
        may = stage["owner_may"]
        yield f"      who may keep the job for {_time(may['keep'])}, {may['times']} times"
    if stage["notice_delivered_for"] is not None:
        yield f"      once the owner has had the notice for {_time(stage['notice_delivered_for'])}"
    if stage["max_work_lost"] is not None:
        yield f"      if at most {_time(stage['max_work_lost'])} of work would be lost"
    if stage["grace"] is not None:
        yield f"      {_GRACES[stage['do']].format(_time(stage['grace']))}"


def _time(seconds: float) -> str:
    return durations.render(seconds)
