"""What a replay puts together from windows is what Prometheus answers to the whole expression."""

from __future__ import annotations

import asyncio
import math
import random
from typing import TYPE_CHECKING

import httpx
import numpy as np
import pytest

from gpuwarden.ruleengine import replay_signals, signals
from gpuwarden.ruleengine.histories import History
from gpuwarden.ruleengine.notations import STALE, SeriesName, sorted_labels
from gpuwarden.ruleengine.replay_columns import Columns, HistoryClient, Ticks
from gpuwarden.ruleengine.temporary_servers import temporary_prometheus
from gpuwarden.ruleengine.verdicts import SignalKey

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from gpuwarden.ruleengine.notations import Value

BEGIN = 1_772_438_400.0
SCRAPE = 15.0
SCRAPES = 160
TICKS = Ticks(BEGIN + 300.0, 20.0, 100)
TRAINING = [name for name, spec in signals.SIGNALS.items() if spec.training]
REASONS = (*sorted(signals.HARMFUL_THROTTLING), "sw_power_cap")
GIB = 2.0**30


def _keys() -> Iterator[SignalKey]:
    for name, spec in signals.SIGNALS.items():
        if spec.rate:
            yield from (SignalKey(name, "avg", window) for window in (120.0, 300.0))
        else:
            yield SignalKey(name, "last", 0.0)
            yield from (SignalKey(name, agg, 180.0) for agg in ("avg", "max", "q0.2"))
            yield SignalKey(name, "min", 0.0, samples=3)
    yield SignalKey(signals.PROGRESS, "min", 180.0)


class _Messy:
    """Series as they come from nodes that restart, jobs that end, exporters that move.

    Args:
        seed: of the dice.
        odd: share of the series in which some samples are no finite numbers.
    """

    def __init__(self, seed: int, odd: float) -> None:
        self.dice = random.Random(seed)  # noqa: S311 - a test is not to be guessed at
        self.odd = odd
        self.made = History()

    def history(self) -> History:
        """Five jobs on three nodes."""
        for number in range(5):
            node = f"n{number % 3}:9835"
            job = {"instance": node, "job_id": f"proc-{number}"}
            for card in range(1 + number % 2):
                where = {"instance": node, "uuid": f"GPU-{number}-{card}"}
                self._card(where, where | job)
            self._job(job)
            self._run(job | {"run_id": f"r{number}"})
        return self.made

    def _card(self, card: Mapping[str, str], held: Mapping[str, str]) -> None:
        for metric in {s.metric for s in signals.SIGNALS.values() if s.per_gpu and s.device}:
            if metric != "gpu_throttle_active":
                self._write(metric, card, counter=False)
        for reason in REASONS:
            self._write("gpu_throttle_active", card | {"reason": reason}, counter=False)
        for metric in {s.metric for s in signals.SIGNALS.values() if s.per_gpu and not s.device}:
            self._write(metric, held, counter=False)
        for metric in ("gpu_memory_total_bytes", "gpu_power_limit_watts"):
            for scrape in range(SCRAPES):
                self.made.add(metric, BEGIN + scrape * SCRAPE, 80 * GIB, card)

    def _job(self, job: Mapping[str, str]) -> None:
        for metric in ("cpu_seconds", "read_bytes", "io_wait_seconds"):
            self._write(f"gpu_job_{metric}_total", job, counter=True)
        for metric in ("gpu_job_loader_workers", "gpu_job_resident_memory_bytes"):
            self._write(metric, job, counter=False)
        for resource in ("cpu", "io"):
            name = "gpu_job_pressure_seconds_total"
            self._write(name, job | {"resource": resource}, counter=True)
        self._write("gpu_job_processes", job | {"state": "zombie"}, counter=False)

    def _run(self, run: Mapping[str, str]) -> None:
        """A run whose exporter gets another pod midway: two series of it overlap in a window."""
        middle = self.dice.randrange(60, 100)
        for pod, first, last in (("a", 0, middle), ("b", middle, SCRAPES)):
            labels = run | {"pod": pod}
            for name in {signals.SIGNALS[name].metric for name in TRAINING}:
                self._write(name, labels, counter=True, first=first, last=last)
            self._write(
                "yolo_phase", labels | {"phase": "train"}, counter=False, first=first, last=last
            )

    def _write(
        self,
        metric: str,
        labels: Mapping[str, str],
        *,
        counter: bool,
        first: int = 0,
        last: int = SCRAPES,
    ) -> None:
        dice, level, spoken = self.dice, 0.0, False
        odd, silent_until = dice.random() < self.odd, -1
        still = dice.random() < 0.3
        for scrape in range(first, last):
            time = BEGIN + scrape * SCRAPE
            if scrape >= silent_until and dice.random() < 0.02:
                silent_until = scrape + dice.choice((1, 2, 4, 12))
                if spoken and dice.random() < 0.5:
                    self._add(metric, time, STALE, labels)
            if scrape < silent_until:
                continue
            level = 0.0 if dice.random() < 0.01 else level + (0.0 if still else dice.random() * 9)
            value: float = level if counter else dice.choice((0.0, 1.0, 1.0, dice.random()))
            if odd and dice.random() < 0.1:
                value = dice.choice((math.nan, math.inf, -math.inf))
            self._add(metric, time, value, labels)
            spoken = True

    def _add(self, metric: str, time: float, value: Value, labels: Mapping[str, str]) -> None:
        name = SeriesName(metric, sorted_labels(labels))
        self.made.series.setdefault(name, {})[round(time * 1000)] = value


