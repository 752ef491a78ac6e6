"""Long histories of made-up jobs, as arrays: days in seconds, where inline tests have hours. Pure.

The series are those of the exporter, with its labels. They become the bodies of remote writes, each
of a short stretch of time, in the order of time.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from gpuwarden.catalogue import PHASES, SCRAPE_JOB
from gpuwarden.ruleengine.histories import (
    BEHIND_SECONDS,
    CARD_MEMORY_BYTES,
    LIKENESSES,
    POWER_LIMIT_WATTS,
    THROTTLE_REASONS,
)
from gpuwarden.ruleengine.notations import SeriesName, sorted_labels
from gpuwarden.ruleengine.remote_writes import STALE_BITS, delimited

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Bools = NDArray[np.bool_]

SLICE_SECONDS: Final = 1800.0
"""One body must not span more: a head refuses what is an hour older than its newest sample."""
_STALE: Final = np.uint64(STALE_BITS)
_SAMPLE_BYTES: Final = 18
_BUSY_CPU: Final = 0.01


@dataclass(frozen=True, slots=True)
class Stretch:
    """What a job does for a while.

    Attributes:
        hours: how long.
        like: one of the words of inline tests: healthy, idle, hog, spinning, starved.
        phase: of its trainer.
        saves: whether its trainer goes on to save its state.
        cards: likeness of each card, where they differ from the job.
    """

    hours: float
    like: str = "healthy"
    phase: str = "train"
    saves: bool = True
    cards: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BulkJob:
    """One made-up job.

    Attributes:
        job: its id.
        user: its owner.
        node: target of its node.
        begins: hours after the beginning of the history.
        stretches: what it does, in order; after that it is gone.
        cards: UUIDs of its cards.
        model: of its trainer; empty is a job without one.
        batch, imgsz: likewise.
        saves_every: seconds between two saved states.
        framework, source, executable: as the exporter would say.
        hardware: product name of its cards.
        noise: spread of what is measured, as a ratio.
    """

    job: str
    user: str
    node: str
    begins: float
    stretches: tuple[Stretch, ...]
    cards: tuple[str, ...]
    model: str = ""
    batch: int = 64
    imgsz: int = 640
    saves_every: float = 600.0
    framework: str = "torch"
    source: str = "process"
    executable: str = "/usr/bin/python3.11"
    hardware: str = "NVIDIA A100-SXM4-40GB"
    noise: float = 0.03


@dataclass(frozen=True, slots=True)
class Dark:
    """Hours, since the beginning, in which a node is not scraped."""

    node: str
    begin: float
    end: float


@dataclass
class BulkHistory:
    """Jobs on nodes over a stretch of time.

    Attributes:
        begin: Unix time of the first scrape.
        seconds: length.
        interval: seconds between two scrapes.
        jobs: who runs.
        dark: when which node is not scraped.
        wanted: names of metrics; None is all.
        seed: of the noise.
    """

    begin: float
    seconds: float
    interval: float
    jobs: Sequence[BulkJob]
    dark: Sequence[Dark] = ()
    wanted: Collection[str] | None = None
    seed: int = 1
    _places: dict[tuple[str, str], int] = field(default_factory=dict)

    def bodies(self) -> Iterator[bytes]:
        """Bodies of remote writes in the order of time, not compressed."""
        count = int(self.seconds // self.interval) + 1
        times = self.begin + self.interval * np.arange(count, dtype=np.float64)
        width = max(1, int(SLICE_SECONDS // self.interval))
        table = self.series(times)
        moments = np.rint(times * 1000).astype(np.int64)
        heads = {name: _head(name) for name in table}
        for start in range(0, count, width):
            stop = min(start + width, count)
            parts = []
            for name, values in table.items():
                piece = _samples(moments[start:stop], _with_ends(values, start, stop))
                if piece:
                    parts.append(delimited(1, heads[name] + piece))
            if parts:
                yield b"".join(parts)

    def series(self, times: Floats) -> dict[SeriesName, Floats]:
        """Every series at each moment; NaN where there is no sample."""
        found: dict[SeriesName, Floats] = {}
        random = np.random.default_rng(self.seed)
        by_node: dict[str, list[BulkJob]] = defaultdict(list)
        for job in self.jobs:
            by_node[job.node].append(job)
        for node, jobs in sorted(by_node.items()):
            lit = self._lit(node, times)
            labels = {"instance": node, "job": SCRAPE_JOB}
            self.add(found, "up", lit.astype(np.float64), labels, ~np.isnan(times))
            behind = times - BEHIND_SECONDS
            self.add(found, "gpuwarden_snapshot_timestamp_seconds", behind, labels, lit)
            for job in jobs:
                _Bulk(self, job, times, lit, random).write(found)
        return found

    def _lit(self, node: str, times: Floats) -> Bools:
        lit = np.ones(len(times), dtype=bool)
        for dark in self.dark:
            if dark.node == node:
                hours = (times - self.begin) / 3600
                lit &= (hours < dark.begin) | (hours >= dark.end)
        return lit

    def add(
        self,
        found: dict[SeriesName, Floats],
        metric: str,
        values: Floats | float,
        labels: Mapping[str, str],
        there: Bools,
    ) -> None:
        """Add a series; where two say the same one (a card used in turn), each has its time."""
        if self.wanted is not None and metric not in self.wanted:
            return
        name = SeriesName(metric, sorted_labels(labels))
        own = np.where(there, values, np.nan)
        known = found.get(name)
        found[name] = own if known is None else np.where(np.isnan(own), known, own)

    def place(self, node: str, card: str) -> int:
        """Number of a card on its node."""
        if (node, card) not in self._places:
            self._places[node, card] = sum(known == node for known, _ in self._places)
        return self._places[node, card]


class _Bulk:
    """One job at each moment."""

    def __init__(
        self,
        made: BulkHistory,
        job: BulkJob,
        times: Floats,
        lit: Bools,
        random: np.random.Generator,
    ) -> None:
        self._made = made
        self._job = job
        self._times = times
        self._random = random
        hours = (times - made.begin) / 3600
        ends = job.begins + np.cumsum([stretch.hours for stretch in job.stretches])
        self._alive = (hours >= job.begins) & (hours < ends[-1])
        self._which = np.minimum(np.searchsorted(ends, hours, side="right"), len(job.stretches) - 1)
        self._there = self._alive & lit
        self._born = made.begin + job.begins * 3600
        self._starts = made.begin + (ends - [s.hours for s in job.stretches]) * 3600
        self._base = {"instance": job.node, "job": SCRAPE_JOB, "job_id": job.job}

    def write(self, found: dict[SeriesName, Floats]) -> None:
        for metric, values, labels in (*self._cards(), *self._own(), *self._run()):
            self._made.add(found, metric, values, labels, self._there)

    def _each(self, name: str, card: int | None = None) -> Floats:
        """What the likeness of each stretch says."""
        words = [
            stretch.cards[card] if card is not None and stretch.cards else stretch.like
            for stretch in self._job.stretches
        ]
        return np.array([float(getattr(LIKENESSES[word], name)) for word in words])[self._which]

    def _noisy(self, values: Floats) -> Floats:
        spread = self._random.normal(1.0, self._job.noise, len(values))
        return values * np.clip(spread, 0.8, 1.2)

    def _cards(self) -> Iterator[tuple[str, Floats | float, dict[str, str]]]:
        job = self._job
        node = {"instance": job.node, "job": SCRAPE_JOB}
        for number, card in enumerate(job.cards):
            where = {"gpu": str(self._made.place(job.node, card)), "uuid": card}
            names, own = node | where, self._base | where
            use = np.minimum(1.0, self._noisy(self._each("utilization", number)))
            memory = self._each("memory_share", number) * CARD_MEMORY_BYTES
            about = {"name": job.hardware, "driver_version": "570", "simulated": "false"}
            yield "gpu_info", 1.0, names | about
            yield "gpu_memory_total_bytes", CARD_MEMORY_BYTES, names
            yield "gpu_memory_used_bytes", memory, names
            yield "gpu_memory_unattributed_bytes", 0.0, names
            yield "gpu_memory_activity_ratio", use / 2, names
            yield "gpu_utilization_ratio", use, names
            yield "gpu_temperature_celsius", self._each("temperature", number), names
            yield "gpu_power_watts", self._noisy(self._each("power", number)), names
            yield "gpu_power_limit_watts", POWER_LIMIT_WATTS, names
            for reason in THROTTLE_REASONS:
                yield "gpu_throttle_active", 0.0, names | {"reason": reason}
            yield "gpu_job_holds_gpu", 1.0, own
            yield "gpu_job_memory_bytes", memory, own
            yield "gpu_job_utilization_ratio", use, own
            process = own | {"pid": "4711", "user": job.user}
            yield "gpu_process_start_time_seconds", self._born, process

    def _own(self) -> Iterator[tuple[str, Floats | float, dict[str, str]]]:
        job, base = self._job, self._base
        about = {"user": job.user, "source": job.source, "framework": job.framework}
        yield "gpu_job_info", 1.0, base | about | {"interactive": "false"}
        paths = {"executable": job.executable, "cgroup": "/user.slice"}
        yield "gpu_job_executable", 1.0, base | paths
        yield "gpu_job_start_time_seconds", self._born, base
        yield "gpu_job_first_gpu_use_timestamp_seconds", self._born, base
        cpu = self._each("cpu")
        alive = self._each("alive") > 0
        for name, active in (("cpu", cpu > _BUSY_CPU), ("log", alive), ("heartbeat", alive)):
            if name != "heartbeat" or job.model:
                last = _last(self._times - BEHIND_SECONDS, active & self._alive)
                yield "gpu_job_activity_timestamp_seconds", last, base | {"signal": name}
        waited = self._grown(self._each("data_wait"))
        yield "gpu_job_cpu_seconds_total", self._grown(cpu), base
        yield "gpu_job_read_bytes_total", self._grown(self._each("throughput")) * 100_000, base
        yield "gpu_job_io_wait_seconds_total", waited, base
        yield "gpu_job_loader_workers", 8.0 if job.model else 0.0, base
        yield "gpu_job_resident_memory_bytes", 8 * 2.0**30, base
        for doing in ("running", "sleeping", "zombie"):
            yield "gpu_job_processes", float(doing == "running"), base | {"state": doing}
        yield "gpu_job_pressure_seconds_total", 0.0, base | {"resource": "cpu"}
        yield "gpu_job_pressure_seconds_total", waited, base | {"resource": "io"}

    def _run(self) -> Iterator[tuple[str, Floats | float, dict[str, str]]]:
        job = self._job
        if not job.model:
            return
        names = self._base | {"run_id": f"run-of-{job.job}"}
        about = {"model": job.model, "batch": str(job.batch), "imgsz": str(job.imgsz)}
        yield "yolo_info", 1.0, names | about | {"amp": "true", "project": "runs"}
        yield "yolo_devices", float(len(job.cards)), names
        phases = np.array([PHASES.index(stretch.phase) for stretch in job.stretches])[self._which]
        for number, phase in enumerate(PHASES):
            values = (phases == number).astype(np.float64)
            yield "yolo_phase", values, names | {"phase": phase}
        yield "yolo_phase_start_timestamp_seconds", self._starts[self._which], names
        training = phases == PHASES.index("train")
        images = self._grown(np.where(training, self._noisy(self._each("throughput")), 0.0))
        yield "yolo_images_total", images, names
        yield "yolo_steps_total", np.floor(images / job.batch), names
        waited = self._grown(np.where(training, self._each("data_wait"), 0.0))
        yield "yolo_data_wait_seconds_total", waited, names
        saves = np.array([stretch.saves for stretch in job.stretches])[self._which] & self._alive
        count = np.floor((self._times - self._born) / job.saves_every)
        moment = self._born + count * job.saves_every
        saved = _last(moment, saves & (count > 0))
        yield "yolo_checkpoint_timestamp_seconds", saved, names
        yield "yolo_checkpoint_durable_timestamp_seconds", saved, names

    def _grown(self, rate: Floats) -> Floats:
        """What a rate adds up to since the job began."""
        return np.cumsum(np.where(self._alive, rate, 0.0)) * self._made.interval


def _last(values: Floats, when: Bools) -> Floats:
    """At each moment the value of the last one at which something was; NaN before the first."""
    places = np.where(when, np.arange(len(values)), -1)
    newest = np.maximum.accumulate(places)
    return np.where(newest >= 0, values[np.maximum(newest, 0)], np.nan)


# -- https://prometheus.io/docs/specs/prw/remote_write_spec/


def _with_ends(values: Floats, start: int, stop: int) -> tuple[Floats, Bools]:
    """Values of a stretch, and where a series ends: one mark after the last sample."""
    there = ~np.isnan(values[max(0, start - 1) : stop])
    before = there[:-1] if start else np.concatenate(([False], there[:-1]))
    own = there[1:] if start else there
    return values[start:stop], before & ~own


def _samples(moments: NDArray[np.int64], found: tuple[Floats, Bools]) -> bytes:
    values, ends = found
    kept = ~np.isnan(values) | ends
    if not kept.any():
        return b""
    bits = values.view(np.uint64).copy() if values.flags.c_contiguous else values.copy().view("u8")
    bits = np.where(ends, _STALE, bits)[kept]
    out = np.empty((len(bits), _SAMPLE_BYTES), dtype=np.uint8)
    out[:, 0], out[:, 1], out[:, 2] = 0x12, _SAMPLE_BYTES - 2, 0x09
    out[:, 3:11] = bits.astype("<u8").view(np.uint8).reshape(-1, 8)
    out[:, 11] = 0x10
    rest = moments[kept].astype(np.uint64)
    for place in range(6):  # milliseconds of these centuries have 41 bits: six groups of seven
        more = 0x80 if place < 5 else 0
        out[:, 12 + place] = (rest & np.uint64(0x7F)).astype(np.uint8) | more
        rest >>= np.uint64(7)
    return out.tobytes()


def _head(name: SeriesName) -> bytes:
    labels = sorted((("__name__", name.metric), *name.labels))
    return b"".join(
        delimited(1, delimited(1, label.encode()) + delimited(2, text.encode()))
        for label, text in labels
    )


def metric_names(expressions: Iterable[str], known: Iterable[str]) -> set[str]:
    """Those metrics that occur in any of the expressions."""
    texts = list(expressions)
    return {name for name in known if any(name in text for text in texts)}
