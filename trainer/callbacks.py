"""The hooks that gpuwarden mixes into a task's trainer class, on top of whatever it does itself.

Ultralytics' loop is used as it is. Its accumulation counter and batch index are locals that no hook
can reach: they are made to follow by handing stand-in batches to a stand-in model on resume, and by
gating each optimizer step through `accumulate`.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path, PosixPath
from typing import TYPE_CHECKING, Any

from gpuwarden.errors import InvalidInput
from gpuwarden.trainer import (
    captures,
    comparisons,
    loggers,
    measuring,
    orders,
    parallel,
    resume,
)
from gpuwarden.trainer.leaving import Leave, QuietWorker
from gpuwarden.trainer.loaders import TrainLoader
from gpuwarden.trainer.states import Position

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gpuwarden.trainer.sessions import Session

    class _Host:
        """What the hooks rely on of ultralytics' BaseTrainer."""

        args: Any
        model: Any
        device: Any
        accumulate: int
        epoch: int
        epochs: int
        start_epoch: int
        batch_size: int
        world_size: int
        stop: bool
        loss: Any
        loss_items: Any
        tloss: Any
        metrics: Any
        fitness: Any
        optimizer: Any
        scaler: Any
        callbacks: dict[str, list[Any]]
        save_dir: Path
        wdir: Path
        last: Path
        best: Path
        train_loader: Any
        train_time_start: float

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...
        def run_callbacks(self, event: str) -> None: ...
        def get_dataset(self) -> Any: ...
        def build_dataset(self, *args: Any, **kwargs: Any) -> Any: ...
        def get_dataloader(self, *args: Any, **kwargs: Any) -> Any: ...
        def _setup_train(self) -> None: ...
        def build_optimizer(self, *args: Any, **kwargs: Any) -> Any: ...
        def _build_train_pipeline(self) -> None: ...
        def resume_training(self, ckpt: Any) -> None: ...
        def preprocess_batch(self, batch: Any) -> Any: ...
        def optimizer_step(self) -> None: ...
        def plot_training_samples(self, batch: Any, ni: int) -> None: ...
        def validate(self) -> Any: ...
        def save_metrics(self, *args: Any, **kwargs: Any) -> None: ...
        def _handle_nan_recovery(self, epoch: int) -> bool: ...
        def label_loss_items(self, items: Any = None, prefix: str = "train") -> Any: ...
        def final_eval(self) -> None: ...
else:
    _Host = object

_NO_DATASET = (FileNotFoundError, ConnectionError, SyntaxError, ValueError)
"""With which ultralytics refuses a description of a data set."""
_NEVER = 1 << 60
"""An accumulation that no batch number reaches."""


def _nothing(_: Any) -> None:
    pass


@dataclass(slots=True)
class LoopState:
    """Where ultralytics' loop is, as far as gpuwarden must know it."""

    mode: str = resume.NONE
    order: str = ""
    dataset: str = ""
    epoch: int = 0
    batch: int = -1
    """Of the epoch: the one in training, or trained on last."""
    last: int = -1
    """The epoch's last one."""
    before: int = 0
    """Batches of all epochs before this one."""
    settled: Position | None = None
    """Where the training is, if it is not within an epoch's batches."""
    last_step: int = -1
    gating: bool = False
    """Until its first optimizer step, a resumed loop counts from another one than `last_step`."""
    accumulate: int = 1
    losses: list[Any] = field(default_factory=list)
    """Components of the loss of each batch that was trained on and has not been counted yet."""
    live: bool = False
    """The state is that of the training: what is saved now can be continued."""
    final: bool = False
    ended: dict[str, Any] | None = None
    """`captures.after_last_batch`: what follows must not show in a state from before validation."""
    resumed: dict[str, Any] | None = None
    """The state that this attempt continues."""
    model: Any = None
    """The model while the stand-in plays it."""
    replay_began: float = 0.0
    gradient_norm: Any = None
    """Of the newest optimizer step, where it is asked for."""
    run_callbacks: Callable[[str], None] = _nothing
    """The base class's own."""
    boundary: Callable[[Any], None] = _nothing
    """What is done between two batches, once it is time to look."""
    look_at: float = float("-inf")
    """When that is, of `time.monotonic`: the cheapest clock, good enough for the next second."""

    @property
    def position(self) -> Position:
        """Where the training is, between two batches or beyond them."""
        return self.settled or Position(self.epoch, self.batch + 1)


