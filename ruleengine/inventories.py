"""Inventories: what is asked to know what a fleet consists of, and kept of the rows. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gpuwarden import durations
from gpuwarden.catalogue import SCRAPE_JOB
from gpuwarden.ruleengine import signals

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ACTIVITY_METRIC = "gpu_job_activity_timestamp_seconds"
_OF_JOB = ("instance", "job_id")
_OF_CARD = ("instance", "uuid")
_OF_RUN = ("instance", "job_id", "run_id")
LABELS: Final[Mapping[str, tuple[str, ...]]] = {
    "gpu_info": (*_OF_CARD, "gpu", "name"),
    "gpu_memory_total_bytes": _OF_CARD,
    "gpu_mig_info": (*_OF_CARD, "mig_uuid", "gpu", "profile"),
    "gpu_mig_memory_total_bytes": ("instance", "mig_uuid"),
    "gpu_throttle_active": (*_OF_CARD, "reason"),
    "gpu_job_holds_gpu": (*_OF_JOB, "uuid", "gpu"),
    "gpu_job_info": (*_OF_JOB, "user", "source", "framework", "interactive"),
    "gpu_job_executable": (*_OF_JOB, "executable", "cgroup"),
    "gpu_job_start_time_seconds": _OF_JOB,
    "gpu_job_first_gpu_use_timestamp_seconds": _OF_JOB,
    ACTIVITY_METRIC: (*_OF_JOB, "signal"),
    "gpu_process_start_time_seconds": (*_OF_JOB, "pid"),
    "yolo_info": (*_OF_RUN, "model", "batch", "imgsz", "amp", "project"),
    "yolo_phase": (*_OF_RUN, "phase"),
    "yolo_phase_start_timestamp_seconds": _OF_RUN,
    "yolo_checkpoint_timestamp_seconds": _OF_RUN,
    "yolo_checkpoint_durable_timestamp_seconds": _OF_RUN,
    "yolo_resume_mode": (*_OF_RUN, "mode"),
    "yolo_devices": _OF_RUN,
    "gpuwarden_snapshot_timestamp_seconds": ("instance",),
    "scraped": ("instance",),
    "expected": ("instance",),
}
"""Inventory query -> the labels that are kept of its rows."""
FOUND_BY: Final = frozenset(
    {"gpu_job_holds_gpu", "gpu_job_info", "gpu_job_executable", "yolo_info"}
)
"""Queries of which a row is enough to know that there is such a job; what was said until two
scrapes ago, perhaps of a job that has ended since, is not."""
OF_VALUES: Final = ("instance", "job_id", "uuid")
"""The labels that are kept of the rows of a value."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """Which nodes should be lit: all that any of these names.

    Attributes:
        number: how many, where nothing names them.
        names: targets of Prometheus.
        query: PromQL whose rows name them by `instance`, or whose one row is their number; None:
            Prometheus' own targets.
    """

    number: int | None = None
    names: frozenset[str] = frozenset()
    query: str | None = None


PHASE, PHASE_START = "yolo_phase", "yolo_phase_start_timestamp_seconds"
SAVED = ("yolo_checkpoint_timestamp_seconds", "yolo_checkpoint_durable_timestamp_seconds")
"""The durable one comes second, so that it stands where both exist."""
RESUMED = "yolo_resume_mode"
THROTTLE = "gpu_throttle_active"
OF_SOME = frozenset({PHASE, PHASE_START, THROTTLE})
"""Dear to look through in a large fleet, and of interest of few runs and cards: a series for each
phase and each reason, and since when a run is in a phase that rules ignore."""

HELD_FOR = "1h"
"""For how long a dark node's jobs are still known by what they held."""

# Without the gate, Prometheus serves for five minutes what vanished while it was down.
_STILL = "timestamp({metric}) >= time() - {fresh}"
_LIT = "timestamp(gpuwarden_snapshot_timestamp_seconds) >= time() - {fresh}"
# What was there until less than two scrapes ago counts as well: it amends jobs and makes none.
_LATEST = "last_over_time({metric}[{window}])"
_ONCE = "last_over_time({metric}[" + HELD_FOR + "])"
_REMEMBERED = _STILL + " or " + _ONCE + " unless on (instance) (" + _LIT + ")"
REMEMBERED = ("gpu_job_holds_gpu", "gpu_job_info", "gpu_info", "gpu_mig_info")
"""What is known of a node for `HELD_FOR` after it went dark."""
_SILENT = (
    "(group by (instance) (last_over_time(gpuwarden_snapshot_timestamp_seconds[" + HELD_FOR + "]))"
    " or group by (instance) (last_over_time(gpuwarden_nvml_up[" + HELD_FOR + "])))"
    " unless on (instance) (" + _LIT + ")"
)
MAX_NAMED_NODES = 400
"""Of more silent nodes than these everything is asked, and not theirs alone."""


def inventory_queries(scrape_interval: float, expected: Expectation) -> dict[str, str]:
    """Name -> PromQL of what the fleet consists of, in one question each.

    Args:
        scrape_interval: of the nodes, in seconds.
        expected: which nodes should be lit.
    """
    fresh = _fresh(scrape_interval)
    remembered = {name: _REMEMBERED.format(metric=name, fresh=fresh) for name in REMEMBERED}
    return current_queries(scrape_interval, expected) | remembered


