"""What the agents of a decision's nodes are asked: signed, written down, sent, and followed.

A question may be put again as often as its answer is not known: an agent answers what it has taken
on with what became of it, and a question that never arrived is signed anew once it has expired.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING, Protocol

import structlog

from gpuwarden.agent_api import (
    Action,
    ActionReport,
    ActionRequest,
    ActionState,
    ProcessRef,
    question_id,
)
from gpuwarden.errors import RefusedAction, ServiceUnavailable
from gpuwarden.ruleengine.reclaim.node import LIFETIME_SECONDS, SignedRequest
from gpuwarden.ruleengine.records import Part

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpuwarden.clock import Clock
    from gpuwarden.ruleengine.reclaim.node import AgentClient, Signer
    from gpuwarden.ruleengine.reclaim.reaches import NodeReach
    from gpuwarden.ruleengine.verdicts import JobFacts

OPEN = frozenset({"pending", "accepted", "acting"})
"""States of a part whose outcome is not known."""
STALE_EPOCH = "stale_epoch"
"""An agent's word for: an engine that was started later has spoken to me."""
MAX_WATCH_SECONDS = 10_800.0
"""For how long an agent watches at most."""
_MAX_SEEN = 4096
MAX_CARDS = 256

log = structlog.get_logger(__name__)


class PartStore(Protocol):
    """Where questions are written down before they are sent."""

    def save_part(self, part: Part) -> None:
        """Write one question down as it now is."""


