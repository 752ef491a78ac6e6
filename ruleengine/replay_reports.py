"""What is told of a replay: one versioned document, from which tables and Markdown are made."""

from __future__ import annotations

import datetime as dt
import math
import statistics
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any, Final

from gpuwarden import durations
from gpuwarden.ruleengine.model import Action
from gpuwarden.ruleengine.replay_differences import differences

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gpuwarden.ruleengine.model import Rule
    from gpuwarden.ruleengine.replay_arms import Arm
    from gpuwarden.ruleengine.replay_incidents import End, Incident
    from gpuwarden.ruleengine.replay_runs import Plan, Replay
    from gpuwarden.ruleengine.verdicts import Evidence

SCHEMA: Final = "gpuwarden.replay/v1"
FLAP_SECONDS: Final = 3600.0
"""A case that opens again so soon after the last one was closed flaps."""
INTERVAL_SPREAD: Final = 0.4
"""A lost scrape among few is no other interval."""
WEEK_SECONDS: Final = 7 * 86400.0
HOUR_SECONDS: Final = 3600.0


def iso(time: float | None) -> str | None:
    """A moment in UTC, such as 2026-11-20T08:15:00Z."""
    if time is None:
        return None
    return dt.datetime.fromtimestamp(time, dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def document(result: Replay, *, against: bool = False, variants: int = 0) -> dict[str, Any]:
    """One JSON document.

    Args:
        result: of the replay; its first arm is what was asked for.
        against: whether the second arm is what it is compared with.
        variants: how many of the last arms are variants of a sensitivity grid.
    """
    arm, plan = result.arms[0], result.plan
    grid = result.arms[len(result.arms) - variants :] if variants else []
    ends = [(item, item.end) for item in arm.incidents if item.end is not None]
    return {
        "schema": SCHEMA,
        "period": {
            "from": iso(plan.begin),
            "to": iso(plan.ticks.end),
            "tick_seconds": plan.step,
            "ticks": plan.ticks.count,
            "blind_ticks": result.blind,
            "scrape_interval_seconds": plan.scrape_interval,
            "scrape_interval_seen_seconds": _seconds(result.seen_interval),
            "horizon_seconds": plan.horizon,
        },
        "cautions": cautions(result),
        "ledger": _ledger(result),
        "jobs": result.jobs,
        "totals": totals(arm),
        "rules": [_rule(arm, rule) for rule in arm.run.rules.rules],
        "terminations": [_termination(item, end) for item, end in ends],
        "held": [_held(item) for item in arm.incidents if item.due and item.end is None],
        "incidents": [_incident(item) for item in arm.incidents],
        "notices": _notices(arm.incidents, plan.ticks.end - plan.begin + plan.step),
        "keeps": _keeps(arm, plan),
        "pauses": _pauses(arm, plan),
        "caps": _caps(arm),
        "stale": [
            {"rule": item.rule, "job": item.subject, "at": iso(item.at)} for item in _stale(arm)
        ],
        "metadata_missing": _missing(arm.incidents),
        "difference": differences(arm, result.arms[1]) if against else None,
        "sensitivity": [{"variant": item.name, **totals(item)} for item in grid],
        "cost": {
            "queries": result.cost.queries,
            "samples": result.cost.samples,
            "received_bytes": result.cost.received_bytes,
            "evaluations": sum(item.evaluations for item in result.arms),
            "stretches": result.stretches,
            "seconds": round(result.seconds, 2),
        },
    }


def cautions(result: Replay) -> list[str]:
    """What makes the result worth less than it looks, and what to do about it."""
    plan, rules = result.plan, result.arms[0].run.rules.rules
    found = []
    given, seen = plan.scrape_interval, result.seen_interval
    if seen is not None and abs(seen - given) > given * INTERVAL_SPREAD:
        right = durations.render(round(seen) or seen)
        found.append(
            f"the nodes were scraped every {seen:g} s, and judged as if every {given:g} s: "
            f"give --scrape-interval {right}, or engine.yaml by --config"
        )
    lonely = sorted({rule.team for rule in rules if rule.team} - set(plan.teams.values()))
    if lonely:
        found.append(
            f"nobody is known to be of team {', '.join(lonely)}, so that its rules judge no job: "
            "give engine.yaml, which names the directory, by --config"
        )
    queued = [
        rule.id
        for rule in rules
        if rule.takes and rule.only_if_waiting and rule.only_if_waiting.platform
    ]
    if queued:
        found.append(
            f"{', '.join(queued)}: history does not tell who waited in the platform's queue, so "
            "that every end is held; leave only_if_waiting out to see whom it might have ended"
        )
    on_trial = [rule.id for rule in rules if rule.canary is not None]
    if on_trial:
        found.append(
            f"{', '.join(on_trial)}: on trial (canary), so that only the jobs of a share of the "
            "owners are ended; nobody objects in a replay, and it never falls back to warn"
        )
    covered = plan.ticks.end - plan.begin
    found += [_too_long(rule, covered) for rule in rules if _first_act(rule) > covered]
    arm = result.arms[0]
    jobs = {job for counts in arm.counts.values() for job in counts.subjects}
    return [*found, *arm.promises.cautions(plan.begin, plan.ticks.end, jobs)]


def _first_act(rule: Rule) -> float:
    """Seconds from the first YES until it takes a job's cards, or counts as broken at all."""
    taking = [stage.after for _, stage in rule.taking_stages]
    return rule.for_ + min(taking, default=0.0)


def _too_long(rule: Rule, covered: float) -> str:
    what = "takes a job's cards" if rule.takes else "counts as broken"
    needed, given = (durations.render(round(span)) for span in (_first_act(rule), covered))
    return f"{rule.id}: {what} after {needed} at the earliest, and {given} are replayed"


def totals(arm: Arm) -> dict[str, Any]:
    """What a rule set comes to, all rules together."""
    counts = list(arm.counts.values())
    judged, unknown = sum(c.judged for c in counts), sum(c.unknown for c in counts)
    return {
        "verdicts": judged,
        "unknown": unknown,
        "coverage": _rounded((judged - unknown) / judged) if judged else None,
        "incidents": len(arm.incidents),
        "flapping": _flapping(arm.incidents),
        **ended(arm.incidents),
    }


def ended(incidents: Sequence[Incident]) -> dict[str, Any]:
    """How many jobs would have been asked or ended, and what of it: hours of cards, and regret."""
    ends = [item.end for item in incidents if item.end is not None]
    regretted = sum(end.active_again is not None for end in ends)
    return {
        "terminations": len(ends),
        "requests": _requests(incidents),
        "gpu_hours_freed": _hours(sum(end.freed_gpu_seconds for end in ends)),
        "gpu_hours_lost": _hours(sum(end.lost_gpu_seconds or 0.0 for end in ends)),
        "regretted": regretted,
        "regret_rate": _rounded(regretted / len(ends)) if ends else None,
    }


def _requests(incidents: Iterable[Incident]) -> dict[str, int]:
    """How often a trainer would have been asked to save, and to leave; it is taken to have stayed.

    What a rule that does not enforce would only have written down counts as well.
    """
    counts = Counter(stage.do.removeprefix("would_") for item in incidents for stage in item.stages)
    return {do.value: counts[do] for do in (Action.CHECKPOINT, Action.YIELD)}


def _rule(arm: Arm, rule: Rule) -> dict[str, Any]:
    counts = arm.counts[rule.id]
    own = [item for item in arm.incidents if item.rule == rule.id]
    return {
        "rule": rule.id,
        "mode": rule.mode.value,
        "canary": None if rule.canary is None else str(rule.canary),
        "target": rule.target.value,
        "subjects": len(counts.subjects),
        "ticks": counts.judged,
        "yes": counts.yes,
        "unknown": counts.unknown,
        "protected": counts.protected,
        "coverage": None if counts.coverage is None else _rounded(counts.coverage),
        "unknown_by_reason": dict(counts.reasons.most_common()),
        "incidents": len(own),
        "flapping": _flapping(own),
        **ended(own),
        "seconds_from_idle": _from_idle(own),
    }


def _from_idle(incidents: Iterable[Incident]) -> dict[str, dict[str, float]]:
    """Stage -> seconds since the job was last at work, where the replay has seen that."""
    spans: dict[str, list[float]] = defaultdict(list)
    for item in incidents:
        if item.idle_since is None:
            continue
        spans["detected"].append(item.detected - item.idle_since)
        for stage in item.stages:
            spans[stage.stage].append(stage.at - item.idle_since)
        if item.end is not None:
            spans["ended"].append(item.end.at - item.idle_since)
    return {
        stage: {"median": statistics.median(found), "most": max(found)}
        for stage, found in spans.items()
    }


def _flapping(incidents: Iterable[Incident]) -> int:
    """Incidents that came back within an hour after they were closed."""
    last: dict[tuple[str, str], float] = {}
    count = 0
    for item in sorted(incidents, key=lambda item: item.begun):
        pair = (item.rule, item.subject)
        count += pair in last and item.begun - last[pair] <= FLAP_SECONDS
        if item.closed is not None:
            last[pair] = item.closed
    return count


def _incident(item: Incident) -> dict[str, Any]:
    return {
        "rule": item.rule,
        "job": item.subject,
        "owner": item.user,
        "team": item.team,
        "gpus": item.gpus,
        "nodes": list(item.instances),
        "begun": iso(item.begun),
        "detected": iso(item.detected),
        "idle_since": iso(item.idle_since),
        "cause": item.cause,
        "because": item.because,
        "evidence": [_evidence(part) for part in item.evidence],
        "stages": [
            {
                "stage": stage.stage,
                "level": stage.level,
                "did": stage.do,
                "at": iso(stage.at),
                "evidence": [_evidence(part) for part in stage.evidence],
            }
            for stage in item.stages
        ],
        "due": iso(item.due),
        "ended": iso(item.end.at) if item.end is not None else None,
        "closed": iso(item.closed),
        "closed_because": item.closed_because,
        "kept_by": sorted(item.kept_by),
        "metadata_missing": list(item.metadata_missing),
    }


def _evidence(part: Evidence) -> dict[str, str]:
    return {
        "condition": part.condition,
        "truth": part.truth.word,
        "measured": part.measured,
        "expected": part.expected,
        "reason": part.reason,
    }


def _termination(item: Incident, end: End) -> dict[str, Any]:
    lost = end.lost_gpu_seconds
    return {
        "rule": item.rule,
        "job": item.subject,
        "owner": item.user,
        "team": item.team,
        "at": iso(end.at),
        "do": end.do,
        "idle_since": iso(item.idle_since),
        "gpus": end.gpus,
        "gpu_hours_freed": _hours(end.freed_gpu_seconds),
        "at_least": end.over is None,
        "gpu_hours_lost": None if lost is None else _hours(lost),
        "really_over": iso(end.over),
        "active_again": iso(end.active_again),
        "active_by": end.active_by,
        "seen_until": iso(end.seen_until),
        "exempt": end.exempt,
        "kept": end.kept,
    }


def _held(item: Incident) -> dict[str, Any]:
    return {
        "rule": item.rule,
        "job": item.subject,
        "owner": item.user,
        "team": item.team,
        "due": iso(item.due),
        "held_by": item.held,
        "kept_by": sorted(item.kept_by),
    }


def _notices(incidents: Iterable[Incident], seconds: float) -> list[dict[str, Any]]:
    """How often each person would be told, the most often told first."""
    counts: Counter[str] = Counter()
    for item in incidents:
        counts[item.user] += sum(stage.do.endswith("notify") for stage in item.stages)
    return [
        {"owner": user, "notices": count, "per_week": round(count * WEEK_SECONDS / seconds, 2)}
        for user, count in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
        if count
    ]


def _ledger(result: Replay) -> dict[str, Any] | None:
    people = result.plan.people
    if people is None:
        return None
    return {"file": people.file, "from": iso(people.since), "newest": iso(people.newest)}


def _keeps(arm: Arm, plan: Plan) -> list[dict[str, Any]]:
    """Keeps from the rules that are replayed, of those that were in force in the period."""
    return [
        {
            "rule": grant.keep.rule_id,
            "job": grant.keep.job_id,
            "run": grant.keep.run_id,
            "by": grant.keep.by,
            "role": grant.keep.role,
            "reason": grant.keep.reason,
            "at": iso(grant.keep.granted_at),
            "seconds": grant.keep.seconds,
            "until": iso(grant.keep.until),
            "allowed_seconds": grant.seconds,
            "why_less": grant.why,
            "put_off": sorted(grant.moved | grant.held),
        }
        for grant in arm.promises.grants
        if grant.keep.granted_at <= plan.ticks.end and grant.keep.until > plan.begin
    ]


def _pauses(arm: Arm, plan: Plan) -> list[dict[str, Any]]:
    """Pauses that were in force in the period, with the jobs whose end nothing else held."""
    past = () if plan.people is None else plan.people.pauses
    return [
        {
            "by": item.pause.by,
            "reason": item.pause.reason,
            "from": iso(item.pause.begun_at),
            "to": iso(item.over) if math.isfinite(item.over) else None,
            "ends_held": len(arm.promises.pauses.get(item.pause.id, ())),
            "jobs": sorted(arm.promises.pauses.get(item.pause.id, ())),
        }
        for item in past
        if item.pause.begun_at <= plan.ticks.end and item.over > plan.begin
    ]


def _caps(arm: Arm) -> list[dict[str, Any]]:
    found: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for reason, time, count in arm.caps:
        found[reason].append((time, count))
    return [
        {
            "limit": reason,
            "ticks": len(held),
            "first": iso(held[0][0]),
            "last": iso(held[-1][0]),
            "most_held_at_once": max(count for _, count in held),
        }
        for reason, held in sorted(found.items())
    ]


def _stale(arm: Arm) -> list[Any]:
    """Without those that had been ended by then."""
    return [
        item
        for item in arm.stale
        if item.subject not in arm.ended or arm.ended[item.subject] > item.at
    ]


def _missing(incidents: Sequence[Incident]) -> list[dict[str, Any]]:
    found = {item.subject: item.metadata_missing for item in incidents if item.metadata_missing}
    return [{"job": job, "missing": list(missing)} for job, missing in sorted(found.items())]


def _seconds(found: float | None) -> float | None:
    return None if found is None else round(found, 1)


def _hours(seconds: float) -> float:
    return round(seconds / HOUR_SECONDS, 2)


def _rounded(ratio: float) -> float:
    return round(ratio, 6)
