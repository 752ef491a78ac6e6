"""The order in which a training sees its data, so that it can be taken up at any batch.

`stateless`: a sample is a function of (seed, epoch, position) alone, so neither the number of
loader workers nor an interruption changes the data. `ultralytics`: its own stream, repeated by
recording its generator and the images it keeps for mosaics; exact without workers only.
"""

from __future__ import annotations

import hashlib
import math
import random
from array import array
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gpuwarden.trainer.ranks import Place

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

STATELESS = "stateless-3"
ULTRALYTICS = "ultralytics-1"
"""Names with a version: a state is continued only in the very order it was trained in."""

WINDOW = 32
"""Mosaic partners come from so many images or more."""
BACK = 2
"""And from so many batches or more. From one, its images would each be in the stripe's next batch
three times, and 256 tiles of a batch would show 125 images: they show 163, ultralytics' own 215."""
STRIPES = 8
"""A sample's partners come from earlier batches whose running number, modulo this, is that of its
own; where batches are large, from the same of up to as many lanes in them. For loader workers take
batches in turn, and ranks the images of each: so 1, 2, 4 or 8 of them find the partners among what
they have in memory still. Others decode some again, and see the same samples."""

_SPARE_BYTES = 1 << 30
"""Of decoded images that the loader workers of a rank keep beyond what ultralytics has them keep.
Large images or batches would take more; some are decoded again then, to the same samples."""

_EPOCH_STRIDE = 1_000_003
_SEEDS = (1 << 62) - 1


