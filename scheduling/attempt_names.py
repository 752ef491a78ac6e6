"""Which job of the engine an attempt is that nodes name: the exporter's `job_id` -> the entry.

Seen while it runs, and remembered for the accounts of before. Slurm's are told by their name.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from gpuwarden.platforms.slurm import parse_attempt_id

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from gpuwarden.schedule_api import QueueEntry
    from gpuwarden.scheduling.stores import Store


class AttemptNames:
    """The part of the store that knows attempts by the names of nodes.

    Args:
        store: whose file it is.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._kept: dict[str, str] = {}

    def keep(self, entries: Iterable[QueueEntry], *, now: float) -> None:
        """Take the names of attempts that run; those of the last time are there already."""
        named = {item.job_id: item.id for item in entries if item.job_id is not None}
        new = [(name, job, now) for name, job in named.items() if self._kept.get(name) != job]
        if new:
            with self._store.changing() as db:
                db.executemany(
                    "INSERT INTO attempt_names VALUES (?, ?, ?) ON CONFLICT (job_id) DO UPDATE SET "
                    "entry = excluded.entry, seen = excluded.seen",
                    new,
                )
        self._kept = named

    def jobs_of(self, names: Collection[str], *, cluster: str) -> dict[str, str]:
        """The engine's id of each attempt's job, where it is known.

        Args:
            names: by the exporter.
            cluster: whose attempts Slurm's names are.
        """
        found: dict[str, str] = {}
        left: list[str] = []
        for name in sorted(names):
            attempt = parse_attempt_id(name)
            if attempt is not None and attempt.cluster == cluster:
                found[name] = attempt.number
            else:
                left.append(name)
        rows = self._store.rows(
            "SELECT job_id, entry FROM attempt_names "
            "WHERE job_id IN (SELECT value FROM json_each(?))",
            json.dumps(left),
        )
        return found | {row["job_id"]: row["entry"] for row in rows}
