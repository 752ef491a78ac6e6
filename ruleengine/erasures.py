"""Forgetting a person: their name and addresses leave the ledger, and nothing else does.

Whatever belongs to the person's jobs is gone through word by word: every column of every table,
also of tables that are added later. Elsewhere only fields that name people change, and addresses,
which mean one person wherever they stand. Counters, limits and the order of events stay as they
are. The audit is append-only for everybody else; the rewriting is itself a line of it, without the
name.

It works on a file, whether an engine runs on it or not, in one transaction: all of it or nothing.
"""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gpuwarden.errors import RefusedAction
from gpuwarden.ruleengine.ledger_handles import LedgerUnusable, file_sizes
from gpuwarden.ruleengine.ledger_schema import MIGRATIONS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

BUSY_SECONDS = 30.0
"""How long the engine's own writing is waited for."""
LIMITS_SECONDS = 86400.0
"""Limits per user look back this far: until then an end must be known to be theirs."""
LIVE_COMPACT_BYTES = 128 * 1024 * 1024
"""Rewriting a file of this size takes well under the five seconds for which an engine waits."""
ERASED = "erased"
"""Stands where the person stood."""

_PERSONS = frozenset(
    {"user", "by", "owner", "approved_by", "recipient", "on_behalf_of", "lifted_by", "subject"}
)
"""Columns and keys that name a person."""
_IDENTITY = frozenset(
    {
        *("rule_id", "rule", "job_id", "state", "kind", "mode", "action", "channel", "stage"),
        *("status", "step", "deed", "role", "platform", "level", "do", "truth", "outcome"),
        *("id", "decision", "decision_id", "fingerprint", "starts_at", "hash", "rule_hash"),
    }
)
"""Columns and keys whose words are the product's own, or name what is no person."""


@dataclass(frozen=True, slots=True)
class Erased:
    """What an erasure changed, or would change.

    Attributes:
        rows: table -> rows that changed.
        alias: what stands in the place of the name now.
        mentions: rows elsewhere whose text still holds the name as a word, and may mean another.
        compacted: whether the file was rewritten, so that no earlier copy of a row is left in it.
    """

    rows: dict[str, int]
    alias: str
    mentions: int
    compacted: bool


@dataclass(frozen=True, slots=True)
class Person:
    """Whom to erase.

    Attributes:
        name: user name on the nodes.
        addresses: theirs and nobody else's.
        alias: what takes the place of the name.
    """

    name: str
    addresses: tuple[str, ...]
    alias: str

    @property
    def words(self) -> re.Pattern[str]:
        """The name as a word, or any of the addresses."""
        return _pattern((self.name, *self.addresses))

    @property
    def reached(self) -> re.Pattern[str] | None:
        """Any of the addresses."""
        return _pattern(self.addresses) if self.addresses else None


def _pattern(words: Collection[str]) -> re.Pattern[str]:
    longest_first = sorted(words, key=len, reverse=True)
    # Not within a longer word; underscores and dashes end one, as in the names of runs.
    text = "|".join(re.escape(word) for word in longest_first)
    return re.compile(rf"(?<![^\W_])(?:{text})(?![^\W_])", re.IGNORECASE)


@dataclass(slots=True)
class _Own:
    """What belongs to the person: numbers and names of rows."""

    cases: set[int] = field(default_factory=set)
    jobs: set[str] = field(default_factory=set)
    decisions: set[str] = field(default_factory=set)


