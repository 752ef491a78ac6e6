"""How far a decision has come that takes several steps, and what each node did for it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from gpuwarden.ruleengine.alertmanager import rfc3339

if TYPE_CHECKING:
    from gpuwarden.ruleengine.ledger import Ledger

_PEOPLE = frozenset({"user", "user_id", "user_name"})
"""What a platform knows a job's owner by: the decision has that already, for whoever may see it."""


def steps_of(ledger: Ledger, decision_id: str) -> dict[str, Any] | None:
    """The steps of a decision, or None where one agent does all of it.

    Args:
        ledger: of the engine.
        decision_id: the decision.
    """
    act = ledger.platform_act(decision_id)
    if act is None:
        return None
    claim = json.loads(act.claim).get("identity", {})
    return {
        "platform": act.platform,
        "attempt": {name: value for name, value in claim.items() if name not in _PEOPLE},
        "step": act.step,
        "since": rfc3339(act.changed_at),
        "waited": act.waited,
        "asked_at": None if act.asked_at is None else rfc3339(act.asked_at),
        "notice": act.notice,
        "ended_at": None if act.ended_at is None else rfc3339(act.ended_at),
        "tries": act.tries,
        "word": act.word,
        "obstacle": act.obstacle,
        "successor": act.successor,
        "why": act.why,
        "nodes": [
            {
                "node": part.host,
                "action": part.action,
                "state": part.state,
                "reason": part.reason,
                "report": None if part.report is None else json.loads(part.report),
            }
            for part in ledger.parts(decision_id)
        ],
    }
