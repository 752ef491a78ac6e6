"""Answers that are partial, late or of another shape are errors, never an empty fleet."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import pytest
from tests.servers import Server, prometheus

from gpuwarden.errors import InvalidInput, ServiceUnavailable
from gpuwarden.ruleengine.prometheus import WHOLE, PrometheusClient, QueryRefused, Sample
from gpuwarden.ruleengine.prometheus_settings import PrometheusSettings, client_of

if TYPE_CHECKING:
    from pathlib import Path

HEADERS = ("Authorization", "X-Scope-OrgID")
"""What the test's server tells beside the form."""
Answer = tuple[int, Any]
Serve = Callable[[dict[str, str]], Answer]


@contextmanager
def _serving(answer: Serve) -> Iterator[str]:
    """A server that speaks the query API as the test says."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            form = {
                name: values[0]
                for name, values in parse_qs(self.rfile.read(length).decode()).items()
            }
            form |= {name: self.headers[name] for name in HEADERS if name in self.headers}
            status, body = answer(form)
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _ask(
    url: str, query: str = "up", replica_labels: tuple[str, ...] = (), *, fold: bool = False
) -> list[Sample]:
    async def once() -> list[Sample]:
        async with PrometheusClient(
            url, timeout=5, replica_labels=replica_labels, fold=fold
        ) as client:
            return await client.instant(query, 1000.25)

    return asyncio.run(once())


def _vector(*rows: object, **extra: object) -> Answer:
    return 200, {
        "status": "success",
        "data": {"resultType": "vector", "result": list(rows)},
    } | extra


ROW = {"metric": {"__name__": "up", "job": "x"}, "value": [1000.25, "1"]}


def test_a_row_is_its_labels_and_its_value() -> None:
    """Numbers are text in Prometheus' JSON, so that NaN and infinity pass."""
    with _serving(lambda _: _vector(ROW, {"metric": {}, "value": [1000.25, "+Inf"]})) as url:
        assert _ask(url) == [Sample({"job": "x"}, 1.0), Sample({}, float("inf"))]


def test_the_time_is_sent_with_its_fraction() -> None:
    """All queries of a tick carry the same one."""
    forms: list[dict[str, str]] = []

    def answer(form: dict[str, str]) -> Answer:
        forms.append(form)
        return _vector()

    with _serving(answer) as url:
        assert _ask(url) == []
    assert forms == [{"query": "up", "time": "1000.250", "timeout": "5s", **WHOLE}]


@pytest.mark.parametrize(
    "answer",
    [
        _vector(ROW, isPartial=True),
        _vector(ROW, warnings=["remote read: store-2 is down"]),
        (500, {"status": "error", "errorType": "internal", "error": "boom"}),
        (503, {"status": "error", "errorType": "timeout", "error": "query timed out"}),
        (502, b"<html>bad gateway</html>"),
        (200, b""),
        (200, []),
        (200, {"status": "success"}),
        (200, {"status": "success", "data": {"resultType": "vector", "result": 3}}),
        (200, {"status": "success", "data": {"resultType": "vector", "result": [{}]}}),
        _vector({"metric": {}, "value": [1000.25, "many"]}),
        # Kept by a cache for an hour: the whole answer, or one row of it.
        _vector({"metric": {}, "value": [1000.25 - 3600, "1"]}),
        _vector(ROW, {"metric": {"job": "y"}, "value": [1000.25 - 3600, "1"]}),
        _vector({"metric": {"user": "\ud800"}, "value": [1000.25, "1"]}),
    ],
)
def test_everything_but_a_whole_answer_is_worth_another_try(answer: Answer) -> None:
    """The tick is discarded, and nothing changes."""
    with _serving(lambda _: answer) as url, pytest.raises(ServiceUnavailable):
        _ask(url)


