"""`drill` in engine.yaml: which jobs are drills, where they are expected, how fast they must be.

A rehearsal is a real end of a real process: nothing that lets it happen has a default.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, StrictInt, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from gpuwarden.fields import Identifier, Seconds, Strict, as_tuple

_Budget = Annotated[Seconds, Field(gt=0)]
_Host = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9.:_\[\]-]{1,253}$")]


class StepBudgets(Strict):
    """How long each step may take before it counts as slow.

    The defaults fit the rule of deploy/examples/drill.yaml.
    """

    seen: _Budget = 60.0
    """From the victim's start, or from `gpuwarden drill run`, to the first tick that sees it."""
    detected: _Budget = 240.0
    """Until the rule counts as broken."""
    notified: _Budget = 120.0
    """Until every required recipient's notice is proven."""
    due: _Budget = 240.0
    """Until both deadlines are over."""
    authorised: _Budget = 60.0
    """Until the decision is on disk."""
    acting: _Budget = 30.0
    """Until the agent has taken it on."""
    proven: _Budget = 120.0
    """Until NVML no longer lists the victim."""


class DrillSettings(Strict):
    """Drills: jobs of one user that a rule of their own ends for practice."""

    rule: Identifier
    """The rule that ends them; its `match` must name the user, and runs that begin with drill-."""
    user: Annotated[str, StringConstraints(pattern=r"^[a-z_][a-z0-9_-]{0,31}$")]
    """Who runs them on the nodes, and nothing else."""
    per_hour: Annotated[StrictInt, Field(ge=0)]
    """Drills that may be ended in any 60 minutes; they count for no other limit. 0 is none."""
    per_day: Annotated[StrictInt, Field(ge=0)]
    """Likewise in any 24 hours."""
    nodes: Annotated[tuple[_Host, ...], BeforeValidator(as_tuple)] = ()
    """Hosts on which they are expected on a schedule, as in the targets of Prometheus; a
    port does not matter."""
    every: Annotated[Seconds, Field(gt=0)] | None = None
    """How often one must succeed on each of these nodes; mandatory with `nodes`."""
    budgets: StepBudgets = Field(default_factory=StepBudgets)
    """How long each step may take."""

    @model_validator(mode="after")
    def _scheduled(self) -> DrillSettings:
        if bool(self.nodes) != (self.every is not None):
            raise PydanticCustomError(
                "GW111", "nodes and every are given together or not at all", {}
            )
        return self
