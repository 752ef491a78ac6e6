"""Drills: how far one has come, which step is slow, and how it ended. Pure.

A drill is a real reclaim of a process that exists only for it. The engine follows it from the first
sample to the proof, by what it writes down anyway::

    begun -> seen -> detected -> notified -> due -> authorised -> acting -> proven
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from gpuwarden import durations
from gpuwarden.ruleengine.model import Mode, Target

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gpuwarden.ruleengine.drill_settings import DrillSettings, StepBudgets
    from gpuwarden.ruleengine.model import Rule
    from gpuwarden.ruleengine.verdicts import JobFacts

PREFIX = "drill-"
"""How the run ids of drills begin."""
STEPS = ("seen", "detected", "notified", "due", "authorised", "acting", "proven")
_KINDS = {
    "detected": "detected",
    "notified": "notified",
    "due": "due",
    "authorised": "authorised",
    "acting": "acting",
    "verified": "proven",
}
"""Kind of an event of the audit -> the step that it ends."""
_FAILED = frozenset({"incomplete", "failed"})
OVER_BUDGETS = 2.0
"""A drill that takes so many times all budgets together is given up."""


class Result(StrEnum):
    """How a drill ended."""

    PASSED = "passed"
    """Proven, and every step in time."""
    SLOW = "slow"
    """Proven, and a step took longer than its budget."""
    FAILED = "failed"
    """Something survived, or the agent met an error."""
    GONE = "gone"
    """The victim left before anybody ended it."""
    SILENT = "silent"
    """It was asked for, and no victim was seen."""
    STUCK = "stuck"
    """It came to no end."""

    @property
    def proven(self) -> bool:
        """Whether memory came back by it."""
        return self in (Result.PASSED, Result.SLOW)


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a drill.

    Attributes:
        name: one of STEPS.
        begun: Unix time at which the step before it ended.
        ended: Unix time, or None while it lasts.
        seconds: how long it took, or has taken until now.
        budget: how long it may take.
    """

    name: str
    begun: float
    ended: float | None
    seconds: float
    budget: float

    @property
    def slow(self) -> bool:
        """Whether it took longer than it may, or already has."""
        return self.seconds > self.budget


def is_drill(job: JobFacts, settings: DrillSettings) -> bool:
    """Whether a job is a drill: of the user whom the configuration names, and by its own word."""
    run = job.run
    return (
        job.user == settings.user
        and run is not None
        and not run.conflict
        and run.run_id.startswith(PREFIX)
        and bool(job.gpus)
    )


def rule_problem(rule: Rule | None, settings: DrillSettings) -> str:
    """Why the drills' rule cannot be one, in words; empty if it can.

    It is a rule that ends jobs apart from all limits but its own, so it must be about nobody else.
    """
    if rule is None:
        return f"no rule {settings.rule} is in force: see deploy/examples/drill.yaml"
    user, run = rule.match.get("user"), rule.match.get("run_id", "")
    if user != settings.user:
        return (
            f"the rule {rule.id} must match exactly the user {settings.user} (match.user is "
            f"{user or 'not given'}), so that it ends nobody else's jobs"
        )
    if not run.startswith(PREFIX) or "|" in run:
        return f"match.run_id of the rule {rule.id} must begin with {PREFIX}, and be no alternative"
    if rule.mode is not Mode.ENFORCE or rule.target is not Target.JOB:
        return f"the rule {rule.id} must enforce, and judge jobs: nothing is rehearsed otherwise"
    if rule.canary is not None:
        return f"the rule {rule.id} must have no canary: a drill is no trial of a rule"
    return ""


def marks(events: Sequence[Mapping[str, object]], rule_id: str) -> dict[str, float]:
    """Step -> when it ended, by the events of the victim (`ledger.events`); the last of each kind.

    A step that was taken back (`postponed`, `notice_open`) is open again until it ends anew.
    """
    found: dict[str, float] = {}
    for event in events:
        if event["rule"] != rule_id:
            continue
        kind, time = str(event["kind"]), float(str(event["time"]))
        if kind in _KINDS:
            found[_KINDS[kind]] = time
        elif kind == "postponed":
            found.pop("due", None)
        elif kind == "notice_open":
            found.pop("notified", None)
            found.pop("due", None)
    if "proven" in found:
        # An agent that is done at once is first heard of with its result.
        found.setdefault("acting", found["proven"])
    return found


def steps(
    begun: float,
    seen: float | None,
    ended: Mapping[str, float],
    *,
    budgets: StepBudgets,
    now: float,
    over: float | None = None,
) -> tuple[Step, ...]:
    """The steps of a drill, up to the one that lasts.

    Args:
        begun: Unix time of the victim's start, or of the request.
        seen: Unix time of the first tick that saw it, or None.
        ended: as from `marks`.
        budgets: how long each may take.
        now: Unix time.
        over: Unix time at which the drill ended without a proof: nothing lasts beyond it.
    """
    times = dict(ended)
    if seen is not None:
        times["seen"] = seen
    found: list[Step] = []
    at = begun
    for name in STEPS:
        end = times.get(name)
        until = end if end is not None else now if over is None else over
        seconds = max(0.0, until - at)
        found.append(Step(name, at, end, seconds, float(getattr(budgets, name))))
        if end is None:
            break
        at = max(at, end)
    return tuple(found)


def outcome(
    found: Sequence[Step],
    *,
    decision: str | None,
    there: bool,
    asked: bool,
    begun: float,
    now: float,
    budgets: StepBudgets,
) -> Result | None:
    """How a drill ended, or None while it goes on.

    Args:
        found: its steps.
        decision: state of the decision about the victim, or None.
        there: whether the victim is there, or may be: a node that went dark says nothing.
        asked: whether no victim has been seen yet for somebody's request.
        begun: Unix time.
        now: Unix time.
        budgets: how long each step may take.
    """
    if found[-1].name == STEPS[-1] and found[-1].ended is not None:
        return Result.SLOW if any(step.slow for step in found) else Result.PASSED
    if decision in _FAILED:
        return Result.FAILED
    if asked:
        return Result.SILENT if now - begun > OVER_BUDGETS * budgets.seen else None
    if now - begun > longest(budgets):
        return Result.STUCK
    if not there and decision not in ("authorised", "acting"):
        return Result.GONE
    return None


def longest(budgets: StepBudgets) -> float:
    """Seconds after which a drill is given up."""
    return OVER_BUDGETS * sum(float(getattr(budgets, name)) for name in STEPS)


def sentence(node: str, result: Result, found: Sequence[Step]) -> str:
    """How a drill ended, in words."""
    last = found[-1]
    slow = ", ".join(
        f"{step.name} took {durations.render(round(step.seconds))} of "
        f"{durations.render(step.budget)}"
        for step in found
        if step.slow
    )
    return {
        Result.PASSED: f"the drill on {node} passed",
        Result.SLOW: f"the drill on {node} was proven, but slow: {slow}",
        Result.FAILED: f"the drill on {node} failed: the end of its victim is not proven",
        Result.GONE: f"the victim on {node} was gone before it was ended; it had come to "
        f"{last.name}",
        Result.SILENT: f"no victim was seen on {node}",
        Result.STUCK: f"the drill on {node} came to no end; it hangs at {last.name}",
    }[result]