class Hooks(_Host):
    """Mixed in before a trainer class; `gpuwarden_session` is set by `trainer_class`."""

    gpuwarden_session: Session

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        session = self.gpuwarden_session
        # Found once: for each batch they would be looked up anew, with cold caches.
        self.gpuwarden = LoopState(
            run_callbacks=super().run_callbacks, boundary=session.boundaries.after_batch
        )
        session.adopt(self)
        try:
            super().__init__(*args, **kwargs)
        except ValueError as error:
            if "'device=" not in str(error):
                raise
            raise resume.no_device(self.args.device, error) from error
        world = session.team.place.world
        if world > 1:
            parallel.prepare(self, world)
        elif self.world_size > 1:
            raise resume.several_devices(f"device={self.args.device}")
        self.gpuwarden.mode, reason = resume.mode_for(self, session.settings.data_order)
        self.wdir, self.last, self.best = (
            AtomicPath(path) for path in (self.wdir, self.last, self.best)
        )
        self.callbacks.setdefault("on_val_batch_end", []).append(self._after_val_batch)
        session.started(self, reason)

    def __getstate__(self) -> dict[str, Any]:
        """Trainers are not pickled: gpuwarden launches no ranks, and the session has locks."""
        raise TypeError("a gpuwarden trainer cannot be pickled")

    # -- events

    def run_callbacks(self, event: str) -> None:
        """Ultralytics' and the user's callbacks, between gpuwarden's own steps."""
        # Twice a batch, and then with caches that the model has left cold: each call is dear.
        loop = self.gpuwarden
        if event == "on_train_batch_start":
            loop.batch += 1
            if not (loop.gating and self._plays_stand_in()):
                loop.run_callbacks(event)
            return
        if event == "on_train_batch_end":
            if loop.gating and self._ungate():
                return
            loop.losses.append(self.loss_items)
            if loop.batch == loop.last:
                self._after_last_batch()
            loop.run_callbacks(event)
            if time.monotonic() >= loop.look_at:
                loop.boundary(self)
            return
        self._run_others(event)

    def _run_others(self, event: str) -> None:
        if event == "teardown":
            self._before_teardown()
        with self._beside_loggers() if event == "on_pretrain_routine_end" else nullcontext():
            self.gpuwarden.run_callbacks(event)
        if event == "on_train_start":
            self._before_training()
        elif event == "on_train_epoch_start":
            self._before_epoch()
        elif event == "on_fit_epoch_end":
            self._after_epoch()

    def _before_teardown(self) -> None:
        session = self.gpuwarden_session
        if isinstance(sys.exc_info()[1], Leave):
            with session.watch.shielded():
                session.save_to_leave()
        if session.boundaries.must_leave():
            loggers.leaving()

    @contextmanager
    def _beside_loggers(self) -> Iterator[None]:
        session = self.gpuwarden_session
        with loggers.one_run(session.record) as noted:
            yield
        if noted != session.record.loggers:
            session.note(loggers=noted)

    def _before_training(self) -> None:
        loop = self.gpuwarden
        if loop.resumed is not None and not self.args.time:
            self.train_time_start -= loop.resumed["elapsed"]  # results.csv goes on counting
        self.gpuwarden_session.training_begins(self)

    def _before_epoch(self) -> None:
        loop = self.gpuwarden
        self.gpuwarden_count()  # what is left of the epoch before
        loop.epoch, loop.batch = self.epoch, -1
        batches = len(self.train_loader)
        loop.last, loop.before = batches - 1, batches * self.epoch
        loop.ended = loop.settled = None
        if self._skips():
            # Halving the batch for lack of memory would start this epoch over: fail instead.
            self._oom_retries = 3
        self.gpuwarden_session.board.set(epoch=self.epoch)
        self.gpuwarden_session.board.enter("train")

    def _skips(self) -> bool:
        loop = self.gpuwarden
        return bool(loop.resumed and loop.resumed["batch"] and not loop.live)

    def _plays_stand_in(self) -> bool:
        """Whether the batch about to begin is a stand-in, of which others are not to hear."""
        loop = self.gpuwarden
        if loop.batch == 0 and loop.resumed and self._skips():
            loop.replay_began = time.monotonic()
            loop.model = self.model
            self.model = captures.StandIn(loop.resumed["loss_names"], self.device)
        return loop.model is not None

    def _ungate(self) -> bool:
        """Give the loop its own accumulation back; returns whether the batch was a stand-in."""
        loop = self.gpuwarden
        self.accumulate = loop.accumulate
        if loop.model is None:
            if loop.last_step == self.gpuwarden_step():
                self._gate(active=False)
            return False
        state = loop.resumed
        if state is not None and loop.batch + 1 == state["batch"]:
            self.model, loop.model = loop.model, None
            captures.restore_losses(self, state)
            self.accumulate = state["accumulate"]
            self.gpuwarden_session.board.pulse.replay += time.monotonic() - loop.replay_began
        return True

    def _after_last_batch(self) -> None:
        self.gpuwarden_count()
        if self.gpuwarden.mode == resume.EXACT:
            self.gpuwarden.ended = captures.after_last_batch(self)

    def _after_epoch(self) -> None:
        loop = self.gpuwarden
        if loop.final or self.epoch >= self.epochs:
            return  # comes once more, from the final evaluation
        session = self.gpuwarden_session
        session.validated(self)
        agreed = session.boundaries.epoch_ended(self)  # which rank 0 alone knows
        if agreed.stop:
            loop.settled = Position(self.epoch, len(self.train_loader), validated=True)
        else:
            loop.settled = Position(self.epoch + 1, 0)
            loop.ended = None
            session.boundaries.after_epoch(self, agreed)

    def _after_val_batch(self, validator: Any) -> None:
        self.gpuwarden_session.boundaries.in_validation(validator.batch_i)

    # -- data

    def get_dataset(self) -> Any:
        """The data set's description; scanning may take long, and is a phase of its own."""
        with self.gpuwarden_session.board.during("scan"):
            try:
                return super().get_dataset()
            except RuntimeError as error:
                if isinstance(error.__cause__, _NO_DATASET):
                    raise resume.no_dataset(str(self.args.data), error.__cause__) from error
                raise

    def build_dataset(self, *args: Any, **kwargs: Any) -> Any:
        """The data set, made stateless for training if that order was chosen."""
        session, loop = self.gpuwarden_session, self.gpuwarden
        with session.board.during("scan"):
            dataset = super().build_dataset(*args, **kwargs)
        mode = kwargs.get("mode", args[1] if len(args) > 1 else "train")
        if mode != "train" or loop.mode != resume.EXACT:
            return dataset
        if not is_known(dataset):
            session.degrade(self, f"data sets of class {type(dataset).__name__} are not known")
        elif session.settings.data_order == "stateless":
            shuffle = not _keeps_order(dataset)
            order = orders.EpochOrder(len(dataset), self.args.seed, shuffle=shuffle)
            return orders.StatelessDataset(dataset, order, self.args.seed)
        return dataset

    def get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """The loader, whose workers ignore our signals; for training, measured and resumable."""
        session, loop = self.gpuwarden_session, self.gpuwarden
        loader = super().get_dataloader(*args, **kwargs)
        if hasattr(loader, "worker_init_fn"):
            loader.worker_init_fn = QuietWorker(loader.worker_init_fn)
        mode = kwargs.get("mode", args[3] if len(args) > 3 else "train")
        if mode != "train":
            if loop.mode == resume.EXACT and self.args.task == "classify":
                orders.keep_order(loader)
            return loader
        loop.dataset = orders.fingerprint(loader.dataset)
        wrapped = TrainLoader(
            loader,
            epoch=lambda: getattr(self, "epoch", 0),  # also iterated before training
            board=session.board,
            watch=session.watch,
            settle=session.settle,
            place=session.team.place,
        )
        loop.order = ""
        if loop.mode == resume.EXACT:
            if not is_plain_loader(loader):
                session.degrade(self, f"loaders of class {type(loader).__name__} are not known")
            elif isinstance(loader.dataset, orders.StatelessDataset):
                wrapped.follow_stateless()
                loop.order = orders.STATELESS
            elif loader.num_workers:
                session.degrade(self, "data order ultralytics with loader workers")
            else:
                wrapped.follow_recorded()
                loop.order = orders.ULTRALYTICS
        return wrapped

    def _setup_ddp(self) -> None:
        parallel.use_device(self)

    def _setup_train(self) -> None:
        with parallel.on_cpu_too(self):
            super()._setup_train()

    def build_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """The optimizer; one that there is not is a wrong word."""
        try:
            return super().build_optimizer(*args, **kwargs)
        except NotImplementedError as error:
            said = str(error).partition(". ")[0]
            raise InvalidInput(f"optimizer={self.args.optimizer}: {said}") from error

    def _build_train_pipeline(self) -> None:
        self.gpuwarden.last_step = -1  # as the loop's own: also after a batch size was halved
        super()._build_train_pipeline()

    # -- resume

    def resume_training(self, ckpt: Any) -> None:
        """Continue gpuwarden's newest state; without one, whatever ultralytics was told."""
        loop, session = self.gpuwarden, self.gpuwarden_session
        found = session.load_state(self)
        if found is None:
            super().resume_training(ckpt)
            return
        try:
            with session.watch.shielded():
                state = comparisons.restore(self, found)
        except (KeyError, RuntimeError, ValueError) as error:
            raise resume.other_model(error) from error
        if state is None:
            return
        loop.resumed = state
        self._gate(active=loop.mode == resume.EXACT)
        self.start_epoch = state["epoch"]
        if loop.mode != resume.EXACT or found.kind == comparisons.EPOCH:
            loop.last_step = state["epoch"] * len(self.train_loader) - 1
            generator = getattr(self.train_loader, "generator", None)
            if generator is not None:  # else the first epoch's order would come again
                generator.manual_seed(self.args.seed + state["epoch"])
            return
        loop.last_step = state["last_optimizer_step"]
        closing = bool(
            self.args.close_mosaic
            and not state["batch"]
            and state["epoch"] == self.epochs - self.args.close_mosaic
        )
        self.train_loader.resume_at(state, closing=closing, ready=self._go_live)

    def _go_live(self) -> None:
        """The data stands at the state's batch: put back what must be exact right there."""
        loop = self.gpuwarden
        state = loop.resumed
        if state is None:
            return
        if not state["batch"]:
            self.accumulate = state["accumulate"]
        captures.restore_live(self, state)
        if state["validated"]:
            loop.settled = Position(state["epoch"], state["batch"], validated=True)
        if state["batch"] == len(self.train_loader):
            loop.ended = {part: state[part] for part in ("random", "criterion")}
        loop.live = True

    # -- the step

    def _gate(self, *, active: bool) -> None:
        self.gpuwarden.gating = active
        # Only for as long as it is needed: no call in between costs nothing.
        if active:
            vars(self)["preprocess_batch"] = self._gated
        else:
            vars(self).pop("preprocess_batch", None)

    def _gated(self, batch: Any) -> Any:
        """In place of `preprocess_batch`: the loop's condition for a step follows `last_step`."""
        loop = self.gpuwarden
        loop.accumulate = self.accumulate
        if captures.STAND_IN in batch:
            self.accumulate = _NEVER
            return batch
        batch = super().preprocess_batch(batch)
        due = self.gpuwarden_step() - loop.last_step >= self.accumulate
        self.accumulate = 0 if due else _NEVER
        return batch

    def gpuwarden_step(self) -> int:
        """Number of the current batch in the whole run, from 0."""
        return self.gpuwarden.before + self.gpuwarden.batch

    def gpuwarden_count(self) -> None:
        """Count the batches that were trained on since this was called last."""
        loop, pulse = self.gpuwarden, self.gpuwarden_session.board.pulse
        if not loop.losses:
            return
        loop.live = True
        pulse.images = pulse.drawn  # no batch is drawn before the one before it is done
        pulse.steps += len(loop.losses)
        pulse.step = self.gpuwarden_step() + 1
        pulse.nonfinite += measuring.nonfinite(self.tloss, loop.losses)
        loop.losses.clear()

    def optimizer_step(self) -> None:
        """One step of the optimizer, noted."""
        loop = self.gpuwarden
        if self.gpuwarden_session.settings.gradient_norm:
            with measuring.clipping() as norms:
                super().optimizer_step()
            loop.gradient_norm = norms[-1] if norms else None
        else:
            super().optimizer_step()
        loop.last_step = loop.before + loop.batch
        self.gpuwarden_session.board.pulse.optimizer_steps += 1

    def plot_training_samples(self, batch: Any, ni: int) -> None:
        """Not for stand-ins."""
        if captures.STAND_IN not in batch:
            super().plot_training_samples(batch, ni)

    def _handle_nan_recovery(self, epoch: int) -> bool:
        recovered = super()._handle_nan_recovery(epoch)
        if recovered:
            self.gpuwarden.last_step = -1  # as the loop's own
            self.gpuwarden_session.rewound()
        return recovered

    # -- validation

    def _only_final(self) -> dict[str, Any] | None:
        """The state, if all that it leaves to do is the final evaluation."""
        state = self.gpuwarden.resumed
        if state and state["validated"] and self.epoch == state["epoch"]:
            return state
        return None

    def validate(self) -> Any:
        """Validate, as a phase; not again what the state says was done."""
        state = self._only_final()
        if state is not None:
            return dict(state["metrics"]), state["fitness"]
        self.gpuwarden_session.settle()  # the first validation forks its loader's workers
        # Samples of the validation draw from this process's generators, or from workers' own: in
        # an order that does not depend on the number of workers, training must not notice.
        kept = orders.get_randomness() if self.gpuwarden.order == orders.STATELESS else None
        try:
            with self.gpuwarden_session.board.during("validate"):
                return super().validate()
        finally:
            if kept is not None:
                orders.set_randomness(kept)

    def save_metrics(self, *args: Any, **kwargs: Any) -> None:
        """Append to results.csv, unless the row is there."""
        if self._only_final() is None:
            super().save_metrics(*args, **kwargs)

    def final_eval(self) -> None:
        """The final evaluation, from a state that needs only this to be done again."""
        loop, session = self.gpuwarden, self.gpuwarden_session
        loop.final = True
        session.before_final(self)
        on_its_device = parallel.evaluated_on_cpu(self)
        with session.board.during("validate"), _atomic_stripping(), on_its_device:
            super().final_eval()


