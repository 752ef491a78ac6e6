"""Which job held how many cards from when to when: kept, for pods and Jobs are deleted.

Counted is the time of pods, from the start of the training to its end, and not what a status says:
an owner may say Running long after its pods are gone (kueue #2923).
"""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING, Final

from gpuwarden.scheduling.holdings import Holding
from gpuwarden.scheduling.kueue.pods import Pod
from gpuwarden.scheduling.sqlite_files import transaction

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path
    from typing import Any

    from gpuwarden.scheduling.kueue.workloads import QueuedJob

KEPT_SECONDS: Final = 400 * 86_400.0
SEEN_SECONDS: Final = 30.0
"""How often it is written that a job is still there."""
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS holdings (
    pod TEXT PRIMARY KEY,
    entry TEXT NOT NULL,
    user TEXT NOT NULL,
    team TEXT NOT NULL,
    gpus INTEGER NOT NULL,
    card TEXT NOT NULL,
    run_id TEXT,
    start REAL NOT NULL,
    end REAL,
    seen REAL NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS holdings_end ON holdings (end);
"""


class Records:
    """The file.

    Args:
        path: of it; it is made where there is none.
    """

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        self._db.executescript(_SCHEMA)

    def close(self) -> None:
        """Close it."""
        self._db.close()

    def observe(self, jobs: Iterable[QueuedJob], now: float) -> None:
        """Write down what runs, and what no longer does.

        Args:
            jobs: all that there are.
            now: Unix time.
        """
        rows = list(self._db.execute("SELECT pod, seen FROM holdings WHERE end IS NULL"))
        open_rows: dict[str, float] = dict(rows)
        here: set[str] = set()
        with transaction(self._db):
            for job in jobs:
                self._observe(job, now, open_rows=open_rows, here=here)
            for pod, seen in open_rows.items():
                if pod not in here:
                    # Gone without a word of when: up to when it was seen last.
                    self._end(pod, now if now - seen <= 2 * SEEN_SECONDS else seen)
            self._db.execute("DELETE FROM holdings WHERE end < ?", (now - KEPT_SECONDS,))

    def _observe(
        self, job: QueuedJob, now: float, *, open_rows: dict[str, float], here: set[str]
    ) -> None:
        for pod in job.pods or _stand_in(job):
            if pod.started is None:
                continue
            # Of several pods each holds its part, also while others of them have not begun.
            each = pod.gpus or job.gpus // job.width
            here.add(pod.uid)
            start = min(pod.started, now)
            if pod.uid not in open_rows:
                values = (pod.uid, job.id, job.user, job.team, each, job.card, job.run_id or None)
                self._db.execute(
                    "INSERT OR IGNORE INTO holdings VALUES (?,?,?,?,?,?,?,?,NULL,?)",
                    (*values, start, now),
                )
            elif pod.holds and now - open_rows[pod.uid] >= SEEN_SECONDS:
                self._db.execute("UPDATE holdings SET seen=? WHERE pod=?", (now, pod.uid))
            if not pod.holds:
                self._end(pod.uid, max(start, min(now, pod.ended or now)))

    def _end(self, pod: str, moment: float) -> None:
        self._db.execute(
            "UPDATE holdings SET end=max(start, ?) WHERE pod=? AND end IS NULL", (moment, pod)
        )

    def holdings(self, begin: float, end: float) -> list[Holding]:
        """Every attempt that held cards in a stretch of time, whole."""
        query = (
            "SELECT pod, entry, user, team, gpus, start, end, card, run_id FROM holdings "
            "WHERE start < ? AND (end IS NULL OR end > ?) ORDER BY start, pod"
        )
        rows: list[tuple[Any, ...]] = list(self._db.execute(query, (end, begin)))
        return [
            Holding(
                engine="kueue",
                entry=entry,
                user=user,
                team=team,
                gpus=gpus,
                start=start,
                end=until,
                card=card,
                run_id=run_id,
                part=pod,
            )
            for pod, entry, user, team, gpus, start, until, card, run_id in rows
        ]


def _stand_in(job: QueuedJob) -> tuple[Pod, ...]:
    """One pod for all that are not seen, by Kueue's word: else no budget would count them."""
    if not (job.unseen and job.here and job.admitted is not None):
        return ()
    uid = f"{job.uid}@{job.admitted:.0f}"
    return (Pod(uid, phase="Running", started=job.admitted, gpus=job.gpus),)
