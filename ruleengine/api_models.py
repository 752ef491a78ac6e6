"""The shapes of the API's documents, from which its description is generated.

They describe, and do not build: the documents are made where the facts are, and a test holds every
answer against its shape. No field is left out of an answer; one without a value is null.
"""

from __future__ import annotations

import datetime as dt
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Time = dt.datetime
"""RFC 3339, in UTC."""
Seconds = Annotated[float, Field(description="Seconds.")]


class Shape(BaseModel):
    """A document with exactly these fields."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class Failure(Shape):
    """An answer with a reason in the place of a result."""

    error: str
    """A stable word for machines."""
    message: str
    """The same for people."""


class Block(Shape):
    """A reason for which no job, or this job, is ended."""

    reason: str
    """A stable word for machines."""
    sentence: str
    """The same for people, with the numbers."""


class JobHead(Shape):
    """A running job in a line."""

    job_id: str
    """The attempt, as its node names it."""
    user: str
    """Empty where it is not known."""
    team: str
    """By the operator's directory."""
    node: str
    """Prometheus' target of its node."""
    framework: str
    """Empty where it is not known."""
    gpus: list[str]
    """Index of each card that it holds."""
    run_id: str | None
    """The trainer's run."""
    fresh: bool
    """Whether its node's snapshot is current; if not, everything about it is UNKNOWN."""


class ListedJob(JobHead):
    """A running job with its open cases."""

    cases: dict[str, str]
    """Rule -> state of its case."""


class LitNodes(Shape):
    """How many nodes are seen."""

    expected: int
    lit: int


class Jobs(Shape):
    """Running jobs; those with open cases first."""

    schema_: Annotated[str, Field(alias="schema")]
    time: Time | None
    """Of the last completed tick."""
    nodes: LitNodes | None
    halted: list[Block]
    """Why no job at all is ended now."""
    total: int
    """How many fit the filter."""
    offset: int
    """How many of them were passed over."""
    jobs: list[ListedJob]


class CardHolder(Shape):
    """A job that holds a card."""

    job_id: str
    user: str
    team: str


class Card(Shape):
    """A card."""

    uuid: str
    node: str
    index: str
    name: str
    """Empty where it is not known."""
    memory_total_bytes: float | None
    throttle: list[str]
    """What lowers its clocks now."""
    fresh: bool
    """Whether its node's snapshot is current."""
    holders: int
    """How many jobs hold it."""
    jobs: list[CardHolder]
    """Those of them that who asks may see."""
    cases: dict[str, str]
    """Rule about cards -> state of its case."""


class Cards(Shape):
    """Cards by node and index."""

    schema_: Annotated[str, Field(alias="schema")]
    time: Time | None
    all: int
    """How many there are."""
    free: int
    """How many of them no job holds, on nodes that are seen."""
    total: int
    """How many fit the filter."""
    offset: int
    cards: list[Card]


class Money(Shape):
    """An amount of the currency of engine.yaml."""

    amount: float
    currency: str


class AtRisk(Shape):
    """What an end would cost: the work since the last saved state."""

    seconds: Seconds
    gpu_seconds: Seconds
    """The same on all cards together."""
    cards: int
    since: Literal["saved_state", "start"]
    """From where it counts: no saved state of this attempt is known, or one is."""
    cost: Money | None
    """None: no price is known."""


class Loss(Shape):
    """What an end cost, as it was foretold and as the node counted."""

    estimated: AtRisk | None
    """At the moment of the decision."""
    lost_gpu_seconds: Seconds | None
    cost: Money | None
    counted_at: Time | None
    why_not: str
    """Why it is not known, in words."""


class Job(JobHead):
    """A running job."""

    source: str
    interactive: bool
    started_at: Time | None
    first_gpu_use: Time | None
    not_fresh_reason: str
    phase: str | None
    """What its trainer says that it does."""
    checkpoint_at: Time | None
    """Of the newest saved state that is known."""
    at_risk: AtRisk | None
    """What an end now would cost; None: not known, or a card."""


class Evidence(Shape):
    """A condition and what was found."""

    condition: str
    truth: Literal["YES", "NO", "UNKNOWN"]
    measured: str
    reason: str
    """Why it is UNKNOWN, as a word."""
    values: dict[str, float]
    """Card's UUID, or an empty string for the whole job -> value."""
    expected: str
    estimated: bool


