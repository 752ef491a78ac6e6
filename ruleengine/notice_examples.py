"""Made-up notices of a rule, as its owner would read them: everything is real but the job. Pure.

The job breaks each condition of the rule by a plain margin, and what it shows is judged by the rule
itself, so that an example cannot say what a real notice would not.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from gpuwarden.quantities import Direction, Unit
from gpuwarden.ruleengine import messages, signals, telling
from gpuwarden.ruleengine.case_records import Case, CaseState
from gpuwarden.ruleengine.cases import remaining
from gpuwarden.ruleengine.causes import IDLE_UTILIZATION, diagnose
from gpuwarden.ruleengine.conditions import (
    All,
    Any_,
    Gpus,
    NeedsMemory,
    NoProgress,
    Not,
    OverBudget,
    ProfileCondition,
    Promql,
    Signal,
    SilentFor,
)
from gpuwarden.ruleengine.evaluation import evaluate
from gpuwarden.ruleengine.layouts import Message
from gpuwarden.ruleengine.messages import Outlook
from gpuwarden.ruleengine.model import Action, Mode, Target
from gpuwarden.ruleengine.notices import keep_allowance
from gpuwarden.ruleengine.profiles import expectation
from gpuwarden.ruleengine.verdicts import FleetFacts, GpuFacts, JobFacts, RunFacts, SignalKey

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gpuwarden.ruleengine.conditions import Comparing, Condition
    from gpuwarden.ruleengine.model import Profile, Rule
    from gpuwarden.ruleengine.profiles import Expected
    from gpuwarden.ruleengine.texts.speeches import Language

JOB: Final = "proc-0a1b2c3d-4711-99"
NODE: Final = "node-7:9835"
CARD: Final = "NVIDIA A100-SXM4-40GB"
_GIB = 2.0**30
_LONG = 14 * 86400.0
_CAUSES: Final = {
    "throughput": 31.0,
    "data_wait_share": 0.71,
    "job_cpu_cores": 3.2,
    "job_loader_workers": 8.0,
}
"""What a training that waits for its data shows, where the rule asks for nothing else."""
_Values = dict[SignalKey, dict[str, float]]


@dataclass(frozen=True, slots=True)
class Scene:
    """What an example is made with.

    Attributes:
        now: Unix time.
        zone: of its reader.
        engine_url: how people reach the engine.
        job_id: of the job.
    """

    now: float
    zone: str
    engine_url: str
    job_id: str = JOB


def example(
    rule: Rule, profiles: Sequence[Profile], scene: Scene, *, language: Language
) -> Message:
    """The notice that a rule would send, in the mode in which it acts.

    Args:
        rule: any rule about jobs; whom it is about and at what hours is not asked.
        profiles: expectations.
        scene: place and time.
        language: the reader's.
    """
    mode = Mode.ENFORCE if rule.takes else Mode.WARN
    shown = rule.model_copy(update={"mode": mode, "match": {}, "team": "", "only_during": ()})
    job = _job(shown, profiles, scene)
    fleet = FleetFacts(
        time=scene.now,
        jobs={job.job_id: job} if shown.target is Target.JOB else {},
        cards={} if shown.target is Target.JOB else {job.job_id: job},
        expected_nodes=1,
        lit_nodes=1,
    )
    verdict = evaluate(shown, job, fleet, profiles=profiles, whitelist=(), now=scene.now)
    found = diagnose(job, verdict, profiles, team=rule.team)
    elapsed = next((s.after for s in rule.stages if s.do is Action.NOTIFY), 0.0)
    case = Case(
        rule_id=rule.id,
        job_id=job.job_id,
        opened_at=scene.now - elapsed - rule.for_,
        state=CaseState.DETECTED,
        user=job.user,
        run_id="yolo-2026" if job.run is not None else None,
        instance=NODE,
        detected_at=scene.now - elapsed,
        elapsed=elapsed,
        cause=found.name,
        because=found.because,
        remedy=found.remedy,
        figures=found.figures,
    )
    takes = remaining(case, shown)
    outlook = Outlook(
        remaining=takes,
        grace=telling.grace_of(case, shown),
        owner_may=keep_allowance(shown),
        ticket="EXAMPLE",
        link=f"{scene.engine_url}/keep/EXAMPLE",
        work_lost=2580.0,
        saved=True,
        cards=tuple((gpu.uuid, gpu.index, gpu.name) for gpu in job.gpus),
        expected=expectation(job, profiles, team=rule.team).values,
        acts=telling.upcoming(case, shown, scene.now),
    )
    texts = messages.in_languages(
        (language,),
        partial(
            messages.notice,
            case,
            shown,
            verdict.whole_evidence,
            outlook,
            now=scene.now,
            zone=scene.zone,
            engine_url=scene.engine_url,
        ),
    )
    level = next((s.level.value for s in rule.stages if s.do is Action.NOTIFY), "")
    labels = {"level": level, "rule": rule.id, "job_id": job.job_id}
    url = f"{scene.engine_url}/jobs/{job.job_id}"
    return Message.of(texts, url, labels=labels, language=language)


def _job(rule: Rule, profiles: Sequence[Profile], scene: Scene) -> JobFacts:
    """A job that breaks the rule."""
    large = any(isinstance(leaf, NeedsMemory) for leaf, _ in _leaves(rule))
    run = RunFacts(
        "yolo-2026",
        model="yolov8m",
        batch=4096 if large else 64,
        imgsz=640,
        amp=True,
        phase="train",
        phase_since=scene.now - _LONG,
        checkpoint_time=scene.now - 2580.0,
    )
    job = JobFacts(
        job_id=scene.job_id,
        instance=NODE,
        instances=(NODE,),
        user="you",
        framework="ultralytics",
        start_time=scene.now - _LONG,
        first_gpu_use=scene.now - _LONG,
        gpus=tuple(
            GpuFacts(f"GPU-{index}", str(index), CARD, 40 * _GIB, instance=NODE)
            for index in range(2 if _uneven(rule) else 1)
        ),
        run=run,
        activity=dict.fromkeys(("log", "heartbeat", "cpu"), scene.now - _silence(rule)),
    )
    expected = dict(expectation(job, profiles, team=rule.team).values)
    values: _Values = {}
    for number, (leaf, negated) in enumerate(_leaves(rule)):
        _break(leaf, negated=negated, number=number, job=job, values=values, expected=expected)
    _explain(job, values)
    return dataclasses.replace(job, values=values)


def _silence(rule: Rule) -> float:
    """Seconds since the job's last sign of life: a while longer than the rule asks for."""
    asked = [leaf.silent_for for leaf, _ in _leaves(rule) if isinstance(leaf, SilentFor)]
    return 2.5 * max(asked, default=10.0)


