"""Signals: what a rule can measure, and the PromQL that measures it for the whole fleet.

The gates are inside each query, so that a row is a known value and an absent row is UNKNOWN:
enough samples in the window, and a youngest sample of the **raw** series that is at most two
scrapes old (`up == 1` and a value prove nothing: after a crash Prometheus serves both, stale).
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuwarden import durations
from gpuwarden.quantities import Unit, Window

if TYPE_CHECKING:
    from collections.abc import Collection

    from gpuwarden.ruleengine.verdicts import SignalKey

MIN_COVERAGE = 0.8
"""Share of the scrapes of a window that must be there."""
FRESH_SCRAPES = 2.0
"""A sample older than this many scrapes is not fresh."""
MIN_TRAIN_SHARE = 0.2
"""A rate while training needs at least this share of the window in the phase `train`."""

PROGRESS = "progress"
"""Name in keys of the steps that a trainer counts; a rule asks for it with `no_progress_for`."""

_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$]")
"""What Go's regular expressions take for more than itself (regexp.QuoteMeta)."""

_RUN = "on (instance, job_id, run_id)"
_BY_RUN = "max by (instance, job_id, run_id)"


@dataclass(frozen=True, slots=True)
class SignalSpec:
    """What is known of a signal.

    Attributes:
        name: as rules write it.
        unit: of its values and limits.
        metric: the raw series whose samples are counted and whose age is checked.
        help: one sentence for the reference.
        per_gpu: one value for each card of a job, else one for the job.
        device: measured on the card whoever uses it; UNKNOWN for either job on a shared card.
        self_report: comes from the trainer, so that the job itself could make it up.
        rate: derived from a counter over the window; takes no aggregate.
        divisor: expression per card (instance, uuid) that the value is divided by, or empty.
        amount: signal of which this is the share of the card's memory, or empty.
        training: a counter of the run, per second of the phase `train`.
        where: matchers that pick some of the metric's series, or empty.
        combined: whether several of these series belong to one card, of which the largest counts.
        gated_by: with `combined`, matchers of one of them, which stands for the samples and the age
            of all: they are on a page together or not at all, and each look at a series costs.
        additive: whether the parts of a job on several nodes add up; if not, it has no value.
    """

    name: str
    unit: Unit
    metric: str
    help: str
    per_gpu: bool = False
    device: bool = False
    self_report: bool = False
    rate: bool = False
    divisor: str = ""
    amount: str = ""
    training: bool = False
    where: str = ""
    combined: bool = False
    gated_by: str = ""
    additive: bool = True


HARMFUL_THROTTLING = frozenset({"hw_slowdown", "hw_thermal", "hw_power_brake", "sw_thermal"})
"""Reasons that are a fault of the machine; the power cap is how a busy card normally runs."""

MIG_MEMORY_TOTAL = 'label_replace(gpu_mig_memory_total_bytes, "uuid", "$1", "mig_uuid", "(.+)")'
"""A MIG instance is a card of its own, under its own UUID."""
_CARD_MEMORY = "max by (instance, uuid) (gpu_memory_total_bytes)"
_MEMORY_TOTAL = f"({_CARD_MEMORY} or max by (instance, uuid) ({MIG_MEMORY_TOTAL}))"

