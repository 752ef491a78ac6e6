"""What the last completed tick saw; for pages, metrics and notices."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpuwarden.ruleengine.guards import Blocked
    from gpuwarden.ruleengine.verdicts import FleetFacts, Verdict

Pair = tuple[str, str]
"""(rule, job)."""


@dataclass(slots=True)
class View:
    """One tick's sight of the fleet.

    Attributes:
        facts: None before the first completed tick.
        verdicts: of every pair that was judged.
        blocks: why due cases were not ended.
        halted: reasons for which no job at all may be ended.
        halted_since: since when too many owners were due at once, or None.
    """

    facts: FleetFacts | None = None
    verdicts: dict[Pair, Verdict] = field(default_factory=dict)
    blocks: dict[Pair, tuple[Blocked, ...]] = field(default_factory=dict)
    halted: tuple[Blocked, ...] = ()
    halted_since: float | None = None