def trainer_class(base: type, session: Session) -> type:
    """A trainer class that does what `base` does, under gpuwarden.

    Args:
        base: a subclass of ultralytics' BaseTrainer.
        session: the attempt.
    """
    return type(
        f"Gpuwarden{base.__name__}",
        (Hooks, base),
        {"gpuwarden_session": session, "__module__": base.__module__},
    )


def is_known(dataset: Any) -> bool:
    """Whether the data set is one of ultralytics' own, whose random choices are known."""
    from ultralytics.data.dataset import ClassificationDataset, YOLODataset

    return type(dataset) in (YOLODataset, ClassificationDataset)


def is_plain_loader(loader: Any) -> bool:
    """Whether the loader keeps its iterator as ultralytics' does."""
    from ultralytics.data.build import InfiniteDataLoader

    return isinstance(loader, InfiniteDataLoader)


def _keeps_order(dataset: Any) -> bool:
    """Rectangular training keeps the data set's order, unless all batches have one shape."""
    if not getattr(dataset, "rect", False):
        return False
    return bool((dataset.batch_shapes != dataset.batch_shapes[0]).any())


class AtomicPath(PosixPath):
    """A path whose content is replaced in one step: last.pt is the old one or the new one."""

    def write_bytes(self, data: Any) -> int:
        """Write, wait for the disk, rename."""
        temporary = self.with_name(f".{self.name}.tmp")
        with temporary.open("wb") as file:
            written = file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self)
        return written


@contextmanager
def _atomic_stripping() -> Iterator[None]:
    """Within, ultralytics' final stripping of last.pt and best.pt replaces them in one step."""
    module: Any = importlib.import_module("ultralytics.engine.trainer")
    strip = module.strip_optimizer

    def strip_beside(path: Any, s: str = "", **kwargs: Any) -> Any:
        if s or not Path(path).exists():
            return strip(path, s, **kwargs)
        stripped = Path(path).with_name(f".{Path(path).name}.tmp")
        result = strip(path, str(stripped), **kwargs)
        if stripped.exists():
            with stripped.open("rb") as file:
                os.fsync(file.fileno())
            stripped.replace(path)
        return result

    module.strip_optimizer = strip_beside
    try:
        yield
    finally:
        module.strip_optimizer = strip
