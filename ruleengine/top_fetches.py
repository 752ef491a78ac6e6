"""Asking beside the screen: keys answer at once, however long an engine takes."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gpuwarden.errors import GpuwardenError

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuwarden.ruleengine.top_pictures import Picture, Question
    from gpuwarden.ruleengine.top_sources import Source


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be asked.

    Attributes:
        question: which part of the fleet.
        job_id: whose details too, or an empty string.
        paused: only once more when something else is wanted.
    """

    question: Question
    job_id: str = ""
    paused: bool = False


@dataclass(frozen=True, slots=True)
class News:
    """What came of it.

    Attributes:
        picture: the last one; with a problem where no newer one came. None: none came yet.
        problem: why none came, or an empty string.
        details: of the job that was asked for, or None.
    """

    picture: Picture | None = None
    problem: str = ""
    details: dict[str, Any] | None = None


class Fetcher:
    """A thread that asks at once for what is wanted anew, and again after each interval.

    Args:
        source: what is asked.
        wanted: at first.
        interval: seconds between an answer and the next question.
        told: called from the thread when there are news.
    """

    def __init__(
        self, source: Source, wanted: Wanted, *, interval: float, told: Callable[[], None]
    ) -> None:
        self._source = source
        self._interval = interval
        self._told = told
        self._turn = threading.Condition()
        self._wanted = wanted
        self._changed = True
        self._news = News()
        # It dies with the process: an engine that does not answer must not hold up who leaves.
        self._thread = threading.Thread(target=self._run, name="fetcher", daemon=True)

    def start(self) -> None:
        """Begin to ask."""
        self._thread.start()

    def want(self, wanted: Wanted) -> None:
        """Ask for something else, if it is something else."""
        with self._turn:
            if wanted != self._wanted:
                self._changed = self._changed or replace(wanted, paused=False) != replace(
                    self._wanted, paused=False
                )
                self._changed = self._changed or (self._wanted.paused and not wanted.paused)
                self._wanted = wanted
                self._turn.notify()

    @property
    def news(self) -> News:
        """What came last."""
        with self._turn:
            return self._news

    def _run(self) -> None:
        while True:
            with self._turn:
                wanted, self._changed = self._wanted, False
                last = self._news
            news = self._asked(wanted, last)
            with self._turn:
                self._news = news
            self._told()
            self._pause()

    def _pause(self) -> None:
        end = time.monotonic() + self._interval
        with self._turn:
            while not self._changed:
                left = None if self._wanted.paused else end - time.monotonic()
                if left is not None and left <= 0:
                    return
                self._turn.wait(left)

    def _asked(self, wanted: Wanted, last: News) -> News:
        details = last.details
        if details is not None and details.get("job_id") != wanted.job_id:
            details = None
        try:
            picture = self._source.picture(wanted.question)
            if wanted.job_id:
                details = self._source.details(wanted.job_id)
        except GpuwardenError as error:
            old = last.picture
            shown = None if old is None else replace(old, problem=str(error))
            return News(shown, str(error), details)
        return News(picture, "", details)