def erase(
    path: Path,
    person: Person,
    *,
    others: Collection[str],
    everywhere: bool,
    dry_run: bool,
    now: float,
    by: str,
    reason: str,
) -> Erased:
    """Take a person's name and addresses out of a ledger.

    Args:
        path: the ledger.
        person: whom.
        others: addresses that are somebody else's, such as a deputy's.
        everywhere: also where the name stands as a word in rows about others' jobs.
        dry_run: change nothing, and say what would change.
        now: Unix time.
        by: who erases, for the audit.
        reason: why, for the audit.

    Raises:
        RefusedAction: something of theirs is open, or counts for a limit, or the audit would name
            them anew.
        LedgerUnusable: the file cannot be read or written; nothing has changed.
    """
    if person.words.search(f"{by} {reason}"):
        raise RefusedAction(
            "named_anew",
            "who erases, or why, names the person, and would stand in the audit: say it without",
        )
    try:
        with _opened(path) as db:
            db.execute("BEGIN IMMEDIATE")
            try:
                own = _own(db, person)
                _refuse_open(db, person, own, now)
                whole = _with_addresses(db, person, own, others)
                changed, mentions = _rewrite(db, whole, own, everywhere=everywhere)
                if not dry_run:
                    _note(db, changed, now=now, by=by, reason=reason)
                db.execute("ROLLBACK" if dry_run else "COMMIT")
            except BaseException:
                if db.in_transaction:
                    db.execute("ROLLBACK")
                raise
            compacted = not dry_run and _compact(db)
    except sqlite3.Error as error:
        raise LedgerUnusable(f"{path} cannot be changed: {error}; nothing was erased") from error
    return Erased(changed, person.alias, mentions, compacted)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    if not path.is_file():
        raise LedgerUnusable(f"{path} is not a file: which ledger is meant?")
    with contextlib.closing(
        sqlite3.connect(
            f"{path.absolute().as_uri()}?mode=rw",
            uri=True,
            timeout=BUSY_SECONDS,
            isolation_level=None,
        )
    ) as db:
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version != len(MIGRATIONS):
            raise LedgerUnusable(
                f"{path} is a ledger of version {version}, and this gpuwarden writes "
                f"{len(MIGRATIONS)}: start the engine on it once, or use its own gpuwarden"
            )
        # What is overwritten is overwritten on disk, too.
        db.execute("PRAGMA secure_delete=ON")
        yield db


def _own(db: sqlite3.Connection, person: Person) -> _Own:
    name = person.name
    own = _Own()
    for number, job in db.execute(
        "SELECT id, job_id FROM cases WHERE json_extract(body, '$.user') = ?", (name,)
    ):
        own.cases.add(number)
        own.jobs.add(job)
    for number, job, case in db.execute(
        "SELECT id, job_id, case_id FROM decisions WHERE user = ?", (name,)
    ):
        own.decisions.add(number)
        own.jobs.add(job)
        own.cases.add(case)
    own.jobs |= {job for (job,) in db.execute("SELECT job_id FROM leaves WHERE user = ?", (name,))}
    return own


def _refuse_open(db: sqlite3.Connection, person: Person, own: _Own, now: float) -> None:
    chosen = json.dumps(sorted(own.cases))
    (cases,) = db.execute(
        "SELECT count(*) FROM cases WHERE closed_at IS NULL "
        "AND id IN (SELECT value FROM json_each(?))",
        (chosen,),
    ).fetchone()
    if cases:
        raise RefusedAction(
            "open_cases",
            f"{cases} cases of {person.name} are open: what their rules promised still counts. "
            "Erase them once their jobs are over",
        )
    (pending,) = db.execute(
        "SELECT count(*) FROM decisions WHERE (finished_at IS NULL OR state = 'incomplete') "
        "AND case_id IN (SELECT value FROM json_each(?))",
        (chosen,),
    ).fetchone()
    if pending:
        raise RefusedAction(
            "open_decisions",
            f"{pending} ends of {person.name}'s jobs have no result, or are not proven: no other "
            "job on their cards may be ended meanwhile",
        )
    (last,) = db.execute(
        "SELECT max(created_at) FROM decisions WHERE state NOT IN ('refused', 'lapsed') "
        "AND case_id IN (SELECT value FROM json_each(?))",
        (chosen,),
    ).fetchone()
    if last is not None and now - last < LIMITS_SECONDS:
        hours = (LIMITS_SECONDS - (now - last)) / 3600
        raise RefusedAction(
            "counts_for_limits",
            f"a job of {person.name} was ended in the last 24 hours, which counts for limits per "
            f"user: erase them in {hours:.1f} hours",
        )
    (leaving,) = db.execute(
        "SELECT count(*) FROM leaves WHERE finished_at IS NULL AND user = ?", (person.name,)
    ).fetchone()
    if leaving:
        raise RefusedAction(
            "open_leaves",
            f"{leaving} jobs of {person.name} are asked to leave: erase them once that is over",
        )
    (kept,) = db.execute(
        "SELECT count(*) FROM keeps WHERE until > ? AND job_id IN (SELECT value FROM json_each(?))",
        (now, json.dumps(sorted(own.jobs))),
    ).fetchone()
    if kept:
        raise RefusedAction(
            "keeps", f"{kept} keeps of {person.name}'s jobs are in force: erase them afterwards"
        )


