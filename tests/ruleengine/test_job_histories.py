"""Range queries for the charts, and the charts themselves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import httpx
import pytest
from tests.ruleengine.worlds import OwnedClock, Received, Sink
from tests.servers import free_port

from gpuwarden.errors import ServiceUnavailable
from gpuwarden.quantities import Unit
from gpuwarden.ruleengine import charts
from gpuwarden.ruleengine.job_histories import (
    AT_ONCE,
    Chart,
    JobHistories,
    JobHistory,
    PrometheusSeries,
)
from gpuwarden.ruleengine.notations import SeriesName
from gpuwarden.ruleengine.remote_writes import write_request
from gpuwarden.ruleengine.temporary_servers import temporary_prometheus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HISTORY = JobHistory(start=0.0, end=21_600.0, step=120.0, charts=())


@contextlib.contextmanager
def server(status: int, body: object) -> Iterator[Sink]:
    """A Prometheus that always answers the same."""

    def answer(_method: str, _request: Received) -> tuple[int, bytes]:
        return status, json.dumps(body).encode()

    with Sink(answer) as sink:
        yield sink


def matrix(*points: tuple[float, str]) -> dict[str, Any]:
    """An answer with one series, or with none."""
    rows = [{"metric": {}, "values": [list(point) for point in points]}] if points else []
    return {"status": "success", "data": {"resultType": "matrix", "result": rows}}


async def asked(*urls: str) -> list[tuple[float, float]]:
    """What the servers at these addresses tell."""
    async with httpx.AsyncClient() as client:
        source = PrometheusSeries(urls, client, timeout=5.0)
        return await source.series("up", start=0.0, end=240.0, step=120.0)


def test_a_series_is_asked_for_as_prometheus_documents() -> None:
    """And what is no number in it is left out."""
    with server(200, matrix((0, "1"), (120, "NaN"), (240, "+Inf"), (360, "2.5"))) as sink:
        assert asyncio.run(asked(sink.url)) == [(0.0, 1.0), (360.0, 2.5)]
        (request,) = sink.received
        assert request.path == "/api/v1/query_range"
        form = {name: value for name, (value,) in parse_qs(request.body.decode()).items()}
        assert form["query"] == "up"
        assert (form["start"], form["end"], form["step"]) == ("0.000", "240.000", "120.000")


def test_of_several_servers_that_with_most_points_counts() -> None:
    """One that is down, or does not scrape the job's node, costs nothing."""
    with server(200, matrix()) as other, server(200, matrix((0, "1"))) as right:
        dead = f"http://127.0.0.1:{free_port()}"
        assert asyncio.run(asked(dead, other.url, right.url)) == [(0.0, 1.0)]


@pytest.mark.parametrize(
    ("status", "body"),
    [(503, {"status": "error"}), (200, []), (200, {"data": {"result": [{"values": [["x", 1]]}]}})],
)
def test_an_answer_that_cannot_be_read_is_an_error(status: int, body: object) -> None:
    """Not an empty chart."""
    with server(status, body) as sink, pytest.raises(ServiceUnavailable):
        asyncio.run(asked(sink.url))


def test_the_queries_are_prometheus_own() -> None:
    """On a real one: the mean over cards, the fullest card, and images per second of training."""
    begin, minutes = 1_700_000_000.0, 61
    job = {"job_id": "proc-1", "instance": "n:9835"}
    run = {**job, "run_id": "r"}

    def series(name: str, labels: dict[str, str], value: Callable[[int], float]) -> Any:
        samples = [(int((begin + 60 * n) * 1000), value(n)) for n in range(minutes)]
        return SeriesName(name, tuple(sorted(labels.items()))), samples

    body = write_request(
        [
            series("gpu_job_utilization_ratio", {**job, "uuid": "A"}, lambda _: 0.5),
            series("gpu_job_utilization_ratio", {**job, "uuid": "B"}, lambda _: 1.0),
            series("gpu_job_utilization_ratio", {"job_id": "proc-12", "uuid": "C"}, lambda _: 0.0),
            series("gpu_job_memory_bytes", {**job, "uuid": "A"}, lambda _: 1e9),
            series("gpu_job_memory_bytes", {**job, "uuid": "B"}, lambda _: 2e9),
            series("yolo_images_total", run, lambda n: 60.0 * 100 * n),
            series("yolo_phase", {**run, "phase": "train"}, lambda _: 1.0),
        ]
    )

    async def story() -> JobHistory:
        async with temporary_prometheus([body]) as url, httpx.AsyncClient() as client:
            histories = JobHistories(
                PrometheusSeries([url], client), OwnedClock(begin + 60 * (minutes - 1))
            )
            return await histories.history("proc-1", None, ())

    history = asyncio.run(story())
    assert history.problem == ""
    last = {chart.signal: chart.points[-1][1] for chart in history.charts}
    assert last == {
        "gpu_utilization": 0.75,
        "gpu_memory": 2e9,
        "throughput": pytest.approx(100.0),
    }


