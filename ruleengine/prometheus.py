"""Prometheus' query API; answers that are partial or late are errors, never data."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, Self, TypeAlias, runtime_checkable
from urllib.parse import quote_plus, urlencode

import httpx
import msgspec

from gpuwarden.clock import SystemClock
from gpuwarden.errors import PermanentError, ServiceUnavailable
from gpuwarden.exchanges import exchange

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from types import TracebackType

    from gpuwarden.clock import Clock
    from gpuwarden.exchanges import Answer

WHOLE: Final = {
    # Thanos: an error rather than what some of its stores have; replicas folded into one.
    "partial_response": "false",
    "dedup": "true",
    # VictoriaMetrics: likewise; and as of the time that was asked for, not up to 30 s before it
    # (-search.latencyOffset).
    "deny_partial_response": "1",
    "nocache": "1",
}
"""Asked of every server: those that do not know a parameter pass it over."""
MAX_ANSWER_BYTES = 256 * 1024 * 1024
"""10,000 cards answer in 1.5 MB; an answer beyond this is a mistaken query."""
OFF_SECONDS = 5.0
"""A row of another moment than the one asked for, by more than this, was kept by a cache."""


class QueryRefused(PermanentError):
    """Prometheus understood the request and refuses the query itself (HTTP 400 or 422)."""


class Sample(msgspec.Struct, frozen=True, gc=False):
    """One row of an answer.

    Attributes:
        labels: without `__name__`.
        value: may be NaN or infinite, as Prometheus had it.
    """

    labels: Mapping[str, str]
    value: float


Table: TypeAlias = "Sequence[tuple[float, tuple[str, ...]]]"
"""Rows as values with the texts of the labels that were asked for; "" where a row has none."""


class Source(Protocol):
    """Where facts come from: the live server, or a replay."""

    async def instant(self, query: str, time: float) -> list[Sample]:
        """Evaluate a query at one moment."""

    async def clock_skew(self) -> float:
        """Seconds that the server's clock is ahead of ours; negative if behind."""


@runtime_checkable
class TableSource(Protocol):
    """A source that needs no mapping for each row: at 10,000 cards half of what rows cost."""

    async def table(self, query: str, time: float, labels: tuple[str, ...]) -> Table:
        """Evaluate a query at one moment; errors as of `PrometheusClient.instant`."""


async def table(source: Source, query: str, time: float, labels: tuple[str, ...]) -> Table:
    """Evaluate a query at one moment, and keep some labels of its rows.

    Args:
        source: asked for the table where it can give one, else for its rows.
        query: PromQL that gives a vector or a scalar.
        time: Unix time.
        labels: whose texts are kept, in this order.

    Raises:
        ServiceUnavailable: as of `PrometheusClient.instant`.
        QueryRefused: likewise.
    """
    if isinstance(source, TableSource):
        return await source.table(query, time, labels)
    return tabulated(await source.instant(query, time), labels)


def tabulated(rows: Iterable[Sample], labels: tuple[str, ...]) -> Table:
    """Rows as a table of these labels."""
    return [(row.value, tuple([row.labels.get(name, "") for name in labels])) for row in rows]


