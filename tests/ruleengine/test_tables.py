"""Rows as tables: decoded into no mapping, and the same as the rows themselves."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import pytest
from tests.ruleengine.worlds import Sink

from gpuwarden.errors import ServiceUnavailable
from gpuwarden.ruleengine.prometheus import PrometheusClient, QueryRefused, Table, tabulated

LABELS = ("instance", "job_id", "uuid")
REPLICAS = ("replica", "prometheus_replica")


def _row(value: object, **labels: str) -> dict[str, Any]:
    return {"metric": {"__name__": "x", "job": "gpuwarden", **labels}, "value": [1000.25, value]}


def _both(answer: dict[str, Any], replica_labels: tuple[str, ...]) -> tuple[Table, Table]:
    """The table of an answer, and that of its rows."""

    async def ask(url: str) -> tuple[Table, Table]:
        async with PrometheusClient(url, replica_labels=replica_labels) as client:
            rows = await client.instant("x", 1000.25)
            return await client.table("x", 1000.25, LABELS), tabulated(rows, LABELS)

    with Sink(lambda *_: (200, json.dumps(answer).encode())) as sink:
        return asyncio.run(ask(sink.url))


def _vector(*rows: dict[str, Any], **more: object) -> dict[str, Any]:
    return {"status": "success", "data": {"resultType": "vector", "result": list(rows)}, **more}


@pytest.mark.parametrize("replica_labels", [(), REPLICAS])
@pytest.mark.parametrize(
    "rows",
    [
        [],
        [_row("1.5", instance="n1", job_id="j", uuid="g0"), _row("-2", instance="n2")],
        [_row("+Inf", job_id="j"), _row("3", job_id="k")],
        [_row("1e-07", job_id='a"b\\c\u2603'), _row("4", job_id="replica")],
        [_row("1", job_id="j", replica="a"), _row("1", job_id="j", replica="b")],
        [_row("1", job_id="j", replica="a", uuid="g"), _row("2", job_id="k", replica="a")],
    ],
)
def test_a_table_has_the_rows_of_the_answer(
    rows: list[dict[str, Any]], replica_labels: tuple[str, ...]
) -> None:
    """Whatever labels, numbers and replicas there are."""
    found, expected = _both(_vector(*rows), replica_labels)
    assert list(found) == list(expected)


def test_a_row_without_a_number_is_unknown() -> None:
    """Of a native histogram there is no one value, and NaN is none."""
    histogram = {"metric": {"job_id": "j"}, "histogram": [1000.25, {"count": "1"}]}
    found, _ = _both(_vector(histogram, _row("NaN", job_id="k")), ())
    assert [(math.isnan(value), texts[1]) for value, texts in found] == [(True, "j"), (True, "k")]


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (_vector(_row("1"), warnings=["a store is away"]), ServiceUnavailable),
        (_vector(_row("1"), isPartial=True), ServiceUnavailable),
        ({"status": "error", "errorType": "timeout", "error": "late"}, ServiceUnavailable),
        ({"status": "success", "data": {"resultType": "matrix", "result": []}}, QueryRefused),
    ],
)
def test_what_is_no_whole_answer_is_no_table(
    answer: dict[str, Any], error: type[Exception]
) -> None:
    """It is as wrong as a table as it is as rows."""

    async def ask(url: str) -> None:
        async with PrometheusClient(url) as client:
            await client.table("x", 1000.25, LABELS)

    with Sink(lambda *_: (200, json.dumps(answer).encode())) as sink, pytest.raises(error):
        asyncio.run(ask(sink.url))