class Cause(Shape):
    """Why the job does as it does."""

    name: str
    because: str
    remedy: str


class StageMark(Shape):
    """A stage that a case has entered."""

    stage: str
    level: str
    do: str
    mode: str
    at: Time
    elapsed: Seconds
    would: bool
    """The rule's mode kept it from acting."""


class Act(Shape):
    """What a stage has done to the job; the last try."""

    stage: str
    do: Literal["checkpoint", "yield", "requeue", "terminate"]
    decision: str | None
    at: Time
    state: Literal[
        "authorised",
        "acting",
        "verified",
        "done",
        "incomplete",
        "failed",
        "refused",
        "lapsed",
        "unheeded",
        "undeliverable",
        "withdrawn",
        "skipped",
    ]


class Notice(Shape):
    """A message that one recipient must have."""

    stage: str
    channel: str
    recipient: str
    state: Literal["pending", "proven", "failed"]
    attempts: int
    proof: str
    error: str
    time: Time


class CaseKeep(Shape):
    """Somebody put the end off."""

    role: Literal["owner", "operator"]
    by: str
    reason: str
    seconds: Seconds
    granted_at: Time
    until: Time


class Case(Shape):
    """A rule that the job breaks."""

    state: str
    opened_at: Time
    detected_at: Time | None
    notified_at: Time | None
    for_met_for: Seconds
    not_before: Time | None
    """When its cards may be taken at the earliest."""
    kept: Seconds
    decision: str | None
    cause: Cause | None
    stages: list[StageMark]
    acts: list[Act]
    notices: list[Notice]
    keeps: list[CaseKeep]


class Next(Shape):
    """Something that is going to happen."""

    kind: str
    what: str
    in_seconds: float | None
    at: Time | None
    if_: Annotated[str, Field(alias="if")]
    stage: str
    level: str


class Grade(Shape):
    """What a stage with a condition of its own says."""

    stage: str
    truth: Literal["YES", "NO", "UNKNOWN"]
    evidence: list[Evidence]


class JobRule(Shape):
    """What a rule says of the job."""

    rule: str
    description: str
    mode: Literal["observe", "warn", "enforce"]
    verdict: Literal["YES", "NO", "UNKNOWN"] | None
    protected: str
    self_report_only: bool
    evidence: list[Evidence]
    grades: list[Grade]
    """Of the stages that have a condition of their own."""
    case: Case | None
    why_not: list[Block]
    """What stands between the case and the end of the job, were it decided now."""
    next: list[Next]


class NodePart(Shape):
    """What the agent of one node was asked for a decision, and what it said."""

    node: str
    action: str
    """watch, request_leave, request_checkpoint or cancel."""
    state: str
    reason: str
    report: dict[str, Any] | None


class DecisionSteps(Shape):
    """How far a decision has come that a platform, or several nodes, carry out."""

    platform: str
    """slurm or kubernetes; empty where only agents act."""
    attempt: dict[str, Any]
    """How the platform recognises the attempt."""
    step: str
    """watching, asking, waiting, ending, proving or withdrawing."""
    since: Time
    waited: Seconds
    """Of the grace; not while no engine ran."""
    asked_at: Time | None
    notice: str
    """The platform's own to the job: sent, tried, none, or empty before."""
    ended_at: Time | None
    tries: int
    """How often the platform was told to end it."""
    word: str
    """The platform's last."""
    obstacle: str
    successor: str
    why: str
    nodes: list[NodePart]


class Decision(Shape):
    """A decision to act on a job, and what became of it."""

    schema_: Annotated[str, Field(alias="schema")]
    id: str
    rule: str
    job_id: str
    user: str
    action: str
    state: str
    reason: str
    node: str
    cards: list[str]
    grace: Seconds
    created_at: Time
    expires: Time
    finished_at: Time | None
    evidence: list[Evidence]
    report: dict[str, Any] | None
    """The agent's last report, as it was given."""
    loss: Loss | None
    """None: nothing was written down with it."""
    stage: str
    """Key of the rule's stage."""
    steps: DecisionSteps | None
    """None: one node's agent does all of it."""


