"""What the engine knows for certain: one SQLite file, written before anything takes effect.

Every public method that writes is one transaction, on disk (`synchronous=FULL`) when it returns.
Events are append-only by trigger, but for whole cases of long ago (see `ledger_upkeep`); at most
one decision ends an attempt, by unique index. A lock on `<file>.lock` keeps a second engine out.
All calls are made from one thread: SQLite's own check of that stays on.
"""

from __future__ import annotations

import json
import os
import sqlite3
from contextlib import contextmanager
from dataclasses import astuple
from typing import TYPE_CHECKING, Any, Self

from gpuwarden.ruleengine import ledger_homes
from gpuwarden.ruleengine.cases import Case, Delivery
from gpuwarden.ruleengine.ledger_cases import store
from gpuwarden.ruleengine.ledger_counters import Counters
from gpuwarden.ruleengine.ledger_decisions import Decisions
from gpuwarden.ruleengine.ledger_handles import (
    LedgerTaken,
    LedgerUnusable,
    connected,
    exclusive,
    file_sizes,
)
from gpuwarden.ruleengine.ledger_schema import MIGRATIONS
from gpuwarden.ruleengine.records import Keep, Node, Notice, StoredCase

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from gpuwarden.ruleengine.records import Change, DeliveryKey

__all__ = ["Ledger", "LedgerUnusable"]

MAX_WAL_BYTES = 64 * 1024 * 1024
"""What a burst made of the log beside the file is cut back to."""
_NO_CASE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
MAX_REFUSALS = 20
"""Of one notice, that are kept for the audit."""


