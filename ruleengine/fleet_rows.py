"""What a row of `gpuwarden.fleet/v1` says of a job, whether an engine or exporters were asked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpuwarden.ruleengine.alertmanager import rfc3339

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuwarden.ruleengine.profiles import Expectation
    from gpuwarden.ruleengine.verdicts import JobFacts


def job_fields(job: JobFacts, *, user: str, team: str) -> dict[str, Any]:
    """What it is: its owner as the reader sees them, its places, cards and training."""
    run = job.run
    names = {gpu.name for gpu in job.gpus}
    totals = [gpu.memory_total_bytes for gpu in job.gpus if gpu.memory_total_bytes is not None]
    return {
        "job_id": job.job_id,
        "user": user,
        "team": team,
        "node": job.instance,
        "nodes": max(1, len(set(job.instances))),
        "framework": job.framework,
        "interactive": job.interactive,
        "gpus": [gpu.index or gpu.uuid for gpu in job.gpus],
        "hardware": names.pop() if len(names) == 1 else "",
        "memory_total_bytes": min(totals, default=None),
        "fresh": job.fresh,
        "not_fresh_reason": job.not_fresh_reason,
        "started_at": None if job.start_time is None else rfc3339(job.start_time),
        "run_id": None if run is None else run.run_id,
        "model": "" if run is None else run.model,
        "batch": None if run is None else run.batch,
        "imgsz": None if run is None else run.imgsz,
        "phase": None if run is None else run.phase,
    }


def verdict_fields(
    state: str, *, protected: str = "", unknown: Sequence[str] = (), others: int = 0
) -> dict[str, Any]:
    """What is said of a job that no case is open for.

    Args:
        state: in a word.
        protected: by what, or empty.
        unknown: rules that cannot judge it now.
        others: cases beside the one that is shown.
    """
    return {
        "state": state,
        "rule": "",
        "mode": "",
        "level": "",
        "next": None,
        "end": None,
        "kept_until": None,
        "held": [],
        "protected": protected,
        "unknown": list(unknown),
        "others": others,
    }


def expected_fields(known: Expectation) -> dict[str, Any]:
    """What it should show, each from the lowest to the highest value, and where that is from."""
    return {
        "utilization_expected": _band(known, "gpu_utilization"),
        "memory_expected": _band(known, "gpu_memory"),
        "throughput_expected": _band(known, "throughput"),
        "expected_text": next((value.basis for value in known.values.values()), known.missing),
    }


def _band(known: Expectation, signal: str) -> dict[str, float] | None:
    value = known.values.get(signal)
    return None if value is None else {"low": value.low, "high": value.high}
