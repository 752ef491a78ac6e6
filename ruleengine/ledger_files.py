"""Copies of a ledger: made while the engine runs, proven before they count, put back whole."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuwarden.errors import PermanentError
from gpuwarden.ruleengine import ledger_homes
from gpuwarden.ruleengine.ledger_handles import LedgerUnusable, exclusive, file_sizes
from gpuwarden.ruleengine.ledger_schema import MIGRATIONS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BUSY_SECONDS = 30.0
"""How long a writer is waited for."""
_COMPANIONS = ("-wal", "-shm")
_RESTORE = "Replace it by its newest backup: gpuwarden ledger restore"
_COUNTED = (
    "SELECT (SELECT count(*) FROM cases) AS cases, (SELECT count(*) FROM events) AS events, "
    "(SELECT count(*) FROM decisions) AS decisions, (SELECT count(*) FROM notices) AS notices, "
    "(SELECT count(*) FROM keeps) AS keeps"
)


class LedgerDamaged(PermanentError):
    """A file is no whole ledger."""


@dataclass(frozen=True, slots=True)
class Findings:
    """What a look at a ledger found.

    Attributes:
        version: of its tables.
        problems: what is wrong, in SQLite's words; empty if nothing is.
        rows: table -> rows.
        open_cases, open_decisions: that an engine would go on with.
        newest: Unix time of the newest event, or None.
        audit_from: Unix time from which on the audit is whole; None: from its beginning.
        bytes, free_bytes: of the file, and of those not in use.
    """

    version: int
    problems: tuple[str, ...]
    rows: dict[str, int]
    open_cases: int
    open_decisions: int
    newest: float | None
    audit_from: float | None
    bytes: int
    free_bytes: int


def check(path: Path) -> Findings:
    """Look at a ledger, whether an engine runs on it or not.

    Raises:
        LedgerUnusable: there is no such file, it cannot be read, or it is no ledger at all.
        LedgerDamaged: so badly that not even the damage can be listed.
    """
    with reading(path) as db:
        return _findings(db, path)


def backup(path: Path, copy: Path, *, overwrite: bool = False) -> Findings:
    """Copy a ledger in one consistent state, while its engine runs on.

    The copy is one file, readable by its owner alone. It appears under its name only after it was
    read back and found whole.

    Args:
        path: the ledger.
        copy: where to.
        overwrite: whether an existing copy may be replaced.

    Raises:
        LedgerUnusable: either file cannot be used.
        LedgerDamaged: the ledger, and so its copy, is not whole.
    """
    if copy.exists() and not overwrite:
        raise LedgerUnusable(f"{copy} exists already: name another file, or give --overwrite")
    part = copy.with_name(f".{copy.name}.part")
    try:
        part.unlink(missing_ok=True)
        os.close(os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        try:
            with reading(path) as source, contextlib.closing(sqlite3.connect(part)) as target:
                # In one step: a copy in several begins anew whenever the engine writes.
                source.backup(target)
                target.execute("PRAGMA journal_mode=DELETE")
                ledger_homes.make_homeless(target)
                found = _findings(target, part)
            _refuse_damaged(found, path)
            _synced(part)
            part.replace(copy)
            _synced(copy.parent)
        finally:
            part.unlink(missing_ok=True)
    except (OSError, sqlite3.Error) as error:
        raise LedgerUnusable(f"{path} cannot be copied to {copy}: {error}") from error
    return found


def restore(copy: Path, path: Path, *, aside: str) -> tuple[Findings, Path | None]:
    """Put a copy in the place of a ledger whose engine does not run.

    Args:
        copy: made by `backup`.
        path: the ledger; what is there is moved aside, never deleted.
        aside: suffix of its new name.

    Returns:
        What the copy holds, and where the former ledger now is.

    Raises:
        LedgerUnusable: an engine runs on it, or a file cannot be used.
        LedgerDamaged: the copy is not whole.
    """
    with _locked(path):
        found = check(copy)
        _refuse_damaged(found, copy)
        part = path.with_name(f".{path.name}.part")
        try:
            part.unlink(missing_ok=True)
            os.close(os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            shutil.copyfile(copy, part)
            with contextlib.closing(sqlite3.connect(part)) as db:
                ledger_homes.make_homeless(db)
            _synced(part)
            former = path.with_name(path.name + aside) if path.exists() else None
            if former is not None:
                _moved(path, former)
            part.replace(path)
            _synced(path.parent)
        except (OSError, sqlite3.Error) as error:
            raise LedgerUnusable(f"{copy} cannot be put in the place of {path}: {error}") from error
        finally:
            part.unlink(missing_ok=True)
    return found, former


def compact(path: Path) -> tuple[int, int]:
    """Give the space that is not in use back to the disk; the engine must not run.

    Returns:
        Bytes before and after.

    Raises:
        LedgerUnusable: an engine runs on it, or it cannot be used, or the disk has no room for a
            second copy.
    """
    with _locked(path):
        before = check(path).bytes
        try:
            with contextlib.closing(sqlite3.connect(path, timeout=BUSY_SECONDS)) as db:
                db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                db.execute("VACUUM")
                db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        except sqlite3.Error as error:
            raise LedgerUnusable(f"{path} cannot be compacted: {error}") from error
        return before, path.stat().st_size


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    lock = exclusive(path)
    try:
        yield
    finally:
        os.close(lock)


@contextlib.contextmanager
def reading(path: Path, *, aside: bool = False) -> Iterator[sqlite3.Connection]:
    """A connection that writes nothing.

    Args:
        path: the ledger, or a copy of one.
        aside: whether not even the files that SQLite puts beside it are made: for a short look at
            a file that no engine has open. Such a file may lie where nothing can be written.

    Raises:
        LedgerUnusable: there is no such file, or it cannot be read, or is no database.
        LedgerDamaged: it is damaged.
    """
    if not path.is_file():
        raise LedgerUnusable(f"{path} is not a file: which ledger is meant?")
    log = path.with_name(path.name + _COMPANIONS[0])
    # An engine has that file for as long as it runs; without it the main file is all there is.
    alone = "&immutable=1" if aside and not log.exists() else ""
    where = f"{path.absolute().as_uri()}?mode=ro{alone}"
    try:
        with contextlib.closing(sqlite3.connect(where, uri=True, timeout=BUSY_SECONDS)) as db:
            yield db
    except sqlite3.Error as error:
        if error.sqlite_errorcode == sqlite3.SQLITE_CORRUPT:
            raise LedgerDamaged(f"{path} is damaged: {error}. {_RESTORE}") from error
        raise LedgerUnusable(
            f"{path} is not a usable ledger: {error}. It is read as the user who owns it"
        ) from error


def version_of(db: sqlite3.Connection, path: Path) -> int:
    """The version of a ledger's tables.

    Raises:
        LedgerUnusable: it is none that this gpuwarden knows, or no ledger at all.
    """
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if not 1 <= version <= len(MIGRATIONS):
        raise LedgerUnusable(
            f"{path} is no ledger that this gpuwarden knows (version {version}; it knows 1 to "
            f"{len(MIGRATIONS)})"
        )
    return int(version)


def _findings(db: sqlite3.Connection, path: Path) -> Findings:
    version = version_of(db, path)
    problems = [text for (text,) in db.execute("PRAGMA integrity_check") if text != "ok"]
    problems = problems or [
        f"a row of {table} names a row of {parent} that is not there"
        for table, _, parent, _ in db.execute("PRAGMA foreign_key_check")
    ]
    if problems:
        return Findings(version, tuple(problems), {}, 0, 0, None, None, 0, 0)
    counted = db.execute(_COUNTED)
    names = [column[0] for column in counted.description]
    rows = dict(zip(names, counted.fetchone(), strict=True))
    (cases,) = db.execute("SELECT count(*) FROM cases WHERE closed_at IS NULL").fetchone()
    (decisions,) = db.execute("SELECT count(*) FROM decisions WHERE finished_at IS NULL").fetchone()
    (newest,) = db.execute("SELECT max(time) FROM events").fetchone()
    kept = db.execute("SELECT value FROM meta WHERE name='audit_kept_from'").fetchone()
    used, free = file_sizes(db)
    return Findings(
        version=version,
        problems=(),
        rows=rows,
        open_cases=cases,
        open_decisions=decisions,
        newest=newest,
        audit_from=None if kept is None else float(kept[0]),
        bytes=used + free,
        free_bytes=free,
    )


def _refuse_damaged(found: Findings, path: Path) -> None:
    if found.problems:
        problems = "; ".join(found.problems[:3])
        raise LedgerDamaged(f"{path} is damaged: {problems}. {_RESTORE}")


def _moved(path: Path, aside: Path) -> None:
    """Move a database with the files beside it that belong to it."""
    for suffix in ("", *_COMPANIONS):
        part = path.with_name(path.name + suffix)
        if part.exists():
            part.replace(aside.with_name(aside.name + suffix))


def _synced(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
