"""Side by side with plain ultralytics: what gpuwarden's hooks and its data order cost.

The hooks are timed from both sides: the loop's calls into them, and their calls of what ultralytics
does itself. What lies between is CPU time of the training thread that gpuwarden adds, and what the
meter takes itself. The latter is as large, for both run upon caches that a step of the model has
left cold; so plain ultralytics is trained under the same meter too, with nothing between its two
sides, and what that shows is subtracted.

Drawing a batch counts as loading, and all else that is done for one as the wrapper.
"""

from __future__ import annotations

import importlib
import os
import statistics
import time
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image

from gpuwarden.trainer import attach, orders
from gpuwarden.trainer.leaving import QuietWorker
from gpuwarden.trainer.ranks import Place

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    class _Host:
        """What is used of ultralytics' BaseTrainer."""

        gpuwarden_meter: Meter
        loader_workers: int
        args: Any

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...
        def run_callbacks(self, event: str) -> None: ...
        def preprocess_batch(self, batch: Any) -> Any: ...
        def optimizer_step(self) -> None: ...
        def validate(self) -> Any: ...
        def save_metrics(self, *args: Any, **kwargs: Any) -> None: ...
        def get_dataloader(self, *args: Any, **kwargs: Any) -> Any: ...
else:
    _Host = object

WRAPPER_MICROSECONDS = 20.0
WRAPPER_SHARE = 0.01
LOADING_LOSS = 0.15

KINDS = (("ultralytics", 0), ("stateless", 0), ("stateless", 2))
"""Data orders, with so many loader workers."""

OURS, THEIRS = "ours", "theirs"
_BATCH = 16
_PICTURES = 400
_WARM_BATCHES = 24
"""As many as an epoch of the pictures has: before, images come from no memory."""
_END = object()


