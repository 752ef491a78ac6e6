"""What makes trainings slow or large without anybody meaning it, said once at their start.

Judged from facts that are gathered here and nowhere else, so that each piece of advice can be
tested without the machine it is about. Nothing is changed: the user decides.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuwarden.trainer import fitting
from gpuwarden.trainer.fitting import Need

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpuwarden.trainer.status import StatusBoard

log = logging.getLogger(__name__)

GIB = 1 << 30
BIG_CARD = 20 * GIB
SMALL_MODEL = 12e6
"""Parameters; up to here a step on a big card takes as long for 16 images as for one."""
FILLING_BATCH, FILLING_BATCH_OF_SMALL = 16, 32
SAMPLE_SHARED_BYTES = 4
"""Bytes of shared memory per pixel of a batch on its way from a worker: image and labels."""
PREFETCHED = 4
SLOW_VALIDATION_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What advice is given by.

    Attributes:
        batch: images per step over all ranks.
        imgsz: pixels.
        world: ranks on this node.
        amp: mixed precision is on.
        card: bytes of the smallest card; None on a CPU.
        parameters: of the model.
        workers: loader processes of each rank.
        cores: CPUs that this job may use.
        memory: bytes of memory that this job may use; None: not known.
        shared: bytes free in /dev/shm; None: not known.
        images: of the training set.
        words: the user's, as text.
        model, task, classes: by which the estimates know what it will take.
        plots, cache: ultralytics' settings.
    """

    batch: int
    imgsz: int
    world: int = 1
    amp: bool = True
    card: int | None = None
    parameters: int = 0
    workers: int = 8
    cores: int = 16
    memory: int | None = None
    shared: int | None = None
    images: int = 0
    words: Mapping[str, str]
    model: str = ""
    task: str | None = None
    classes: int | None = None
    plots: bool = False
    cache: Any = False


def advise(facts: Facts) -> list[str]:
    """Everything that is worth saying, each with what to do about it."""
    return [*_of_the_card(facts), *_of_loading(facts), *_of_settings(facts)]


def _of_the_card(facts: Facts) -> list[str]:
    if facts.card is None:
        return []
    need = Need(
        model=facts.model,
        task=facts.task,
        batch=facts.batch,
        imgsz=facts.imgsz,
        amp=facts.amp,
        gpus=facts.world,
        classes=facts.classes,
    )
    said = [piece for piece in (fitting.advice(need, facts.card),) if piece is not None]
    each = facts.batch / facts.world
    small = facts.parameters and facts.parameters <= SMALL_MODEL
    filling = FILLING_BATCH_OF_SMALL if small else FILLING_BATCH
    if facts.card >= BIG_CARD and each < filling:
        said.append(
            f"batch={facts.batch} is {each:g} images per card of {facts.card / GIB:.0f} GiB: a "
            f"step of so few takes about as long as one of {filling}. Use a larger batch, a "
            "smaller card or a MIG instance"
        )
    if not facts.amp:
        said.append(
            "mixed precision is off: about twice the memory and half the speed. amp=True is "
            "ultralytics' default; it also turns it off by itself where its check fails"
        )
    return said


def _of_loading(facts: Facts) -> list[str]:
    said = []
    workers = facts.workers * facts.world
    if workers > facts.cores:
        said.append(
            f"{workers} loader workers share {facts.cores} CPU cores: they wait for one another. "
            f"Use workers={max(1, facts.cores // facts.world)}, or ask for more cores"
        )
    if facts.card is not None and facts.workers == 0:
        said.append(
            "workers=0: the card waits while each batch is loaded. Use about 8 workers per card"
        )
    needed = workers * PREFETCHED * facts.batch // facts.world * facts.imgsz**2
    needed *= SAMPLE_SHARED_BYTES
    if workers and facts.shared is not None and facts.shared < needed:
        said.append(
            f"shared memory (/dev/shm) has {facts.shared / GIB:.2g} GiB, {workers} workers may "
            f"need {needed / GIB:.2g}: they would die of a bus error. Give the container more "
            "(docker --shm-size, an emptyDir of medium Memory), or use fewer workers"
        )
    cached = facts.images * facts.imgsz**2 * 3 * facts.world
    if facts.cache in (True, "ram"):
        if facts.memory is not None and cached > 0.8 * facts.memory:
            said.append(
                f"cache=ram takes about {cached / GIB:.0f} GiB of {facts.memory / GIB:.0f}: the "
                "job may be ended for want of memory. Use cache=disk, or none"
            )
        elif facts.world > 1:
            said.append(
                f"cache=ram is filled by each of {facts.world} ranks for itself. Use cache=disk"
            )
    return said


