"""What a training should need on a card: memory, speed, and the largest batch that fits. Pure.

Per card, with `b` images of it, `s` pixels against the size that the model was measured at, and the
constants of `estimate_tables`:

- memory that torch reserves = base + parameters x (weights, gradients, EMA, moments, AMP copies)
  + `activation_factor` x activations + what the loss of every anchor against every object takes;
  NVML shows a CUDA context more.
- one step = max(launching its operations, moving its activations through memory + multiplying)
  + updating the parameters.

Activations are those that autograd keeps for one image, measured without a card by
`gpuwarden.trainer.slopes`; cards come from data sheets; what was fitted, on which public figures,
and how far it is off, is in docs/estimates.md. What is not in the tables is an `Unknown`, with the
reason: nothing is extrapolated from a name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

GIB: Final = 1024**3
MAX_BATCH: Final = 65_536

OPTIMIZER_STATE_BYTES: Final = {
    "auto": 8,  # ultralytics takes AdamW up to 10,000 steps, SGD or MuSGD beyond
    "sgd": 4,
    "musgd": 4,
    "adam": 8,
    "adamw": 8,
    "adamax": 8,
    "nadam": 8,
    "radam": 8,
    "rmsprop": 8,
}
"""Bytes of moments per parameter, by ultralytics' names of optimizers in lower case."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """There is no estimate, and why.

    Attributes:
        what: `model`, `gpu` or `workload`.
        reason: a sentence for people.
        suggestions: names that may have been meant, the most likely first.
    """

    what: str
    reason: str
    suggestions: tuple[str, ...] = ()

    def __str__(self) -> str:
        """The reason, and what may have been meant."""
        if not self.suggestions:
            return self.reason
        return f"{self.reason}; did you mean {' or '.join(self.suggestions)}?"


@dataclass(frozen=True, slots=True)
class Range:
    """A value with the band in which it is expected."""

    low: float
    expected: float
    high: float

    def scaled(self, factor: float) -> Range:
        """The same band of another unit.

        Args:
            factor: more than 0.
        """
        return Range(self.low * factor, self.expected * factor, self.high * factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCosts:
    """What one image costs a model in training.

    Attributes:
        name: as in the table, such as `yolov8m-seg`, or a file's name.
        task: of ultralytics.
        parameters: number of them.
        body_parameters: of all layers but the first and the last; None: not known.
        gigaflops: of the forward pass for one image, a multiplication and an addition counted
            apart.
        activation_bytes: kept for the backward pass of one image, with mixed precision.
        activation_bytes_fp32: likewise without.
        operations: that a step launches, forward and backward.
        anchors: predictions for one image.
        imgsz: pixels of the image's sides for all of these.
        source: where they come from.
    """

    name: str
    task: str
    parameters: int
    gigaflops: float
    activation_bytes: float
    activation_bytes_fp32: float
    operations: int
    anchors: float
    imgsz: int
    source: str
    body_parameters: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """What a card can do, by its data sheet.

    Attributes:
        name: for people.
        architecture: NVIDIA's name of it in lower case.
        memory: bytes that a process can have.
        bandwidth: of its memory, bytes/s.
        cached: whether its second-level cache is large against its memory's bandwidth.
        flops: dense, of half precision with sums in single precision, per second.
        flops_fp32: dense, of convolutions without mixed precision (TF32 where it has it).
        measured: whether public trainings on it are among the figures of docs/estimates.md.
        source: of these figures.
    """

    name: str
    architecture: str
    memory: float
    bandwidth: float
    cached: bool
    flops: float
    flops_fp32: float
    measured: bool
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """How a model is trained.

    Attributes:
        batch: images per step over all cards.
        imgsz: pixels of the images' sides.
        amp: mixed precision.
        optimizer: one of `OPTIMIZER_STATE_BYTES`.
        classes: of the data set.
        objects: most objects on one image of a batch, after mosaic.
        gpus: cards that the batch is spread over.
    """

    batch: int
    imgsz: int = 640
    amp: bool = True
    optimizer: str = "auto"
    classes: int = 80
    objects: int = 50
    gpus: int = 1

    def __post_init__(self) -> None:
        """Refuse what cannot be trained.

        Raises:
            ValueError: with a sentence that names the setting.
        """
        for name, value, least, most in (
            ("batch", self.batch, 1, MAX_BATCH),
            ("imgsz", self.imgsz, 32, 8192),
            ("classes", self.classes, 1, 100_000),
            ("objects", self.objects, 0, 100_000),
            ("gpus", self.gpus, 1, 4096),
        ):
            if not least <= value <= most:
                raise ValueError(f"{name}={value} is not between {least} and {most}")
        if self.batch < self.gpus:
            raise ValueError(f"batch={self.batch} is less than one image for each of {self.gpus}")
        if self.optimizer.lower() not in OPTIMIZER_STATE_BYTES:
            known = ", ".join(OPTIMIZER_STATE_BYTES)
            raise ValueError(f"optimizer={self.optimizer} is none of {known}")

    @property
    def per_gpu(self) -> int:
        """Images per step on the fullest card."""
        return math.ceil(self.batch / self.gpus)


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """What does not depend on model or card; `estimate_gpus.toml` says where each comes from.

    Attributes:
        base_bytes: reserved before the first image.
        context_bytes: of CUDA and its libraries, which NVML counts and torch does not.
        activation_factor: reserved bytes for each byte of activations.
        loss_floats: 4-byte numbers for each pair of anchor and object, and of anchor and class
            twice.
        memory_error: ratio; the band around the expected memory.
        traffic: how often a byte of activations crosses the memory's bus in a step.
        compute: time against that of the data sheet's rate.
        cache_gain: bandwidth of cards with a large cache against that of their memory.
        launch_seconds: for one operation.
        update_bytes: that the update of one parameter moves.
        scaling: throughput of each card where several share a batch, against one alone.
        speed_error: factor of the band around the throughput of cards that were measured.
        speed_error_unmeasured: likewise of cards that were not.
        loader_seconds: of one core for one image with mosaic at 640 pixels.
    """

    base_bytes: float
    context_bytes: float
    activation_factor: float
    loss_floats: float
    memory_error: float
    traffic: float
    compute: float
    cache_gain: float
    launch_seconds: float
    update_bytes: float
    scaling: float
    speed_error: float
    speed_error_unmeasured: float
    loader_seconds: float


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on each card.

    Attributes:
        reserved: by torch, as ultralytics prints it (`GPU_mem`).
        total: as NVML and nvidia-smi show it.
    """

    reserved: Range
    total: Range


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast a training can go while its data loaders keep up.

    Attributes:
        images: per second over all cards, in the training phase.
        limit: `launches`, `memory bandwidth` or `arithmetic`.
        filling_batch: over all cards, from which on launches are no longer what bounds it: below
            it a step takes no less time.
    """

    images: Range
    limit: str
    filling_batch: int


def memory(model: ModelCosts, workload: Workload, constants: Constants) -> Memory:
    """What a training reserves on each card."""
    area = (workload.imgsz / model.imgsz) ** 2
    images = workload.per_gpu
    # Weights, gradients and EMA are single precision; AMP keeps half-precision copies of weights.
    each = 12 + OPTIMIZER_STATE_BYTES[workload.optimizer.lower()] + (2 if workload.amp else 0)
    if workload.gpus > 1:
        each += 4  # DistributedDataParallel's buckets hold the gradients once more
    activations = model.activation_bytes if workload.amp else model.activation_bytes_fp32
    pairs = model.anchors * (workload.objects + 2 * workload.classes)
    expected = (
        constants.base_bytes
        + model.parameters * each
        + constants.activation_factor * activations * area * images
        + constants.loss_floats * 4 * pairs * area * images
    )
    error = constants.memory_error
    reserved = Range(expected / (1 + error), expected, expected * (1 + error))
    context = constants.context_bytes
    total = Range(
        reserved.low + context / 2, reserved.expected + context, reserved.high + 1.5 * context
    )
    return Memory(reserved, total)


def speed(model: ModelCosts, gpu: Gpu, workload: Workload, constants: Constants) -> Speed:
    """How many images a second a training can do."""
    area = (workload.imgsz / model.imgsz) ** 2
    images = workload.per_gpu
    activations = model.activation_bytes if workload.amp else model.activation_bytes_fp32
    bandwidth = gpu.bandwidth * (constants.cache_gain if gpu.cached else 1.0)
    flops = gpu.flops if workload.amp else gpu.flops_fp32
    moving = constants.traffic * activations * area * images / bandwidth
    multiplying = constants.compute * 3e9 * model.gigaflops * area * images / flops
    launching = constants.launch_seconds * model.operations
    updating = constants.update_bytes * model.parameters / gpu.bandwidth
    step = max(launching, moving + multiplying) + updating
    expected = images * workload.gpus / step * (constants.scaling if workload.gpus > 1 else 1.0)
    error = constants.speed_error if gpu.measured else constants.speed_error_unmeasured
    if launching >= moving + multiplying:
        limit = "launches"
    else:
        limit = "memory bandwidth" if moving >= multiplying else "arithmetic"
    filling = math.ceil(images * launching / (moving + multiplying)) * workload.gpus
    return Speed(Range(expected / error, expected, expected * error), limit, filling)


def largest_batch(
    model: ModelCosts, gpu_memory: float, *, workload: Workload, constants: Constants
) -> int:
    """The largest batch whose memory, at the upper end of its band, fits on the cards.

    Args:
        model: what is trained.
        gpu_memory: bytes that each card offers.
        workload: its batch does not matter.
        constants: of the formula.

    Returns:
        Images per step over all cards; 0 where not even one per card fits.
    """

    def fits(images: int) -> bool:
        trial = Workload(
            batch=images * workload.gpus,
            imgsz=workload.imgsz,
            amp=workload.amp,
            optimizer=workload.optimizer,
            classes=workload.classes,
            objects=workload.objects,
            gpus=workload.gpus,
        )
        return memory(model, trial, constants).total.high <= gpu_memory

    low, high = 0, MAX_BATCH // workload.gpus + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * workload.gpus


def loader_limit(cores: int, imgsz: int, constants: Constants) -> float:
    """Images per second that loaders on so many cores can prepare.

    Args:
        cores: that they have, no more than there are loader processes.
        imgsz: pixels of the images' sides.
        constants: of the formula.
    """
    return cores / (constants.loader_seconds * (imgsz / 640) ** 2)


def loader_workers(images_per_second: float, imgsz: int, constants: Constants) -> int:
    """Loader processes for each card that keep a training fed, with a quarter to spare.

    Args:
        images_per_second: of one card.
        imgsz: pixels of the images' sides.
        constants: of the formula.
    """
    return max(2, math.ceil(1.25 * images_per_second / loader_limit(1, imgsz, constants)))


@dataclass(frozen=True, slots=True)
class Expectation:
    """What a running training should show, by the formula alone.

    Attributes:
        gpu_memory: bytes on each card, as NVML shows them.
        throughput: images per second over all cards, in the training phase.
        memory_tolerance: ratio by which the memory may differ in either direction.
        throughput_tolerance: ratio by which the throughput may fall short.
        limit: what bounds the throughput, as in `Speed`.
        basis: what this rests on, in words; that it is an estimate.
    """

    gpu_memory: Range
    throughput: Range
    memory_tolerance: float
    throughput_tolerance: float
    limit: str
    basis: str


def expectation(
    model: ModelCosts | Unknown,
    gpu: Gpu | Unknown,
    *,
    workload: Workload,
    constants: Constants,
) -> Expectation | Unknown:
    """What a training of this model on this card should show.

    Returns:
        An `Unknown` where the model or the card is not known, or where the training cannot fit on
        the card: what runs is then not what was declared.
    """
    if isinstance(model, Unknown):
        return model
    if isinstance(gpu, Unknown):
        return gpu
    needed = memory(model, workload, constants)
    if needed.total.low > gpu.memory:
        return Unknown(
            "workload",
            f"{model.name} with batch {workload.batch} at {workload.imgsz} px needs at least "
            f"{needed.total.low / GIB:.1f} GiB, more than the {gpu.memory / GIB:.1f} GiB of "
            f"{gpu.name}",
        )
    fast = speed(model, gpu, workload, constants)
    return Expectation(
        gpu_memory=needed.total,
        throughput=fast.images,
        memory_tolerance=max(
            needed.total.high / needed.total.expected - 1,
            1 - needed.total.low / needed.total.expected,
        ),
        throughput_tolerance=1 - fast.images.low / fast.images.expected,
        limit=fast.limit,
        basis=f"estimated by formula for {model.name} on {gpu.name}, see docs/estimates.md",
    )