def _explain(job: JobFacts, values: _Values) -> None:
    """Add what tells the cause, where the rule's own figures leave it open."""

    def add(name: str, value: float) -> None:
        cards = [gpu.uuid for gpu in job.gpus] if signals.SIGNALS[name].per_gpu else [""]
        values.setdefault(SignalKey(name, "avg", 300.0), dict.fromkeys(cards, value))

    used = [max(cards.values()) for key, cards in values.items() if key.signal == "gpu_utilization"]
    asked = {key.signal for key in values}
    if used and max(used) <= IDLE_UTILIZATION:
        add("gpu_utilization", max(used))
        shares = [
            value
            for key, cards in values.items()
            for value in cards.values()
            if key.signal == "gpu_memory_share"
        ]
        add("gpu_memory", max(shares, default=0.26) * 40 * _GIB)
    elif {"throughput", "data_wait_share"} & asked:
        for name, value in _CAUSES.items():
            if name not in asked and not (used and name == "data_wait_share"):
                add(name, value)


def _leaves(rule: Rule) -> Iterator[tuple[Condition, bool]]:
    """Every condition that measures, and whether it must not hold."""

    def below(condition: Condition, *, negated: bool) -> Iterator[tuple[Condition, bool]]:
        match condition:
            case All():
                for part in condition.all:
                    yield from below(part, negated=negated)
            case Any_():
                for part in condition.any:
                    yield from below(part, negated=negated)
            case Not():
                yield from below(condition.not_, negated=not negated)
            case _:
                yield condition, negated

    for condition in rule.conditions:
        yield from below(condition, negated=False)


def _uneven(rule: Rule) -> bool:
    """Whether the rule is about cards of one job that differ from one another."""
    sides = {
        leaf.upward
        for leaf, _ in _leaves(rule)
        if isinstance(leaf, Signal) and leaf.signal == "gpu_utilization" and leaf.gpus is Gpus.ANY
    }
    return len(sides) > 1


def _break(
    leaf: Condition,
    *,
    negated: bool,
    number: int,
    job: JobFacts,
    values: _Values,
    expected: dict[str, Expected],
) -> None:
    """Give a job the values with which a condition holds, or with which it does not."""
    uuids = [gpu.uuid for gpu in job.gpus]
    match leaf:
        case Signal():
            value = _beyond(leaf, leaf.spec.unit, holds=not negated)
            cards = dict.fromkeys(uuids if leaf.spec.per_gpu else [""], value)
            if len(uuids) > 1 and leaf.gpus is Gpus.ANY:
                cards[uuids[(number + 1) % 2]] = _beyond(leaf, leaf.spec.unit, holds=negated)
            values[leaf.key] = cards
        case OverBudget():
            values[leaf.key] = {"": _beyond(leaf, Unit.COUNT, holds=not negated)}
        case Promql():
            values[leaf.key] = {"": _beyond(leaf, Unit.COUNT, holds=not negated)}
        case NoProgress():
            values[leaf.key] = {"": 100.0 if negated else 0.0}
        case ProfileCondition():
            for name, deviation in leaf.profile.entries.items():
                if name not in expected:
                    continue
                low = deviation.direction is not Direction.ABOVE
                value = 0.2 * expected[name].low if low else 1.8 * expected[name].high
                per_card = signals.SIGNALS[name].per_gpu
                values[leaf.key(name)] = dict.fromkeys(uuids if per_card else [""], value)
        case SilentFor() | NeedsMemory():
            pass  # the job is silent for days, and its batch is as large as is asked for
        case _:
            raise AssertionError(leaf)


def _beyond(leaf: Comparing, unit: Unit, *, holds: bool) -> float:
    """A value plainly on one side of a limit."""
    limit = leaf.limit.value
    if leaf.upward is holds:
        more = limit * 1.5 if limit else 1.0
        return min(more, (1 + limit) / 2) if unit is Unit.RATIO else more
    return limit * 0.2
