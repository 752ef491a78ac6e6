"""A small fleet as history for a real Prometheus, and jobs as facts for pure functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from gpuwarden.catalogue import CATALOGUE, PHASES, MetricType
from gpuwarden.ruleengine.histories import THROTTLE_REASONS
from gpuwarden.ruleengine.model import Profile, Rule, WhitelistEntry
from gpuwarden.ruleengine.verdicts import (
    FleetFacts,
    GpuFacts,
    JobFacts,
    RunFacts,
    SignalKey,
)

SCRAPE = 5
START = 1_750_000_000
"""Of the history; a multiple of the scrape interval."""
END = START + 600
"""The moment at which facts are gathered: two seconds after the last scrape."""
NOW = END + 2
GIB = 2.0**30
A100 = "NVIDIA A100-SXM4-40GB"

N1, N2, N3 = "n1:9835", "n2:9835", "n3:9835"

Curve = Callable[[float], float | None]
"""Unix time -> value, or None where nothing was scraped."""


@dataclass
class History:
    """Series as they would have been scraped, rendered as OpenMetrics text.

    Attributes:
        start: Unix time of the first scrape; the last one is at `END`.
        scrape: seconds between two scrapes.
        series: metric -> label text and value of each series.
    """

    start: int = START
    scrape: int = SCRAPE
    series: dict[str, list[tuple[str, Curve]]] = field(default_factory=dict)

    def add(self, metric: str, value: float | Curve, *, instance: str = N1, **labels: str) -> None:
        """Add one series; a number stays the same all the time."""
        curve = value if callable(value) else _constant(value)
        pairs = {"instance": instance, "job": "gpuwarden", **labels}
        text = ",".join(f'{name}="{word}"' for name, word in pairs.items())
        self.series.setdefault(metric, []).append((text, curve))

    def text(self) -> str:
        """All samples, ended by # EOF."""
        lines = []
        for metric, rows in self.series.items():
            known = CATALOGUE.get(metric)
            counter = known is not None and known.type is MetricType.COUNTER
            lines.append(
                f"# TYPE {metric.removesuffix('_total')} {'counter' if counter else 'gauge'}"
            )
            for labels, curve in rows:
                for time in range(self.start, END + 1, self.scrape):
                    value = curve(time)
                    if value is not None:
                        lines.append(f"{metric}{{{labels}}} {_number(value)} {time}")
        return "\n".join([*lines, "# EOF", ""])

    def node(self, instance: str, *, until: float = END, behind: float = 0.5) -> None:
        """A node whose exporter was scraped until a moment, with a clock that is behind."""
        self.add("up", 1, instance=instance)
        self.add(
            "gpuwarden_snapshot_timestamp_seconds",
            lambda time: time - behind if time <= until else None,
            instance=instance,
        )

    def card(self, uuid: str, *, instance: str = N1, index: int = 0) -> None:
        """An A100 with 40 GiB."""
        names = {"gpu": str(index), "uuid": uuid}
        self.add(
            "gpu_info",
            1,
            instance=instance,
            **names,
            name=A100,
            pci_bus_id="",
            driver_version="570",
            simulated="false",
        )
        self.add("gpu_memory_total_bytes", 40 * GIB, instance=instance, **names)
        self.add("gpu_power_watts", 300, instance=instance, **names)
        self.add("gpu_power_limit_watts", 400, instance=instance, **names)
        self.add("gpu_temperature_celsius", 66, instance=instance, **names)
        self.add("gpu_memory_used_bytes", 30 * GIB, instance=instance, **names)
        self.add("gpu_memory_activity_ratio", 0.25, instance=instance, **names)
        self.add("gpu_utilization_ratio", 0.75, instance=instance, **names)

    def instance(self, mig_uuid: str, *, of: str, memory: float, node: str = N1) -> None:
        """A MIG instance of a card."""
        names = {"gpu": "0", "uuid": of, "mig_uuid": mig_uuid}
        self.add("gpu_mig_memory_total_bytes", memory, instance=node, **names)
        ids = {"gpu_instance_id": "1", "compute_instance_id": "0", "profile": "3g.20gb"}
        self.add("gpu_mig_info", 1, instance=node, **names, **ids)

    def job(
        self,
        job_id: str,
        cards: Mapping[str, float | Curve | None],
        *,
        instance: str = N1,
        memory: float = 20 * GIB,
        until: float = END,
    ) -> None:
        """A job of ana's: card -> its utilization, None where it cannot be measured."""
        self.add(
            "gpu_job_info",
            lambda time: 1.0 if time <= until else None,
            instance=instance,
            job_id=job_id,
            user="ana",
            source="process",
            framework="torch",
            interactive="false",
        )
        for uuid, utilization in cards.items():
            names = {"job_id": job_id, "gpu": "0", "uuid": uuid}
            self.add(
                "gpu_job_holds_gpu",
                lambda time: 1.0 if time <= until else None,
                instance=instance,
                **names,
            )
            self.add("gpu_job_memory_bytes", memory, instance=instance, **names)
            if utilization is not None:
                self.add("gpu_job_utilization_ratio", utilization, instance=instance, **names)
        self.add("gpu_job_start_time_seconds", START - 400, instance=instance, job_id=job_id)
        self.add(
            "gpu_job_first_gpu_use_timestamp_seconds", START - 300, instance=instance, job_id=job_id
        )

    def run(
        self,
        job_id: str,
        run_id: str,
        *,
        images: float,
        phase: str = "train",
        instance: str = N1,
    ) -> None:
        """What a trainer says: images per second, and its phase since the history's start."""
        names = {"job_id": job_id, "run_id": run_id}
        self.add(
            "yolo_info",
            1,
            instance=instance,
            **names,
            model="yolov8m",
            batch="64",
            imgsz="640",
            amp="true",
            project="cats",
        )
        for each in PHASES:
            self.add("yolo_phase", float(each == phase), instance=instance, **names, phase=each)
        self.add("yolo_phase_start_timestamp_seconds", START, instance=instance, **names)
        self.add("yolo_images_total", _rate(images), instance=instance, **names)
        self.add("yolo_steps_total", _rate(images / 64), instance=instance, **names)
        self.add("yolo_data_wait_seconds_total", _rate(0.6), instance=instance, **names)
        self.add("yolo_checkpoint_timestamp_seconds", START + 500, instance=instance, **names)
        self.add(
            "yolo_checkpoint_durable_timestamp_seconds", START + 400, instance=instance, **names
        )
        self.add("yolo_resume_mode", 1, instance=instance, **names, mode="exact")