class Held:
    """A `SeriesSource` that answers when it is let go.

    Attributes:
        asked: the queries that came.
        most: how many of them waited at the same time.
    """

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.most = 0
        self.free = asyncio.Event()
        self._now = 0

    async def series(self, query: str, *, start: float, end: float, step: float) -> list[Any]:
        """One point at the beginning and one at the end."""
        self.asked.append(query)
        self._now += 1
        self.most = max(self.most, self._now)
        await self.free.wait()
        self._now -= 1
        return [(start, 0.0), (end, step)]


def test_however_many_pages_are_opened_prometheus_is_asked_little_at_a_time() -> None:
    """The rules' queries must not wait behind charts; one job's page is asked for once."""

    async def story() -> Held:
        source = Held()
        histories = JobHistories(source, OwnedClock())
        names = [f"proc-{number % 10}" for number in range(50)]
        asking = [asyncio.create_task(histories.history(name, None, ())) for name in names]
        for _ in range(10):
            await asyncio.sleep(0)
        asking.pop(0).cancel()  # whoever leaves takes the answer from nobody else
        source.free.set()
        found = await asyncio.gather(*asking)
        assert all(len(history.charts) == 3 for history in found)
        return source

    source = asyncio.run(story())
    assert len(source.asked) == 30
    assert source.most == 3 * AT_ONCE


def chart(*points: tuple[float, float], **values: Any) -> Chart:
    """A chart of utilisation."""
    found = {"low": None, "high": None, "expected": "nobody knows", **values}
    return Chart("gpu_utilization", "GPU utilisation", Unit.RATIO, points, **found)


def test_where_nothing_was_measured_nothing_is_drawn() -> None:
    """A gap breaks the line, instead of being bridged by one that nobody measured."""
    drawn = str(charts.draw(chart((0, 0.5), (120, 0.5), (7200, 0.5), (7320, 0.5)), HISTORY, "UTC"))
    assert len(re.findall('class="line"', drawn)) == 2


def test_what_is_expected_is_a_band_and_what_is_unknown_is_none() -> None:
    """A profile of one value still shows; the words say the same to who cannot see."""
    assert 'class="band"' not in str(charts.draw(chart((0, 0.5)), HISTORY, "UTC"))
    drawn = str(charts.draw(chart((0, 0.5), low=0.8, high=0.8, expected="80 %"), HISTORY, "UTC"))
    (height,) = re.findall(r'class="band"[^>]* height="([0-9.]+)"', drawn)
    assert float(height) >= 2.0
    assert 'aria-label="GPU utilisation: nothing now; 50 % at 00:00;' in drawn
    assert "expected: 80 %" in drawn


def test_a_value_of_long_ago_is_not_told_as_if_it_were_of_now() -> None:
    """In the reader's zone."""
    assert charts.latest(chart((21_500, 0.5)), HISTORY, "UTC") == "50 %"
    stale = charts.latest(chart((3600, 0.5)), HISTORY, "Asia/Shanghai")
    assert stale == "nothing now; 50 % at 09:00"


def test_what_prometheus_says_cannot_become_markup() -> None:
    """Not even in a title that no eye sees."""
    drawn = str(charts.draw(chart((0, 0.5), expected='"><script>'), HISTORY, "UTC"))
    assert "<script>" not in drawn
