"""Asking trainers: for a saved state where a stage says so, and no longer once its reason is gone.

Nobody loses anything by being asked, so that none of this waits for a notice or counts for a limit.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

import structlog

from gpuwarden.ruleengine import cases, guards
from gpuwarden.ruleengine.guards import Blocked
from gpuwarden.ruleengine.model import Action
from gpuwarden.ruleengine.records import Change
from gpuwarden.ruleengine.views import pair_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuwarden.clock import Clock
    from gpuwarden.ruleengine.cases import Case
    from gpuwarden.ruleengine.enforcement import CaseTable, Reclaimer
    from gpuwarden.ruleengine.guards import Situation
    from gpuwarden.ruleengine.judgements import Judgements
    from gpuwarden.ruleengine.ledger import Ledger
    from gpuwarden.ruleengine.model import Rule, Stage
    from gpuwarden.ruleengine.records import StoredCase
    from gpuwarden.ruleengine.trials import Trials
    from gpuwarden.ruleengine.verdicts import FleetFacts, JobFacts, Verdict

IMPOSSIBLE = frozenset({"no_platform", "no_run", "undeliverable", "not_requeueable"})
"""Reasons for which a softer stage will never be carried out on a job: the case goes on."""
MAX_ASKED_PER_TICK = 10
"""Trainers asked for a saved state in one tick; an agent that is slow must not hold up the rest."""

log = structlog.get_logger(__name__)


SOFT = frozenset({Action.CHECKPOINT.value, Action.YIELD.value})
"""What a decision asks of a trainer, and may take back."""


class _Wanted(NamedTuple):
    """A request for a saved state that nothing speaks against."""

    stored: StoredCase
    rule: Rule
    key: str
    stage: Stage
    job: JobFacts
    verdict: Verdict


class TrainerRequests:
    """The asking half of an engine.

    Args:
        table: the open cases.
        trials: rules in force, as they hold for each case.
        judgements: fresh verdicts.
        ledger: which requests stand.
        reclaimer: carries requests out.
        kept_until: Unix time to which keeps protect a case's job, or None.
        clock: wall time.
    """

    def __init__(
        self,
        table: CaseTable,
        trials: Trials,
        judgements: Judgements,
        *,
        ledger: Ledger,
        reclaimer: Reclaimer,
        kept_until: Callable[[Case], float | None],
        clock: Clock,
    ) -> None:
        self._cases = table
        self._trials = trials
        self._judgements = judgements
        self._ledger = ledger
        self._reclaimer = reclaimer
        self._kept_until = kept_until
        self._clock = clock

    async def ask(self, facts: FleetFacts, situation: Situation) -> None:
        """Ask for a saved state wherever a stage's time for it has come; what fails is tried again.

        Args:
            facts: of this tick.
            situation: of the fleet, on the same facts.
        """
        wanted: list[_Wanted] = []
        for stored in self._cases.all():
            rule = self._trials.rule_for(stored.case)
            job = facts.jobs.get(stored.case.job_id)
            if rule is None or job is None:
                continue
            for key, stage in cases.asking_stages(stored.case, rule):
                verdict, truth = self._judgements.verdict(rule, job, facts)
                blocks = guards.request_blocks(
                    situation,
                    stored.case,
                    rule,
                    key=key,
                    stage=stage,
                    job=job,
                    verdict=verdict,
                    truth=truth,
                    kept_until=self._kept_until(stored.case),
                )
                if not blocks:
                    wanted.append(_Wanted(stored, rule, key, stage, job, verdict))
        await asyncio.gather(*(self._ask(item) for item in wanted[:MAX_ASKED_PER_TICK]))

    async def withdraw(self) -> None:
        """Take back every request that has lost its reason, by the last state of its case.

        Asked in every tick, whatever is known of the fleet, so that no restart forgets one.
        """
        now = self._clock.wall()
        for decision in self._ledger.open_decisions():
            if decision.action not in SOFT:
                continue
            stored = self._cases.get(decision.rule_id, decision.job_id)
            case = stored.case if stored is not None and stored.id == decision.case_id else None
            until = None if case is None else self._kept_until(case)
            rule = None if case is None else self._trials.rule_for(case)
            why = cases.withdrawal(case, rule, kept=until is not None and until > now)
            if why:
                log.info("request withdrawn", decision=decision.id, job=decision.job_id, why=why)
                await self._reclaimer.withdraw(decision, why)

    async def _ask(self, wanted: _Wanted) -> None:
        stored, rule, key, stage, job, verdict = wanted
        reach = await self._reclaimer.reach(job, stage.do.value, stored)
        # Others may have been asked meanwhile.
        stored = self._cases.get(*pair_of(stored)) or stored
        refused = reach if isinstance(reach, Blocked) else None
        if not isinstance(reach, Blocked):
            refused = await self._reclaimer.act(
                stored, rule, key, stage, job=job, verdict=verdict, reach=reach
            )
        if refused is not None:
            log.info("not asked to save", rule=rule.id, job=job.job_id, why=refused.reason)
            self.skip_if_impossible(stored, key, stage, refused)

    def skip_if_impossible(
        self, stored: StoredCase, key: str, stage: Stage, block: Blocked
    ) -> None:
        """Go on without a softer stage that can never be carried out on this job.

        Args:
            stored: the case.
            key: name of the stage.
            stage: the stage; one that terminates is never skipped.
            block: why it was not carried out now.
        """
        rule = self._trials.rule_for(stored.case)
        if block.reason not in IMPOSSIBLE or rule is None or stage.do is Action.TERMINATE:
            return
        stored = self._cases.get(*pair_of(stored)) or stored
        now = self._clock.wall()
        case, event = cases.skipped(stored.case, key, stage.do, wall=now, why=block.sentence)
        self._cases.save([Change(stored.id, case, rule.mode.value, (event,))], time=now)
