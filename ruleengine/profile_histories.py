"""Runs of trainings out of Prometheus' history, window by window.

A window counts if it can be learnt from: the trainer trains, the job alone holds its cards, nothing
throttles them, every sample is there, and the run has warmed up. What is wrong with a run as a
whole is told of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from gpuwarden import durations
from gpuwarden.ruleengine.profile_fits import Kind, Run
from gpuwarden.ruleengine.range_sources import RangeSource
from gpuwarden.ruleengine.signals import HARMFUL_THROTTLING, MIN_COVERAGE, MIN_TRAIN_SHARE

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    import httpx

    from gpuwarden.ruleengine.prometheus import Sample, Source

CHUNK_SECONDS: Final = 21600.0
"""So much is asked at once: 1,000 jobs then take about 100 MB, however long the history is."""
COMMAND_LINE: Final = "cmdline"
"""Source of a job whose training is only guessed from its command line."""
_RUN = "on (instance, job_id, run_id)"
_BY_RUN = "max by (instance, job_id, run_id)"


@dataclass(frozen=True, slots=True)
class Period:
    """What is looked at; seconds, and Unix times.

    Attributes:
        begin, end: of the history.
        window: length of a window; a profile's rule should have about the same.
        scrape_interval: of the nodes.
        warm_up: of a run, from its first window of training on, that does not count.
        allowed: rules that a run may break and still be learnt from.
    """

    begin: float
    end: float
    window: float = 300.0
    scrape_interval: float = 5.0
    warm_up: float = 300.0
    allowed: Collection[str] = ("off-profile",)

    @property
    def times(self) -> list[float]:
        """Ends of the windows, evenly spaced."""
        count = int((self.end - self.begin) / self.window)
        return [self.begin + self.window * (number + 1) for number in range(count)]


def queries(period: Period) -> dict[str, str]:
    """Name -> PromQL whose rows at a time are about the window that ends there."""
    window = f"[{durations.render(period.window)}]"
    count = max(1, int(MIN_COVERAGE * period.window / period.scrape_interval))
    # By run: a label of its node's target may have changed within the window.
    share = f'{_BY_RUN} (avg_over_time(yolo_phase{{phase="train"}}{window}))'
    pace = f"{_BY_RUN} (rate(yolo_images_total{window}))"
    trained = f"({share} >= {MIN_TRAIN_SHARE:g})"
    reasons = "|".join(sorted(HARMFUL_THROTTLING))

    def mean(metric: str) -> str:
        return f"avg_over_time({metric}{window}) and count_over_time({metric}{window}) >= {count}"

    return {
        # As of the end of the window: an attempt that ended within it does not claim the run twice.
        "info": "max by (job_id, run_id, model, batch, imgsz, amp) (yolo_info)",
        "devices": "max by (job_id) (yolo_devices)",
        "about": f"max by (job_id, user, source) (last_over_time(gpu_job_info{window}))",
        "cards": "max by (instance, job_id, uuid, name) ("
        f"max by (instance, job_id, uuid) (last_over_time(gpu_job_holds_gpu{window})) "
        "* on (instance, uuid) group_left (name) "
        f"({_card_names(window)}))",
        "tenants": f"count by (instance, uuid) (last_over_time(gpu_job_holds_gpu{window}))",
        "broken": f"max by (job_id, rule) (max_over_time(gpuwarden_violation_active{window}))",
        "throttled": "max by (instance, uuid) ("
        f'max_over_time(gpu_throttle_active{{reason=~"{reasons}"}}{window})) > 0',
        "train": f'max by (job_id) (avg_over_time(yolo_phase{{phase="train"}}{window}))',
        "throughput": f"max by (job_id) (({pace} / {_RUN} {trained}) "
        f"and {_RUN} count_over_time(yolo_images_total{window}) >= {count})",
        "gpu_memory": mean("gpu_job_memory_bytes"),
        "gpu_utilization": mean("gpu_job_utilization_ratio"),
    }


def _card_names(window: str) -> str:
    """PromQL of (instance, uuid, name): of cards, and of MIG instances as NVML calls them."""
    cards = f"max by (instance, uuid, name) (last_over_time(gpu_info{window}))"
    held = "max by (instance, uuid, mig_uuid, profile)"
    latest = f"{held} (last_over_time(gpu_mig_info{window}))"
    parts = f"{latest} * on (instance, uuid) group_left (name) {cards}"
    named = f'label_join({parts}, "name", " MIG ", "name", "profile")'
    instances = f'label_replace({named}, "uuid", "$1", "mig_uuid", "(.+)")'
    return f"{cards} or max by (instance, uuid, name) ({instances})"


@dataclass(slots=True)
class _Seen:
    """A run as it comes together."""

    kind: Kind
    run_id: str
    user: str
    begin: float
    end: float
    jobs: list[str] = field(default_factory=list)
    trained: float = 0.0
    warm: float | None = None
    windows: dict[str, list[float]] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)
    unhealthy: str = ""
    passed_over: dict[str, int] = field(default_factory=dict)

    def pass_over(self, why: str) -> None:
        """One more window that does not count."""
        self.passed_over[why] = self.passed_over.get(why, 0) + 1


@dataclass(slots=True)
class _Window:
    """Rows of one window, by job and by card."""

    info: dict[str, list[dict[str, str]]]
    devices: dict[str, float]
    about: dict[str, dict[str, str]]
    cards: dict[str, list[dict[str, str]]]
    tenants: dict[tuple[str, str], float]
    broken: dict[str, set[str]]
    throttled: set[tuple[str, str]]
    train: dict[str, float]
    values: dict[str, dict[str, list[float]]]


class Collector:
    """Puts runs together, window by window, in order of time.

    Args:
        period: what is looked at.
    """

    def __init__(self, period: Period) -> None:
        self._period = period
        self._queries = queries(period)
        self._runs: dict[tuple[Kind, str, str], _Seen] = {}
        self._kinds: dict[tuple[str, str], Kind] = {}
        self.refused: dict[str, str] = {}
        """job_id -> why it is no run of a known kind."""

    async def take(self, source: Source, time: float) -> None:
        """Take in the window that ends at a time.

        Raises:
            ServiceUnavailable: the server fails.
            QueryRefused: it refuses a query.
        """
        rows = {name: await source.instant(text, time) for name, text in self._queries.items()}
        window = _arranged(rows)
        twice = _claimed_twice(window.info)
        for job_id in window.info:
            self._job(job_id, window, time, twice)

    def runs(self) -> list[Run]:
        """The runs as far as they are known."""
        return [
            Run(
                kind=seen.kind,
                run_id=seen.run_id,
                user=seen.user,
                jobs=tuple(seen.jobs),
                begin=seen.begin,
                end=seen.end,
                trained=seen.trained,
                windows=seen.windows,
                unhealthy=_unhealthy(seen),
                passed_over=seen.passed_over,
            )
            for seen in self._runs.values()
        ]

    def _job(self, job_id: str, window: _Window, time: float, twice: set[str]) -> None:
        about = window.about.get(job_id, {})
        held = window.cards.get(job_id, [])
        kind = _kind(window.info[job_id], held)
        if not isinstance(kind, str) and window.devices.get(job_id, len(held)) != len(held):
            kind = "it trains on more or fewer cards than it holds"
        if isinstance(kind, str):
            self.refused.setdefault(job_id, kind)
            return
        run_id, user = window.info[job_id][0]["run_id"], about.get("user", "")
        seen = self._runs.get((kind, run_id, user))
        if seen is None:
            seen = _Seen(kind, run_id, user, begin=time - self._period.window, end=time)
            self._runs[kind, run_id, user] = seen
        seen.end = time
        if job_id not in seen.jobs:
            seen.jobs.append(job_id)
            seen.warm = None  # a new attempt warms up anew
        if about.get("source") == COMMAND_LINE:
            seen.unhealthy = "no trainer tells what it trains: it is guessed from its command line"
        if run_id in twice:
            seen.unhealthy = "two jobs claimed the run at the same time"
        first = self._kinds.setdefault((run_id, user), kind)
        if first != kind:
            seen.unhealthy = "the run changed what it trains, or where"
        seen.broken |= window.broken.get(job_id, set()) - set(self._period.allowed)
        self._measure(seen, job_id, window, time)

    def _measure(self, seen: _Seen, job_id: str, window: _Window, time: float) -> None:
        if job_id not in window.train or window.train[job_id] < MIN_TRAIN_SHARE:
            return
        if seen.warm is None:
            seen.warm = time - self._period.window + self._period.warm_up
        cards = [(card["instance"], card["uuid"]) for card in window.cards[job_id]]
        found = {name: values[job_id] for name, values in window.values.items() if job_id in values}
        if time - self._period.window < seen.warm:
            return
        if any(window.tenants.get(card, 0.0) > 1 for card in cards):
            seen.pass_over("another job held one of its cards")
        elif any(card in window.throttled for card in cards):
            seen.pass_over("heat or power throttled a card")
        elif len(found.get("gpu_memory", ())) < len(cards) or "throughput" not in found:
            seen.pass_over("samples are missing")
        elif not sum(found["throughput"]):
            # What hangs says that it trains; nobody should be measured by it.
            seen.pass_over("not one image was trained")
        else:
            seen.trained += self._period.window * min(1.0, window.train[job_id])
            for name, values in found.items():
                if len(values) == (1 if name == "throughput" else len(cards)):
                    mean = sum(values) / len(values)
                    seen.windows.setdefault(name, []).append(mean)


def _arranged(rows: dict[str, list[Sample]]) -> _Window:
    def labels(name: str, *needed: str) -> list[dict[str, str]]:
        """Labels of a query's rows; those that lack one of a contract are passed over."""
        found = (dict(row.labels) for row in rows[name])
        return [row for row in found if all(row.get(label) for label in needed)]

    info: dict[str, list[dict[str, str]]] = {}
    for row in labels("info", "job_id", "run_id"):
        info.setdefault(row["job_id"], []).append(row)
    cards: dict[str, list[dict[str, str]]] = {}
    for row in labels("cards", "job_id", "instance", "uuid", "name"):
        cards.setdefault(row["job_id"], []).append(row)
    broken: dict[str, set[str]] = {}
    for row in labels("broken", "job_id", "rule"):
        broken.setdefault(row["job_id"], set()).add(row["rule"])
    values: dict[str, dict[str, list[float]]] = {}
    for name in ("throughput", "gpu_memory", "gpu_utilization"):
        for sample in rows[name]:
            job_id = sample.labels.get("job_id")
            if job_id and math.isfinite(sample.value):
                values.setdefault(name, {}).setdefault(job_id, []).append(sample.value)
    return _Window(
        info=info,
        devices={row.labels.get("job_id", ""): row.value for row in rows["devices"]},
        about={row["job_id"]: row for row in labels("about", "job_id")},
        cards=cards,
        tenants={
            (row.labels.get("instance", ""), row.labels.get("uuid", "")): row.value
            for row in rows["tenants"]
        },
        broken=broken,
        throttled={
            (row["instance"], row["uuid"]) for row in labels("throttled", "instance", "uuid")
        },
        train={row.labels.get("job_id", ""): row.value for row in rows["train"]},
        values=values,
    )


