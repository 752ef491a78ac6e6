"""Causes: why a job uses its cards as it does, as far as the facts tell. Pure.

The order of the questions is the order of certainty: memory that does not fit the declared batch
is arithmetic; waiting for data is measured by the loop; clocks lowered by heat are read from the
card; and a busy card that yields little leaves the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuwarden.quantities import Deviation, Direction
from gpuwarden.ruleengine import signals
from gpuwarden.ruleengine.measures import averages
from gpuwarden.ruleengine.profiles import expectation
from gpuwarden.ruleengine.texts import causes as texts
from gpuwarden.ruleengine.texts.speeches import speech
from gpuwarden.ruleengine.verdicts import Cause

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from gpuwarden.ruleengine.model import Profile
    from gpuwarden.ruleengine.profiles import Expected
    from gpuwarden.ruleengine.verdicts import JobFacts, RunFacts, Verdict

_Figures = dict[str, float | str]

DATA_LOADING = "data-loading"
HYPERPARAMETERS = "hyperparameters"
MODEL = "model"
HARDWARE = "hardware"
IDLE = "idle"
UNKNOWN = "unknown"

SLOW = Deviation(Direction.BELOW, 0.15)
"""Throughput this far from its expectation is called different."""
FULL = Deviation(Direction.ABOVE, 0.15)
"""Likewise memory."""
WAIT_SHARE = 0.4
"""A loop that waits this much of its training time is starved."""
BLOCKED_PROCESSES = 1.0
"""On average this many processes blocked on I/O point at storage."""
BUSY = 0.8
IDLE_UTILIZATION = 0.05


@dataclass(frozen=True, slots=True)
class _Facts:
    """The figures that causes are told from; None where not known."""

    run: RunFacts | None
    expected: Mapping[str, Expected]
    memory: float | None
    utilization: float | None
    lowest_utilization: float | None
    throughput: float | None
    wait: float | None
    cores: float | None
    blocked: float | None
    workers: float | None
    throttling: tuple[str, ...]

    @property
    def slow(self) -> bool | None:
        """Whether throughput is below its expectation; None where it cannot be told."""
        expected = self.expected.get("throughput")
        if expected is None or self.throughput is None:
            return None
        if expected.exceeded(self.throughput, SLOW):
            return True
        # Inside an estimate's band, what is expected may still be more than what is measured.
        unsure = expected.estimated and self.throughput < expected.value * (1 - SLOW.tolerance)
        return None if unsure else False


def diagnose(
    job: JobFacts, verdict: Verdict, profiles: Iterable[Profile], *, team: str = ""
) -> Cause:
    """Name the probable cause of a violation.

    Args:
        job: the job's facts.
        verdict: the violation; its evidence is quoted where no cause can be told.
        profiles: expectations.
        team: whose rule it is, or an empty string.

    Returns:
        The cause with the figures that speak for it, and what the owner could do.
    """
    found = recognised(job, expectation(job, profiles, team=team).values)
    if found is not None:
        return found
    seen = "; ".join(
        f"{item.condition}: {item.measured}" for item in verdict.evidence if item.measured
    )
    return Cause(UNKNOWN, seen or "no figures are known that would tell a cause")


def recognised(job: JobFacts, expected: Mapping[str, Expected]) -> Cause | None:
    """The probable cause by a job's figures alone, or None where they tell none.

    Args:
        job: the job's facts.
        expected: what it should show, by signal.
    """
    facts = _facts(job, expected)
    return (
        _hyperparameters(facts)
        or _data_loading(facts)
        or _idle(facts)
        or _hardware(facts)
        or _model(facts)
    )


def _facts(job: JobFacts, expected: Mapping[str, Expected]) -> _Facts:
    cards = _per_card(job, "gpu_utilization")
    return _Facts(
        run=job.run,
        expected=expected,
        memory=max(_per_card(job, "gpu_memory"), default=None),
        utilization=max(cards, default=None) if len(cards) == len(job.gpus) else None,
        lowest_utilization=min(cards, default=None),
        throughput=_of_job(job, "throughput"),
        wait=_of_job(job, "data_wait_share"),
        cores=_of_job(job, "job_cpu_cores"),
        blocked=_of_job(job, "job_io_wait"),
        workers=_of_job(job, "job_loader_workers"),
        throttling=tuple(
            sorted(
                {reason for gpu in job.gpus for reason in gpu.throttle} & signals.HARMFUL_THROTTLING
            )
        ),
    )


def _per_card(job: JobFacts, signal: str) -> list[float]:
    """The mean of each card over the longest window that is known."""
    known = (job.values.get(key) for key in averages(job.values, signal))
    return next((list(values.values()) for values in known if values), [])


def _of_job(job: JobFacts, signal: str) -> float | None:
    values = _per_card(job, signal)
    return values[0] if values else None


def _hyperparameters(facts: _Facts) -> Cause | None:
    run, expected = facts.run, facts.expected.get("gpu_memory")
    if run is None or expected is None or facts.memory is None:
        return None
    if not expected.exceeded(facts.memory, FULL):
        return None
    declared = {
        name: float(value)
        for name, value in (("batch", run.batch), ("imgsz", run.imgsz))
        if value is not None
    }
    return _cause(
        HYPERPARAMETERS,
        {
            "memory": facts.memory,
            **_band("expected_memory", expected),
            "basis": expected.basis,
            **declared,
            **_throughput(facts),
        },
    )


def _data_loading(facts: _Facts) -> Cause | None:
    if facts.slow is False:
        return None
    if facts.wait is not None and facts.wait >= WAIT_SHARE:
        figures: _Figures = {"wait": facts.wait}
    elif facts.slow and facts.wait is None and (facts.blocked or 0.0) >= BLOCKED_PROCESSES:
        figures = {"blocked": facts.blocked or 0.0}
    else:
        return None
    if facts.workers is not None:
        figures["workers"] = float(round(facts.workers))
    return _cause(DATA_LOADING, {**figures, **_throughput(facts), **_cpu(facts)})


def _idle(facts: _Facts) -> Cause | None:
    if facts.utilization is None or facts.utilization > IDLE_UTILIZATION or facts.throughput:
        return None
    memory: _Figures = {"memory": facts.memory} if facts.memory else {}
    return _cause(IDLE, {**memory, "utilization": facts.utilization, **_cpu(facts)})


def _hardware(facts: _Facts) -> Cause | None:
    if not facts.throttling or facts.slow is False:
        return None
    return _cause(HARDWARE, {"reasons": ", ".join(facts.throttling), **_throughput(facts)})


def _model(facts: _Facts) -> Cause | None:
    if not facts.slow or facts.lowest_utilization is None or facts.lowest_utilization < BUSY:
        return None
    return _cause(MODEL, {"utilization": facts.lowest_utilization, **_throughput(facts)})


def _cause(name: str, figures: _Figures) -> Cause:
    known, english = tuple(figures.items()), speech("en")
    return Cause(
        name, texts.because(name, known, english), texts.remedy(name, known, english), known
    )


def _throughput(facts: _Facts) -> _Figures:
    if facts.throughput is None:
        return {}
    expected = facts.expected.get("throughput")
    band = {} if expected is None else _band("expected_throughput", expected)
    return {"throughput": facts.throughput, **band}


def _band(name: str, expected: Expected) -> _Figures:
    """What is expected; of an estimate, both of its ends."""
    if not expected.estimated:
        return {name: expected.value}
    return {name: expected.low, f"{name}_high": expected.high}


def _cpu(facts: _Facts) -> _Figures:
    return {} if facts.cores is None else {"cores": facts.cores}
