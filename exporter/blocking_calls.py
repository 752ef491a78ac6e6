"""Calls that a job may make hang: on its file systems, and on memory that it holds locked.

Looking at a file asks its file system, which may be a server that is down, or a program of the
user. Looking at a command line waits for the process's memory, which a page fault on such a file
keeps locked. One such call must not blind the node: it gets a thread and a moment, and while it
hangs, nothing more is asked on behalf of its owner. Nor may many calls that each come back just in
time: an owner's calls, and those of all owners, have so much time in a while, and no more.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

T = TypeVar("T")

PATIENCE_SECONDS = 0.2
MAX_STUCK = 8
"""With so many calls hanging nothing is asked any more, whoever owns it."""
WHILE_SECONDS = 4.0
OF_OWNER = 5
OF_ALL = MAX_STUCK + 2
"""Patiences that are spent in a while on an owner's calls, and on all: a page must not grow old."""
FREE_SECONDS = 0.001
"""What a call may take without being counted: handing it over takes that on a busy node."""


class _Call(Generic[T]):
    """One call and, later, its answer."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._done = threading.Event()
        self.answer: T | None = None
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self.answer = self._function()
        except Exception as error:  # noqa: BLE001 (raised again in the asking thread)
            # Whatever it is: the worker must live on for the calls of other owners.
            self.error = error
        finally:
            self._done.set()

    def wait(self, seconds: float) -> bool:
        return self._done.wait(seconds)


class _Worker:
    """A thread that makes calls one after another."""

    def __init__(self) -> None:
        self._call: _Call[Any] | None = None
        self._given = threading.Semaphore(0)
        self._retired = False
        # A daemon: a call that hangs must not keep the process from ending.
        threading.Thread(target=self._work, name="blocking-calls", daemon=True).start()

    def give(self, call: _Call[Any]) -> None:
        self._call = call
        self._given.release()

    def retire(self) -> None:
        """Let the thread end once its call returned."""
        self._retired = True
        self._given.release()

    def _work(self) -> None:
        while True:
            self._given.acquire()
            call, self._call = self._call, None
            if call is not None:
                call.run()
            if self._retired:
                return


class BlockingCalls:
    """Makes calls that may hang, each for an owner; used by one thread."""

    def __init__(self, patience: float = PATIENCE_SECONDS) -> None:
        """Begin with nothing hanging.

        Args:
            patience: seconds that a call gets.
        """
        self._patience = patience
        self._worker: _Worker | None = None
        self._stuck: dict[Hashable, _Call[Any]] = {}
        self._spent: dict[Hashable, float] = {}
        self._spent_in_all = 0.0
        self._refused = False
        self._since = time.monotonic()

    @property
    def stuck(self) -> int:
        """How many calls hang now."""
        self._stuck = {owner: call for owner, call in self._stuck.items() if not call.wait(0)}
        return len(self._stuck)

    @property
    def unanswered(self) -> bool:
        """Whether calls hang, or were not made of late: nothing follows from their silence."""
        return self._refused or self.stuck > 0

    def _left(self, owner: Hashable, now: float) -> float:
        """Seconds that a call of an owner may take."""
        if now - self._since >= WHILE_SECONDS:
            self._spent, self._spent_in_all, self._since = {}, 0.0, now
            self._refused = False
        own = OF_OWNER * self._patience - self._spent.get(owner, 0.0)
        return min(self._patience, own, OF_ALL * self._patience - self._spent_in_all)

    def make(self, owner: Hashable, function: Callable[[], T]) -> T | None:
        """The function's answer, or None where it is not to be had in time.

        Args:
            owner: whoever could make it hang: a uid, or a container.
            function: what to call; an answer that comes too late is thrown away.

        Raises:
            Exception: whatever the function raised.
        """
        if self.stuck >= MAX_STUCK or owner in self._stuck:
            return None
        began = time.monotonic()
        left = self._left(owner, began)
        if left <= 0:
            self._refused = True
            return None
        if self._worker is None:
            self._worker = _Worker()
        call: _Call[T] = _Call(function)
        self._worker.give(call)
        done = call.wait(left)
        # However long the node kept this thread from going on.
        spent = min(left, max(0.0, time.monotonic() - began - FREE_SECONDS))
        self._spent[owner] = self._spent.get(owner, 0.0) + spent
        self._spent_in_all += spent
        if not done:
            self._worker.retire()
            self._worker = None
            self._stuck[owner] = call
            return None
        if call.error is not None:
            raise call.error
        return call.answer

    def close(self) -> None:
        """Let the thread end."""
        if self._worker is not None:
            self._worker.retire()
            self._worker = None
