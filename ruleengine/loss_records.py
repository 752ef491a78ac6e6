"""What ends cost, in the ledger: foretold with each decision, counted from the node afterwards."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import structlog

from gpuwarden.errors import GpuwardenError
from gpuwarden.ruleengine.losses import Loss, Risk, at_risk, counted
from gpuwarden.ruleengine.prices import Money

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gpuwarden.clock import Clock
    from gpuwarden.ruleengine.ledger import Ledger
    from gpuwarden.ruleengine.losses import Reading
    from gpuwarden.ruleengine.prices import Prices
    from gpuwarden.ruleengine.prometheus import Source
    from gpuwarden.ruleengine.verdicts import JobFacts

COUNTED_AFTER = 720.0
"""Seconds after an end: the node clears a run's files away after 600, and then counts."""
GIVEN_UP_AFTER = 86400.0
"""Seconds after an end when Prometheus is not asked any more."""
AT_ONCE = 2
"""Ends that are looked at in one tick."""
TIMEOUT_SECONDS = 2.0
"""For those together: no tick waits for figures."""
_NO_RUN = "no trainer said what it had saved"
_CROWD = "several jobs of this user ended on the same node at that time"

log = structlog.get_logger(__name__)


class LossRecords:
    """Keeps what ends cost.

    Args:
        ledger: with the table `losses`.
        clock: wall time.
        prices: of engine.yaml, or None.
    """

    def __init__(self, ledger: Ledger, clock: Clock, prices: Prices | None) -> None:
        self._ledger = ledger
        self._clock = clock
        self._prices = prices

    def risk(self, job: JobFacts) -> Risk | None:
        """What an end of a job would cost now."""
        return at_risk(job, self._clock.wall(), self._prices)

    def decided(self, job: JobFacts) -> None:
        """Write down what the newest decision on a job is thought to cost."""
        now = self._clock.wall()
        risk = at_risk(job, now, self._prices)
        known = job.run is not None and not job.run.conflict
        hourly = None if risk is None else risk.hourly
        with self._ledger.transaction() as db:
            db.execute(
                "INSERT OR IGNORE INTO losses (decision_id, instances, seconds, cards, saved, "
                "hourly, currency, why_not) SELECT id, ?, ?, ?, ?, ?, ?, ? FROM decisions "
                "WHERE job_id=? AND action != 'checkpoint' ORDER BY created_at DESC LIMIT 1",
                (
                    json.dumps(job.instances or (job.instance,)),
                    None if risk is None else risk.seconds,
                    len(job.gpus),
                    int(risk is not None and risk.saved),
                    None if hourly is None else hourly.amount,
                    "" if hourly is None else hourly.currency,
                    "" if known else _NO_RUN,
                    job.job_id,
                ),
            )

    def of(self, decision_id: str) -> Loss | None:
        """What a decision cost, or None where nothing was written down with it."""
        rows = self._ledger.rows(
            "SELECT seconds, cards, saved, hourly, currency, gpu_seconds, counted_at, why_not "
            "FROM losses WHERE decision_id=?",
            (decision_id,),
        )
        if not rows:
            return None
        seconds, cards, saved, hourly, currency, gpu_seconds, at, why_not = rows[0]
        money = None if hourly is None else Money(hourly, currency)
        risk = None if seconds is None else Risk(seconds, cards, bool(saved), money)
        return Loss(risk, gpu_seconds, at, why_not)

    async def count(self, source: Callable[[], Source]) -> None:
        """Ask what ends of a while ago have cost; called in every tick, and seldom has to ask.

        Args:
            source: gives Prometheus; nothing else rests on the answer.
        """
        now = self._clock.wall()
        self._nothing_ended()
        due = self._ledger.rows(
            "SELECT l.decision_id, l.instances, d.user, d.created_at, d.finished_at "
            "FROM losses l JOIN decisions d ON d.id = l.decision_id "
            "WHERE l.counted_at IS NULL AND l.why_not = '' AND d.finished_at < ? "
            "ORDER BY d.finished_at LIMIT ?",
            (now - COUNTED_AFTER, AT_ONCE),
        )
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                for decision, instances, user, begun, finished in due:
                    await self._count(
                        source(), decision, json.loads(instances), user=user, span=(begun, finished)
                    )
        except (GpuwardenError, TimeoutError) as error:
            log.info("what an end cost is asked for again", error=str(error) or "no answer in time")
            for decision, _, _, _, finished in due:
                if now - finished > GIVEN_UP_AFTER:
                    self._write(decision, None, "Prometheus did not say within a day")

    def _nothing_ended(self) -> None:
        """Decisions that ended nothing cost nothing, and are not asked for."""
        query = (
            "SELECT l.decision_id FROM losses l JOIN decisions d ON d.id = l.decision_id "
            "WHERE l.counted_at IS NULL AND l.why_not = '' AND d.finished_at IS NOT NULL "
            "AND d.state NOT IN ('verified', 'incomplete', 'failed')"
        )
        for (decision,) in self._ledger.rows(query):
            self._write(decision, None, "nothing was ended")

    async def _count(
        self,
        source: Source,
        decision: str,
        instances: Sequence[str],
        *,
        user: str,
        span: tuple[float, float],
    ) -> None:
        if self._crowded(decision, user, set(instances), span):
            self._write(decision, None, _CROWD)
            return
        begun, finished = span
        before = [await _reading(source, node, user, begun) for node in instances]
        after = [await _reading(source, node, user, finished + COUNTED_AFTER) for node in instances]
        self._write(decision, *counted(before, after))

    def _crowded(
        self, decision: str, user: str, instances: set[str], span: tuple[float, float]
    ) -> bool:
        """Whether what a node counts could be another decision's."""
        begun, finished = span
        found = self._ledger.rows(
            "SELECT l.instances FROM losses l JOIN decisions d ON d.id = l.decision_id "
            "WHERE d.id != ? AND d.user = ? AND d.finished_at > ? AND d.finished_at < ? "
            "AND d.state NOT IN ('refused', 'lapsed')",
            (decision, user, begun - COUNTED_AFTER, finished + COUNTED_AFTER),
        )
        return any(not instances.isdisjoint(json.loads(nodes)) for (nodes,) in found)

    def _write(self, decision: str, gpu_seconds: float | None, why_not: str) -> None:
        now = self._clock.wall()
        with self._ledger.transaction() as db:
            db.execute(
                "UPDATE losses SET gpu_seconds=?, counted_at=?, why_not=? WHERE decision_id=?",
                (gpu_seconds, now, why_not, decision),
            )
            if gpu_seconds is not None:
                detail = {"decision": decision, "gpu_seconds": round(gpu_seconds, 3)}
                db.execute(
                    "INSERT INTO events (time, case_id, rule_id, job_id, kind, mode, detail) "
                    "SELECT ?, case_id, rule_id, job_id, 'lost', '', ? FROM decisions WHERE id=?",
                    (now, json.dumps(detail, sort_keys=True), decision),
                )


async def _reading(source: Source, node: str, user: str, time: float) -> Reading | None:
    chosen = f"instance={json.dumps(node)}"
    up = await source.instant(f"gpuwarden_nvml_up{{{chosen}}}", time)
    rows = await source.instant(
        f"gpuwarden_lost_gpu_seconds_total{{{chosen},user={json.dumps(user, ensure_ascii=False)}}}",
        time,
    )
    lost: dict[str, float] = {}
    for row in rows:
        reason = row.labels.get("reason", "")
        lost[reason] = lost.get(reason, 0.0) + row.value
    return lost if up else None
