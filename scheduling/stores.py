"""What the scheduler remembers: bookings, receipts, who held what, and what it foretold.

Every method is one transaction; `changing` makes one of several. May be called from any thread.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import secrets
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gpuwarden.schedule_api import STEPS, Cause, Outcome, Preemption
from gpuwarden.scheduling.holdings import Holding
from gpuwarden.scheduling.slots import Slot
from gpuwarden.scheduling.sqlite_files import StoreUnusable, transaction
from gpuwarden.scheduling.store_files import copy_to, exclusive, opened

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path
    from typing import Any

    from gpuwarden.scheduling.slots import SlotUse

__all__ = ["Booked", "Reservation", "Store", "StoreUnusable"]

STEP_BOUNDS = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 1800.0, 3600.0, 4 * 3600.0)
"""By which steps of preemptions are counted, seconds; the migration has counted by the same."""
_LETTERS = "abcdefghjkmnpqrstuvwxyz23456789"
"""Without those that are read for one another."""
_SLOT = (
    "SELECT s.id, b.team, b.who, s.gpus, s.card, s.start, s.end, s.lead, b.id AS booking, "
    "b.repeat, b.words, b.made, s.entered, s.released, s.released_by, s.idle_since, s.first_used, "
    "s.used_gpu_seconds, s.revision, s.changed FROM slots s JOIN bookings b ON b.id = s.booking"
)
_HOLDINGS = (
    "SELECT entry, part, start, end, user, team, gpus, card, run_id, project, suspended "
    "FROM holdings "
    "WHERE start < ? AND (end IS NULL OR end > ?) ORDER BY start, entry"
)
_KEEP_HOLDING = (
    "INSERT INTO holdings "
    "(entry, part, start, end, user, team, gpus, card, run_id, project, suspended, seen) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) "
    "ON CONFLICT (entry, part, start) DO UPDATE SET "
    "end = excluded.end, gpus = excluded.gpus, seen = excluded.seen, "
    "suspended = excluded.suspended, run_id = coalesce(excluded.run_id, run_id), "
    "project = CASE excluded.project WHEN '' THEN project ELSE excluded.project END"
)


@dataclass(frozen=True, slots=True)
class Booked:
    """A slot, and what has become of it.

    Attributes:
        slot: as the engine is told.
        booking: id of its booking.
        repeat: how the booking comes again.
        words: what it is for.
        made: Unix time at which it was booked.
        entered: Unix time at which the engine had it, or None.
        released: Unix time at which it was given back, or None.
        released_by: who, or `no-show`.
        idle_since: Unix time since which it is seen without use, or None; in use, or not seen.
        first_used: Unix time at which its team first held a card of it, or None.
        used_gpu_seconds: of its cards so far, or None.
        revision: how often it was changed since it was made.
        changed: Unix time of the last change, or None.
    """

    slot: Slot
    booking: str
    repeat: str
    words: str
    made: float
    entered: float | None = None
    released: float | None = None
    released_by: str = ""
    idle_since: float | None = None
    first_used: float | None = None
    used_gpu_seconds: float | None = None
    revision: int = 0
    changed: float | None = None


@dataclass(frozen=True, slots=True)
class Reservation:
    """A booking that was made.

    Attributes:
        id: of the booking.
        slots: its slots.
        wish: what was asked for, as JSON: by it a second try is told from another wish.
    """

    id: str
    slots: tuple[Booked, ...]
    wish: str


class Store:
    """The scheduler's file.

    Args:
        folder: of the daemon, which exists; nobody else may read what is in it.

    Raises:
        StoreUnusable: another daemon has it, it is newer, or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._lock = threading.RLock()
        self._handle = exclusive(folder)
        try:
            self._db = opened(folder / "scheduler.sqlite")
        except StoreUnusable:
            os.close(self._handle)
            raise

    def close(self) -> None:
        """Release the file."""
        with self._lock:
            self._db.close()
            os.close(self._handle)

    def copy(self, target: Path) -> None:
        """Write a whole copy of the file.

        Raises:
            StoreUnusable: it cannot be written.
        """
        with self._lock:
            copy_to(self._db, target)

    @contextlib.contextmanager
    def changing(self) -> Iterator[sqlite3.Connection]:
        """One transaction: all of it, or nothing where an error leaves it."""
        with self._lock:
            if self._db.in_transaction:
                yield self._db
                return
            with transaction(self._db):
                yield self._db

    def rows(self, query: str, *values: Any) -> list[dict[str, Any]]:
        """What a query finds, each row by its columns' names."""
        with self._lock:
            cursor = self._db.execute(query, values)
            names = [column[0] for column in cursor.description]
            return [dict(zip(names, row, strict=True)) for row in cursor]

    # -- bookings

    def reserve(
        self,
        slots: Sequence[Slot],
        *,
        wish: str,
        repeat: str,
        words: str,
        key: str | None,
        now: float,
    ) -> Reservation:
        """Write down a booking.

        Args:
            slots: its slots, in order; their ids are made here.
            wish: what was asked for, as JSON.
            repeat: how it comes again.
            words: what it is for.
            key: of who asks, by which a second try is known; or None.
            now: Unix time.
        """
        first = slots[0]
        with self.changing() as db:
            name = self._new_id()
            db.execute(
                "INSERT INTO bookings VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (name, key, wish, first.team, first.who, repeat, words, now),
            )
            for number, slot in enumerate(slots, 1):
                own = name if len(slots) == 1 else f"{name}.{number}"
                db.execute(
                    "INSERT INTO slots (id, booking, gpus, card, start, end, lead) "
                    "VALUES (?, ?, ?, ?, ?, ?, ?)",
                    (own, name, slot.gpus, slot.card, slot.start, slot.end, slot.lead_seconds),
                )
            return Reservation(name, self.slots_of(name), wish)

    def _new_id(self) -> str:
        while True:
            name = "b" + "".join(secrets.choice(_LETTERS) for _ in range(6))
            if not self.rows("SELECT 1 FROM bookings WHERE id = ?", name):
                return name

    def reservation_by(self, key: str) -> Reservation | None:
        """The booking that was made with a key."""
        rows = self.rows("SELECT id, wish FROM bookings WHERE key = ?", key)
        if not rows:
            return None
        return Reservation(rows[0]["id"], self.slots_of(rows[0]["id"]), rows[0]["wish"])

    def slots_of(self, name: str) -> tuple[Booked, ...]:
        """Slots of a booking, or the one slot of this id, in order of time."""
        rows = self.rows(f"{_SLOT} WHERE b.id = ? OR s.id = ? ORDER BY s.start", name, name)
        return tuple(_booked(row) for row in rows)

    def standing(self, now: float) -> tuple[Slot, ...]:
        """Every slot that is booked or active."""
        rows = self.rows(
            f"{_SLOT} WHERE s.released IS NULL AND s.end > ? ORDER BY s.start, s.id", now
        )
        return tuple(_booked(row).slot for row in rows)

    def slots_between(self, begin: float, end: float) -> tuple[Booked, ...]:
        """Every slot of a stretch of time, released ones too, in order."""
        rows = self.rows(
            f"{_SLOT} WHERE s.end > ? AND s.start < ? ORDER BY s.start, s.id", begin, end
        )
        return tuple(_booked(row) for row in rows)

    def enter(self, slots: Iterable[str], *, now: float) -> None:
        """Write down that the engine has these slots."""
        with self.changing() as db:
            db.executemany(
                "UPDATE slots SET entered = ? WHERE id = ? AND entered IS NULL",
                [(now, name) for name in slots],
            )

    def release(self, slots: Iterable[str], *, by: str, now: float) -> None:
        """Give slots back."""
        with self.changing() as db:
            db.executemany(
                "UPDATE slots SET released = ?, released_by = ?, changed = ?, "
                "revision = revision + 1 WHERE id = ? AND released IS NULL",
                [(now, by, now, name) for name in slots],
            )

    def lengthen(self, slot: str, end: float, *, now: float) -> None:
        """Have a slot last until another moment."""
        with self.changing() as db:
            db.execute(
                "UPDATE slots SET end = ?, changed = ?, revision = revision + 1 WHERE id = ?",
                (end, now, slot),
            )

    def note_use(self, uses: Iterable[SlotUse], *, now: float) -> None:
        """Write down what is seen of active slots."""
        with self.changing() as db:
            for use in uses:
                first = use.first_used if use.first_used is not None else now
                db.execute(
                    "UPDATE slots SET "
                    "first_used = coalesce(first_used, ?), "
                    "used_gpu_seconds = coalesce(?, used_gpu_seconds), "
                    "idle_since = CASE WHEN ? THEN coalesce(idle_since, max(?, start)) END "
                    "WHERE id = ?",
                    (
                        first if use.gpus or use.first_used is not None else None,
                        use.used_gpu_seconds,
                        use.gpus == 0,
                        now,
                        use.slot,
                    ),
                )

    # -- receipts

    def keep_preemptions(self, seen: Iterable[Preemption], *, now: float) -> None:
        """Take what an engine tells; a step that was once seen stays, with its first time."""
        with self.changing() as db:
            for item in seen:
                rows = self.rows("SELECT body FROM preemptions WHERE id = ?", item.id)
                before = _preemption(rows[0]["body"]).steps if rows else {}
                merged = replace(item, steps={**item.steps, **before})
                _count_steps(db, before, merged.steps)
                begun = min(merged.steps.values(), default=now)
                db.execute(
                    "INSERT INTO preemptions VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) "
                    "DO UPDATE SET body = excluded.body, outcome = excluded.outcome, "
                    "lost = coalesce(excluded.lost, lost), seen = excluded.seen",
                    (
                        item.id,
                        _body(merged),
                        item.cause,
                        item.outcome,
                        item.lost_seconds,
                        begun,
                        now,
                    ),
                )

    def preemptions(self, since: float, *, now: float) -> tuple[Preemption, ...]:
        """Those that were last seen since a moment, the newest first.

        An open one that no engine tells of any more for a day is none: nobody waits for it.
        """
        rows = self.rows(
            "SELECT body FROM preemptions WHERE seen >= CASE outcome WHEN 'open' THEN ? ELSE ? END "
            "ORDER BY begun DESC, id LIMIT 5000",
            max(since, now - 86400.0),
            since,
        )
        return tuple(_preemption(row["body"]) for row in rows)

    def preemption_sums(self) -> list[tuple[str, str, int, float]]:
        """Cause, outcome, how many, and GPU-seconds of work that they lost."""
        rows = self.rows(
            "SELECT cause, outcome, count(*) AS n, coalesce(sum(lost), 0.0) AS lost "
            "FROM preemptions GROUP BY cause, outcome"
        )
        return [(row["cause"], row["outcome"], row["n"], row["lost"]) for row in rows]

    def step_counts(self) -> dict[str, dict[float, tuple[int, float]]]:
        """Step -> bound -> how many took so long and no less from the step before, and seconds.

        Counted when they are seen, so that years of them cost a scrape nothing.
        """
        found: dict[str, dict[float, tuple[int, float]]] = {}
        for row in self.rows("SELECT * FROM step_counts"):
            found.setdefault(row["step"], {})[row["bound"]] = (row["count"], row["seconds"])
        return found

    # -- accounts

    def keep_holdings(self, seen: Iterable[Holding], *, since: float, now: float) -> None:
        """Take what an engine tells of who held what; each attempt is kept once.

        One that ran when it was last told of, and that the engine does not know any more, ended
        when it was last seen: it must not be counted for ever.

        Args:
            seen: every attempt that held cards since a moment.
            since: the moment.
            now: Unix time.
        """
        seen = list(seen)
        with self.changing() as db:
            # As it was kept before parts were told apart.
            db.executemany(
                "DELETE FROM holdings WHERE entry = ? AND start = ? AND part = ''",
                [(item.entry, item.start) for item in seen if item.part],
            )
            db.executemany(
                _KEEP_HOLDING,
                [
                    (
                        item.entry,
                        item.part,
                        item.start,
                        item.end,
                        item.user,
                        item.team,
                        item.gpus,
                        item.card,
                        item.run_id,
                        item.project,
                        item.suspended_seconds,
                        now,
                    )
                    for item in seen
                ],
            )
            db.execute(
                "INSERT INTO meta VALUES ('accounts_since', ?) ON CONFLICT (name) "
                "DO UPDATE SET value = min(value, excluded.value)",
                (since,),
            )
            db.execute(
                "UPDATE holdings SET end = max(min(seen, ?), start) "
                "WHERE end IS NULL AND seen <> ? AND start >= ?",
                (now, now, since),
            )

    def accounts_since(self) -> float | None:
        """From when on who held what is known here, Unix time; None: nothing was read yet."""
        rows = self.rows("SELECT value FROM meta WHERE name = 'accounts_since'")
        return rows[0]["value"] if rows else None

    def forget(self, before: float) -> None:
        """Drop what nobody asks for any more: what ended, waited or was foretold before a moment.

        Bookings and receipts stay: they are few, and somebody may be held to them.
        """
        with self.changing() as db:
            db.execute("DELETE FROM holdings WHERE end < ?", (before,))
            db.execute("DELETE FROM waits WHERE started < ?", (before,))
            db.execute("DELETE FROM predictions WHERE made < ?", (before,))
            db.execute("DELETE FROM runs WHERE ended < ?", (before,))
            db.execute("DELETE FROM attempt_names WHERE seen < ?", (before,))
            db.execute(
                "UPDATE meta SET value = max(value, ?) WHERE name = 'accounts_since'", (before,)
            )

    def oldest_running(self) -> float | None:
        """Start of the oldest attempt that is not known to have ended."""
        (row,) = self.rows("SELECT min(start) AS start FROM holdings WHERE end IS NULL")
        found: float | None = row["start"]
        return found

    def newest_holding(self) -> float | None:
        """When any attempt was last seen."""
        (row,) = self.rows("SELECT max(seen) AS seen FROM holdings")
        found: float | None = row["seen"]
        return found

    def holdings(self, engine: str, begin: float, end: float) -> tuple[Holding, ...]:
        """Every attempt that held cards in a stretch of time."""
        rows = self.rows(_HOLDINGS, end, begin)
        return tuple(
            Holding(
                engine,
                row["entry"],
                row["user"],
                row["team"],
                row["gpus"],
                row["start"],
                row["end"],
                row["card"],
                row["run_id"],
                row["project"],
                row["suspended"],
                row["part"],
            )
            for row in rows
        )


