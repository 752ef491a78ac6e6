"""A rule with every stage that acts, and cases that go through them by the real state machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.ruleengine.test_cases import PROVEN, YES, run

from gpuwarden.ruleengine import cases
from gpuwarden.ruleengine.model import Rule

if TYPE_CHECKING:
    from gpuwarden.ruleengine.acts import ActState
    from gpuwarden.ruleengine.cases import Case, Step

STAGES: dict[str, dict[str, Any]] = {
    "log": {"level": "light", "after": "0s", "do": "log"},
    "notify": {
        "level": "moderate",
        "after": "2m",
        "do": "notify",
        "owner_may": {"keep": "1h", "times": 1},
    },
    "checkpoint": {"level": "moderate", "after": "4m", "do": "checkpoint"},
    "yield": {
        "level": "severe",
        "after": "8m",
        "do": "yield",
        "notice_delivered_for": "5m",
        "grace": "10m",
    },
    "requeue": {
        "level": "severe",
        "after": "20m",
        "do": "requeue",
        "notice_delivered_for": "5m",
        "grace": "60s",
        "max_work_lost": "1h",
    },
    "terminate": {
        "level": "severe",
        "after": "30m",
        "do": "terminate",
        "notice_delivered_for": "5m",
        "grace": "60s",
        "max_work_lost": "1h",
    },
}
CHECKPOINT, YIELD = "moderate-checkpoint", "severe-yield"
REQUEUE, TERMINATE = "severe-requeue", "severe-terminate"


def soft_rule(*stages: str, mode: str = "enforce", **changes: dict[str, Any]) -> Rule:
    """A rule with these stages, all by default; `changes` by the stage's name."""
    names = stages or tuple(STAGES)
    return Rule.model_validate(
        {
            "id": "idle",
            "mode": mode,
            "target": "job",
            "match": {},
            "cold_start": "60s",
            "ignore_phases": {},
            "when": {"silent_for": "5m", "signals": ["cpu"]},
            "for": "1m",
            "clear_after": "1m",
            "stages": [STAGES[name] | changes.get(name, {}) for name in names],
        }
    )


def after(case: Case, minutes: float, rule: Rule) -> Step:
    """The case after some minutes of YES at ticks of 15 s; the notice arrives at once."""
    return run(case, *[YES] * int(minutes * 4), by=rule, delivery=PROVEN)


def fresh(rule: Rule) -> Case:
    """A case at its first YES."""
    return cases.opened(rule, "proc-1", wall=0.0)


def asked(case: Case, rule: Rule, key: str, state: ActState | None = None) -> Case:
    """The case once a stage has acted, and maybe what became of it."""
    decided = cases.authorised(case, rule, f"d-{key}", key=key, wall=1.0)
    return decided if state is None else cases.settled(decided, f"d-{key}", state)