def _of_settings(facts: Facts) -> list[str]:
    said = []
    batch = facts.words.get("batch", "")
    if batch == "-1" or (batch.startswith("0.") and facts.card is not None):
        said.append(
            f"batch={batch} measures what is free on the card now, also what others will need. "
            "On a shared card give a number; `gpuwarden estimate` says which fits"
        )
    if facts.words.get("optimizer", "auto") == "auto" and "lr0" in facts.words:
        said.append(
            f"lr0={facts.words['lr0']} is ignored: optimizer=auto chooses its own. Name an "
            "optimizer, such as optimizer=SGD"
        )
    if facts.plots and facts.card is not None and facts.words.get("plots", "").lower() != "true":
        said.append(
            "plots are drawn on the training thread while the card waits; plots=False spares it"
        )
    return said


def slow_validation(train: float, validate: float) -> str | None:
    """What to say after an epoch.

    Args:
        train: seconds that its training took.
        validate: seconds that its validation took.
    """
    if validate <= train or validate < SLOW_VALIDATION_SECONDS:
        return None
    return (
        f"validation took {validate:.0f} s, training {train:.0f} s of this epoch. Validate on "
        "fewer images, raise conf=, lower max_det=, or turn plots and save_json off"
    )


# ---------------------------------------------------------------------------------------------
# The facts


def gather(trainer: Any, words: Mapping[str, str], *, world: int) -> Facts:
    """The facts of a training that has been set up.

    Args:
        trainer: ultralytics' trainer.
        words: the user's, as text.
        world: ranks on this node.
    """
    import torch

    args, need = trainer.args, Need.of(trainer, gpus=world)
    card = None
    if trainer.device.type == "cuda":
        card = int(torch.cuda.get_device_properties(trainer.device).total_memory)
    return Facts(
        model=need.model,
        task=need.task,
        classes=need.classes,
        batch=need.batch,
        imgsz=need.imgsz,
        world=world,
        amp=need.amp,
        card=card,
        parameters=sum(parameter.numel() for parameter in trainer.model.parameters()),
        workers=int(getattr(trainer.train_loader, "num_workers", 0)),
        cores=usable_cores(Path("/sys/fs/cgroup")),
        memory=usable_memory(Path("/sys/fs/cgroup")),
        shared=_free(Path("/dev") / "shm"),
        images=len(trainer.train_loader.dataset),
        words=words,
        plots=bool(args.plots),
        cache=args.cache,
    )


def usable_cores(cgroups: Path) -> int:
    """CPUs that this process may use, by its affinity and its cgroup's quota."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = (cgroups / "cpu.max").read_text("ascii").split()
        return max(1, min(cores, -(-int(quota) // int(period))))
    except (OSError, ValueError, ZeroDivisionError):  # none, or "max"
        return cores


def usable_memory(cgroups: Path) -> int | None:
    """Bytes of memory that this process may use, by the machine and its cgroup's limit."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return None
    try:
        return min(total, int((cgroups / "memory.max").read_text("ascii")))
    except (OSError, ValueError):
        return total


def _free(folder: Path) -> int | None:
    try:
        about = os.statvfs(folder)
    except OSError:
        return None
    return about.f_bavail * about.f_frsize


class Adviser:
    """Says each piece of advice once in an attempt.

    Args:
        board: whose phases tell how long training and validation took.
    """

    def __init__(self, board: StatusBoard) -> None:
        self._board = board
        self._before = (0.0, 0.0)
        self._said = False

    def begin(self, trainer: Any, words: Mapping[str, str], *, world: int) -> None:
        """Training is about to begin."""
        try:
            pieces = advise(gather(trainer, words, world=world))
        except Exception as error:  # noqa: BLE001 -- advice is never worth a training
            log.debug("no advice: %r", error)
            return
        for piece in pieces:
            log.warning("advice: %s", piece)
        self._before = self._seconds()

    def epoch_ended(self) -> None:
        """An epoch is trained and validated."""
        now, before = self._seconds(), self._before
        self._before = now
        piece = slow_validation(now[0] - before[0], now[1] - before[1])
        if piece is not None and not self._said:
            self._said = True
            log.warning("advice: %s", piece)

    def _seconds(self) -> tuple[float, float]:
        return self._board.seconds("train"), self._board.seconds("validate")