def _shown(columns: Columns) -> dict[tuple[tuple[str, str], ...], list[float | None]]:
    """Rows that hold anything, by their labels."""
    return {
        tuple(sorted(row.items())): [None if math.isnan(value) else value for value in own]
        for row, own in zip(columns.labels, columns.values.tolist(), strict=True)
        if not np.isnan(own).all()
    }


async def _compared(made: History) -> tuple[int, int]:
    """How many signals were put together, and how many only the server can tell."""
    told = [0, 0]
    async with (
        temporary_prometheus(made) as url,
        httpx.AsyncClient(timeout=60, trust_env=False) as client,
    ):
        history = HistoryClient(url, client)
        await history.probe(BEGIN)
        total = await history.columns("gpu_memory_total_bytes", TICKS)
        for key in _keys():
            asked = signals.amount(key) or key
            found = {
                text: await history.columns(text, TICKS)
                for text in replay_signals.texts_of(asked, SCRAPE)
            }
            ours = replay_signals.put_together(asked, found, SCRAPE)
            told[ours is None] += 1
            if ours is None:
                continue
            if asked != key:
                ours = replay_signals.shares(ours, [(total, "uuid")])
            whole = await history.columns(signals.query(key, scrape_interval=SCRAPE), TICKS)
            assert _shown(ours) == _shown(whole), key
            assert _shown(ours), key
    return told[0], told[1]


def test_what_is_put_together_is_what_the_whole_expression_answers() -> None:
    """Gaps, ends, restarts, counters that begin anew, a run under two pods; sample for sample."""
    together, alone = asyncio.run(_compared(_Messy(1, odd=0.0).history()))
    assert together == len(list(_keys()))
    assert alone == 0


@pytest.mark.parametrize("odd", [0.04, 0.5])
def test_samples_that_are_no_finite_numbers_are_left_to_the_server(odd: float) -> None:
    """Where rows are compared with one another; elsewhere they are passed on as such."""
    together, alone = asyncio.run(_compared(_Messy(2, odd=odd).history()))
    assert together > 20
    assert alone > 0


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(12))
def test_the_same_of_many_histories(seed: int) -> None:
    """With and without what is no finite number."""
    together, _ = asyncio.run(_compared(_Messy(seed, odd=seed % 3 * 0.02).history()))
    assert together > 20