def _with_addresses(
    db: sqlite3.Connection, person: Person, own: _Own, others: Collection[str]
) -> Person:
    """The person with every address at which they were told, but those that are others'."""
    told = db.execute(
        "SELECT DISTINCT recipient FROM notices WHERE case_id IN (SELECT value FROM json_each(?))",
        (json.dumps(sorted(own.cases)),),
    )
    known = {to for (to,) in told if to not in others and not to.startswith("#") and " " not in to}
    return Person(person.name, tuple(sorted({*person.addresses, *known})), person.alias)


# -- the rewriting


def _rewrite(
    db: sqlite3.Connection, person: Person, own: _Own, *, everywhere: bool
) -> tuple[dict[str, int], int]:
    """Change every row; triggers guard and count, and neither is meant here.

    Returns:
        Table -> rows changed, and how many others still hold the name as a word.
    """
    triggers = db.execute("SELECT name, sql FROM sqlite_schema WHERE type='trigger'").fetchall()
    for name, _ in triggers:
        db.execute(f'DROP TRIGGER "{name}"')
    tables = [
        name
        for (name,) in db.execute(
            "SELECT name FROM sqlite_schema WHERE type='table' AND name NOT LIKE 'sqlite_%'"
        )
    ]
    changed, mentions = {}, 0
    for table in tables:
        count, left = _Table(db, table, person, own, everywhere=everywhere).rewrite()
        mentions += left
        if count:
            changed[table] = count
    for _, statement in triggers:
        db.execute(statement)
    return changed, mentions


class _Table:
    """One table, gone through row by row."""

    def __init__(
        self,
        db: sqlite3.Connection,
        name: str,
        person: Person,
        own: _Own,
        *,
        everywhere: bool,
    ) -> None:
        self._db = db
        self._name = name
        self._own = own
        self._everywhere = everywhere
        self._person = person
        self._writer = _Writer(person)
        described = db.execute(f'PRAGMA table_info("{name}")').fetchall()
        self._columns = [row[1] for row in described if row[2].upper() in ("TEXT", "BLOB")]
        self._links = [
            row[1]
            for row in described
            if row[1] in ("case_id", "case", "job_id", "decision_id", "decision")
            or (row[1] == "id" and name in ("cases", "decisions"))
        ]

    def rewrite(self) -> tuple[int, int]:
        """How many rows were changed, and how many others hold the name as a word."""
        if not self._columns:
            return 0, 0
        chosen = [*self._links, *self._columns]
        names = ", ".join(f'"{name}"' for name in ("rowid", *chosen))
        changed = mentions = 0
        select = " ".join(
            ("SELECT", names, f'FROM "{self._name}"', "WHERE rowid > ? ORDER BY rowid LIMIT 1000")
        )
        # Read in portions, since what is read is written.
        last = -1
        while rows := self._db.execute(select, (last,)).fetchall():
            for rowid, *values in rows:
                last = rowid
                row = dict(zip(chosen, values, strict=True))
                fresh, left = self._row(row)
                mentions += left
                if fresh:
                    self._write(rowid, fresh)
                    changed += 1
        return changed, mentions

    def _row(self, row: dict[str, Any]) -> tuple[dict[str, Any], bool]:
        """What changes in a row, and whether the name stands elsewhere in it."""
        thorough = self._everywhere or self._is_own(row)
        fresh, left = {}, False
        for name in self._columns:
            value = row[name]
            if value is None or (name in _IDENTITY and name not in _PERSONS):
                continue
            text = value.decode(errors="surrogateescape") if isinstance(value, bytes) else value
            new = self._writer.cell(name, text, thorough=thorough)
            if new != text:
                fresh[name] = (
                    new.encode(errors="surrogateescape") if isinstance(value, bytes) else new
                )
            left = left or self._writer.mentions(new)
        by_them = row.get("by") == self._person.name
        if by_them and row.get("reason"):
            fresh["reason"] = ERASED
        if "body" in fresh and row.get("signature"):
            # It signed what stood there before.
            fresh["signature"] = ""
        return fresh, left

    def _is_own(self, row: dict[str, Any]) -> bool:
        own, table = self._own, self._name
        for name in self._links:
            value = row[name]
            if name == "id":
                found = value in (own.cases if table == "cases" else own.decisions)
            elif name in ("case_id", "case"):
                found = value in own.cases
            elif name == "job_id":
                found = value in own.jobs
            else:
                found = value in own.decisions
            if found:
                return True
        return False

    def _write(self, rowid: int, fresh: dict[str, Any]) -> None:
        for suffix in ("", f"-{rowid}"):
            values = {
                # Two addresses of one person must stay two rows.
                name: f"{value}{suffix}" if name == "recipient" else value
                for name, value in fresh.items()
            }
            assigned = ", ".join(f'"{name}"=?' for name in values)
            update = " ".join(("UPDATE", f'"{self._name}"', "SET", assigned, "WHERE rowid=?"))
            try:
                self._db.execute(update, (*values.values(), rowid))
            except sqlite3.IntegrityError:
                if suffix or "recipient" not in fresh:
                    raise
            else:
                return