@pytest.mark.parametrize(
    "answer",
    [
        # Thanos with partial_response=true, as it would answer if it passed our parameter over.
        _vector(ROW, warnings=["No StoreAPIs matched for this query"]),
        _vector(ROW, warnings=["receive series from Addr: 10.0.0.7:10901: Unavailable"]),
        # Thanos with partial_response=false.
        (422, {"status": "error", "errorType": "execution", "error": "fetch series for store"}),
        # vmselect, of which a vmstorage is away.
        (200, {"status": "success", "isPartial": True, "data": _vector(ROW)[1]["data"]}),
        (503, {"status": "error", "errorType": "503", "error": "cannot fetch: vmstorage"}),
        # Mimir: no tenant, too many queries, and an ingester too few.
        (401, b"no org id"),
        (429, {"status": "error", "errorType": "too_many_requests", "error": "per-user limit"}),
        (
            500,
            {"status": "error", "errorType": "internal", "error": "too many unhealthy instances"},
        ),
    ],
)
def test_what_compatible_servers_say_when_they_have_not_everything(answer: Answer) -> None:
    """By their documentation and source: no rows of such an answer are ever used."""
    with (
        _serving(lambda _: answer) as url,
        pytest.raises((ServiceUnavailable, QueryRefused)),
    ):
        _ask(url)


@pytest.mark.parametrize("fold", [True, False])
def test_labels_of_replicas_are_dropped_and_thanos_may_be_asked_to_fold_them(*, fold: bool) -> None:
    """One row of two replicas that agree; by default Thanos folds what it was told to fold."""
    forms: list[dict[str, str]] = []

    def answer(form: dict[str, str]) -> Answer:
        forms.append(form)
        return _vector(
            {"metric": {"job": "x", "replica": "a"}, "value": [1000.25, "1"]},
            {"metric": {"job": "x", "replica": "b"}, "value": [1000.25, "1"]},
            {"metric": {"job": "y", "replica": "b"}, "value": [1000.25, "2"]},
        )

    with _serving(answer) as url:
        rows = _ask(url, replica_labels=("replica",), fold=fold)
    assert rows == [Sample({"job": "x"}, 1.0), Sample({"job": "y"}, 2.0)]
    assert forms[0].get("replicaLabels[]") == ("replica" if fold else None)


def test_replicas_that_contradict_each_other_are_no_answer() -> None:
    """Which of them is right nobody knows."""
    answer = _vector(
        {"metric": {"job": "x", "replica": "a"}, "value": [1000.25, "1"]},
        {"metric": {"job": "x", "replica": "b"}, "value": [1000.25, "2"]},
    )
    with (
        _serving(lambda _: answer) as url,
        pytest.raises(ServiceUnavailable, match="let the server fold them"),
    ):
        _ask(url, replica_labels=("replica",))


def test_credentials_come_from_files_and_change_with_them(tmp_path: Path) -> None:
    """A token is renewed without a restart; the tenant goes along; a lost file is told."""
    seen: list[dict[str, str]] = []
    token = tmp_path / "token"
    token.write_text("first\n")
    settings = PrometheusSettings.model_validate(
        {"url": "http://prometheus", "bearer_token_file": "token", "tenant": "team-a"}
    )

    def answer(form: dict[str, str]) -> Answer:
        seen.append(form)
        return _vector()

    async def story(url: str) -> None:
        http = client_of(settings, lambda name: tmp_path / name)
        async with PrometheusClient(url, client=http) as client:
            await client.instant("up", 1.0)
            token.write_text("second-token\n")
            await client.instant("up", 1.0)
            token.unlink()
            with pytest.raises(ServiceUnavailable, match="bearer_token_file"):
                await client.instant("up", 1.0)

    with _serving(answer) as url:
        asyncio.run(story(url))
    assert [form["Authorization"] for form in seen] == ["Bearer first", "Bearer second-token"]
    assert {form["X-Scope-OrgID"] for form in seen} == {"team-a"}


def test_a_password_is_sent_as_basic_authentication(tmp_path: Path) -> None:
    """Name and password as RFC 7617 has them."""
    seen: list[str] = []
    (tmp_path / "password").write_text("open sesame")
    settings = PrometheusSettings.model_validate(
        {"url": "http://prometheus", "username": "aladdin", "password_file": "password"}
    )

    def answer(form: dict[str, str]) -> Answer:
        seen.append(form["Authorization"])
        return _vector()

    async def story(url: str) -> None:
        http = client_of(settings, lambda name: tmp_path / name)
        async with PrometheusClient(url, client=http) as client:
            await client.instant("up", 1.0)

    with _serving(answer) as url:
        asyncio.run(story(url))
    assert seen == ["Basic YWxhZGRpbjpvcGVuIHNlc2FtZQ=="]


