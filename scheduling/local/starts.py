"""Starting jobs so that each start has happened once or not at all, on a host that may be unfit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from gpuwarden.errors import TemporaryError
from gpuwarden.scheduling.local import endings
from gpuwarden.scheduling.local.launches import HostUnfit, LaunchFailed, User

if TYPE_CHECKING:
    from gpuwarden.scheduling.local.launches import Launcher
    from gpuwarden.scheduling.local.queues import Job, Queue

log = structlog.get_logger("gpuwarden.scheduling.local")

UNFIT_SECONDS = 60.0
"""Between two tries to start anything on a host that could not."""


class Starts:
    """Starts jobs, and settles starts that were cut off.

    Args:
        queue: where each start is reserved before it happens.
        launcher: that starts.
    """

    def __init__(self, queue: Queue, launcher: Launcher) -> None:
        self._queue, self._launcher = queue, launcher
        self._unfit = ""
        self._unfit_at = 0.0
        self._strangers: dict[int, float] = {}

    def settle(self, now: float) -> None:
        """Take up starts that were cut off: each has happened, or never will.

        Where that cannot be found out, nothing is started for a while.
        """
        for attempt in self._queue.attempts("reserved"):
            try:
                claim = self._launcher.settle(attempt.id)
            except TemporaryError as error:
                self._unfit, self._unfit_at = str(error), now
                return
            if claim is not None:
                self._queue.begin(attempt.id, claim)
                continue
            log.warning("launch given up", attempt=attempt.id, entry=attempt.job)
            self._give_up(attempt.id, now)

    def unfit(self, now: float) -> str:
        """Why nothing is started now: this host could not within the last minute; or empty."""
        # Also a clock that was set back ends it.
        return self._unfit if 0.0 <= now - self._unfit_at < UNFIT_SECONDS else ""

    def stranger(self, job: Job, now: float) -> str:
        """Why a job is not started whose user this host did not know within the last minute.

        A directory of users that does not answer looks like one from which somebody was deleted.
        """
        if not 0.0 <= now - self._strangers.get(job.uid, float("-inf")) < UNFIT_SECONDS:
            return ""
        return (
            f"This host knows no user with the number {job.uid} ({job.user}) now: it is tried "
            "again every minute; cancel it if there is none any more."
        )

    def start(self, job: Job, kind: str, cards: list[str], now: float) -> bool:
        """Reserve, then start; one that cannot be started is held, and its cards are free.

        Args:
            job: that waits.
            kind: of the cards.
            cards: UUIDs.
            now: Unix time.

        Returns:
            Whether it runs.
        """
        try:
            user = User.of(job.uid)
        except LaunchFailed as error:
            self._strangers[job.uid] = now
            log.warning("not started", entry=job.entry, why=str(error))
            return False
        number = self._queue.reserve(job.id, kind=kind, cards=cards, now=now)
        try:
            claim = self._launcher.launch(number, job.task, user, entry=job.entry, cards=cards)
        except LaunchFailed as error:
            self._give_up(number, now, held=endings.not_started(str(error)))
            return False
        except TemporaryError as error:
            # What is not known to have failed is settled in the next tick.
            self._unfit, self._unfit_at = str(error), now
            log.warning("nothing can be started", entry=job.entry, why=str(error))
            if isinstance(error, HostUnfit):
                self._give_up(number, now)
            return False
        self._queue.begin(number, claim)
        log.info("started", entry=job.entry, cards=cards, pid=claim.job.pid)
        return True

    def _give_up(self, number: int, now: float, *, held: str = "") -> None:
        """Nothing was started: the reservation is over, and the job waits again."""
        attempt = next(each for each in self._queue.attempts("reserved") if each.id == number)
        code = endings.NOT_STARTED if held else ""
        job = {"state": "waiting", "words": "", "held": held, "code": code}
        self._queue.end(attempt, ended={"ended": now, "why": held}, job=job, note=None)
        self._queue.free(number, notes={}, now=now)
