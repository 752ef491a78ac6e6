"""Saying when jobs will start and end, writing that down, and seeing afterwards whether it was so.

What was said first stands: a prediction that is made anew every few seconds is right in the end.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from gpuwarden.periods import Span
from gpuwarden.schedule_api import EntryState
from gpuwarden.scheduling.predictions import Prediction, Run, predict
from gpuwarden.scheduling.usages import held_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from gpuwarden.schedule_api import QueueEntry
    from gpuwarden.scheduling.foresight_stores import ForesightStore
    from gpuwarden.scheduling.holdings import Holding
    from gpuwarden.scheduling.predictions import Training
    from gpuwarden.scheduling.stores import Store

_ENDED = (EntryState.DONE, EntryState.FAILED)
_WAITS = (EntryState.PENDING, EntryState.HELD)


class Foresight:
    """Predictions of one engine's queue.

    Args:
        memory: where they are written down.
        store: whose file it is.
    """

    def __init__(self, memory: ForesightStore, store: Store) -> None:
        self._memory = memory
        self._store = store

    def look(
        self,
        entries: Sequence[QueueEntry],
        trainings: Mapping[str, Training],
        held: Mapping[str, Sequence[Holding]],
        *,
        now: float,
    ) -> tuple[QueueEntry, ...]:
        """Foretell what can be, and settle what has come.

        Args:
            entries: of this tick.
            trainings: what they train, where that is known.
            held: attempts of each entry, as the account last told.
            now: Unix time.

        Returns:
            The entries, with their expected ends where the engine did not tell one.
        """
        self._learn(entries, trainings, held, now)
        told = tuple(self._foretold(item, trainings, held, now) for item in entries)
        with self._store.changing():
            for item in told:
                if item.start is not None and item.state in _WAITS:
                    self._memory.foretell(
                        item.id, "start", float(item.requeues), interval=item.start, now=now
                    )
                if item.finish is not None and item.started is not None:
                    self._memory.foretell(
                        item.id, "finish", item.started, interval=item.finish, now=now
                    )
            self._settle_starts(entries)
            self._settle_ends(entries, held)
        return told

    def _learn(
        self,
        entries: Sequence[QueueEntry],
        trainings: Mapping[str, Training],
        held: Mapping[str, Sequence[Holding]],
        now: float,
    ) -> None:
        """Take the trainings that ended by themselves, and were whole ones.

        A run that was submitted again under its name goes on where it was, or has nothing left to
        do: neither says what a training takes.
        """
        several = _several_jobs(entries, held)
        for item in entries:
            training, attempts = trainings.get(item.id), held.get(item.id, [])
            if (
                item.state is not EntryState.DONE
                or training is None
                or training.epochs is None
                or not training.features.known
                or not attempts
                or any(each.end is None for each in attempts)
                or (item.run_id is not None and item.run_id in several)
                or self._memory.knows_run(item.id)
            ):
                continue
            seconds = sum(held_seconds(each, Span(0.0, now), now=now) for each in attempts)
            ended = max(each.end or 0.0 for each in attempts)
            self._memory.keep_run(item.id, Run(training.features, training.epochs, seconds, ended))

    def _foretold(
        self,
        item: QueueEntry,
        trainings: Mapping[str, Training],
        held: Mapping[str, Sequence[Holding]],
        now: float,
    ) -> QueueEntry:
        training = trainings.get(item.id)
        if item.finish is not None or item.started is None or training is None:
            return item
        if item.state in (*_ENDED, *_WAITS):
            return item
        found = predict(
            self._memory.runs_like(training.features), training.features, training.epochs
        )
        if not isinstance(found, Prediction):
            return item
        before = sum(
            held_seconds(each, Span(0.0, item.started), now=now)
            for each in held.get(item.id, ())
            if each.start < item.started
        )
        return replace(item, finish=found.finish(item.started, now=now, held=before))

    def _settle_starts(self, entries: Sequence[QueueEntry]) -> None:
        there = {item.id: item for item in entries}
        for name, attempt in self._memory.open_predictions("start"):
            item = there.get(name)
            if item is None:
                self._memory.settle(name, "start", attempt, actual=None, void="left the queue")
            elif item.started is not None and item.requeues == attempt:
                self._memory.settle(name, "start", attempt, actual=item.started)
            elif item.state in _ENDED or item.requeues > attempt:
                self._memory.settle(name, "start", attempt, actual=None, void="did not start")

    def _settle_ends(
        self, entries: Sequence[QueueEntry], held: Mapping[str, Sequence[Holding]]
    ) -> None:
        there = {item.id: item for item in entries}
        for name, attempt in self._memory.open_predictions("finish"):
            # Engines tell of a start in whole seconds here and in parts of them there.
            ends = [each.end for each in held.get(name, ()) if abs(each.start - attempt) <= 2]
            end = ends[0] if ends else None
            item = there.get(name)
            if end is None:
                # It runs, or the account has not told of its end yet.
                if item is None and not ends:
                    self._memory.settle(name, "finish", attempt, actual=None, void="not accounted")
            elif (
                item is not None
                and item.state is EntryState.DONE
                and (item.started is None or abs(item.started - attempt) <= 2)
            ):
                self._memory.settle(name, "finish", attempt, actual=end)
            else:
                self._memory.settle(name, "finish", attempt, actual=None, void="left before")


def _several_jobs(
    entries: Iterable[QueueEntry], held: Mapping[str, Sequence[Holding]]
) -> frozenset[str]:
    """Runs by which more than one job of the queue or the account went."""
    jobs: dict[str, str] = {}
    several = set[str]()
    seen = [(item.run_id, item.id) for item in entries]
    seen += [(each.run_id, each.entry) for attempts in held.values() for each in attempts]
    for run, job in seen:
        if run is not None and jobs.setdefault(run, job) != job:
            several.add(run)
    return frozenset(several)
