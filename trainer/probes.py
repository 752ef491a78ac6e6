"""Twenty steps of a real training at two batch sizes: what it needs on this very device.

Ultralytics' own trainer runs, with its loss, optimizer, EMA and loaders, in a folder that is thrown
away; the training is left from a callback as soon as enough steps were seen. Two batch sizes give
what a step costs at all, and what each image adds.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import logging
import os
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuwarden.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gpuwarden.estimates import Workload

STEPS = 20
WARM_UP_STEPS = 3
"""The first steps choose kernels and fill caches."""
_LOADED_IMAGES = 32
_OBJECTS = 8


@dataclass(frozen=True, slots=True)
class Trial:
    """Some steps at one batch size.

    Attributes:
        batch: images per step.
        step_seconds: median, from the batch's arrival to the end of its step.
        wait_seconds: median wait for the next batch.
        memory: most bytes that torch had reserved, or None on a device that it does not count.
    """

    batch: int
    step_seconds: float
    wait_seconds: float
    memory: int | None


@dataclass(frozen=True, slots=True)
class Probe:
    """What was measured.

    Attributes:
        device: as torch names it: the card's name, or `cpu`.
        few: at the smaller batch.
        many: at the batch that was asked for.
        loader_seconds: of one core for one image.
        workers: loader processes that the trials had.
    """

    device: str
    few: Trial
    many: Trial
    loader_seconds: float
    workers: int

    @property
    def image_seconds(self) -> float:
        """What each image adds to a step; 0 where launching the operations takes longer."""
        added = self.many.step_seconds - self.few.step_seconds
        return max(0.0, added / (self.many.batch - self.few.batch))

    @property
    def fixed_seconds(self) -> float:
        """What a step takes without any image."""
        return max(0.0, self.many.step_seconds - self.many.batch * self.image_seconds)

    @property
    def image_bytes(self) -> float | None:
        """What each image adds to the reserved memory."""
        if self.many.memory is None or self.few.memory is None:
            return None
        return max(0, self.many.memory - self.few.memory) / (self.many.batch - self.few.batch)

    @property
    def fixed_bytes(self) -> float | None:
        """What is reserved without any image."""
        if self.many.memory is None or self.image_bytes is None:
            return None
        return max(0.0, self.many.memory - self.many.batch * self.image_bytes)

    @property
    def images_per_second(self) -> float:
        """Of the training as it ran, waiting for data included."""
        return self.many.batch / (self.many.step_seconds + self.many.wait_seconds)

    @property
    def wait_share(self) -> float:
        """Of a step's time, that went into waiting for data."""
        return self.many.wait_seconds / (self.many.step_seconds + self.many.wait_seconds)

    def largest_batch(self, available: float) -> int | None:
        """The largest batch whose memory stays below.

        Args:
            available: bytes.

        Returns:
            None where memory was not measured, or does not grow with the batch.
        """
        if self.fixed_bytes is None or not self.image_bytes:
            return None
        return max(0, int((available - self.fixed_bytes) / self.image_bytes))


class _Enough(BaseException):
    """Leaves the training: neither ultralytics nor a callback of a user's may catch it."""


@dataclass(slots=True)
class _Watch:
    """Collects a trial's times from ultralytics' callbacks."""

    clock: Callable[[], float]
    batch: int
    steps: int
    device: Any = None
    arrived: float = 0.0
    ended: float | None = None
    work: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)

    @property
    def on_card(self) -> bool:
        """Whether the device counts its memory, and computes behind Python's back."""
        return str(getattr(self.device, "type", "")) == "cuda"

    def on_epoch(self, _trainer: Any) -> None:
        """A pause between epochs is no wait for data."""
        self.ended = None

    def on_batch(self, trainer: Any) -> None:
        """The batch has arrived."""
        if int(trainer.batch_size) != self.batch:  # ultralytics halves it, and goes on
            raise InvalidInput(f"one step with batch={self.batch} does not fit the device's memory")
        self.arrived = self.clock()
        self.device = trainer.device
        if self.ended is not None:
            self.waits.append(self.arrived - self.ended)

    def on_step(self, _trainer: Any) -> None:
        """Its step is done, and on a card truly so."""
        if self.on_card:
            importlib.import_module("torch").cuda.synchronize(self.device)
        self.ended = self.clock()
        self.work.append(self.ended - self.arrived)
        if len(self.work) >= self.steps + WARM_UP_STEPS:
            raise _Enough


