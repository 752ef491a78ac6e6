"""Everything that the ledger holds about one decision, as it stands there."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpuwarden.ruleengine.case_records import Case

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpuwarden.ruleengine.ledger import Ledger
    from gpuwarden.ruleengine.losses import Loss
    from gpuwarden.ruleengine.records import Decision, Keep, PlatformAct

MAX_EVENTS = 2000
MAX_LATER = 50


@dataclass(frozen=True, slots=True)
class Line:
    """An event of the audit; times are Unix times here and below."""

    id: int
    time: float
    kind: str
    mode: str
    detail: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Telling:
    """A notice and what became of it.

    Attributes:
        refusals: (time, error) of the first tries that failed.
        stage, channel, recipient, state, attempts, proof, error, time: as in `records.Notice`.
        required_at: when it was found that this recipient must have it, or None: not kept.
    """

    refusals: tuple[tuple[float, str], ...]
    stage: str
    channel: str
    recipient: str
    state: str
    attempts: int
    proof: str
    error: str
    time: float
    required_at: float | None


@dataclass(frozen=True, slots=True)
class Hold:
    """A reason that stood between a due case and its end; `ended_at` None: it still stands."""

    reason: str
    sentence: str
    begun_at: float
    ended_at: float | None


@dataclass(frozen=True, slots=True)
class RuleText:
    """A rule as it read."""

    hash: str
    document: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Opening:
    """The first sample that broke the rule."""

    rule: RuleText | None
    document: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Look:
    """The last look before the decision."""

    time: float
    rule: RuleText | None
    document: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Order:
    """What was asked of one node's agent, and its last report.

    Attributes:
        host: by which it is reached.
        body, signature: as they were sent.
        state: how far it has come.
        reason: why, where it was not done.
        report: as the agent gave it, or None.
    """

    host: str
    body: bytes
    signature: str
    state: str
    reason: str
    report: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class LaterAttempt:
    """Another attempt of the same run that came after it.

    Attributes:
        job_id: the attempt.
        seen_at: when a rule's case was opened on it, or None: it runs now, and breaks none.
        running: whether it runs now.
        resume_mode: how its trainer went on, or empty.
    """

    job_id: str
    seen_at: float | None
    running: bool = False
    resume_mode: str = ""


@dataclass(frozen=True, slots=True)
class Dossier:
    """Everything about one decision.

    Attributes:
        decision: the decision.
        orders: to the agents, in the order in which they were written down.
        platform: how far the platform's own tool has come, or None: the agents act alone.
        case: its case: as the last look saw it, or as it now is where that was not kept.
        closed_at, closed_because: of the case, or None: it is open.
        events: of its case, oldest first.
        tellings: notices of its case.
        keeps: of its rule and attempt or run, oldest first.
        holds: what held the end back, oldest first.
        opening: or None: not kept.
        look: or None: not kept.
        others: further decisions about the attempt, oldest first.
        later: attempts of the same run that came after it.
        loss: what it cost, or None: not written down.
    """

    decision: Decision
    orders: tuple[Order, ...]
    platform: PlatformAct | None
    case: Case
    closed_at: float | None
    closed_because: str | None
    events: tuple[Line, ...]
    tellings: tuple[Telling, ...]
    keeps: tuple[Keep, ...]
    holds: tuple[Hold, ...]
    opening: Opening | None
    look: Look | None
    others: tuple[Decision, ...]
    later: tuple[LaterAttempt, ...]
    loss: Loss | None = None


def read(ledger: Ledger, decision_id: str) -> Dossier | None:
    """The dossier of a decision, or None where there is no such decision.

    What an end cost belongs to `loss_records`, and what runs now to the facts: who has these adds
    them.
    """
    decision = ledger.decision(decision_id)
    if decision is None:
        return None
    number = decision.case_id
    body, closed_at, closed_because = ledger.rows(
        "SELECT body, closed_at, closed_because FROM cases WHERE id=?", (number,)
    )[0]
    look = _look(ledger, decision)
    case = Case.decode(body if look is None else json.dumps(look.document["body"]))
    return Dossier(
        decision=decision,
        orders=_orders(ledger, decision),
        platform=ledger.platform_act(decision_id),
        case=case,
        closed_at=closed_at,
        closed_because=closed_because,
        events=_events(ledger, number),
        tellings=_tellings(ledger, number),
        keeps=tuple(ledger.keeps(case.rule_id, case.job_id, case.run_id)),
        holds=tuple(
            Hold(*row)
            for row in ledger.rows(
                "SELECT reason, sentence, begun_at, ended_at FROM holds WHERE case_id=? "
                "ORDER BY id",
                (number,),
            )
        ),
        opening=_opening(ledger, number),
        look=look,
        others=tuple(
            item for item in ledger.job_decisions(decision.job_id) if item.id != decision.id
        ),
        later=_later(ledger, case, decision),
    )


def _orders(ledger: Ledger, decision: Decision) -> tuple[Order, ...]:
    parts = [
        Order(part.host, part.body, part.signature, part.state, part.reason, _report(part.report))
        for part in ledger.parts(decision.id)
    ]
    if parts or not decision.body:
        return tuple(parts)
    report = _report(decision.report)
    order = (decision.host, decision.body, decision.signature, decision.state, decision.reason)
    return (Order(*order, report),)


def _report(text: str | None) -> Mapping[str, Any] | None:
    return None if text is None else json.loads(text)


def _events(ledger: Ledger, case_id: int) -> tuple[Line, ...]:
    rows = ledger.rows(
        "SELECT id, time, kind, mode, detail FROM events WHERE case_id=? ORDER BY id LIMIT ?",
        (case_id, MAX_EVENTS),
    )
    return tuple(
        Line(number, time, kind, mode, json.loads(detail))
        for number, time, kind, mode, detail in rows
    )


def _tellings(ledger: Ledger, case_id: int) -> tuple[Telling, ...]:
    rows = ledger.rows(
        "SELECT refusals, stage, channel, recipient, state, attempts, proof, error, time, "
        "required_at FROM notices WHERE case_id=? ORDER BY rowid",
        (case_id,),
    )
    return tuple(
        Telling(tuple((at, text) for at, text in json.loads(refusals)), *rest)
        for refusals, *rest in rows
    )


def _text(ledger: Ledger, name: str) -> RuleText | None:
    rows = ledger.rows("SELECT document FROM rule_texts WHERE hash=?", (name,))
    return RuleText(name, json.loads(rows[0][0])) if rows else None


def _opening(ledger: Ledger, case_id: int) -> Opening | None:
    rows = ledger.rows("SELECT rule_hash, document FROM openings WHERE case_id=?", (case_id,))
    return Opening(_text(ledger, rows[0][0]), json.loads(rows[0][1])) if rows else None


def _look(ledger: Ledger, decision: Decision) -> Look | None:
    # A refused decision is followed by another look at the same case: the one before counts.
    rows = ledger.rows(
        "SELECT time, rule_hash, document FROM looks WHERE case_id=? AND time <= ? "
        "ORDER BY id DESC LIMIT 1",
        (decision.case_id, decision.created_at),
    )
    if not rows:
        return None
    time, name, document = rows[0]
    found = json.loads(document)
    if decision.stage and found["stage"] != decision.stage:
        return None  # of another stage: only what takes the cards is looked at so
    return Look(time, _text(ledger, name), found)


def _later(ledger: Ledger, case: Case, decision: Decision) -> tuple[LaterAttempt, ...]:
    if case.run_id is None:
        return ()
    rows = ledger.rows(
        "SELECT job_id, min(opened_at) FROM cases WHERE json_extract(body, '$.run_id')=? "
        "AND job_id != ? AND opened_at >= ? GROUP BY job_id ORDER BY 2 LIMIT ?",
        (case.run_id, case.job_id, decision.created_at, MAX_LATER),
    )
    return tuple(LaterAttempt(job_id, seen_at) for job_id, seen_at in rows)