class EpochOrder:
    """Permutation of the data set for each epoch, the same in every process.

    Args:
        count: images.
        seed: of the training.
        shuffle: False keeps the data set's own order.
    """

    def __init__(self, count: int, seed: int, *, shuffle: bool = True) -> None:
        self.count, self._seed, self._shuffle = count, seed, shuffle
        self.batch = WINDOW
        """Images per batch of all ranks together."""
        # Arrays: each loader worker keeps three of them, of millions of images.
        self._cached: dict[int, array[int]] = {}

    def indices(self, epoch: int) -> Sequence[int]:
        """Image indices by position."""
        order = self._cached.get(epoch)
        if order is None:
            if self._shuffle:
                generator = torch.Generator()
                generator.manual_seed((self._seed * _EPOCH_STRIDE + epoch) & _SEEDS)
                permutation = torch.randperm(self.count, generator=generator)
            else:
                permutation = torch.arange(self.count)
            order = array("q", permutation.numpy().tobytes())
            # The epoch before is looked back to; as workers run ahead, one may still be at it.
            self._cached = {
                kept: self._cached[kept] for kept in (epoch - 1, epoch - 2) if kept in self._cached
            }
            self._cached[epoch] = order
        return order

    def window(self, epoch: int, position: int) -> Sequence[int]:
        """Indices of the images from which a sample's mosaic partners are drawn.

        At a training's beginning its own batch helps out. A data set of few batches has no
        stripes: there it is the sample's neighbourhood.
        """
        size, batches, lanes, needed = self._stripes()
        if batches < needed * STRIPES:
            return self._neighbourhood(epoch, position)
        own = epoch * batches + position // size
        first = max(own - needed * STRIPES, own % STRIPES)
        chosen: list[int] = []
        for number in (*range(first, own, STRIPES), own):
            if number == own and len(chosen) >= WINDOW:
                break
            past, at = divmod(number, batches)
            low = at * size
            chosen += self.indices(past)[low + (position - low) % lanes : low + size : lanes]
        # Nothing is left for a rank's place beyond the end of an order of just so many batches.
        return chosen or self._neighbourhood(epoch, position)

    def _neighbourhood(self, epoch: int, position: int) -> Sequence[int]:
        size = min(2 * WINDOW, self.count)
        low = min(max(position + 1 - size, 0), self.count - size)
        return self.indices(epoch)[low : low + size]

    def memory(self, workers: int, batch: int) -> int:
        """How many images a loader worker must keep in memory to decode few of them again.

        Args:
            workers: of the loader.
            batch: images per batch of this rank.
        """
        _size, batches, _lanes, needed = self._stripes()
        if batches >= needed * STRIPES:
            # Besides those between some to spare: an image that is decoded again for want of room
            # takes room from the next.
            batches = needed * (math.ceil(STRIPES / max(workers, 1)) + 2) + 2
        return min(batches * batch, self.count)

    def _stripes(self) -> tuple[int, int, int, int]:
        """Images per batch, batches per epoch, lanes in a batch, batches to look back to."""
        lanes = min(STRIPES, 1 << (max(self.batch // WINDOW, 1).bit_length() - 1))
        batches = math.ceil(self.count / self.batch)
        return self.batch, batches, lanes, max(BACK, math.ceil(WINDOW * lanes / self.batch))


class EpochBatches:
    """Endless batches of (epoch, position, index) from a position on.

    Stands in for a DataLoader's `batch_sampler`, and for the `.sampler` whose length ultralytics
    takes for the number of batches.

    Several ranks share each batch: together they see the positions that one process with the
    whole batch would see. So that all have equally many, an epoch's last positions may run over
    its end, into its first images again.

    Args:
        order: of the epochs.
        batch: images per batch of this rank.
        place: this rank among the training's.
    """

    def __init__(self, order: EpochOrder, batch: int, place: Place | None = None) -> None:
        self._order, self._batch, self._place = order, batch, place or Place()
        self._count = math.ceil(order.count / self._place.world)
        self.start = (0, 0)

    @property
    def sampler(self) -> EpochBatches:
        """Itself: one object plays both parts."""
        return self

    def __len__(self) -> int:
        return math.ceil(self._count / self._batch)

    def __iter__(self) -> Iterator[list[tuple[int, int, int]]]:
        epoch, first = self.start
        rank, world = self._place.rank, self._place.world
        while True:
            indices = self._order.indices(epoch)
            for batch in range(first, len(self)):
                low = batch * self._batch
                positions = (
                    own * world + rank for own in range(low, min(low + self._batch, self._count))
                )
                yield [(epoch, at, indices[at % self._order.count]) for at in positions]
            epoch, first = epoch + 1, 0


class WindowedBuffer(list[int]):
    """The data set's list of images in memory, which shows mosaics the window instead.

    Ultralytics appends to it, pops from it and measures it, for its cache; only the choice of
    mosaic partners iterates over it. So one object can serve both, and mosaic pipelines that are
    rebuilt during training need no care.
    """

    window: Sequence[int] = ()

    def __iter__(self) -> Iterator[int]:
        return iter(self.window) if self.window else super().__iter__()


class StatelessDataset:
    """A YOLO data set whose samples depend on (seed, epoch, position, index) only.

    Everything but `[]` and `len` is the inner data set's.

    Args:
        inner: ultralytics' data set.
        order: of the epochs.
        seed: of the training.
    """

    def __init__(self, inner: Any, order: EpochOrder, seed: int) -> None:
        self.inner, self._order, self._seed = inner, order, seed
        self._borrowed: tuple[Any, ...] | None = None
        if hasattr(inner, "buffer"):  # classification makes no mosaics
            inner.buffer = WindowedBuffer(inner.buffer)

    @property
    def order(self) -> EpochOrder:
        """The order of the epochs."""
        return self._order

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "inner":  # absent while being unpickled
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __getitem__(self, item: Any) -> Any:
        """One transformed sample.

        Args:
            item: (epoch, position, index), or a bare index, which takes the global randomness.
        """
        if not isinstance(item, tuple):
            return self.inner[item]
        epoch, position, index = item
        seed = int.from_bytes(
            hashlib.blake2b(f"{self._seed},{epoch},{position}".encode(), digest_size=8).digest(),
            "little",
        )
        # In the training's own process the model's and multi_scale's randomness must not notice.
        if torch.utils.data.get_worker_info() is None:
            self._borrowed = get_randomness()
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002 -- what ultralytics' transforms draw from
        torch.default_generator.manual_seed(seed & ((1 << 63) - 1))
        if (buffer := getattr(self.inner, "buffer", None)) is not None:
            buffer.window = self._order.window(epoch, position)
        try:
            return self.inner[index]
        finally:
            self.put_back()

    def put_back(self) -> None:
        """Give the process's generators back what a sample has borrowed; also one that was cut off.

        A signal may end a sample at any point, this one included: then it is to be called again.
        """
        if self._borrowed is not None:
            set_randomness(self._borrowed)
            self._borrowed = None


def get_randomness() -> tuple[Any, ...]:
    """State of the process's global generators: random, numpy, torch on the CPU."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002


def set_randomness(state: tuple[Any, ...]) -> None:
    """Put back what `get_randomness` gave."""
    random.setstate(state[0])
    np.random.set_state(state[1])  # noqa: NPY002
    torch.set_rng_state(state[2])


def use_stateless(loader: Any, place: Place) -> EpochBatches:
    """Make a loader over a `StatelessDataset` follow its order; returns the batches to position.

    Args:
        loader: not iterated yet.
        place: this rank among the training's.
    """
    dataset, order = loader.dataset, loader.dataset.order
    order.batch = loader.batch_size * place.world
    inner = dataset.inner
    if kept := getattr(inner, "max_buffer_length", 0):  # else there are no mosaics
        side = max(inner.imgsz) if isinstance(inner.imgsz, list | tuple) else inner.imgsz
        spare = _SPARE_BYTES // (side * side * inner.channels * max(loader.num_workers, 1))
        wanted = order.memory(loader.num_workers, loader.batch_size) + 1
        inner.max_buffer_length = max(kept, min(wanted, kept + spare))
    batches = EpochBatches(order, loader.batch_size, place)
    # DataLoader refuses to change this attribute after construction; ultralytics does the same.
    object.__setattr__(loader, "batch_sampler", batches)
    return batches


def keep_order(loader: Any) -> None:
    """Make a loader of ultralytics that shuffles take its data set as it is.

    Classification is validated in a random order that goes on from epoch to epoch; sums of its
    losses are rounded otherwise in another.
    """
    batches = loader.batch_sampler.sampler
    if isinstance(batches.sampler, torch.utils.data.RandomSampler):
        batches.sampler = torch.utils.data.SequentialSampler(loader.dataset)


class RecordedSampler:
    """Stands before ultralytics' shuffling sampler and keeps the generator's state of each pass.

    Args:
        inner: the loader's RandomSampler, or a rank's DistributedSampler, whose permutation
            follows from the epoch's number alone.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._generator = getattr(inner, "generator", None)
        self.pass_state: Any = None
        """State right before the current pass's permutation was drawn; None without a generator."""

    def __len__(self) -> int:
        return len(self._inner)

    def __iter__(self) -> Iterator[int]:
        if self._generator is not None:
            self.pass_state = self._generator.get_state()
        yield from self._inner


def record_passes(loader: Any) -> RecordedSampler:
    """Put a `RecordedSampler` into a loader of ultralytics' own order."""
    batch_sampler = loader.batch_sampler.sampler
    recorded = RecordedSampler(batch_sampler.sampler)
    batch_sampler.sampler = recorded
    return recorded


def position_recorded(loader: Any, state: dict[str, Any], *, closing: bool) -> None:
    """Bring a fresh loader of ultralytics' own order to where a state was taken.

    Args:
        loader: without workers, whose iterator does not exist yet.
        state: `captures.capture`'s part `stream`.
        closing: mosaics end with this epoch, for which ultralytics makes a new iterator.
    """
    epoch, batch = state["epoch"], state["batch"]
    if epoch and not batch:
        loader.generator.set_state(state["generator"])  # a new iterator draws its seed from it
    loader.iterator = loader._get_iterator()  # noqa: SLF001 -- as its own __iter__ does
    dataset = loader.dataset
    for index in state["buffer"]:
        dataset.load_image(index)
    if list(dataset.buffer) != state["buffer"]:
        raise RuntimeError(
            "the images kept for mosaics could not be put back: resume with --data-order stateless "
            "from a state that was trained so, or start anew with --resume never"
        )
    if batch and state["pass"] is not None:
        loader.generator.set_state(state["pass"])
    elif epoch and not closing:
        loader.generator.set_state(state["generator"])
        # RandomSampler draws once more, for no sample, when a pass ends.
        torch.randperm(len(dataset), generator=loader.generator)
    for _ in range(batch):
        next(loader.iterator._sampler_iter)  # noqa: SLF001 -- skips without loading


def fingerprint(dataset: Any) -> str:
    """What identifies a data set: its images' names and its labels, in order.

    Args:
        dataset: a YOLO data set; others give an empty string, which compares equal to anything.
    """
    labels = getattr(dataset, "labels", None)
    files = getattr(dataset, "im_files", None)
    digest = hashlib.sha256()
    samples = getattr(dataset, "samples", None)
    if isinstance(samples, list):  # of classification: file, class, and where it is cached
        for file, kind, *_cached in samples:
            digest.update(f"{str(file).rpartition('/')[2]},{kind};".encode())
        return digest.hexdigest()[:32]
    if not isinstance(labels, list) or not isinstance(files, list):
        return ""
    for name, label in zip(files, labels, strict=False):
        digest.update(str(name).rpartition("/")[2].encode())
        for part in ("cls", "bboxes", "keypoints", "segments"):
            values = label.get(part) if isinstance(label, dict) else None
            for value in values if isinstance(values, list) else [values]:
                if isinstance(value, np.ndarray):
                    digest.update(np.ascontiguousarray(value).tobytes())
    return digest.hexdigest()[:32]