def _number(value: float) -> str:
    return "NaN" if math.isnan(value) else repr(value)


def _constant(value: float) -> Curve:
    return lambda _: float(value)


def _rate(per_second: float) -> Curve:
    return lambda time: (time - START) * per_second


def until(moment: float, value: float) -> Curve:
    """A value that is scraped until a moment."""
    return lambda time: value if time <= moment else None


def fleet_history() -> History:
    """Node 1 with every kind of job, a dark node 2, and node 3 with a slow clock."""
    history = History()
    history.node(N1)
    history.node(N2, until=END - 60)
    history.node(N3, behind=30)
    cards = ("busy0", "busy1", "half0", "half1", "idle", "gap", "single", "stale", "mig", "nan")
    for index, uuid in enumerate((*cards, "train", "hung", "val", "twice", "shared", "free")):
        history.card(uuid, index=index)
    history.add("gpu_memory_total_bytes", 40 * GIB, job="another", gpu="4", uuid="idle")
    history.card("dark", instance=N2)
    history.card("slow", instance=N3)
    history.job("busy", {"busy0": 0.9, "busy1": 0.8})
    history.job("half", {"half0": 0.9, "half1": 0.0})
    history.job("idle", {"idle": 0.0}, memory=30 * GIB)
    history.job("gap", {"gap": lambda time: None if time in (END - 5, END - 10) else 0.0})
    history.job("single", {"single": lambda time: 0.0 if time == END else None})
    history.job("stale", {"stale": until(END - 10, 0.0)})
    history.job("mig", {"mig": None})
    history.instance("slice", of="mig", memory=25 * GIB)
    history.job("sliced", {"slice": 0.4}, memory=5 * GIB)
    history.job("nan", {"nan": math.nan})
    history.job("train", {"train": 0.9})
    history.run("train", "r-train", images=50)
    history.job("hung", {"hung": 1.0})
    history.run("hung", "r-hung", images=0)
    history.job("val", {"val": 0.3})
    history.run("val", "r-val", images=50, phase="validate")
    history.job("twice", {"twice": 0.9})
    history.run("twice", "r-twice", images=50)
    history.job("shared-a", {"shared": 0.2})
    history.job("shared-b", {"shared": 0.3})
    history.run("shared-b", "r-twice", images=50)
    history.job("dark", {"dark": 0.0}, instance=N2, until=END - 60)
    history.job("slow", {"slow": 0.0}, instance=N3)
    names = {"job_id": "train"}
    for signal, moment in (("log", END - 3), ("heartbeat", END - 1), ("cpu", END - 2)):
        history.add("gpu_job_activity_timestamp_seconds", moment, **names, signal=signal)
    history.add(
        "gpu_job_executable", 1, **names, executable="/usr/bin/python3.11", cgroup="/a.slice"
    )
    history.add("gpu_job_cpu_seconds_total", _rate(3.5), **names)
    history.add("gpu_job_read_bytes_total", _rate(2 * 2**20), **names)
    history.add("gpu_job_io_wait_seconds_total", _rate(0.5), **names)
    history.add("gpu_job_loader_workers", 8, **names)
    history.add("gpu_job_resident_memory_bytes", 6 * GIB, **names)
    history.add(
        "gpu_process_start_time_seconds",
        START - 400,
        **names,
        gpu="10",
        uuid="train",
        pid="4711",
        user="ana",
    )
    history.add("gpu_job_processes", 1, **names, state="zombie")
    history.add("gpu_job_processes", 9, **names, state="sleeping")
    for resource, share in (("cpu", 0.25), ("io", 0.125), ("memory", 1.0)):
        history.add("gpu_job_pressure_seconds_total", _rate(share), **names, resource=resource)
    history.add("gpu_memory_unattributed_bytes", 3 * GIB, gpu="15", uuid="free")
    slowed = {"train": ("10", {"hw_thermal"}), "free": ("15", {"sw_thermal", "sw_power_cap"})}
    for uuid, (gpu, reasons) in (slowed | {"shared": ("14", {"sw_power_cap"})}).items():
        for reason in THROTTLE_REASONS:
            active = float(reason in reasons)
            history.add("gpu_throttle_active", active, gpu=gpu, uuid=uuid, reason=reason)
    return history