def current_queries(scrape_interval: float, expected: Expectation) -> dict[str, str]:
    """Name -> PromQL of what lit nodes say now.

    Args:
        scrape_interval: of the nodes, in seconds.
        expected: which nodes should be lit.
    """
    fresh = _fresh(scrape_interval)
    # What is always 1 tells nothing by its value: to know that it is there is enough.
    there = ("gpu_job_executable", "yolo_info", *REMEMBERED)
    latest = (
        "gpu_memory_total_bytes",
        "gpu_mig_memory_total_bytes",
        "gpu_job_start_time_seconds",
        "gpu_job_first_gpu_use_timestamp_seconds",
        "gpu_process_start_time_seconds",
    )
    return {
        **{metric: _STILL.format(metric=metric, fresh=fresh) for metric in there},
        **{metric: recent(metric, scrape_interval) for metric in latest},
        **phase_queries(scrape_interval),
        THROTTLE: throttle_query(scrape_interval),
        **activity_queries(scrape_interval),
        **saves_queries(scrape_interval),
        # A row is a training that does not run on the cards that its job holds; few are.
        "yolo_devices": recent("yolo_devices", scrape_interval)
        + " != on (instance, job_id) group_left () count by (instance, job_id) "
        f"(max by (instance, job_id, uuid) ({recent('gpu_job_holds_gpu', scrape_interval)}))",
        "gpuwarden_snapshot_timestamp_seconds": "gpuwarden_snapshot_timestamp_seconds",
        "scraped": "timestamp(gpuwarden_snapshot_timestamp_seconds)",
        "expected": _expected_query(expected),
    }


def activity_queries(scrape_interval: float, jobs: Sequence[str] | None = None) -> dict[str, str]:
    """Name -> PromQL of jobs' signs of life.

    Args:
        scrape_interval: of the nodes, in seconds.
        jobs: whose; None for the whole fleet.
    """
    return {ACTIVITY_METRIC: recent(ACTIVITY_METRIC, scrape_interval, jobs)}


def saves_queries(scrape_interval: float, jobs: Sequence[str] | None = None) -> dict[str, str]:
    """Name -> PromQL of what runs have saved, and how they were resumed.

    Args:
        scrape_interval: of the nodes, in seconds.
        jobs: whose; None for the whole fleet.
    """
    queries = {name: recent(name, scrape_interval, jobs) for name in SAVED}
    return queries | {RESUMED: recent(RESUMED, scrape_interval, jobs) + " == 1"}


def training_query(scrape_interval: float) -> str:
    """PromQL of the runs that are in the phase that most are in.

    Args:
        scrape_interval: of the nodes, in seconds.
    """
    return _in_phase(scrape_interval, 'phase="train"', "")


def phase_queries(scrape_interval: float, jobs: Sequence[str] | None = None) -> dict[str, str]:
    """Name -> PromQL of which phase runs are in, and since when.

    Args:
        scrape_interval: of the nodes, in seconds.
        jobs: whose; None for the whole fleet.
    """
    named = "" if jobs is None else f"job_id=~{signals.one_of(jobs)}"
    return {
        PHASE: _in_phase(scrape_interval, "", named),
        PHASE_START: recent(PHASE_START, scrape_interval, jobs),
    }


def _in_phase(scrape_interval: float, phase: str, named: str) -> str:
    # Many series of which one is 1: what always stands beside it on a page is asked its age.
    training = PHASE + signals.where('phase="train"', named)
    still = _STILL.format(metric=training, fresh=_fresh(scrape_interval))
    return f"{PHASE}{signals.where(phase, named)} == 1 and on (instance, job_id, run_id) {still}"


def throttle_query(scrape_interval: float, uuids: Sequence[str] | None = None) -> str:
    """PromQL of what slows cards down now, of that which is a fault of the machine.

    Args:
        scrape_interval: of the nodes, in seconds.
        uuids: of which cards; None for the whole fleet.
    """
    named = "" if uuids is None else f"uuid=~{signals.one_of(uuids)}"
    still = _STILL.format(metric="gpu_info" + signals.where(named), fresh=_fresh(scrape_interval))
    harmful = signals.where(signals.SIGNALS["card_throttled"].where, named)
    return f"{THROTTLE}{harmful} == 1 and on (instance, uuid) {still}"


def remembered_queries(scrape_interval: float, silent: Sequence[str]) -> dict[str, str]:
    """Name -> PromQL of what silent nodes said last; none where no node is silent.

    An hour of every card is dear to look through, and few nodes are dark.

    Args:
        scrape_interval: of the nodes, in seconds.
        silent: their names, as of `silent_nodes`.
    """
    if not silent:
        return {}
    if len(silent) > MAX_NAMED_NODES:
        lit = _LIT.format(fresh=_fresh(scrape_interval))
        return {
            name: f"{_ONCE.format(metric=name)} unless on (instance) ({lit})" for name in REMEMBERED
        }
    chosen = f"{{instance=~{signals.one_of(silent)}}}"
    return {name: _ONCE.format(metric=name + chosen) for name in REMEMBERED}


def silent_query(scrape_interval: float) -> str:
    """PromQL of the nodes that spoke within `HELD_FOR` and say nothing now.

    Args:
        scrape_interval: of the nodes, in seconds.
    """
    return _SILENT.format(fresh=_fresh(scrape_interval))


def recent(metric: str, scrape_interval: float, jobs: Sequence[str] | None = None) -> str:
    """PromQL of what was said within two scrapes.

    Args:
        metric: its name.
        scrape_interval: of the nodes, in seconds.
        jobs: of which jobs; None for all.
    """
    window = durations.render(signals.FRESH_SCRAPES * scrape_interval)
    return _LATEST.format(metric=metric + signals.of_jobs(jobs), window=window)


def _fresh(scrape_interval: float) -> str:
    """Seconds, as PromQL compares them, up to which a sample is fresh."""
    return f"{signals.FRESH_SCRAPES * scrape_interval:g}"


def _expected_query(expected: Expectation) -> str:
    if expected.query is not None:
        return expected.query
    # Many rows are asked for only where they are added to names.
    targets = f'up{{job="{SCRAPE_JOB}"}}'
    return targets if expected.names else f"count({targets})"
