"""What the ledger has counted: it survives restarts, and the cases that it was counted from."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import sqlite3

WAIT_BOUNDS = (60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400)
"""Seconds: the buckets of decisions' waits, as the view `waited_upto` of the ledger has them."""


class Counters:
    """Counters of a ledger; triggers of the file keep them, so that none can be forgotten."""

    _db: sqlite3.Connection

    def count_events(self, kind: str, *, but: str = "") -> int:
        """How many events of a kind there ever were, those of the rule `but` left out."""
        (count,) = self._db.execute(
            "SELECT coalesce(sum(count), 0) FROM event_counts WHERE kind=? AND rule_id != ?",
            (kind, but),
        ).fetchone()
        return int(count)

    def events_by_rule(self, kind: str) -> dict[str, int]:
        """Rule -> how many events of a kind there ever were."""
        rows = self._db.execute(
            "SELECT rule_id, sum(count) FROM event_counts WHERE kind=? GROUP BY 1 ORDER BY 1",
            (kind,),
        )
        return {rule: int(count) for rule, count in rows}

    def notice_attempts(self) -> dict[tuple[str, str], int]:
        """(channel, outcome) -> how often."""
        rows = self._db.execute("SELECT channel, outcome, count FROM attempts")
        return {(channel, outcome): count for channel, outcome, count in rows}

    def result_counts(self) -> dict[tuple[str, str, str], int]:
        """(rule, action, result) -> how many decisions; never falls, since a result is final."""
        rows = self._db.execute("SELECT rule_id, action, state, count FROM result_counts")
        return {(rule, action, state): count for rule, action, state, count in rows}

    def stage_counts(self) -> dict[tuple[str, str, str, str], int]:
        """(rule, action, mode, outcome) -> how many stages were entered.

        The outcome is `done`, or `would` where the mode kept the stage from acting.
        """
        rows = self._db.execute(
            "SELECT rule_id, kind, mode, count FROM event_counts WHERE kind IN "
            "('log', 'notify', 'would_notify', 'would_checkpoint', 'would_yield', 'would_requeue', "
            "'would_terminate')"
        )
        return {
            (
                rule,
                kind.removeprefix("would_"),
                mode,
                "would" if kind.startswith("would_") else "done",
            ): count
            for rule, kind, mode, count in rows
        }

    def decision_waits(self) -> dict[tuple[str, str], dict[int, tuple[int, float]]]:
        """(rule, action) -> upper bound of a bucket in seconds -> how many decisions, and the sum.

        The wait is from the detection of a case to the decision that was carried out. The bound is
        one of `WAIT_BOUNDS`, or 0 for what waited longer than the last.
        """
        rows = self._db.execute("SELECT rule_id, action, upto, count, seconds FROM decision_waits")
        found: dict[tuple[str, str], dict[int, tuple[int, float]]] = {}
        for rule, action, upto, count, seconds in rows:
            found.setdefault((rule, action), {})[upto] = (count, seconds)
        return found

    def keep_counts(self) -> dict[tuple[str, str], int]:
        """(rule, role) -> how many keeps were ever granted."""
        rows = self._db.execute("SELECT rule_id, role, count FROM keep_counts")
        return {(rule, role): count for rule, role, count in rows}

    def objection_counts(self) -> dict[tuple[str, str], int]:
        """(rule, kind) -> how many appeals and regrets there ever were."""
        rows = self._db.execute("SELECT rule_id, kind, count FROM objection_counts")
        return {(rule, kind): count for rule, kind, count in rows}

    def freed_bytes(self, *, but: str = "") -> int:
        """Memory of ended processes over all proven reclaims, as NVML had it; not of rule `but`."""
        (total,) = self._db.execute(
            "SELECT coalesce(sum(freed), 0) FROM result_counts "
            "WHERE state='verified' AND rule_id != ?",
            (but,),
        ).fetchone()
        return int(total)
