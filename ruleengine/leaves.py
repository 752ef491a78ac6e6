"""Leave requests of a scheduler: judged, written down, signed, sent, and followed to the proof.

A scheduler decides who goes first and cannot command a node: only the engine signs. Here a request
is taken on or refused with its reason; what it asks is then what a stage with `do: yield` asks, by
the same ladder. Nobody is ended: whoever stays beyond the deadline stays, and is told of.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
import sqlite3
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import structlog

from gpuwarden.agent_api import Action, ActionReport, Outcome
from gpuwarden.errors import GpuwardenError
from gpuwarden.refusals import Refusal
from gpuwarden.ruleengine import leave_guards, leave_receipts
from gpuwarden.ruleengine.guards import DAY_SECONDS, Blocked
from gpuwarden.ruleengine.leave_records import LATE_SECONDS, Leave, LeaveState, LeaveStore
from gpuwarden.ruleengine.ledger_handles import LedgerUnusable
from gpuwarden.ruleengine.reclaim import outcomes
from gpuwarden.ruleengine.reclaim.ladders import Interrupted, Ladder, Tools
from gpuwarden.ruleengine.reclaim.node import LIFETIME_SECONDS
from gpuwarden.ruleengine.reclaim.questions import Questions, run_of
from gpuwarden.ruleengine.reclaim.reaches import Reacher
from gpuwarden.ruleengine.records import PlatformAct

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

    from gpuwarden.clock import Clock
    from gpuwarden.ruleengine.guards import Situation
    from gpuwarden.ruleengine.leave_records import LeaveOrder
    from gpuwarden.ruleengine.leave_settings import LeaveSettings
    from gpuwarden.ruleengine.ledger import Ledger
    from gpuwarden.ruleengine.prometheus import Source
    from gpuwarden.ruleengine.reclaim.node import AgentClient, Signer
    from gpuwarden.ruleengine.reclaim.reaches import Reach
    from gpuwarden.ruleengine.records import Decision, Part
    from gpuwarden.ruleengine.rulebooks import RuleBook
    from gpuwarden.ruleengine.verdicts import FleetFacts, JobFacts

FRESH_SCRAPES = 1.0
"""Facts younger than so many scrapes serve several requests."""
RECEIPT_TIMEOUT_SECONDS = 3.0
"""For all questions about trainers' receipts of one tick."""
AFTER_SECONDS = 60.0
"""After its result a leave's receipts are still looked for: the last scrape may come later."""
MAX_WHY = 500
_STATUS = {
    "unknown_job": 404,
    "agent_unreachable": 503,
    **dict.fromkeys(leave_guards.LIMITS - {"deadline"}, 429),
}

log = structlog.get_logger(__name__)


class Sight(NamedTuple):
    """How the desk sees the fleet.

    Attributes:
        now: facts of the last tick or None, and why this engine is none any more, or "".
        gather: facts of now.
        situation: of the fleet, on facts.
        withheld: why nothing may be asked or ended now, or an empty string.
    """

    now: Callable[[], tuple[FleetFacts | None, str]]
    gather: Callable[[], Awaitable[FleetFacts]]
    situation: Callable[[FleetFacts], Situation]
    withheld: Callable[[], str]


