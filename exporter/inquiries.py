"""Questions to servers that may be slow or down, asked in a thread of their own.

Whoever takes a snapshot never waits for an answer: it takes the newest there is, with the time at
which it was asked for, and may want another. What hangs, hangs alone.
"""

from __future__ import annotations

import secrets
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import structlog

from gpuwarden.clock import SystemClock
from gpuwarden.errors import ServiceUnavailable
from gpuwarden.exporter.commands import drop_ambient_rights

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuwarden.clock import Clock

T = TypeVar("T")

FIRST_RETRY_SECONDS = 2.0
LAST_RETRY_SECONDS = 60.0

_RANDOM = secrets.SystemRandom()
_logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Told(Generic[T]):
    """An answer.

    Attributes:
        value: what was answered.
        asked_at: monotonic time at which it was asked for: it is true of that moment or later.
        number: of the question; see `Inquiry.begun`.
    """

    value: T
    asked_at: float
    number: int


class Inquiry(Generic[T]):
    """One question, asked at intervals and whenever an answer is wanted."""

    def __init__(
        self,
        name: str,
        ask: Callable[[], T],
        *,
        every: float,
        clock: Clock | None = None,
        gap: float = FIRST_RETRY_SECONDS,
    ) -> None:
        """Prepare; nothing is asked before the first `want`.

        Args:
            name: of the thread, and in the log.
            ask: asks; raises ServiceUnavailable or OSError where there is no answer.
            every: seconds between two questions that nobody wanted, give or take a tenth: nodes
                that were started together do not ask together.
            clock: for the time of answers.
            gap: seconds between the end of one question and the next, at least; after a failure
                this doubles up to a minute.
        """
        self._name = name
        self._ask = ask
        self._every = every
        self._gap = gap
        self._retry = gap
        self._clock: Clock = clock if clock is not None else SystemClock()
        self._state = threading.Condition()
        self._thread: threading.Thread | None = None
        self._wanted = False
        self._closed = False
        self._told: Told[T] | None = None
        self._begun = 0
        self._ended = 0
        self._problem: str | None = None

    @property
    def told(self) -> Told[T] | None:
        """The newest answer, however old."""
        return self._told

    @property
    def begun(self) -> int:
        """Number of the last question that was begun: answers with a higher one come after now."""
        return self._begun

    @property
    def problem(self) -> str | None:
        """Why the last question had no answer; None where it had, or while none was asked."""
        return self._problem

    def current(self, seconds: float) -> bool:
        """Whether the last question had an answer, and that is no older than so many seconds."""
        told = self._told
        if told is None or self._problem is not None:
            return False
        return self._clock.monotonic() - told.asked_at <= seconds

    def want(self) -> None:
        """Have the question asked soon."""
        with self._state:
            if self._thread is None and not self._closed:
                # A daemon: a question that hangs must not keep the process from ending.
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()
            self._wanted = True
            self._state.notify_all()

    def wait(self, seconds: float) -> bool:
        """Have it asked and wait for what becomes of it; says whether it was answered."""
        with self._state:
            # Before it is wanted: the answer may be there at once.
            before = self._begun
            self.want()
            self._state.wait_for(lambda: self._ended > before or self._closed, timeout=seconds)
            return self._ended > before and self._problem is None

    def close(self) -> None:
        """Let the thread end, once what it asks has ended."""
        with self._state:
            self._closed = True
            self._state.notify_all()

    def _work(self) -> None:
        drop_ambient_rights()
        while not self._closed:
            with self._state:
                self._wanted = False
            self._ask_once()
            pause = self._gap if self._problem is None else self._retry
            with self._state:
                self._state.wait_for(lambda: self._closed, timeout=pause)
                if self._problem is None:
                    self._state.wait_for(
                        lambda: self._closed or self._wanted,
                        timeout=max(0.0, self._every * _RANDOM.uniform(0.9, 1.1) - pause),
                    )

    def _ask_once(self) -> None:
        asked_at = self._clock.monotonic()
        self._begun += 1
        problem, value = None, None
        try:
            value = self._ask()
        except (ServiceUnavailable, OSError) as error:
            problem = str(error)
        except Exception:
            # Whatever it was: the next answer may be another.
            _logger.exception("question failed", about=self._name)
            problem = "an answer that was not understood"
        with self._state:
            self._ended = self._begun
            if value is not None:
                if self._problem is not None:
                    _logger.info("answered again", about=self._name)
                self._told = Told(value, asked_at, self._begun)
                self._retry = self._gap
            else:
                if problem != self._problem:
                    _logger.warning("no answer", about=self._name, error=problem)
                self._retry = min(LAST_RETRY_SECONDS, 2 * self._retry)
            self._problem = problem if value is None else None
            self._state.notify_all()
