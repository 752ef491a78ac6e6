"""What the engine decided in a period, what came of it, and what people said to it.

It is read from the ledger's file, which is never written here: an engine may be running on it, or
it may be a backup. Only counts and proven figures leave this module; no reason that a person wrote
does, since it may name others.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import statistics
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any, Final

from gpuwarden.ruleengine.ledger_handles import LedgerUnusable
from gpuwarden.ruleengine.ledger_schema import MIGRATIONS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from gpuwarden.ruleengine.reports.readers import Reader

BUSY_SECONDS: Final = 10.0
TAKING: Final = frozenset({"terminate", "requeue", "yield"})
"""Actions after which a card is free."""
MAX_IDLE_HOURS: Final = 24.0
"""Longer than this nobody's card is said to have been kept from others, had it not been taken."""
_OWNERS: Final = (
    "SELECT job_id, max(user) FROM (SELECT job_id, user FROM decisions UNION ALL "
    "SELECT job_id, json_extract(body, '$.user') FROM cases) WHERE user != '' GROUP BY job_id"
)


def rulings(path: Path, begin: float, end: float, reader: Reader) -> dict[str, Any]:
    """Decisions, outcomes, keeps, appeals and regrets of a period.

    Args:
        path: the ledger, or a backup of it.
        begin: Unix time.
        end: Unix time; what was decided just then is not counted any more.
        reader: whose jobs are counted, and whose names are told.

    Raises:
        LedgerUnusable: it cannot be read.
    """
    with _reading(path) as db:
        owners = dict(db.execute(_OWNERS).fetchall())
        users = reader.users

        def mine(user: str | None) -> bool:
            return users is None or user in users

        kept_from = db.execute("SELECT value FROM meta WHERE name='audit_kept_from'").fetchone()
        decided = [
            _Decided(*row)
            for row in db.execute(
                "SELECT d.id, d.rule_id, d.job_id, d.user, d.action, d.state, d.gpus, "
                "d.created_at, d.finished_at, d.report, c.opened_at FROM decisions d "
                "LEFT JOIN cases c ON c.id = d.case_id "
                "WHERE d.created_at >= ? AND d.created_at < ? ORDER BY d.created_at, d.id",
                (begin, end),
            )
        ]
        decided = [each for each in decided if mine(each.user)]
        keeps = [
            (role, seconds)
            for job, role, seconds in db.execute(
                "SELECT job_id, role, seconds FROM keeps WHERE granted_at >= ? AND granted_at < ?",
                (begin, end),
            )
            if mine(owners.get(job))
        ]
        objections = [
            (rule, kind, job)
            for rule, kind, job in db.execute(
                "SELECT rule_id, kind, job_id FROM objections WHERE at >= ? AND at < ?",
                (begin, end),
            )
            if mine(owners.get(job))
        ]
        cases = [
            rule
            for rule, job in db.execute(
                "SELECT rule_id, job_id FROM cases WHERE opened_at >= ? AND opened_at < ?",
                (begin, end),
            )
            if mine(owners.get(job))
        ]
        lost = _losses(db, [each.id for each in decided])
    return {
        "known": True,
        "why": "",
        "whole_from": None if kept_from is None else float(kept_from[0]),
        **_counted(decided, end),
        "rules": _rules(decided, cases, objections),
        "keeps": {
            "count": len(keeps),
            "by_owners": sum(role == "owner" for role, _ in keeps),
            "hours": round(sum(seconds for _, seconds in keeps) / 3600, 2),
        },
        "appeals": sum(kind == "appeal" for _, kind, _ in objections),
        "regrets": sum(kind == "regret" for _, kind, _ in objections),
        "lost": lost,
        "largest": _largest(decided, reader),
    }


def unknown(why: str) -> dict[str, Any]:
    """The section where there is no ledger to read."""
    return {"known": False, "why": why}


class _Decided:
    """One decision with what was proven of it."""

    def __init__(self, *row: Any) -> None:
        (
            self.id,
            self.rule_id,
            self.job_id,
            self.user,
            self.action,
            self.state,
            gpus,
            self.created_at,
            self.finished_at,
            report,
            self.opened_at,
        ) = row
        self.cards: int = len(json.loads(gpus))
        self.freed = _freed(report) if self.taken else 0

    @property
    def taken(self) -> bool:
        """Whether it is proven that the cards came back."""
        return self.action in TAKING and self.state == "verified"


def _freed(report: str | None) -> int:
    """Bytes that NVML showed as freed; 0 where nobody proved any."""
    try:
        proof = json.loads(report or "{}").get("proof") or {}
        return max(0, int(proof.get("memory_freed") or 0))
    except (AttributeError, TypeError, ValueError):
        return 0


