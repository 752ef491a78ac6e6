"""The shape of the fleet as people watch it: a job in a row, with what it should do beside it.

As in `api_models`, it describes and does not build.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gpuwarden.ruleengine.api_models import Band, Block, LitNodes, Next, Seconds, Shape, Time


class WatchedVerdict(Shape):
    """What the rules say of a job: of all open cases, that which has come furthest."""

    state: str
    """State of that case; without one `protected`, `unknown` or `ok`."""
    rule: str
    """Whose case it is, or an empty string."""
    mode: str
    level: str
    """The highest level entered."""
    next: Next | None
    """What happens next."""
    end: Next | None
    """When its cards may be taken at the earliest."""
    kept_until: Time | None
    held: list[Block]
    """Why it was due and not ended at the last tick."""
    protected: str
    """Why rules do not apply, or an empty string."""
    unknown: list[str]
    """Rules that could not be judged."""
    others: int
    """Further open cases."""


class WatchedJob(Shape):
    """A running job, what it does, and what it should do."""

    job_id: str
    user: str
    """Empty where it is not known."""
    team: str
    node: str
    nodes: int
    """On how many it runs."""
    framework: str
    interactive: bool
    gpus: list[str]
    """Index of each card that it holds."""
    hardware: str
    """Product name of its cards; empty where it is not known, or they differ."""
    fresh: bool
    not_fresh_reason: str
    started_at: Time | None
    run_id: str | None
    model: str
    batch: int | None
    imgsz: int | None
    phase: str | None
    epoch: float | None
    """From 0, as the trainer counts."""
    epochs: float | None
    time_left: Annotated[float | None, Field(description="Seconds, by the pace of its epochs.")]
    utilization: float | None
    """0 to 1, mean of its cards."""
    utilization_expected: Band | None
    memory_bytes: float | None
    """Of its fullest card."""
    memory_total_bytes: float | None
    """Of its smallest card."""
    memory_expected: Band | None
    throughput: float | None
    """Images per second over the last minutes, while training."""
    throughput_expected: Band | None
    expected_text: str
    """What the expectation rests on, or why there is none."""
    verdict: WatchedVerdict


class Fleet(Shape):
    """Running jobs as people watch them."""

    schema_: Annotated[str, Field(alias="schema")]
    time: Time | None
    """Of the last completed tick."""
    age: Seconds | None
    """Of that tick."""
    tick: Seconds
    """How often there is one."""
    figures_at: Time | None
    """When utilisation, memory and epochs were asked for."""
    problem: str
    """Why a figure is missing, or an empty string."""
    nodes: LitNodes | None
    cards: int
    """How many are seen or remembered."""
    held: int
    """How many of them a job holds."""
    halted: list[Block]
    """Why no job at all is ended now."""
    sort: Literal["verdict", "user", "team", "node", "gpus", "utilization", "memory", "time-left"]
    total: int
    """How many fit the filter."""
    broken: int
    """For how many of them a case is open."""
    offset: int
    jobs: list[WatchedJob]
