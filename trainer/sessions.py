"""One attempt at a training: from the command to the exit status."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.metadata
import logging
import os
import shutil
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuwarden import __version__, job_files
from gpuwarden.clock import Clock, SystemClock
from gpuwarden.errors import InvalidInput
from gpuwarden.job_files import Checkpoint, RequestState, RunDescription
from gpuwarden.trainer import status
from gpuwarden.trainer.leaving import Leave, LeaveWatch
from gpuwarden.trainer.saving import Saver
from gpuwarden.trainer.settings import TrainSettings
from gpuwarden.trainer.states import Manifest, Position, RunLock, RunRecord, StateStore

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpuwarden.trainer import resume

log = logging.getLogger(__name__)


class LeftTraining(SystemExit):
    """`model.train` was asked to leave: state is saved. Uncaught, the process exits with `code`.

    Attributes:
        reason: the signal or request.
    """

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(code)
        self.reason = reason


def attach(model: Any, **options: Any) -> Any:
    """Give a model's `train` the behaviour of `gpuwarden train`.

    `model.train(...)` takes ultralytics' keywords as before (and `resume="auto"`) and returns its
    metrics; it returns None if the run is already complete, and raises `LeftTraining` (a
    SystemExit: a script that does not catch it exits with the documented status) after it was
    asked to leave and has saved.

    Args:
        model: an `ultralytics.YOLO`.
        **options: see `TrainSettings.from_options`.

    Returns:
        The model.

    Raises:
        InvalidInput: an unknown or impossible option.
    """
    settings = TrainSettings.from_options(**options)
    original = model.train

    @functools.wraps(original)
    def train(trainer: type | None = None, **words: Any) -> Any:
        watch = LeaveWatch()
        watch.install()
        try:
            session = Session(settings, watch=watch)
            code, reason = session.run(model, words, train=original, base=trainer)
        finally:
            watch.restore()
        if code != job_files.EXIT_DONE:
            raise LeftTraining(code, reason)
        return session.metrics

    model.train = train
    return model


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
        self.board: status.StatusBoard
        self._trainer: Any = None
        self._plan: resume.Plan
        self._record: RunRecord
        self._store: StateStore
        self._saver: Saver

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
        from gpuwarden.trainer import resume  # noqa: PLC0415 -- its siblings need torch

        prepare_offline()
        words = {name: value for name, value in words.items() if value is not None}
        if isinstance(words.get("data"), list | tuple):
            raise InvalidInput("one run trains on one data set: give data= a single data.yaml")
        devices = words.get("device")
        if (
            (isinstance(devices, str) and "," in devices)
            or (isinstance(devices, list | tuple) and len(devices) > 1)
            or int(os.environ.get("RANK", "-1")) >= 0
        ):
            from gpuwarden.trainer import callbacks  # noqa: PLC0415

            raise InvalidInput(callbacks.resume_on_one_device(devices))
        settings, native = self._resume_choice(words)
        if native is not None and Path(str(native)).is_file():
            words.setdefault("save_dir", str(Path(native).resolve().parent.parent))
        with self._leaving_early() as outcome:
            self._plan = resume.plan(
                settings,
                {"model": model.overrides.get("model", ""), **words},
                task=model.task,
                now=self.clock.wall(),
            )
            self._record = self._plan.record
            self.board = status.StatusBoard(
                settings.jobs_directory, self._record.run_id, clock=self.clock
            )
        if outcome:
            return outcome[0]
        self._plan.folder.mkdir(parents=True, exist_ok=True)
        lock = RunLock(self._plan.folder)
        lock.acquire(wait_seconds=settings.lock_seconds)
        try:
            if not self._plan.fresh:  # the attempt that had the lock may have ended the run
                self._record = RunRecord.read(self._plan.folder) or self._record
            if self._record.finished is not None:
                reason = f"run {self._record.run_id} in {self._plan.save_dir} is already complete"
                log.info("%s", reason)
                return job_files.EXIT_DONE, reason
            return self._attempt(model, words, native=native, train=train, base=base)
        finally:
            lock.release()

    def _resume_choice(self, words: dict[str, Any]) -> tuple[TrainSettings, Any]:
        """Whether gpuwarden resumes, and what is left of the word `resume` for ultralytics."""
        word = words.pop("resume", None)
        settings = self.settings
        if word == "auto" or (word is True and settings.resume is None):
            settings = dataclasses.replace(settings, resume="auto")
        return settings, (None if word in ("auto", None, False) else word)

    @contextmanager
    def _leaving_early(self) -> Iterator[list[tuple[int, str]]]:
        """Within, not even the run is known: a notice to leave ends the attempt at once."""
        outcome: list[tuple[int, str]] = []
        try:
            with self.watch.interruptible():
                yield outcome
        except Leave:
            notice = self.watch.notice()
            outcome.append((self.watch.leaving_status(), notice.reason if notice else "left"))

    def _attempt(
        self, model: Any, words: dict[str, Any], *, native: Any, train: Any, base: type | None
    ) -> tuple[int, str]:
        from gpuwarden.trainer import callbacks  # noqa: PLC0415 -- needs torch

        record, folder = self._record, self._plan.folder
        self._store = StateStore(folder, record.lineage, keep=self.settings.keep)
        self._store.remove_leftovers()
        if self._plan.fresh:
            self._store.discard_others()
        record.write(folder)
        self._saver = Saver(
            self._store, self.board, every=self.settings.checkpoint_seconds, clock=self.clock
        )
        self.watch.observe(
            job_files.request_path(self.settings.jobs_directory, record.run_id),
            answered=set(record.answered),
            since=self.clock.wall(),
        )
        self.board.begin()
        base = base or _named_class(self.settings.trainer) or model._smart_load("trainer")  # noqa: SLF001
        words = {**words, "save_dir": str(self._plan.save_dir), "resume": self._native(native)}
        try:
            with self.watch.interruptible(), self._whole_label_caches():
                self.metrics = train(trainer=callbacks.trainer_class(base, self), **words)
        except Leave:
            return self._leave()
        except BaseException as error:
            self.board.finish(job_files.EXIT_FAULT, f"{type(error).__name__}: {error}")
            raise
        finally:
            self._close_loaders()
        self._finish_record()
        self.board.enter("done")
        self.board.finish(job_files.EXIT_DONE, "complete")
        return job_files.EXIT_DONE, "complete"

    def _native(self, word: Any) -> Any:
        """Ultralytics' own `resume`, where no state of ours takes its place."""
        if word is None or not self._plan.fresh:
            return False
        return word

    def _leave(self) -> tuple[int, str]:
        """Save, say so, and choose the exit status."""
        notice = self.watch.notice()
        loop = self._trainer.gpuwarden if self._trainer is not None else None
        saved = True
        self._answer(RequestState.SAVING)
        if loop is not None and loop.mode == "exact" and loop.live and not loop.final:
            saved = self._save(self._trainer, f"left: {notice.reason if notice else '?'}")
        self._saver.collect(wait=True)
        saved = (saved or self._saver.newest is not None) and self._saver.possible
        # The ladder's signal may come before its request was read: the last word counts.
        self.watch.reread()
        notice = self.watch.notice() or notice
        code = self.watch.leaving_status()
        reason = notice.reason if notice else "request, withdrawn meanwhile"
        if not saved:
            code, reason = job_files.EXIT_NOT_RESUMABLE, f"{reason}; no state could be saved"
        if notice:
            if notice.decision_id:
                self._record = self._record.having_answered(notice.decision_id)
                self._write_record()
            self.board.set(stop_latency=max(0.0, self.clock.monotonic() - notice.received))
        self._answer(RequestState.LEAVING)
        self.board.finish(code, reason)
        at = self._saver.newest
        log.info(
            "left (%s) with exit status %d; %s",
            reason,
            code,
            f"goes on at epoch {at.epoch + 1}, batch {at.batch}" if at else "nothing to save yet",
        )
        return code, reason

    def _finish_record(self) -> None:
        self._saver.collect(wait=True)
        self._record = dataclasses.replace(self._record, finished=self.clock.wall())
        self._write_record()

    def _write_record(self) -> None:
        try:
            self._record.write(self._plan.folder)
        except OSError as error:
            log.warning("cannot write %s: %s", self._plan.folder / RunRecord.FILE, error)

    def _close_loaders(self) -> None:
        for name in ("train_loader", "test_loader"):
            close = getattr(getattr(self._trainer, name, None), "close", None)
            if close is not None:
                close()

    @contextmanager
    def _whole_label_caches(self) -> Iterator[None]:
        """Within, a signal does not tear a label cache that ultralytics is writing."""
        module: Any = importlib.import_module("ultralytics.data.dataset")
        save = module.save_dataset_cache_file

        def save_whole(*args: Any, **kwargs: Any) -> Any:
            with self.watch.shielded():
                return save(*args, **kwargs)

        module.save_dataset_cache_file = save_whole
        try:
            yield
        finally:
            module.save_dataset_cache_file = save

    # -- what the hooks report

    def adopt(self, trainer: Any) -> None:
        """A trainer is being constructed."""
        self._trainer = trainer

    def started(self, trainer: Any, degraded: str) -> None:
        """The trainer is constructed: describe the run."""
        if degraded:
            log.warning("resumes from whole epochs only: %s", degraded)
        self.board.set(resume_mode=trainer.gpuwarden.mode)
        if not self._plan.fresh and (manifests := self._store.manifests()):
            # The words are the same: another batch size was found by AutoBatch, or halved for lack
            # of memory, and is the one that the state belongs to.
            trainer.args.batch = trainer.batch_size = manifests[0].batch_size
        self._describe(trainer)

    def degrade(self, trainer: Any, reason: str) -> None:
        """Exact resume has turned out to be impossible."""
        trainer.gpuwarden.mode = "epoch"
        self.started(trainer, reason)

    def _describe(self, trainer: Any) -> None:
        args = trainer.args
        batch = trainer.batch_size
        if not isinstance(batch, int) or batch < 1:
            return  # chosen during set-up; described then
        output = self.settings.log or status.output_file()
        try:
            identity: dict[str, Any] = status.process_identity()
        except OSError as error:
            log.warning("this training cannot be described to the node: %s", error)
            return
        amp = getattr(trainer, "amp", args.amp)
        self.board.describe(
            RunDescription(
                run_id=self._record.run_id,
                **identity,
                model=Path(str(args.model)).stem[:128],
                batch=batch,
                imgsz=int(args.imgsz),
                amp=bool(amp) and amp != "fp32" and trainer.device.type != "cpu",
                epochs=int(trainer.epochs),
                world_size=1,
                project=str(args.project or "")[:128],
                log=str(output.absolute()) if output else None,
                checkpoints=str(self._plan.folder),
            )
        )

    def load_state(self, trainer: Any) -> dict[str, Any] | None:
        """The state that this attempt continues, checked against the training."""
        from gpuwarden.trainer import resume  # noqa: PLC0415 -- its siblings need torch

        if self._plan.fresh:
            return None
        had = self._store.manifests()
        found = self._store.newest()
        if found is None:
            if had:
                raise InvalidInput(
                    f"none of the states in {self._plan.folder} is good (put aside as *.bad): "
                    "start anew with --resume never"
                )
            log.info("run %s has no state yet: it starts from the beginning", self._record.run_id)
            return None
        manifest, state = found
        loop = trainer.gpuwarden
        resume.check_fits(manifest, trainer, dataset=loop.dataset, order=loop.order)
        if loop.mode != "exact" and manifest.batch:
            raise InvalidInput(
                f"the newest state is in the middle of epoch {manifest.epoch + 1}, but here a "
                "training can be resumed from whole epochs only: use the software that wrote it "
                f"({manifest.software}), or start anew with --resume never"
            )
        self._saver.newest = manifest.position
        self.board.saved(Checkpoint(manifest.time, manifest.step, manifest.time, manifest.size))
        self.board.set(step=manifest.step, epoch=manifest.epoch)
        log.info(
            "resuming run %s at epoch %d, batch %d of %d (step %d)",
            self._record.run_id,
            manifest.epoch + 1,
            manifest.batch,
            manifest.batches,
            manifest.step,
        )
        return state

    def training_begins(self, trainer: Any) -> None:
        """Set-up is over: from here on only waits for data may be cut short."""
        self.watch.disarm()
        self._describe(trainer)
        self.board.enter("train")
        self._figures(trainer)

    def trained(self, trainer: Any, *, images: int) -> None:
        """One batch was trained on."""
        # The progress bar has just read the losses: the device is in step already.
        finite = bool(trainer.loss.isfinite())
        self.board.trained(images=images, finite=finite, step=trainer.gpuwarden_step() + 1)

    def validated(self, trainer: Any) -> None:
        """An epoch is complete, its metrics are known."""
        losses = ("train/", "val/", "lr/")
        metrics = {
            name: value
            for name, value in (trainer.metrics or {}).items()
            if not name.startswith(losses)
        }
        self.board.figures(metrics=metrics)
        self._figures(trainer)

    def boundary(self, trainer: Any, *, epoch_ended: bool = False) -> None:
        """Between two batches, or two epochs: publish, save, leave.

        Raises:
            Leave: a notice stands.
        """
        self._saver.collect()
        if self.board.due():
            self._figures(trainer)
        self.board.beat()
        loop = trainer.gpuwarden
        request = self.watch.request()
        answered = self.board.status.request
        if request and (answered is None or answered.decision_id != request.decision_id):
            self._answer(RequestState.RECEIVED)
        if self.watch.must_leave(epoch_ended=epoch_ended, margin=self._margin()):
            if epoch_ended and loop.mode == "epoch":
                self._save(trainer, "epoch", background=True)
            raise Leave
        if request is not None and request.then == "continue":
            self._save_and_continue(trainer, request.decision_id, epoch_ended=epoch_ended)
        every = self.settings.checkpoint_epochs
        if epoch_ended and (loop.mode == "epoch" or (every and loop.position.epoch % every == 0)):
            self._save(trainer, "epoch", background=True)
        elif self._saver.due and loop.mode == "exact":
            self._save(trainer, "periodic", background=True)

    def settle(self) -> None:
        """Wait for a state being written: loader workers must not be forked meanwhile."""
        self._saver.collect(wait=True)

    def before_final(self, trainer: Any) -> None:
        """Only the final evaluation is left."""
        if trainer.gpuwarden.mode == "exact":
            self._save(trainer, "final", background=False)

    # -- inside

    def _margin(self) -> float:
        """Seconds to keep for one more step and a save before a deadline."""
        return 2.0 + 2.0 * self._saver.stall_seconds

    def _save_and_continue(self, trainer: Any, decision_id: str, *, epoch_ended: bool) -> None:
        if trainer.gpuwarden.mode != "exact" and not epoch_ended:
            return  # at the end of the epoch
        self._answer(RequestState.SAVING)
        if self._save(trainer, "request", background=True):
            self._record = self._record.having_answered(decision_id)
            self._write_record()
            self.watch.answer(decision_id)

    def _answer(self, state: RequestState) -> None:
        request = self.watch.request()
        if request is not None:
            self.board.answered(request.decision_id, state)

    def _save(self, trainer: Any, reason: str, *, background: bool = False) -> bool:
        from gpuwarden.trainer import captures  # noqa: PLC0415 -- needs torch

        loop = trainer.gpuwarden
        position: Position = loop.position
        batches = len(trainer.train_loader)
        at_end = position.batch == batches
        draft = Manifest(
            lineage=self._record.lineage,
            epoch=position.epoch,
            batch=position.batch,
            validated=position.validated,
            step=position.epoch * batches + position.batch,
            batches=batches,
            epochs=trainer.epochs,
            batch_size=trainer.batch_size,
            dataset=loop.dataset,
            order=loop.order,
            exact=loop.mode == "exact",
            reason=reason,
            time=self.clock.wall(),
            software=_software(),
        )
        return self._saver.save(
            position,
            capture=lambda: captures.capture(
                trainer,
                position,
                last_optimizer_step=loop.last_step,
                current_step=trainer.gpuwarden_step(),
                random_state=loop.end_random if at_end else None,
                stream=trainer.train_loader.stream(position.epoch, position.batch),
                elapsed=time.time() - trainer.train_time_start,
            ),
            draft=draft,
            background=background,
        )

    def _figures(self, trainer: Any) -> None:
        """Look up what costs something to look up: once per written status."""
        import torch  # noqa: PLC0415 -- loaded long ago

        losses = trainer.label_loss_items(trainer.tloss) if trainer.tloss else {}
        self.board.figures(
            losses={name.rpartition("/")[2]: value for name, value in losses.items()},
            lr={f"pg{at}": group["lr"] for at, group in enumerate(trainer.optimizer.param_groups)},
        )
        if trainer.scaler.is_enabled():
            self.board.set(amp_scale=float(trainer.scaler.get_scale()))
        if trainer.device.type == "cuda":
            self.board.set(gpu_memory_peak=torch.cuda.max_memory_allocated(trainer.device))