@pytest.mark.parametrize("name", ["bearer_token_file", "ca_file"])
def test_a_file_that_is_missing_is_told_at_the_start(tmp_path: Path, name: str) -> None:
    """By the setting that names it."""
    settings = PrometheusSettings.model_validate({"url": "http://prometheus", name: "none"})
    with pytest.raises(InvalidInput, match=f"prometheus.{name}"):
        client_of(settings, lambda file: tmp_path / file)


def test_remarks_on_the_query_are_no_partial_answer() -> None:
    """Newer versions say that a metric might not be a counter."""
    answer = _vector(ROW, infos=["PromQL info: x"], warnings=["PromQL info: metric might not be"])
    with _serving(lambda _: answer) as url:
        assert len(_ask(url)) == 1


def test_no_server_is_an_error_that_names_the_address() -> None:
    """Refused connections and time-outs alike."""
    with pytest.raises(ServiceUnavailable, match=r"Prometheus at http://127\.0\.0\.1:9"):
        _ask("http://127.0.0.1:9")


def test_an_answer_that_drips_in_is_given_up() -> None:
    """Every byte comes in time, the answer never does; a tick must end."""
    done = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))

    def drip() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
            with contextlib.suppress(OSError):
                while not done.wait(0.02):
                    connection.sendall(b" ")

    thread = threading.Thread(target=drip)
    thread.start()

    async def once() -> None:
        async with PrometheusClient(
            f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=0.2
        ) as client:
            await client.instant("up", 1000)

    try:
        with pytest.raises(ServiceUnavailable, match=r"no whole answer within 0\.4 s"):
            asyncio.run(asyncio.wait_for(once(), 20))
    finally:
        done.set()
        thread.join()
        listener.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A real Prometheus without data."""
    with prometheus("global: {}\n", tmp_path_factory.mktemp("empty") / "tsdb") as running:
        yield running


def test_a_scalar_is_one_row(server: Server) -> None:
    """As of the real server."""
    assert _ask(server.url, "3 + 4") == [Sample({}, 7.0)]
    assert _ask(server.url, "vector(5)") == [Sample({}, 5.0)]


@pytest.mark.parametrize("query", ["up[5m]", '"text"', "sum by (", "holt(up)"])
def test_a_wrong_query_is_refused_and_not_tried_again(server: Server, query: str) -> None:
    """Its rule is UNKNOWN; the others are judged."""
    with pytest.raises(QueryRefused):
        _ask(server.url, query)


class _Clock:
    """A wall clock that is wrong by some seconds, and moves when it is read."""

    def __init__(self, *readings: float) -> None:
        self._readings = iter(readings)

    def wall(self) -> float:
        return next(self._readings)

    def monotonic(self) -> float:
        return 0.0


@pytest.mark.parametrize(
    ("before", "after", "skew"),
    [(100.0, 100.2, 0.0), (90.0, 90.2, 9.8), (120.0, 120.2, -20.0), (99.0, 101.0, 0.0)],
)
def test_the_clocks_distance_is_known_within_the_round_trip(
    before: float, after: float, skew: float
) -> None:
    """What the round trip can explain is no skew."""
    answer: Answer = (
        200,
        {"status": "success", "data": {"resultType": "scalar", "result": [100, "100"]}},
    )

    async def once(url: str) -> float:
        async with PrometheusClient(url, clock=_Clock(before, after)) as client:
            return await client.clock_skew()

    with _serving(lambda _: answer) as url:
        assert asyncio.run(once(url)) == pytest.approx(skew)


def test_a_real_servers_clock_is_ours(server: Server) -> None:
    """On one machine."""

    async def once() -> float:
        async with PrometheusClient(server.url) as client:
            return await client.clock_skew()

    assert abs(asyncio.run(once())) < 1
