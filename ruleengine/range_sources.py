"""A source for many evenly spaced moments: one range query in the place of many instant ones.

Prometheus evaluates a range query by evaluating the expression at each of its steps, so that the
rows of a step are those of an instant query at that time. Only `start()` and `end()` mean
something else there; expressions with them are asked moment by moment.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from gpuwarden.errors import ServiceUnavailable
from gpuwarden.exchanges import exchange
from gpuwarden.ruleengine.prometheus import (
    MAX_ANSWER_BYTES,
    WHOLE,
    PrometheusClient,
    QueryRefused,
    Sample,
    refuse_partial,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    import httpx

MAX_STEPS = 10_000
"""Prometheus refuses more than 11,000 points of a series in one answer."""
_OF_THE_RANGE = re.compile(r"\b(?:start|end)\s*\(")

_Rows = dict[int, list[Sample]]
"""Step -> rows."""


class RangeSource:
    """A `Source` whose moments are known in advance.

    Args:
        url: of the server.
        client: for range queries.
        times: Unix times of the moments, evenly spaced.
        timeout: seconds for one query.
    """

    def __init__(
        self, url: str, client: httpx.AsyncClient, *, times: Sequence[float], timeout: float = 60.0
    ) -> None:
        self._url = url.rstrip("/")
        self._client = client
        self._instants = PrometheusClient(url, timeout=timeout, client=client)
        self._times = times
        self._step = times[1] - times[0] if len(times) > 1 else 1.0
        self._timeout = timeout
        self._answers: dict[str, asyncio.Task[_Rows]] = {}

    async def instant(self, query: str, time: float) -> list[Sample]:
        """The rows of a query at one of the moments.

        Raises:
            ServiceUnavailable: no answer, or not a whole one.
            QueryRefused: the query itself is wrong or too dear.
        """
        if _OF_THE_RANGE.search(query):
            return await self._instants.instant(query, time)
        if query not in self._answers:
            self._answers[query] = asyncio.create_task(self._all(query))
        rows = await asyncio.shield(self._answers[query])
        return rows.get(self._number(time), [])

    async def clock_skew(self) -> float:
        """0: the moments are not those of this machine's clock."""
        return 0.0

    def _number(self, time: float) -> int:
        return round((time - self._times[0]) / self._step)

    async def _all(self, query: str) -> _Rows:
        rows: _Rows = {}
        for begin in range(0, len(self._times), MAX_STEPS):
            part = self._times[begin : begin + MAX_STEPS]
            for row in await self._range(query, part[0], part[-1]):
                labels = {k: v for k, v in row["metric"].items() if k != "__name__"}
                for time, text in row["values"]:
                    rows.setdefault(self._number(float(time)), []).append(
                        Sample(labels, float(text))
                    )
        return rows

    async def _range(self, query: str, begin: float, end: float) -> list[dict[str, Any]]:
        form = {
            "query": query,
            "start": f"{begin:.3f}",
            "end": f"{end:.3f}",
            "step": f"{self._step:.3f}",
            "timeout": f"{self._timeout:g}s",
            **WHOLE,
        }
        reply = await exchange(
            self._client,
            "POST",
            f"{self._url}/api/v1/query_range",
            seconds=2 * self._timeout,
            content=urlencode(form).encode(),
            headers={"Content-Type": "application/x-www-form-urlencoded"},
            limit=MAX_ANSWER_BYTES,
        )
        try:
            answer = reply.json()
            if answer["status"] != "success":
                message = f"{answer['errorType']}: {answer['error']} (in: {query})"
                if reply.status in (400, 422) and answer["errorType"] in ("bad_data", "execution"):
                    raise QueryRefused(message)
                raise ServiceUnavailable(message)
            refuse_partial(self._url, answer)
            result: list[dict[str, Any]] = answer["data"]["result"]
        except (KeyError, TypeError, ValueError) as error:
            message = f"{self._url} gave an answer of an unexpected shape: {error}"
            raise ServiceUnavailable(message) from error
        return result
