"""An hour of a small fleet as OpenMetrics text, for a Prometheus that was not there.

Two nodes with six cards: a training of ana's over both nodes, a notebook of ben's that holds a card
and does nothing, a starved training of cho's, a card that two users share, and a free one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpuwarden.catalogue import CATALOGUE, PHASES, MetricType

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

START = 1_749_996_000
"""A multiple of two hours, so that the hour lies in one block."""
END = START + 3600
STEP = 5
DIES = END - 900
"""When the exporters die in the variant `exporters_dead`."""

GIB = 2**30
NODES = ("n1:9835", "n2:9835")
ENGINE = {"job": "gpuwarden-engine", "instance": "engine:9837"}


@dataclass(frozen=True)
class Job:
    """A job: whose it is, what it holds as (instance, gpu), and how it behaves."""

    job_id: str
    user: str
    cards: tuple[tuple[str, int], ...]
    framework: str = "ultralytics"
    utilization: float | None = 0.9
    memory: float = 12 * GIB
    images: float | None = None
    wait: float = 0.1


JOBS = (
    Job("j-ana-1", "ana", (("n1:9835", 0), ("n2:9835", 0)), images=80.0),
    Job("j-ben", "ben", (("n1:9835", 1),), "jupyter", 0.0, 30 * GIB),
    Job("j-cho", "cho", (("n1:9835", 2),), utilization=0.95, images=3.0, wait=0.9),
    Job("j-ana-2", "ana", (("n2:9835", 1),), "torch", None, 6 * GIB),
    Job("j-eve", "eve", (("n2:9835", 1),), "torch", None, 8 * GIB),
)
CARDS = {(node, gpu): f"GPU-{node[:2]}-{gpu}" for node, gpus in zip(NODES, (4, 2), strict=True)
         for gpu in range(gpus)}  # fmt: skip


@dataclass
class History:
    """Series by metric; each is its labels and its value at a time, None while it is absent."""

    series: dict[str, list[tuple[dict[str, str], Callable[[int], float | None]]]] = field(
        default_factory=dict
    )

    def add(self, name: str, labels: dict[str, str], value: object) -> None:
        """Add a series; `value` is a number or a function of Unix time."""
        if name in CATALOGUE:
            wrong = set(labels) - {*CATALOGUE[name].labels, "job", "instance"}
            assert not wrong, f"{name} has no labels {wrong}"
        given = value if callable(value) else lambda _time: value
        self.series.setdefault(name, []).append((labels, given))

    def text(self) -> str:
        """OpenMetrics text, families together and samples in order."""
        return "".join(f"{line}\n" for line in self._lines()) + "# EOF\n"

    def _lines(self) -> Iterator[str]:
        for name, entries in self.series.items():
            counter = name in CATALOGUE and CATALOGUE[name].type is MetricType.COUNTER
            family = name.removesuffix("_total") if counter else name
            yield f"# TYPE {family} {'counter' if counter else 'gauge'}"
            for labels, value in entries:
                text = ",".join(f'{key}="{word}"' for key, word in labels.items())
                for time in range(START, END + 1, STEP):
                    sample = value(time)
                    if sample is not None:
                        yield (
                            f"{name}{{{text}}} {sample:g} {time}"
                            if abs(sample) < 1e5
                            else f"{name}{{{text}}} {sample:.3f} {time}"
                        )


def fleet(*, jobs: tuple[Job, ...] = JOBS, exporters_die: bool = False) -> History:
    """The hour. Without `jobs` the cards are free; else the exporters may die at `DIES`."""
    history = History()

    def add(name: str, instance: str, value: object, /, **labels: str) -> None:
        labels = {"job": "gpuwarden", "instance": instance} | labels
        given = value if callable(value) else lambda _time: value
        if exporters_die and name != "up":
            history.add(name, labels, lambda time: given(time) if time < DIES else None)
        else:
            history.add(name, labels, given)

    for node in NODES:
        add("up", node, lambda time: 0 if exporters_die and time >= DIES else 1)
        add("gpuwarden_nvml_up", node, 1)
        add("gpuwarden_snapshot_timestamp_seconds", node, lambda time: time - 1)
    for (node, gpu), uuid in CARDS.items():
        card = {"gpu": str(gpu), "uuid": uuid}
        holders = [job for job in jobs if (node, gpu) in job.cards]
        used = sum(job.memory for job in holders)
        busy = sum(0.5 if job.utilization is None else job.utilization for job in holders)
        add(
            "gpu_info", node, 1, **card, name="NVIDIA A100-SXM4-40GB", pci_bus_id=f"0:{gpu}",
            driver_version="550.54.15", simulated="true",
        )  # fmt: skip
        add("gpu_up", node, 1, **card)
        add("gpu_processes", node, len(holders), **card)
        add("gpu_utilization_ratio", node, min(1.0, busy), **card)
        add("gpu_memory_total_bytes", node, 40 * GIB, **card)
        add("gpu_memory_used_bytes", node, used, **card)
        add("gpu_memory_free_bytes", node, 40 * GIB - used, **card)
    _losses(add)
    for job in jobs:
        for node in dict.fromkeys(node for node, _ in job.cards):
            add(
                "gpu_job_info", node, 1, job_id=job.job_id, user=job.user, source="process",
                framework=job.framework, interactive="false",
            )  # fmt: skip
        for node, gpu in job.cards:
            held = {"job_id": job.job_id, "gpu": str(gpu), "uuid": CARDS[node, gpu]}
            add("gpu_job_holds_gpu", node, 1, **held)
            add("gpu_job_memory_bytes", node, job.memory, **held)
            if job.utilization is not None:
                add("gpu_job_utilization_ratio", node, job.utilization, **held)
        if job.images is not None:
            _training(add, job)
    _engine(history, jobs)
    return history


def _losses(add: Callable[..., None]) -> None:
    # born with the first loss: before, the node had lost nothing of theirs
    for user, gpu_seconds in (("ben", 7200), ("eve", 1800)):
        add(
            "gpuwarden_lost_gpu_seconds_total",
            "n1:9835",
            lambda time, lost=gpu_seconds: lost if time >= END - 600 else None,
            user=user,
            reason="hold",
        )


def _training(add: Callable[..., None], job: Job) -> None:
    node, run = job.cards[0][0], {"job_id": job.job_id, "run_id": f"r-{job.job_id}"}
    images, wait = job.images or 0.0, job.wait
    add(
        "yolo_info", node, 1, **run, model="yolov8m", batch="64", imgsz="640", amp="true",
        project="p",
    )  # fmt: skip
    for phase in PHASES:
        add("yolo_phase", node, 1 if phase == "train" else 0, **run, phase=phase)
    add("yolo_phase_seconds_total", node, lambda time: time - START, **run, phase="train")
    add("yolo_images_total", node, lambda time: images * (time - START), **run)
    add("yolo_data_wait_seconds_total", node, lambda time: wait * (time - START), **run)


def _engine(history: History, jobs: tuple[Job, ...]) -> None:
    middle = (START + END) // 2

    def add(name: str, value: object, /, **labels: str) -> None:
        history.add(name, ENGINE | labels, value)

    def after(time: int, value: float) -> Callable[[int], float]:
        return lambda now: value if now >= time else 0

    add("up", 1)
    add("gpuwarden_engine_tick_timestamp_seconds", lambda time: time - 2)
    add(
        "gpuwarden_engine_start_timestamp_seconds",
        lambda time: middle if time >= middle else START - 86400,
    )
    add("gpuwarden_rules_info", lambda time: 1 if time < middle else None, hash="aaaa")
    add("gpuwarden_rules_info", lambda time: 1 if time >= middle else None, hash="bbbb")
    for user, team in (("ana", "vision"), ("ben", "robotics"), ("cho", "vision")):
        add("gpuwarden_user_info", 1, user=user, team=team)
    add("gpuwarden_price_per_gpu_hour", 2.5, model="NVIDIA A100-SXM4-40GB", currency="EUR")
    decision = {"rule": "idle-held", "action": "terminate", "outcome": "verified"}
    add("gpuwarden_decisions_total", after(middle, 1), **decision, mode="enforce")
    add("gpu_idle_detected_total", after(middle, 1))
    add("gpu_released_success_total", after(middle, 1))
    add("gpu_release_failed_total", 0)
    add("gpu_memory_freed_bytes_total", after(middle, 30 * GIB))
    history.add(
        "ALERTS",
        {"alertname": "Watchdog", "alertstate": "firing", "service": "gpuwarden"},
        1,
    )
    if not jobs:
        return
    for rule, level, job, cause in (
        ("idle-held", "moderate", "j-ben", "idle"),
        ("off-profile", "light", "j-cho", "data-loading"),
    ):
        since = after(middle, 1)
        add(
            "gpuwarden_violation_active",
            lambda time, since=since: since(time) or None,
            rule=rule, level=level, job_id=job,
        )  # fmt: skip
        add(
            "gpuwarden_violation_cause",
            lambda time, since=since: since(time) or None,
            rule=rule, job_id=job, cause=cause,
        )  # fmt: skip
    # a case whose cause is not known yet, of a job that no exporter shows any more
    add("gpuwarden_violation_active", 1, rule="memory-hog", level="light", job_id="j-gone")
    add("gpuwarden_protected", 1, rule="idle-held", job_id="j-eve", reason="whitelist")
    for job in jobs:
        if job.images is not None:
            add("gpuwarden_expected_throughput_images_per_second", 78, job_id=job.job_id)
            add("gpuwarden_expected_gpu_memory_bytes", 10.5 * GIB, job_id=job.job_id)
            add("gpuwarden_expected_gpu_utilization_ratio", 0.82, job_id=job.job_id)
