"""May this case end its job now? Every invariant that stands between due and authorised.

Pure. Guards never act and never choose: they return every reason that speaks against it, so that
an operator sees all of them at once. Whatever could not be read counts as a reason.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from gpuwarden import durations
from gpuwarden.ruleengine.cases import CaseState, Delivery, lacking, terms
from gpuwarden.ruleengine.demands import service
from gpuwarden.ruleengine.verdicts import MAX_DARK_SHARE, MAX_SKEW_SECONDS, Truth

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from gpuwarden.ruleengine.cases import Case
    from gpuwarden.ruleengine.conditions import Waiting
    from gpuwarden.ruleengine.model import LimitGroup, Rule, Stage, TerminateLimits
    from gpuwarden.ruleengine.verdicts import FleetFacts, JobFacts, Verdict

DATA_AGE_SCRAPES = 2.0
"""Facts older than this many scrapes carry no action."""
HALT_FROM_JOBS = 20
"""Below this many running jobs a share says nothing."""
HOUR_SECONDS = 3600.0
DAY_SECONDS = 86400.0


@dataclass(frozen=True, slots=True)
class Blocked:
    """A reason not to act.

    Attributes:
        reason: a stable machine-readable word.
        sentence: the same for people, with the numbers.
        figures: the numbers, where the sentence is told in other languages too.
    """

    reason: str
    sentence: str
    figures: tuple[tuple[str, float | str], ...] = ()


@dataclass(frozen=True, slots=True)
class PastEnd:
    """A decision that stands and took a job's cards, or may: yield, requeue or terminate.

    Attributes:
        time: when it was decided, Unix seconds.
        user: whose job it was.
        rule_id: by which rule.
        job_id: which attempt; what was asked of a job before does not hold back its own end.
    """

    time: float
    user: str
    rule_id: str = ""
    job_id: str = ""


@dataclass(frozen=True, slots=True)
class Situation:
    """What holds for every case of one tick.

    Attributes:
        now: Unix time.
        scrape_interval: seconds.
        limits: of the rule set, or None where it has none: nothing may then be ended.
        facts: of the fleet, freshly gathered.
        ends: terminations that stand, of at least the last 24 hours.
        ended_this_tick: terminations authorised in this tick.
        due_owners: one entry per distinct owner of a job that is due; a job of an unknown owner
            stands for itself.
        killed: whether the kill switch is on; None where that could not be read.
        settled_for: seconds of unbroken completed ticks since the last start or outage.
        settle_after: seconds of those that must have passed.
        cool_down: seconds between two terminations of one owner's jobs.
        incomplete_cards: UUIDs of cards that an unproven reclaim may still hold.
        notices_skew: seconds between this clock and Alertmanager's, by which a notice may be over
            before anybody has it.
        bad_files: why the rule files or the directory in force are not those on disk, or "".
        changing: why those in force may be half of what somebody is writing, or "".
        running: jobs that run on nodes that are not dark, where `facts` holds only some of them.
        paused: who paused enforcement, until when and why, in words, or "".
        late: why this tick comes too late to act, in words, or "".
        groups: limits of single files, beside those over all.
        ended_rules: whose those of this tick are.
        due_rules: rule -> owners, as in `due_owners`, of the jobs that it would end.
    """

    now: float
    scrape_interval: float
    limits: TerminateLimits | None
    facts: FleetFacts
    ends: Sequence[PastEnd]
    ended_this_tick: int
    due_owners: Collection[str]
    killed: bool | None
    settled_for: float
    settle_after: float
    cool_down: float
    incomplete_cards: Collection[str] = ()
    notices_skew: float = 0.0
    bad_files: str = ""
    changing: str = ""
    running: int | None = None
    paused: str = ""
    late: str = ""
    groups: Sequence[LimitGroup] = ()
    ended_rules: Sequence[str] = ()
    due_rules: Mapping[str, Collection[str]] = field(default_factory=lambda: MappingProxyType({}))


def fleet_blocks(situation: Situation) -> list[Blocked]:
    """Reasons that hold for every job: nothing at all may be taken."""
    return [*doubts(situation), *changing(situation), *_share(situation)]


def doubts(situation: Situation) -> list[Blocked]:
    """Of those reasons all but the limits: whether enough is known, and nobody has said stop."""
    facts, found = situation.facts, []
    age = situation.now - facts.time
    limit = DATA_AGE_SCRAPES * situation.scrape_interval
    if not 0 <= age <= limit:
        found.append(
            Blocked("stale_facts", f"the facts are {age:.1f} s old; {limit:.0f} s are allowed")
        )
    found += [Blocked("facts_incomplete", problem) for problem in facts.problems]
    dark = facts.expected_nodes - facts.lit_nodes
    if facts.expected_nodes < 1 or dark > MAX_DARK_SHARE * facts.expected_nodes:
        found.append(
            Blocked(
                "dark_nodes",
                f"{max(dark, 0)} of {facts.expected_nodes} expected nodes are dark; "
                f"at most {MAX_DARK_SHARE:.0%} may be",
            )
        )
    skew = max(facts.clock_skew_seconds, situation.notices_skew)
    if skew > MAX_SKEW_SECONDS:
        found.append(
            Blocked(
                "clock_skew",
                f"clocks are {skew:.1f} s apart; at most {MAX_SKEW_SECONDS:.0f} s may be",
            )
        )
    found += standing_blocks(
        killed=situation.killed, paused=situation.paused, bad_files=situation.bad_files
    )
    if situation.late:
        found.append(Blocked("late_tick", situation.late))
    if situation.settled_for < situation.settle_after:
        found.append(
            Blocked(
                "settling",
                f"{_whole(situation.settled_for)} of {_whole(situation.settle_after)} of fresh "
                "data since the last start or outage",
            )
        )
    return found


def changing(situation: Situation) -> list[Blocked]:
    """Whether those whom files spare may be known only in part."""
    return [Blocked("changing_files", situation.changing)] if situation.changing else []


def standing_blocks(*, killed: bool | None, paused: str, bad_files: str) -> list[Blocked]:
    """Of those reasons the ones that need no facts of the fleet; arguments as in `Situation`."""
    found = []
    if killed is None:
        found.append(Blocked("kill_switch", "the kill switch cannot be read"))
    elif killed:
        found.append(Blocked("kill_switch", "the kill switch is on"))
    if paused:
        found.append(Blocked("paused", paused))
    if bad_files:
        found.append(Blocked("bad_files", bad_files))
    return found


def _share(situation: Situation) -> list[Blocked]:
    if situation.limits is None:
        return [Blocked("no_limits", "the rule files set no limits.terminate")]
    return _share_of(situation, situation.limits, situation.due_owners)


def _share_of(
    situation: Situation, limits: TerminateLimits, owners: Collection[str], *, file: str = ""
) -> list[Blocked]:
    # A dark node's jobs are remembered for a while, whether they still run or not.
    running = situation.running
    if running is None:
        running = sum(1 for job in situation.facts.jobs.values() if job.fresh)
    due = len(set(owners))
    limit = limits.halt_above_share_of_running
    if running >= HALT_FROM_JOBS and due > limit * running:
        return [
            Blocked(
                "share_of_running",
                f"jobs of {due} owners are due at once{_of(file)} among {running} running jobs; "
                f"more than {limit:.0%} is taken for a fault of the data until a person says "
                "otherwise",
                (("owners", due), ("running", running), ("limit", limit), ("file", file)),
            )
        ]
    return []


def share_blocks(situation: Situation) -> list[Blocked]:
    """Where so much is due at once that a person must look: over all rules, or by one file's."""
    if situation.limits is None:
        return []
    found = _share_of(situation, situation.limits, situation.due_owners)
    for group in situation.groups:
        found += _group_share(situation, group)
    return found


