"""A large fleet as series of a real Prometheus, written by its own remote-write receiver.

Names, labels and kinds of values are the exporter's and the trainer's. What a rule looks back over
has its whole history; what is only read now (names, starts, signs of life) has the last minutes.
Samples are written ahead of the clock, so that the fleet stays alive while it is measured.
"""

from __future__ import annotations

import functools
import random
import struct
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import httpx

from gpuwarden.catalogue import PHASES
from gpuwarden.ruleengine.remote_writes import delimited, uncompressed, varint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SCRAPE_SECONDS = 60
"""Of the fleet. Prometheus has a twelfth of the samples to read that it has with 5 s, and the
engine no row less: the comparison is harder for the engine, and the fleet fits this machine."""
BACK_SECONDS = 75 * 60
"""As far as the longest window of the shipped rules reaches, and more."""
RECENT_SECONDS = 5 * 60
AHEAD_SECONDS = 25 * 60
DARK_SINCE_SECONDS = 10 * 60
CARDS_PER_NODE = 8
GIB = 2.0**30
A100 = "NVIDIA A100-SXM4-40GB"

MIX = "70 % healthy YOLO, 10 % not YOLO, 5 % idle, 5 % starved of data, 5 % off profile, 5 % dark"
_KINDS = ("healthy",) * 14 + ("other",) * 2 + ("idle", "starved", "slow")
"""Of the jobs on lit nodes; every twentieth node is dark."""
_HARMLESS, _HARMFUL = ("sw_power_cap", "gpu_idle"), ("hw_slowdown", "hw_thermal", "sw_thermal")
_BATCH_BYTES = 4 * 1024 * 1024
_SHAPES = 16


@dataclass(frozen=True, slots=True)
class _Training:
    """What a trainer says of itself, per second."""

    images: float
    wait: float


_TRAININGS = {
    "healthy": _Training(165.0, 0.05),
    "starved": _Training(45.0, 0.7),
    "slow": _Training(70.0, 0.05),
}
_UTILIZATION = {"healthy": 0.93, "other": 0.85, "idle": 0.0, "starved": 0.3, "slow": 0.9}


def write_fleet(url: str, cards: int, *, progress: Callable[[float], None]) -> int:
    """Write a fleet of so many cards, with a job on each, into a Prometheus.

    Args:
        url: of the Prometheus.
        cards: how many; a multiple of eight.
        progress: told the share that is written, 0 to 1.

    Returns:
        How many series were written.
    """
    now = int(time.time()) // SCRAPE_SECONDS * SCRAPE_SECONDS
    nodes, series = cards // CARDS_PER_NODE, 0
    batch = bytearray()
    with httpx.Client(timeout=120.0, trust_env=False) as client:
        for node in range(nodes):
            for each in _node(node, now):
                batch += each
                series += 1
            if len(batch) > _BATCH_BYTES or node == nodes - 1:
                _send(client, url, bytes(batch))
                batch.clear()
                progress((node + 1) / nodes)
    return series


def _send(client: httpx.Client, url: str, message: bytes) -> None:
    answer = client.post(
        f"{url}/api/v1/write",
        content=uncompressed(message),
        headers={
            "Content-Encoding": "snappy",
            "Content-Type": "application/x-protobuf",
            "X-Prometheus-Remote-Write-Version": "0.1.0",
        },
    )
    answer.raise_for_status()


# -- series


