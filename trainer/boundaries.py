"""What happens between two batches: the training is published, saved, and left when asked.

Most of the time nothing does, and finding that out must cost next to nothing: a boundary compares
the clock with one moment, `look_at`, the earliest at which there is something to do. Whoever has
something to do earlier (a signal, a state that has become durable) moves that moment. All else
happens at a look, about once a second.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

from gpuwarden.job_files import RequestState
from gpuwarden.trainer import ranks, resume
from gpuwarden.trainer.agreement import Wish
from gpuwarden.trainer.leaving import Leave

if TYPE_CHECKING:
    from gpuwarden.trainer.callbacks import LoopState
    from gpuwarden.trainer.sessions import Session

_NOTHING = Wish()
_NOW = float("-inf")


class Boundaries:
    """One attempt's.

    Args:
        session: the attempt.
    """

    def __init__(self, session: Session) -> None:
        self._session, self._watch = session, session.watch
        self._loop: LoopState | None = None
        self._alone = True
        self._due = _NOW
        """When to look next, of `time.monotonic`: the cheapest clock, good enough for a second."""
        self._looked: float | None = None
        self._pace = 0.0
        """Seconds between the last two looks: at least what a batch takes."""
        self._shared_validations = 0
        self._save_wished = self._save_owed = False
        self._durable_told = False

    def begin(self, trainer: Any) -> None:
        """Set-up is over."""
        self._loop, self._alone = trainer.gpuwarden, self._session.team.alone
        self._shared_validations = self._session.team.fewest(len(trainer.test_loader))
        self._session.saver.ended = self._watch.heard = self.wake

    def wake(self) -> None:
        """Look at the next boundary, whatever the clock says; from any thread or handler."""
        self._due = _NOW
        if self._loop is not None:
            self._loop.look_at = _NOW

    # -- the boundaries

    def after_batch(self, trainer: Any) -> None:
        """Between two batches.

        Raises:
            Leave: a notice stands, and all ranks know of it.
        """
        wish = _NOTHING
        if time.monotonic() >= self._due:
            self._look(trainer)
            wish = self._wish(trainer)
        self._act(trainer, self._session.team.exchange(wish))

    def epoch_ended(self, trainer: Any) -> Wish:
        """The epoch is validated: what all ranks agree to do now.

        Args:
            trainer: whose `stop` only rank 0 knows.
        """
        self._look(trainer)
        wish = self._wish(trainer, epoch_ended=True)
        return self._session.team.settle(dataclasses.replace(wish, stop=int(bool(trainer.stop))))

    def after_epoch(self, trainer: Any, agreed: Wish) -> None:
        """Between two epochs: save, leave; raises as `after_batch`."""
        self._act(trainer, agreed, epoch_ended=True)

    def in_validation(self, batch: int) -> None:
        """One batch of a validation is done, final ones included.

        Args:
            batch: its number, from 0.

        Raises:
            Leave: as `after_batch`.
        """
        session, wish = self._session, _NOTHING
        if time.monotonic() >= self._due:
            self._pass()
            if session.board.due():
                session.stalls.beat()
            session.note_notice()
            session.board.beat()
            wish = Wish(leave=int(self.must_leave()), signal=self._watch.signalled or 0)
            self._until_next()
        if not self._alone and batch >= self._shared_validations:
            return  # not all ranks have so many: their agreement waits for the epoch's end
        agreed = session.team.exchange(wish)
        self._save_owed |= bool(agreed.save)
        if agreed.leave:
            self._watch.hear(agreed.signal)
            raise Leave

    def must_leave(self, *, epoch_ended: bool = False) -> bool:
        """Whether to leave at this boundary; a deadline leaves time for one more step and a save.

        Args:
            epoch_ended: the boundary is the end of an epoch.
        """
        margin = 2.0 + self._pace + 2.0 * self._session.saver.save_seconds
        return self._watch.must_leave(epoch_ended=epoch_ended, margin=margin)

    def collect(self, *, wait: bool = False) -> None:
        """Take note of a state that has become durable.

        Args:
            wait: for one that is being written.
        """
        saver = self._session.saver
        saver.collect(wait=wait)
        if not self._durable_told and saver.newest is not None:
            self._durable_told = True
            ranks.tell(ranks.DURABLE)

    # -- inside

    def _until_next(self) -> None:
        """Choose the moment of the next look."""
        session, watch, loop = self._session, self._watch, self._loop
        due = min(session.board.due_at, watch.due_at)
        if loop is not None and loop.mode == resume.EXACT:  # others save at epochs' ends alone
            due = min(due, session.saver.due_at)
        self._due = time.monotonic() + due - session.clock.monotonic()
        if loop is not None and self._alone:  # else each boundary agrees with the others
            loop.look_at = self._due
        # What came while the moment was chosen; a request is looked at until it is answered.
        if watch.signalled is not None or watch.standing or session.saver.collectable:
            self.wake()

    def _pass(self) -> None:
        now = self._session.clock.monotonic()
        self._pace = 0.0 if self._looked is None else now - self._looked
        self._looked = now

    def _look(self, trainer: Any) -> None:
        session, watch = self._session, self._watch
        self._pass()
        trainer.gpuwarden_count()
        self.collect()
        if session.board.due():
            session.figures(trainer)
        session.board.beat()
        session.note_notice()
        request = watch.request()
        answered = session.board.status.request
        if request and (answered is None or answered.decision_id != request.decision_id):
            session.answer(RequestState.RECEIVED)

    def _wish(self, trainer: Any, *, epoch_ended: bool = False) -> Wish:
        request, exact = self._watch.request(), trainer.gpuwarden.mode == resume.EXACT
        asked = request is not None and request.then == "continue" and (exact or epoch_ended)
        save = not self._save_wished and (asked or (exact and self._session.saver.due))
        self._save_wished |= save
        return Wish(
            leave=int(self.must_leave(epoch_ended=epoch_ended)),
            save=int(save),
            signal=self._watch.signalled or 0,
        )

    def _act(self, trainer: Any, agreed: Wish, *, epoch_ended: bool = False) -> None:
        session, loop = self._session, trainer.gpuwarden
        if agreed.leave:
            self._watch.hear(agreed.signal)
            if epoch_ended and loop.mode == resume.EPOCH:
                session.save(trainer, "epoch", background=True)
            raise Leave
        every = session.settings.checkpoint_epochs
        epochs = epoch_ended and (
            loop.mode == resume.EPOCH or bool(every and loop.position.epoch % every == 0)
        )
        if epochs or agreed.save or self._save_owed:
            self._save_wished = self._save_owed = False
            request = self._watch.request()
            if request is not None and request.then == "continue":
                session.save_and_continue(trainer, request.decision_id)
            elif epochs:
                session.save(trainer, "epoch", background=True, later=loop.mode == resume.EXACT)
            else:
                session.save(trainer, "periodic", background=True)
        self._until_next()