def limit_blocks(
    situation: Situation, user: str, rule_id: str, *, job_id: str = ""
) -> list[Blocked]:
    """Sliding limits, over all rules and of the rule's own file: they defer, they never drop.

    Args:
        situation: of the fleet.
        user: whose job it is.
        rule_id: which rule would act.
        job_id: the attempt; its own earlier acts do not count, since it is lost only once.
    """
    limits, now = situation.limits, situation.now
    if limits is None:
        return []  # fleet_blocks says so
    others = [end for end in situation.ends if not job_id or end.job_id != job_id]
    situation = dataclasses.replace(situation, ends=others)
    found = _sliding(limits, situation.ends, situation.ended_this_tick, user=user, now=now)
    for group in situation.groups:
        if rule_id in group.rules:
            found += _of_group(situation, group, user)
    own = [end.time for end in situation.ends if end.user == user]
    last = max(own, default=None)
    if last is not None and now - last < situation.cool_down:
        found.append(
            Blocked(
                "cool_down",
                f"a job of this owner was ended {durations.render(round(max(0.0, now - last)))} "
                f"ago; {durations.render(situation.cool_down)} must pass",
            )
        )
    return found


def _of_group(situation: Situation, group: LimitGroup, user: str) -> list[Blocked]:
    """What the limits of one file say: of what its rules have ended, and of whom they would."""
    ends = [end for end in situation.ends if end.rule_id in group.rules]
    in_tick = sum(1 for rule_id in situation.ended_rules if rule_id in group.rules)
    of = _of(group.name)
    found = _sliding(group.limits, ends, in_tick, user=user, now=situation.now, of=of)
    return found + _group_share(situation, group)


