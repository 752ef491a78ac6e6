"""What the ledger may forget, and when: in small portions, between two ticks.

A case is forgotten as a whole, with its events, notices and decisions, and only when nothing can
hang on it any more: it is closed, older than `retention.audit`, its job is not seen, and no
decision of it is open, unproven or young enough to count for a limit.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from gpuwarden.ruleengine.canary_terms import MAX_WITHIN_SECONDS
from gpuwarden.ruleengine.ledger import LedgerUnusable

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Collection

    from gpuwarden.clock import Clock
    from gpuwarden.ruleengine.ledger import Ledger
    from gpuwarden.ruleengine.verdicts import FleetFacts

BATCH = 200
"""Cases in one transaction: some ten thousand rows at most, well below a tick."""
EVERY_SECONDS = 3600.0
TRUST_SECONDS = 30 * 86400.0
"""A budget is forgotten this long after its job was last seen, never while the job runs."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Pruned:
    """What one portion forgot.

    Attributes:
        cases, keeps, deliveries: rows; a case counts with everything that belongs to it.
        trust: (rule, job) of budgets.
        more: whether there is more to forget at once.
    """

    cases: int = 0
    keeps: int = 0
    deliveries: int = 0
    trust: tuple[tuple[str, str], ...] = ()
    more: bool = False


def prune(
    ledger: Ledger,
    *,
    now: float,
    keep: float,
    jobs: Collection[str],
    runs: Collection[str],
    limit: int = BATCH,
) -> Pruned:
    """Forget one portion of what is older than `keep`.

    Args:
        ledger: of the engine.
        now: Unix time.
        keep: seconds for which closed cases are kept.
        jobs: every job that is seen now; nothing of them is forgotten.
        runs: run_ids of those jobs.
        limit: cases, keeps and deliveries of this portion, each.

    Raises:
        LedgerUnusable: the file cannot be written; nothing was forgotten.
    """
    horizon, seen = now - keep, json.dumps(sorted(jobs))
    with ledger.transaction() as db:
        numbers = _cases(db, horizon, seen, limit)
        if numbers:
            _forget(db, numbers, horizon)
        keeps = db.execute(
            "DELETE FROM keeps WHERE id IN (SELECT id FROM keeps WHERE until < ?1 "
            "AND job_id NOT IN (SELECT value FROM json_each(?2)) "
            "AND (run_id IS NULL OR run_id NOT IN (SELECT value FROM json_each(?3))) LIMIT ?4)",
            (horizon, seen, json.dumps(sorted(runs)), limit),
        ).rowcount
        # A proof answers the repeats of its alert for as long as the case is open.
        deliveries = db.execute(
            "DELETE FROM deliveries WHERE rowid IN (SELECT rowid FROM deliveries "
            "WHERE time < min(?1, coalesce((SELECT min(opened_at) FROM cases "
            "WHERE closed_at IS NULL), ?1)) LIMIT ?2)",
            (horizon, limit),
        ).rowcount
        db.execute(
            "UPDATE trust SET time=? WHERE job_id IN (SELECT value FROM json_each(?))",
            (now, seen),
        )
        db.execute(
            "DELETE FROM objections WHERE id IN (SELECT id FROM objections WHERE at < ? LIMIT ?)",
            (min(horizon, now - MAX_WITHIN_SECONDS), limit),
        )
        leaves = _forget_leaves(db, horizon, seen, limit)
        trust = db.execute(
            "DELETE FROM trust WHERE time < ? RETURNING rule_id, job_id", (now - TRUST_SECONDS,)
        ).fetchall()
    more = limit in (len(numbers), keeps, deliveries, leaves)
    return Pruned(len(numbers), keeps, deliveries, tuple(trust), more)


def _cases(db: sqlite3.Connection, horizon: float, seen: str, limit: int) -> list[int]:
    rows = db.execute(
        "SELECT id FROM cases WHERE closed_at < ?1 "
        "AND job_id NOT IN (SELECT value FROM json_each(?2)) "
        "AND NOT EXISTS (SELECT 1 FROM decisions WHERE case_id = cases.id AND (finished_at IS NULL "
        "OR state = 'incomplete' OR finished_at >= ?1 OR created_at >= ?1)) "
        "AND NOT EXISTS (SELECT 1 FROM events WHERE case_id = cases.id AND time >= ?1) "
        "ORDER BY closed_at LIMIT ?3",
        (horizon, seen, limit),
    )
    return [number for (number,) in rows]