def _named_class(name: str | type | None) -> type | None:
    """The class that `MODULE:CLASS` names.

    Raises:
        InvalidInput: there is none.
    """
    if name is None or isinstance(name, type):
        return name
    module, _, attribute = name.partition(":")
    if str(Path.cwd()) not in sys.path:  # a command's own folder is there, the user's is not
        sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise InvalidInput(f"trainer {name!r}: {error}; write MODULE:CLASS") from error
    if not isinstance(found, type):
        raise InvalidInput(f"trainer {name!r} is not a class")
    return found


def _software() -> dict[str, str]:
    versions = {"gpuwarden": __version__}
    for name in ("torch", "ultralytics"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "unknown"
    return versions


def prepare_offline() -> None:
    """With YOLO_OFFLINE=1, spare ultralytics the one look-up it would still make: for a font.

    It asks the network for Arial when neither its own folder nor the system has it; a copy of
    matplotlib's DejaVu Sans under that name in ultralytics' folder answers it.
    """
    if os.environ.get("YOLO_OFFLINE", "").lower() not in ("1", "true"):
        return
    import matplotlib as mpl  # noqa: PLC0415 -- comes with ultralytics
    from ultralytics.utils import USER_CONFIG_DIR  # noqa: PLC0415

    font = Path(USER_CONFIG_DIR) / "Arial.ttf"
    source = Path(mpl.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"
    if not font.exists() and source.exists():
        try:
            shutil.copyfile(source, font)
        except OSError as error:
            log.warning("cannot write %s (%s): ultralytics may look for it online", font, error)