class _Writer:
    """Texts without the person, whether they are words or JSON."""

    def __init__(self, person: Person) -> None:
        self._person = person
        self._words, self._reached = person.words, person.reached

    def cell(self, column: str, text: str, *, thorough: bool) -> str:
        """What a column holds, without the person."""
        if text[:1] in "{[":
            try:
                value = json.loads(text)
            except ValueError:
                return self._text(column, text, thorough=thorough)
            fresh = self._value("", value, thorough=thorough)
            return text if fresh == value else json.dumps(fresh, sort_keys=True)
        return self._text(column, text, thorough=thorough)

    def mentions(self, text: str) -> bool:
        """Whether a text still holds the name as a word."""
        plain = text
        if text[:1] in "{[":
            with contextlib.suppress(ValueError):
                plain = json.dumps(json.loads(text), ensure_ascii=False).replace("\\\\", "\\")
        return self._words.search(plain) is not None

    def _value(self, key: str, value: Any, *, thorough: bool) -> Any:
        if isinstance(value, dict):
            found = {
                (self._text("", name, thorough=thorough)): self._value(
                    name, item, thorough=thorough
                )
                for name, item in value.items()
            }
            if value.get("by") == self._person.name and value.get("reason"):
                found["reason"] = ERASED
            return found
        if isinstance(value, list):
            return [self._value(key, item, thorough=thorough) for item in value]
        if isinstance(value, str) and key not in _IDENTITY - _PERSONS:
            return self._text(key, value, thorough=thorough)
        return value

    def _text(self, key: str, text: str, *, thorough: bool) -> str:
        if thorough:
            return self._words.sub(self._person.alias, text)
        if key in _PERSONS and text == self._person.name:
            return self._person.alias
        return text if self._reached is None else self._reached.sub(self._person.alias, text)


def _note(
    db: sqlite3.Connection, changed: dict[str, int], *, now: float, by: str, reason: str
) -> None:
    detail = {"by": by, "reason": reason, "rows": sum(changed.values())}
    db.execute(
        "INSERT INTO events (time, rule_id, job_id, kind, mode, detail) "
        "VALUES (?, '', '', 'erased', '', ?)",
        (now, json.dumps(detail, sort_keys=True)),
    )


def _compact(db: sqlite3.Connection) -> bool:
    """Rewrite the file, so that no earlier state of a row is left in it or in its log."""
    used, free = file_sizes(db)
    small = used + free <= LIVE_COMPACT_BYTES
    if small:
        db.execute("VACUUM")
    # Busy means that the engine reads just now; the next checkpoint of its own does the same.
    (busy, _, _) = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    return small and not busy
