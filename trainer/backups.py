"""A run's second home as one attempt sees it: where it continues from, and what it leaves there.

Without a URL everything here does nothing, so that the session need not ask.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING

from gpuwarden.errors import ServiceUnavailable
from gpuwarden.trainer import uploading
from gpuwarden.trainer.runs import RunRecord
from gpuwarden.trainer.states import Manifest, StateStore

if TYPE_CHECKING:
    from gpuwarden.trainer.resume import Plan
    from gpuwarden.trainer.settings import TrainSettings
    from gpuwarden.trainer.status import StatusBoard

log = logging.getLogger(__name__)

FINISH_SECONDS = 600.0
"""How long a complete training waits for what it has made to arrive."""
SLICE_SECONDS = 5.0
DEADLINE_MARGIN_SECONDS = 2.0


def check(settings: TrainSettings) -> None:
    """Look at the settings' URL, before anything is trained.

    Raises:
        MissingExtra, InvalidInput: nothing is installed for it.
    """
    if settings.upload is None:
        return
    uploading.check(settings.upload)
    if settings.run_id is None:
        log.warning(
            "--upload without --run-id: the states are put under a name that no later start will "
            "look for; give the run an id to continue it on another machine"
        )


def find(settings: TrainSettings) -> RunRecord | None:
    """The run at the settings' URL that a start with its run id means.

    Raises:
        ServiceUnavailable: whether it is there could not be found out. It is not begun anew then:
            days of work may be there.
    """
    if settings.upload is None or settings.run_id is None or not settings.resumes:
        return None
    try:
        content = uploading.remote_record(settings.upload, settings.run_id)
    except ServiceUnavailable as error:
        raise ServiceUnavailable(
            f"{error}. The run may have states there: try again, or start anew with --resume never"
        ) from error
    if content is None:
        return None
    record = RunRecord.decode(content, where=f"{settings.upload}/{settings.run_id}/run.json")
    if record is None:
        raise ServiceUnavailable(
            f"{settings.upload}/{settings.run_id}/run.json cannot be used, see above: mend it, or "
            "start anew with --resume never"
        )
    return record


def restore(settings: TrainSettings, plan: Plan, record: RunRecord) -> None:
    """Bring a state here that is newer than the newest of this disk: another node trained on.

    Args:
        settings: with the URL, or none.
        plan: what the start means.
        record: of the run.

    Raises:
        ServiceUnavailable: there is none here, and none could be fetched.
        InvalidInput: there is none here, and what is there is damaged.
    """
    if settings.upload is None or plan.fresh or record.finished is not None:
        return
    # Until its first state, a run that was begun from another's weights needs that other's state.
    for lineage in filter(None, (record.lineage, record.begun_from)):
        if _restore(settings.upload, plan, record, lineage):
            return


def _restore(url: str, plan: Plan, record: RunRecord, lineage: str) -> bool:
    """Bring a newer state of that lineage here; returns whether one of it is here then."""
    here = StateStore(plan.folder, lineage).manifests()
    newest = here[0].sequence if here else 0
    try:
        fetched = uploading.fetch(url, record.run_id, plan.save_dir, lineage=lineage, after=newest)
    except ServiceUnavailable as error:
        if not here:
            raise
        log.warning("%s: continuing from what is on this disk", error)
        return True
    if fetched is not None:
        log.info("fetched state %06d from %s", fetched, url)
    return bool(here) or fetched is not None


class Backup:
    """Keeps one run's second home.

    Args:
        settings: with its URL, or none.
        plan: where it is here.
        run_id: the run.
        board: is told how far it is.
        active: whether this process is the one that sends.
    """

    def __init__(
        self,
        settings: TrainSettings,
        plan: Plan,
        *,
        run_id: str,
        board: StatusBoard,
        active: bool,
    ) -> None:
        self._url = settings.upload if active else None
        self._save_dir, self._wait, self._board = plan.save_dir, settings.upload_wait_seconds, board
        self._uploader: uploading.Uploader | None = None
        if self._url is not None:
            self._uploader = uploading.Uploader(
                self._url, run_id, self._save_dir, keep=settings.keep
            )

    def committed(self, manifest: Manifest) -> None:
        """A state is on this disk."""
        if self._uploader is not None:
            self._uploader.committed(manifest)
            self.tick()

    def recorded(self) -> None:
        """The run's record has changed on this disk."""
        if self._uploader is not None:
            self._uploader.recorded()

    def tick(self) -> None:
        """Publish how far the uploads are."""
        if self._uploader is not None:
            self._uploader.poll()
            self._board.set(upload=self._uploader.progress)

    def leave(self, until: float | None) -> None:
        """Wait for what is on its way, as long as an attempt that leaves may.

        Args:
            until: seconds until the deadline, or None.
        """
        if self._uploader is None:
            return
        seconds = self._wait
        if until is not None:
            seconds = min(seconds, max(0.0, until - DEADLINE_MARGIN_SECONDS))
        self._flush(seconds)

    def finish(self) -> None:
        """Wait for all that a complete run leaves."""
        uploader = self._uploader
        if uploader is None:
            return
        # The card is held meanwhile: a place that only fails is not waited for so long.
        until = time.monotonic() + FINISH_SECONDS
        while time.monotonic() < until and not uploader.flush(SLICE_SECONDS):
            if uploader.failing:
                break
        self._flush(self._wait)

    def _flush(self, seconds: float) -> None:
        if self._uploader is not None and not self._uploader.flush(seconds):
            log.warning(
                "not everything has arrived at %s within %g s: it is whole in %s",
                self._url,
                seconds,
                self._save_dir,
            )
        self.tick()

    def close(self) -> None:
        """Send no more."""
        if self._uploader is not None:
            with contextlib.suppress(OSError):
                self._uploader.close()
