"""Estimates: what must hold of the formula, whatever its constants are."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden import estimates
from gpuwarden.estimate_tables import expected, find_gpu, find_model, needed, tables
from gpuwarden.estimates import GIB, Expectation, Gpu, ModelCosts, Unknown, Workload

CONSTANTS = tables().constants
GPUS = st.sampled_from(list(tables().gpus.values()))
MODELS = st.sampled_from(list(tables().models.values()))
BATCHES = st.integers(1, 512)
SIZES = st.sampled_from([32, 64, 224, 320, 640, 1280, 2048])


def the_model(name: str) -> ModelCosts:
    """A model of the table."""
    found = find_model(name)
    assert isinstance(found, ModelCosts)
    return found


def the_gpu(name: str) -> Gpu:
    """A card of the table."""
    found = find_gpu(name)
    assert isinstance(found, Gpu)
    return found


WORKLOADS = st.builds(
    Workload,
    batch=BATCHES,
    imgsz=SIZES,
    amp=st.booleans(),
    optimizer=st.sampled_from(sorted(estimates.OPTIMIZER_STATE_BYTES)),
    classes=st.integers(1, 2000),
    objects=st.integers(0, 1000),
)


def reserved(model: ModelCosts, workload: Workload) -> float:
    """Bytes expected to be reserved."""
    return estimates.memory(model, workload, CONSTANTS).reserved.expected


@given(MODELS, WORKLOADS, GPUS)
def test_every_band_holds_its_expectation(model: ModelCosts, workload: Workload, gpu: Gpu) -> None:
    """Low, expected and high are finite and in this order; NVML shows more than torch says."""
    memory = estimates.memory(model, workload, CONSTANTS)
    speed = estimates.speed(model, gpu, workload, CONSTANTS)
    for band in (memory.reserved, memory.total, speed.images):
        assert 0 < band.low < band.expected < band.high < math.inf
    assert memory.total.expected > memory.reserved.expected
    assert speed.limit in ("launches", "memory bandwidth", "arithmetic")


@given(MODELS, WORKLOADS)
def test_memory_grows_by_the_same_bytes_with_every_image(
    model: ModelCosts, workload: Workload
) -> None:
    """Linear in the batch: no step, no square."""
    one, two, three = (
        reserved(model, dataclasses.replace(workload, batch=batch)) for batch in (1, 2, 3)
    )
    assert two > one
    assert three - two == pytest.approx(two - one, rel=1e-6)


@given(MODELS, WORKLOADS)
def test_activations_grow_with_the_area(model: ModelCosts, workload: Workload) -> None:
    """Twice the sides take four times what one image adds."""

    def slope(imgsz: int) -> float:
        few, many = (dataclasses.replace(workload, imgsz=imgsz, batch=batch) for batch in (1, 2))
        return reserved(model, many) - reserved(model, few)

    assert slope(1280) == pytest.approx(4 * slope(640), rel=1e-6)


@given(MODELS, WORKLOADS, GPUS)
def test_mixed_precision_and_plainer_optimizers_never_cost_activations(
    model: ModelCosts, workload: Workload, gpu: Gpu
) -> None:
    """AMP saves memory for each image, SGD for each parameter; AMP is never slower on paper."""
    amp = dataclasses.replace(workload, amp=True)
    plain = dataclasses.replace(workload, amp=False)
    more = [
        reserved(model, dataclasses.replace(item, batch=item.batch + 1)) - reserved(model, item)
        for item in (amp, plain)
    ]
    assert more[0] < more[1]
    fast, slow = (estimates.speed(model, gpu, item, CONSTANTS).images for item in (amp, plain))
    assert fast.expected >= slow.expected
    sgd, adam = (
        reserved(model, dataclasses.replace(workload, optimizer=name)) for name in ("SGD", "AdamW")
    )
    assert adam - sgd == pytest.approx(4 * model.parameters)


@pytest.mark.parametrize("family", ["yolov5{}", "yolov8{}", "yolo11{}", "yolo12{}", "yolo26{}"])
@pytest.mark.parametrize("task", ["", "-seg", "-pose", "-obb", "-cls"])
def test_larger_models_of_a_family_need_more_and_are_no_faster(family: str, task: str) -> None:
    """n, s, m, l, x, in memory and in time, once the batch fills the card."""
    names = [family.format(size) + task for size in "nsmlx"]
    known = [name for name in names if name in tables().models]
    assert known == names or (family == "yolov5{}" and task)
    models = [the_model(name) for name in known]
    gpu, workload = the_gpu("A100 40GB"), Workload(batch=256)
    needs = [reserved(model, workload) for model in models]
    speeds = [estimates.speed(model, gpu, workload, CONSTANTS).images.expected for model in models]
    assert needs == sorted(needs)
    assert speeds == sorted(speeds, reverse=True)


@given(MODELS, GPUS, WORKLOADS)
def test_larger_batches_are_never_slower(model: ModelCosts, gpu: Gpu, workload: Workload) -> None:
    """Launches are shared by the images of a step; without them it is as fast at any size."""
    larger = dataclasses.replace(workload, batch=workload.batch * 2)
    slow, fast = (estimates.speed(model, gpu, item, CONSTANTS) for item in (workload, larger))
    assert fast.images.expected >= slow.images.expected * (1 - 1e-9)


@given(MODELS, GPUS, WORKLOADS)
def test_the_filling_batch_is_where_launches_stop_to_bound(
    model: ModelCosts, gpu: Gpu, workload: Workload
) -> None:
    """At it they do not, and one image less they still do."""
    filling = estimates.speed(model, gpu, workload, CONSTANTS).filling_batch
    limits = [
        estimates.speed(
            model, gpu, dataclasses.replace(workload, batch=max(1, batch)), CONSTANTS
        ).limit
        for batch in (filling + 1, filling - 1)
        if batch <= estimates.MAX_BATCH
    ]
    assert limits[0] != "launches"
    if filling > 2:
        assert limits[1] == "launches"


@given(MODELS, GPUS, WORKLOADS, st.integers(1, 8))
def test_the_largest_batch_is_the_largest(
    model: ModelCosts, gpu: Gpu, workload: Workload, gpus: int
) -> None:
    """It fits at the upper end of its band, and one image more on each card does not."""
    workload = dataclasses.replace(workload, batch=gpus, gpus=gpus)
    batch = estimates.largest_batch(model, gpu.memory, workload=workload, constants=CONSTANTS)
    assert batch % gpus == 0
    for images, fits in ((batch, True), (batch + gpus, False)):
        if gpus <= images <= estimates.MAX_BATCH:
            trial = dataclasses.replace(workload, batch=images)
            needed = estimates.memory(model, trial, CONSTANTS).total.high
            assert (needed <= gpu.memory) is fits


@given(MODELS, GPUS, WORKLOADS, st.integers(2, 8))
def test_more_cards_do_more_together_and_need_less_each(
    model: ModelCosts, gpu: Gpu, workload: Workload, gpus: int
) -> None:
    """A batch that is spread is at least not slower, unless launches bound it, and less memory."""
    alone = dataclasses.replace(workload, batch=64 * gpus)
    spread = dataclasses.replace(alone, gpus=gpus)
    one, many = (estimates.speed(model, gpu, item, CONSTANTS) for item in (alone, spread))
    if many.limit != "launches":
        assert many.images.expected > one.images.expected
    assert reserved(model, spread) < reserved(model, alone) + 4 * model.parameters


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"batch": 0}, "batch=0 is not between"),
        ({"batch": 10**6}, "batch=1000000 is not between"),
        ({"imgsz": 16}, "imgsz=16"),
        ({"classes": 0}, "classes=0"),
        ({"objects": -1}, "objects=-1"),
        ({"gpus": 0}, "gpus=0"),
        ({"batch": 2, "gpus": 4}, "less than one image"),
        ({"optimizer": "sdg"}, "optimizer=sdg is none of auto, sgd"),
    ],
)
def test_what_cannot_be_trained_is_refused(change: dict[str, Any], complaint: str) -> None:
    """With a sentence that names the setting."""
    with pytest.raises(ValueError, match=complaint):
        dataclasses.replace(Workload(batch=16), **change)


def test_loaders_are_counted_by_what_one_core_prepares() -> None:
    """12.5 ms for a mosaic of 640 px: 80 images a second from one core, a quarter to spare."""
    assert estimates.loader_limit(8, 640, CONSTANTS) == pytest.approx(640)
    assert estimates.loader_limit(8, 1280, CONSTANTS) == pytest.approx(160)
    assert estimates.loader_workers(320, 640, CONSTANTS) == 5
    assert estimates.loader_workers(1, 640, CONSTANTS) == 2


@pytest.mark.parametrize(
    ("model", "batch"),
    [("yolov5n", 128), ("yolov5s", 64), ("yolov5m", 40), ("yolov5l", 24), ("yolov5x", 16)],
)
def test_batches_that_fitted_a_16_gb_card_are_said_to_fit_it(model: str, batch: int) -> None:
    """README of ultralytics/yolov5: the largest that fitted, so that they nearly fill it."""
    found = expected(model, batch, imgsz=640, amp=True, hardware="Tesla V100-SXM2-16GB", classes=1)
    assert isinstance(found, Expectation)
    assert found.gpu_memory.low < 16160 * 1024**2
    assert found.gpu_memory.expected > 0.6 * 16160 * 1024**2


@pytest.mark.parametrize(
    ("model", "batch", "gib"),
    [
        ("yolov8n", 16, 2.8),
        ("yolov8s", 16, 4.5),
        ("yolov8m", 16, 7.4),
        ("yolov8l", 16, 10.9),
        ("yolov8x", 16, 13.7),
        ("yolo11m", 16, 9.4),
        ("yolo11x", 16, 17.6),
    ],
)
def test_typical_trainings_need_what_they_are_known_to_need(
    model: str, batch: int, gib: float
) -> None:
    """AdamW, 80 classes, 640 px; worked out by hand from public logs, within 15 %."""
    needed = reserved(the_model(model), Workload(batch=batch, optimizer="AdamW"))
    assert needed / GIB == pytest.approx(gib, rel=0.15)


def test_an_expectation_says_how_far_it_may_be_off() -> None:
    """Its tolerances are those of its bands, and it says that it is estimated."""
    found = expected("yolov8m", 64, imgsz=640, amp=True, hardware="NVIDIA A100-SXM4-40GB")
    assert isinstance(found, Expectation)
    memory, images = found.gpu_memory, found.throughput
    assert memory.high <= memory.expected * (1 + found.memory_tolerance) * (1 + 1e-9)
    assert memory.low >= memory.expected * (1 - found.memory_tolerance) * (1 - 1e-9)
    assert images.low == pytest.approx(images.expected * (1 - found.throughput_tolerance))
    assert 0.1 < found.memory_tolerance < 0.5
    assert 0.1 < found.throughput_tolerance < 0.5
    assert "estimated by formula" in found.basis


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"model": "best"}, "model"),
        ({"model": ""}, "model"),
        ({"model": "yolov8m-p2"}, "model"),
        ({"model": "yolov8m", "task": "semantic"}, "model"),
        ({"hardware": "NVIDIA Imaginary 9000"}, "gpu"),
        ({"hardware": "A100"}, "gpu"),
        ({"hardware": "NVIDIA A100-SXM4-40GB MIG 1g.5gb"}, "gpu"),
        ({"hardware": ""}, "gpu"),
        ({"batch": 0}, "workload"),
        ({"imgsz": -640}, "workload"),
        ({"gpus": 0}, "workload"),
        ({"batch": 2000}, "workload"),
        ({"gpu_memory": 2.0 * GIB}, "workload"),
    ],
)
def test_what_is_not_known_is_never_guessed(change: dict[str, Any], what: str) -> None:
    """A declaration that cannot be, on this card, is none to hold a job to."""
    arguments: dict[str, Any] = {
        "model": "yolov8m",
        "batch": 64,
        "imgsz": 640,
        "amp": True,
        "hardware": "NVIDIA A100-SXM4-40GB",
        **change,
    }
    found = expected(**arguments)
    assert isinstance(found, Unknown)
    assert found.what == what
    assert found.reason


def test_what_cannot_fit_still_needs_memory() -> None:
    """There is nothing to expect of it but that it will not fit."""
    card = find_gpu("Tesla T4", exact=True)
    assert isinstance(card, Gpu)
    assert isinstance(expected("yolov8x", 64, imgsz=640, amp=True, hardware="Tesla T4"), Unknown)
    found = needed("yolov8x", 64, imgsz=640, amp=True)
    assert isinstance(found, estimates.Memory)
    assert found.total.low > card.memory
    spread = needed("yolov8x", 64, imgsz=640, amp=True, gpus=8)
    assert isinstance(spread, estimates.Memory)
    assert spread.total.expected < card.memory
    assert isinstance(needed("best", 64, imgsz=640, amp=True), Unknown)
    assert isinstance(needed("yolov8x", 0, imgsz=640, amp=True), Unknown)


@given(
    st.fixed_dictionaries(
        {
            "model": st.text(max_size=40),
            "batch": st.integers(),
            "imgsz": st.integers(),
            "amp": st.booleans(),
            "hardware": st.text(max_size=40),
            "gpus": st.integers(-5, 5),
        }
    )
)
def test_no_declaration_of_a_job_breaks_the_estimate(declared: dict[str, Any]) -> None:
    """What a job says of itself is not trusted: it cannot do more than make it unknown."""
    assert isinstance(expected(**declared), Unknown)
