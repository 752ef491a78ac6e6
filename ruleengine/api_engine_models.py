"""The shapes of what the API tells of the engine itself, and of what it is sent.

As in `api_models`, they describe and do not build.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from gpuwarden.ruleengine.api_models import Block, Seconds, Shape, Time


class Pause(Shape):
    """Somebody said that no job is to be ended."""

    by: str
    reason: str
    since: Time
    until: Time | None


class HeldBack(Shape):
    """A rule that has fallen back to warn, until an admin resumes it."""

    rule: str
    reason: str
    """appeals or regrets."""
    sentence: str
    since: Time


class Enforcement(Shape):
    """Whether jobs are ended now."""

    schema_: Annotated[str, Field(alias="schema")]
    time: Time | None
    paused: Pause | None
    kill_switch: bool | None
    """null: it cannot be read, and nothing is ended."""
    held_back: list[HeldBack]
    halted: list[Block]


class Ticks(Shape):
    """The engine's rounds."""

    every: Seconds
    last_completed: Time | None
    age: float | None
    seconds: Seconds
    outcomes: dict[str, int]


class Nodes(Shape):
    """How many nodes are seen; null before the first tick."""

    expected: int | None
    lit: int | None


class PrometheusHealth(Shape):
    """Where every fact comes from."""

    urls: list[str]
    problem: str
    facts: list[str]
    """Why no job may be ended on the last facts."""


class AlertmanagerHealth(Shape):
    """Who is told of cases."""

    urls: list[str]
    problem: str


class AgentsHealth(Shape):
    """Who ends jobs."""

    url: str | None
    problems: list[str]
    open_decisions: int
    unproven_decisions: int


class DrillStep(Shape):
    """A step of a drill."""

    step: str
    ended: bool
    seconds: Seconds
    """How long it took, or has taken until now."""
    budget: Seconds
    slow: bool


class Drill(Shape):
    """A drill."""

    id: int
    node: str
    job_id: str
    """Of the victim; empty until it is seen."""
    run_id: str
    by: str
    """Who asked for it; empty where a victim just came."""
    reason: str
    begun_at: Time
    finished_at: Time | None
    result: str | None
    """passed, slow, failed, gone, silent, stuck; null while it goes on."""
    sentence: str
    longest: float | None
    """Seconds after which it is given up."""
    steps: list[DrillStep]


class DrillNode(Shape):
    """How drills stand on a node."""

    node: str
    last_success: Time | None
    due: Time | None
    """By when the next must have been proven; null without a schedule."""
    overdue: bool
    last: Drill | None


class Drills(Shape):
    """How drills stand."""

    schema_: Annotated[str, Field(alias="schema")]
    configured: bool
    problem: str
    """Why no drill can be ended now, or an empty string."""
    every: float | None
    nodes: list[DrillNode]


class DrillRequest(Shape):
    """Expects a victim on a node from now on."""

    node: str
    reason: str


class LedgerHealth(Shape):
    """What is certain."""

    bytes: int
    epoch: int
    open_cases: int


class RulesHealth(Shape):
    """What is in force."""

    hash: str
    count: int
    problem: str


class Health(Shape):
    """How the engine does."""

    schema_: Annotated[str, Field(alias="schema")]
    version: str
    time: Time
    problems: list[str]
    enforcement: Enforcement
    ticks: Ticks
    unknown: dict[str, int]
    """Reason -> UNKNOWN verdicts since the start."""
    nodes: Nodes
    jobs: int | None
    clock_skew: float | None
    prometheus: PrometheusHealth
    alertmanager: AlertmanagerHealth
    agents: AgentsHealth
    drills: Drills
    ledger: LedgerHealth
    rules: RulesHealth


class AuditEvent(Shape):
    """A line of the audit."""

    id: int
    time: Time
    kind: str
    rule: str
    job_id: str
    mode: str
    by: str
    reason: str
    detail: dict[str, Any]


class Audit(Shape):
    """The audit, newest first."""

    schema_: Annotated[str, Field(alias="schema")]
    events: list[AuditEvent]
    before: int | None
    """What to ask for to see older ones; null where there are none."""


class KeepRequest(Shape):
    """Puts the end of a job off."""

    job_id: str
    rule: str
    for_: Annotated[str, Field(alias="for", examples=["2h"])]
    reason: str
    ticket: str = ""
    """The word that stands in the owner's notice, in the place of a token."""
    by: str = ""
    """Who it is, with a token that several share."""


class Granted(Shape):
    """A keep that was granted."""

    job_id: str
    rule: str
    until: Time
    seconds: Seconds
    role: Literal["owner", "operator"]


class PauseRequest(Shape):
    """Pauses enforcement."""

    reason: str
    for_: Annotated[str, Field(alias="for", examples=["2h"])] = ""
    """After which it ends by itself; without it, until somebody resumes."""


class ResumeRequest(Shape):
    """Resumes enforcement."""

    reason: str
    rule: str = ""
    """The rule that has fallen back to warn; without it, the pause is ended."""


class ListedNode(Shape):
    """A node that is known by name."""

    address: str
    state: str
    lit: bool
    expected: bool
    registered_at: Time | None
    seen_at: Time | None
    left_at: Time | None
    exporter: str | None


class NodeList(Shape):
    """Which nodes there are, which should be, and which are lit."""

    schema_: Annotated[str, Field(alias="schema")]
    time: Time | None
    expected: int | None
    lit: int | None
    nodes: list[ListedNode]


class ForgetRequest(Shape):
    """Says that a node will not come back."""

    address: str
    reason: str = ""
    """For the audit."""


class Nothing(Shape):
    """Done."""


class Registered(Shape):
    """A node is known."""

    heartbeat_seconds: float
    """How often it is to be heard."""


class TargetGroup(Shape):
    """Targets for Prometheus."""

    targets: list[str]
    labels: dict[str, str]


class Delivered(Shape):
    """What became of Alertmanager's message."""

    delivered: int
    failed: list[str]
