"""Tricks of a job's own word: what it says of itself, and what it is called. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from gpuwarden import estimate_tables, estimates
from gpuwarden.ruleengine.attack_offenders import job_rows
from gpuwarden.ruleengine.attacks import (
    HASTE,
    Play,
    card_memory,
    changed,
    every_leaf,
    held_memory,
    run_of,
)
from gpuwarden.ruleengine.conditions import NeedsMemory, ProfileCondition
from gpuwarden.ruleengine.notations import SeriesName, sorted_labels
from gpuwarden.ruleengine.rule_tests import DeclaredJob

if TYPE_CHECKING:
    from gpuwarden.ruleengine.attack_offenders import Forge
    from gpuwarden.ruleengine.attacks import Target
    from gpuwarden.ruleengine.histories import History
    from gpuwarden.ruleengine.model import IgnorablePhase, Rule
    from gpuwarden.ruleengine.rule_tests import DeclaredRun

FUTURE_SECONDS = 3600.0
"""How far ahead forged times lie."""
_PHASES: dict[IgnorablePhase, float] = {"validate": 300.0, "checkpoint": 300.0}
"""For a rule that ignores none: what its job may change between."""


# -- what it says


def touch_log(target: Target) -> Play:
    """It touches its log."""
    return Play((changed(target.job, log=True),))


def heartbeat(target: Target) -> Play:
    """Its trainer writes a heartbeat, and nothing else happens."""
    return Play((changed(target.job, heartbeat=True, run=run_of(target.job)),))


def frozen(target: Target) -> Play:
    """It stays in the phase that is ignored for the longest."""
    return Play((changed(target.job, run=run_of(target.job)),), forge=_phases(target, frozen=True))


def alternating(target: Target) -> Play:
    """It changes its phase before the limit of each is over."""
    return Play((changed(target.job, run=run_of(target.job)),), forge=_phases(target))


def _phases(target: Target, *, frozen: bool = False) -> Forge:
    """What a trainer says of its phase, while the job goes on as it did.

    Args:
        target: whose rule ignores phases.
        frozen: one phase for ever; else two, none of which lasts until its limit is over.
    """
    ignored = target.rule.ignore_phases or _PHASES
    limits = {str(name): limit for name, limit in ignored.items()}
    names = sorted(limits, key=lambda name: -limits[name])[: 1 if frozen else 2]
    if len(names) == 1 and not frozen:
        names.append("train")
    shortest = min(limits.get(name, math.inf) for name in names)
    step = math.inf if frozen else max(HASTE * shortest, 2 * target.interval)

    def forge(history: History, job: DeclaredJob) -> None:
        metric = "yolo_phase"
        for labels, numbers in list(job_rows(history, metric, job)):
            row = history.series[SeriesName(metric, sorted_labels(labels))]
            begin = min(numbers, default=0) / 1000
            for time in numbers:
                name = names[int((time / 1000 - begin) // step) % len(names)]
                row[time] = float(labels["phase"] == name)
        metric = "yolo_phase_start_timestamp_seconds"
        for labels, numbers in list(job_rows(history, metric, job)):
            row = history.series[SeriesName(metric, sorted_labels(labels))]
            begin = min(numbers, default=0) / 1000
            for time in numbers:
                since = time / 1000 - begin
                row[time] = begin if frozen else begin + since // step * step

    return forge


def everything(target: Target) -> Play:
    """It says all that a living training says, but for what is measured."""
    run = run_of(target.job).model_copy(update={"saves_every": 600.0})
    job = changed(target.job, log=True, heartbeat=True, run=run)
    return Play((job,), forge=_phases(target))


def future(target: Target) -> Play:
    """Its times lie ahead."""
    job = changed(target.job, log=True, heartbeat=True, run=run_of(target.job))
    still = _phases(target, frozen=True)

    def forge(history: History, made: DeclaredJob) -> None:
        still(history, made)
        _ahead(history, made)

    return Play((job,), forge=forge)


def _ahead(history: History, job: DeclaredJob) -> None:
    times = (
        "yolo_phase_start_timestamp_seconds",
        "yolo_checkpoint_timestamp_seconds",
        "yolo_checkpoint_durable_timestamp_seconds",
        "gpu_job_activity_timestamp_seconds",
    )
    for metric in times:
        for labels, numbers in job_rows(history, metric, job):
            # The CPU's activity is the node's own word.
            if labels.get("signal") != "cpu":
                row = history.series[SeriesName(metric, sorted_labels(labels))]
                row |= {time: time / 1000 + FUTURE_SECONDS for time in numbers}


def forged(target: Target) -> Play:
    """The throughput that is expected, no waiting, and steps that advance."""
    job = target.job
    run = run_of(job)
    found = _expected(job, run)
    pace = found.throughput.expected if isinstance(found, estimates.Expectation) else 100.0

    def forge(history: History, made: DeclaredJob) -> None:
        paces = {
            "yolo_images_total": pace,
            "yolo_steps_total": pace / run.batch,
            "yolo_data_wait_seconds_total": 0.0,
        }
        for metric, per_second in paces.items():
            for labels, numbers in list(job_rows(history, metric, made)):
                begin = min(numbers, default=0)
                row = history.series[SeriesName(metric, sorted_labels(labels))]
                row |= {time: per_second * (time - begin) / 1000 for time in numbers}

    return Play((changed(job, run=run, heartbeat=True),), forge=forge)


def _expected(job: DeclaredJob, run: DeclaredRun) -> estimates.Expectation | estimates.Unknown:
    return estimate_tables.expected(
        run.model,
        run.batch,
        imgsz=run.imgsz,
        amp=run.amp,
        hardware=job.hardware,
        gpus=len(job.card_names),
        gpu_memory=card_memory(job),
    )


_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def large_lie(target: Target) -> Play | None:
    """The slowest training whose memory would look like what the job holds."""
    if not _expects(target.rule):
        return None
    job, held = target.job, held_memory(target.job)
    lies = [
        run_of(job).model_copy(update={"model": model, "batch": batch, "imgsz": imgsz})
        for model in estimate_tables.tables().models
        for batch in _BATCHES
        for imgsz in (640, 1280)
    ]
    fitting: list[tuple[float, DeclaredRun]] = []
    for lie in lies:
        found = _expected(job, lie)
        if isinstance(found, estimates.Unknown):
            continue
        if found.gpu_memory.low <= held <= found.gpu_memory.high:
            fitting.append((found.throughput.expected, lie))
    if not fitting:
        return None
    return Play((changed(job, run=min(fitting, key=lambda item: item[0])[1]),))


def small_lie(target: Target) -> Play | None:
    """It declares a training that needs next to nothing."""
    if not _expects(target.rule):
        return None
    lie = run_of(target.job).model_copy(update={"model": "yolov8n", "batch": 1})
    return Play((changed(target.job, run=lie),))


def _expects(rule: Rule) -> bool:
    return any(isinstance(leaf, (ProfileCondition, NeedsMemory)) for leaf in every_leaf(rule))


def silent(target: Target) -> Play | None:
    """Its trainer says nothing any more."""
    if target.job.run is None:
        return None
    return Play((changed(target.job, run=None),))


def unsaved(target: Target) -> Play | None:
    """Worked before the test for longer than the rule would destroy, and says it saved nothing."""
    limit = max((stage.max_work_lost or 0.0 for stage in target.rule.stages), default=0.0)
    if not target.rule.ends:
        return None
    run = target.job.run and target.job.run.model_copy(update={"saves_every": None})
    return Play((changed(target.job, run=run, age=max(limit, target.job.age)),))


# -- what it is called


def disguise(target: Target) -> Play:
    """A name like that of a protected program, and that program beside it on the card."""
    allowed = [
        entry.match.executable for entry in target.whitelist if entry.match.executable is not None
    ] or ["/usr/bin/tensorboard"]
    name = allowed[0].rpartition("/")[2]
    job = changed(target.job, executable=f"/home/{target.job.user}/bin/{name}")

    def helper(history: History, made: DeclaredJob) -> None:
        metric = "gpu_job_executable"
        for labels, numbers in list(job_rows(history, metric, made)):
            twin = SeriesName(metric, sorted_labels(labels | {"executable": allowed[0]}))
            history.series[twin] = dict(numbers)

    return Play((job,), forge=helper)


def claim(target: Target) -> Play:
    """It claims the run of a healthy job on another node."""
    run = run_of(target.job).model_copy(update={"id": "run-of-another"})
    victim = DeclaredJob.model_validate(
        {"job": "proc-robbed", "user": "ana", "node": "n9:9835", "run": {"id": "run-of-another"}}
    )
    return Play((changed(target.job, run=run),), (victim,))


def borrowed(target: Target) -> Play | None:
    """It calls its run like one that is on the whitelist."""
    protected = [
        entry.match.run
        for entry in target.whitelist
        if entry.match.run is not None and target.rule.id in entry.rules
    ]
    if not protected:
        return None
    run = run_of(target.job).model_copy(update={"id": protected[0]})
    return Play((changed(target.job, run=run),))


def renamed(target: Target) -> Play:
    """It chooses its own names."""
    run = target.job.run and target.job.run.model_copy(
        update={"id": "an-honest-run", "project": "a-very-important-one", "model": "nas-best"}
    )
    return Play((changed(target.job, framework="tensorboard", run=run),))


def terminal(target: Target) -> Play | None:
    """It runs where a person would type, say in a tmux of its own."""
    if target.job.interactive:
        return None
    return Play((changed(target.job, interactive=True),))


def unlabelled(target: Target) -> Play:
    """It loses every label that it can influence."""
    return Play((changed(target.job, framework="", run=None, interactive=False, source="process"),))


def hidden(target: Target) -> Play | None:
    """The node sees memory of the card, and no process that holds it."""
    if not held_memory(target.job):
        return None

    def forge(history: History, job: DeclaredJob) -> None:
        for name, row in list(history.series.items()):
            labels = dict(name.labels)
            if labels.get("job_id") == job.job:
                del history.series[name]
            elif name.metric == "gpu_memory_used_bytes" and labels["uuid"] in job.card_names:
                nobodys = SeriesName("gpu_memory_unattributed_bytes", name.labels)
                history.series[nobodys] = dict(row)

    return Play((target.job,), forge=forge)
