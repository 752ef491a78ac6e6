"""What the ledger keeps, as frozen records. Times are Unix seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuwarden.agent_api import ActionReport

if TYPE_CHECKING:
    from gpuwarden.ruleengine.cases import Case, Event
    from gpuwarden.ruleengine.papers import Paper


@dataclass(frozen=True, slots=True)
class StoredCase:
    """An open case and its number."""

    id: int
    case: Case


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision to act, as it was signed, and what became of it. Times are Unix seconds.

    Attributes:
        action: the stage's: terminate, requeue, yield or checkpoint.
        host: of the node whose agent is asked; of a job on several nodes, the first.
        body: what the agent gets; for what is done in several steps, what was decided, as JSON.
        signature: of the body for the agent, or an empty string.
        report: the agent's; of several nodes, all in one.
        stage: key of the stage within its rule; empty where an earlier version decided.
    """

    id: str
    epoch: int
    case_id: int
    rule_id: str
    job_id: str
    user: str
    action: str
    state: str
    host: str
    body: bytes
    signature: str
    gpus: tuple[str, ...]
    evidence: str
    grace: float
    expires: float
    created_at: float
    finished_at: float | None = None
    reason: str = ""
    report: str | None = None
    stage: str = ""

    @property
    def decoded_report(self) -> ActionReport | None:
        """The agent's last report, or None."""
        return None if self.report is None else ActionReport.decode(self.report.encode())

    @property
    def asked_to_save(self) -> bool:
        """Whether the agent left a request to save and leave for the job's trainer."""
        report = self.decoded_report
        return report is not None and "leave_requested" in report.steps


@dataclass(frozen=True, slots=True)
class Part:
    """One question to the agent of one node, for one decision. Times are Unix seconds.

    Attributes:
        decision_id: the engine's decision.
        host: by which the agent is reached.
        node: what it calls itself.
        boot_id: its boot when it was asked.
        action: watch, request_leave, request_checkpoint or cancel.
        agent_id: under which the agent knows the question; a new one for each try.
        body, signature: what is sent, byte for byte.
        expires: after which it cannot be taken on any more.
        state: pending, accepted, or the agent's outcome (reclaimed, incomplete, refused, done,
            undeliverable, failed).
        reason: why, where it was not done.
        report: the agent's last report, or None.
    """

    decision_id: str
    host: str
    node: str
    boot_id: str
    action: str
    agent_id: str
    body: bytes
    signature: str
    expires: float
    state: str = "pending"
    reason: str = ""
    report: str | None = None

    @property
    def decoded_report(self) -> ActionReport | None:
        """The agent's last report, or None."""
        return None if self.report is None else ActionReport.decode(self.report.encode())


@dataclass(frozen=True, slots=True)
class PlatformAct:
    """How far a decision has come that is carried out in several steps. Times are Unix seconds.

    Attributes:
        decision_id: the engine's decision.
        platform: slurm or kubernetes; empty where only the agents act.
        claim: how the platform recognises the attempt, as JSON.
        step: watching, asking, waiting, ending, proving, withdrawing: the one that has begun.
        changed_at: when it began.
        waited: seconds of the grace that have passed; not while no engine ran.
        asked_at: when the job was first asked to go, or None.
        notice: whether the platform's own notice to the job was `tried`, is known to be `sent`, or
            there was `none`; empty before.
        ended_at: when the platform was first told to end it, or None.
        tries: how often it was told so.
        word, obstacle, successor: as the platform last said, see `ports.State`.
        detail: more of that, as JSON.
        why: what a withdrawal or an end without proof is due to.
    """

    decision_id: str
    platform: str
    claim: str
    step: str
    changed_at: float
    waited: float = 0.0
    asked_at: float | None = None
    notice: str = ""
    ended_at: float | None = None
    tries: int = 0
    word: str = ""
    obstacle: str = ""
    successor: str = ""
    detail: str = "{}"
    why: str = ""


@dataclass(frozen=True, slots=True)
class Keep:
    """Somebody asked for a job to be left alone by a rule; it holds until `until` (Unix time)."""

    rule_id: str
    job_id: str
    run_id: str | None
    role: str
    by: str
    reason: str
    seconds: float
    granted_at: float
    until: float


@dataclass(frozen=True, slots=True)
class Pause:
    """Somebody said that no job is to be ended; times are Unix times.

    Attributes:
        id: its number.
        by: who said so.
        reason: why.
        begun_at: since when.
        until: when it ends by itself, or None: somebody ends it.
    """

    id: int
    by: str
    reason: str
    begun_at: float
    until: float | None


@dataclass(frozen=True, slots=True)
class Notice:
    """One message that one recipient must have: the deadline waits for its proof.

    Attributes:
        stage: key and mode of the stage, such as `moderate-notify:enforce`.
        channel: email or slack.
        recipient: the address.
        state: pending, proven or failed.
        attempts: how often it was tried.
        proof: the server's answer that shows that it took the message.
        error: why the last attempt failed.
        time: Unix time of the last change.
    """

    stage: str
    channel: str
    recipient: str
    state: str
    attempts: int
    proof: str
    error: str
    time: float


@dataclass(frozen=True, slots=True)
class Change:
    """A case as it now is, with the events that led there.

    Attributes:
        id: its number, or None for a new one.
        case: its next state.
        mode: the rule's mode, for the audit.
        events: what to write to the audit.
        closed: why it is over, or None.
        opening: of a new case, the first sample that broke the rule; or None.
    """

    id: int | None
    case: Case
    mode: str
    events: tuple[Event, ...] = ()
    closed: str | None = None
    opening: Paper | None = None


@dataclass(frozen=True, slots=True)
class Node:
    """A node that registered; times are Unix times.

    Attributes:
        address: where Prometheus reaches its exporter; it is its `instance` label.
        key: what the address is bound to.
        scheme: http or https.
        boot_id: of its last registration.
        exporter: version of its exporter.
        registered_at: when it came, or came back.
        seen_at: when it was last heard.
        left_at: when it said goodbye, or None.
    """

    address: str
    key: str
    scheme: str
    boot_id: str
    exporter: str
    registered_at: float
    seen_at: float
    left_at: float | None = None


@dataclass(frozen=True, slots=True)
class DeliveryKey:
    """What makes two deliveries the same message to the same recipient."""

    fingerprint: str
    starts_at: str
    status: str
    channel: str
    recipient: str

    def row(self) -> tuple[str, str, str, str, str]:
        """The key in the order of its columns."""
        return (self.fingerprint, self.starts_at, self.status, self.channel, self.recipient)