_ALL = (
    SignalSpec(
        "gpu_utilization",
        Unit.RATIO,
        "gpu_job_utilization_ratio",
        "Utilization of a card by the job; absent where it cannot be measured (MIG before Hopper).",
        per_gpu=True,
    ),
    SignalSpec(
        "gpu_memory",
        Unit.BYTES,
        "gpu_job_memory_bytes",
        "Memory of a card that the job holds.",
        per_gpu=True,
    ),
    SignalSpec(
        "gpu_memory_share",
        Unit.RATIO,
        "gpu_job_memory_bytes",
        "Memory of a card that the job holds, as a share of the card's or the MIG instance's.",
        per_gpu=True,
        divisor=_MEMORY_TOTAL,
        amount="gpu_memory",
    ),
    SignalSpec(
        "card_utilization",
        Unit.RATIO,
        "gpu_utilization_ratio",
        "Utilization of the card, whoever uses it.",
        per_gpu=True,
        device=True,
    ),
    SignalSpec(
        "card_memory_share",
        Unit.RATIO,
        "gpu_memory_used_bytes",
        "Memory used on the card, whoever uses it, as a share of the card's.",
        per_gpu=True,
        device=True,
        divisor=_CARD_MEMORY,
    ),
    SignalSpec(
        "card_memory_activity",
        Unit.RATIO,
        "gpu_memory_activity_ratio",
        "Share of time in which the card's memory was read or written.",
        per_gpu=True,
        device=True,
    ),
    SignalSpec(
        "card_power",
        Unit.WATTS,
        "gpu_power_watts",
        "Power draw of the card.",
        per_gpu=True,
        device=True,
    ),
    SignalSpec(
        "card_power_share",
        Unit.RATIO,
        "gpu_power_watts",
        "Power draw of the card as a share of its enforced limit.",
        per_gpu=True,
        device=True,
        divisor="max by (instance, uuid) (gpu_power_limit_watts)",
    ),
    SignalSpec(
        "card_temperature",
        Unit.CELSIUS,
        "gpu_temperature_celsius",
        "Temperature of the card.",
        per_gpu=True,
        device=True,
    ),
    SignalSpec(
        "card_throttled",
        Unit.RATIO,
        "gpu_throttle_active",
        "Share of time in which heat or a fault of the power supply lowered the card's clocks; "
        "its normal power cap does not count.",
        per_gpu=True,
        device=True,
        where=f'{{reason=~"{"|".join(sorted(HARMFUL_THROTTLING))}"}}',
        combined=True,
        gated_by='{reason="hw_slowdown"}',
    ),
    SignalSpec(
        "card_unattributed_memory",
        Unit.BYTES,
        "gpu_memory_unattributed_bytes",
        "Used memory of the card that no process known to the node accounts for.",
        per_gpu=True,
        device=True,
    ),
    SignalSpec(
        "job_cpu_cores",
        Unit.CORES,
        "gpu_job_cpu_seconds_total",
        "CPU cores that the job's process tree uses.",
        rate=True,
    ),
    SignalSpec(
        "job_read_rate",
        Unit.BYTES_PER_SECOND,
        "gpu_job_read_bytes_total",
        "Bytes per second that the job reads from storage.",
        rate=True,
    ),
    SignalSpec(
        "job_io_wait",
        Unit.CORES,
        "gpu_job_io_wait_seconds_total",
        "Processes of the job blocked on I/O, on average.",
        rate=True,
    ),
    SignalSpec(
        "job_loader_workers",
        Unit.COUNT,
        "gpu_job_loader_workers",
        "Data loader worker processes of the job.",
    ),
    SignalSpec(
        "job_cpu_pressure",
        Unit.RATIO,
        "gpu_job_pressure_seconds_total",
        "Share of time in which a task of the job's cgroup waited for a CPU (PSI, some).",
        rate=True,
        where='{resource="cpu"}',
        additive=False,
    ),
    SignalSpec(
        "job_io_pressure",
        Unit.RATIO,
        "gpu_job_pressure_seconds_total",
        "Share of time in which a task of the job's cgroup waited for I/O (PSI, some).",
        rate=True,
        where='{resource="io"}',
        additive=False,
    ),
    SignalSpec(
        "job_zombie_processes",
        Unit.COUNT,
        "gpu_job_processes",
        "Defunct processes of the job: ended, and not waited for by their parent.",
        where='{state="zombie"}',
    ),
    SignalSpec(
        "job_resident_memory",
        Unit.BYTES,
        "gpu_job_resident_memory_bytes",
        "Resident memory of the job's process tree.",
    ),
    SignalSpec(
        "throughput",
        Unit.IMAGES_PER_SECOND,
        "yolo_images_total",
        "Images per second while training; validation does not dilute it, a hung trainer has 0.",
        self_report=True,
        rate=True,
        training=True,
    ),
    SignalSpec(
        "step_rate",
        Unit.STEPS_PER_SECOND,
        "yolo_steps_total",
        "Batches per second while training.",
        self_report=True,
        rate=True,
        training=True,
    ),
    SignalSpec(
        "data_wait_share",
        Unit.RATIO,
        "yolo_data_wait_seconds_total",
        "Share of the training time in which the loop waited for a batch.",
        self_report=True,
        rate=True,
        training=True,
    ),
)

SIGNALS: dict[str, SignalSpec] = {spec.name: spec for spec in _ALL}
"""Every signal by name."""


def window_length(key: SignalKey, scrape_interval: float) -> float:
    """How far back a query looks, in seconds; 0 for `last`."""
    if key.agg == "last":
        return 0.0
    return Window(key.window_seconds, key.samples).length(scrape_interval)


def min_samples(key: SignalKey, scrape_interval: float) -> int:
    """How many samples a window must hold for its value to be known."""
    if key.samples is not None:
        return key.samples
    expected = int(key.window_seconds / scrape_interval)
    return max(1, math.floor(MIN_COVERAGE * expected))


def amount(key: SignalKey) -> SignalKey | None:
    """The key of the amount that a share of the card's memory is made of, or None.

    Every aggregate here of a value divided by a constant is the aggregate divided by it, and who
    knows each card's memory need not have Prometheus look it up for each job in each query.
    """
    spec = SIGNALS.get(key.signal)
    return key._replace(signal=spec.amount) if spec is not None and spec.amount else None


@dataclass(frozen=True, slots=True)
class Parts:
    """What the query of a signal is made of.

    Each is one function over one window, but the value of `last` and the gate.

    Attributes:
        value: what is measured, by series.
        trained: of a training, how long each run was in the phase `train`, or empty.
        count: samples in the window by series, or empty for `last`.
        least: how many there must be.
        series: selector of the raw series that are counted and whose age is checked.
        fresh: the gate on its age.
    """

    value: str
    trained: str
    count: str
    least: int
    series: str
    fresh: str