def run(
    model: str,
    workload: Workload,
    *,
    task: str,
    data: Path | None = None,
    workers: int = 8,
    device: str | None = None,
    steps: int = STEPS,
    clock: Callable[[], float] = time.perf_counter,
) -> Probe:
    """Measure a model on this device.

    Args:
        model: a YAML's path, or the name of one of ultralytics' own.
        workload: its batch is the larger one; the smaller is a quarter of it.
        task: of the model.
        data: a data set's YAML; drawn images with a few boxes if there is none, which only
            detection can be trained on.
        workers: loader processes.
        device: of ultralytics, such as `0` or `cpu`; its choice if None.
        steps: that are measured at each batch size.
        clock: monotonic seconds.

    Raises:
        InvalidInput: the model cannot be trained so, or one step does not fit the device.
        ModuleNotFoundError: torch or ultralytics is not installed.
    """
    if workload.gpus != 1:
        raise InvalidInput("--probe measures one card: leave gpus= out")
    if workload.batch < 2:
        raise InvalidInput("--probe needs a batch of at least 2, to tell images from steps")
    if data is None and task != "detect":
        raise InvalidInput(f"--probe of a model to {task} needs data=YAML of a data set")
    with (
        tempfile.TemporaryDirectory(prefix="gpuwarden-probe-") as folder,
        _quiet(),
    ):
        few = max(1, workload.batch // 4)
        source = data or _draw(Path(folder), workload.batch, imgsz=workload.imgsz)
        trials: list[Trial] = []
        name = ""
        loader_seconds: list[float] = []
        for batch in (few, workload.batch):
            trial, name = _trial(
                model,
                batch,
                words={
                    "data": str(source),
                    "imgsz": workload.imgsz,
                    "amp": workload.amp,
                    "optimizer": workload.optimizer,
                    "workers": workers,
                    "device": device,
                    "project": str(Path(folder) / "runs"),
                },
                steps=steps,
                clock=clock,
                loaded=loader_seconds,
            )
            trials.append(trial)
    return Probe(
        device=name,
        few=trials[0],
        many=trials[1],
        loader_seconds=statistics.median(loader_seconds),
        workers=0 if name == "cpu" else workers,  # ultralytics loads in the training's process
    )


def _trial(
    model: str,
    batch: int,
    *,
    words: dict[str, Any],
    steps: int,
    clock: Callable[[], float],
    loaded: list[float],
) -> tuple[Trial, str]:
    torch: Any = importlib.import_module("torch")
    ultralytics: Any = importlib.import_module("ultralytics")
    watch = _Watch(clock, batch, steps)

    def on_start(trainer: Any) -> None:
        """Load some images in this process, and forget what setting up had reserved."""
        if trainer.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(trainer.device)
        images = trainer.train_loader.dataset
        if len(images) < batch:
            raise InvalidInput(f"the data set has fewer than the {batch} images of a batch")
        for index in range(min(_LOADED_IMAGES, len(images))):
            begun = clock()
            images[index]
            loaded.append(clock() - begun)

    gc.collect()  # the earlier trial's model is held by cycles alone
    torch.cuda.empty_cache()  # which does nothing where there is no card
    try:
        training = ultralytics.YOLO(model)
        for event, call in (
            ("on_train_start", on_start),
            ("on_train_epoch_start", watch.on_epoch),
            ("on_train_batch_start", watch.on_batch),
            ("on_train_batch_end", watch.on_step),
        ):
            training.add_callback(event, call)
        training.train(
            batch=batch, epochs=1000, val=False, save=False, plots=False, verbose=False, **words
        )
    except _Enough:
        pass
    except torch.cuda.OutOfMemoryError as error:
        raise InvalidInput(f"one step with batch={batch} does not fit the card: {error}") from error
    except (FileNotFoundError, RuntimeError, SyntaxError, ValueError, KeyError) as error:
        raise InvalidInput(f"model {model} cannot be trained: {error}") from error
    if len(watch.work) <= WARM_UP_STEPS:
        raise InvalidInput(f"model {model}: its training ended after {len(watch.work)} steps")
    trial = Trial(
        batch=batch,
        step_seconds=statistics.median(watch.work[WARM_UP_STEPS:]),
        wait_seconds=statistics.median(watch.waits or [0.0]),
        memory=int(torch.cuda.max_memory_reserved(watch.device)) if watch.on_card else None,
    )
    name = torch.cuda.get_device_name(watch.device) if watch.on_card else watch.device.type
    return trial, str(name)


def _draw(folder: Path, images: int, *, imgsz: int) -> Path:
    """A data set of noise with boxes, some batches large, and its YAML."""
    numpy: Any = importlib.import_module("numpy")
    cv2: Any = importlib.import_module("cv2")
    random = numpy.random.default_rng(0)
    for name in ("images", "labels"):
        (folder / name).mkdir()
    for number in range(max(images, _LOADED_IMAGES)):
        picture = random.integers(0, 256, (imgsz, imgsz, 3), dtype=numpy.uint8)
        if not cv2.imwrite(str(folder / "images" / f"{number:05d}.jpg"), picture):
            raise InvalidInput(
                f"cannot write images to {folder}; set TMPDIR to where there is room"
            )
        boxes = random.uniform(0.2, 0.5, (_OBJECTS, 4))
        lines = "".join(f"0 {' '.join(f'{value:.4f}' for value in box)}\n" for box in boxes)
        (folder / "labels" / f"{number:05d}.txt").write_text(lines, "ascii")
    description = folder / "data.yaml"
    description.write_text(
        # A JSON string is YAML as well, whatever characters the folder's name has.
        f"path: {json.dumps(str(folder.resolve()))}\n"
        "train: images\nval: images\nnames:\n  0: box\n",
        "utf-8",
    )
    return description


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Ultralytics' log and progress go nowhere: the answer is all that is printed."""
    utils: Any = importlib.import_module("ultralytics.utils")
    level = utils.LOGGER.level
    utils.LOGGER.setLevel(logging.ERROR)
    try:
        with (
            Path(os.devnull).open("w", encoding="ascii") as nowhere,
            contextlib.redirect_stdout(nowhere),
            contextlib.redirect_stderr(nowhere),
        ):
            yield
    finally:
        utils.LOGGER.setLevel(level)