def _keep_from(db: sqlite3.Connection, horizon: float) -> None:
    """The audit lets go only of what is older than this, and says from when on it is whole."""
    db.execute(
        "INSERT INTO meta VALUES ('audit_kept_from', ?1) ON CONFLICT (name) "
        "DO UPDATE SET value = max(CAST(value AS REAL), CAST(?1 AS REAL))",
        (f"{horizon:.3f}",),
    )


def _forget_leaves(db: sqlite3.Connection, horizon: float, seen: str, limit: int) -> int:
    """Leaves with their result, and their lines of the audit, which stand in no case."""
    rows = db.execute(
        "SELECT id, job_id FROM leaves WHERE finished_at < ?1 AND created_at < ?1 "
        "AND job_id NOT IN (SELECT value FROM json_each(?2)) LIMIT ?3",
        (horizon, seen, limit),
    ).fetchall()
    if not rows:
        return 0
    _keep_from(db, horizon)
    db.execute(
        "DELETE FROM events WHERE kind LIKE 'leave_%' AND time < ?1 AND case_id IS NULL "
        "AND job_id IN (SELECT value FROM json_each(?2)) "
        "AND json_extract(detail, '$.leave') IN (SELECT value FROM json_each(?3))",
        (horizon, json.dumps([job for _, job in rows]), json.dumps([name for name, _ in rows])),
    )
    db.execute(
        "DELETE FROM leaves WHERE id IN (SELECT value FROM json_each(?))",
        (json.dumps([name for name, _ in rows]),),
    )
    return len(rows)


def _forget(db: sqlite3.Connection, numbers: list[int], horizon: float) -> None:
    _keep_from(db, horizon)
    chosen = json.dumps(numbers)
    for statement in (
        "DELETE FROM events WHERE case_id IN (SELECT value FROM json_each(?))",
        "DELETE FROM notices WHERE case_id IN (SELECT value FROM json_each(?))",
        "DELETE FROM decisions WHERE case_id IN (SELECT value FROM json_each(?))",
        "DELETE FROM cases WHERE id IN (SELECT value FROM json_each(?))",
    ):
        db.execute(statement, (chosen,))
    db.execute("DELETE FROM losses WHERE decision_id NOT IN (SELECT id FROM decisions)")
    db.execute(
        "DELETE FROM rule_texts WHERE hash NOT IN "
        "(SELECT rule_hash FROM openings UNION SELECT rule_hash FROM looks)"
    )


class Upkeep:
    """Forgets a portion after a tick: once an hour, and then tick by tick until all is done.

    Args:
        ledger: of the engine.
        keep: seconds for which closed cases are kept.
        clock: the engine's.
    """

    def __init__(self, ledger: Ledger, keep: float, clock: Clock) -> None:
        self._ledger = ledger
        self._keep = keep
        self._clock = clock
        self._next = clock.monotonic()

    def run(self, facts: FleetFacts) -> tuple[tuple[str, str], ...]:
        """Forget a portion if it is time.

        Args:
            facts: of the tick; with problems in them it is not known which jobs run.

        Returns:
            (rule, job) of budgets that were forgotten.
        """
        if self._clock.monotonic() < self._next or facts.problems:
            return ()
        jobs = facts.jobs.values()
        try:
            found = prune(
                self._ledger,
                now=self._clock.wall(),
                keep=self._keep,
                jobs=facts.jobs.keys(),
                runs={job.run.run_id for job in jobs if job.run is not None},
            )
        except LedgerUnusable as error:
            log.warning("nothing old is forgotten", error=str(error))
            found = Pruned()
        if not found.more:
            self._next = self._clock.monotonic() + EVERY_SECONDS
        if found.cases or found.keeps or found.deliveries:
            log.info(
                "old cases forgotten",
                cases=found.cases,
                keeps=found.keeps,
                deliveries=found.deliveries,
            )
        return found.trust
