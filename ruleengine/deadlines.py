"""What is to be done to the job of a case next, and when at the earliest. Pure.

All of it follows from the case, the rule and what the owner was told: nothing here changes a case.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuwarden.ruleengine.acts import (
    CHECKPOINT_SECONDS,
    Promise,
    hardest,
)
from gpuwarden.ruleengine.model import Action

if TYPE_CHECKING:
    from gpuwarden.ruleengine.case_records import Case
    from gpuwarden.ruleengine.model import Rule, Stage


def next_stage(case: Case, rule: Rule) -> tuple[str, Stage] | None:
    """The stage that takes the job's cards next: one that is ready, else the earliest; or None."""
    left = _open_stages(case, rule)
    for item in left:
        if ready(case, rule, *item):
            return item
    return min(left, key=lambda item: _wait(case, rule, *item), default=None)


def asking_stages(case: Case, rule: Rule) -> tuple[tuple[str, Stage], ...]:
    """The stages whose time has come to ask the trainer for a saved state."""
    if rule.mode != "enforce" or case.detected_at is None or case.last != "yes":
        return ()
    if case.over or case.leaving:
        return ()
    return tuple(
        (key, stage)
        for key, stage in rule.acting_stages
        if not stage.do.takes and ahead(case, key, stage) and reached(case, rule, key, stage)
    )


def upcoming(case: Case, rule: Rule, *, now: float) -> tuple[tuple[str, Stage, float], ...]:
    """What is still to be done to a job if nothing changes, soonest first.

    Args:
        case: as the last tick left it.
        rule: as it now reads.
        now: Unix time.

    Returns:
        (key, stage, seconds from now at the earliest); empty where the mode forbids it.
    """
    if rule.mode != "enforce" or case.over:
        return ()
    leaving = leaving_for(case, rule, now=now)
    found = [
        (key, stage, max(_wait(case, rule, key, stage), leaving if stage.do.takes else 0.0))
        for key, stage in rule.acting_stages
        if ahead(case, key, stage)
    ]
    return tuple(sorted(found, key=lambda item: item[2]))


def leaving_for(case: Case, rule: Rule, *, now: float) -> float:
    """Seconds for which a job that was asked to leave may still do so; nothing harder comes before.

    The arguments are those of `upcoming`.
    """
    acts = [act for act in case.acts if case.leaving and act.decision_id == case.decision_id]
    stages = dict(rule.taking_stages)
    return max(
        (
            act.at + terms(case, act.key, stages[act.key]).grace - now
            for act in acts
            if act.key in stages
        ),
        default=0.0,
    )


def remaining(case: Case, rule: Rule) -> float | None:
    """Seconds until the job's cards may be taken at the earliest, or None where they never are.

    Before the notice is proven it is counted as if that happened now.
    """
    following = next_stage(case, rule)
    return None if following is None else remaining_of(case, rule, *following)


def remaining_of(case: Case, rule: Rule, key: str, stage: Stage) -> float | None:
    """Seconds until a stage may act at the earliest, or None where the rule's mode forbids it."""
    return _wait(case, rule, key, stage) if rule.mode == "enforce" else None


def terms(case: Case, key: str, stage: Stage) -> Promise:
    """The deadline, the notice's age and the grace of a stage that hold for a case.

    Each is the later of the rule and of what its owner was told; keeps are included.
    """
    after, notice, grace = stage.after, stage.notice_delivered_for or 0.0, grace_of(stage)
    told = case.promise_of(key)
    if told is not None:
        after = max(after, told.after)
        notice = max(notice, told.notice_delivered_for)
        grace = max(grace, told.grace)
    return Promise(after + case.kept, notice, grace, key)


def grace_of(stage: Stage) -> float:
    """Seconds that a stage gives for what it asks, as the rule reads; 0 where it asks nothing."""
    if stage.do is Action.CHECKPOINT and stage.grace is None:
        return CHECKPOINT_SECONDS
    return stage.grace or 0.0


def lacking(case: Case, rule: Rule, key: str, stage: Stage) -> float:
    """Seconds for which a stage's own condition must still hold; 0 for a stage without one."""
    if stage.when is None:
        return 0.0
    return max(0.0, rule.for_ + stage.after - case.clock(key).held)


def far_enough(case: Case, rule: Rule, key: str, stage: Stage) -> bool:
    """Whether a stage's own condition holds, and has held for long enough; YES without one."""
    if stage.when is None:
        return True
    return case.clock(key).last == "yes" and lacking(case, rule, key, stage) == 0


def reached(case: Case, rule: Rule, key: str, stage: Stage) -> bool:
    """Whether a stage's time has come, and it has come far enough for it."""
    after = terms(case, key, stage).after if stage.do.acts else stage.after
    return case.elapsed >= after and far_enough(case, rule, key, stage)


def ready(case: Case, rule: Rule, key: str, stage: Stage) -> bool:
    """Whether a stage may take the job's cards, as far as times and notices go."""
    return (
        rule.mode == "enforce"
        and not case.saving
        and case.promise_of(key) is not None
        and case.notified_at is not None
        and reached(case, rule, key, stage)
        and case.notice_age >= terms(case, key, stage).notice_delivered_for
    )


def ahead(case: Case, key: str, stage: Stage) -> bool:
    """Whether a stage that acts may still do so: not done, nor softer than what was done."""
    act = case.act(key)
    return stage.do.rank >= hardest(case.acts) and (act is None or not (act.open or act.spent))


def _open_stages(case: Case, rule: Rule) -> list[tuple[str, Stage]]:
    """Stages that may still take the job's cards."""
    return [item for item in rule.taking_stages if ahead(case, *item)]


def _wait(case: Case, rule: Rule, key: str, stage: Stage) -> float:
    held = terms(case, key, stage)
    age = case.notice_age if case.notified_at is not None else 0.0
    wait = 0.0 if case.detected_at is not None else max(0.0, rule.for_ - case.yes_for)
    return max(
        wait + held.after - case.elapsed,
        lacking(case, rule, key, stage),
        held.notice_delivered_for - age,
        case.retry_in if stage.do.takes else 0.0,
        0.0,
    )
