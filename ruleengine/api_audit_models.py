"""The shape of the audit of one reclaim, as `api_models` has those of the other documents."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from gpuwarden.ruleengine.api_models import (
    CaseKeep,
    Cause,
    Evidence,
    Loss,
    Seconds,
    Shape,
    StageMark,
    Time,
)


class AuditedDecision(Shape):
    """The decision."""

    id: str
    epoch: int
    """Of the engine's life that took it."""
    action: str
    stage: str
    """Key of the rule's stage; empty where an earlier version decided."""
    state: str
    reason: str
    grace: Seconds
    created_at: Time
    expires: Time
    finished_at: Time | None


class AuditedCard(Shape):
    """A card that the job held."""

    uuid: str
    index: str
    name: str
    node: str


class AuditedJob(Shape):
    """Whose job it was, as the last look saw it."""

    job_id: str
    user: str
    team: str
    run_id: str | None
    nodes: list[str]
    cards: list[AuditedCard]
    started_at: Time | None
    saved_at: Time | None
    phase: str | None
    cause: Cause | None


class AuditedRule(Shape):
    """The rule, as it read when it was decided."""

    id: str
    hash: str | None
    mode: str | None
    text: str | None
    """In words, with its PromQL."""
    queries: list[dict[str, Any]]
    """PromQL, the window, and the gates: samples it needs, and how old the newest may be."""
    rule_set_hash: str | None
    files_hash: str | None
    """Of the files of rules and the directory."""
    engine_version: str | None
    changed_since_first_sample: bool | None
    text_at_first_sample: str | None
    """Where it read otherwise then."""


class FirstSample(Shape):
    """What broke the rule first."""

    at: Time
    query_time: float
    """`time=` of every query, Unix seconds."""
    evidence: list[Evidence]


class Deadlines(Shape):
    """What the owner was told, and how it was kept."""

    opened_at: Time
    detected_at: Time | None
    notified_at: Time | None
    told_after: float | None
    """Seconds after `for` was met, keeps not included."""
    told_notice_delivered_for: float | None
    told_grace: float | None
    kept: Seconds
    passed: float | None
    """Seconds since `for` was met, by the engine's own clock."""
    notice_age: float | None
    grace: Seconds
    decided_at: Time


class NoticeRefusal(Shape):
    """A try that failed."""

    at: Time
    error: str


class AuditedNotice(Shape):
    """A notice, and its proof."""

    stage: str
    channel: str
    recipient: str
    """Hidden but for its first letter and the domain."""
    required_at: Time | None
    state: Literal["pending", "proven", "failed"]
    attempts: int
    refusals: list[NoticeRefusal]
    """The first of them."""
    proof: str
    proven_at: Time | None


class HeldBack(Shape):
    """A reason that stood between the due case and its end."""

    reason: str
    sentence: str
    """As it was when the reason was first found."""
    from_: Annotated[Time, Field(alias="from")]
    until: Time | None


class UsedLimit(Shape):
    """How much of a limit was used before this decision."""

    limit: str
    of: str
    """The file whose limit it is, or empty: of all rules."""
    used: int
    allowed: int


class LookedNotice(Shape):
    """A notice as it stood then."""

    stage: str
    channel: str
    state: Literal["pending", "proven", "failed"]
    proven_at: Time | None


class SetBack(Shape):
    """The engine's clock was set back."""

    at: Time
    by: Seconds


class LastLook(Shape):
    """What was found right before the decision; no guard objected."""

    at: Time
    truth: str
    self_report_only: bool
    protected: str
    query_time: float
    facts_age: Seconds
    facts_allowed_age: Seconds
    problems: list[str]
    expected_nodes: int
    lit_nodes: int
    clock_skew: Seconds
    kill_switch: bool | None
    paused: str
    bad_files: str
    settled_for: Seconds
    settle_after: Seconds
    kept_until: Time | None
    limits: list[UsedLimit]
    notices: list[LookedNotice]
    work_lost: float | None
    max_work_lost: float | None


