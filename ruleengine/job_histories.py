"""What a job did over the last hours, from Prometheus, beside what it should do.

Only for people to look at: no verdict rests on it. When Prometheus does not answer in time there is
no chart, and the page says why.
"""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlencode

from gpuwarden.errors import ServiceUnavailable
from gpuwarden.exchanges import exchange
from gpuwarden.quantities import Unit
from gpuwarden.ruleengine.alertmanager import rfc3339
from gpuwarden.ruleengine.profiles import expectation
from gpuwarden.ruleengine.prometheus import WHOLE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import httpx

    from gpuwarden.clock import Clock
    from gpuwarden.ruleengine.model import Profile
    from gpuwarden.ruleengine.verdicts import JobFacts

SCHEMA = "gpuwarden.job-history/v1"
HOURS = 6.0
POINTS = 180
"""Of a chart; more cannot be seen at its size."""
TIMEOUT_SECONDS = 4.0
"""For all charts of a page: who waits for why a job is ended does not wait for a picture."""
FRESH_SECONDS = 15.0
"""A history is not asked for again within this long, however often its page is opened."""
AT_ONCE = 2
"""Histories that are asked for at the same time: Prometheus answers the rules before the charts,
however many people, or one in a loop, open pages."""
_REMEMBERED = 64
_MAX_BYTES = 2 * 1024 * 1024

_QUERIES = {
    "gpu_utilization": (
        "GPU utilisation, mean of its cards",
        Unit.RATIO,
        "avg(gpu_job_utilization_ratio{{job_id={job}}})",
    ),
    "gpu_memory": (
        "GPU memory, fullest card",
        Unit.BYTES,
        "max(gpu_job_memory_bytes{{job_id={job}}})",
    ),
    "throughput": (
        "Throughput while training",
        Unit.IMAGES_PER_SECOND,
        (
            "max(max by (instance, job_id, run_id) (rate(yolo_images_total{{job_id={job}}}[5m])) "
            "/ on (instance, job_id, run_id) (max by (instance, job_id, run_id) "
            '(avg_over_time(yolo_phase{{phase="train",job_id={job}}}[5m])) >= 0.2))'
        ),
    ),
}

Point = tuple[float, float]
"""Unix time and value."""


class SeriesSource(Protocol):
    """Where histories come from."""

    async def series(self, query: str, *, start: float, end: float, step: float) -> list[Point]:
        """The points of a query that gives at most one series; times are Unix times."""


class PrometheusSeries:
    """Range queries to every server; of their answers that with most points counts.

    Args:
        urls: of the servers, be they replicas or shards: a job is on a node of one of them.
        client: with their credentials; closed by who made it.
        timeout: seconds for one query.
    """

    def __init__(
        self, urls: Sequence[str], client: httpx.AsyncClient, *, timeout: float = TIMEOUT_SECONDS
    ) -> None:
        self._urls = tuple(urls)
        self._client = client
        self._timeout = timeout

    async def series(self, query: str, *, start: float, end: float, step: float) -> list[Point]:
        """The points of a query that gives at most one series.

        Raises:
            ServiceUnavailable: no server answers, or none in a way that can be read.
        """
        form = {
            **WHOLE,
            "query": query,
            "start": f"{start:.3f}",
            "end": f"{end:.3f}",
            "step": f"{step:.3f}",
            "timeout": f"{self._timeout:g}s",
        }
        answers = await asyncio.gather(
            *(self._ask(url, urlencode(form).encode()) for url in self._urls),
            return_exceptions=True,
        )
        found = [answer for answer in answers if isinstance(answer, list)]
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        if not found and errors:
            raise errors[0]
        return max(found, key=len, default=[])

    async def _ask(self, url: str, content: bytes) -> list[Point]:
        reply = await exchange(
            self._client,
            "POST",
            f"{url}/api/v1/query_range",
            seconds=self._timeout,
            content=content,
            headers={"Content-Type": "application/x-www-form-urlencoded"},
            limit=_MAX_BYTES,
        )
        try:
            rows = reply.json()["data"]["result"]
            points = [(float(at), float(value)) for at, value in rows[0]["values"]] if rows else []
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ServiceUnavailable(f"it answered {reply.status}, without data") from error
        return [point for point in points if math.isfinite(point[1])]


@dataclass(frozen=True, slots=True)
class Chart:
    """One signal of a job.

    Attributes:
        signal: gpu_utilization, gpu_memory or throughput.
        title: the same for people.
        unit: of every value.
        points: what was measured, oldest first.
        low, high: the ends of what is expected, or None: nobody knows.
        expected: the expectation in words, or why there is none.
    """

    signal: str
    title: str
    unit: Unit
    points: tuple[Point, ...]
    low: float | None
    high: float | None
    expected: str


