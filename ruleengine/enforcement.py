"""From due to verified: the last look, the decision on disk, the agent, and its answer.

The order is what makes it safe: facts gathered for this decision, guards, the decision written, and
only then sent. Whatever is left open by a crash is asked for at the agent and never sent again once
it has expired.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sqlite3
from typing import TYPE_CHECKING

import structlog

from gpuwarden.agent_api import (
    Action,
    ActionReport,
    ActionRequest,
    ActionState,
    Outcome,
    ProcessRef,
)
from gpuwarden.errors import RefusedAction, ServiceUnavailable
from gpuwarden.ruleengine import cases, guards
from gpuwarden.ruleengine.acts import ActState
from gpuwarden.ruleengine.cases import CaseState, Event
from gpuwarden.ruleengine.guards import Blocked
from gpuwarden.ruleengine.reclaim.node import LIFETIME_SECONDS, SignedRequest
from gpuwarden.ruleengine.reclaim.reaches import Reacher
from gpuwarden.ruleengine.records import Change, Decision

if TYPE_CHECKING:
    from gpuwarden.agent_api import NodeInfo
    from gpuwarden.clock import Clock
    from gpuwarden.ruleengine.cases import Case
    from gpuwarden.ruleengine.ledger import Ledger
    from gpuwarden.ruleengine.model import Rule, Stage
    from gpuwarden.ruleengine.reclaim.node import AgentClient, Signer
    from gpuwarden.ruleengine.reclaim.reaches import Reach
    from gpuwarden.ruleengine.records import StoredCase
    from gpuwarden.ruleengine.verdicts import Evidence, JobFacts, Verdict

SEND_TRIES = 3
POLL_SECONDS = 1.0
PROOF_SECONDS = 120.0
"""How long after the grace an agent is asked without a pause; afterwards once in every tick."""
LAPSE_MARGIN_SECONDS = 5.0
"""After its expiry a request that the agent does not know of can no longer be in flight."""
STALE_EPOCH = "stale_epoch"
"""An agent's word for: an engine that was started later has spoken to me."""
_MAX_SEEN = 4096
_MAX_CARDS = 256

_RESULTS = {
    Outcome.RECLAIMED: CaseState.VERIFIED,
    Outcome.DONE: CaseState.VERIFIED,
    Outcome.INCOMPLETE: CaseState.INCOMPLETE,
    Outcome.REFUSED: CaseState.REFUSED,
    Outcome.UNDELIVERABLE: CaseState.REFUSED,
    Outcome.FAILED: CaseState.FAILED,
}

log = structlog.get_logger(__name__)