def _group_share(situation: Situation, group: LimitGroup) -> list[Blocked]:
    due = {owner for rule_id in group.rules for owner in situation.due_rules.get(rule_id, ())}
    return _share_of(situation, group.limits, due, file=group.name)


def _of(file: str) -> str:
    return f" for the rules of {file}" if file else ""


def _sliding(
    limits: TerminateLimits,
    ends: Sequence[PastEnd],
    in_tick: int,
    *,
    user: str,
    now: float,
    of: str = "",
) -> list[Blocked]:
    found = []
    if in_tick >= limits.per_tick:
        text = f"limits.terminate.per_tick{of} is {limits.per_tick}"
        found.append(Blocked("limit_per_tick", text))
    hour = sum(1 for end in ends if end.time > now - HOUR_SECONDS)
    if hour >= limits.per_hour:
        found.append(
            Blocked(
                "limit_per_hour",
                f"{hour} jobs were ended in the last hour; "
                f"limits.terminate.per_hour{of} is {limits.per_hour}",
            )
        )
    day = sum(1 for end in ends if end.user == user and end.time > now - DAY_SECONDS)
    if day >= limits.per_user_per_day:
        found.append(
            Blocked(
                "limit_per_user_per_day",
                f"{day} jobs of this owner were ended in the last 24 hours; "
                f"limits.terminate.per_user_per_day{of} is {limits.per_user_per_day}",
            )
        )
    return found


def blocks(
    situation: Situation,
    case: Case,
    rule: Rule,
    *,
    key: str,
    stage: Stage,
    job: JobFacts | None,
    verdict: Verdict | None,
    truth: Truth,
    delivery: Delivery,
    kept_until: float | None,
) -> list[Blocked]:
    """Every reason not to take a case's cards now: of the fleet, the limits and the case.

    The arguments are those of `case_blocks`.
    """
    return [
        *fleet_blocks(situation),
        *limit_blocks(situation, case.user, rule.id, job_id=case.job_id),
        *case_blocks(
            situation,
            case,
            rule,
            key=key,
            stage=stage,
            job=job,
            verdict=verdict,
            truth=truth,
            delivery=delivery,
            kept_until=kept_until,
        ),
    ]


