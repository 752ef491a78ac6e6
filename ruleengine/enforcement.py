"""From due to verified: the decision on disk, whoever carries it out, and what became of it.

The order is what makes it safe: facts gathered for this decision, guards, the decision written, and
only then sent. The end of a bare process is one request to its node's agent: what a crash leaves
open is asked for there, and never sent again once it has expired. Everything else takes several
steps, see `reclaim.ladders`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import sqlite3
from typing import TYPE_CHECKING, Any, Protocol

import structlog

from gpuwarden.agent_api import ActionReport, ActionState, Outcome
from gpuwarden.errors import RefusedAction, ServiceUnavailable
from gpuwarden.ruleengine import cases, guards, returns
from gpuwarden.ruleengine.acts import ActState
from gpuwarden.ruleengine.cases import Event
from gpuwarden.ruleengine.guards import Blocked
from gpuwarden.ruleengine.model import Action
from gpuwarden.ruleengine.reclaim import outcomes
from gpuwarden.ruleengine.reclaim.drafts import Desk
from gpuwarden.ruleengine.reclaim.ladders import PROOF_SECONDS, Interrupted, Ladder, Tools
from gpuwarden.ruleengine.reclaim.node import SignedRequest
from gpuwarden.ruleengine.reclaim.questions import STALE_EPOCH, Questions, another_engine
from gpuwarden.ruleengine.reclaim.reaches import REACH_SECONDS, Reacher
from gpuwarden.ruleengine.records import Change
from gpuwarden.ruleengine.returns import Returns

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence

    from gpuwarden.clock import Clock
    from gpuwarden.ruleengine.cases import Case
    from gpuwarden.ruleengine.leave_records import Leave
    from gpuwarden.ruleengine.ledger import Ledger
    from gpuwarden.ruleengine.model import Rule, Stage
    from gpuwarden.ruleengine.reclaim.node import AgentClient, Signer
    from gpuwarden.ruleengine.reclaim.ports import Platform
    from gpuwarden.ruleengine.reclaim.reaches import Reach
    from gpuwarden.ruleengine.records import Decision, PlatformAct, StoredCase
    from gpuwarden.ruleengine.revocations import Revocations
    from gpuwarden.ruleengine.verdicts import JobFacts, Verdict

SEND_TRIES = 3
HAND_OVER_SECONDS = 2.0
"""For which a tick waits for an agent to take a decision on; after that it goes on without."""
POLL_SECONDS = 1.0
LAPSE_MARGIN_SECONDS = 5.0
"""After its expiry a request that the agent does not know of can no longer be in flight."""
STOPPABLE = frozenset({"watching", "asking", "waiting"})
"""Steps of a decision in which nothing has been done that cannot be undone."""
MAX_WHY = 500
"""Characters of a withdrawal's reason that are kept."""

_RESULTS = {
    Outcome.RECLAIMED: ActState.VERIFIED,
    Outcome.DONE: ActState.VERIFIED,
    Outcome.INCOMPLETE: ActState.INCOMPLETE,
    Outcome.REFUSED: ActState.REFUSED,
    Outcome.UNDELIVERABLE: ActState.REFUSED,
    Outcome.FAILED: ActState.FAILED,
}

log = structlog.get_logger(__name__)