class Meter:
    """CPU time of this thread, ours and ultralytics' apart, however they call each other."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        """Nanoseconds of ours, by batch."""
        self.epochs = 0
        """Nanoseconds of ours within epochs, validation and all that ends them included."""
        self._total = self._before_batch = self._before_epoch = 0
        self._owners = [THEIRS]
        self._last = time.thread_time_ns()

    def call(self, owner: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call it, on our account or on ultralytics'."""
        self._switch()
        self._owners.append(owner)
        try:
            return function(*args, **kwargs)
        finally:
            self._switch()
            self._owners.pop()

    def _switch(self) -> None:
        now = time.thread_time_ns()
        if self._owners[-1] == OURS:
            self._total += now - self._last
        self._last = now

    def event(self, name: str) -> None:
        """An event of the loop is over."""
        if name == "on_train_epoch_start":
            self._before_epoch = self._before_batch = self._total
        elif name == "on_train_batch_end":
            self.batches.append(self._total - self._before_batch)
            self._before_batch = self._total
        elif name == "on_fit_epoch_end":
            self.epochs += self._total - self._before_epoch
            self._before_epoch = self._total

    def ours(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, on our account."""

        def called(*args: Any, **kwargs: Any) -> Any:
            return self.call(OURS, function, *args, **kwargs)

        return called

    def items(self, owner: str, source: Any) -> Iterator[Any]:
        """The source's items, drawn on our account or on ultralytics'."""
        iterator = iter(source)
        while (item := self.call(owner, next, iterator, _END)) is not _END:
            yield item


class _MeteredLoader:
    """A loader whose own work is measured."""

    def __init__(self, loader: Any, meter: Meter) -> None:
        self._loader, self._meter = loader, meter

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        return self._meter.items(OURS, self._loader)


class _WithWorkers(_Host):
    """On the CPU too, where ultralytics would take none."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.args.workers = self.loader_workers


class _Metered(_WithWorkers):
    """Below gpuwarden's hooks, if there are any: ends their account.

    Above them, it begins by attributes.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        meter = self.gpuwarden_meter
        # Found before the methods of the class, so that the loop's calls come here first.
        above: Any = self
        for name in (
            *("preprocess_batch", "optimizer_step", "validate", "save_metrics"),
            "_after_val_batch",
        ):
            if hasattr(above, name):
                setattr(above, name, meter.ours(getattr(above, name)))
        hooks, load = above.run_callbacks, above.get_dataloader

        def run_callbacks(event: str) -> None:
            meter.call(OURS, hooks, event)
            meter.event(event)

        def get_dataloader(*args: Any, **kwargs: Any) -> Any:
            loader = load(*args, **kwargs)
            mode = kwargs.get("mode", args[3] if len(args) > 3 else "train")
            return _MeteredLoader(loader, meter) if mode == "train" else loader

        above.run_callbacks, above.get_dataloader = run_callbacks, get_dataloader

    def run_callbacks(self, event: str) -> None:
        self.gpuwarden_meter.call(THEIRS, super().run_callbacks, event)

    def preprocess_batch(self, batch: Any) -> Any:
        return self.gpuwarden_meter.call(THEIRS, super().preprocess_batch, batch)

    def optimizer_step(self) -> None:
        self.gpuwarden_meter.call(THEIRS, super().optimizer_step)

    def validate(self) -> Any:
        return self.gpuwarden_meter.call(THEIRS, super().validate)

    def save_metrics(self, *args: Any, **kwargs: Any) -> None:
        self.gpuwarden_meter.call(THEIRS, super().save_metrics, *args, **kwargs)

    def get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        loader: Any = super().get_dataloader(*args, **kwargs)
        meter, plain = self.gpuwarden_meter, type(loader)

        def items(self: Any) -> Iterator[Any]:
            return meter.items(THEIRS, plain.__iter__(self))

        loader.__class__ = type(plain.__name__, (plain,), {"__iter__": items})
        return loader


@dataclass(slots=True)
class Epochs:
    """How long the epochs of trainings take, their validation included; the first is left out."""

    seconds: list[float] = field(default_factory=list)
    _began: float | None = None

    def begin(self, trainer: Any) -> None:
        """Callback of an epoch's start."""
        self._began = time.perf_counter() if trainer.epoch else None

    def end(self, _trainer: Any) -> None:
        """Callback of its end, which comes once more after the final evaluation."""
        if self._began is not None:
            self.seconds.append(time.perf_counter() - self._began)
        self._began = None

    def train(self, model: Any, trainer: type, words: dict[str, Any]) -> None:
        """Train the model, and note its epochs."""
        model.add_callback("on_train_epoch_start", self.begin)
        model.add_callback("on_fit_epoch_end", self.end)
        model.train(trainer=trainer, **words)


def wrapper(
    folder: Path,
    words: dict[str, Any],
    *,
    rounds: int,
    kinds: Sequence[tuple[str, int]] = KINDS,
) -> tuple[str, list[str]]:
    """Table of the hooks' cost, and what misses its target.

    Args:
        folder: for the job files.
        words: of a training of a few epochs.
        rounds: trainings of each kind, in turn.
        kinds: see `KINDS`.
    """
    ultralytics: Any = importlib.import_module("ultralytics")
    base = importlib.import_module("ultralytics.models.yolo.detect").DetectionTrainer
    table = (
        "| wrapper, per batch | workers | median us | p90 us | mean us | "
        "median us of the meter itself | share of an epoch | plain epoch s | ours s | target |\n"
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|---|\n"
    )
    missed = []
    others = {key: value for key, value in words.items() if key != "model"}
    for order, workers in kinds:
        meters = {"metered": Meter(), "empty": Meter()}
        epochs = {kind: Epochs() for kind in ("plain", "ours", *meters)}
        for number in range(rounds):
            for kind, noted in epochs.items():
                own: dict[str, Any] = {"loader_workers": workers}
                if kind in meters:
                    trainer = type(kind, (_Metered, base), {**own, "gpuwarden_meter": meters[kind]})
                else:
                    trainer = type(kind, (_WithWorkers, base), own)
                model = ultralytics.YOLO(words["model"])
                run_id = f"{words['name']}-{order}-{workers}-{kind}-{number}"
                if kind in ("ours", "metered"):
                    attach(model, run_id=run_id, jobs_directory=folder, data_order=order)
                noted.train(model, trainer, {**others, "name": run_id})
        whole, ours = (statistics.median(epochs[kind].seconds) for kind in ("plain", "ours"))
        ours_us, meters_us = (_Spread.of(meters[kind].batches) for kind in ("metered", "empty"))
        net = meters["metered"].epochs - meters["empty"].epochs
        share = net / 1e9 / (words["epochs"] * rounds) / whole
        median = ours_us.median - meters_us.median
        table += (
            f"| {order} | {workers} | {median:.1f} | {ours_us.most - meters_us.median:.0f} | "
            f"{ours_us.mean - meters_us.mean:.1f} | {meters_us.median:.1f} | {share:.2%} | "
            f"{whole:.3f} | {ours:.3f} | "
            f"{WRAPPER_MICROSECONDS:.0f} us, {WRAPPER_SHARE:.0%} |\n"
        )
        if median > WRAPPER_MICROSECONDS:
            missed.append(f"wrapper, {order}, {workers} workers: {median:.1f} us a batch")
        if share > WRAPPER_SHARE:
            missed.append(f"wrapper, {order}, {workers} workers: {share:.2%} of an epoch")
    return table, missed


@dataclass(frozen=True, slots=True)
class _Spread:
    """Of some durations, in microseconds: `most` is what nine of ten do not exceed."""

    median: float
    most: float
    mean: float

    @classmethod
    def of(cls, nanoseconds: list[int]) -> _Spread:
        micro = sorted(taken / 1e3 for taken in nanoseconds)
        return cls(statistics.median(micro), micro[int(len(micro) * 0.9)], statistics.fmean(micro))


def loading(folder: Path, *, rounds: int, batches: int) -> tuple[str, list[str]]:
    """Table of what the data order costs on one core, and what misses its target.

    Args:
        folder: is made, for pictures like a photograph's in size.
        rounds: of each loader, in turn.
        batches: timed in a round, after those that fill the caches.
    """
    data = _draw(folder)
    table = (
        f"| loading, batches of {_BATCH} per CPU second | workers | ultralytics | stateless | "
        "slower | target |\n|---|--:|--:|--:|--:|--:|\n"
    )
    missed = []
    with _one_core(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")  # more than cores: meant
        for workers in (0, 2, 4):
            rates: dict[bool, list[float]] = {False: [], True: []}
            for number in range(rounds):
                for stateless in (False, True) if number % 2 else (True, False):
                    loader = _loader(data, workers, stateless=stateless)
                    rates[stateless].append(_rate(loader, batches))
                    loader.close()
            plain, ours = (statistics.median(rates[stateless]) for stateless in (False, True))
            slower = 1 - ours / plain
            table += (
                f"| one core | {workers} | {plain:.2f} | {ours:.2f} | {slower:.1%} | "
                f"{LOADING_LOSS:.0%} |\n"
            )
            if slower > LOADING_LOSS:
                missed.append(f"loading, {workers} workers: {slower:.1%} slower")
    return table, missed


def _rate(loader: Any, batches: int) -> float:
    """Batches per second of CPU time, once the caches of all workers are full.

    On one core that has nothing else to do it is what a clock on the wall would show; on a machine
    that does other work it still is.
    """
    endless = chain.from_iterable(repeat(loader))
    for _ in range(_WARM_BATCHES):
        next(endless)
    workers = [worker.pid for worker in getattr(loader.iterator, "_workers", ())]
    began = _cpu_seconds(workers)
    for _ in range(batches):
        next(endless)
    return batches / (_cpu_seconds(workers) - began)


def _cpu_seconds(workers: list[int]) -> float:
    """That this process and its loader workers have used."""
    ticks = 0
    for pid in workers:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def _loader(data: dict[str, Any], workers: int, *, stateless: bool) -> Any:
    """As ultralytics builds it where there are as many cores as workers."""
    build: Any = importlib.import_module("ultralytics.data.build")
    settings: Any = importlib.import_module("ultralytics.cfg").get_cfg()
    dataset = build.build_yolo_dataset(settings, data["train"], _BATCH, data, mode="train")
    if stateless:
        dataset = orders.StatelessDataset(dataset, orders.EpochOrder(len(dataset), 0), 0)
    generator = torch.Generator()
    generator.manual_seed(0)
    loader = build.InfiniteDataLoader(
        dataset=dataset,
        batch_size=_BATCH,
        shuffle=True,
        num_workers=workers,
        prefetch_factor=4 if workers else None,
        collate_fn=dataset.collate_fn,
        worker_init_fn=QuietWorker(build.seed_worker) if stateless else build.seed_worker,
        generator=generator,
    )
    if stateless:
        orders.use_stateless(loader, Place())
    return loader


def _draw(folder: Path) -> dict[str, Any]:
    """A data set of JPEGs of 640x480 and about 100 kB, read by ultralytics."""
    random = np.random.default_rng(0)
    for kind in ("images", "labels"):
        (folder / kind).mkdir(parents=True)
    for number in range(_PICTURES):
        rough = Image.fromarray(random.integers(0, 256, (30, 40, 3), dtype=np.uint8))
        picture = np.asarray(rough.resize((640, 480), Image.Resampling.BICUBIC), dtype=np.int16)
        grain = random.integers(-12, 13, picture.shape, dtype=np.int16)
        whole = Image.fromarray((picture + grain).clip(0, 255).astype(np.uint8))
        whole.save(folder / "images" / f"{number:05d}.jpg", quality=85)
        boxes = random.uniform(0.3, 0.5, (7, 4))
        lines = ("0 " + " ".join(f"{value:.4f}" for value in box) for box in boxes)
        (folder / "labels" / f"{number:05d}.txt").write_text("\n".join(lines), "utf-8")
    description = folder / "data.yaml"
    description.write_text(
        f"path: {folder}\ntrain: images\nval: images\nnames:\n  0: thing\n", "utf-8"
    )
    read: Any = importlib.import_module("ultralytics.data.utils").check_det_dataset
    data: dict[str, Any] = read(str(description))
    return data


@contextmanager
def _one_core() -> Iterator[None]:
    """Within, this process and its loader workers share one core."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(allowed)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)