def _booked(row: dict[str, Any]) -> Booked:
    slot = Slot(
        row["id"],
        row["team"],
        row["who"],
        row["gpus"],
        row["card"],
        row["start"],
        row["end"],
        row["lead"],
    )
    names = (
        "booking", "repeat", "words", "made", "entered", "released", "released_by", "idle_since",
        "first_used", "used_gpu_seconds", "revision", "changed",
    )  # fmt: skip
    return Booked(slot, **{name: row[name] for name in names})


def _count_steps(
    db: sqlite3.Connection, before: Mapping[str, float], steps: Mapping[str, float]
) -> None:
    """Count how long after the one before it each step came that was not seen before."""
    for step, last in itertools.pairwise(reversed([name for name in STEPS if name in steps])):
        if step in before:
            continue
        # Two clocks tell of them: a step is not before the one that it follows.
        seconds = max(0.0, steps[step] - steps[last])
        bound = next((each for each in STEP_BOUNDS if seconds <= each), math.inf)
        db.execute(
            "INSERT INTO step_counts VALUES (?, ?, 1, ?) ON CONFLICT DO UPDATE "
            "SET count = count + 1, seconds = seconds + excluded.seconds",
            (step, bound, seconds),
        )


def _body(item: Preemption) -> str:
    return json.dumps(
        {
            "id": item.id,
            "victim": item.victim,
            "successor": item.successor,
            "cause": item.cause,
            "at": item.at,
            "deadline": item.deadline,
            "run_id": item.run_id,
            "steps": item.steps,
            "outcome": item.outcome,
            "lost_seconds": item.lost_seconds,
            "words": item.words,
        }
    )


def _preemption(body: str) -> Preemption:
    data = json.loads(body)
    return Preemption(
        **{**data, "cause": Cause(data["cause"]), "outcome": Outcome(data["outcome"])}
    )
