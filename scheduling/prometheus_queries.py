"""Questions to a Prometheus, or to a query layer that folds several: one moment, whole answers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING
from urllib.parse import urlencode

import httpx

from gpuwarden.errors import ServiceUnavailable
from gpuwarden.exchanges import exchange

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpuwarden.exchanges import Answer

Rows = list[tuple["Mapping[str, str]", float]]
"""Labels and value of each row."""


async def instant(
    url: str,
    query: str,
    *,
    timeout: float,  # noqa: ASYNC109 - of the connection, beside that of the whole
    limit: int,
    at: float | None = None,
    whole: float | None = None,
) -> Rows:
    """Evaluate a query at one moment.

    Args:
        url: of the server.
        query: PromQL that gives a vector.
        timeout: seconds that it may be silent.
        limit: bytes of the answer.
        at: Unix time; None for the server's now.
        whole: seconds for all of it; as long as `timeout` where it is not given.

    Raises:
        ServiceUnavailable: no answer, or no whole one.
    """
    # Partial answers of Thanos and VictoriaMetrics are errors; others know no such words.
    form = {
        "query": query,
        "timeout": f"{timeout:g}s",
        "partial_response": "false",
        "dedup": "true",
        "deny_partial_response": "1",
    }
    if at is not None:
        form["time"] = f"{at:.3f}"
    async with httpx.AsyncClient(timeout=timeout, follow_redirects=False) as client:
        answer = await exchange(
            client,
            "POST",
            f"{url}/api/v1/query",
            seconds=timeout if whole is None else whole,
            content=urlencode(form).encode(),
            headers={"Content-Type": "application/x-www-form-urlencoded"},
            limit=limit,
        )
    try:
        return read_rows(answer)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ServiceUnavailable(f"{url} gives no whole answer: {error}") from error


def read_rows(answer: Answer) -> Rows:
    """Labels and value of each row of an answer.

    Raises:
        ValueError: it is no whole answer; KeyError, TypeError, AttributeError likewise.
    """
    document = answer.json()
    if answer.status != 200 or document["status"] != "success":
        raise ValueError(answer.excerpt())
    if document.get("warnings") or document.get("isPartial"):
        raise ValueError("it is partial")
    found: Rows = []
    for row in document["data"]["result"]:
        value = float(row["value"][1])
        if not math.isfinite(value):
            raise ValueError("a value is none")
        found.append(({str(key): str(text) for key, text in row["metric"].items()}, value))
    return found