class PrometheusClient:
    """A client of one server, with kept connections. Use it as an async context manager."""

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 10.0,
        client: httpx.AsyncClient | None = None,
        clock: Clock | None = None,
        replica_labels: Sequence[str] = (),
        fold: bool = False,
    ) -> None:
        """Prepare a client; nothing is sent yet.

        Args:
            url: such as http://127.0.0.1:9090, with a path prefix if there is one.
            timeout: seconds for one query, on the server and between any two parts of its answer;
                the whole takes at most twice as long.
            client: a client with credentials or TLS settings of its own; it is closed with this.
            clock: this machine's clock.
            replica_labels: by which the server tells replicas apart; dropped from rows.
            fold: ask Thanos to fold these, and no others: not those of its own configuration.
        """
        self._url = url.rstrip("/")
        self._timeout = timeout
        self._replica_labels = tuple(replica_labels)
        self._fold = fold
        self._clock = clock or SystemClock()
        self._client = client or httpx.AsyncClient(timeout=timeout, follow_redirects=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def instant(self, query: str, time: float) -> list[Sample]:
        """Evaluate a query at one moment.

        Args:
            query: PromQL that gives a vector or a scalar.
            time: Unix time.

        Raises:
            ServiceUnavailable: no answer, an error of the server, or a partial answer.
            QueryRefused: the query itself is wrong or too dear.
        """
        reply = await self._post(self._form(query, {"time": f"{time:.3f}"}))
        return self._read(reply, query, time)

    async def table(self, query: str, time: float, labels: tuple[str, ...]) -> Table:
        """Evaluate a query at one moment, and keep some labels of its rows; see `instant`."""
        form = self._form(query, {"time": f"{time:.3f}"})
        reply = await self._post(form)
        # A label of replicas stands in the answer by its name, or no row has it.
        if not any(name.encode() in reply.body for name in self._replica_labels):
            plain = _plain_table(reply.body, labels, time)
            if plain is not None:
                return plain
        return tabulated(self._read(reply, query, time), labels)

    async def clock_skew(self) -> float:
        """How far the server's clock is from ours.

        Returns:
            Seconds that it is ahead; 0 where the difference is within the round trip.

        Raises:
            ServiceUnavailable: as for `instant`.
        """
        before = self._clock.wall()
        # Of the server's own moment, so that none is asked for.
        rows = self._read(await self._post(self._form("time()", {})), "time()", None)
        after = self._clock.wall()
        if not rows:
            raise ServiceUnavailable(f"{self._url}: time() has no value")
        theirs = rows[0].value
        if not math.isfinite(theirs):
            raise ServiceUnavailable(f"{self._url}: time() is {theirs}")
        if theirs > after:
            return theirs - after
        return min(0.0, theirs - before)

    def _form(self, query: str, extra: Mapping[str, str]) -> dict[str, str | Sequence[str]]:
        form: dict[str, str | Sequence[str]] = {
            "query": query,
            "timeout": f"{self._timeout:g}s",
            **WHOLE,
            **extra,
        }
        if self._fold:
            form["replicaLabels[]"] = self._replica_labels
        return form

    def _read(self, reply: Answer, query: str, time: float | None) -> list[Sample]:
        plain = _plain_rows(reply.body, time)
        if plain is not None:
            return self._folded(plain)
        status = reply.status
        try:
            answer = reply.json()
        except ValueError as error:
            message = f"{self._url} answered {status} with something that is not JSON"
            if status in (401, 403):
                message += ": see bearer_token_file, username and tenant under prometheus"
            raise ServiceUnavailable(message) from error
        if not isinstance(answer, dict):
            raise ServiceUnavailable(f"{self._url} answered {status} with something unexpected")
        if answer.get("status") != "success":
            message = f"{self._url}: {answer.get('errorType')}: {answer.get('error')}"
            if status in (400, 422) and answer.get("errorType") in ("bad_data", "execution"):
                raise QueryRefused(f"{message} (in: {_shortened(query)})")
            raise ServiceUnavailable(message)
        refuse_partial(self._url, answer)
        return self._rows(answer.get("data"), time)

    async def _post(self, form: Mapping[str, str | Sequence[str]]) -> Answer:
        try:
            return await exchange(
                self._client,
                "POST",
                f"{self._url}/api/v1/query",
                seconds=2 * self._timeout,
                content=urlencode(form, doseq=True, quote_via=_quoted).encode(),
                headers={
                    "Content-Type": "application/x-www-form-urlencoded",
                    # To pack and to unpack it takes both sides more time than all else.
                    "Accept-Encoding": "identity",
                },
                limit=MAX_ANSWER_BYTES,
            )
        except ServiceUnavailable as error:
            raise ServiceUnavailable(f"Prometheus at {self._url}: {error}") from error

    def _rows(self, data: object, time: float | None) -> list[Sample]:
        kind = data.get("resultType") if isinstance(data, dict) else None
        result = data.get("result") if isinstance(data, dict) else None
        if kind in ("matrix", "string"):
            raise QueryRefused(f"the query gives a {kind}, not one value for each row")
        if not isinstance(result, list) or kind not in ("scalar", "vector"):
            raise ServiceUnavailable(f"{self._url} gave an answer of an unexpected shape")
        try:
            if kind == "scalar":
                moments, rows = [float(result[0])], [Sample({}, float(result[1]))]
            else:
                moments = [float(row["value"][0]) for row in result if row.get("value")]
                rows = [_sample(row) for row in result]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ServiceUnavailable(f"{self._url} gave an unexpected answer: {error}") from error
        late = _untimely(set(moments), time)
        if late:
            raise ServiceUnavailable(
                f"{self._url} was asked of the time {time} and answered of {late[0]}: nothing "
                "between may keep answers of /api/v1/query"
            )
        return self._folded(rows)

    def _folded(self, rows: list[Sample]) -> list[Sample]:
        """Rows without the labels of replicas; those of one series must not contradict each other.

        A global view adds such a label to all rows or to none.
        """
        names = set(self._replica_labels)
        if not rows or names.isdisjoint((*rows[0].labels, *rows[-1].labels)):
            return rows
        folded: dict[frozenset[tuple[str, str]], Sample] = {}
        for row in rows:
            labels = {name: text for name, text in row.labels.items() if name not in names}
            key = frozenset(labels.items())
            if key in folded and folded[key].value != row.value:
                raise ServiceUnavailable(
                    f"{self._url}: replicas differ in {labels}: let the server fold them "
                    f"(its replica labels), or name the replicas themselves under prometheus"
                )
            folded[key] = Sample(labels, row.value)
        return list(folded.values())


def refuse_partial(url: str, answer: Mapping[str, Any]) -> None:
    """Thanos and VictoriaMetrics answer with what they have when a part of them is down.

    Raises:
        ServiceUnavailable: the answer is not whole, or may not be.
    """
    warnings = answer.get("warnings") or ()
    serious = [text for text in warnings if not str(text).startswith("PromQL info:")]
    if answer.get("isPartial") is True or serious:
        why = "; ".join(str(text) for text in serious) or "isPartial"
        raise ServiceUnavailable(f"{url} gave a partial answer: {why}")


_MEANT: Final = tuple((sign, f"%{ord(sign):02X}") for sign in "%&+;=#\r\n\t")
"""What means something in a form but a blank; `%` comes first, for the others are told by it."""


def _quoted(text: str | bytes, *_: object) -> str:
    """`quote_plus` of what has to be quoted alone, in a tenth of the time.

    A query that names jobs has up to 15 KB, and a tick of a large fleet asks a hundred of them.
    """
    if isinstance(text, bytes) or not text.isascii():
        return quote_plus(text)
    for sign, told in _MEANT:
        text = text.replace(sign, told)
    return text.replace(" ", "+")


def _untimely(moments: set[float], time: float | None) -> list[float]:
    """Of the rows' moments those that are not the one asked for: they say nothing of it."""
    if time is None:
        return []
    # Each row is looked at: what puts answers together may have kept some of them.
    return [at for at in moments if not -OFF_SECONDS <= at - time <= OFF_SECONDS]


class _Row(msgspec.Struct, gc=False):
    metric: dict[str, str]
    value: tuple[float, str] | None = None


class _Vector(msgspec.Struct):
    resultType: Literal["vector"]  # noqa: N815 - Prometheus' spelling
    result: list[_Row]


class _Whole(msgspec.Struct, kw_only=True):
    status: Literal["success"]
    warnings: list[str] | None = None
    isPartial: bool = False  # noqa: N815 - VictoriaMetrics' spelling


class _Answer(_Whole, kw_only=True):
    data: _Vector


_DECODER = msgspec.json.Decoder(_Answer)


def _plain_rows(body: bytes, time: float | None) -> list[Sample] | None:
    """The rows of an answer without any peculiarity; None of every other, to be looked at closely.

    Decoded straight into its shape: at 10,000 cards that is most of what a tick costs.
    """
    try:
        answer = _DECODER.decode(body)
        if answer.warnings or answer.isPartial:
            return None
        rows = answer.data.result
        if _untimely({row.value[0] for row in rows if row.value is not None}, time):
            return None
        for row in rows:
            row.metric.pop("__name__", None)
        # A native histogram has no `value`; as a row without a number it is unknown.
        return [
            Sample(row.metric, math.nan if row.value is None else float(row.value[1]))
            for row in rows
        ]
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return None


def _plain_table(body: bytes, labels: tuple[str, ...], time: float) -> Table | None:
    """Like `_plain_rows`, decoded into no mapping and no text that nobody asked for."""
    try:
        answer = _table_decoder(labels).decode(body)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return None
    if answer.warnings or answer.isPartial:
        return None
    if _untimely({row.value[0] for row in answer.data.result if row.value is not None}, time):
        return None
    return [
        (math.nan if row.value is None else row.value[1], msgspec.structs.astuple(row.metric))
        for row in answer.data.result
    ]


@functools.lru_cache(maxsize=128)
def _table_decoder(labels: tuple[str, ...]) -> msgspec.json.Decoder[Any]:
    """A decoder of answers whose rows keep these labels; numbers come as texts."""
    metric = msgspec.defstruct("Metric", [(name, str, "") for name in labels], gc=False)
    value = (tuple[float, float] | None, None)
    row = msgspec.defstruct("Row", [("metric", metric), ("value", *value)], gc=False)
    vector = msgspec.defstruct(
        "Vector",
        [("resultType", Literal["vector"]), ("result", list[row])],  # type: ignore[valid-type]
    )
    answer = msgspec.defstruct("TableAnswer", [("data", vector)], bases=(_Whole,), kw_only=True)
    return msgspec.json.Decoder(answer, strict=False)


def _sample(row: Mapping[str, Any]) -> Sample:
    labels = {str(name): str(text) for name, text in row["metric"].items() if name != "__name__"}
    "".join(labels.values()).encode()  # half a character can be neither kept nor sent on
    # A native histogram has no `value`; as a row without a number it is unknown.
    value = row.get("value")
    return Sample(labels, float(value[1]) if value is not None else math.nan)


def _shortened(query: str) -> str:
    flat = " ".join(query.split())
    return flat if len(flat) <= 120 else f"{flat[:117]}..."
