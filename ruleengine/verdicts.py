"""The nouns between gathering, judging and acting: facts about jobs, and three-valued verdicts.

Everything here is frozen: evaluation and guards are pure functions of these, of the rules and of a
time that is passed in, so that the live engine, replay and tests run the same code.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Set as AbstractSet

    from gpuwarden.ruleengine.demands import Demand

MAX_DARK_SHARE = 0.1
"""With more of the expected nodes dark, nothing is ended."""
MAX_SKEW_SECONDS = 5.0
"""Clocks further apart than this make a node's, or a whole tick's, facts unusable."""


class Truth(Enum):
    """Kleene's three values; UNKNOWN never acts."""

    NO = 0.0
    UNKNOWN = 0.5
    YES = 1.0

    word: str
    """no, unknown or yes."""

    def __init__(self, _value: float) -> None:
        self.word = self.name.lower()


class SignalKey(NamedTuple):
    """One query for the whole fleet: what is measured, how it is aggregated, over what window.

    Attributes:
        signal: name in `signals.SIGNALS`.
        agg: min, max, avg, last, or `q` with a quantile such as q0.2.
        window_seconds: length of the window; 0 for `last`.
        samples: the last N scrapes instead of a length of time, or None.
        promql: expression of a custom condition, or an empty string.
    """

    signal: str
    agg: str
    window_seconds: float = 0.0
    samples: int | None = None
    promql: str = ""


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """A card that a job holds.

    Attributes:
        uuid: NVML's UUID.
        index: NVML's index on its node.
        name: product name, or empty where not known.
        memory_total_bytes: None where not known.
        tenants: jobs that hold it.
        throttle: reasons that lower its clocks now, sorted.
        instance: Prometheus target of its node.
    """

    uuid: str
    index: str
    name: str
    memory_total_bytes: float | None = None
    tenants: int = 1
    throttle: tuple[str, ...] = ()
    instance: str = ""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What the job's trainer says of itself; None where it says nothing or it is not fresh.

    Attributes:
        conflict: two jobs claim the run, or the job claims two: nothing else here is believed.
        claims: with a conflict, every run that the job claims.
        checkpoint_time: of the newest state known to be on disk, else of the newest saved.
        other_cards: whether it runs on more or fewer cards than the job holds on a node.
    """

    run_id: str
    model: str = ""
    batch: int | None = None
    imgsz: int | None = None
    amp: bool | None = None
    project: str = ""
    phase: str | None = None
    phase_since: float | None = None
    checkpoint_time: float | None = None
    resume_mode: str | None = None
    conflict: bool = False
    claims: tuple[str, ...] = ()
    other_cards: bool = False


@dataclass(frozen=True, slots=True)
class JobFacts:
    """One job (one attempt) at one moment. Times are Unix seconds.

    Attributes:
        job_id: the attempt.
        instance: Prometheus target of its node; of a job on several nodes, the first by name.
        instances: of all its nodes, sorted.
        user, source, framework: empty where not known.
        team: by the operator's directory; empty where not known.
        interactive: a tty or a Jupyter kernel.
        executables: (executable, cgroup) of each process that holds a GPU.
        gpus: cards that it holds.
        start_time, first_gpu_use: None where not known.
        run: the trainer's word, or None.
        processes: (pid, start time) as last exported.
        activity: signal (log, heartbeat, cpu) -> last sign of life.
        values: SignalKey -> card's UUID ("" for a value of the whole job) -> value.
        fresh: whether the node's snapshot is current; if not, every condition is UNKNOWN.
        not_fresh_reason: why not, in words.
    """

    job_id: str
    instance: str
    user: str = ""
    source: str = ""
    framework: str = ""
    interactive: bool = False
    executables: tuple[tuple[str, str], ...] = ()
    gpus: tuple[GpuFacts, ...] = ()
    start_time: float | None = None
    first_gpu_use: float | None = None
    run: RunFacts | None = None
    processes: tuple[tuple[int, float], ...] = ()
    activity: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    values: Mapping[SignalKey, Mapping[str, float]] = field(
        default_factory=lambda: MappingProxyType({})
    )
    fresh: bool = True
    not_fresh_reason: str = ""
    team: str = ""
    instances: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FleetFacts:
    """Everything one tick knows.

    Attributes:
        time: Unix time of every query.
        jobs: by job_id.
        expected_nodes: how many nodes should be lit.
        lit_nodes: how many have a complete, current snapshot.
        expected_names: targets of Prometheus of those that should be, where they have names.
        lit_names: of those that have.
        clock_skew_seconds: largest distance found between this machine, Prometheus and a node.
        problems: why no job may be ended on these facts, in words; empty if they are whole.
        cards: every card, as a subject for rules with `target: gpu`; by its UUID, which is also
            the `job_id` of these facts. A card is never ended.
        failed: custom expressions that could not be evaluated, and values of which the server
            refused the query -> why.
        scrape_interval: of the nodes, in seconds.
        numbers: custom expressions that gave exactly one row -> its value.
        demands: platform, as `only_if_waiting` names it -> who waits there; of those that a rule
            asks, and that answered.
        narrowed: values that were asked of some jobs alone -> of which; no other job's verdict
            could depend on them. All others were asked of every job.
    """

    time: float
    jobs: Mapping[str, JobFacts]
    expected_nodes: int
    lit_nodes: int
    clock_skew_seconds: float = 0.0
    problems: tuple[str, ...] = ()
    cards: Mapping[str, JobFacts] = field(default_factory=lambda: MappingProxyType({}))
    failed: Mapping[SignalKey, str] = field(default_factory=lambda: MappingProxyType({}))
    scrape_interval: float = 5.0
    expected_names: tuple[str, ...] = ()
    lit_names: tuple[str, ...] = ()
    numbers: Mapping[SignalKey, float] = field(default_factory=lambda: MappingProxyType({}))
    demands: Mapping[str, Demand] = field(default_factory=lambda: MappingProxyType({}))
    narrowed: Mapping[SignalKey, AbstractSet[str]] = field(
        default_factory=lambda: MappingProxyType({})
    )

    def why_absent(self, key: SignalKey, job_id: str) -> str:
        """The reason for which a value that is absent is not known."""
        if key in self.failed:
            return "query_failed"
        asked = self.narrowed.get(key)
        return "no_data" if asked is None or job_id in asked else "not_asked"


@dataclass(frozen=True, slots=True)
class Evidence:
    """One condition and what was found.

    Attributes:
        condition: the condition in words, such as `gpu_utilization max over 3 samples <= 5 %`.
        truth: what follows.
        measured: the deciding value in words, or an empty string.
        reason: for UNKNOWN, a short machine-readable word (no_data, cold_start, phase, dark_node,
            shared_card, no_profile, clock_skew, ...), else an empty string.
        values: card's UUID or "" -> value, for the record.
        expected: the expectation in words for a profile, else an empty string.
        estimated: whether that expectation is an estimate by formula, of which only a band is
            known.
    """

    condition: str
    truth: Truth
    measured: str = ""
    reason: str = ""
    values: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    expected: str = ""
    estimated: bool = False


@dataclass(frozen=True, slots=True)
class Grade:
    """How far it has come for one stage that has a condition of its own.

    Attributes:
        stage: the stage's key within its rule.
        truth: the rule's truth and the stage's condition together.
        evidence: one entry per condition of the stage.
        worded: whether it would be YES but for what the job says of itself.
    """

    stage: str
    truth: Truth
    evidence: tuple[Evidence, ...] = ()
    worded: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one rule says of one job.

    Attributes:
        rule_id: the rule.
        job_id: the job.
        truth: the rule's `when` after cold start, phases and the whitelist.
        evidence: one entry per condition, in the rule's order.
        protected: why the rule does not apply (`whitelist: <reason>`), or an empty string; the
            truth is then NO.
        self_report_only: the truth, or that of a stage, would be YES but for what the job says of
            itself; the time so spent counts against `trust_for`.
        grades: of the stages that have a condition of their own; none where the rule is not about
            the job.
    """

    rule_id: str
    job_id: str
    truth: Truth
    evidence: tuple[Evidence, ...] = ()
    protected: str = ""
    self_report_only: bool = False
    grades: tuple[Grade, ...] = ()

    def grade(self, stage: str) -> Grade | None:
        """What was found for a stage that has a condition of its own, by its key, or None."""
        return next((grade for grade in self.grades if grade.stage == stage), None)

    @property
    def certain(self) -> bool:
        """Whether a job's word could change nothing any more."""
        return self.truth is Truth.YES and all(g.truth is Truth.YES for g in self.grades)

    def beside(self, plain: Verdict) -> Verdict:
        """The same, knowing where only the job's word stands against a YES.

        Args:
            plain: of the same rule and job, without its word.
        """
        yes = {grade.stage for grade in plain.grades if grade.truth is Truth.YES}
        grades = tuple(
            replace(grade, worded=grade.truth is not Truth.YES and grade.stage in yes)
            for grade in self.grades
        )
        own = plain.truth is Truth.YES and self.truth is not Truth.YES
        return replace(
            self, grades=grades, self_report_only=own or any(grade.worded for grade in grades)
        )

    @property
    def whole_evidence(self) -> tuple[Evidence, ...]:
        """That of the rule and of all its stages, in their order; what stages share, once."""
        if not self.grades:
            return self.evidence
        found = list(self.evidence)
        found += [
            item
            for index, grade in enumerate(self.grades)
            for item in grade.evidence
            if not any(item in earlier.evidence for earlier in self.grades[:index])
        ]
        return tuple(found)

    @property
    def unknown_reasons(self) -> tuple[str, ...]:
        """Machine-readable reasons of the conditions that could not be decided, sorted."""
        return tuple(sorted({item.reason for item in self.evidence if item.reason}))


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a job uses its GPUs as it does, as far as the facts tell.

    Attributes:
        name: data-loading, hyperparameters, model, hardware, idle, or unknown.
        because: the evidence in one sentence.
        remedy: what the owner could do, in one sentence, or an empty string.
        figures: what it rests on, name -> value in base units; notices tell it again from these
            in the reader's language.
    """

    name: str
    because: str
    remedy: str = ""
    figures: tuple[tuple[str, float | str], ...] = ()
