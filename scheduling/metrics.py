"""The scheduler's metrics, made from its document and store when they are asked for."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from gpuwarden import __version__
from gpuwarden.catalogue import CATALOGUE, Source
from gpuwarden.metric_families import families
from gpuwarden.schedule_api import BookingState, EntryState, Outcome
from gpuwarden.scheduling.drivers import LEAK, LOOP
from gpuwarden.scheduling.foresight_stores import WAIT_BOUNDS
from gpuwarden.scheduling.policies import policy_hash
from gpuwarden.scheduling.stores import STEP_BOUNDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from prometheus_client.metrics_core import Metric

    from gpuwarden.metric_families import Row
    from gpuwarden.scheduling.schedulers import Scheduler

_LIVE = (EntryState.DONE, EntryState.FAILED)
_HELD = (EntryState.RUNNING, EntryState.LEAVING)


class SchedulerCollector(Collector):
    """Families of one scheduler.

    Args:
        scheduler: read, never changed.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def collect(self) -> Iterator[Metric]:
        """Yield every family of the catalogue that the scheduler exports."""
        rows = {f"gpuwarden_scheduler_{name}": list(found) for name, found in self._rows()}
        yield from families(Source.SCHEDULER, rows)
        yield self._waits()
        yield self._steps()

    def _rows(self) -> Iterator[tuple[str, Iterable[Row]]]:
        scheduler = self._scheduler
        yield "build_info", [((__version__, scheduler.driver.engine), 1.0)]
        yield "policy_info", [((policy_hash(scheduler.policy),), 1.0)]
        yield "reload_success", [((), float(scheduler.reload_problem is None))]
        if scheduler.ticked is not None:
            yield "tick_timestamp_seconds", [((), scheduler.ticked)]
            yield "tick_seconds", [((), scheduler.tick_seconds)]
        if scheduler.seen is not None:
            yield "engine_seen_timestamp_seconds", [((), scheduler.seen)]
        outcomes = {"completed": 0, "unseen": 0, "failed": 0} | scheduler.outcomes
        yield "ticks_total", [((name,), float(n)) for name, n in sorted(outcomes.items())]
        codes = sorted({problem.code for problem in scheduler.document.problems})
        yield "problem", [((code,), 1.0) for code in codes]
        # A queue that was not read is not known: an empty one would read as a quiet night.
        if scheduler.seen is not None:
            yield from self._queue()
        yield from self._preemptions()
        yield from self._budgets()
        yield from self._bookings()

    def _queue(self) -> Iterator[tuple[str, Iterable[Row]]]:
        document, now = self._scheduler.document, self._scheduler.clock.wall()
        jobs: Counter[tuple[str, ...]] = Counter()
        gpus: Counter[tuple[str, ...]] = Counter()
        oldest: dict[tuple[str, ...], float] = {}
        for item in document.entries:
            if item.state in _LIVE:
                continue
            jobs[item.team, item.priority, item.state.value] += item.tasks
            gpus[item.team, item.state.value] += item.gpus * item.tasks
            if item.state is EntryState.PENDING:
                key = (item.team, item.priority)
                oldest[key] = max(oldest.get(key, 0.0), now - item.submitted)
        yield "jobs", _counted(jobs)
        yield "gpus", _counted(gpus)
        yield "oldest_wait_seconds", sorted(oldest.items())
        # One that runs has no reason to wait: the engine tells of it as a problem alone.
        held = sum(item.why == LOOP for item in document.entries)
        loops = max(held, sum(problem.code == LOOP for problem in document.problems))
        yield "requeue_loops", [((), float(loops))]
        yield (
            "requeues_total",
            [
                ((team,), float(n))
                for team, n in sorted(self._scheduler.foresights.requeues().items())
            ],
        )
        leaks = [problem.words for problem in document.problems if problem.code == LEAK]
        counts = [int(word) for words in leaks if (word := words.partition(" ")[0]).isdecimal()]
        yield "quota_leak_gpus", [((document.engine,), float(sum(counts)))]

    def _preemptions(self) -> Iterator[tuple[str, Iterable[Row]]]:
        sums = self._scheduler.store.preemption_sums()
        yield (
            "preemptions_total",
            [((cause, out), float(n)) for cause, out, n, _ in sums if out != Outcome.OPEN],
        )
        still = [
            item
            for item in self._scheduler.document.preemptions
            if item.outcome in (Outcome.OPEN, Outcome.OVERDUE) and "left" not in item.steps
        ]
        yield "preemptions_open", [((), float(sum(i.outcome is Outcome.OPEN for i in still)))]
        now = self._scheduler.clock.wall()
        yield (
            "victim_overdue",
            sorted(
                {
                    ((item.victim, item.run_id or ""), 1.0)
                    for item in still
                    if item.outcome is Outcome.OVERDUE
                    or (item.deadline is not None and now > item.deadline)
                }
            ),
        )
        lost: defaultdict[str, float] = defaultdict(float)
        for cause, _out, _n, seconds in sums:
            lost[cause] += seconds
        yield "lost_gpu_seconds_total", [((cause,), n) for cause, n in sorted(lost.items())]

    def _budgets(self) -> Iterator[tuple[str, Iterable[Row]]]:
        budgets = self._scheduler.document.budgets
        yield (
            "budget_limit_gpu_hours",
            [((item.team, item.per, item.kind), item.limit_gpu_hours) for item in budgets],
        )
        yield (
            "budget_used_gpu_hours",
            [((item.team, item.per), item.used) for item in budgets if item.used is not None],
        )
        yield (
            "budget_forecast_gpu_hours",
            [
                ((item.team, item.per), item.forecast)
                for item in budgets
                if item.forecast is not None
            ],
        )

    def _bookings(self) -> Iterator[tuple[str, Iterable[Row]]]:
        slots = self._scheduler.document.bookings
        states: Counter[tuple[str, ...]] = Counter({(state.value,): 0 for state in BookingState})
        booked: Counter[tuple[str, ...]] = Counter()
        used: Counter[tuple[str, ...]] = Counter()
        for item in slots:
            states[(item.state.value,)] += 1
            if item.state in (BookingState.ACTIVE, BookingState.IDLE):
                booked[(item.team,)] += item.gpus
                use = self._scheduler.uses.get(item.id)
                if use is not None:
                    used[(item.team,)] += use.gpus
        yield "booking_slots", _counted(states)
        yield "booked_gpus", _counted(booked)
        yield "booked_used_gpus", _counted(used)

    def _waits(self) -> HistogramMetricFamily:
        counts = self._scheduler.foresights.waits()
        return _histogram(
            "wait_seconds", {(*labels,): each for labels, each in counts.items()}, WAIT_BOUNDS
        )

    def _steps(self) -> HistogramMetricFamily:
        counts = self._scheduler.store.step_counts()
        return _histogram(
            "receipt_step_seconds", {(step,): each for step, each in counts.items()}, STEP_BOUNDS
        )


def _counted(counts: Counter[tuple[str, ...]]) -> list[Row]:
    return [(labels, float(n)) for labels, n in sorted(counts.items())]


def _histogram(
    name: str,
    values: Mapping[tuple[str, ...], Mapping[float, tuple[int, float]]],
    bounds: tuple[float, ...],
) -> HistogramMetricFamily:
    """A histogram of what was counted.

    Args:
        name: of the metric, without its prefix.
        values: labels -> bound -> how many fell below it and no lower one, and their sum.
        bounds: that are shown; what was counted by others is below the infinite one alone.
    """
    metric = CATALOGUE[f"gpuwarden_scheduler_{name}"]
    family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
    for labels, counts in sorted(values.items()):
        below, buckets = 0, []
        for bound in bounds:
            below += counts.get(bound, (0, 0.0))[0]
            buckets.append((str(bound), float(below)))
        total = sum(count for count, _seconds in counts.values())
        seconds = sum(seconds for _count, seconds in counts.values())
        family.add_metric(labels, [*buckets, ("+Inf", float(total))], seconds)
    return family