class Questions:
    """The agents' side of decisions that are carried out in several steps.

    Args:
        ledger: where every question is written before it is sent.
        agents: client of the nodes' agents.
        signer: the engine's key.
        clock: for expiries.
        epoch: of this life of the engine.

    Attributes:
        epoch: as given.
        superseded: what the agent that was asked last said of another engine, or an empty string.
    """

    def __init__(
        self, ledger: PartStore, agents: AgentClient, signer: Signer, *, clock: Clock, epoch: int
    ) -> None:
        self._ledger = ledger
        self._agents = agents
        self._signer = signer
        self._clock = clock
        self.epoch = epoch
        self.superseded = ""

    def part(
        self,
        decision_id: str,
        node: NodeReach,
        job: JobFacts,
        *,
        action: Action,
        grace: float,
        then: str = "hold",
        at: str = "step",
        reason: str = "",
    ) -> Part:
        """A question that is signed and not yet sent.

        Args:
            decision_id: the engine's decision.
            node: whose agent is asked.
            job: by the facts of the decision.
            action: what is asked.
            grace: seconds for which the agent watches, or until a request's `leave_by`.
            then: hold or requeue, for a request to leave.
            at: step or epoch, for a request to leave.
            reason: one line for the owner and the journal.
        """
        request = ActionRequest(
            decision_id=question_id(decision_id, action),
            epoch=self.epoch,
            node=node.info.node,
            boot_id=node.info.boot_id,
            job_id=job.job_id,
            run_id=run_of(job),
            action=action,
            grace=min(grace, MAX_WATCH_SECONDS) if action is Action.WATCH else grace,
            expires=self._clock.wall() + LIFETIME_SECONDS,
            then=then,
            at=at,
            reason=reason[:500],
            # Of all its nodes: an agent takes a process for one of these by its start as well.
            seen=seen(job),
            gpus=tuple(gpu.uuid for gpu in job.gpus)[:MAX_CARDS],
        )
        return self._signed(decision_id, node.host, request)

    def again(self, part: Part, *, number: int | None = None, action: Action | None = None) -> Part:
        """The same question, signed now.

        Args:
            part: as it was asked.
            number: of the try, where the agent is to take it for another question.
            action: what is asked instead, where that is `cancel`.
        """
        request = ActionRequest.decode(part.body)
        name = request.decision_id
        if action is not None:
            name = question_id(part.decision_id, action)
        if number is not None:
            name = question_id(part.decision_id, request.action, number)
        request = dataclasses.replace(
            request,
            decision_id=name,
            action=action or request.action,
            epoch=self.epoch,
            expires=self._clock.wall() + LIFETIME_SECONDS,
        )
        return self._signed(part.decision_id, part.host, request)

    def _signed(self, decision_id: str, host: str, request: ActionRequest) -> Part:
        signed = self._signer.sign(request)
        return Part(
            decision_id=decision_id,
            host=host,
            node=request.node,
            boot_id=request.boot_id,
            action=request.action.value,
            agent_id=request.decision_id,
            body=signed.body,
            signature=signed.signature,
            expires=request.expires,
        )

    async def put(self, parts: Iterable[Part], *, renew: bool = True) -> list[Part]:
        """Put questions to their agents, all at once; those that are answered are left alone.

        Args:
            parts: written down before.
            renew: whether one that has expired unanswered may be signed anew.

        Returns:
            The parts as they are written down now.
        """
        return list(await asyncio.gather(*(self._put(part, renew=renew) for part in parts)))

    async def _put(self, part: Part, *, renew: bool) -> Part:
        if part.state not in OPEN:
            return part
        try:
            if part.state == "pending" and self._clock.wall() < part.expires:
                return await self._sent(self._of_this_life(part))
            report = await self._agents.report(part.host, part.agent_id)
            if report is not None:
                return self._take(part, report)
            return await self._unknown(part, renew=renew)
        except RefusedAction as error:
            if error.reason == STALE_EPOCH:
                self.superseded = another_engine(part.host, error)
            return self._refused(part, f"{error.reason}: {error}")
        except ServiceUnavailable as error:
            log.warning("agent does not answer", part=part.agent_id, error=str(error))
            return part

    def _of_this_life(self, part: Part) -> Part:
        """The same question by this engine: agents obey none of an earlier life once it spoke."""
        if ActionRequest.decode(part.body).epoch >= self.epoch:
            return part
        part = self.again(part)
        self._ledger.save_part(part)
        return part

    async def _unknown(self, part: Part, *, renew: bool) -> Part:
        """What to do about a question of which its agent knows nothing."""
        if part.state != "pending":
            return self._refused(part, "forgotten: the agent does not know of it any more")
        if not renew:
            return part
        # It never arrived, and cannot any more.
        part = self.again(part)
        self._ledger.save_part(part)
        return await self._sent(part)

    async def _sent(self, part: Part) -> Part:
        signed = SignedRequest(part.body, part.signature)
        return self._take(part, await self._agents.send(part.host, signed))

    def _refused(self, part: Part, reason: str) -> Part:
        log.warning("agent refuses", part=part.agent_id, node=part.host, why=reason)
        part = dataclasses.replace(part, state="refused", reason=reason)
        self._ledger.save_part(part)
        return part

    def _take(self, part: Part, report: ActionReport) -> Part:
        """Write an agent's answer down, if it is one to this question."""
        request = ActionRequest.decode(part.body)
        if report.job_id != request.job_id or report.decision_id != part.agent_id:
            log.error("an agent answers another question", part=part.agent_id, job=report.job_id)
            return part
        self.superseded = ""
        state = report.state.value
        if report.state is ActionState.FINISHED and report.outcome is not None:
            state = report.outcome.value
        reason = ": ".join(text for text in (report.reason, report.message) if text)
        text = report.encode().decode()
        if (state, text) == (part.state, part.report):
            return part
        part = dataclasses.replace(part, state=state, reason=reason, report=text)
        self._ledger.save_part(part)
        return part


def seen(job: JobFacts) -> tuple[ProcessRef, ...]:
    """A job's processes as the engine knows them."""
    found = (ProcessRef(pid, start_time=start) for pid, start in job.processes)
    return tuple(found)[:_MAX_SEEN]


def run_of(job: JobFacts) -> str | None:
    """The run that a job's trainer names, or None where it has none or two claim it."""
    return None if job.run is None or job.run.conflict else job.run.run_id


def another_engine(host: str, error: RefusedAction) -> str:
    """What an agent's word of a later engine means, for people."""
    return (
        f"another engine has spoken to the agent of {host}, by its word ({error}): one engine runs "
        "per cluster; stop one of them"
    )