class Ledger(Decisions, Counters):
    """The engine's memory.

    Args:
        path: the SQLite file; created with its tables if it is missing.

    Raises:
        LedgerUnusable: another engine has it, or it is of a newer version, or not a ledger.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._life: int | None = None
        self._lock = exclusive(path)
        try:
            self._db = connected(path)
        except LedgerUnusable:
            os.close(self._lock)
            raise
        try:
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.execute("PRAGMA foreign_keys=ON")
            self._db.execute(f"PRAGMA journal_size_limit={MAX_WAL_BYTES}")
            self._check()
            self._migrate()
            found = path.stat()
        except (OSError, sqlite3.DatabaseError) as error:
            self.close()
            raise LedgerUnusable(f"{path} is not a usable ledger: {error}") from error
        except LedgerUnusable:
            self.close()
            raise
        self._file = (found.st_dev, found.st_ino)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the file and its lock."""
        self._db.close()
        os.close(self._lock)

    def unreadable(self, error: sqlite3.DatabaseError) -> LedgerUnusable:
        """What to raise where the file could not be read."""
        return LedgerUnusable(
            f"{self.path} cannot be read ({error}): nothing is done without what it knows. Mend "
            "its disk; a damaged file is replaced by its newest backup: gpuwarden ledger restore"
        )

    def _check(self) -> None:
        (found,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            what = " ".join(found.split())
            raise LedgerUnusable(
                f"{self.path} is damaged ({what}): replace it by its newest backup (gpuwarden "
                "ledger restore). Without one, move it away: limits, keeps and deadlines begin "
                "anew, and agents still know which attempts were ended"
            )

    def _migrate(self) -> None:
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version > len(MIGRATIONS):
            raise LedgerUnusable(
                f"{self.path} was written by a newer gpuwarden (ledger version {version}, this one "
                f"knows {len(MIGRATIONS)}): upgrade, or name another file as `ledger`"
            )
        for number, script in enumerate(MIGRATIONS[version:], start=version + 1):
            self._db.executescript(f"BEGIN;{script};PRAGMA user_version={number};COMMIT;")

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        try:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                # Within the transaction: nobody else can begin a life before its end.
                self._refuse_taken()
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                # A failed COMMIT may or may not have ended the transaction.
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
        except (sqlite3.IntegrityError, sqlite3.ProgrammingError):
            raise
        except sqlite3.DatabaseError as error:
            raise LedgerUnusable(
                f"{self.path} cannot be written ({error}): nothing is done that is not on disk. "
                "Free space on its disk, mend its permissions, or end what else has it open"
            ) from error

    def _refuse_taken(self) -> None:
        taken = "" if self._life is None else self.taken(self._life)
        if taken:
            raise LedgerTaken(taken)

    def transaction(self) -> AbstractContextManager[sqlite3.Connection]:
        """One transaction, on disk when it ends; for modules that own tables."""
        return self._transaction()

    def rows(self, query: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """The rows of a query; for modules that own tables, and for pages."""
        return self._db.execute(query, tuple(values)).fetchall()

    def sizes(self) -> dict[str, int]:
        """Bytes of the file, used and free, and of the log beside it (wal)."""
        used, free = file_sizes(self._db)
        log = self.path.with_name(self.path.name + "-wal")
        return {"used": used, "free": free, "wal": log.stat().st_size if log.exists() else 0}

    # -- the engine's own life

    def next_epoch(self, now: float = 0.0) -> int:
        """Begin a new life of the engine; agents refuse what an earlier one still sends.

        From then on nothing is written that belongs to a later life. The open cases of a file that
        was put back, or copied from elsewhere, are closed.

        Args:
            now: Unix time; an epoch is not less, so that a ledger that was restored or begun anew
                does not go back behind what agents have heard.

        Raises:
            LedgerUnusable: it cannot be written down.
        """
        with self._transaction() as db:
            before = self._epoch()
            epoch = max(before + 1, int(now))
            db.execute("INSERT OR REPLACE INTO meta VALUES ('epoch', ?)", (str(epoch),))
            home = ledger_homes.settle(db, self._lock, before=before, now=now)
        try:
            ledger_homes.remember(self._lock, home, epoch)
        except OSError as error:
            raise LedgerUnusable(f"{self.path}.lock cannot be written: {error}") from error
        self._life = epoch
        return epoch

    def _epoch(self) -> int:
        row = self._db.execute("SELECT value FROM meta WHERE name='epoch'").fetchone()
        return int(row[0]) if row else 0

    def taken(self, epoch: int) -> str:
        """Why this file is not the ledger of that epoch's engine any more, or an empty string.

        The lock keeps another engine out; where it does not hold (some network file systems), or
        where somebody replaced the file, what is written here might be known to nobody later.
        """
        try:
            found = self.path.stat()
        except OSError as error:
            return f"{self.path} is gone ({error.strerror}): put it back, and restart the engine"
        if (found.st_dev, found.st_ino) != self._file:
            return f"{self.path} was replaced under the running engine: restart it"
        newest = self._epoch()
        if newest > epoch:
            return (
                f"another engine (epoch {newest}, this one has {epoch}) writes to {self.path}: "
                "one engine runs per cluster; stop one of them"
            )
        return ""

    # -- cases and the audit

    def open_cases(self) -> list[StoredCase]:
        """Every case that is not closed, oldest first."""
        rows = self._db.execute("SELECT id, body FROM cases WHERE closed_at IS NULL ORDER BY id")
        return [self._case(number, body) for number, body in rows]

    def _case(self, number: int, body: str) -> StoredCase:
        try:
            return StoredCase(number, Case.decode(body))
        except _NO_CASE as error:
            raise LedgerUnusable(
                f"{self.path}: case {number} is damaged ({type(error).__name__}: {error}): replace "
                "the file by its newest backup (gpuwarden ledger restore)"
            ) from error

    def open_case(self, rule_id: str, job_id: str) -> StoredCase | None:
        """The open case of a rule and a job, or None."""
        row = self._db.execute(
            "SELECT id, body FROM cases WHERE rule_id=? AND job_id=? AND closed_at IS NULL",
            (rule_id, job_id),
        ).fetchone()
        return None if row is None else self._case(*row)

    def save(self, changes: Iterable[Change], *, time: float) -> list[StoredCase]:
        """Write what one tick made of its cases, in one transaction.

        Returns:
            The cases that are open afterwards, with their numbers, in the order given.
        """
        kept = []
        with self._transaction() as db:
            for change in changes:
                number = store(db, change, time)
                if change.closed is None:
                    kept.append(StoredCase(number, change.case))
        return kept

    def events(self, job_id: str, limit: int = 1000) -> list[dict[str, object]]:
        """The audit of a job, oldest first; at most its last `limit` lines."""
        rows = self._db.execute(
            "SELECT id, time, rule_id, kind, mode, detail FROM events WHERE job_id=? "
            "ORDER BY id DESC LIMIT ?",
            (job_id, limit),
        ).fetchall()
        names = ("id", "time", "rule", "kind", "mode")
        return [
            {**dict(zip(names, row, strict=False)), "detail": json.loads(row[5])}
            for row in reversed(rows)
        ]

    def past_cases(self, job_id: str, limit: int = 100) -> list[dict[str, object]]:
        """Closed cases of a job, newest first: rule, state, times and why each was closed."""
        rows = self._db.execute(
            "SELECT rule_id, state, opened_at, closed_at, closed_because FROM cases "
            "WHERE job_id=? AND closed_at IS NOT NULL ORDER BY id DESC LIMIT ?",
            (job_id, limit),
        )
        names = ("rule", "state", "opened_at", "closed_at", "closed_because")
        return [dict(zip(names, row, strict=True)) for row in rows]

    def jobs_like(
        self, word: str, limit: int, *, users: Collection[str] | None = None
    ) -> list[tuple[str, str | None]]:
        """(job_id, run_id) of jobs that had a case, or were asked to leave, newest first.

        Args:
            word: the whole job_id or run_id, or the beginning of either.
            limit: how many at most.
            users: only jobs of these, or None for all.
        """
        rows = self._db.execute(
            "SELECT job_id, run_id, max(at) FROM ("
            "SELECT job_id, json_extract(body, '$.run_id') AS run_id, "
            "json_extract(body, '$.user') AS user, opened_at AS at FROM cases "
            "UNION ALL SELECT job_id, run_id, user, created_at FROM leaves) "
            "WHERE (substr(job_id, 1, ?1) = ?2 OR substr(run_id, 1, ?1) = ?2) "
            "AND (?4 IS NULL OR user IN (SELECT value FROM json_each(?4))) "
            # A whole name goes first, however many begin with it.
            "GROUP BY 1, 2 ORDER BY (job_id = ?2 OR run_id IS ?2) DESC, 3 DESC, 1 DESC LIMIT ?3",
            (len(word), word, limit, None if users is None else json.dumps(sorted(users))),
        )
        return [(job_id, run_id) for job_id, run_id, _ in rows]

    # -- nodes

    def nodes(self) -> list[Node]:
        """Every node that registered and was not forgotten, by address."""
        rows = self._db.execute(
            "SELECT address, key, scheme, boot_id, exporter, registered_at, seen_at, left_at "
            "FROM nodes ORDER BY address"
        )
        return [Node(*row) for row in rows]

    def save_nodes(self, nodes: Iterable[Node]) -> None:
        """Write nodes down as they now are."""
        with self._transaction() as db:
            db.executemany(
                "INSERT OR REPLACE INTO nodes (address, key, scheme, boot_id, exporter, "
                "registered_at, seen_at, left_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                [astuple(node) for node in nodes],
            )

    def delete_nodes(self, addresses: Iterable[str]) -> None:
        """Forget nodes."""
        with self._transaction() as db:
            db.executemany(
                "DELETE FROM nodes WHERE address=?", [(address,) for address in addresses]
            )

    # -- trust in what jobs say of themselves

    def trust_spent(self) -> dict[tuple[str, str], float]:
        """(rule, job) -> seconds for which the job's own word has protected it."""
        rows = self._db.execute("SELECT rule_id, job_id, spent FROM trust")
        return {(rule, job): spent for rule, job, spent in rows}

    def save_trust(self, spent: Mapping[tuple[str, str], float], *, time: float) -> None:
        """Write budgets that have changed."""
        with self._transaction() as db:
            db.executemany(
                "INSERT OR REPLACE INTO trust VALUES (?, ?, ?, ?)",
                [(rule, job, seconds, time) for (rule, job), seconds in spent.items()],
            )

    # -- notices

    def require(
        self,
        case_id: int,
        stage: str,
        recipients: Sequence[tuple[str, str]],
        *,
        channels: Sequence[str],
        time: float,
        owner: str = "",
    ) -> None:
        """Write down who must have a notice, before it is sent.

        Args:
            case_id: the case.
            stage: the stage's notices, `key:mode`.
            recipients: (channel, address); they replace what was required by these channels and
                is not proven, since addresses get mended.
            channels: through which this message goes.
            time: Unix time.
            owner: whose job it is now; empty where that is not known.
        """
        with self._transaction() as db:
            known = db.execute(
                "SELECT channel, recipient FROM notices WHERE case_id=? AND stage=? "
                "AND state != 'proven'",
                (case_id, stage),
            ).fetchall()
            db.executemany(
                "DELETE FROM notices WHERE case_id=? AND stage=? AND channel=? AND recipient=?",
                [
                    (case_id, stage, channel, to)
                    for channel, to in known
                    if channel in channels and (channel, to) not in recipients
                ],
            )
            db.executemany(
                "INSERT INTO notices "
                "(case_id, stage, channel, recipient, state, time, required_at, owner) "
                "VALUES (?1, ?2, ?3, ?4, 'pending', ?5, ?5, ?6) "
                "ON CONFLICT DO UPDATE SET owner=excluded.owner",
                [(case_id, stage, channel, to, time, owner) for channel, to in recipients],
            )

    def delivered(self, key: DeliveryKey) -> str | None:
        """The proof of a message that was already taken, or None."""
        row = self._db.execute(
            "SELECT proof FROM deliveries WHERE fingerprint=? AND starts_at=? AND status=? "
            "AND channel=? AND recipient=?",
            key.row(),
        ).fetchone()
        return None if row is None else str(row[0])

    def record_delivery(
        self, key: DeliveryKey, *, case_id: int | None, stage: str, proof: str, time: float
    ) -> None:
        """Write a proof down: for idempotency, and for the case that waits for it."""
        with self._transaction() as db:
            db.execute(
                "INSERT OR IGNORE INTO deliveries VALUES (?, ?, ?, ?, ?, ?, ?)",
                (*key.row(), proof, time),
            )
            _count_attempt(db, key.channel, "delivered")
            if case_id is not None:
                db.execute(
                    "UPDATE notices SET state='proven', proof=?, error='', time=?, "
                    "attempts=attempts+1 WHERE case_id=? AND stage=? AND channel=? AND recipient=? "
                    "AND state != 'proven'",
                    (proof, time, case_id, stage, key.channel, key.recipient),
                )

    def record_failure(
        self, key: DeliveryKey, *, case_id: int | None, stage: str, error: str, time: float
    ) -> None:
        """Write down that a server did not take a message."""
        with self._transaction() as db:
            _count_attempt(db, key.channel, "failed")
            if case_id is not None:
                db.execute(
                    "UPDATE notices SET state='failed', error=?1, time=?2, attempts=attempts+1, "
                    # The first ones tell since when, and the newest stands in `error`.
                    "refusals=CASE WHEN json_array_length(refusals) < ?7 "
                    "THEN json_insert(refusals, '$[#]', json_array(?2, ?1)) ELSE refusals END "
                    "WHERE case_id=?3 AND stage=?4 AND channel=?5 AND recipient=?6 "
                    "AND state != 'proven'",
                    (error, time, case_id, stage, key.channel, key.recipient, MAX_REFUSALS),
                )

    def notices(self, case_id: int) -> list[Notice]:
        """Every notice of a case."""
        rows = self._db.execute(
            "SELECT stage, channel, recipient, state, attempts, proof, error, time "
            "FROM notices WHERE case_id=? ORDER BY rowid",
            (case_id,),
        )
        return [Notice(*row) for row in rows]

    def delivery(self, case_id: int, stages: Sequence[str], owner: str | None = None) -> Delivery:
        """Whether the notices of these stages (`key:mode`) are known to have arrived.

        Args:
            case_id: the case.
            stages: which of its notices.
            owner: whose job it is now: what a former owner was told is not told to this one. None:
                whoever was told.
        """
        last: float | None = None
        for stage in stages:
            total, proven, latest = self._db.execute(
                "SELECT count(*), sum(state='proven'), max(time) FROM notices "
                "WHERE case_id=?1 AND stage=?2 AND (?3 IS NULL OR owner IN ('', ?3))",
                (case_id, stage, owner),
            ).fetchone()
            if not total or proven != total:
                return Delivery()
            last = latest if last is None else max(last, latest)
        return Delivery(complete=bool(stages), proven_at=last)

    # -- keeps

    def add_keep(self, keep: Keep, change: Change | None, *, time: float) -> None:
        """Write a keep down, with the case whose deadline it moves."""
        with self._transaction() as db:
            db.execute(
                "INSERT INTO keeps (rule_id, job_id, run_id, role, by, reason, seconds, "
                "granted_at, until) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    keep.rule_id,
                    keep.job_id,
                    keep.run_id,
                    keep.role,
                    keep.by,
                    keep.reason,
                    keep.seconds,
                    keep.granted_at,
                    keep.until,
                ),
            )
            if change is not None:
                store(db, change, time)

    def keeps(self, rule_id: str, job_id: str, run_id: str | None) -> list[Keep]:
        """Keeps of a rule that concern this attempt or its run, oldest first."""
        rows = self._db.execute(
            "SELECT rule_id, job_id, run_id, role, by, reason, seconds, granted_at, until "
            "FROM keeps WHERE rule_id=? AND (job_id=? OR (run_id IS NOT NULL AND run_id=?)) "
            "ORDER BY id",
            (rule_id, job_id, run_id),
        )
        return [Keep(*row) for row in rows]


def _count_attempt(db: sqlite3.Connection, channel: str, outcome: str) -> None:
    db.execute(
        "INSERT INTO attempts VALUES (?, ?, 1) "
        "ON CONFLICT (channel, outcome) DO UPDATE SET count = count + 1",
        (channel, outcome),
    )