# ---------------------------------------------------------------------------------------------
# Facts for pure functions

NOW_FACTS = 1_000_000.0
"""The moment of the facts below."""

UTILIZATION = SignalKey("gpu_utilization", "max", samples=3)
SHARE = SignalKey("gpu_memory_share", "min", 300)


def a_rule(when: object, **fields: object) -> Rule:
    """A rule that only looks, with a cold start of a minute."""
    written: dict[str, object] = {
        "id": "r",
        "target": "job",
        "cold_start": "60s",
        "for": "5m",
        "when": when,
        "stages": [{"level": "light", "after": "0s", "do": "log"}],
    }
    return Rule.model_validate(written | fields)


def cards(*uuids: str, tenants: int = 1) -> tuple[GpuFacts, ...]:
    """A100 cards."""
    return tuple(
        GpuFacts(uuid, str(index), A100, 40 * GIB, tenants) for index, uuid in enumerate(uuids)
    )


def a_job(
    values: Mapping[SignalKey, Mapping[str, float]] | None = None, **fields: object
) -> JobFacts:
    """A job of ana's that first used its one GPU two hours ago."""
    known: dict[str, object] = {
        "job_id": "j",
        "instance": N1,
        "user": "ana",
        "framework": "torch",
        "gpus": cards("g0"),
        "start_time": NOW_FACTS - 7300,
        "first_gpu_use": NOW_FACTS - 7200,
        "values": values or {},
    }
    return JobFacts(**(known | fields))  # type: ignore[arg-type]


def a_run(**fields: object) -> RunFacts:
    """A training of yolov8m, batch 64, 640 px, in the phase train."""
    known: dict[str, object] = {
        "run_id": "run1",
        "model": "yolov8m",
        "batch": 64,
        "imgsz": 640,
        "phase": "train",
        "phase_since": NOW_FACTS - 3600,
    }
    return RunFacts(**(known | fields))  # type: ignore[arg-type]


def fleet_of(*jobs: JobFacts, **fields: object) -> FleetFacts:
    """A fleet of one lit node."""
    known: dict[str, object] = {"expected_nodes": 1, "lit_nodes": 1}
    return FleetFacts(
        time=NOW_FACTS,
        jobs={job.job_id: job for job in jobs},
        **(known | fields),  # type: ignore[arg-type]
    )


def a_profile(**fields: object) -> Profile:
    """What yolov8m with batch 64 needs on an A100."""
    written: dict[str, object] = {
        "model": "yolov8m",
        "batch": 64,
        "imgsz": 640,
        "hardware": A100,
        "gpu_memory": "10GiB",
        "gpu_utilization": "80%",
        "throughput": "100 img/s",
    }
    return Profile.model_validate(written | fields)


def an_entry(match: Mapping[str, str], **fields: object) -> WhitelistEntry:
    """A protection from the rule `r` that has not expired."""
    written: dict[str, object] = {
        "match": match,
        "rules": ["r"],
        "reason": "shared service",
        "approved_by": "ops",
        "expires": "2027-06-30T00:00:00+08:00",
    }
    return WhitelistEntry.model_validate(written | fields)
