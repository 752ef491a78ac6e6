"""Range queries that a server cannot answer whole come in halves; what is no answer is none."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

import httpx
import numpy as np
import pytest

from gpuwarden.errors import ServiceUnavailable
from gpuwarden.ruleengine.replay_columns import HistoryClient, Ticks

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuwarden.ruleengine.replay_columns import Columns

TICKS = Ticks(1_772_438_400.0, 15.0, 23)


def _matrix(request: httpx.Request) -> tuple[list[float], dict[str, object]]:
    """The times that are asked for, and an answer whose value is the number of the tick."""
    form = {
        name: float(text[0])
        for name, text in parse_qs(request.content.decode()).items()
        if name in ("start", "end", "step")
    }
    count = round((form["end"] - form["start"]) / form["step"]) + 1
    times = [form["start"] + form["step"] * number for number in range(count)]
    values = [[time, f"{(time - TICKS.begin) / TICKS.step:g}"] for time in times]
    rows = [{"metric": {"__name__": "x", "job_id": "a"}, "values": values}]
    data = {"resultType": "matrix", "result": rows}
    return times, {"status": "success", "data": data}


def _asked(answer: Callable[[httpx.Request], httpx.Response]) -> tuple[Columns, HistoryClient]:
    async def ask() -> tuple[Columns, HistoryClient]:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            history = HistoryClient("http://prometheus", client)
            return await history.columns("x", TICKS), history

    return asyncio.run(ask())


@pytest.mark.parametrize("late", [True, False])
def test_what_takes_too_long_is_asked_for_in_halves(late: bool) -> None:
    """Whether the server says so, or says nothing in time."""
    lengths = []

    def answer(request: httpx.Request) -> httpx.Response:
        times, document = _matrix(request)
        lengths.append(len(times))
        if len(times) <= 6:
            return httpx.Response(200, json=document)
        if late:
            raise httpx.ReadTimeout("", request=request)
        said = {"status": "error", "errorType": "timeout", "error": "query timed out"}
        return httpx.Response(503, json=said)

    columns, _ = _asked(answer)
    assert columns.labels == [{"job_id": "a"}]
    assert np.array_equal(columns.values, np.arange(23.0).reshape(1, 23))
    assert max(lengths) == 23
    assert sum(length for length in lengths if length <= 6) == 23


def test_a_server_that_is_always_late_is_given_up_after_some_tries() -> None:
    """And not asked for ever."""
    asked = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        raise httpx.ReadTimeout("", request=request)

    with pytest.raises(ServiceUnavailable, match="ReadTimeout"):
        _asked(answer)
    assert len(asked) <= 10


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"warnings": ["no store for a shard"]}, "partial answer: no store"),
        ({"isPartial": True}, "partial answer: isPartial"),
        ({"data": {"resultType": "matrix", "result": [{"metric": {}, "values": [[1]]}]}}, "shape"),
        (
            {"data": {"resultType": "matrix", "result": [{"metric": {}, "values": [[1, "one"]]}]}},
            "shape",
        ),
        (
            {"data": {"resultType": "matrix", "result": [{"metric": {}, "values": [[1, "1"]]}]}},
            "not asked for",
        ),
        ({"data": {"resultType": "matrix", "result": "none"}}, "shape"),
    ],
)
def test_an_answer_that_is_partial_or_malformed_is_none(
    change: dict[str, object], why: str
) -> None:
    """A replay on half of the data would look like a result."""

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=json.dumps(_matrix(request)[1] | change))

    with pytest.raises(ServiceUnavailable, match=why):
        _asked(answer)


def test_a_sample_that_is_no_finite_number_is_told_from_none() -> None:
    """NaN and infinity are samples; a gap is none."""

    def answer(request: httpx.Request) -> httpx.Response:
        _, document = _matrix(request)
        texts = ["NaN", "+Inf", "-Inf", "1e-05"]
        values = [[TICKS.begin + 15 * n, text] for n, text in enumerate(texts)]
        data = {"resultType": "matrix", "result": [{"metric": {"a": 'b"],['}, "values": values}]}
        return httpx.Response(200, json=document | {"data": data})

    columns, history = _asked(answer)
    assert columns.labels == [{"a": 'b"],['}]
    assert list(columns.values[0, :4]) == [np.inf, np.inf, -np.inf, 1e-05]
    assert np.isnan(columns.values[0, 4:]).all()
    assert (history.cost.queries, history.cost.samples) == (1, 4)
