"""The scheduler's document as rows for one reader: whose is whose, in words and times. Pure.

Everybody reads how long the queue is and who is in it, names as ever by the veil. What a job is
called, its run and the scheduler's sentence about it are told to those who may see the job.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpuwarden.schedule_api import CANCELLED, STEPS, EntryState, Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from gpuwarden.ruleengine.roles import Person
    from gpuwarden.schedule_api import (
        BudgetEntry,
        Interval,
        Preemption,
        QueueEntry,
        ScheduleDocument,
    )

MAX_RECEIPTS = 2000
"""Preemptions that are looked at, newest first."""
WAITING = (EntryState.PENDING, EntryState.HELD, EntryState.SUSPENDED)
LIVE = (*WAITING, EntryState.RUNNING, EntryState.LEAVING)
_WHY = {
    EntryState.RUNNING: "it runs",
    EntryState.LEAVING: "it was asked to leave",
}
_TONES = {
    EntryState.RUNNING: "good",
    EntryState.LEAVING: "warn",
    EntryState.HELD: "warn",
    EntryState.FAILED: "bad",
}
_OUTCOMES = {
    Outcome.OPEN: "warn",
    Outcome.DONE: "good",
    Outcome.OVERDUE: "bad",
    Outcome.FAILED: "bad",
}
_WORDS = {
    "notified": "the request is where its trainer reads it",
    "acknowledged": "its trainer has read it",
    "saved": "its state is on disk",
    "left": "its processes have ended",
    "freed": "its cards hold nothing of it any more",
    "started": "who waited for it runs",
}


def queued(document: ScheduleDocument, *, team: str = "") -> list[QueueEntry]:
    """Jobs that wait, leave or run, those that wait in their order first.

    Args:
        document: of the scheduler.
        team: only of this one; all by default.
    """
    live = [
        entry
        for entry in document.entries
        if entry.state in LIVE and (not team or entry.team == team)
    ]
    return sorted(live, key=_order)


def queue_rows(
    document: ScheduleDocument, entries: Iterable[QueueEntry], person: Person
) -> list[dict[str, Any]]:
    """Some of its entries, as their reader may read them."""
    by_id = {entry.id: entry for entry in document.entries}
    return [_queue_row(entry, by_id, person) for entry in entries]


def _order(entry: QueueEntry) -> tuple[int, int, float, str]:
    place = entry.position if entry.position is not None else 2**53
    waits = 0 if entry.state in WAITING else 1
    return (waits, place, entry.submitted, entry.id)


def _queue_row(
    entry: QueueEntry, by_id: Mapping[str, QueueEntry], person: Person
) -> dict[str, Any]:
    sees = person.sees(entry.user, entry.team)
    must_end = [by_id[name] for name in entry.must_end if name in by_id]
    waits = entry.state in WAITING
    return {
        "id": entry.id,
        "name": entry.name if sees else "",
        "run_id": entry.run_id if sees else None,
        "job_id": entry.job_id if sees else None,
        "user": entry.user,
        "team": entry.team,
        "priority": entry.priority,
        "standing": entry.standing,
        "tone": "dull" if entry.standing == CANCELLED else _TONES.get(entry.state, "dull"),
        "gpus": entry.gpus,
        "tasks": entry.tasks,
        "gpu_type": entry.gpu_type,
        "position": entry.position,
        "submitted": entry.submitted,
        "started": entry.started,
        "start": _interval(entry.start) if waits else None,
        "finish": None if waits else _interval(entry.finish),
        "why": _why(entry, sees=sees),
        "requeues": entry.requeues,
        "must_end": [
            {
                "id": other.id,
                "name": other.name if person.sees(other.user, other.team) else "",
                "user": other.user,
                "team": other.team,
                "gpus": other.gpus,
            }
            for other in must_end
        ],
        "unknown_ends": len(entry.must_end) - len(must_end),
    }


def _why(entry: QueueEntry, *, sees: bool) -> str:
    # A sentence may name the job and others; its code names nobody.
    if sees and entry.words:
        return entry.words
    if entry.why:
        return entry.why.replace("_", " ")
    return _WHY.get(entry.state, "")


def _interval(found: Interval | None) -> dict[str, float | int] | None:
    if found is None:
        return None
    return {"earliest": found.earliest, "latest": found.latest, "samples": found.samples}


def queue_figures(document: ScheduleDocument) -> dict[str, int]:
    """How many wait, leave and run, and the cards of each."""
    found: dict[str, int] = {}
    for name, states in (
        ("waiting", WAITING),
        ("leaving", (EntryState.LEAVING,)),
        ("running", (EntryState.RUNNING,)),
    ):
        rows = [entry for entry in document.entries if entry.state in states]
        found[name] = sum(entry.tasks for entry in rows)
        found[f"{name}_cards"] = sum(entry.gpus * entry.tasks for entry in rows)
    return found


def receipt_rows(
    document: ScheduleDocument | None, leaves: Iterable[Mapping[str, Any]], person: Person
) -> list[dict[str, Any]]:
    """Preemptions of the scheduler, and leaves that the engine has seen, newest first.

    Args:
        document: of the scheduler, or None: then only what the engine has asked.
        leaves: as the engine's API gives them to the same person.
        person: who reads it.
    """
    entries = {} if document is None else {entry.id: entry for entry in document.entries}
    known = list(leaves)
    rows = []
    for item in _newest(document):
        victim, successor = entries.get(item.victim), entries.get(item.successor)
        theirs = [each for each in (victim, successor) if each is not None]
        seen = any(person.sees(each.user, each.team) for each in theirs)
        if not seen and not person.sees_all:
            continue
        leave = _leave_of(item, known)
        if leave is not None:
            known.remove(leave)
        rows.append(_preemption_row(item, victim, successor, leave, person))
    rows += [_leave_row(leave) for leave in known]
    rows.sort(key=lambda row: row["begun"], reverse=True)
    return rows


def _newest(document: ScheduleDocument | None) -> list[Preemption]:
    found = [] if document is None else list(document.preemptions)
    return sorted(found, key=_begun, reverse=True)[:MAX_RECEIPTS]


def _begun(item: Preemption) -> float:
    return min(item.steps.values(), default=item.deadline or 0.0)


def _leave_of(item: Preemption, leaves: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The engine's part in a preemption: asked for this run, in whose place this comes."""
    return next(
        (
            leave
            for leave in leaves
            if item.run_id
            and leave["run_id"] == item.run_id
            and item.successor in ("", leave["successor"])
        ),
        None,
    )


