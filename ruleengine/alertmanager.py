"""The client of Alertmanager's API v2: every replica is told, not one for the others."""

from __future__ import annotations

import asyncio
import datetime as dt
import email.utils
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
import structlog

from gpuwarden.errors import ServiceUnavailable
from gpuwarden.exchanges import Answer, exchange

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gpuwarden.clock import Clock

BATCH = 100
"""Alerts in one request: a refused batch spoils no more than these."""
_TIMEOUT = httpx.Timeout(10.0, connect=5.0)
_WHOLE_SECONDS = 15.0
MAX_REFUSED = 5
"""More single alerts than this that a replica refuses are a fault of the whole post."""
_OK, _BAD_REQUEST = 200, 400
_JSON = {"Content-Type": "application/json"}

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert as Alertmanager takes it.

    Attributes:
        labels: its identity; a changed label is another alert.
        annotations: numbers and prose; may change at any time.
        starts_at: Unix time, kept from state over restarts.
        ends_at: Unix time; in the future while it fires.
        url: the page that explains it.
    """

    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    starts_at: float
    ends_at: float
    url: str

    def body(self) -> dict[str, Any]:
        """The alert in the API's shape; empty labels are left out, as the server would."""
        return {
            "labels": {name: value for name, value in self.labels.items() if value},
            "annotations": {name: value for name, value in self.annotations.items() if value},
            "startsAt": rfc3339(self.starts_at),
            "endsAt": rfc3339(max(self.ends_at, self.starts_at)),
            "generatorURL": self.url,
        }


def rfc3339(moment: float) -> str:
    """A Unix time as RFC 3339 in UTC, to the millisecond."""
    text = dt.datetime.fromtimestamp(moment, tz=dt.UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


class AlertmanagerClient:
    """Every replica of one cluster of Alertmanagers.

    Args:
        urls: base address of each replica, not of a load balancer.
        clock: to compare with theirs.
    """

    def __init__(self, urls: Sequence[str], clock: Clock) -> None:
        self._urls = tuple(url.rstrip("/") for url in urls)
        self._clock = clock
        self._client = httpx.AsyncClient(timeout=_TIMEOUT, trust_env=False)
        self.skew: float = 0.0
        """Largest distance in seconds between this clock and a replica's, at the last post."""
        self.replicas: dict[str, str] = {}
        """Base address -> why it did not take the last post, or an empty string if it did."""

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def post(self, alerts: Sequence[Alert]) -> int:
        """Send alerts to every replica; none at all asks only whether they take any.

        Returns:
            How many replicas took all of them.

        Raises:
            ServiceUnavailable: no replica took all of them; the text names each failure.
        """
        if not self._urls:
            return 0
        results = await asyncio.gather(*(self._post_one(url, alerts) for url in self._urls))
        self.replicas = dict(zip(self._urls, (failure for failure, _ in results), strict=True))
        failures = [failure for failure in self.replicas.values() if failure]
        self.skew = max((skew for _, skew in results), default=0.0)
        if len(failures) == len(self._urls):
            raise ServiceUnavailable("; ".join(failures))
        return len(self._urls) - len(failures)

    async def _post_one(self, url: str, alerts: Sequence[Alert]) -> tuple[str, float]:
        """Failure in words, or an empty string; and the distance of the clocks in seconds."""
        skew, refused = 0.0, []
        batches = [alerts[start : start + BATCH] for start in range(0, len(alerts), BATCH)] or [()]
        while batches:
            batch = batches.pop(0)
            try:
                answer = await exchange(
                    self._client,
                    "POST",
                    f"{url}/api/v2/alerts",
                    seconds=_WHOLE_SECONDS,
                    content=json.dumps([alert.body() for alert in batch]).encode(),
                    headers=_JSON,
                )
            except ServiceUnavailable as error:
                return f"{url} does not answer: {error}", skew
            skew = max(skew, self._skew(answer))
            if answer.status == _BAD_REQUEST and len(batch) > 1:
                # One that it cannot take must not cost the others; what it has stored of them
                # already, it takes again.
                half = len(batch) // 2
                batches[:0] = [batch[:half], batch[half:]]
            elif answer.status == _BAD_REQUEST and batch:
                name = batch[0].labels.get("alertname", "?")
                refused.append(f"{name} of job {batch[0].labels.get('job_id', '?')}")
                log.error("alert refused", server=url, alert=refused[-1], answer=answer.excerpt())
                if len(refused) > MAX_REFUSED:
                    break
            elif answer.status != _OK:
                return f"{url}: HTTP {answer.status} {answer.excerpt()}", skew
        if refused:
            return f"{url}: HTTP 400, it refuses {', '.join(refused[:MAX_REFUSED])}", skew
        return "", skew

    def _skew(self, answer: Answer) -> float:
        try:
            theirs = email.utils.parsedate_to_datetime(answer.headers["date"]).timestamp()
        except (KeyError, ValueError, OverflowError, OSError):
            return 0.0  # no date, or one that no calendar has: it says nothing of the clock
        # The header has whole seconds: its moment lies anywhere in that second.
        ours = self._clock.wall()
        return max(0.0, theirs - ours, ours - (theirs + 1.0))
