"""Values over a stretch of history: one row for each series, one column for each tick.

A replay asks each distinct expression once for many ticks. Prometheus evaluates a range query by
evaluating the expression at each of its steps, so that a column is what an instant query at that
time would have answered. Answers are bounded in bytes; a stretch that is too much for the server,
or refused for a part of it only, is halved.
"""

from __future__ import annotations

import asyncio
import ipaddress
import itertools
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final
from urllib.parse import urlencode

import httpx
import msgspec
import numpy as np

from gpuwarden import durations
from gpuwarden.clock import SystemClock
from gpuwarden.errors import ServiceUnavailable
from gpuwarden.exchanges import exchange
from gpuwarden.ruleengine.prometheus import (
    MAX_ANSWER_BYTES,
    WHOLE,
    PrometheusClient,
    QueryRefused,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from gpuwarden.ruleengine.prometheus import Sample

    Floats = NDArray[np.float64]

MAX_POINTS: Final = 11_000
"""Prometheus refuses more points of a series in one answer."""
MAX_HALVINGS: Final = 64
"""How often one expression may be split in one stretch, before the rest of it counts as failed."""
PARALLEL_QUERIES: Final = 2
"""The server has others to serve."""
_OF_THE_RANGE = re.compile(r"\b(?:start|end)\s*\(")
# The gate by which live queries ask for a fresh sample; see `over_history`.
_SERIES = r"[a-zA-Z_:][a-zA-Z0-9_:]*(?:\{[^{}()]*\})?"
_FRESH = re.compile(
    rf"(?P<itself>(?:^|(?<=\())(?P<left>{_SERIES})(?: == 1)? and )?"
    rf"timestamp\((?P<series>{_SERIES})\) >= time\(\) - (?P<seconds>[0-9]+(?:\.[0-9]+)?)"
)
_WARNED = "PromQL info:"
_WHOLE = re.compile("larger than|no whole answer within|ReadTimeout")
"""What `exchange` says of an answer that was too large or too late, and may come in halves."""


def over_history(expression: str, *, closed: bool) -> str:
    """An expression with gates that are cheap over many steps, and mean the same.

    `timestamp()` is dear in a range query. A sample at most N seconds old, of a series that has not
    ended, is there exactly if the last N seconds hold one and the series has a value. Where the
    series itself is what is gated, it has one.

    Args:
        expression: as the live engine asks it.
        closed: whether the server's windows include their left end (Prometheus 2) or not (3).
    """

    def gate(found: re.Match[str]) -> str:
        # Times are whole milliseconds.
        seconds = float(found["seconds"]) + (0.0 if closed else 0.001)
        series = found["series"]
        present = f"present_over_time({series}[{durations.render(seconds)}])"
        if found["itself"] and found["left"] == series:
            return f"{found['itself']}{present}"
        return f"{found['itself'] or ''}({present} and {series})"

    return _FRESH.sub(gate, expression)


@dataclass(frozen=True, slots=True)
class Ticks:
    """Evenly spaced moments.

    Attributes:
        begin: Unix time of the first.
        step: seconds between two.
        count: how many.
    """

    begin: float
    step: float
    count: int

    @property
    def times(self) -> Floats:
        """Their Unix times."""
        return self.begin + self.step * np.arange(self.count, dtype=np.float64)

    @property
    def end(self) -> float:
        """Unix time of the last."""
        return self.begin + self.step * (self.count - 1)

    def part(self, start: int, stop: int) -> Ticks:
        """Those from one number to before another."""
        return Ticks(self.begin + self.step * start, self.step, stop - start)


@dataclass(frozen=True, slots=True)
class Columns:
    """The answers to one expression.

    Attributes:
        labels: of each row, without `__name__`.
        values: (rows, ticks); NaN where there is no sample, infinite where it is no finite number.
        failures: (first tick, tick after the last, why) where the server refused the expression.
    """

    labels: Sequence[Mapping[str, str]]
    values: Floats
    failures: tuple[tuple[int, int, str], ...] = ()

    def failure(self, tick: int) -> str | None:
        """Why there is no answer at a tick, or None."""
        return next((why for a, b, why in self.failures if a <= tick < b), None)


class _Row(msgspec.Struct):
    metric: dict[str, str]
    values: msgspec.Raw = msgspec.Raw(b"[]")


class _Data(msgspec.Struct):
    resultType: str  # noqa: N815 - Prometheus' name
    result: msgspec.Raw


class _Answer(msgspec.Struct):
    status: str
    data: _Data | None = None
    errorType: str = ""  # noqa: N815 - Prometheus' name
    error: str = ""
    warnings: list[str] | None = None
    isPartial: bool = False  # noqa: N815 - VictoriaMetrics' name


_DECODE_ANSWER = msgspec.json.Decoder(_Answer)
_DECODE_ROWS = msgspec.json.Decoder(list[_Row])
_DECODE_PAIRS = msgspec.json.Decoder(list[tuple[float, float]], strict=False)


@dataclass
class Cost:
    """What a replay asked of its server."""

    queries: int = 0
    samples: int = 0
    received_bytes: int = 0


class _TooMuch(ServiceUnavailable):
    """The answer is too large or too late; of half of the ticks it may not be."""


@dataclass
class HistoryClient:
    """Range queries of one Prometheus-compatible server.

    Attributes:
        url: base address.
        client: of HTTP.
        timeout: seconds for one query.
        closed: whether its windows include their left end; see `probe`.
        cost: what was asked so far.
    """

    url: str
    client: httpx.AsyncClient
    timeout: float = 120.0
    closed: bool = True
    cost: Cost = field(default_factory=Cost)
    _gate: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(PARALLEL_QUERIES))

    def __post_init__(self) -> None:
        self.url = self.url.rstrip("/")
        self._instants = PrometheusClient(self.url, timeout=self.timeout, client=self.client)
        self._headers = {"Content-Type": "application/x-www-form-urlencoded"}
        if _is_local(self.url):
            # To pack an answer costs both sides more than to carry it within one machine.
            self._headers["Accept-Encoding"] = "identity"

    async def instant(self, query: str, time: float) -> list[Sample]:
        """The rows of a query at one moment; errors as of `PrometheusClient.instant`."""
        async with self._gate:
            self.cost.queries += 1
            return await self._instants.instant(query, time)

    async def now(self) -> float:
        """Unix time by the server's clock."""
        return SystemClock().wall() + await self._instants.clock_skew()

    async def probe(self, time: float) -> None:
        """Find out whether windows include their left end, by a window that would show it.

        Raises:
            ServiceUnavailable: the server does not answer.
        """
        aligned = time // 10 * 10
        try:
            rows = await self.instant("count_over_time(vector(1)[10s:10s])", aligned)
        except QueryRefused:
            rows = []  # then one millisecond more is asked for, which is no sample's age
        self.closed = bool(rows) and rows[0].value > 1

    async def columns(self, query: str, ticks: Ticks, *, custom: bool = False) -> Columns:
        """The values of an expression at each tick.

        Args:
            query: PromQL; its gates are made cheap.
            ticks: the moments.
            custom: whether a refusal is a fact about the expression, and not an error.

        Raises:
            ServiceUnavailable: no answer, an error of the server, or a partial answer.
            QueryRefused: the server refuses an expression of our own.
        """
        query = over_history(query, closed=self.closed)
        if _OF_THE_RANGE.search(query):
            return await self._each(query, ticks)
        budget = [MAX_HALVINGS]
        parts = [
            await self._part(query, ticks.part(a, min(a + MAX_POINTS, ticks.count)), budget, custom)
            for a in range(0, ticks.count, MAX_POINTS)
        ]
        return parts[0] if len(parts) == 1 else _joined(parts)

    async def _part(self, query: str, ticks: Ticks, budget: list[int], custom: bool) -> Columns:
        try:
            async with self._gate:
                return await self._range(query, ticks)
        except QueryRefused as error:
            if ticks.count == 1 or budget[0] <= 0:
                if not custom:
                    raise
                return _failed(ticks, str(error))
        except _TooMuch:
            if ticks.count == 1 or budget[0] <= 0:
                raise
        budget[0] -= 1
        middle = ticks.count // 2
        halves = [
            await self._part(query, ticks.part(a, b), budget, custom)
            for a, b in ((0, middle), (middle, ticks.count))
        ]
        return _joined(halves)

    async def _each(self, query: str, ticks: Ticks) -> Columns:
        """For `start()` and `end()`, which mean something else in a range: tick by tick."""
        parts: list[Columns] = []
        for number, time in enumerate(ticks.times):
            try:
                rows = await self.instant(query, float(time))
            except QueryRefused as error:
                parts.append(_failed(ticks.part(number, number + 1), str(error)))
                continue
            values = np.array([[row.value] for row in rows]).reshape(len(rows), 1)
            parts.append(Columns([row.labels for row in rows], _marked(values)))
        return _joined(parts)

    async def _range(self, query: str, ticks: Ticks) -> Columns:
        form = {
            "query": query,
            "start": f"{ticks.begin:.3f}",
            "end": f"{ticks.end:.3f}",
            "step": f"{ticks.step:.3f}",
            "timeout": f"{self.timeout:g}s",
            **WHOLE,
        }
        try:
            reply = await exchange(
                self.client,
                "POST",
                f"{self.url}/api/v1/query_range",
                seconds=2 * self.timeout,
                content=urlencode(form).encode(),
                headers=self._headers,
                limit=MAX_ANSWER_BYTES,
            )
        except ServiceUnavailable as error:
            kind = _TooMuch if _WHOLE.search(str(error)) else ServiceUnavailable
            raise kind(f"Prometheus at {self.url}: {error}") from error
        self.cost.queries += 1
        self.cost.received_bytes += len(reply.body)
        found = self._decoded(reply.body, reply.status, query, ticks)
        self.cost.samples += int(np.count_nonzero(~np.isnan(found.values)))
        return found

    def _decoded(self, body: bytes, status: int, query: str, ticks: Ticks) -> Columns:
        try:
            answer = _DECODE_ANSWER.decode(body)
            if answer.status != "success" or answer.data is None:
                message = f"{self.url}: {answer.errorType}: {answer.error} (in: {query})"
                if status in (400, 422) and answer.errorType in ("bad_data", "execution"):
                    raise QueryRefused(message)
                if answer.errorType == "timeout":
                    raise _TooMuch(message)
                raise ServiceUnavailable(message)
            serious = [text for text in answer.warnings or () if not text.startswith(_WARNED)]
            if answer.isPartial or serious:
                why = "; ".join(serious) or "isPartial"
                raise ServiceUnavailable(f"{self.url} gave a partial answer: {why}")
            if answer.data.resultType != "matrix":
                raise QueryRefused(f"the query gives a {answer.data.resultType} (in: {query})")
            rows = _DECODE_ROWS.decode(answer.data.result)
            return _table(rows, ticks)
        except (msgspec.MsgspecError, ValueError) as error:
            message = f"{self.url} gave an answer of an unexpected shape: {error}"
            raise ServiceUnavailable(message) from error


