"""What the scheduler remembers of waits, requeues, runs and its own predictions."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

from gpuwarden.scheduling.calibrations import Settled
from gpuwarden.scheduling.predictions import Features, Run

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

    from gpuwarden.schedule_api import Interval, QueueEntry
    from gpuwarden.scheduling.calibrations import Kind
    from gpuwarden.scheduling.stores import Store


WAIT_BOUNDS = (60.0, 300.0, 900.0, 1800.0, 3600.0, 4 * 3600.0, 12 * 3600.0, 86400.0, 7 * 86400.0)
"""By which waits are counted, seconds; changed, the counts of before keep their old ones."""


class ForesightStore:
    """The part of the store that looks ahead, and back at what was said.

    Args:
        store: whose file it is.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    # -- waits and requeues

    def keep_entries(self, entries: Iterable[QueueEntry]) -> None:
        """Take how long entries waited for their first start, and how often they came back."""
        with self._store.changing() as db:
            for item in entries:
                if item.started is not None and item.requeues == 0:
                    wait = max(0.0, item.started - item.submitted)
                    new = db.execute(
                        "INSERT OR IGNORE INTO waits VALUES (?, ?, ?, ?, ?)",
                        (item.id, item.started, item.team, item.priority, wait),
                    )
                    if new.rowcount:
                        bound = next((each for each in WAIT_BOUNDS if wait <= each), math.inf)
                        db.execute(
                            "INSERT INTO wait_counts VALUES (?, ?, ?, 1, ?) ON CONFLICT DO UPDATE "
                            "SET count = count + 1, seconds = seconds + excluded.seconds",
                            (item.team, item.priority, bound, wait),
                        )
                if item.requeues:
                    db.execute(
                        "INSERT INTO requeues VALUES (?, ?, ?) ON CONFLICT (entry) "
                        "DO UPDATE SET count = max(count, excluded.count)",
                        (item.id, item.team, item.requeues),
                    )

    def waits(self) -> dict[tuple[str, str], dict[float, tuple[int, float]]]:
        """Team and priority -> bound -> how many waits fell below it and no lower one, and seconds.

        Counted when they are seen, so that a year of them costs a scrape nothing.
        """
        found: dict[tuple[str, str], dict[float, tuple[int, float]]] = {}
        for row in self._store.rows("SELECT * FROM wait_counts"):
            key = (row["team"], row["priority"])
            found.setdefault(key, {})[row["bound"]] = (row["count"], row["seconds"])
        return found

    def requeues(self) -> Mapping[str, int]:
        """Team -> how often its jobs came back."""
        rows = self._store.rows("SELECT team, sum(count) AS n FROM requeues GROUP BY team")
        return {row["team"]: row["n"] for row in rows}

    # -- runs

    def keep_run(self, entry: str, run: Run) -> None:
        """Take a training that has ended by itself; once."""
        with self._store.changing() as db:
            db.execute(
                "INSERT OR IGNORE INTO runs VALUES (?, ?, ?, ?, ?)",
                (entry, _text(run.features), run.epochs, run.seconds, run.ended),
            )

    def knows_run(self, entry: str) -> bool:
        """Whether the end of an entry was taken already."""
        return bool(self._store.rows("SELECT 1 FROM runs WHERE entry = ?", entry))

    def runs_like(self, features: Features) -> tuple[Run, ...]:
        """Trainings with these features that have ended by themselves, the newest fifty."""
        rows = self._store.rows(
            "SELECT epochs, seconds, ended FROM runs WHERE features = ? ORDER BY ended DESC "
            "LIMIT 50",
            _text(features),
        )
        return tuple(Run(features, row["epochs"], row["seconds"], row["ended"]) for row in rows)

    def runs_of(self, model: str, imgsz: str, data: str, pacing: str) -> tuple[Run, ...]:
        """Trainings of a model with these data on any cards, with any batch, the newest thousand.

        Args:
            model: as in `Features`, and so the others.
            imgsz: likewise.
            data: likewise.
            pacing: likewise.
        """
        rows = self._store.rows(
            "SELECT features, epochs, seconds, ended FROM runs WHERE epochs > 0 "
            "AND json_extract(features, '$[0]') = ? AND json_extract(features, '$[1]') = ? "
            "AND json_extract(features, '$[5]') = ? "
            "AND coalesce(json_extract(features, '$[6]'), '') = ? ORDER BY ended DESC LIMIT 1000",
            model,
            imgsz,
            data,
            pacing,
        )
        return tuple(
            Run(_features(row["features"]), row["epochs"], row["seconds"], row["ended"])
            for row in rows
        )

    def ends_foretold(self, since: float, *, samples: int) -> tuple[int, int]:
        """How many foretold ends came to pass since a moment, and how many of these came late.

        Args:
            since: Unix time at which they were foretold at the earliest.
            samples: past cases that they rested on at least.
        """
        (row,) = self._store.rows(
            "SELECT count(*) AS ends, coalesce(sum(actual > latest + 1), 0) AS late "
            "FROM predictions WHERE kind = 'finish' AND actual IS NOT NULL AND made >= ? "
            "AND samples >= ?",
            since,
            samples,
        )
        return row["ends"], row["late"]

    def epoch_seconds(self) -> tuple[float, ...]:
        """How long an epoch took in each of the newest thousand runs, on its average."""
        rows = self._store.rows(
            "SELECT seconds / epochs AS each FROM runs WHERE epochs > 0 ORDER BY ended DESC "
            "LIMIT 1000"
        )
        return tuple(row["each"] for row in rows)

    # -- predictions

    def foretell(
        self, entry: str, kind: Kind, attempt: float, *, interval: Interval, now: float
    ) -> None:
        """Write down what is foretold; what was said first stands."""
        with self._store.changing() as db:
            db.execute(
                "INSERT OR IGNORE INTO predictions "
                "(entry, kind, attempt, made, earliest, latest, samples) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    entry,
                    kind,
                    attempt,
                    now,
                    interval.earliest,
                    interval.latest,
                    interval.samples,
                ),
            )

    def open_predictions(self, kind: Kind) -> list[tuple[str, float]]:
        """Entry and attempt of what has not come true or void yet."""
        rows = self._store.rows(
            "SELECT entry, attempt FROM predictions "
            "WHERE kind = ? AND actual IS NULL AND void = ''",
            kind,
        )
        return [(row["entry"], row["attempt"]) for row in rows]

    def settle(
        self, entry: str, kind: Kind, attempt: float, *, actual: float | None, void: str = ""
    ) -> None:
        """Write down what became of a prediction.

        Args:
            entry: of which job.
            kind: of which moment.
            attempt: of which attempt.
            actual: Unix time of the moment, or None where it does not come any more.
            void: why not.
        """
        with self._store.changing() as db:
            db.execute(
                "UPDATE predictions SET actual = ?, void = ? "
                "WHERE entry = ? AND kind = ? AND attempt = ?",
                (actual, void, entry, kind, attempt),
            )

    def settled(self, since: float) -> tuple[Settled, ...]:
        """Predictions that were made since a moment, and what became of them."""
        rows = self._store.rows(
            "SELECT kind, made, earliest, latest, samples, actual FROM predictions "
            "WHERE actual IS NOT NULL AND made >= ?",
            since,
        )
        return tuple(Settled(**row) for row in rows)

    def counts(self, since: float) -> Mapping[str, int]:
        """How many predictions are open, and how many became void, of those made since a moment."""
        rows = self._store.rows(
            "SELECT CASE WHEN void != '' THEN 'void' WHEN actual IS NULL THEN 'open' "
            "ELSE 'settled' END AS state, count(*) AS n FROM predictions WHERE made >= ? "
            "GROUP BY 1",
            since,
        )
        return {row["state"]: row["n"] for row in rows}


def _text(features: Features) -> str:
    found: list[Any] = [
        features.model,
        features.imgsz,
        features.batch,
        features.card,
        features.gpus,
        features.data,
    ]
    # As it was written before there was anything unusual to tell apart.
    return json.dumps([*found, features.pacing] if features.pacing else found)


def _features(text: str) -> Features:
    return Features(*json.loads(text))