class SignedOrder(Shape):
    """What was sent to a node's agent, without its whole text."""

    decision_id: str
    action: str
    sha256: str
    """Of the signed bytes."""
    key_id: str | None
    epoch: int | None
    expires: Time | None
    seen: int
    """How many processes of the job were named."""


class LadderStep(Shape):
    """A step that an agent took."""

    step: str
    at: Time


class EndedProcess(Shape):
    """A process, and what ended it."""

    pid: int
    start_ticks: int
    ended_by: str | None
    """null where it survived."""
    gpu_memory: int | None


class CardMemory(Shape):
    """Bytes used on a card, by whomever."""

    uuid: str
    used_before: int | None
    used_after: int | None


class AuditedNode(Shape):
    """What was asked of a node, and what its agent did and saw."""

    host: str
    node: str
    boot_id: str
    request: SignedOrder
    state: str
    decision: str | None
    """That the agent acted on; another one where the attempt was already being ended."""
    outcome: str | None
    reason: str
    message: str
    steps: list[LadderStep]
    processes: list[EndedProcess]
    cards: list[CardMemory]
    gone: bool | None
    """Whether NVML lists none of them any more."""
    memory_freed: int | None
    proof_seconds: float | None


class PlatformTold(Shape):
    """What the platform that owns the job was told, and what it said."""

    platform: str
    """slurm or kubernetes; empty where only the agents act."""
    claim: dict[str, Any]
    """How it recognises the attempt."""
    step: str
    changed_at: Time
    waited: Seconds
    """Of the grace."""
    asked_at: Time | None
    notice: str
    """Whether its own notice to the job was tried, sent, or there was none."""
    ended_at: Time | None
    """When it was first told to end the job."""
    tries: int
    word: str
    """Its own, such as CANCELLED."""
    obstacle: str
    successor: str
    detail: dict[str, Any]
    why: str


class Spans(Shape):
    """Seconds between the great steps."""

    first_sample_to_detected: float | None
    detected_to_told: float | None
    told_to_decided: float | None
    decided_to_finished: float | None
    in_all: float | None


class ReclaimResult(Shape):
    """What came of it."""

    state: str
    reason: str
    memory_freed: int | None
    processes: int
    survivors: int
    work_at_risk: float | None
    """Seconds since the last saved state, when it was decided."""
    loss: Loss | None
    seconds: Spans


class OtherDecision(Shape):
    """Another decision about the same attempt."""

    id: str
    action: str
    state: str
    reason: str
    created_at: Time


class Afterwards(Shape):
    """Something that came of it later."""

    at: Time | None
    what: str
    job_id: str | None


class AuditMoment(Shape):
    """A line of the course."""

    at: Time
    since_first: Seconds
    since_last: Seconds
    who: str
    what: str
    sentence: str


class MissingPart(Shape):
    """What this audit lacks."""

    what: str
    why: str


class AuditCheck(Shape):
    """An invariant, looked for in this audit."""

    number: int
    name: str
    claim: str
    holds: bool | None
    """null where the audit cannot tell."""
    why: str


class ReclaimAudit(Shape):
    """One reclaim, from the sample that started it to the memory that came back."""

    schema_: Annotated[str, Field(alias="schema")]
    time: Time
    answer: str
    decision: AuditedDecision
    job: AuditedJob
    rule: AuditedRule
    first_sample: FirstSample | None
    deadlines: Deadlines
    clock_set_back: list[SetBack]
    """Where times do not tell what came first."""
    stages: list[StageMark]
    notices: list[AuditedNotice]
    keeps: list[CaseKeep]
    held_back: list[HeldBack]
    last_look: LastLook | None
    evidence: list[Evidence]
    """Of the last look."""
    platform: PlatformTold | None
    nodes: list[AuditedNode]
    result: ReclaimResult
    other_decisions: list[OtherDecision]
    afterwards: list[Afterwards]
    timeline: list[AuditMoment]
    missing: list[MissingPart]
    checks: list[AuditCheck]