class _Writer:
    """Series of one node, encoded as they are made."""

    def __init__(self, node: int, now: int, *, dark: bool) -> None:
        self._now = now
        self._fixed = {"instance": f"gpu-{node:04d}.example.org:9835", "job": "gpuwarden"}
        self._until = now - DARK_SINCE_SECONDS if dark else now + AHEAD_SECONDS
        self._dice = random.Random(node)  # noqa: S311 - a bench is not to be guessed at

    def long(self, name: str, value: float, noise: float = 0.0, /, **labels: str) -> bytes:
        """A gauge with its whole history."""
        shape = self._dice.randrange(_SHAPES) if noise else 0
        samples = _gauge(self._now - BACK_SECONDS, self._until, value, noise=noise, shape=shape)
        return self._series(name, labels, samples)

    def counter(self, name: str, per_second: float, /, **labels: str) -> bytes:
        """A counter with its whole history."""
        start = self._now - BACK_SECONDS
        return self._series(name, labels, _counter(start, self._until, per_second))

    def short(self, name: str, value: float, /, **labels: str) -> bytes:
        """A gauge of which only the last minutes are read."""
        samples = _gauge(self._until - self._recent(), self._until, value, noise=0.0, shape=0)
        return self._series(name, labels, samples)

    def stamp(self, name: str, behind: float, /, **labels: str) -> bytes:
        """A time that stays so many seconds behind the sample's own."""
        return self._series(
            name, labels, _stamps(self._until - self._recent(), self._until, behind)
        )

    def _recent(self) -> int:
        return RECENT_SECONDS + AHEAD_SECONDS

    def _series(self, name: str, labels: dict[str, str], samples: bytes) -> bytes:
        pairs = sorted({"__name__": name, **self._fixed, **labels}.items())
        body = b"".join(
            delimited(1, delimited(1, k.encode()) + delimited(2, v.encode())) for k, v in pairs
        )
        return delimited(1, body + samples)


def _node(node: int, now: int) -> Iterator[bytes]:
    dark = node % 20 == 19
    writer = _Writer(node, now, dark=dark)
    yield writer.short("up", 0.0 if dark else 1.0)
    yield writer.stamp("gpuwarden_snapshot_timestamp_seconds", 1.0)
    for index in range(CARDS_PER_NODE):
        number = node * CARDS_PER_NODE + index
        kind = _KINDS[number % len(_KINDS)]
        card = {"gpu": str(index), "uuid": f"GPU-{number:08x}-5a3c-4d21-9b1f-0123456789ab"}
        yield from _card(writer, card, kind)
        yield from _job(writer, card, kind, number, now)


def _card(writer: _Writer, card: dict[str, str], kind: str) -> Iterator[bytes]:
    names = {"name": A100, "pci_bus_id": f"00000000:{card['gpu']}7:00.0", "driver_version": "570"}
    yield writer.short("gpu_info", 1.0, **card, **names, simulated="false")
    yield writer.long("gpu_memory_total_bytes", 40 * GIB, **card)
    yield writer.long("gpu_temperature_celsius", 40 + 30 * _UTILIZATION[kind], 3.0, **card)
    yield writer.long("gpu_memory_unattributed_bytes", 0.5 * GIB, **card)
    noise = 0.0 if kind == "idle" else 0.05
    yield writer.long("gpu_utilization_ratio", _UTILIZATION[kind], noise, **card)
    for reason in (*_HARMFUL, *_HARMLESS):
        active = float(reason == "sw_power_cap" and kind == "healthy")
        yield writer.long("gpu_throttle_active", active, **card, reason=reason)