def _counted(decided: Sequence[_Decided], end: float) -> dict[str, Any]:
    outcomes = Counter((each.action, each.state) for each in decided)
    proven = [each for each in decided if each.taken]
    waits = [
        each.finished_at - each.opened_at
        for each in proven
        if each.finished_at is not None and each.opened_at is not None
    ]
    return {
        "decisions": len(decided),
        "outcomes": [
            {"action": action, "outcome": state, "count": count}
            for (action, state), count in sorted(
                outcomes.items(), key=lambda item: (-item[1], item[0])
            )
        ],
        "reclaims": len(proven),
        "proven": {
            "cards": sum(each.cards for each in proven),
            "memory_bytes": sum(each.freed for each in proven),
            "median_seconds_from_detection": round(statistics.median(waits), 1) if waits else None,
        },
        "estimated": {
            "hours_at_most": round(sum(_saved(each, end) for each in proven), 2),
            "longest_hours_each": MAX_IDLE_HOURS,
        },
    }


def _saved(each: _Decided, end: float) -> float:
    """Hours of cards from the end on, had the job stayed: to the period's end, or for a day."""
    since = each.created_at if each.finished_at is None else each.finished_at
    hours: float = min(max(end - since, 0.0) / 3600, MAX_IDLE_HOURS)
    return each.cards * hours


def _rules(
    decided: Sequence[_Decided],
    cases: Sequence[str],
    objections: Sequence[tuple[str, str, str]],
) -> list[dict[str, Any]]:
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for rule in cases:
        found[rule]["cases"] += 1
    for each in decided:
        found[each.rule_id]["decisions"] += 1
        found[each.rule_id]["reclaims"] += each.taken
        found[each.rule_id]["memory_bytes"] += each.freed
    for rule, kind, _ in objections:
        found[rule][f"{kind}s"] += 1
    names = ("cases", "decisions", "reclaims", "memory_bytes", "appeals", "regrets")
    rows = [{"rule": rule, **{name: own[name] for name in names}} for rule, own in found.items()]
    return sorted(rows, key=lambda row: (-row["decisions"], -row["cases"], row["rule"]))


def _largest(decided: Sequence[_Decided], reader: Reader) -> list[dict[str, Any]]:
    proven = sorted((each for each in decided if each.taken), key=lambda each: -each.freed)
    return [
        {
            "decision": each.id,
            "job_id": each.job_id,
            "user": reader.shown(each.user),
            "rule": each.rule_id,
            "action": each.action,
            "cards": each.cards,
            "memory_bytes": each.freed,
            "at": each.finished_at,
        }
        for each in proven[:5]
    ]


def _losses(db: sqlite3.Connection, decisions: Sequence[str]) -> dict[str, Any]:
    """Work that ends have cost: as the nodes counted it, and as it was foretold of the others."""
    wanted = set(decisions)
    counted = estimated = 0.0
    numbers = Counter[str]()
    for decision, seconds, cards, gpu_seconds in db.execute(
        "SELECT decision_id, seconds, cards, gpu_seconds FROM losses"
    ):
        if decision not in wanted:
            continue
        if gpu_seconds is not None:
            counted += gpu_seconds
            numbers["counted"] += 1
        elif seconds is not None:
            estimated += seconds * cards
            numbers["estimated"] += 1
        else:
            numbers["unknown"] += 1
    return {
        "counted_hours": round(counted / 3600, 3),
        "estimated_hours": round(estimated / 3600, 3),
        "ends": {name: numbers[name] for name in ("counted", "estimated", "unknown")},
    }


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection that writes nothing, to a ledger of this version."""
    try:
        found = path.is_file()
    except OSError as error:
        raise LedgerUnusable(
            f"{path} cannot be read: {error.strerror}. It is read as the user who owns it"
        ) from error
    if not found:
        raise LedgerUnusable(f"{path} is not a file: which ledger is meant?")
    uri = f"{path.absolute().as_uri()}?mode=ro"
    try:
        with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=BUSY_SECONDS)) as db:
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if version != len(MIGRATIONS):
                raise LedgerUnusable(
                    f"{path} is a ledger of version {version}, and this gpuwarden reads "
                    f"{len(MIGRATIONS)}: use the version that the engine runs"
                )
            db.execute("BEGIN")  # one state of it for every question
            yield db
    except sqlite3.Error as error:
        raise LedgerUnusable(
            f"{path} cannot be read: {error}. It is read as the user who owns it"
        ) from error
