"""Jobs of the pages of exporters, for `gpuwarden top` without an engine: the same rows, no verdict.

A rate needs two looks: throughput and the time left are known from the second page on.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from prometheus_client.parser import text_string_to_metric_families

from gpuwarden.errors import ServiceUnavailable
from gpuwarden.ruleengine.fleet_rows import expected_fields, job_fields, verdict_fields
from gpuwarden.ruleengine.profiles import expectation
from gpuwarden.ruleengine.top_pictures import NO_ENGINE
from gpuwarden.ruleengine.verdicts import GpuFacts, JobFacts, RunFacts

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MAX_JOBS: Final = 20_000
"""Of one page: what a page could make up must not fill memory."""
OLD_SECONDS: Final = 15.0
"""A page whose snapshot has not changed for this long is old."""
_READ: Final = frozenset(
    {
        "gpu_info",
        "gpu_job_info",
        "gpu_job_holds_gpu",
        "gpu_job_memory_bytes",
        "gpu_job_start_time_seconds",
        "gpu_job_utilization_ratio",
        "gpu_memory_total_bytes",
        "gpuwarden_snapshot_timestamp_seconds",
        "yolo_devices",
        "yolo_epoch",
        "yolo_epochs_planned",
        "yolo_images_total",
        "yolo_info",
        "yolo_phase",
        "yolo_phase_seconds_total",
    }
)
_NEEDED: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "gpu_info": ("uuid",),
        "gpu_memory_total_bytes": ("uuid",),
        "gpu_job_holds_gpu": ("uuid", "job_id"),
        "gpu_job_info": ("job_id",),
    }
)
"""Labels without which a sample says nothing."""
_LARGEST = 1e18
"""What is no number, or none that can be shown, is left out."""
_LOOKS = 64
"""Remembered of each training."""

Series = dict[str, list[tuple["Mapping[str, str]", float]]]


def read_page(text: str, place: str) -> Series:
    """The series of an exporter's page that jobs are told of.

    Raises:
        ServiceUnavailable: it is no page of metrics, or none of gpuwarden's.
    """
    found: Series = {name: [] for name in _READ}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name not in _READ or len(found[sample.name]) >= MAX_JOBS:
                    continue
                told = all(name in sample.labels for name in _NEEDED.get(sample.name, ()))
                if told and abs(sample.value) < _LARGEST:
                    found[sample.name].append((sample.labels, float(sample.value)))
    except (ValueError, KeyError, IndexError) as error:
        raise ServiceUnavailable(f"{place} gave no page of metrics: {error}") from error
    if "gpuwarden_nvml_up" not in text:
        raise ServiceUnavailable(f"{place} is no exporter of gpuwarden")
    return found


@dataclass(slots=True)
class _Pace:
    """How a training went on between looks: (monotonic time, epoch, images, seconds in train)."""

    looks: deque[tuple[float, float, float, float]] = field(
        default_factory=lambda: deque(maxlen=_LOOKS)
    )

    def look(self, at: float, epoch: float, images: float, trained: float) -> None:
        if self.looks and (images < self.looks[-1][2] or epoch < self.looks[-1][1]):
            self.looks.clear()  # it began anew
        self.looks.append((at, epoch, images, trained))

    @property
    def throughput(self) -> float | None:
        """Images per second while training."""
        (_, _, before, since), (_, _, now, until) = self.looks[0], self.looks[-1]
        return (now - before) / (until - since) if until - since >= 1.0 else None

    def time_left(self, epochs: float | None) -> float | None:
        """Seconds, by the epochs that have passed under our eyes."""
        (since, first, _, _), (until, last, _, _) = self.looks[0], self.looks[-1]
        if epochs is None or last <= first or until <= since:
            return None
        return (epochs - last) * (until - since) / (last - first)


class Pages:
    """What the pages of some exporters have told, over time."""

    def __init__(self) -> None:
        self._paces: dict[tuple[str, str, str], _Pace] = {}
        self._snapshots: dict[str, tuple[float, float]] = {}

    def rows(self, pages: Mapping[str, Series], now: float) -> list[dict[str, Any]]:
        """Every job, in the shape of the fleet's document.

        Args:
            pages: address of an exporter -> what its page says.
            now: monotonic time.
        """
        found = [row for place, page in pages.items() for row in self._page(place, page, now)]
        seen = {(row["node"], row["job_id"], row["run_id"] or "") for row in found}
        self._paces = {key: pace for key, pace in self._paces.items() if key in seen}
        return found

    def cards(self, pages: Mapping[str, Series]) -> tuple[int, int]:
        """How many cards there are, and how many of them a job holds."""
        every = {labels["uuid"] for page in pages.values() for labels, _ in page["gpu_info"]}
        held = {
            labels["uuid"] for page in pages.values() for labels, _ in page["gpu_job_holds_gpu"]
        }
        return len(every | held), len(held)

    def _page(self, place: str, page: Series, now: float) -> Iterable[dict[str, Any]]:
        why_old = self._why_old(place, page, now)
        names = {labels["uuid"]: labels.get("name", "") for labels, _ in page["gpu_info"]}
        memory = {labels["uuid"]: value for labels, value in page["gpu_memory_total_bytes"]}
        cards: dict[str, list[GpuFacts]] = {}
        for labels, _ in page["gpu_job_holds_gpu"]:
            uuid = labels["uuid"]
            card = GpuFacts(uuid, labels.get("gpu", ""), names.get(uuid, ""), memory.get(uuid))
            cards.setdefault(labels["job_id"], []).append(card)
        by_job = {name: _grouped(page[name]) for name in _READ if name.startswith(("gpu_j", "y"))}
        for labels, _ in page["gpu_job_info"]:
            job_id = labels["job_id"]
            mine = {name: jobs.get(job_id, []) for name, jobs in by_job.items()}
            job = JobFacts(
                job_id,
                place,
                user=labels.get("user", ""),
                framework=labels.get("framework", ""),
                interactive=labels.get("interactive") == "true",
                gpus=tuple(sorted(cards.get(job_id, []), key=lambda gpu: gpu.index.zfill(4))),
                start_time=_value(mine["gpu_job_start_time_seconds"]),
                run=_run(mine, len(cards.get(job_id, ()))),
                fresh=not why_old,
                not_fresh_reason=why_old,
            )
            yield self._row(job, mine, now)

    def _why_old(self, place: str, page: Series, now: float) -> str:
        taken = _value(page["gpuwarden_snapshot_timestamp_seconds"])
        if taken is None:
            return "its exporter has no current snapshot"
        known = self._snapshots.get(place)
        if known is None or known[0] != taken:
            self._snapshots[place] = (taken, now)
            return ""
        # Its clock is not compared with ours: only whether it goes on.
        return "its snapshot does not change" if now - known[1] > OLD_SECONDS else ""

    def _row(self, job: JobFacts, mine: Series, now: float) -> dict[str, Any]:
        run = job.run
        epoch, epochs = _value(mine["yolo_epoch"]), _value(mine["yolo_epochs_planned"])
        throughput = left = None
        if run is not None and epoch is not None:
            pace = self._paces.setdefault((job.instance, job.job_id, run.run_id), _Pace())
            images = _value(mine["yolo_images_total"]) or 0.0
            trained = next(
                (
                    value
                    for labels, value in mine["yolo_phase_seconds_total"]
                    if labels.get("phase") == "train"
                ),
                0.0,
            )
            pace.look(now, epoch, images, trained)
            throughput, left = pace.throughput, pace.time_left(epochs)
        uses = [value for _, value in mine["gpu_job_utilization_ratio"]]
        return {
            **job_fields(job, user=job.user, team=""),
            "epoch": epoch,
            "epochs": epochs,
            "time_left": left,
            "utilization": sum(uses) / len(uses) if uses else None,
            "memory_bytes": max((v for _, v in mine["gpu_job_memory_bytes"]), default=None),
            "throughput": throughput,
            **expected_fields(expectation(job, ())),
            "verdict": verdict_fields(NO_ENGINE),
        }


def _grouped(series: list[tuple[Mapping[str, str], float]]) -> Series:
    found: Series = {}
    for labels, value in series:
        found.setdefault(labels.get("job_id", ""), []).append((labels, value))
    return found


def _value(series: list[tuple[Mapping[str, str], float]]) -> float | None:
    return series[0][1] if series else None


def _run(mine: Series, cards: int) -> RunFacts | None:
    if not mine["yolo_info"]:
        return None
    labels = mine["yolo_info"][0][0]
    phases = [item.get("phase") for item, value in mine["yolo_phase"] if value == 1]
    return RunFacts(
        labels.get("run_id", ""),
        model=labels.get("model", ""),
        batch=_number(labels.get("batch", "")),
        imgsz=_number(labels.get("imgsz", "")),
        amp={"true": True, "false": False}.get(labels.get("amp", "")),
        project=labels.get("project", ""),
        phase=phases[0] if phases else None,
        conflict=len({item.get("run_id") for item, _ in mine["yolo_info"]}) > 1,
        other_cards=any(value != cards for _, value in mine["yolo_devices"]),
    )


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None