def _job(
    writer: _Writer, card: dict[str, str], kind: str, number: int, now: int
) -> Iterator[bytes]:
    job = {"job_id": f"slurm-main-{100_000 + number}-0"}
    yield writer.short(
        "gpu_job_info",
        1.0,
        **job,
        user=f"user{number % 300:03d}",
        source="slurm",
        framework="ultralytics" if kind in _TRAININGS else "torch",
        interactive="false",
    )
    executable = {"executable": "/usr/bin/python3.11", "cgroup": f"/slurm/job_{number}"}
    yield writer.short("gpu_job_executable", 1.0, **job, **executable)
    yield writer.short("gpu_job_holds_gpu", 1.0, **job, **card)
    started = float(now - 86400 - number % 3600)
    yield writer.short("gpu_job_start_time_seconds", started, **job)
    yield writer.short("gpu_job_first_gpu_use_timestamp_seconds", started + 60, **job)
    process = {"pid": str(4000 + number % 20000), "user": f"user{number % 300:03d}"}
    yield writer.short("gpu_process_start_time_seconds", started, **job, **card, **process)
    behind = 7200.0 if kind == "idle" else 2.0
    for signal in ("log", "cpu", *(("heartbeat",) if kind in _TRAININGS else ())):
        yield writer.stamp("gpu_job_activity_timestamp_seconds", behind, **job, signal=signal)
    utilization, noise = _UTILIZATION[kind], 0.0 if kind == "idle" else 0.05
    yield writer.long("gpu_job_utilization_ratio", utilization, noise, **job, **card)
    yield writer.long("gpu_job_memory_bytes", 25 * GIB, **job, **card)
    yield writer.counter("gpu_job_cpu_seconds_total", 0.0 if kind == "idle" else 4.0, **job)
    yield writer.counter("gpu_job_io_wait_seconds_total", 0.1, **job)
    for resource in ("cpu", "io"):
        yield writer.counter("gpu_job_pressure_seconds_total", 0.02, **job, resource=resource)
    for state in ("running", "sleeping", "zombie"):
        count = {"running": 1.0, "sleeping": 9.0, "zombie": 0.0}[state]
        yield writer.long("gpu_job_processes", count, **job, state=state)
    yield writer.long("gpu_job_loader_workers", 8.0, **job)
    training = _TRAININGS.get(kind)
    if training is not None:
        yield from _training(writer, {**job, "run_id": f"run-{number:06d}"}, training, now)


def _training(
    writer: _Writer, run: dict[str, str], training: _Training, now: int
) -> Iterator[bytes]:
    declared = {"model": "yolov8m", "batch": "64", "imgsz": "640", "amp": "true"}
    yield writer.short("yolo_info", 1.0, **run, **declared, project="runs/detect")
    yield writer.short("yolo_devices", 1.0, **run)
    for phase in PHASES:
        yield writer.long("yolo_phase", float(phase == "train"), **run, phase=phase)
    yield writer.short("yolo_phase_start_timestamp_seconds", float(now - 5000), **run)
    yield writer.short("yolo_checkpoint_timestamp_seconds", float(now - 900), **run)
    yield writer.short("yolo_checkpoint_durable_timestamp_seconds", float(now - 900), **run)
    yield writer.short("yolo_resume_mode", 1.0, **run, mode="exact")
    yield writer.counter("yolo_images_total", training.images, **run)
    yield writer.counter("yolo_steps_total", training.images / 64, **run)
    yield writer.counter("yolo_data_wait_seconds_total", training.wait, **run)
    yield writer.long("yolo_nonfinite_loss_total", 0.0, **run)
    for component, value in (("box", 1.2), ("cls", 0.8), ("dfl", 1.1)):
        yield writer.long("yolo_loss", value, 0.1, **run, component=component)


# -- samples


def _times(start: int, until: int) -> range:
    return range(start, until + 1, SCRAPE_SECONDS)


@functools.lru_cache(maxsize=4096)
def _gauge(start: int, until: int, value: float, *, noise: float, shape: int) -> bytes:
    dice = random.Random(shape)  # noqa: S311 - likewise
    return b"".join(
        _sample(at, max(0.0, value + noise * dice.uniform(-1, 1))) for at in _times(start, until)
    )


@functools.lru_cache(maxsize=4096)
def _counter(start: int, until: int, per_second: float) -> bytes:
    return b"".join(_sample(at, (at - start) * per_second) for at in _times(start, until))


@functools.lru_cache(maxsize=4096)
def _stamps(start: int, until: int, behind: float) -> bytes:
    return b"".join(_sample(at, at - behind) for at in _times(start, until))


def _sample(at: int, value: float) -> bytes:
    return delimited(2, b"\x09" + struct.pack("<d", value) + b"\x10" + varint(at * 1000))
