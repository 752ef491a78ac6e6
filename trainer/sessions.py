"""One attempt at a training: from the command to the exit status."""

from __future__ import annotations

import dataclasses
import logging
import os
import secrets
import time
from contextlib import closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuwarden import job_files
from gpuwarden.clock import Clock, SystemClock
from gpuwarden.errors import InvalidInput
from gpuwarden.job_files import Checkpoint, NoticeSeen, RequestState
from gpuwarden.trainer import (
    advice,
    agreement,
    backups,
    beginnings,
    comparisons,
    descriptions,
    environments,
    exports,
    faults,
    measuring,
    offline,
    parallel,
    peers,
    ranks,
    resume,
    status,
)
from gpuwarden.trainer.agreement import Alone, Wish
from gpuwarden.trainer.beginnings import Beginning
from gpuwarden.trainer.boundaries import Boundaries
from gpuwarden.trainer.leaving import Leave
from gpuwarden.trainer.ranks import Place
from gpuwarden.trainer.runs import RunLock, RunRecord
from gpuwarden.trainer.saving import Saver
from gpuwarden.trainer.stalls import StallWatch
from gpuwarden.trainer.states import Manifest, Position, StateStore

if TYPE_CHECKING:
    from gpuwarden.trainer.agreement import Team
    from gpuwarden.trainer.leaving import LeaveWatch
    from gpuwarden.trainer.settings import TrainSettings

log = logging.getLogger(__name__)

_MAX_REASON = 256
"""Characters; what a status file may hold."""


