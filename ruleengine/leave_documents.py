"""A leave request as API, pages and commands tell it, and in one sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpuwarden.ruleengine.alertmanager import rfc3339
from gpuwarden.ruleengine.roles import Role

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpuwarden.ruleengine.engine import Engine
    from gpuwarden.ruleengine.leave_records import Leave
    from gpuwarden.ruleengine.roles import Person

_STATES = {
    "asked": "the request is on its way",
    "waiting": "it has not left yet",
    "left": "it has left",
    "unheeded": "its time is over, and it is not known to have left",
    "undeliverable": "nobody in it could read the request",
    "refused": "it was not asked",
    "lapsed": "its node did not take the request on",
    "withdrawn": "the request was taken back",
    "overtaken": "a rule has decided about it meanwhile",
}


def sees(engine: Engine, person: Person, leave: Leave) -> bool:
    """Whether a leave is theirs to see: a scheduler's own, and those of jobs that they see."""
    team = engine.rulebook.directory.user(leave.user).team
    own = person.role is Role.SCHEDULER and leave.by == person.name
    return own or person.sees(leave.user, team)


def leave_document(engine: Engine, leave: Leave) -> dict[str, Any]:
    """A leave as the API has it."""
    finished = leave.finished_at
    return {
        "id": leave.id,
        "key": leave.key,
        "by": leave.by,
        "job_id": leave.job_id,
        "run_id": leave.run_id,
        "user": leave.user,
        "at": leave.at,
        "then": leave.after,
        "cause": leave.cause,
        "reason": leave.reason,
        "successor": leave.successor,
        "nodes": list(leave.hosts),
        "deadline_seconds": leave.deadline,
        "asked_at": rfc3339(leave.created_at),
        "deadline": rfc3339(leave.created_at + leave.deadline),
        "state": leave.state.value,
        "why": leave.why,
        "finished_at": None if finished is None else rfc3339(finished),
        "steps": engine.leaves.steps(leave),
    }


def leave_sentence(leave: Mapping[str, Any]) -> str:
    """What was asked and what became of it; times are RFC 3339, for whoever shows them."""
    where = "the end of its epoch" if leave["at"] == "epoch" else "its next step"
    back = "be started again later" if leave["then"] == "requeue" else "stay away"
    what = _STATES.get(leave["state"], leave["state"])
    why = f" ({leave['why']})" if leave["why"] else ""
    return (
        f"{leave['by']} asked it at {leave['asked_at']} to save and leave at {where}, by "
        f"{leave['deadline']}, and to {back}; because of {leave['cause']}: {leave['reason']}. "
        f"By now {what}{why}"
    )