class PastCase(Shape):
    """A case that is closed."""

    rule: str
    state: str
    opened_at: Time
    closed_at: Time
    closed_because: str


class JobEvent(Shape):
    """A line of the job's audit."""

    id: int
    time: Time
    rule: str
    kind: str
    mode: str
    detail: dict[str, Any]


class LeaveDocument(Shape):
    """A leave request and what became of it."""

    id: str
    key: str
    by: str
    """The scheduler, as the audit names it."""
    job_id: str
    run_id: str
    user: str
    """Whose job it is; empty where it is not known."""
    at: str
    then: str
    cause: str
    reason: str
    successor: str
    nodes: list[str]
    deadline_seconds: Seconds
    asked_at: Time
    deadline: Time
    state: str
    """asked, waiting, left, unheeded, undeliverable, refused, lapsed, withdrawn or overtaken."""
    why: str
    finished_at: Time | None
    steps: dict[str, float]
    """notified, acknowledged, saved, left, freed -> Unix time; what was not seen is absent."""


class JobDocument(Shape):
    """Everything known of a job."""

    schema_: Annotated[str, Field(alias="schema")]
    job_id: str
    """Of a card: its UUID."""
    target: Literal["job", "gpu"]
    """What rules judge here: a job, or a card."""
    time: Time | None
    running: bool
    halted: list[Block]
    job: Job | None
    rules: list[JobRule]
    decisions: list[Decision]
    leaves: list[LeaveDocument]
    """What schedulers asked it for, oldest first."""
    past_cases: list[PastCase]
    events: list[JobEvent]


class Band(Shape):
    """Between which values a signal should be."""

    low: float
    high: float


class HistoryChart(Shape):
    """One signal of a job over time."""

    signal: str
    unit: str
    points: list[tuple[float, float]]
    """Unix time and value."""
    expected: Band | None
    expected_text: str


class History(Shape):
    """What a job did over the last hours, beside what it should do."""

    schema_: Annotated[str, Field(alias="schema")]
    job_id: str
    start: Time
    end: Time
    step: Seconds
    problem: str
    """Why there is no chart, or an empty string."""
    charts: list[HistoryChart]


class Match(Shape):
    """A job that a word may mean."""

    job_id: str
    run_id: str | None
    running: bool


class Matches(Shape):
    """The jobs that a word may mean."""

    schema_: Annotated[str, Field(alias="schema")]
    whole: bool
    """The word is a whole name, not only the beginning of one."""
    matches: list[Match]
    more: bool


class Decisions(Shape):
    """Decisions, newest first."""

    schema_: Annotated[str, Field(alias="schema")]
    decisions: list[Decision]
    before: Time | None
    """What to ask for to see older ones; null where there are none."""


class RuleStage(Shape):
    """A stage of a rule."""

    key: str
    level: str
    after: Seconds


class Rule(Shape):
    """A rule in force."""

    id: str
    description: str
    mode: Literal["observe", "warn", "enforce"]
    canary: str
    """On which share of the owners it enforces, and what ends that; empty where on all."""
    held_back: str
    """Why it only warns now although its mode is enforce, or an empty string."""
    target: Literal["job", "gpu"]
    team: str
    stages: list[RuleStage]
    cases: dict[str, int]
    """State -> how many cases are in it now."""
    text: str
    """What it does, in words, with its PromQL."""


class Rules(Shape):
    """The rules in force."""

    schema_: Annotated[str, Field(alias="schema")]
    hash: str
    problem: str
    """Why the files on disk are not in force, or an empty string."""
    rules: list[Rule]


class WhitelistEntry(Shape):
    """A protection written in the rule files."""

    match: dict[str, str]
    rules: list[str]
    reason: str
    approved_by: str
    expires: Time
    expired: bool


class ListedKeep(Shape):
    """A keep that is in force."""

    rule: str
    job_id: str
    run_id: str | None
    role: Literal["owner", "operator"]
    by: str
    reason: str
    granted_at: Time
    until: Time
    user: str


class Protections(Shape):
    """Who is protected from what, until when and why."""

    schema_: Annotated[str, Field(alias="schema")]
    whitelist: list[WhitelistEntry]
    keeps: list[ListedKeep]