def _preemption_row(
    item: Preemption,
    victim: QueueEntry | None,
    successor: QueueEntry | None,
    leave: Mapping[str, Any] | None,
    person: Person,
) -> dict[str, Any]:
    # What the engine's agents have seen is proven; the scheduler may know it by other ways only.
    steps = {**item.steps, **({} if leave is None else leave["steps"])}
    open_now = item.outcome is Outcome.OPEN
    return {
        "id": item.id,
        "victim": _party(item.victim, victim, person),
        "successor": _party(item.successor, successor, person),
        "cause": item.cause.value,
        "at": item.at,
        "deadline": item.deadline,
        "outcome": item.outcome.value,
        "tone": _OUTCOMES.get(item.outcome, "dull"),
        "words": item.words if person.sees_all else "",
        "lost_seconds": item.lost_seconds,
        "steps": timeline(steps, open_now=open_now),
        "seconds": _whole(steps),
        "begun": _begun(item),
    }


def _party(name: str, entry: QueueEntry | None, person: Person) -> dict[str, Any]:
    if entry is None:
        return {"id": name, "name": "", "user": "", "team": "", "gpus": None, "job_id": None}
    sees = person.sees(entry.user, entry.team)
    return {
        "id": name,
        "name": entry.name if sees else "",
        "user": entry.user,
        "team": entry.team,
        "gpus": entry.gpus,
        "job_id": entry.job_id if sees else None,
    }


def _leave_row(leave: Mapping[str, Any]) -> dict[str, Any]:
    state = str(leave["state"])
    tones = {"left": "good", "asked": "warn", "waiting": "warn", "unheeded": "bad"}
    steps = dict(leave["steps"])
    return {
        "id": leave["id"],
        "victim": {
            "id": leave["job_id"],
            "name": leave["run_id"],
            "user": leave["user"],
            "team": "",
            "gpus": None,
            "job_id": leave["job_id"],
        },
        "successor": {
            "id": leave["successor"],
            "name": "",
            "user": "",
            "team": "",
            "gpus": None,
            "job_id": None,
        },
        "cause": leave["cause"],
        "at": leave["at"],
        "deadline": leave["asked_seconds"] + leave["deadline_seconds"],
        "outcome": state,
        "tone": tones.get(state, "dull"),
        "words": leave["why"],
        "lost_seconds": None,
        "steps": timeline(steps, open_now=state in ("asked", "waiting")),
        "seconds": _whole(steps),
        "begun": leave["asked_seconds"],
    }


def timeline(steps: Mapping[str, float], *, open_now: bool) -> list[dict[str, Any]]:
    """Every step in its order: when, how long after the one before, or that it was not seen.

    Args:
        steps: name -> Unix time.
        open_now: whether what is missing at the end may still come.
    """
    seen = [index for index, name in enumerate(STEPS) if name in steps]
    last = seen[-1] if seen else -1
    found: list[dict[str, Any]] = []
    before: float | None = None
    for index, name in enumerate(STEPS):
        moment = steps.get(name)
        found.append(
            {
                "step": name,
                "words": _WORDS[name],
                "time": moment,
                # Clocks differ: a step before the one before it is not given a negative time.
                "gap": None if moment is None or before is None else max(0.0, moment - before),
                "missing": "" if moment is not None else _missing(index, last, open_now=open_now),
            }
        )
        before = before if moment is None else moment
    return found


def _missing(index: int, last: int, *, open_now: bool) -> str:
    return "not yet" if open_now and index > last else "not seen"


def _whole(steps: Mapping[str, float]) -> float | None:
    """From the notice to the successor's start, or None where not both were seen."""
    begun, over = steps.get("notified"), steps.get("started")
    return None if begun is None or over is None else max(0.0, over - begun)


def budget_rows(document: ScheduleDocument, person: Person) -> list[dict[str, Any]]:
    """The scheduler's budgets that a person may see, fullest first."""
    seen = [each for each in document.budgets if person.sees_all or each.team in person.teams]
    rows = [_budget_row(each) for each in seen]
    rows.sort(key=lambda row: -1.0 if row["share"] is None else row["share"], reverse=True)
    return rows


def _budget_row(entry: BudgetEntry) -> dict[str, Any]:
    limit, used = entry.limit_gpu_hours, entry.used
    share = None if used is None or limit <= 0 else used / limit
    return {
        "team": entry.team,
        "per": entry.per,
        "kind": entry.kind,
        "limit": limit,
        "used": used,
        "share": share,
        "forecast": entry.forecast,
        "over": entry.forecast is not None and entry.forecast > limit,
        "ends": entry.period_end,
    }
