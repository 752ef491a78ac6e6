"""Every edge, of every program."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from bench.fuzz import (
    agent_edges,
    answer_edges,
    engine_edges,
    file_edges,
    ledger_edges,
    node_edges,
    platform_edges,
    reader_edges,
    scheduler_edges,
    trainer_edges,
)

if TYPE_CHECKING:
    from bench.fuzz.edges import Attack

TARGETS: Final[tuple[Attack, ...]] = (
    *node_edges.ATTACKS,
    *platform_edges.ATTACKS,
    *agent_edges.ATTACKS,
    *answer_edges.ATTACKS,
    *engine_edges.ATTACKS,
    *file_edges.ATTACKS,
    *ledger_edges.ATTACKS,
    *reader_edges.ATTACKS,
    *scheduler_edges.ATTACKS,
    *trainer_edges.ATTACKS,
)