class LeaveDesk:
    """The leaves of one engine.

    Args:
        settings: their limits, or None: no scheduler may ask for any.
        ledger: where each is written before it is sent.
        rulebook: rules, with what protects jobs.
        sight: of the fleet.
        agents: client of the nodes' agents, or None.
        signer: the engine's key, or None.
        clock: wall and monotonic time.
        epoch: of this life of the engine.
        poll: seconds between two questions to an agent.
    """

    def __init__(
        self,
        settings: LeaveSettings | None,
        ledger: Ledger,
        rulebook: RuleBook,
        *,
        sight: Sight,
        agents: AgentClient | None,
        signer: Signer | None,
        clock: Clock,
        epoch: int,
        poll: float,
    ) -> None:
        self.settings = settings
        self.store = LeaveStore(ledger)
        self._ledger = ledger
        self._rulebook = rulebook
        self._sight = sight
        self._clock = clock
        self._epoch = epoch
        self._reacher = Reacher(agents, signer, ())
        self._tools: Tools | None = None
        if agents is not None and signer is not None:
            self._tools = Tools(
                ledger=self.store,
                questions=Questions(self.store, agents, signer, clock=clock, epoch=epoch),
                platforms={},
                clock=clock,
                poll=poll,
                # It saves and goes by itself, or stays: nobody is ended here.
                withheld=lambda _decision: sight.withheld(),
                revoked=lambda _decision: "",
                saved_at=lambda _job_id: None,
                note=self._note,
            )
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._asking = asyncio.Lock()
        self._facts: FleetFacts | None = None
        self.refusals: Counter[str] = Counter(dict.fromkeys(leave_guards.REFUSALS, 0))
        """Reason -> how often this life of the engine took nothing on for it."""

    async def aclose(self) -> None:
        """Stop following; what is open stays so in the ledger, for the next life to take up."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- taking on

    async def ask(self, order: LeaveOrder, *, by: str) -> Leave:
        """Take a leave request on, or answer one that was taken on before.

        Args:
            order: what is asked for.
            by: who asks; keys are theirs.

        Raises:
            Refusal: the first reason is its word, the text has all of them.
        """
        try:
            return await self._ask(order, by=by)
        except Refusal as refusal:
            self.refusals[refusal.error] += 1
            raise

    async def _ask(self, order: LeaveOrder, *, by: str) -> Leave:
        known = self._known(order, by)
        if known is not None:
            return known
        settings, tools = self.settings, self._tools
        if settings is None:
            raise Refusal(403, "closed", "closed until engine.yaml says `leaves`")
        if tools is None:
            raise Refusal(409, "no_agents", "engine.yaml has no agents: nobody can be asked")
        # One after the other: each is counted before the next is judged.
        async with self._asking:
            known = self._known(order, by)
            if known is not None:
                return known
            facts = await self._fresh()
            self._judged(order, facts, settings)
            reach = await self._reached(order, facts)
            # The agents had to be waited for; everything is read again, with nothing to wait for
            # until the leave is on disk.
            self._rulebook.refresh()
            job = self._judged(order, facts, settings)
            leave, parts = self._drafted(order, job, reach, tools, by=by)
            try:
                self.store.add(leave, parts, time=leave.created_at)
            except sqlite3.IntegrityError as error:
                raise Refusal(
                    409, "already_asked", "this attempt was asked to leave before"
                ) from error
        log.warning("leave asked", leave=leave.id, job=leave.job_id, by=by, cause=leave.cause)
        self._take_up(leave)
        return leave

    def _known(self, order: LeaveOrder, by: str) -> Leave | None:
        found = self.store.by_key(by, order.key)
        if found is not None and not found.asks_the_same(order):
            raise Refusal(
                409, "key_reused", f"the key {order.key} is that of {found.id}, which asks other"
            )
        return found

    async def _fresh(self) -> FleetFacts:
        """Facts that a leave may be decided on."""
        limit, now = FRESH_SCRAPES, self._clock.wall()
        for facts in (self._sight.now()[0], self._facts):
            if facts is not None and 0 <= now - facts.time <= limit * facts.scrape_interval:
                return facts
        try:
            self._facts = await self._sight.gather()
        except GpuwardenError as error:
            raise Refusal(503, "no_facts", f"too little is known now: {error}") from error
        return self._facts

    def _judged(self, order: LeaveOrder, facts: FleetFacts, settings: LeaveSettings) -> JobFacts:
        """The job that is meant, if nothing speaks against asking it.

        Raises:
            Refusal: something does.
        """
        superseded = self._sight.now()[1]
        if superseded:
            raise Refusal(503, "another_engine", superseded)
        job = leave_guards.meant(order, facts)
        found = [job] if isinstance(job, Blocked) else []
        if not isinstance(job, Blocked):
            found = leave_guards.blocks(
                self._sight.situation(facts),
                order,
                job,
                settings=settings,
                standing=self._standing(job, facts),
                whitelist=self._rulebook.rules.whitelist,
            )
            if not found:
                return job
        raise _refusal(found)

    def _standing(self, job: JobFacts, facts: FleetFacts) -> leave_guards.Standing:
        now, run = self._clock.wall(), run_of(job)
        open_ids = {leave.id: leave for leave in self.store.open()}
        recent = {leave.id: leave for leave in self.store.since(now - DAY_SECONDS)}
        rows = self._ledger.rows(
            "SELECT max(until) FROM keeps WHERE job_id=? OR (run_id IS NOT NULL AND run_id=?)",
            (job.job_id, run),
        )
        return leave_guards.Standing(
            leaves=tuple({**open_ids, **recent}.values()),
            earlier=self.store.of_job(job.job_id),
            decisions=self._ledger.job_decisions(job.job_id),
            kept_until=rows[0][0],
            running=sum(1 for each in facts.jobs.values() if each.fresh),
        )

    async def _reached(self, order: LeaveOrder, facts: FleetFacts) -> Reach:
        job = leave_guards.meant(order, facts)
        reach = job if isinstance(job, Blocked) else await self._reacher.reach(job, "yield")
        if isinstance(reach, Blocked):
            raise _refusal([reach])
        return reach

    def _drafted(
        self, order: LeaveOrder, job: JobFacts, reach: Reach, tools: Tools, *, by: str
    ) -> tuple[Leave, list[Part]]:
        now, name = self._clock.wall(), f"leave-{secrets.token_hex(8)}"
        reason = f"{order.cause}: {order.reason}"
        parts = []
        for node in reach.nodes:
            parts += [
                tools.questions.part(
                    name,
                    node,
                    job,
                    action=Action.WATCH,
                    grace=order.deadline + LATE_SECONDS,
                    reason=reason,
                ),
                tools.questions.part(
                    name,
                    node,
                    job,
                    action=Action.REQUEST_LEAVE,
                    grace=order.deadline,
                    then=order.then,
                    at=order.at,
                    reason=reason,
                ),
            ]
        leave = Leave(
            id=name,
            key=order.key,
            by=by,
            job_id=job.job_id,
            run_id=run_of(job) or "",
            user=job.user,
            at=order.at,
            after=order.then,
            deadline=order.deadline,
            cause=order.cause,
            reason=order.reason,
            successor=order.successor,
            hosts=tuple(node.host for node in reach.nodes),
            epoch=self._epoch,
            expires=now + LIFETIME_SECONDS,
            created_at=now,
            state=LeaveState.ASKED,
            why="",
            finished_at=None,
            act=PlatformAct(name, "", "{}", "watching", now),
            receipts={},
            changed_at=now,
        )
        return leave, parts

    # -- taking back

    async def withdraw(self, leave: Leave, why: str) -> None:
        """Take a request back; safe to repeat, and nothing where it has its result."""
        await self._stop(leave.id)
        current = self.store.get(leave.id)
        if current is None or current.finished_at is not None:
            return
        if current.act.step != "withdrawing":
            act = dataclasses.replace(
                current.act, step="withdrawing", changed_at=self._clock.wall(), why=why[:MAX_WHY]
            )
            self.store.note(current, act, "withdrawing", time=self._clock.wall())
            current = dataclasses.replace(current, act=act)
        self._take_up(current)

    async def _stop(self, leave_id: str) -> None:
        task = self._tasks.pop(leave_id, None)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def standing(self, job_id: str) -> Leave | None:
        """The leave that an attempt is asked for now, or None."""
        return next((leave for leave in self.store.open() if leave.job_id == job_id), None)

    def overtake(self, job_id: str, why: str) -> None:
        """A rule is about to act on a job: its own request takes the place of a scheduler's."""
        leave = self.standing(job_id)
        if leave is None:
            return
        task = self._tasks.pop(leave.id, None)
        if task is not None:
            task.cancel()
        self._settle(leave.id, LeaveState.OVERTAKEN, why)

    # -- following

    async def follow(self, sources: Iterable[Source]) -> None:
        """See that every open leave is followed, and look for receipts; called in every tick.

        Args:
            sources: a server of each shard of Prometheus.
        """
        why = self._sight.withheld()
        for name, task in [item for item in self._tasks.items() if item[1].done()]:
            del self._tasks[name]
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("leave not followed; tried again", leave=name, error=repr(error))
        for leave in self.store.open():
            if why and leave.act.step != "withdrawing":
                await self.withdraw(leave, why)
            elif leave.id not in self._tasks:
                self._take_up(leave)
        await self._look_for_receipts(list(sources))

    def _take_up(self, leave: Leave) -> None:
        known = self._tasks.get(leave.id)
        # Two who take it back at the same time have it taken back once.
        if self._tools is not None and (known is None or known.done()):
            self._tasks[leave.id] = asyncio.create_task(
                self._climb(leave, self._tools), name=f"leave {leave.id}"
            )

    async def _climb(self, leave: Leave, tools: Tools) -> None:
        try:
            result = await Ladder(tools, leave.decision, leave.act).climb()
        except Interrupted as error:
            log.warning("leave waits", leave=leave.id, why=str(error))
            return
        state = LeaveState("left" if result.state == "verified" else result.state)
        self._settle(leave.id, state, result.reason)

    def _settle(self, leave_id: str, state: LeaveState, why: str) -> None:
        """Write a result down, with every step that was seen until now."""
        leave = self.store.get(leave_id)
        if leave is None:
            return
        steps = self.steps(leave)
        if state is LeaveState.UNHEEDED and "left" in steps:
            state, why = LeaveState.LEFT, "its processes ended; NVML does not prove its memory free"
        elif state is LeaveState.UNHEEDED and not self._seen(leave.job_id):
            why = "its node does not tell: nobody knows whether it is still there"
        if self.store.settle(leave, state, why, steps=steps, time=self._clock.wall()):
            log.warning("leave", leave=leave.id, job=leave.job_id, state=state.value, why=why)

    def _seen(self, job_id: str) -> bool:
        """Whether the last facts show that a job is there now."""
        facts = self._sight.now()[0]
        job = None if facts is None else facts.jobs.get(job_id)
        return job is not None and job.fresh

    def _note(
        self, decision: Decision, act: PlatformAct, kind: str, _detail: Mapping[str, object]
    ) -> None:
        leave = self.store.get(decision.id)
        if leave is not None:
            self.store.note(leave, act, kind, time=self._clock.wall())

    # -- receipts

    def steps(self, leave: Leave) -> dict[str, float]:
        """Every step that was seen -> when (Unix time); what was not seen is not there."""
        if leave.finished_at is not None:
            return dict(leave.receipts)
        parts = self.store.parts(leave.id)
        report = outcomes.merged(leave.decision, leave.act, parts, outcome=Outcome.DONE)
        found = leave_receipts.agents_steps(ActionReport.decode(report.encode()))
        return {**found, **leave.receipts}

    async def _look_for_receipts(self, sources: Sequence[Source]) -> None:
        now = self._clock.wall()
        wanted = self.store.lately_open(now - AFTER_SECONDS)
        if not wanted or not sources:
            return
        try:
            async with asyncio.timeout(RECEIPT_TIMEOUT_SECONDS):
                jobs = [leave.job_id for leave in wanted]
                told = await leave_receipts.told_by_trainers(sources, jobs, now)
        except (GpuwardenError, TimeoutError) as error:
            log.warning("receipts of trainers are not known", error=str(error))
            return
        for leave in wanted:
            found = leave_receipts.trainers_steps(leave, self.steps(leave), told, now)
            if found != dict(leave.receipts):
                with contextlib.suppress(LedgerUnusable):
                    self.store.save_receipts(leave, found, time=now)


def _refusal(found: Sequence[Blocked]) -> Refusal:
    """The answer to a request against which something speaks: its first word, and all of it."""
    text = "; ".join(block.sentence for block in found)
    return Refusal(_STATUS.get(found[0].reason, 409), found[0].reason, text)
