"""The series of an inline test: those that its jobs make, and those that are given in full. Pure.

A made-up exporter is scraped every `interval`. What it leaves out ends with the mark by which
Prometheus knows that a series is over, as on a real node.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpuwarden.catalogue import PHASES, SCRAPE_JOB
from gpuwarden.ruleengine.notations import (
    STALE,
    SeriesName,
    parse_selector,
    parse_values,
    sorted_labels,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from gpuwarden.ruleengine.notations import Value
    from gpuwarden.ruleengine.rule_tests import CardConduct, Conduct, DeclaredJob, Outage, RuleTest

CARD_MEMORY_BYTES = 40 * 2.0**30
POWER_LIMIT_WATTS = 400.0
THROTTLE_REASONS = ("sw_power_cap", "hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake")
"""None of them is active, unless a series says so."""
_MEASURED_IN_MIG = re.compile(r"\b(GH|GB|H|B)[0-9]{2,3}")
"""Hopper and Blackwell, as in H100, GH200 or B200."""
BEHIND_SECONDS = 0.5
"""Age of an exporter's snapshot when it is scraped."""


@dataclass(frozen=True, slots=True)
class Likeness:
    """What a job does, in base units.

    Attributes:
        help: one sentence for the reference.
        memory_share: of each card's memory; `memory` in bytes goes before it.
        alive: whether it writes to its log, and its trainer's heartbeat goes on.
    """

    help: str
    utilization: float
    temperature: float
    power: float
    cpu: float
    throughput: float
    memory_share: float = 0.5
    data_wait: float = 0.0
    alive: bool = True


@dataclass(frozen=True, slots=True)
class _State:
    """What a job does now; the memory is that of each card, in bytes."""

    utilization: float
    memory: float
    temperature: float
    power: float
    cpu: float
    throughput: float
    data_wait: float
    log: bool
    heartbeat: bool
    phase: str = "train"
    gone: bool = False


def _like(word: str, card_memory: float) -> _State:
    like = LIKENESSES[word]
    return _State(
        utilization=like.utilization,
        memory=like.memory_share * card_memory,
        temperature=like.temperature,
        power=like.power,
        cpu=like.cpu,
        throughput=like.throughput,
        data_wait=like.data_wait,
        log=like.alive,
        heartbeat=like.alive,
    )


LIKENESSES: dict[str, Likeness] = {
    "healthy": Likeness(
        "Trains well.", utilization=0.85, temperature=65, power=300, cpu=4, throughput=100
    ),
    "idle": Likeness(
        "Holds its card and does nothing.",
        utilization=0,
        temperature=35,
        power=60,
        cpu=0,
        throughput=0,
        alive=False,
    ),
    "hog": Likeness(
        "Fills the card's memory and is slow.",
        utilization=0.4,
        memory_share=0.95,
        temperature=60,
        power=200,
        cpu=2,
        throughput=20,
        data_wait=0.1,
    ),
    "spinning": Likeness(
        "Keeps the card busy, and almost no image comes out of it.",
        utilization=1,
        temperature=70,
        power=350,
        cpu=1,
        throughput=1,
    ),
    "starved": Likeness(
        "Waits for its data.",
        utilization=0.25,
        temperature=55,
        power=150,
        cpu=2,
        throughput=25,
        data_wait=0.7,
    ),
}
"""The words under `like`."""

_CARD = ("utilization", "memory", "temperature", "power")
_JOB = (*_CARD, "cpu", "throughput", "data_wait", "log", "heartbeat", "phase", "gone")


