from __future__ import annotations

import random
from collections import Counter
from itertools import islice, product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.trainer.conftest import copy_by_pickle

from gpuwarden.trainer import orders
from gpuwarden.trainer.ranks import Place


class _Data:
    """A data set that shows its randomness, and keeps a buffer as ultralytics' does."""

    def __init__(self, count: int) -> None:
        self.buffer: list[int] = []
        self.count = count
        self.labels = [{"cls": np.zeros((1, 1)), "bboxes": np.zeros((1, 4))}] * count
        self.im_files = [f"/data/{number}.png" for number in range(count)]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        self.buffer.append(index)
        if len(self.buffer) > 4:
            self.buffer.pop(0)
        partners = tuple(random.choices(list(self.buffer), k=3))  # noqa: S311 -- as ultralytics
        number = np.random.rand()  # noqa: NPY002 -- as ultralytics
        return index, partners, number, float(torch.rand(()))


def _stateless(count: int = 100, seed: int = 0) -> orders.StatelessDataset:
    return orders.StatelessDataset(_Data(count), orders.EpochOrder(count, seed), seed)


def test_an_epoch_is_a_permutation_and_no_two_are_alike() -> None:
    """Every image once an epoch, in another order each time, by seed."""
    order = orders.EpochOrder(50, 7)
    epochs = [order.indices(epoch) for epoch in range(5)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 5
    assert orders.EpochOrder(50, 7).indices(3) == epochs[3]
    assert orders.EpochOrder(50, 8).indices(3) != epochs[3]
    assert list(orders.EpochOrder(5, 0, shuffle=False).indices(9)) == [0, 1, 2, 3, 4]


def test_batches_start_anywhere_in_the_same_stream() -> None:
    """A resumed sampler gives what the uninterrupted one would have given next."""
    batches = orders.EpochBatches(orders.EpochOrder(10, 0), 4)
    assert len(batches) == 3
    stream = list(islice(batches, 9))
    batches.start = (1, 2)
    assert list(islice(batches, 4)) == stream[5:9]


@pytest.mark.parametrize(
    ("count", "batch", "world"), [(48, 8, 2), (50, 8, 2), (9, 6, 3), (2, 8, 4)]
)
def test_ranks_share_the_batches_of_one_process(count: int, batch: int, world: int) -> None:
    """Each batch of all ranks together holds the positions that one process would train on."""
    order = orders.EpochOrder(count, 0)
    alone = orders.EpochBatches(order, batch)
    shared = [
        orders.EpochBatches(order, batch // world, Place(rank, world)) for rank in range(world)
    ]
    assert {len(part) for part in shared} == {len(alone)}
    for whole, *parts in islice(zip(alone, *shared, strict=True), 2 * len(alone)):
        assert len({len(part) for part in parts}) == 1
        together = sorted(item for part in parts for item in part)
        assert together[: len(whole)] == whole
        padding = together[len(whole) :]
        assert len(padding) < world
        assert all(at >= count and index in order.indices(epoch) for epoch, at, index in padding)


@pytest.mark.parametrize("count", [100, 400])
def test_a_sample_depends_on_its_place_alone(count: int) -> None:
    """History, other randomness and process do not show in a sample, nor it in them."""
    first, second = _stateless(count), _stateless(count)
    first.order.batch = second.order.batch = 8  # of 400 images partners come from stripes
    items = [
        (epoch, position, position)
        for epoch in range(2)
        for position in (*range(20), *range(count - 20, count))
    ]
    straight = [first[item] for item in items]
    random.seed(5)
    before = random.getstate()
    shuffled = {item: second[item] for item in reversed(items)}
    assert [shuffled[item] for item in items] == straight
    assert random.getstate() == before
    assert len({sample[2] for sample in straight}) == len(items)


def test_mosaic_partners_come_from_the_window() -> None:
    """A small data set's are neighbours in the epoch's order, wherever the sample stands."""
    data = _stateless()
    for position in (0, 50, 99):
        window = set(data.order.window(3, position))
        assert len(window) == 64
        assert data.order.indices(3)[position] in window
        seen = Counter(data[3, position, 1][1])
        assert set(seen) <= window


@pytest.mark.parametrize("batch", [1, 5, 16, 64, 100, 512])
def test_every_sample_has_enough_partners(batch: int) -> None:
    """Whatever the batch size, and in the first batch as in the last one, which is short."""
    order = _order(5001, batch)
    for epoch, position in product((0, 1), (0, 17, 555, 2500, 5000)):
        window = order.window(epoch, position)
        beginning = not epoch and position < orders.STRIPES * orders.WINDOW
        fewest = min(orders.WINDOW, batch) if beginning else orders.WINDOW
        assert fewest <= len(window) <= 2 * batch + 64
        assert len(set(window)) >= 0.9 * len(window)  # some may be of the epoch before


@pytest.mark.parametrize(("count", "batch"), [(1793, 256), (1795, 256), (449, 64), (513, 512)])
def test_a_place_beyond_the_end_has_partners_too(count: int, batch: int) -> None:
    """Ranks fill the last batch up: with no partners a sample's would be those it has in memory."""
    order = _order(count, batch)
    for epoch, position in product((0, 1), range(count - 1, count + 8)):
        assert order.window(epoch, position)


@pytest.mark.parametrize("batch", [16, 64, 256])
def test_every_image_is_a_partner_equally_often(batch: int) -> None:
    """Each is offered to as many samples, but for those that another epoch's see."""
    order = _order(50 * batch, batch)
    shown: Counter[int] = Counter()
    for epoch, position in product(range(1, 5), range(order.count)):
        shown.update(order.window(epoch, position))
    window = len(order.window(1, 0))
    assert set(shown) == set(range(order.count))
    assert shown.total() == 4 * window * order.count
    assert set(shown.values()) <= {halves * window // 2 for halves in range(6, 11)}


@pytest.mark.parametrize("batch", [16, 64, 256])
def test_a_batch_does_not_live_on_a_few_images(batch: int) -> None:
    """Of its mosaics' tiles most show different images: from one batch back it would be half."""
    order = _order(50 * batch, batch)
    tiles = [
        (order.indices(1)[position], *random.choices(order.window(1, position), k=3))  # noqa: S311
        for position in range(30 * batch, 31 * batch)
    ]
    assert len({image for tile in tiles for image in tile}) > 0.58 * 4 * batch


@pytest.mark.parametrize(
    ("side", "batch", "workers", "kept"),
    [(640, 16, 1, 353), (640, 16, 8, 129), (1280, 16, 1, 346), (4096, 256, 8, 1002)],
)
def test_images_kept_in_memory_are_bounded_in_bytes(
    side: int, batch: int, workers: int, kept: int
) -> None:
    """However large images and batches are, 1 GiB at most is added to what ultralytics keeps."""
    data = _Data(100_000)
    data.imgsz, data.channels = side, 3
    own = data.max_buffer_length = min(8 * batch, 1000)
    dataset = orders.StatelessDataset(data, orders.EpochOrder(len(data), 0), 0)
    orders.use_stateless(
        SimpleNamespace(dataset=dataset, num_workers=workers, batch_size=batch), Place()
    )
    assert data.max_buffer_length == kept
    assert (kept - own) * workers * side * side * 3 <= 1 << 30


@pytest.mark.parametrize("workers", [1, 2, 4, 8])
@pytest.mark.parametrize(("batch", "world"), [(8, 1), (16, 1), (64, 1), (128, 4), (256, 8)])
def test_partners_are_in_memory_already(batch: int, world: int, workers: int) -> None:
    """Each loader worker of each rank decodes an image once an epoch, as ultralytics' own do."""
    order = _order(100 * batch, batch)
    batches = orders.EpochBatches(order, batch // world, Place(world - 1, world))
    memory: list[dict[int, None]] = [{} for _ in range(workers)]
    decoded = 0
    stream = list(islice(batches, 2 * len(batches)))
    for number, items in enumerate(stream):
        kept = memory[number % workers]
        for epoch, position, index in items:
            for wanted in (index, *random.choices(order.window(epoch, position), k=3)):  # noqa: S311
                if wanted not in kept:
                    kept[wanted] = None
                    decoded += 1
                if len(kept) > order.memory(workers, batch // world):
                    del kept[next(iter(kept))]
    assert decoded < 1.1 * sum(map(len, stream))


def _order(count: int, batch: int) -> orders.EpochOrder:
    order = orders.EpochOrder(count, 0)
    order.batch = batch
    return order


def test_the_data_set_can_be_sent_to_a_worker() -> None:
    """Spawned workers get it by pickle; everything else is the inner data set's."""
    data = orders.StatelessDataset(_Picklable(), orders.EpochOrder(3, 0), 0)
    copy = copy_by_pickle(data)
    assert copy.label == "inner"
    assert not hasattr(copy, "other")
    assert len(copy) == 3


class _Picklable:
    """Pickles as a SimpleNamespace: test modules are imported by path."""

    def __init__(self) -> None:
        self.buffer: list[int] = []

    def __len__(self) -> int:
        return 3

    def __reduce__(self) -> tuple[Any, ...]:
        return (_Sized, (), {"label": "inner"})


class _Sized(SimpleNamespace):
    def __len__(self) -> int:
        return 3


def test_the_fingerprint_sees_names_and_labels() -> None:
    """A renamed image, a moved box or another order is another data set; its folder is not."""
    data = _Data(4)
    before = orders.fingerprint(data)
    data.im_files = [name.replace("/data/", "/elsewhere/") for name in data.im_files]
    assert orders.fingerprint(data) == before
    data.labels = [*data.labels[:3], {"cls": np.ones((1, 1)), "bboxes": np.zeros((1, 4))}]
    assert orders.fingerprint(data) != before
    assert orders.fingerprint(object()) == ""
