"""What the nodes of a small fleet would have exported: cards, jobs, trainings, processes.

Two nodes with six cards: a training of ana's over both nodes, a notebook of ben's that holds a card
and does nothing, a starved training of cho's, a card that two users share, and a free one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.grafana.histories import HOUR, History

from gpuwarden.catalogue import PHASES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tests.grafana.histories import Window

    Adder = Callable[..., None]
    Value = float | Callable[[int], float | None]

GIB = 2**30
EPOCH_SECONDS = 610
"""Of a training: 400 s of training, 150 s of validation, 60 s of saving."""
EPOCHS = 300
BEST_EPOCH = 100
"""After so many epochs mAP falls again."""


@dataclass(frozen=True)
class Card:
    """A card of a node; one with `slices` is cut by MIG, and jobs hold those."""

    node: str
    gpu: int
    name: str = "NVIDIA A100-SXM4-40GB"
    memory: float = 40 * GIB
    slices: tuple[str, ...] = ()

    @property
    def uuid(self) -> str:
        """Of the card itself."""
        return f"GPU-{self.node[:2]}-{self.gpu}"

    def labels(self) -> dict[str, str]:
        """What names it on its node."""
        return {"gpu": str(self.gpu), "uuid": self.uuid}


@dataclass(frozen=True)
class Job:
    """A job: whose it is, what it holds, and how it behaves.

    Attributes:
        job_id, user, framework: as the exporter would say.
        cards: (instance, gpu), or (instance, gpu, uuid) for one that holds a MIG instance.
        utilization: of each of its cards, or None: not measurable.
        memory: bytes on each.
        images: per second while it trains, or None: no training.
        wait: share of the training time in which it waits for data.
        began: seconds before the end of the window; the window's whole time by default.
        ended: seconds before the end of the window at which it ended, or None: it runs.
    """

    job_id: str
    user: str
    cards: tuple[tuple[str, int] | tuple[str, int, str], ...]
    framework: str = "ultralytics"
    utilization: float | None = 0.9
    memory: float = 12 * GIB
    images: float | None = None
    wait: float = 0.1
    began: int | None = None
    ended: int | None = None

    def life(self, window: Window) -> tuple[int, float]:
        """First and last moment, in Unix seconds."""
        since = window.start if self.began is None else max(window.start, window.end - self.began)
        return since, math.inf if self.ended is None else window.end - self.ended


CARDS = tuple(Card("n1:9835", gpu) for gpu in range(4)) + tuple(
    Card("n2:9835", gpu) for gpu in range(2)
)
JOBS = (
    Job("j-ana-1", "ana", (("n1:9835", 0), ("n2:9835", 0)), images=80.0),
    Job("j-ben", "ben", (("n1:9835", 1),), "jupyter", 0.0, 30 * GIB, began=4 * HOUR),
    Job("j-cho", "cho", (("n1:9835", 2),), utilization=0.95, images=3.0, wait=0.9),
    Job("j-ana-2", "ana", (("n2:9835", 1),), "torch", None, 6 * GIB),
    Job("j-eve", "eve", (("n2:9835", 1),), "torch", None, 8 * GIB),
    # ended by a rule at noon, with the work since its last saved state
    Job("j-dan", "dan", (("n1:9835", 3),), "torch", 0.0, 20 * GIB, ended=12 * HOUR),
)
MIG_CARDS = (
    Card("n3:9835", 0, "NVIDIA H100 80GB HBM3", 80 * GIB, slices=("MIG-a", "MIG-b", "MIG-c")),
)
MIG_JOBS = (
    Job("j-mig-1", "ana", (("n3:9835", 0, "MIG-a"),), images=20.0, memory=8 * GIB),
    # no utilisation per process exists on an instance of this driver
    Job("j-mig-2", "cho", (("n3:9835", 0, "MIG-b"),), "torch", None, 9 * GIB),
)
SHARED_JOBS = (
    Job("j-two-1", "ana", (("n1:9835", 0),), utilization=0.5),
    Job("j-two-2", "ben", (("n1:9835", 0),), "torch", 0.3),
    Job("j-dim-1", "cho", (("n1:9835", 1),), "torch", None),
    Job("j-dim-2", "eve", (("n1:9835", 1),), "torch", None),
)


@dataclass(frozen=True)
class Nodes:
    """What there is to export.

    Attributes:
        cards: of all nodes.
        jobs: on them.
        dying: nodes whose exporter dies before the window's end.
        unattributed: bytes on each card that no listed process accounts for.
    """

    cards: tuple[Card, ...] = CARDS
    jobs: tuple[Job, ...] = JOBS
    dying: frozenset[str] = frozenset()
    unattributed: float = 0.0

    def write(self, history: History) -> None:
        """Add every series of the nodes."""
        for node in dict.fromkeys(card.node for card in self.cards):
            self._node(history, node)
        for card in self.cards:
            lives = {job: job.life(history.window) for job in self.jobs if _on(job, card)}
            _card(self._adder(history, card.node), card, lives, self.unattributed)
        for job in self.jobs:
            self._job(history, job)

    def _adder(self, history: History, node: str, since: int = 0, until: float = math.inf) -> Adder:
        """What adds series of a node that end with its exporter, or with a job."""
        end = min(until, history.window.dies if node in self.dying else math.inf)

        def add(name: str, value: Value, /, **labels: str) -> None:
            own = {"job": "gpuwarden", "instance": node} | labels
            history.add(name, own, value, since=since, until=end)

        return add

    def _node(self, history: History, node: str) -> None:
        window, add = history.window, self._adder(history, node)
        up = {"job": "gpuwarden", "instance": node}
        dies = node in self.dying
        history.add("up", up, lambda time: 0 if dies and time >= window.dies else 1)
        add("gpuwarden_nvml_up", 1)
        add("gpuwarden_host_pids", 1)
        add("gpuwarden_snapshot_timestamp_seconds", lambda time: time - 1)
        for collector in ("nvml", "processes", "xid"):
            add("gpuwarden_collector_success", 1, collector=collector)
        add("gpuwarden_dropped_values_total", 0, reason="too_many_words")
        add("gpuwarden_exporter_build_info", 1, version="0.1.0")
        for resource, share in (("cpu", 0.3), ("io", 0.05), ("memory", 0.01)):
            add(
                "gpuwarden_node_pressure_seconds_total",
                _grows(window.start, share),
                resource=resource,
            )
        if node != "n1:9835" or not self.jobs:
            return
        # born with the first loss: before, the node had lost nothing of theirs
        for user, reason, seconds, ago in (
            ("ben", "hold", 7200, 600),
            ("eve", "hold", 1800, 600),
            ("dan", "requeue", 3600, 12 * HOUR - 600),
        ):
            add(
                "gpuwarden_lost_gpu_seconds_total",
                lambda time, lost=seconds, at=window.end - ago: lost if time >= at else None,
                user=user,
                reason=reason,
            )

    def _job(self, history: History, job: Job) -> None:
        window = history.window
        since, until = job.life(window)
        if until <= since:
            return
        for node in dict.fromkeys(card[0] for card in job.cards):
            add = self._adder(history, node, since, until)
            _job_on_node(add, job, since)
        for place, held in enumerate(job.cards):
            add = self._adder(history, held[0], since, until)
            _holding(add, job, since, gpu=str(held[1]), uuid=uuid_of(held), pid=str(4000 + place))
        if job.images is not None:
            _training(self._adder(history, job.cards[0][0], since, until), job, since)


def uuid_of(held: tuple[str, int] | tuple[str, int, str]) -> str:
    """Of what a job holds: the MIG instance, or the card."""
    return held[2] if len(held) == 3 else f"GPU-{held[0][:2]}-{held[1]}"


def _grows(start: int, rate: float) -> Callable[[int], float]:
    return lambda time: rate * (time - start)


def _on(job: Job, card: Card) -> bool:
    return any(held[:2] == (card.node, card.gpu) for held in job.cards)


def _card(
    add: Adder, card: Card, lives: Mapping[Job, tuple[int, float]], unattributed: float
) -> None:
    def holders(time: int) -> list[Job]:
        return [job for job, (since, until) in lives.items() if since <= time < until]

    def used(time: int) -> float:
        return sum(job.memory for job in holders(time)) + unattributed

    labels = card.labels()
    busy = sum(0.5 if job.utilization is None else job.utilization for job in lives)
    busy = min(1.0, busy)
    add(
        "gpu_info", 1, **labels, name=card.name, pci_bus_id=f"0:{card.gpu}",
        driver_version="550.54.15", simulated="true",
    )  # fmt: skip
    for name, value in (
        ("gpu_up", 1),
        ("gpu_processes", lambda time: len(holders(time))),
        ("gpu_memory_activity_ratio", busy / 2),
        ("gpu_memory_total_bytes", card.memory),
        ("gpu_memory_used_bytes", used),
        ("gpu_memory_free_bytes", lambda time: card.memory - used(time)),
        ("gpu_memory_reserved_bytes", GIB / 2),
        ("gpu_memory_unified", 0),
        ("gpu_memory_unattributed_bytes", unattributed),
        ("gpu_temperature_celsius", lambda time: 35 + 40 * busy + time % 7),
        ("gpu_power_watts", 60 + 300 * busy),
        ("gpu_power_limit_watts", 400),
        ("gpu_energy_joules_total", lambda time: (60 + 300 * busy) * (time % 10**7)),
        ("gpu_pcie_receive_bytes_total", lambda time: 2e8 * busy * (time % 10**7)),
        ("gpu_pcie_transmit_bytes_total", lambda time: 1e8 * busy * (time % 10**7)),
        ("gpu_nvlink_receive_bytes_total", lambda time: 3e8 * busy * (time % 10**7)),
        ("gpu_nvlink_transmit_bytes_total", lambda time: 3e8 * busy * (time % 10**7)),
    ):
        add(name, value, **labels)
    for clock, hertz in (("sm", 1.41e9), ("memory", 1.215e9)):
        add("gpu_clock_hertz", hertz, **labels, clock=clock)
    for reason in ("sw_power_cap", "hw_thermal"):
        hot = reason == "sw_power_cap" and busy > 0.9
        add("gpu_throttle_active", lambda time, hot=hot: float(hot and time % 1800 < 300),
            **labels, reason=reason)  # fmt: skip
    for error in ("corrected", "uncorrected"):
        add("gpu_ecc_errors_total", 2 if error == "corrected" else 0, **labels, error=error)
    if card.gpu == 0:
        add("gpu_xid_errors_total", 1, **labels, xid="13")
        add("gpu_xid_last_timestamp_seconds", lambda time: time - time % 86400, **labels, xid="13")
    for place, uuid in enumerate(card.slices):
        one = {**labels, "mig_uuid": uuid}
        add("gpu_mig_info", 1, **one, gpu_instance_id=str(place), compute_instance_id="0",
            profile="1g.10gb")  # fmt: skip
        add("gpu_mig_memory_total_bytes", 10 * GIB, **one)
        add("gpu_mig_memory_used_bytes", 8 * GIB if place < len(lives) else 0, **one)
    if not card.slices:  # cut by MIG, a card has no utilisation of its own
        add("gpu_utilization_ratio", busy, **labels)
        add("gpu_tensor_activity_ratio", busy / 3, **labels)


def _job_on_node(add: Adder, job: Job, since: int) -> None:
    one = {"job_id": job.job_id}
    add(
        "gpu_job_info", 1, **one, user=job.user, source="process", framework=job.framework,
        interactive=str(job.framework == "jupyter").lower(),
    )  # fmt: skip
    add("gpu_job_executable", 1, **one, executable="/usr/bin/python3.11", cgroup="/user.slice")
    add("gpu_job_start_time_seconds", since - 30, **one)
    add("gpu_job_first_gpu_use_timestamp_seconds", since, **one)
    idle = job.utilization == 0
    for signal in ("log", "heartbeat", "cpu"):
        add(
            "gpu_job_activity_timestamp_seconds",
            since if idle else lambda time: time - 3,
            **one,
            signal=signal,
        )
    cores = 0.01 if idle else 6.0
    add("gpu_job_cpu_seconds_total", _grows(since, cores), **one)
    add("gpu_job_read_bytes_total", _grows(since, 5e7 * (1 - job.wait)), **one)
    add("gpu_job_io_wait_seconds_total", _grows(since, job.wait / 2), **one)
    add("gpu_job_threads", 60, **one)
    add("gpu_job_loader_workers", 8 if job.images else 0, **one)
    add("gpu_job_resident_memory_bytes", 9 * GIB, **one)
    add("gpu_job_processes", 9, **one, state="sleeping")
    add("gpu_job_pressure_seconds_total", _grows(since, 0.02), **one, resource="io")


def _holding(add: Adder, job: Job, since: int, *, gpu: str, uuid: str, pid: str) -> None:
    held = {"job_id": job.job_id, "gpu": gpu, "uuid": uuid}
    process = {**held, "pid": pid, "user": job.user}
    add("gpu_job_holds_gpu", 1, **held)
    add("gpu_job_memory_bytes", job.memory, **held)
    add("gpu_process_memory_bytes", job.memory, **process)
    add("gpu_process_start_time_seconds", since - 30, **process)
    if job.utilization is not None:
        add("gpu_job_utilization_ratio", job.utilization, **held)
        add("gpu_process_utilization_ratio", job.utilization, **process)


def _training(add: Adder, job: Job, since: int) -> None:
    run = {"job_id": job.job_id, "run_id": f"r-{job.job_id}"}
    images, wait = job.images or 0.0, job.wait
    spans = {"train": (0, 400), "validate": (400, 550), "checkpoint": (550, EPOCH_SECONDS)}

    def spent(phase: str, time: int) -> float:
        first, last = spans.get(phase, (0, 0))
        done, now = divmod(time - since, EPOCH_SECONDS)
        return done * (last - first) + min(max(0, now - first), last - first)

    def epoch(time: int) -> int:
        return (time - since) // EPOCH_SECONDS

    def mean_precision(time: int) -> float | None:
        done = epoch(time)
        worse = max(0, done - BEST_EPOCH) / 500
        return 0.6 - 0.5 * math.exp(-done / 30) - worse if done else None

    def saved(time: int) -> int | None:
        return since + epoch(time) * EPOCH_SECONDS if epoch(time) else None

    add("yolo_info", 1, **run, model="yolov8m", batch="64", imgsz="640", amp="true", project="p")
    for phase in PHASES:
        first, last = spans.get(phase, (0, 0))
        add("yolo_phase", lambda time, first=first, last=last: float(
            first <= (time - since) % EPOCH_SECONDS < last), **run, phase=phase)  # fmt: skip
        if phase in spans:
            add("yolo_phase_seconds_total", lambda time, phase=phase: spent(phase, time), **run,
                phase=phase)  # fmt: skip
    for name, value in (
        ("yolo_phase_start_timestamp_seconds", lambda time: time - (time - since) % 150),
        ("yolo_epoch", epoch),
        ("yolo_epochs_planned", EPOCHS),
        ("yolo_devices", len(job.cards)),
        ("yolo_images_total", lambda time: images * spent("train", time)),
        ("yolo_steps_total", lambda time: images / 64 * spent("train", time)),
        ("yolo_optimizer_steps_total", lambda time: images / 64 * spent("train", time)),
        ("yolo_loader_workers", 8),
        ("yolo_data_wait_seconds_total", lambda time: wait * spent("train", time)),
        ("yolo_nonfinite_loss_total", 0),
        ("yolo_gradient_norm", 3.5),
        ("yolo_amp_scale", 65536),
        ("yolo_checkpoint_timestamp_seconds", saved),
        ("yolo_checkpoint_durable_timestamp_seconds", saved),
        ("yolo_checkpoint_bytes", 150e6),
        ("yolo_checkpoint_seconds_total", lambda time: spent("checkpoint", time)),
        ("yolo_gpu_memory_peak_bytes", job.memory * 0.95),
        ("yolo_gpu_memory_allocated_bytes", job.memory * 0.8),
        ("yolo_gpu_memory_reserved_bytes", job.memory * 0.9),
    ):
        add(name, value, **run)
    for component, at_first in (("box_loss", 1.6), ("cls_loss", 2.4), ("dfl_loss", 1.2)):
        add("yolo_loss", lambda time, first=at_first: first * (0.4 + math.exp(-epoch(time) / 20)),
            **run, component=component)  # fmt: skip
    for metric in ("metrics/mAP50(B)", "metrics/mAP50-95(B)"):
        add("yolo_metric", mean_precision, **run, metric=metric)
    add("yolo_learning_rate", 0.01, **run, group="0")
    add("yolo_resume_mode", 1, **run, mode="exact")