def case_blocks(
    situation: Situation,
    case: Case,
    rule: Rule,
    *,
    key: str,
    stage: Stage,
    job: JobFacts | None,
    verdict: Verdict | None,
    truth: Truth,
    delivery: Delivery,
    kept_until: float | None,
) -> list[Blocked]:
    """Reasons that concern one case, on facts gathered for this decision.

    Args:
        situation: of the fleet.
        case: as the tick left it.
        rule: as it now reads.
        key: name of the stage that would act.
        stage: the stage; one that takes the job's cards.
        job: the job's fresh facts, or None where it is gone.
        verdict: the fresh verdict, or None where it could not be reached.
        truth: the fresh truth, after the budget for what the job says of itself.
        delivery: of the case's notices, read again.
        kept_until: Unix time to which a keep protects, or None.
    """
    found = []
    if rule.mode != "enforce":
        found.append(Blocked("mode", f"the rule's mode is {rule.mode}"))
    if case.state is CaseState.REFUSED:
        left = durations.render(float(round(case.retry_in)))
        found.append(Blocked("refused", f"the node's agent refused; tried again in {left}"))
    elif case.state is not CaseState.DUE:
        found.append(Blocked("not_due", f"the case is {case.state}"))
    if case.saving:
        found.append(Blocked("saving", "its trainer was asked to save, and still has time for it"))
    if job is None or verdict is None:
        return [*found, Blocked("job_gone", "the job is no longer there")]
    return [
        *found,
        *light(job),
        *_judgement(verdict, truth),
        *_far_enough(case, rule, verdict, key=key, stage=stage),
        *_waiting(situation, rule, job),
        *_promises(situation, case, (key, stage), delivery=delivery, kept_until=kept_until),
        *_work(situation, job, stage),
        *_cards(situation, job),
    ]


def request_blocks(
    situation: Situation,
    case: Case,
    rule: Rule,
    *,
    key: str,
    stage: Stage,
    job: JobFacts | None,
    verdict: Verdict | None,
    truth: Truth,
    kept_until: float | None,
) -> list[Blocked]:
    """Every reason not to ask a job's trainer for a saved state now.

    That takes nothing from it, so that it needs no notice and counts for no limit. The arguments
    are those of `case_blocks`.
    """
    found = doubts(situation)
    if rule.mode != "enforce":
        found.append(Blocked("mode", f"the rule's mode is {rule.mode}"))
    if case.over or case.leaving:
        found.append(Blocked("not_due", f"the case is {case.state}"))
    if job is None or verdict is None:
        return [*found, Blocked("job_gone", "the job is no longer there")]
    return [
        *found,
        *light(job),
        *_judgement(verdict, truth),
        *_far_enough(case, rule, verdict, key=key, stage=stage),
        *_kept(situation.now, kept_until),
    ]


def light(job: JobFacts) -> list[Blocked]:
    """Whether it is known what runs there now."""
    if job.fresh:
        return []
    return [Blocked("dark_node", f"the job's node: {job.not_fresh_reason or 'dark'}")]


def _judgement(verdict: Verdict, truth: Truth) -> list[Blocked]:
    found = []
    if verdict.protected:
        found.append(Blocked("protected", verdict.protected))
    if truth is not Truth.YES:
        why = ", ".join(verdict.unknown_reasons)
        found.append(
            Blocked(
                "not_confirmed",
                f"on fresh facts the rule says {truth.name}" + (f" ({why})" if why else ""),
            )
        )
    return found


def _far_enough(
    case: Case, rule: Rule, verdict: Verdict, *, key: str, stage: Stage
) -> list[Blocked]:
    """Whether the stage's own condition holds, and has held for long enough."""
    if stage.when is None:
        return []
    grade, found = verdict.grade(key), []
    if grade is None or grade.truth is not Truth.YES:
        says = "is not known" if grade is None else f"says {grade.truth.name}"
        why = "" if grade is None else ", ".join(sorted({e.reason for e in grade.evidence} - {""}))
        text = f"on fresh facts the condition of {key} {says}" + (f" ({why})" if why else "")
        found.append(Blocked("not_confirmed", text))
    left = lacking(case, rule, key, stage)
    if left > 0:
        text = f"the condition of {key} must hold for another {durations.render(round(left))}"
        found.append(Blocked("not_far_enough", text))
    return found


def _waiting(situation: Situation, rule: Rule, job: JobFacts) -> list[Blocked]:
    """Whether somebody needs what the job holds, where the rule asks for that."""
    waiting = rule.only_if_waiting
    if waiting is None:
        return []
    value = situation.facts.numbers.get(waiting.key)
    if value is None:
        why = situation.facts.failed.get(waiting.key, "only_if_waiting gave not exactly one row")
        return [Blocked("waiting_unknown", f"whether anybody waits is not known: {why}")]
    if not waiting.holds(value):
        text = f"only_if_waiting is {value:g}, and ends jobs only {waiting.comparison_text}"
        return [Blocked("nobody_waiting", text)]
    return _service(situation, waiting, job) if waiting.fit else []