def _claimed_twice(info: dict[str, list[dict[str, str]]]) -> set[str]:
    claims: dict[str, set[str]] = {}
    for job_id, rows in info.items():
        for row in rows:
            claims.setdefault(row["run_id"], set()).add(job_id)
    return {run_id for run_id, jobs in claims.items() if len(jobs) > 1}


def _kind(info: list[dict[str, str]], cards: list[dict[str, str]]) -> Kind | str:
    """What a job trains on what, or why that is not known."""
    if len(info) > 1:
        return "it declares several trainings at once"
    (row,) = info
    names = {card["name"] for card in cards}
    if len(names) != 1 or len({card["instance"] for card in cards}) != 1:
        return "it holds no card, cards of several kinds, or cards of several nodes"
    batch, imgsz, amp = row.get("batch", ""), row.get("imgsz", ""), row.get("amp", "")
    if not (batch.isdecimal() and imgsz.isdecimal() and amp in ("true", "false")):
        return "batch, imgsz or amp is not known"
    if not row.get("model") or not row.get("run_id") or int(batch) < 1 or int(imgsz) < 1:
        return "model or run_id is not known"
    return Kind(row["model"], int(batch), int(imgsz), amp == "true", names.pop(), len(cards))


def _unhealthy(seen: _Seen) -> str:
    if seen.unhealthy:
        return seen.unhealthy
    return f"it broke {', '.join(sorted(seen.broken))}" if seen.broken else ""


async def collect(
    url: str,
    client: httpx.AsyncClient,
    period: Period,
    *,
    seconds: float,
    told: Callable[[float], None] = lambda _share: None,
) -> Collector:
    """Runs of a period, from a server.

    Args:
        url: its base address.
        client: with its credentials.
        period: what is looked at.
        seconds: for one query.
        told: called with the share that is done.

    Raises:
        ServiceUnavailable: the server fails, or gives a partial answer.
        QueryRefused: it refuses a query, say because a chunk is too much for it.
    """
    collector, times = Collector(period), period.times
    size = max(1, int(CHUNK_SECONDS / period.window))
    for begin in range(0, len(times), size):
        part = times[begin : begin + size]
        source = RangeSource(url, client, times=part, timeout=seconds)
        for time in part:
            await collector.take(source, time)
        told((begin + len(part)) / len(times))
    return collector