class CaseTable:
    """The open cases, as the ledger has them.

    Every change goes to the ledger first.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._open = {(s.case.rule_id, s.case.job_id): s for s in ledger.open_cases()}

    def __len__(self) -> int:
        return len(self._open)

    def all(self) -> list[StoredCase]:
        """Every open case."""
        return list(self._open.values())

    def get(self, rule_id: str, job_id: str) -> StoredCase | None:
        """The open case of a rule and a job, or None."""
        return self._open.get((rule_id, job_id))

    def jobs_of(self, rule_id: str) -> set[str]:
        """Jobs with which a rule has an open case."""
        return {job_id for rule, job_id in self._open if rule == rule_id}

    def save(self, changes: list[Change], *, time: float) -> None:
        """Write changes, then take them over."""
        kept = self._ledger.save(changes, time=time)
        for change in changes:
            self._open.pop((change.case.rule_id, change.case.job_id), None)
        for stored in kept:
            self._open[stored.case.rule_id, stored.case.job_id] = stored

    def replace(self, stored: StoredCase, case: Case) -> None:
        """Take over what was written together with something else."""
        self._open[case.rule_id, case.job_id] = type(stored)(stored.id, case)


class Reclaimer:
    """Authorises, sends and follows decisions.

    Args:
        ledger: where every step is written first.
        table: the open cases.
        agents: client of the nodes' agents, or None: nothing can be ended.
        signer: the engine's key, or None.
        clock: for expiries and the record.
        epoch: of this life of the engine.
        poll: seconds between two questions to an agent.

    Attributes:
        superseded: what the agent that was asked last said of another engine, or an empty string;
            told, and no more: one agent's word must not keep the engine from all other nodes.
    """

    def __init__(
        self,
        ledger: Ledger,
        table: CaseTable,
        *,
        agents: AgentClient | None,
        signer: Signer | None,
        clock: Clock,
        epoch: int,
        poll: float = POLL_SECONDS,
    ) -> None:
        self._ledger = ledger
        self._table = table
        self._agents = agents
        self._signer = signer
        self._reacher = Reacher(agents, signer)
        self._clock = clock
        self._epoch = epoch
        self._poll = poll
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.superseded = ""

    async def aclose(self) -> None:
        """Stop following; what is open stays so in the ledger, for the next life to take up."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def reach(self, job: JobFacts, do: str) -> Reach | Blocked:
        """Everybody that an act on a job needs, or why it cannot be done now.

        Args:
            job: by the tick's facts.
            do: the stage's: terminate.
        """
        return await self._reacher.reach(job, do)

    async def act(
        self,
        stored: StoredCase,
        rule: Rule,
        key: str,
        stage: Stage,
        *,
        job: JobFacts,
        verdict: Verdict,
        reach: Reach,
    ) -> Blocked | None:
        """Write the decision down, send it, and follow it in the background.

        Every guard has been asked, on these facts, right before.

        Args:
            stored: the case.
            rule: as it now reads.
            key: the stage's, within its rule.
            stage: what is done.
            job: by facts that were gathered for this decision.
            verdict: on the same facts.
            reach: who acts; found before those facts.

        Returns:
            Why nothing was decided, or None.
        """
        if self._signer is None:
            return Blocked("no_agents", "engine.yaml has no agents")
        now = self._clock.wall()
        node = reach.nodes[0]
        decision = self._decision(
            self._signer,
            stored,
            rule=rule,
            grace=cases.terms(stored.case, key, stage).grace,
            job=job,
            verdict=verdict,
            host=node.host,
            info=node.info,
            now=now,
        )
        case = cases.authorised(stored.case, rule, decision.id, key=key, wall=now)
        event = Event(
            "authorised",
            {
                "decision": decision.id,
                "stage": key,
                "evidence": json.loads(decision.evidence),
                "work_lost": guards.work_lost(job, now),
                "cards": list(decision.gpus),
            },
        )
        change = Change(stored.id, case, rule.mode.value, (event,))
        try:
            self._ledger.authorise(decision, change, time=now)
        except sqlite3.IntegrityError:
            return Blocked("already_ended", "this attempt already has a decision that stands")
        self._table.replace(stored, case)
        log.warning(
            "authorised", decision=decision.id, rule=rule.id, job=job.job_id, node=node.host
        )
        await self._send(decision)
        self.follow()
        return None

    def _decision(
        self,
        signer: Signer,
        stored: StoredCase,
        *,
        rule: Rule,
        grace: float,
        job: JobFacts,
        verdict: Verdict,
        host: str,
        info: NodeInfo,
        now: float,
    ) -> Decision:
        gpus = tuple(gpu.uuid for gpu in job.gpus)[:_MAX_CARDS]
        request = ActionRequest(
            decision_id=f"{self._epoch}-{stored.id}-{secrets.token_hex(8)}",
            epoch=self._epoch,
            node=info.node,
            boot_id=info.boot_id,
            job_id=job.job_id,
            run_id=None if job.run is None or job.run.conflict else job.run.run_id,
            action=Action.TERMINATE,
            grace=grace,
            expires=now + LIFETIME_SECONDS,
            then="hold",
            reason=f"rule {rule.id}: {rule.description or 'see the notice'}"[:500],
            seen=tuple(ProcessRef(pid, start_time=start) for pid, start in job.processes)[
                :_MAX_SEEN
            ],
            gpus=gpus,
        )
        signed = signer.sign(request)
        return Decision(
            id=request.decision_id,
            epoch=self._epoch,
            case_id=stored.id,
            rule_id=rule.id,
            job_id=job.job_id,
            # As the limits were asked: labels may be missing for a scrape.
            user=stored.case.user or job.user,
            action=Action.TERMINATE.value,
            state="authorised",
            host=host,
            body=signed.body,
            signature=signed.signature,
            gpus=gpus,
            evidence=json.dumps([evidence_record(item) for item in verdict.whole_evidence]),
            grace=grace,
            expires=request.expires,
            created_at=now,
        )

    async def _send(self, decision: Decision) -> None:
        """Hand a decision over: the same bytes each time, and never after their expiry."""
        if self._agents is None:
            return
        signed, unclear = SignedRequest(decision.body, decision.signature), False
        for attempt in range(SEND_TRIES):
            if attempt:
                await asyncio.sleep(self._poll)
            if self._clock.wall() >= decision.expires:
                return
            try:
                report = await self._agents.send(decision.host, signed)
            except RefusedAction as error:
                reason = f"{error.reason}: {error}"
                if error.reason == STALE_EPOCH:
                    self.superseded = (
                        f"another engine has spoken to the agent of {decision.host}, by its word "
                        f"({error}): one engine runs per cluster; stop one of them"
                    )
                    log.warning("another engine", node=decision.host, error=str(error))
                if unclear:
                    # An earlier try may have been taken on: only a report can tell.
                    log.warning("agent refuses a repeat", decision=decision.id, error=reason)
                else:
                    self._settle(decision, CaseState.REFUSED, reason=reason)
                return
            except ServiceUnavailable as error:
                log.warning("agent did not take a decision", decision=decision.id, error=str(error))
                unclear = True
                continue
            self.superseded = ""
            self._take(decision, report)
            return

    # -- following

    def follow(self) -> None:
        """See that every open decision is being followed; called in every tick."""
        for name, task in [item for item in self._tasks.items() if item[1].done()]:
            del self._tasks[name]
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("decision not followed; tried again", decision=name, error=repr(error))
        for decision in self._ledger.open_decisions():
            if decision.id not in self._tasks:
                self._tasks[decision.id] = asyncio.create_task(
                    self._follow(decision), name=f"decision {decision.id}"
                )

    async def _follow(self, decision: Decision) -> None:
        if self._agents is None:
            return
        tries = int((decision.grace + PROOF_SECONDS) / max(self._poll, 0.01)) + 1
        for _ in range(tries):
            try:
                report = await self._agents.report(decision.host, decision.id)
            except ServiceUnavailable as error:
                log.warning("agent does not report", decision=decision.id, error=str(error))
                return  # the next tick asks again
            if report is None:
                # Not known there: not arrived, or forgotten. Either way it is not sent again.
                if self._clock.wall() > decision.expires + LAPSE_MARGIN_SECONDS:
                    self._settle(decision, None, reason="lapsed: the agent never took it on")
                    return
            elif self._take(decision, report):
                return
            await asyncio.sleep(self._poll)

    def _take(self, decision: Decision, report: ActionReport) -> bool:
        """Write an agent's report down; whether it is final."""
        if report.job_id != decision.job_id:
            log.error("an agent reports on another job", decision=decision.id, job=report.job_id)
            return False
        text = report.encode().decode()
        if report.state is not ActionState.FINISHED or report.outcome is None:
            current = self._ledger.decision(decision.id)
            if current is not None and current.state == "authorised":
                self._settle(decision, CaseState.ACTING, report=text)
            return False
        reason = report.reason or report.message
        if report.decision_id != decision.id:
            reason = f"already ended by decision {report.decision_id}. {reason}".strip()
        self._settle(decision, _RESULTS[report.outcome], reason=reason, report=text)
        return True

    def _settle(
        self,
        decision: Decision,
        state: CaseState | None,
        *,
        reason: str = "",
        report: str | None = None,
    ) -> None:
        """Write a decision's new state and its case's; None is a lapse."""
        word = "lapsed" if state is None else state.value
        stored = self._table.get(decision.rule_id, decision.job_id)
        change, case = None, None
        if stored is not None and stored.id == decision.case_id:
            case = cases.settled(stored.case, decision.id, ActState(word))
            detail: dict[str, object] = {"decision": decision.id, "reason": reason}
            if report is not None:
                detail["report"] = json.loads(report)
            change = Change(stored.id, case, "enforce", (Event(word, detail),))
        written = self._ledger.settle(
            decision.id, word, change, time=self._clock.wall(), reason=reason, report=report
        )
        if not written:
            return
        if stored is not None and case is not None:
            self._table.replace(stored, case)
        log.warning("decision", decision=decision.id, state=word, reason=reason)


def evidence_record(item: Evidence) -> dict[str, object]:
    """A condition and what was found, as it is kept and shown."""
    return {
        "condition": item.condition,
        "truth": item.truth.name,
        "measured": item.measured,
        "reason": item.reason,
        "values": dict(item.values),
        "expected": item.expected,
        "estimated": item.estimated,
    }
