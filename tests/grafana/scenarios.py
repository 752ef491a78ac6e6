"""The generated day, and an hour for each thing that a board must not be wrong about."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.grafana.engines import Engine
from tests.grafana.fleets import GIB, MIG_CARDS, MIG_JOBS, SHARED_JOBS, Nodes
from tests.grafana.histories import DAY, History, Window, brief
from tests.grafana.schedulers import Scheduler


@dataclass(frozen=True)
class Scenario:
    """A fleet and its engine in a window of their own.

    Attributes:
        window: when.
        nodes, engine, scheduler: what there is.
    """

    window: Window
    nodes: Nodes = field(default_factory=Nodes)
    engine: Engine = field(default_factory=Engine)
    scheduler: Scheduler = field(default_factory=Scheduler)

    def history(self) -> History:
        """Everything that a Prometheus would hold of it, but for recorded series."""
        history = History(self.window)
        self.nodes.write(history)
        self.engine.write(history)
        self.scheduler.write(history)
        return history


ALL_NODES = frozenset({"n1:9835", "n2:9835"})
HEALTHY = Scenario(DAY)
NOBODY = Scenario(brief("nobody there", 0), Nodes(jobs=()), Engine(jobs=()), Scheduler(idle=True))
DEAD = Scenario(brief("all exporters dead", 1), Nodes(dying=ALL_NODES))
ONE_DEAD = Scenario(brief("one exporter dead", 2), Nodes(dying=frozenset({"n1:9835"})))
ENGINE_DEAD = Scenario(brief("engine dead", 3), engine=Engine(dies=True))
SCHEDULER_DEAD = Scenario(brief("scheduler dead", 7), scheduler=Scheduler(dies=True))
MIG = Scenario(brief("MIG", 4), Nodes(MIG_CARDS, MIG_JOBS), Engine(MIG_CARDS, MIG_JOBS))
SHARED = Scenario(brief("shared cards", 5), Nodes(jobs=SHARED_JOBS), Engine(jobs=SHARED_JOBS))
UNATTRIBUTED = Scenario(
    brief("unattributed memory", 6), Nodes(jobs=(), unattributed=5 * GIB), Engine(jobs=())
)
SCENARIOS = (
    HEALTHY,
    NOBODY,
    DEAD,
    ONE_DEAD,
    ENGINE_DEAD,
    MIG,
    SHARED,
    UNATTRIBUTED,
    SCHEDULER_DEAD,
)