@dataclass
class History:
    """Samples by series: Unix time in milliseconds -> value."""

    series: dict[SeriesName, dict[int, Value]] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        """How many there are."""
        return sum(len(row) for row in self.series.values())

    def add(self, metric: str, time: float, value: float, labels: Mapping[str, str]) -> None:
        """Add a sample, or replace the one of that moment."""
        row = self.series.setdefault(SeriesName(metric, sorted_labels(labels)), {})
        row[round(time * 1000)] = value

    def slices(self, seconds: float) -> Iterator[dict[SeriesName, list[tuple[int, Value]]]]:
        """The samples in portions of a length of time, from the oldest on."""
        width = round(seconds * 1000)
        parts: dict[int, dict[SeriesName, list[tuple[int, Value]]]] = {}
        for name, row in self.series.items():
            for time, value in sorted(row.items()):
                parts.setdefault(time // width, {}).setdefault(name, []).append((time, value))
        for _, part in sorted(parts.items()):
            yield part


def history(test: RuleTest) -> History:
    """The series of a test, from its start to its last expectation."""
    start = test.start.timestamp()
    times = [start + step * test.interval for step in range(steps(test))]
    made = History()
    nodes = dict.fromkeys(job.node for job in test.jobs)
    for node in nodes:
        _node(made, test, node, times)
    places = _places(test.jobs)
    for job in test.jobs:
        dark = [outage for outage in test.outages if outage.node == job.node]
        _Made(job, test, dark, places).write(made, times)
    _end(made, times)
    for given in test.series:
        values = parse_values(given.values)
        made.series[parse_selector(given.series)] = {
            round((start + step * test.interval) * 1000): value
            for step, value in enumerate(values)
            if value is not None
        }
    return made


def made_names(test: RuleTest) -> set[SeriesName]:
    """Names of the series that the jobs of a test make at their beginning."""
    made, now = History(), test.start.timestamp()
    places = _places(test.jobs)
    for job in test.jobs:
        alone = job.model_copy(update={"begins": 0.0, "then": ()})
        _Made(alone, test, [], places).write(made, [now])
    return set(made.series)


def _places(jobs: Sequence[DeclaredJob]) -> dict[tuple[str, str], int]:
    """(node, UUID) -> number of the card on its node."""
    places: dict[tuple[str, str], int] = {}
    counts: dict[str, int] = {}
    for job in jobs:
        for uuid in job.card_names:
            if (job.node, uuid) not in places:
                places[job.node, uuid] = counts.get(job.node, 0)
                counts[job.node] = places[job.node, uuid] + 1
    return places


def steps(test: RuleTest) -> int:
    """How many scrapes a test has."""
    return math.floor(test.length / test.interval) + 1


def _is_dark(outages: list[Outage], since: float) -> bool:
    return any(outage.begin <= since < outage.until for outage in outages)


def _node(made: History, test: RuleTest, node: str, times: list[float]) -> None:
    outages = [outage for outage in test.outages if outage.node == node]
    labels = {"instance": node, "job": SCRAPE_JOB}
    for time in times:
        dark = _is_dark(outages, time - test.start.timestamp())
        made.add("up", time, 0.0 if dark else 1.0, labels)
        if not dark:
            made.add("gpuwarden_snapshot_timestamp_seconds", time, time - BEHIND_SECONDS, labels)


def _end(made: History, times: list[float]) -> None:
    """Mark the end of every series where a scrape lacks it; the mark is given once."""
    moments = [round(time * 1000) for time in times]
    for row in made.series.values():
        there = False
        for moment in moments:
            if there and moment not in row:
                row[moment] = STALE
            there = isinstance(row.get(moment), float)


@dataclass
class _Counters:
    """What only grows, and when the job last showed a sign of life."""

    cpu: float = 0.0
    images: float = 0.0
    waited: float = 0.0
    activity: dict[str, float] = field(default_factory=dict)


class _Made:
    """What one declared job shows at each scrape."""

    def __init__(
        self,
        job: DeclaredJob,
        test: RuleTest,
        outages: list[Outage],
        places: Mapping[tuple[str, str], int],
    ) -> None:
        self._job = job
        self._places = [places[job.node, uuid] for uuid in job.card_names]
        self._interval = test.interval
        self._start = test.start.timestamp()
        self._born = self._start + job.begins - job.age
        self._outages = outages
        self._total = job.card_memory or CARD_MEMORY_BYTES
        self._node = {"instance": job.node, "job": SCRAPE_JOB}
        self._base = {**self._node, "job_id": job.job}
        self._counters = _Counters(activity={"cpu": self._born})
        self._phase, self._phase_since = "", self._born
        self._cards: tuple[_State, ...] = ()
        self._state = self._cards_of(job, None)

    def _cards_of(self, conduct: Conduct, before: _State | None) -> _State:
        """Take on a conduct: the state of the job, and that of each of its cards."""
        afresh = before is None or conduct.like is not None
        base = _like(conduct.like or "healthy", self._total) if afresh else before
        state = _amended(base or _like("healthy", self._total), conduct, _JOB)
        cards = []
        for index in range(len(self._places)):
            card = state if afresh else _amended(self._cards[index], conduct, _CARD)
            own = conduct.cards[index] if index < len(conduct.cards) else None
            cards.append(card if own is None else _amended(card, own, _CARD))
        self._cards = tuple(cards)
        return state

    def write(self, made: History, times: list[float]) -> None:
        changes = list(self._job.then)
        for time in times:
            since = time - self._start
            while changes and changes[0].at <= since:
                self._state = self._cards_of(changes.pop(0), self._state)
            if since < self._job.begins:
                continue
            self._live(time)
            if not _is_dark(self._outages, since):
                self._card_series(made, time)
                if not self._state.gone:
                    self._job_series(made, time)
                    self._run_series(made, time)

    def _live(self, time: float) -> None:
        """One interval passes for the job, whether somebody looks or not."""
        state, counters = self._state, self._counters
        if state.phase != self._phase:
            since = self._born if not self._phase else time
            self._phase, self._phase_since = state.phase, since
        counters.cpu += state.cpu * self._interval
        if state.phase == "train":
            counters.images += state.throughput * self._interval
            counters.waited += state.data_wait * self._interval
        alive = {"cpu": state.cpu > 0.01, "log": state.log, "heartbeat": state.heartbeat}
        counters.activity |= {name: time - BEHIND_SECONDS for name, is_ in alive.items() if is_}

    def _card_series(self, made: History, time: float) -> None:
        if self._job.mig is not None:
            self._instance_series(made, time, self._job.mig)
            return
        for index, uuid in enumerate(self._job.card_names):
            state = _like("idle", self._total) if self._state.gone else self._cards[index]
            used = 0.0 if self._state.gone else state.memory
            names = {**self._node, "gpu": str(self._places[index]), "uuid": uuid}
            about = {"name": self._job.hardware, "driver_version": "570", "simulated": "false"}
            values = {
                "gpu_info": 1.0,
                "gpu_memory_total_bytes": self._total,
                "gpu_memory_used_bytes": used,
                "gpu_memory_unattributed_bytes": 0.0,
                "gpu_memory_activity_ratio": state.utilization / 2,
                "gpu_utilization_ratio": state.utilization,
                "gpu_temperature_celsius": state.temperature,
                "gpu_power_watts": state.power,
                "gpu_power_limit_watts": POWER_LIMIT_WATTS,
            }
            rows = [
                (metric, value, names | about if metric == "gpu_info" else names)
                for metric, value in values.items()
            ]
            rows += [("gpu_throttle_active", 0.0, names | {"reason": r}) for r in THROTTLE_REASONS]
            for metric, value, labels in rows:
                moment, name = round(time * 1000), SeriesName(metric, sorted_labels(labels))
                row = made.series.setdefault(name, {})
                # Of jobs that share a card, the last one that is there says what the card shows.
                if moment not in row or not self._state.gone:
                    row[moment] = value

    def _instance_series(self, made: History, time: float, profile: str) -> None:
        """MIG instances, each of a card of its own, whose other instances nobody uses."""
        names = zip(self._job.card_names, self._job.whole_cards, strict=True)
        for index, (uuid, whole) in enumerate(names):
            state = self._cards[index]
            card = {**self._node, "gpu": str(self._places[index]), "uuid": whole}
            about = {"name": self._job.hardware, "driver_version": "570", "simulated": "false"}
            instance = card | {"mig_uuid": uuid}
            ids = {"gpu_instance_id": "1", "compute_instance_id": "0", "profile": profile}
            used = 0.0 if self._state.gone else state.memory
            made.add("gpu_info", time, 1.0, card | about)
            made.add("gpu_temperature_celsius", time, state.temperature, card)
            made.add("gpu_power_watts", time, state.power, card)
            made.add("gpu_power_limit_watts", time, POWER_LIMIT_WATTS, card)
            made.add("gpu_mig_info", time, 1.0, instance | ids)
            made.add("gpu_mig_memory_total_bytes", time, self._total, instance)
            made.add("gpu_mig_memory_used_bytes", time, used, instance)

    @property
    def _utilization_known(self) -> bool:
        """Whether the driver measures it of these cards; of MIG instances only since Hopper."""
        return self._job.mig is None or bool(_MEASURED_IN_MIG.search(self._job.hardware))

    def _job_series(self, made: History, time: float) -> None:
        job, base = self._job, self._base
        about = {
            "user": job.user,
            "source": job.source,
            "framework": job.framework,
            "interactive": str(job.interactive).lower(),
        }
        made.add("gpu_job_info", time, 1.0, base | about)
        paths = {"executable": job.executable, "cgroup": job.cgroup}
        made.add("gpu_job_executable", time, 1.0, base | paths)
        for index, uuid in enumerate(job.card_names):
            names, state = (
                base | {"gpu": str(self._places[index]), "uuid": uuid},
                self._cards[index],
            )
            made.add("gpu_job_holds_gpu", time, 1.0, names)
            made.add("gpu_job_memory_bytes", time, state.memory, names)
            if self._utilization_known:
                made.add("gpu_job_utilization_ratio", time, state.utilization, names)
            process = names | {"pid": "4711", "user": job.user}
            made.add("gpu_process_start_time_seconds", time, self._born, process)
        made.add("gpu_job_start_time_seconds", time, self._born, base)
        made.add("gpu_job_first_gpu_use_timestamp_seconds", time, self._born, base)
        for name, at in self._counters.activity.items():
            made.add("gpu_job_activity_timestamp_seconds", time, at, base | {"signal": name})
        made.add("gpu_job_cpu_seconds_total", time, self._counters.cpu, base)
        made.add("gpu_job_read_bytes_total", time, self._counters.images * 100_000, base)
        made.add("gpu_job_io_wait_seconds_total", time, self._counters.waited, base)
        made.add("gpu_job_loader_workers", time, 8.0 if job.run is not None else 0.0, base)
        made.add("gpu_job_resident_memory_bytes", time, 8 * 2.0**30, base)
        for doing in ("running", "sleeping", "zombie"):
            made.add("gpu_job_processes", time, float(doing == "running"), base | {"state": doing})
        waited = {"cpu": 0.0, "io": self._counters.waited, "memory": 0.0}
        for resource, seconds in waited.items():
            labels = base | {"resource": resource}
            made.add("gpu_job_pressure_seconds_total", time, seconds, labels)

    def _run_series(self, made: History, time: float) -> None:
        run = self._job.run
        if run is None:
            return
        names = self._base | {"run_id": run.id or f"run-of-{self._job.job}"}
        about = {
            "model": run.model,
            "batch": str(run.batch),
            "imgsz": str(run.imgsz),
            "amp": str(run.amp).lower(),
            "project": run.project,
        }
        made.add("yolo_info", time, 1.0, names | about)
        for phase in PHASES:
            made.add("yolo_phase", time, float(phase == self._phase), names | {"phase": phase})
        made.add("yolo_phase_start_timestamp_seconds", time, self._phase_since, names)
        counters = self._counters
        made.add("yolo_images_total", time, counters.images, names)
        made.add("yolo_steps_total", time, counters.images / run.batch, names)
        made.add("yolo_data_wait_seconds_total", time, counters.waited, names)
        if run.saves_every is not None:
            saves = math.floor((time - self._born) / run.saves_every)
            if saves:
                saved = self._born + saves * run.saves_every
                made.add("yolo_checkpoint_timestamp_seconds", time, saved, names)
                made.add("yolo_checkpoint_durable_timestamp_seconds", time, saved, names)


def _amended(state: _State, conduct: CardConduct, names: tuple[str, ...]) -> _State:
    """The state with what the conduct gives of these."""
    given = {name: getattr(conduct, name) for name in names}
    return dataclasses.replace(
        state, **{name: value for name, value in given.items() if value is not None}
    )