def _service(situation: Situation, waiting: Waiting, job: JobFacts) -> list[Blocked]:
    """Whether the job's end would let somebody start who waits."""
    demand = situation.facts.demands.get(waiting.platform)
    if demand is None:
        return [Blocked("fit_unknown", "whether the cards would serve who waits is not known")]
    found = service(demand, job, waiting.place)
    if found.truth is Truth.YES:
        return []
    return [Blocked("fit_unknown" if found.truth is Truth.UNKNOWN else "no_fit", found.why)]


def _promises(
    situation: Situation,
    case: Case,
    acting: tuple[str, Stage],
    *,
    delivery: Delivery,
    kept_until: float | None,
) -> list[Blocked]:
    """What the owner was told, or was granted."""
    found = _kept(situation.now, kept_until)
    held = terms(case, *acting)
    if not delivery.complete or case.notified_at is None:
        found.append(Blocked("notice_not_delivered", "no proof that the owner has the notice"))
    elif case.notice_age < held.notice_delivered_for:
        found.append(
            Blocked(
                "notice_too_young",
                f"the owner has had the notice for {_whole(case.notice_age)} of the "
                f"{_whole(held.notice_delivered_for)} that were promised",
            )
        )
    if case.elapsed < held.after:
        passed, after = _whole(case.elapsed), _whole(held.after)
        found.append(
            Blocked("deadline", f"{passed} of {after} have passed since it counted as broken")
        )
    return found


def _kept(now: float, until: float | None) -> list[Blocked]:
    if until is None or until <= now:
        return []
    left = durations.render(float(round(until - now)))
    return [Blocked("kept", f"a keep protects the job for another {left}")]


def _whole(seconds: float) -> str:
    """A duration in whole seconds, rounded down: a time that is not over never reads as if."""
    return durations.render(float(int(seconds)))


def _cards(situation: Situation, job: JobFacts) -> list[Blocked]:
    shared = sorted({gpu.uuid for gpu in job.gpus} & set(situation.incomplete_cards))
    if not shared:
        return []
    return [
        Blocked(
            "incomplete_reclaim",
            f"an earlier reclaim on {', '.join(shared)} is not proven; no second victim there",
        )
    ]


def work_lost(job: JobFacts, now: float) -> float | None:
    """Seconds of work that would be lost now, or None where not even the start is known.

    Without a saved state that is everything since the start; what an earlier attempt saved counts
    from this attempt's start. What lies in the future is not known.
    """
    saved = job.run.checkpoint_time if job.run is not None else None
    latest = now + MAX_SKEW_SECONDS
    known = [at for at in (saved, job.start_time) if at is not None and at <= latest]
    return max(0.0, now - max(known)) if known else None


def _work(situation: Situation, job: JobFacts, stage: Stage) -> list[Blocked]:
    if not stage.do.ends:
        return []  # it saves before it leaves, or stays
    lost = work_lost(job, situation.now)
    if lost is None:
        return [Blocked("work_unknown", "neither a saved state nor the job's start is known")]
    limit = stage.max_work_lost or 0.0
    if lost > limit:
        return [
            Blocked(
                "work_lost",
                f"{durations.render(float(round(lost)))} of work would be lost; "
                f"max_work_lost is {durations.render(limit)}",
            )
        ]
    return []


def owners(due: Iterable[Case]) -> set[str]:
    """One entry for each distinct owner of these cases."""
    return {owner_key(case.user, case.job_id) for case in due}


def owners_by_rule(due: Iterable[Case]) -> dict[str, set[str]]:
    """Rule -> the owners of its cases among these."""
    found: dict[str, set[str]] = {}
    for case in due:
        found.setdefault(case.rule_id, set()).add(owner_key(case.user, case.job_id))
    return found


def owner_key(user: str, job_id: str) -> str:
    """What counts as one owner: the user, or the job itself where the user is not known."""
    return f"user:{user}" if user else f"job:{job_id}"