class Leaves(Protocol):
    """What a scheduler has asked running jobs for."""

    def standing(self, job_id: str) -> Leave | None:
        """The leave that an attempt is asked for now, or None."""

    def overtake(self, job_id: str, why: str) -> None:
        """A rule is about to act on a job."""


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

    def by_rule(self) -> dict[str, set[str]]:
        """Id of each rule with open cases -> their jobs."""
        found: dict[str, set[str]] = {}
        for rule, job_id in self._open:
            found.setdefault(rule, set()).add(job_id)
        return found

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
        platforms: adapters of what owns jobs.
        revocations: what has come to speak against a decision since it was made, or None: nothing
            ever does.
        saved_at: Unix time of the newest saved state of a job, or None where that is not known.
        reach_seconds: for which everybody that an act on one job needs may take to answer; all
            jobs are asked about at once, and the tick waits for it.
        comeback: work that is started again within this after it was ended came back; seconds.
        poll: seconds between two questions to an agent or a platform.
        leaves: what a scheduler has asked jobs for, or None: there is no scheduler.

    Attributes:
        sending: decisions that are being handed over to their agents at this moment.
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
        platforms: Sequence[Platform] = (),
        revocations: Revocations | None = None,
        saved_at: Callable[[str], float | None] = lambda _job_id: None,
        comeback: float = 600.0,
        reach_seconds: float = REACH_SECONDS,
        poll: float = POLL_SECONDS,
        leaves: Leaves | None = None,
    ) -> None:
        self._ledger = ledger
        self._table = table
        self._agents = agents
        self._reacher = Reacher(agents, signer, platforms)
        self._returns = Returns(ledger, comeback)
        self._reach_seconds = reach_seconds
        self._clock = clock
        self._poll = poll
        self._leaves = leaves
        self._revocations = revocations
        self._questions: Questions | None = None
        self._desk: Desk | None = None
        self._tools: Tools | None = None
        if agents is not None and signer is not None:
            self._questions = Questions(ledger, agents, signer, clock=clock, epoch=epoch)
            self._desk = Desk(signer, self._questions, epoch)
            self._tools = Tools(
                ledger=ledger,
                questions=self._questions,
                platforms={platform.name: platform for platform in platforms},
                clock=clock,
                poll=poll,
                withheld=self._withheld,
                revoked=lambda d: "" if revocations is None else revocations.revoked(d),
                saved_at=saved_at,
                note=self._note,
            )
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.sending: set[str] = set()
        self.superseded = ""

    async def aclose(self) -> None:
        """Stop following; what is open stays so in the ledger, for the next life to take up."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def reach(
        self, job: JobFacts, do: str, case: StoredCase, *, offenders: Collection[str] = ()
    ) -> Reach | Blocked:
        """Everybody that an act on a job needs, or why it cannot be done now.

        Args:
            job: by the tick's facts.
            do: the stage's: checkpoint, yield, requeue or terminate.
            case: for which it is to be done.
            offenders: ids of all jobs to which the same stage of the same rule may be done now:
                what ends together must be among them.
        """
        found = await self._reacher.reach(job, do, offenders=offenders, seconds=self._reach_seconds)
        if isinstance(found, Blocked) or not Action(do).ends:
            return found
        now = self._clock.wall()
        back = self._returns.find(
            job,
            found.claim,
            rule_id=case.case.rule_id,
            user=case.case.user or job.user,
            now=now,
        )
        if back is None:
            return found
        if returns.told(self._ledger, case.id) != back:
            event = Event(returns.CAME_BACK, dataclasses.asdict(back))
            current = self._table.get(case.case.rule_id, case.case.job_id) or case
            self._table.save([Change(current.id, current.case, "enforce", (event,))], time=now)
        return back.blocked(now)

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
        """Write the decision down; it is sent and followed in the background.

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
        if self._desk is None:
            return Blocked("no_agents", "engine.yaml has no agents")
        now = self._clock.wall()
        leave = None if self._leaves is None else self._leaves.standing(job.job_id)
        if leave is not None and not stage.do.ends:
            # A trainer has one request at a time, and this one asks for as much or more.
            return Blocked("leaving", f"{leave.id}: {leave.by} has asked it to leave already")
        draft = self._desk.draft(
            stored,
            rule,
            key,
            do=stage.do,
            grace=cases.terms(stored.case, key, stage).grace,
            job=job,
            verdict=verdict,
            reach=reach,
            now=now,
        )
        decision = draft.decision
        case = cases.authorised(stored.case, rule, decision.id, key=key, wall=now)
        detail: dict[str, object] = {
            "decision": decision.id,
            "stage": key,
            "do": decision.action,
            "evidence": json.loads(decision.evidence),
            "work_lost": guards.work_lost(job, now),
            "cards": list(decision.gpus),
            "nodes": [node.host for node in reach.nodes],
        }
        if reach.claim is not None:
            detail["claim"] = {
                "platform": reach.claim.platform,
                "identity": dict(reach.claim.identity),
                "also": reach.claim.also,
            }
        change = Change(stored.id, case, rule.mode.value, (Event("authorised", detail),))
        try:
            self._ledger.authorise(
                decision,
                change,
                time=now,
                parts=draft.parts,
                act=draft.act,
                works=returns.works_of(job, reach.claim) if stage.do.ends else (),
            )
        except sqlite3.IntegrityError:
            return Blocked("already_ended", "this attempt already has a decision that stands")
        self._table.replace(stored, case)
        if leave is not None and self._leaves is not None:
            self._leaves.overtake(job.job_id, f"decision {decision.id} of the rule {rule.id}")
        log.warning(
            "authorised",
            decision=decision.id,
            do=decision.action,
            rule=rule.id,
            job=job.job_id,
            nodes=[node.host for node in reach.nodes],
        )
        if draft.act is None:
            # A node that does not answer holds up nobody else's decision, nor anybody's notice.
            sent = asyncio.Event()
            self.sending.add(decision.id)
            self._begin(decision, self._hand_over(decision, sent))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(sent.wait(), HAND_OVER_SECONDS)
        self.follow()
        return None

    def stoppable(self, decision_id: str | None) -> bool:
        """Whether a decision to end a job waits for its grace, and could still be taken back."""
        act = None if decision_id is None else self._ledger.platform_act(decision_id)
        return act is not None and bool(act.platform) and act.step in STOPPABLE

    async def withdraw(self, decision: Decision, why: str) -> None:
        """Take back a request to save or leave that has lost its reason; safe to repeat.

        What the trainer may have read is cancelled at the agents, in the background, for as long
        as the request would hold; a decision that ends a job is left alone.

        Args:
            decision: open in the ledger.
            why: for the audit and the owner.
        """
        act = self._ledger.platform_act(decision.id)
        if act is None or act.platform or act.step == "withdrawing":
            return
        task = self._tasks.pop(decision.id, None)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        # It may have come to its result, or a step further, until it stopped.
        act = self._ledger.platform_act(decision.id)
        current = self._ledger.decision(decision.id)
        if act is None or current is None or current.finished_at is not None:
            return
        act = dataclasses.replace(
            act, step="withdrawing", changed_at=self._clock.wall(), why=why[:MAX_WHY]
        )
        self._note(decision, act, "withdrawing", {"why": why})
        self.follow()

    def _withheld(self, decision: Decision) -> str:
        """Why nothing may be done for a decision that cannot be undone now, or an empty string."""
        return "" if self._revocations is None else self._revocations.withheld(decision)

    async def _hand_over(self, decision: Decision, sent: asyncio.Event) -> None:
        """Send a decision that one agent carries out, and follow it."""
        try:
            await self._send(decision)
        finally:
            self.sending.discard(decision.id)
            sent.set()
        current = self._ledger.decision(decision.id)
        if current is not None and current.finished_at is None:
            await self._follow(current)

    async def _send(self, decision: Decision) -> None:
        """The same bytes each time, and never after their expiry, nor against a later word."""
        signed, unclear = SignedRequest(decision.body, decision.signature), False
        for attempt in range(SEND_TRIES):
            if attempt:
                await asyncio.sleep(self._poll)
            why = self._withheld(decision)
            if why and not unclear:
                self._settle(decision, ActState.REFUSED, reason=f"withheld: {why}")
            if why or self._agents is None or self._clock.wall() >= decision.expires:
                return
            try:
                report = await self._agents.send(decision.host, signed)
            except RefusedAction as error:
                self._refused(decision, error, unclear=unclear)
                return
            except ServiceUnavailable as error:
                log.warning("agent did not take a decision", decision=decision.id, error=str(error))
                unclear = True
                continue
            self.superseded = ""
            self._take(decision, report)
            return

    def _refused(self, decision: Decision, error: RefusedAction, *, unclear: bool) -> None:
        """An agent's refusal, after tries of which nobody knows what became of them, or not."""
        reason = f"{error.reason}: {error}"
        if error.reason == STALE_EPOCH:
            self.superseded = another_engine(decision.host, error)
            log.warning("another engine", node=decision.host, error=str(error))
        if unclear:
            # An earlier try may have been taken on: only a report can tell.
            log.warning("agent refuses a repeat", decision=decision.id, error=reason)
        else:
            self._settle(decision, ActState.REFUSED, reason=reason)

    # -- following

    def follow(self) -> None:
        """See that every open decision is being followed; called in every tick."""
        for name, task in [item for item in self._tasks.items() if item[1].done()]:
            del self._tasks[name]
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("decision not followed; tried again", decision=name, error=repr(error))
        if self._questions is not None and self._questions.superseded:
            self.superseded = self._questions.superseded
        for decision in self._ledger.open_decisions():
            if decision.id not in self._tasks:
                act = self._ledger.platform_act(decision.id)
                follow = self._follow(decision) if act is None else self._climb(decision, act)
                self._begin(decision, follow)

    def _begin(self, decision: Decision, work: Coroutine[Any, Any, None]) -> None:
        self._tasks[decision.id] = asyncio.create_task(work, name=f"decision {decision.id}")

    async def _climb(self, decision: Decision, act: PlatformAct) -> None:
        """Go on with what takes several steps."""
        if self._tools is None:
            return
        try:
            result = await Ladder(self._tools, decision, act).climb()
        except Interrupted as error:
            log.warning("decision waits", decision=decision.id, why=str(error))
            return
        self._settle(decision, ActState(result.state), reason=result.reason, report=result.report)

    def _note(
        self, decision: Decision, act: PlatformAct, kind: str, detail: Mapping[str, object]
    ) -> None:
        """Write a step of a decision down, with a line in its case's audit."""
        current = self._ledger.decision(decision.id)
        if current is not None and current.state == "authorised" and act.step != "withdrawing":
            self._settle(decision, ActState.ACTING)
        stored = self._stored(decision)
        change = None
        if stored is not None:
            event = Event(kind, {"decision": decision.id, **detail})
            change = Change(stored.id, stored.case, "enforce", (event,))
        self._ledger.save_act(act, change, time=self._clock.wall())

    def _stored(self, decision: Decision) -> StoredCase | None:
        """The case that a decision was made for, while it is open."""
        stored = self._table.get(decision.rule_id, decision.job_id)
        return stored if stored is not None and stored.id == decision.case_id else None

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
                    self._settle(
                        decision, ActState.LAPSED, reason="lapsed: the agent never took it on"
                    )
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
                self._settle(decision, ActState.ACTING, report=text)
            return False
        reason = report.reason or report.message
        if report.decision_id != decision.id:
            reason = f"already ended by decision {report.decision_id}. {reason}".strip()
        state, lacks = _RESULTS[report.outcome], outcomes.lacking_proof(report)
        if state is ActState.VERIFIED and lacks:
            state, reason = ActState.INCOMPLETE, f"{lacks}. {reason}".strip()
        self._settle(decision, state, reason=reason, report=text)
        return True

    def _settle(
        self, decision: Decision, state: ActState, *, reason: str = "", report: str | None = None
    ) -> None:
        """Write a decision's new state and its case's."""
        stored = self._stored(decision)
        change, case = None, None
        if stored is not None:
            case = cases.settled(stored.case, decision.id, state)
            detail: dict[str, object] = {"decision": decision.id, "reason": reason}
            if report is not None:
                detail["report"] = json.loads(report)
            change = Change(stored.id, case, "enforce", (Event(state.value, detail),))
        written = self._ledger.settle(
            decision.id, state.value, change, time=self._clock.wall(), reason=reason, report=report
        )
        if not written:
            return
        if stored is not None and case is not None:
            self._table.replace(stored, case)
        log.warning("decision", decision=decision.id, state=state.value, reason=reason)
