"""The rule engine as the lab box asks it: one call after the other, and never long in vain.

Where an engine watches the box, it knows what protects a job (whitelist, keeps, pause) and its
request is signed and counted. Where it does not answer, or cannot ask the job, the box asks by the
job files itself, as it does without an engine.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from gpuwarden.errors import RefusedAction, ServiceUnavailable
from gpuwarden.files import read_secret
from gpuwarden.scheduling.leaves import EngineLeaves

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from gpuwarden.clock import Clock
    from gpuwarden.scheduling.drivers import Context
    from gpuwarden.scheduling.leaves import Leave, LeaveOrder

    T = TypeVar("T")

CALL_SECONDS = 5.0
"""For one try of three: a tick waits for it."""
_PAUSE_SECONDS = 0.1
DOWN_SECONDS = 60.0
"""An engine that did not answer is not asked again before."""
TOLD_SECONDS = 600.0
"""So long a failure is told that no later call has put right."""
LOOK_SECONDS = 5.0
"""Between two looks at one leave."""
_CANNOT_ASK = frozenset(
    {"unknown_job", "two_jobs", "no_agents", "closed", "unauthorised", "forbidden", "malformed"}
)
"""Refusals of an engine that cannot ask; every other one says that the job may not be asked."""


@dataclass(frozen=True, slots=True)
class Protected:
    """The engine would not have the job asked.

    Attributes:
        words: its own.
    """

    words: str


class EngineRequests:
    """Leaves by the engine.

    Args:
        url: of the engine.
        token: with the role scheduler.
        clock: monotonic: how long it has been silent.
    """

    def __init__(self, url: str, token: str, clock: Clock) -> None:
        self._url, self._token, self._clock = url, token, clock
        self._down_until = float("-inf")
        self._looked: dict[str, float] = {}
        self._problem, self._problem_at = "", 0.0

    @classmethod
    def of(cls, context: Context) -> EngineRequests | None:
        """With the address and the token that the daemon was given, or None.

        Raises:
            InvalidInput: the token cannot be read.
        """
        if context.leaves is None or context.leaves_token is None:
            return None
        token = read_secret(context.leaves_token, "the engine's token")
        return cls(context.leaves, token, context.clock)

    def problem(self) -> str:
        """Why the job files are used instead, as one sentence; empty while the engine is there."""
        recent = self._clock.monotonic() - self._problem_at < TOLD_SECONDS
        return self._problem if recent else ""

    def _complain(self, words: str) -> None:
        self._problem, self._problem_at = words, self._clock.monotonic()

    def ask(self, order: LeaveOrder) -> Leave | Protected | None:
        """Have a job asked; None: the engine cannot, or nobody knows whether it did."""
        try:
            return self._call(lambda engine: engine.ask(order))
        except RefusedAction as error:
            if error.reason not in _CANNOT_ASK and not error.reason.startswith("http_"):
                return Protected(str(error))
            self._complain(f"The engine at {self._url} did not have a job asked: {error}.")
        except ServiceUnavailable:
            pass
        return None

    def look(self, leave: str) -> Leave | None:
        """How far a leave has come; None: not known now, or looked at a moment ago."""
        now = self._clock.monotonic()
        if now - self._looked.get(leave, float("-inf")) < LOOK_SECONDS:
            return None
        self._looked[leave] = now
        try:
            found = self._call(lambda engine: engine.look(leave))
        except (RefusedAction, ServiceUnavailable):
            return None
        if found.state.over:
            del self._looked[leave]
        return found

    def withdraw(self, leave: str) -> None:
        """Take a leave back; one that cannot be reached lapses by its deadline."""
        self._looked.pop(leave, None)
        try:
            self._call(lambda engine: engine.withdraw(leave))
        except (RefusedAction, ServiceUnavailable) as error:
            self._complain(f"The engine at {self._url} did not take a leave back: {error}.")

    def _call(self, what: Callable[[EngineLeaves], Coroutine[Any, Any, T]]) -> T:
        if self._clock.monotonic() < self._down_until:
            raise ServiceUnavailable(self._problem)
        try:
            found = asyncio.run(self._done(what))
        except ServiceUnavailable as error:
            self._down_until = self._clock.monotonic() + DOWN_SECONDS
            self._complain(f"Jobs are asked to leave by their job files: {error}.")
            raise
        self._problem = ""
        return found

    async def _done(self, what: Callable[[EngineLeaves], Coroutine[Any, Any, T]]) -> T:
        # Calls are rare: no connection is kept between them.
        engine = EngineLeaves(self._url, self._token, timeout=CALL_SECONDS, pause=_PAUSE_SECONDS)
        try:
            return await what(engine)
        finally:
            await engine.aclose()
