"""Cards that a reclaim, running or unproven, may still hold: no second victim is taken there.

A process that has ended and that NVML goes on listing belongs to no job any more, so that the facts
show a card without it. Its memory shows: it stays in use, and is no process's that there is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from gpuwarden.agent_api import ApiError
from gpuwarden.ruleengine.model import Action

if TYPE_CHECKING:
    from gpuwarden.clock import Clock
    from gpuwarden.ruleengine.ledger import Ledger
    from gpuwarden.ruleengine.prometheus import Source
    from gpuwarden.ruleengine.records import Decision
    from gpuwarden.ruleengine.verdicts import FleetFacts

# Not gated: a card whose node is not current is held whatever this says.
LEFT = "max by (uuid) (gpu_memory_unattributed_bytes)"
LEAST_BYTES = 64 * 1024 * 1024
"""Less than this is no sign of what was left behind."""
FREE_SECONDS = 30.0
"""Once it has been back for so long, later memory without an owner is none of that reclaim's."""
BELIEVED_SECONDS = 7 * 86400.0
"""For so long memory without an owner is taken for that of an unproven reclaim on the card."""

log = structlog.get_logger(__name__)


class UnprovenCards:
    """What open and unproven decisions may still hold.

    Args:
        ledger: has the decisions.
        clock: the engine's.
    """

    def __init__(self, ledger: Ledger, clock: Clock) -> None:
        self._ledger = ledger
        self._clock = clock
        self._left: dict[str, float] = {}
        self._free_since: dict[tuple[str, str], float] = {}

    async def look(self, source: Source, time: float) -> None:
        """Ask how much memory is nobody's; only while a reclaim is not proven.

        Raises:
            ServiceUnavailable: it is not known; what was known before counts no more.
        """
        self._left = {}
        if self._ledger.incomplete_decisions():
            rows = await source.instant(LEFT, time)
            self._left = {row.labels.get("uuid", ""): row.value for row in rows}

    def held(self, facts: FleetFacts) -> set[str]:
        """UUIDs of the cards, by facts of the same moment."""
        taking = (d for d in self._ledger.open_decisions() if d.action != Action.CHECKPOINT)
        found = {gpu for decision in taking for gpu in decision.gpus}
        for decision in self._ledger.incomplete_decisions():
            job = facts.jobs.get(decision.job_id)
            still = set() if job is None else {gpu.uuid for gpu in job.gpus}
            for gpu in decision.gpus:
                card = facts.cards.get(gpu)
                if gpu in still or card is None or not card.fresh or self._remains(decision, gpu):
                    found.add(gpu)
        return found

    def _remains(self, decision: Decision, gpu: str) -> bool:
        """Whether memory that was to come back is still in use; where it is not measured: no."""
        left, now, key = self._left.get(gpu), self._clock.wall(), (decision.id, gpu)
        since = self._free_since.get(key)
        released = since is not None and now - since >= FREE_SECONDS
        if left is None or released or now - _ended(decision) > BELIEVED_SECONDS:
            return False
        if left >= _expected(decision):
            self._free_since.pop(key, None)
            return True
        # The two answers may be of two scrapes, and what the other one shows is not yet in this.
        self._free_since.setdefault(key, now)
        return True


def _ended(decision: Decision) -> float:
    return decision.finished_at or decision.created_at


def _expected(decision: Decision) -> float:
    """Bytes on a card from which on they may be what did not come back."""
    try:
        report = decision.decoded_report
    except ApiError as error:  # written by another version
        log.warning("a report cannot be read", decision=decision.id, error=str(error))
        return LEAST_BYTES
    if report is None:
        return LEAST_BYTES
    held = sum(process.gpu_memory or 0 for process in report.processes)
    freed = 0 if report.proof is None else report.proof.memory_freed
    # Half: some of it may have come back since, and not all cards need have held the same.
    return max(LEAST_BYTES, (held - freed) / max(1, len(decision.gpus)) / 2)
