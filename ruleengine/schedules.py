"""What the scheduler tells, asked for when a page wants it: kept for a moment, and never invented.

While the scheduler does not answer, what it told last is shown with its age, for an hour at most.
"""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING

import httpx
import structlog

from gpuwarden.errors import GpuwardenError, InvalidInput, ServiceUnavailable
from gpuwarden.exchanges import exchange
from gpuwarden.files import read_secret
from gpuwarden.schedule_api import MAX_BODY_BYTES, ScheduleDocument

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from gpuwarden.clock import Clock
    from gpuwarden.ruleengine.schedule_settings import SchedulerSettings

FRESH_SECONDS = 5.0
"""An answer serves every page for so long; a failure keeps a scheduler from being asked as long."""
KEPT_SECONDS = 3600.0
"""What was told longer ago says nothing of now."""
STALE_SECONDS = 60.0
"""An answer whose reading of the queue is older than this is said to be old."""

LATEST = 32_503_680_000.0
"""Unix time of the year 3000: no page shows what lies beyond it."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Schedule:
    """What is known of the schedule now.

    Attributes:
        document: as the scheduler told it, or None.
        problem: why it is old, or not there, in words; empty if neither.
    """

    document: ScheduleDocument | None
    problem: str = ""


class Schedules:
    """Asks one scheduler.

    Args:
        url: of its API.
        client: that bears its token.
        clock: wall and monotonic time.
        timeout: seconds for one answer.
    """

    def __init__(
        self, url: str, client: httpx.AsyncClient, clock: Clock, *, timeout: float
    ) -> None:
        self._url = url.rstrip("/")
        self._client = client
        self._clock = clock
        self._timeout = timeout
        self._asking = asyncio.Lock()
        self._asked_at = float("-inf")
        self._told_at = float("-inf")
        self._document: ScheduleDocument | None = None
        self._problem = "it was not asked yet"

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def now(self) -> Schedule:
        """What is known, asked again where that is older than a moment."""
        # One question for all pages that want it at the same time.
        async with self._asking:
            if self._clock.monotonic() - self._asked_at >= FRESH_SECONDS:
                await self._ask()
                self._asked_at = self._clock.monotonic()
        return self._known()

    async def _ask(self) -> None:
        try:
            self._document = await self._read()
        except GpuwardenError as error:
            self._problem = str(error)
            log.warning("the scheduler tells nothing", error=str(error))
        else:
            self._problem = ""
            self._told_at = self._clock.monotonic()

    async def _read(self) -> ScheduleDocument:
        answer = await exchange(
            self._client,
            "GET",
            f"{self._url}/v1/schedule",
            seconds=self._timeout,
            limit=MAX_BODY_BYTES,
        )
        if answer.status in (401, 403):
            raise ServiceUnavailable(
                f"it refuses us (HTTP {answer.status}): give scheduler.token_file a token that it "
                "knows"
            )
        if answer.status != 200:
            raise ServiceUnavailable(f"HTTP {answer.status}: is {self._url} the scheduler?")
        # Of a long queue that takes a while, in which the engine must tick.
        return await asyncio.to_thread(decoded, answer.body)

    def _known(self) -> Schedule:
        document, age = self._document, self._clock.monotonic() - self._told_at
        if document is None or age > KEPT_SECONDS:
            return Schedule(None, f"The scheduler at {self._url} tells nothing: {self._problem}")
        if self._problem:
            text = f"The scheduler at {self._url} does not answer ({self._problem}); this is what"
            return Schedule(document, f"{text} it told before.")
        read = self._clock.wall() - document.taken
        if read > STALE_SECONDS:
            return Schedule(
                document, f"The scheduler read its {document.engine} last {read:.0f} s ago."
            )
        return Schedule(document)


def decoded(body: bytes) -> ScheduleDocument:
    """The scheduler's document, if a page can show it.

    Raises:
        ScheduleError: it does not follow the contract.
        ServiceUnavailable: it has a time that no calendar has.
    """
    document = ScheduleDocument.decode(body)
    if any(moment > LATEST for moment in _moments(document)):
        raise ServiceUnavailable("its document has a time beyond the year 3000")
    return document


def _moments(document: ScheduleDocument) -> Iterator[float]:
    """Every time that a page may show."""
    yield document.taken
    for entry in document.entries:
        yield from (entry.submitted, entry.started or 0.0)
        yield from (found.latest for found in (entry.start, entry.finish) if found is not None)
    for item in document.preemptions:
        yield from (item.deadline or 0.0, *item.steps.values())
    for booking in document.bookings:
        yield booking.end
    for budget in document.budgets:
        yield budget.period_end
    for problem in document.problems:
        yield problem.since


def from_settings(
    settings: SchedulerSettings, path: Callable[[str], Path], clock: Clock
) -> Schedules:
    """What asks the scheduler that engine.yaml names.

    Args:
        settings: the part of engine.yaml.
        path: of a file that it names.
        clock: wall and monotonic time.

    Raises:
        InvalidInput: its token or its certificates cannot be read.
    """
    token_file, ca_file = settings.token_file, settings.ca_file
    token = None
    if token_file is not None:
        token = read_secret(path(token_file), "scheduler.token_file")
    client = client_for(
        token=token,
        ca_file=None if ca_file is None else path(ca_file),
        timeout=settings.timeout,
    )
    return Schedules(settings.url, client, clock, timeout=settings.timeout)


def client_for(*, token: str | None, ca_file: Path | None, timeout: float) -> httpx.AsyncClient:
    """A client that bears the token, and sends it nowhere else.

    Raises:
        InvalidInput: the certificates cannot be read.
    """
    context: ssl.SSLContext | bool = True
    if ca_file is not None:
        try:
            context = ssl.create_default_context(cafile=str(ca_file))
        except OSError as error:
            raise InvalidInput(f"scheduler.ca_file: {ca_file} cannot be read: {error}") from error
    return httpx.AsyncClient(
        verify=context,
        timeout=timeout,
        trust_env=False,
        follow_redirects=False,
        headers={} if token is None else {"Authorization": f"Bearer {token}"},
    )