class Session:
    """One attempt.

    Args:
        settings: the user's choices.
        watch: installed, or not where signals are not to be seen.
        clock: for the status, periods and deadlines.
    """

    def __init__(
        self, settings: TrainSettings, *, watch: LeaveWatch, clock: Clock | None = None
    ) -> None:
        self.settings, self.watch = settings, watch
        self.clock = clock or SystemClock()
        self.metrics: Any = None
        self.stalls = StallWatch(settings.stall_seconds)
        self.board: status.StatusBoard
        self.trainer: Any = None
        self.plan: resume.Plan
        self.record: RunRecord
        self._store: StateStore
        self.saver: Saver
        self._adviser: advice.Adviser
        self._backup: backups.Backup
        self.team: Team = Alone()
        self._saved_to_leave: bool | None = None
        self.boundaries = Boundaries(self)

    # -- the attempt

    def run(
        self, model: Any, words: dict[str, Any], *, train: Any, base: type | None = None
    ) -> tuple[int, str]:
        """Train to the end, or until asked to leave.

        Args:
            model: an `ultralytics.YOLO`.
            words: ultralytics' keywords; `resume="auto"` is gpuwarden's.
            train: the model's own `train`.
            base: trainer class to build upon; by default the settings', else the task's.

        Returns:
            Exit status and its reason.

        Raises:
            InvalidInput: the words or the found state do not fit.
            RunIsLocked: the run is being trained by another process.
        """
        offline.prepare()
        exports.check(self.settings.export)
        backups.check(self.settings)
        words = {name: value for name, value in words.items() if value is not None}
        base = base or environments.named_class(self.settings.trainer)
        if isinstance(words.get("data"), list | tuple):
            raise InvalidInput("one run trains on one data set: give data= a single data.yaml")
        words.update(self._meet(words))
        settings, native = beginnings.resume_choice(self.settings, words)
        name = str(model.overrides.get("model", ""))
        checkpoint = Path(name if native is True else str(native or "")).resolve()
        if checkpoint.is_file() and checkpoint.parent.name == "weights":
            words.setdefault("save_dir", str(checkpoint.parent.parent))
        lock: RunLock | None = None
        told: Beginning | None = None
        try:
            if self.team.place.leads:
                with self.watch.interruptible():  # not even the run is known
                    claimed = beginnings.claim(
                        settings,
                        {"model": name, **words},
                        task=model.task,
                        watch=self.watch,
                        clock=self.clock,
                    )
                    self.plan, self.record, lock = claimed
                    try:
                        backups.restore(settings, self.plan, self.record)
                    except BaseException:
                        lock.withdraw()
                        raise
                former = RunRecord.read(self.plan.folder) if self.plan.fresh else None
                if native is not None and former is not None:
                    raise resume.native_of_ours(str(checkpoint), former)
                told = Beginning.of(self.plan, self.record)
        except Leave:
            notice = self.watch.notice()
            told = Beginning(
                ended=(self.watch.leaving_status(), notice.reason if notice else "left")
            )
        finally:
            told = self.team.tell(told)  # also that there will be none
        try:
            if told is None:
                return job_files.EXIT_FAULT, "rank 0 could not begin"
            if told.ended is not None:
                return told.ended
            self.plan, self.record = told.plan, told.record
            leads = self.team.place.leads
            board = status.StatusBoard if leads else peers.PeerBoard
            self.board = board(settings.jobs_directory, self.record.run_id, clock=self.clock)
            self._backup = backups.Backup(
                settings, self.plan, run_id=self.record.run_id, board=self.board, active=leads
            )
            with closing(self._backup):
                return self._attempt(model, words, native=native, train=train, base=base)
        finally:
            if lock is not None:
                lock.release()

    def _meet(self, words: dict[str, Any]) -> dict[str, Any]:
        """Join the other ranks, if a launcher started some; returns words of this rank's own."""
        place = Place.of()
        if place.world == 1:
            devices = words.get("device")
            if (isinstance(devices, str) and "," in devices) or (
                isinstance(devices, list | tuple) and len(devices) > 1
            ):
                raise resume.several_devices(f"device={devices}")
            return {}
        device = parallel.choose_device(words, place, os.environ.get(ranks.DEVICE_VARIABLE))
        self.team = agreement.join(cuda=device != "cpu")
        self.team.settle(Wish())  # what an earlier training of this process left unread
        return {"device": device}

    def _attempt(
        self, model: Any, words: dict[str, Any], *, native: Any, train: Any, base: type | None
    ) -> tuple[int, str]:
        from gpuwarden.trainer import callbacks, loaders  # torch comes with them

        record, folder = self.record, self.plan.folder
        self._store = StateStore(folder, record.lineage, keep=self.settings.keep)
        leads, words = self.team.place.leads, {**words, "resume": self._native(native)}
        if leads:
            self._store.remove_leftovers()
            if self.plan.fresh:
                self._store.discard_others()
            if self.plan.fresh or RunRecord.read(folder) is None:
                record.write(folder)  # else once the state is known to fit these words
            self._backup.recorded()
            if self.team.place.world > 1 and not words["resume"]:
                # Ultralytics' ranks would all delete it, and the second fail. A state has it too.
                (self.plan.save_dir / "results.csv").unlink(missing_ok=True)
        self.saver = (Saver if leads else peers.PeerSaver)(
            self._store,
            self.board,
            every=self.settings.checkpoint_seconds,
            mtbf=self.settings.mtbf_seconds,
            clock=self.clock,
            committed=self._backup.committed,
        )
        if leads:
            self.watch.observe(
                job_files.request_path(self.settings.jobs_directory, record.run_id),
                answered=set(record.answered),
                since=self.clock.wall(),
            )
        base = base or model._smart_load("trainer")  # noqa: SLF001 -- as its own train does
        self.board.begin()
        words = {**words, "save_dir": str(self.plan.save_dir)}
        words.update(self._further_epochs(words))
        try:
            # The others learn of a signal from rank 0, or at the first batch.
            early = self.watch.interruptible() if leads else nullcontext()
            with early, environments.whole_label_caches(self.watch), self.stalls.watching():
                self.metrics = train(trainer=callbacks.trainer_class(base, self), **words)
            if leads:
                exports.run(self.trainer, self.settings.export, board=self.board, watch=self.watch)
        except Leave:
            return self._leave()
        except BaseException as error:
            if not leads and isinstance(error, RuntimeError) and self.watch.must_leave():
                return self.watch.leaving_status(), "rank 0 left"  # and its connection with it
            code = faults.status_of(error, alone=self.team.place.world == 1)
            self.board.finish(code, f"{type(error).__name__}: {error}")
            raise
        finally:
            hurry = self.watch.must_leave()
            loaders.close(self.trainer, patience=loaders.HURRY if hurry else loaders.PATIENCE)
        self.saver.collect(wait=True)
        self.note(finished=self.clock.wall())
        self._backup.finish()
        self.board.enter("done")
        self.board.finish(job_files.EXIT_DONE, "complete")
        return job_files.EXIT_DONE, "complete"

    def _further_epochs(self, words: dict[str, Any]) -> dict[str, Any]:
        """What a run that was given more epochs needs said besides its words."""
        if self.record.extended is None:
            return {}
        further: dict[str, Any] = {"epochs": self.record.extended}
        manifests = self._store.manifests()
        if words.get("optimizer", "auto") == "auto" and manifests and manifests[0].optimizer:
            further["optimizer"] = manifests[0].optimizer  # chosen by the number of epochs
        return further

    def _native(self, word: Any) -> Any:
        """Ultralytics' own `resume`, where no state of ours takes its place."""
        if word is None or not self.plan.fresh:
            return False
        return word

    def save_to_leave(self) -> bool:
        """Make durable what a training that leaves goes on from; all ranks call it.

        The first call does it. Ultralytics closes experiment trackers on its way out, which takes
        as long as their network does: it calls before that.

        Returns:
            Whether there is anything to go on from.
        """
        if self._saved_to_leave is not None:
            return self._saved_to_leave
        notice = self.watch.notice()
        loop = self.trainer.gpuwarden if self.trainer is not None else None
        saved = True
        if notice and notice.then == "hold":
            ranks.tell(ranks.HOLD)
        self.note_notice()
        self.answer(RequestState.SAVING)
        if loop is not None:
            self.trainer.gpuwarden_count()
        if loop is not None and loop.mode == resume.EXACT and loop.live and not loop.final:
            saved = self.save(self.trainer, f"left: {notice.reason if notice else '?'}")
        self.boundaries.collect(wait=True)
        saved = (saved or self.saver.newest is not None) and self.saver.possible
        self._saved_to_leave = saved
        return saved

    def _leave(self) -> tuple[int, str]:
        """Save, say so, and choose the exit status."""
        saved = self.save_to_leave()
        notice = self.watch.notice()
        deadline = notice.leave_by if notice else None
        self._backup.leave(None if deadline is None else deadline - self.clock.wall())
        # The ladder's signal may come before its request was read: the last word counts.
        self.watch.reread()
        notice = self.watch.notice() or notice
        code = self.watch.leaving_status()
        reason = notice.reason if notice else "request, withdrawn meanwhile"
        if not saved:
            code, reason = job_files.EXIT_NOT_RESUMABLE, f"{reason}; no state could be saved"
        if notice:
            if notice.decision_id:
                self.note(answered=self.record.having_answered(notice.decision_id).answered)
            self.board.set(stop_latency=max(0.0, self.clock.monotonic() - notice.received))
        self.answer(RequestState.LEAVING)
        self.board.finish(code, reason)
        at = self.saver.newest
        log.log(
            logging.INFO if self.team.place.leads else logging.DEBUG,
            "left (%s) with exit status %d; %s",
            reason,
            code,
            f"goes on at epoch {at.epoch + 1}, batch {at.batch}" if at else "nothing to save yet",
        )
        return code, reason

    def _write_record(self) -> None:
        if not self.team.place.leads:
            return
        try:
            self.record.write(self.plan.folder)
            self._backup.recorded()
        except OSError as error:
            log.warning("cannot write %s: %s", self.plan.folder / RunRecord.FILE, error)

    # -- what the hooks report

    def adopt(self, trainer: Any) -> None:
        """A trainer is being constructed."""
        self.trainer = trainer

    def started(self, trainer: Any, degraded: str) -> None:
        """The trainer is constructed: describe the run."""
        if degraded:
            log.warning("resumes from whole epochs only: %s", degraded)
        self.board.set(resume_mode=trainer.gpuwarden.mode)
        manifests = [] if self.plan.fresh else self._store.manifests()
        if manifests and manifests[0].words.get("batch") == self.record.words.get("batch"):
            # Said in the same words, another batch size was found by AutoBatch, or halved for lack
            # of memory, and is the one that the state belongs to.
            trainer.args.batch = trainer.batch_size = manifests[0].batch_size
        self._describe(trainer)

    def note(self, **changes: Any) -> None:
        """Change the run's record, for the attempts to come."""
        self.record = dataclasses.replace(self.record, **changes)
        self._write_record()

    def degrade(self, trainer: Any, reason: str) -> None:
        """Exact resume has turned out to be impossible."""
        trainer.gpuwarden.mode = resume.EPOCH
        self.started(trainer, reason)

    def _describe(self, trainer: Any) -> None:
        descriptions.publish(
            trainer,
            self.board,
            run_id=self.record.run_id,
            folder=self.plan.folder,
            log_file=self.settings.log,
            world_size=self.team.place.world,
        )

    def load_state(self, trainer: Any) -> comparisons.Continuation | None:
        """The state that this attempt continues, as this rank continues it."""
        place = self.team.place
        found = self.team.tell(self._load_state(trainer) if place.leads else None)
        if found is None:
            return None
        from gpuwarden.trainer import captures

        return dataclasses.replace(found, state=captures.for_rank(found.state, place))

    def _load_state(self, trainer: Any) -> comparisons.Continuation | None:
        """The newest good state, compared with the training."""
        if self.plan.fresh:
            return None
        found = self._store.newest()
        if found is None:
            if self._store.has_any():
                raise resume.none_usable(self.plan.folder)
            if (former := self._former()) is not None:
                return former
            log.info("run %s has no state yet: it starts from the beginning", self.record.run_id)
            return None
        manifest, state = found
        loop = trainer.gpuwarden
        kind = comparisons.kind_for(
            manifest,
            trainer,
            dataset=loop.dataset,
            order=loop.order,
            record=self.record,
            on_mismatch=self.settings.on_mismatch,
        )
        if kind == comparisons.WEIGHTS:
            self._begin_anew(trainer, manifest)
            return comparisons.Continuation(kind, state, manifest.batches)
        if kind != comparisons.EPOCH and loop.mode != resume.EXACT and manifest.batch:
            if self.settings.on_mismatch != comparisons.EPOCH:
                raise resume.only_whole_epochs(manifest)
            kind = comparisons.EPOCH
        if kind == comparisons.EXACT:
            self.saver.newest = manifest.position
        self.board.saved(Checkpoint(manifest.time, manifest.step, manifest.time, manifest.size))
        self.board.set(step=manifest.step, epoch=manifest.epoch)
        log.info(
            "resuming run %s %s epoch %d, batch %d of %d (step %d)",
            self.record.run_id,
            "from whole epochs, with what it learnt until" if kind == comparisons.EPOCH else "at",
            manifest.epoch + 1,
            manifest.batch,
            manifest.batches,
            manifest.step,
        )
        return comparisons.Continuation(kind, state, manifest.batches)

    def _former(self) -> comparisons.Continuation | None:
        """What the run began from, if it was ended before its first state."""
        if self.record.begun_from is None:
            return None
        found = StateStore(self.plan.folder, self.record.begun_from).newest()
        if found is None:
            raise resume.none_usable(self.plan.folder)
        return comparisons.Continuation(comparisons.WEIGHTS, found[1], found[0].batches)

    def _begin_anew(self, trainer: Any, manifest: Manifest) -> None:
        """The run becomes another training: what it had learnt stays beside what it will."""
        self.record = dataclasses.replace(
            self.record, lineage=secrets.token_hex(8), begun_from=manifest.lineage
        )
        for path in (trainer.best, trainer.last):
            if path.exists():
                path.replace(path.with_stem(f"{path.stem}-before-{manifest.lineage}"))
        self._store = StateStore(self.plan.folder, self.record.lineage, keep=self.settings.keep)
        self.saver.follow(self._store)
        self._write_record()

    def training_begins(self, trainer: Any) -> None:
        """Set-up is over: from here on only waits for data may be cut short."""
        self.watch.disarm()
        self._write_record()
        self.boundaries.begin(trainer)
        self._describe(trainer)
        self.board.enter("train")
        self.figures(trainer)
        self._adviser = advice.Adviser(self.board)
        if self.team.place.leads:
            self._adviser.begin(trainer, self.record.words, world=self.team.place.world)

    def validated(self, trainer: Any) -> None:
        """An epoch is complete, its metrics are known."""
        self.board.figures(metrics=measuring.metrics(trainer))
        self.figures(trainer)
        self._adviser.epoch_ended()

    def settle(self) -> None:
        """Wait for a state being written: loader workers must not be forked meanwhile."""
        self.saver.collect(wait=True)

    def before_final(self, trainer: Any) -> None:
        """Only the final evaluation is left."""
        if trainer.gpuwarden.mode == resume.EXACT:
            self.save(trainer, "final", background=False)

    def rewound(self) -> None:
        """The training has gone back to a checkpoint of ultralytics' own."""
        self.saver.rewound()

    def save_and_continue(self, trainer: Any, decision_id: str) -> None:
        """Take the state that a request asks for, and go on."""
        self.answer(RequestState.SAVING)
        # Answered even if it failed, which the checkpoint's time tells: not a try at each step.
        self.save(trainer, "request", background=True)
        self.note(answered=self.record.having_answered(decision_id).answered)
        self.watch.answer(decision_id)

    def answer(self, state: RequestState) -> None:
        """Tell how far the request that stands has come, if one does."""
        request = self.watch.request()
        if request is not None:
            self.board.answered(request.decision_id, state)

    def note_notice(self) -> None:
        """Tell that the training knows of a notice to leave, and when it first did."""
        notice, seen = self.watch.notice(), self.board.status.notice
        if notice is None:
            if seen is not None:
                self.board.set(notice=None)
        elif seen is None or (seen.reason, seen.at) != (notice.reason[:_MAX_REASON], notice.at):
            since = self.clock.wall() if seen is None else seen.time
            self.board.noticed(NoticeSeen(notice.reason[:_MAX_REASON], notice.at, since))
            if seen is None and notice.at == "epoch" and self.team.place.leads:
                log.info("%s: leaves at the end of this epoch", notice.reason)

    def save(
        self, trainer: Any, reason: str, *, background: bool = False, later: bool = False
    ) -> bool:
        """Take a state, with every rank's part; all ranks call it at the same boundary.

        Args:
            trainer: between two batches, or in validation.
            reason: for its manifest.
            background: see `Saver.save`.
            later: likewise.
        """
        from gpuwarden.trainer import captures

        loop = trainer.gpuwarden
        position: Position = loop.position
        batches = len(trainer.train_loader)
        earlier = loop.ended if position.batch == batches else None
        stream = trainer.train_loader.stream(position.epoch, position.batch)
        if not self.team.decide(lambda: self.saver.wants(position, later=later)):
            return self.saver.possible
        others = self.team.gather(
            lambda: captures.peer_part(trainer, earlier=earlier, stream=stream)
        )
        draft = comparisons.draft(
            trainer,
            self.record,
            reason=reason,
            now=self.clock.wall(),
            world_size=self.team.place.world,
        )
        return self.saver.save(
            position,
            capture=lambda: captures.capture(
                trainer,
                position,
                last_optimizer_step=loop.last_step,
                current_step=trainer.gpuwarden_step(),
                earlier=earlier,
                stream=stream,
                peers=others,
                elapsed=time.time() - trainer.train_time_start,
            ),
            draft=draft,
            background=background,
        )

    def figures(self, trainer: Any) -> None:
        """Look up what is told once a second."""
        self.stalls.beat()
        measuring.publish(trainer, self.board, gradient_norm=trainer.gpuwarden.gradient_norm)
        self._backup.tick()