def _is_local(url: str) -> bool:
    """Whether a server is on this machine, by its address."""
    name = httpx.URL(url).host
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def _table(rows: Sequence[_Row], ticks: Ticks) -> Columns:
    values = np.full((len(rows), ticks.count), np.nan)
    for number, row in enumerate(rows):
        pairs = _numbers(row.values)
        places = np.rint((pairs[:, 0] - ticks.begin) / ticks.step).astype(np.intp)
        if len(places) and (places[0] < 0 or places[-1] >= ticks.count):
            raise ValueError("it has points that were not asked for")
        values[number, places] = _marked(pairs[:, 1])
    labels = [{k: v for k, v in row.metric.items() if k != "__name__"} for row in rows]
    return Columns(labels, values)


def _numbers(text: msgspec.Raw) -> Floats:
    """Pairs of time and value; the text is `[[1700000000,"0.5"],...]`."""
    # What reads numbers out of texts knows "Inf" and "-Inf", and not Go's "+Inf".
    pairs = _DECODE_PAIRS.decode(bytes(text).replace(b'"+Inf"', b'"Inf"'))
    flat = np.fromiter(itertools.chain.from_iterable(pairs), np.float64, 2 * len(pairs))
    return flat.reshape(-1, 2)


def _marked(values: Floats) -> Floats:
    """NaN stands for no sample at all; a sample that is NaN is told from that by infinity."""
    return np.where(np.isnan(values), np.inf, values)


def _failed(ticks: Ticks, why: str) -> Columns:
    return Columns((), np.empty((0, ticks.count)), ((0, ticks.count, why),))


def _joined(parts: Sequence[Columns]) -> Columns:
    """Stretches that follow one another, as one."""
    numbers: dict[tuple[tuple[str, str], ...], int] = {}
    labels: list[Mapping[str, str]] = []
    for part in parts:
        for row in part.labels:
            key = tuple(sorted(row.items()))
            if key not in numbers:
                numbers[key] = len(labels)
                labels.append(row)
    values = np.full((len(labels), sum(part.values.shape[1] for part in parts)), np.nan)
    failures: list[tuple[int, int, str]] = []
    begin = 0
    for part in parts:
        end = begin + part.values.shape[1]
        for row, own in zip(part.labels, part.values, strict=True):
            values[numbers[tuple(sorted(row.items()))], begin:end] = own
        failures += [(begin + a, begin + b, why) for a, b, why in part.failures]
        begin = end
    return Columns(labels, values, tuple(failures))