@dataclass(frozen=True, slots=True)
class JobHistory:
    """What a job did from `start` to `end` (Unix times), one value every `step` seconds.

    Attributes:
        charts: of the signals that it has.
        problem: why there are none, or an empty string.
    """

    start: float
    end: float
    step: float
    charts: tuple[Chart, ...]
    problem: str = ""


class JobHistories:
    """Histories of jobs, each kept for a moment.

    Args:
        source: where they come from, or None: from nowhere.
        clock: wall time.
    """

    def __init__(self, source: SeriesSource | None, clock: Clock) -> None:
        self._source = source
        self._clock = clock
        self._kept: dict[str, JobHistory] = {}
        self._asking: dict[str, asyncio.Task[JobHistory]] = {}
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def history(
        self, job_id: str, job: JobFacts | None, profiles: Iterable[Profile]
    ) -> JobHistory:
        """What a job did over the last hours; never an error.

        Args:
            job_id: the job.
            job: its facts, for what it should do, or None where it is gone.
            profiles: of the rules in force.
        """
        now = self._clock.wall()
        if self._source is None:
            return JobHistory(now, now, 1.0, (), "This engine keeps no history.")
        kept = self._kept.get(job_id)
        if kept is not None and 0 <= now - kept.end < FRESH_SECONDS:
            return kept
        asking = self._asking.get(job_id)
        if asking is None:
            asking = asyncio.create_task(
                self._ask(self._source, job_id, job, profiles=profiles, now=now)
            )
            self._asking[job_id] = asking
            asking.add_done_callback(lambda _: self._asking.pop(job_id, None))
        # Who closes the page takes the answer from nobody else.
        return await asyncio.shield(asking)

    async def _ask(
        self,
        source: SeriesSource,
        job_id: str,
        job: JobFacts | None,
        *,
        profiles: Iterable[Profile],
        now: float,
    ) -> JobHistory:
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                await self._turns.acquire()
        except TimeoutError:
            why = "Too many charts are asked for at once: open the page again in a moment."
            return JobHistory(now, now, 1.0, (), why)
        try:
            found = await _asked(source, job_id, job, profiles=profiles, now=now)
        finally:
            self._turns.release()
        if len(self._kept) >= _REMEMBERED:
            del self._kept[next(iter(self._kept))]
        self._kept[job_id] = found
        return found


async def _asked(
    source: SeriesSource,
    job_id: str,
    job: JobFacts | None,
    *,
    profiles: Iterable[Profile],
    now: float,
) -> JobHistory:
    step = HOURS * 3600.0 / POINTS
    start = now - HOURS * 3600.0
    name = json.dumps(job_id, ensure_ascii=False)
    queries = [query.format(job=name) for _, _, query in _QUERIES.values()]
    try:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            answers = await asyncio.gather(
                *(source.series(query, start=start, end=now, step=step) for query in queries)
            )
    except (ServiceUnavailable, TimeoutError) as error:
        why = str(error) or f"no answer within {TIMEOUT_SECONDS:g} s"
        return JobHistory(start, now, step, (), f"Prometheus gave no history: {why}")
    charts = [
        _chart(signal, points, job, profiles)
        for signal, points in zip(_QUERIES, answers, strict=True)
        if points
    ]
    problem = "" if charts else "Prometheus has no history of this job."
    return JobHistory(start, now, step, tuple(charts), problem)


def _chart(
    signal: str, points: Sequence[Point], job: JobFacts | None, profiles: Iterable[Profile]
) -> Chart:
    title, unit, _ = _QUERIES[signal]
    if job is None:
        return Chart(signal, title, unit, tuple(points), None, None, "it does not run any more")
    known = expectation(job, profiles)
    value = known.values.get(signal)
    if value is None:
        return Chart(signal, title, unit, tuple(points), None, None, known.missing)
    return Chart(signal, title, unit, tuple(points), value.low, value.high, str(value))


def history_document(job_id: str, history: JobHistory) -> dict[str, Any]:
    """A history for the API."""
    return {
        "schema": SCHEMA,
        "job_id": job_id,
        "start": rfc3339(history.start),
        "end": rfc3339(history.end),
        "step": history.step,
        "problem": history.problem,
        "charts": [
            {
                "signal": chart.signal,
                "unit": chart.unit.value,
                "points": [[round(at, 3), value] for at, value in chart.points],
                "expected": (
                    None
                    if chart.low is None or chart.high is None
                    else {"low": chart.low, "high": chart.high}
                ),
                "expected_text": chart.expected,
            }
            for chart in history.charts
        ],
    }