def parts(key: SignalKey, *, scrape_interval: float, jobs: Collection[str] | None = None) -> Parts:
    """What the query of a signal is made of; see `query` for the arguments. Not of expressions."""
    named = "" if jobs is None else _named(jobs)
    spec = _spec(key)
    series = spec.metric + where(spec.where, "" if spec.device else named)
    gating = spec.metric + where(spec.gated_by) if spec.gated_by else series
    fresh = f"timestamp({gating}) >= time() - {FRESH_SCRAPES * scrape_interval:g}"
    if key.agg == "last":
        return Parts(series, "", "", 0, gating, fresh)
    window = f"[{durations.render(window_length(key, scrape_interval))}]"
    trained = ""
    if spec.training:
        function = "min_over_time" if key.signal == PROGRESS else "avg_over_time"
        trained = f"{function}({_training(named)}{window})"
    return Parts(
        value=_windowed(key, spec, series + window),
        trained=trained,
        count=f"count_over_time({gating}{window})",
        least=min_samples(key, scrape_interval),
        series=gating,
        fresh=fresh,
    )


def query(key: SignalKey, *, scrape_interval: float, jobs: Collection[str] | None = None) -> str:
    """The PromQL of a signal, gates included.

    Args:
        key: what to measure.
        scrape_interval: of the nodes, in seconds.
        jobs: whose values are wanted; None for the whole fleet. Expressions of rules and signals of
            the card ask for all.

    Returns:
        An expression whose rows are known values; what is absent is UNKNOWN. Rows have the labels
        (instance, job_id, uuid) for a signal of a job on a card, (instance, uuid) for one of the
        card, (instance, job_id) for one of the job, (job_id) for one of the training.
    """
    if key.promql:
        return key.promql
    made = parts(key, scrape_interval=scrape_interval, jobs=jobs)
    spec = _spec(key)
    on = f"{_RUN} " if spec.training else "on (instance, uuid) " if spec.combined else ""
    gates = f"and {on}{made.fresh}"
    if made.count:
        gates = f"and {on}{made.count} >= {made.least} {gates}"
    value = made.value
    if key.signal == PROGRESS:
        # Steps in the window; without any, only where the run was in `train` all the time.
        value = f"({value} > 0 or ({value} and {_RUN} {made.trained} == 1))"
    elif spec.training:
        # Time spent outside `train` must not dilute a rate; a hung trainer stays in it and has 0.
        # Where a label of the target has changed within the window, such as the exporter's pod, a
        # run has two series on both sides: the longer one counts, which the gates measure as well.
        share = f"{_BY_RUN} ({made.trained})"
        value = f"({_BY_RUN} ({value}) / {_RUN} ({share} >= {MIN_TRAIN_SHARE:g}))"
        value = f"clamp_max({value}, 1)" if spec.unit is Unit.RATIO else value
    elif spec.divisor:
        # Between two scrapes a card may be told of by two series, of an exporter's old and new pod.
        divisor = f"max by (instance, uuid) ({spec.divisor})"
        value = f"({value} / on (instance, uuid) group_left () {divisor})"
    if spec.training:
        return f"max by (job_id) ({value} {gates})"
    return f"max by (instance, uuid) ({value} {gates})" if spec.combined else f"{value} {gates}"


def of_jobs(jobs: Collection[str] | None) -> str:
    """The braces of a selector of these jobs' series; nothing for all jobs."""
    return "" if jobs is None else where(_named(jobs))


def _named(jobs: Collection[str]) -> str:
    """A matcher of these jobs' series."""
    return f"job_id=~{one_of(jobs)}"


def one_of(names: Collection[str]) -> str:
    """A regular expression of PromQL that is these texts and no other, with its quotes."""
    escaped = "|".join(_SPECIAL.sub(r"\\\g<0>", name) for name in sorted(names))
    return json.dumps(escaped, ensure_ascii=False)


def _spec(key: SignalKey) -> SignalSpec:
    """What is known of a key's signal; progress counts the same steps as their rate."""
    return SIGNALS["step_rate" if key.signal == PROGRESS else key.signal]


def where(*matchers: str) -> str:
    """The braces of a selector; nothing where nothing is picked.

    Args:
        matchers: lists of matchers, in braces or without; an empty one picks nothing.
    """
    parts = [part.strip("{}") for part in matchers if part]
    return f"{{{','.join(parts)}}}" if parts else ""


def _training(named: str) -> str:
    """Selector of the phase that training is."""
    return "yolo_phase" + where('phase="train"', named)


def _windowed(key: SignalKey, spec: SignalSpec, samples: str) -> str:
    """The value of a window of a series."""
    if key.signal == PROGRESS:
        return f"increase({samples})"
    if spec.rate:
        return f"rate({samples})"
    if key.agg.startswith("q"):
        return f"quantile_over_time({float(key.agg[1:]):g}, {samples})"
    return f"{key.agg}_over_time({samples})"
