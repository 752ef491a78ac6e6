"""The loop: gather, judge, advance, write, tell, act. One tick after the other, never two at once.

Everything down means that nothing changes: a tick that cannot know enough is discarded whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sqlite3
from functools import partial
from typing import TYPE_CHECKING

import structlog

from gpuwarden.errors import GpuwardenError, ServiceUnavailable
from gpuwarden.ruleengine import cases, guards, health, inventories, papers
from gpuwarden.ruleengine.budget_desks import BudgetDesk
from gpuwarden.ruleengine.cases import CaseState
from gpuwarden.ruleengine.companies import Company, spared
from gpuwarden.ruleengine.demand_sources import with_demands
from gpuwarden.ruleengine.drill_desks import DrillDesk
from gpuwarden.ruleengine.enforcement import CaseTable, Reclaimer
from gpuwarden.ruleengine.facts import gather
from gpuwarden.ruleengine.guards import Blocked, PastEnd, Situation
from gpuwarden.ruleengine.held_sets import HeldSets
from gpuwarden.ruleengine.holds import Holds
from gpuwarden.ruleengine.judgements import Judgements
from gpuwarden.ruleengine.leaves import LeaveDesk, Sight
from gpuwarden.ruleengine.ledger_handles import LedgerTaken
from gpuwarden.ruleengine.ledger_upkeep import Upkeep
from gpuwarden.ruleengine.loss_records import LossRecords
from gpuwarden.ruleengine.model import Mode
from gpuwarden.ruleengine.pauses import Pauses, switched_on
from gpuwarden.ruleengine.reclaim.reaches import REACH_SECONDS
from gpuwarden.ruleengine.records import Change, Keep
from gpuwarden.ruleengine.replicas import Replica, Servers
from gpuwarden.ruleengine.revocations import Revocations
from gpuwarden.ruleengine.telling import Teller
from gpuwarden.ruleengine.ticks import BUDGET_SHARE, OUTAGE_TICKS, Breaker, TickCounts
from gpuwarden.ruleengine.trainer_requests import TrainerRequests
from gpuwarden.ruleengine.trials import Trials
from gpuwarden.ruleengine.unproven_cards import UnprovenCards
from gpuwarden.ruleengine.usages import Usage
from gpuwarden.ruleengine.verdicts import FleetFacts, Truth
from gpuwarden.ruleengine.views import View, pair_of, waiting_order

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from gpuwarden.clock import Clock
    from gpuwarden.ruleengine.alertmanager import AlertmanagerClient
    from gpuwarden.ruleengine.cases import Case
    from gpuwarden.ruleengine.demand_sources import DemandSource
    from gpuwarden.ruleengine.ledger import Ledger
    from gpuwarden.ruleengine.model import Rule, Stage
    from gpuwarden.ruleengine.nodes import Nodes
    from gpuwarden.ruleengine.prometheus import Source
    from gpuwarden.ruleengine.reclaim.node import AgentClient, Signer
    from gpuwarden.ruleengine.reclaim.ports import Platform
    from gpuwarden.ruleengine.reclaim.reaches import Reach
    from gpuwarden.ruleengine.records import StoredCase
    from gpuwarden.ruleengine.rulebooks import RuleBook
    from gpuwarden.ruleengine.settings import EngineSettings
    from gpuwarden.ruleengine.verdicts import JobFacts

_NO_RULE = Blocked("rule_gone", "no rule that is in force takes the job's cards")

log = structlog.get_logger(__name__)


class Engine:
    """The rule engine of one cluster.

    Args:
        settings: of engine.yaml.
        kill_switch: file that stops every end while it exists.
        rulebook: rules and directory in force.
        ledger: what is certain.
        source: Prometheus, or all the servers.
        alertmanager: every replica.
        agents: client of the nodes' agents, or None.
        signer: the engine's key, or None.
        clock: wall and monotonic time.
        ticket_key: secret that owners' tickets are made with, or None.
        nodes: those that register, or None: none can.
        demands: who tells who waits, by the key of `only_if_waiting`.
        platforms: what owns jobs and can be told to end them.
        poll: seconds between two questions to an agent or a platform.
    """

    def __init__(
        self,
        settings: EngineSettings,
        kill_switch: Path,
        *,
        rulebook: RuleBook,
        ledger: Ledger,
        source: Source | Servers,
        alertmanager: AlertmanagerClient,
        agents: AgentClient | None,
        signer: Signer | None,
        clock: Clock,
        ticket_key: bytes | None = None,
        nodes: Nodes | None = None,
        demands: Mapping[str, DemandSource] | None = None,
        platforms: Sequence[Platform] = (),
        poll: float = 1.0,
    ) -> None:
        self.settings = settings
        self.rulebook = rulebook
        self.ledger = ledger
        self.nodes = nodes
        self.clock = clock
        self.started_at = clock.wall()
        self.ticks = TickCounts()
        self.breaker = Breaker(settings.tick)
        self.view = View()
        self.superseded = ""
        self.epoch = ledger.next_epoch(clock.wall())
        self.cases = CaseTable(ledger)
        self.trials = Trials(ledger, rulebook, clock)
        self.pauses = Pauses(ledger, clock)
        self._revocations = Revocations(self)
        self.leaves = LeaveDesk(
            settings.leaves,
            ledger,
            rulebook,
            sight=Sight(
                lambda: (self.view.facts, self.superseded),
                *(self._gather, self._situation, self._revocations.standing),
            ),
            agents=agents,
            signer=signer,
            clock=clock,
            epoch=self.epoch,
            poll=poll,
        )
        self.reclaimer = Reclaimer(
            ledger,
            self.cases,
            agents=agents,
            signer=signer,
            clock=clock,
            epoch=self.epoch,
            platforms=platforms,
            revocations=self._revocations,
            reach_seconds=max(settings.tick, REACH_SECONDS),
            saved_at=self._saved_at,
            comeback=settings.comeback,
            poll=poll,
            leaves=self.leaves,
        )
        self.kill_switch = kill_switch
        self._demands = dict(demands or {})
        self._held_sets = HeldSets(ledger)
        self.servers = (
            source
            if isinstance(source, Servers)
            else Servers(
                [[Replica("prometheus", source)]],
                wall=clock.wall,
                scrape_interval=settings.scrape_interval,
            )
        )
        self.usage = Usage(OUTAGE_TICKS * settings.tick)
        self.budgets = BudgetDesk(rulebook, ledger, clock)
        self.drills = DrillDesk(
            settings.drill, ledger, rulebook, clock=clock, keep=settings.retention.audit
        )
        self.teller = Teller(
            settings,
            rulebook,
            ledger,
            self.cases,
            trials=self.trials,
            alertmanager=alertmanager,
            clock=clock,
            ticket_key=ticket_key,
        )
        self.losses = LossRecords(ledger, clock, settings.prices)
        self._holds = Holds(ledger)
        self._unproven = UnprovenCards(ledger, clock)
        self._judgements = Judgements(
            settings,
            rulebook,
            ledger=ledger,
            table=self.cases,
            ticks=self.ticks,
            clock=clock,
            trials=self.trials,
        )
        self.rounds = self._judgements.rounds
        self._requests = TrainerRequests(
            self.cases,
            self.trials,
            self._judgements,
            ledger=ledger,
            reclaimer=self.reclaimer,
            kept_until=self.kept_until,
            clock=clock,
        )
        self._upkeep = Upkeep(ledger, settings.retention.audit, clock)
        self._wake = asyncio.Event()
        self._stopped = False

    async def run(self) -> None:
        """Tick until stopped or cancelled."""
        try:
            while not self._stopped:
                begun = self.clock.monotonic()
                await self._tick_or_end()
                self.ticks.last_seconds = spent = self.clock.monotonic() - begun
                # Late ticks are skipped, never made up for.
                await self._pause(max(0.0, self.settings.tick - spent))
        finally:
            await asyncio.gather(self.reclaimer.aclose(), self.leaves.aclose())

    async def _tick_or_end(self) -> None:
        try:
            await self.tick()
        except sqlite3.ProgrammingError:
            raise  # our own mistake, not the file's
        except sqlite3.DatabaseError as error:
            raise self.ledger.unreadable(error) from error

    def stop(self) -> None:
        """End `run` after the tick in progress, whatever becomes of a cancellation meanwhile."""
        self._stopped = True
        self._wake.set()

    def wake(self) -> None:
        """Begin the next tick now; for SIGHUP."""
        self._wake.set()

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), seconds)
        self._wake.clear()

    async def tick(self) -> None:
        """One round; no error of a server or a rule ends the loop."""
        self.rulebook.refresh(tick=True)
        if self._superseded():
            return
        with contextlib.suppress(LedgerTaken):  # nothing more is written; the next tick says so
            await self._round()

    async def _round(self) -> None:
        self.reclaimer.follow()
        await self._requests.withdraw()
        begun = self.clock.monotonic()
        try:
            facts = await self._asked(begun)
        except GpuwardenError as error:
            self._discard(error)
        else:
            self.trials.refresh(facts)
            view = self._judgements.judge(facts)
            view.halted_since = self.view.halted_since
            self.view = view
            self.usage.count(facts, self)
            self._budget(self.clock.monotonic() - begun)
            await self._enforce(facts)
            self.drills.watch(facts)
            for pair in self._upkeep.run(facts):
                self._judgements.forget(pair)
            self.ticks.count("completed")
            self.ticks.last_error = ""
            self.ticks.last_completed = self.clock.wall()
        await self.budgets.refresh(self.servers.each())
        await self.teller.tell(self.view, self.budgets.warnings())
        await self.losses.count(self.servers.current)
        await self.leaves.follow(self.servers.each())

    def _discard(self, error: GpuwardenError) -> None:
        """Nothing changes in this tick, and everybody who asks is told why nothing is ended."""
        self.ticks.count("discarded")
        self.ticks.last_error = str(error)
        log.warning("tick discarded; nothing changes", error=str(error))
        why = Blocked("no_facts", f"too little is known now: {error}")
        self.view.blocks = {pair_of(stored): (why,) for stored in self._due()}
        self._held()
        standing = guards.standing_blocks(
            killed=switched_on(self.kill_switch),
            paused=self.pauses.sentence,
            bad_files=self.rulebook.problem,
        )
        # That too much was due at once stands until a look at the fleet says otherwise.
        shares = [block for block in self.view.halted if block in self.view.shares]
        self.view.halted = (why, *standing, *shares)

    async def _asked(self, now: float) -> FleetFacts:
        """Facts for a tick, unless Prometheus has failed so often that it is spared for a while."""
        wait = self.breaker.wait(now)
        if wait > 0:
            raise ServiceUnavailable(
                f"{self.ticks.last_failure} (asked again in {wait:.0f} s, after "
                f"{self.breaker.failures} failures in a row)"
            )
        try:
            facts = await self._gather()
        except GpuwardenError as error:
            self.breaker.failed(self.clock.monotonic())
            self.ticks.last_failure = str(error)
            raise
        self.breaker.succeeded()
        return facts

    def _budget(self, spent: float) -> None:
        """A tick that took too long until now ends nothing: the next one is near."""
        allowed = BUDGET_SHARE * self.settings.tick
        self.ticks.late = ""
        if spent > allowed:
            self.ticks.late = (
                f"the tick took {spent:.1f} s until now; {allowed:.1f} s are allowed of every "
                f"{self.settings.tick:.0f} s"
            )
            self.ticks.count("overrun")
            log.warning("tick overrun; it ends nothing", seconds=round(spent, 1), allowed=allowed)

    def _superseded(self) -> bool:
        """Whether the ledger is not this engine's own any more; it then does nothing at all."""
        before, self.superseded = self.superseded, self.ledger.taken(self.epoch)
        if not self.superseded:
            return False
        if self.superseded != before:
            log.error("another engine; nothing is done", why=self.superseded)
        self.ticks.count("discarded")
        self.view.halted = (Blocked("another_engine", self.superseded),)
        return True

    async def _gather(self, *, again: bool = False) -> FleetFacts:
        """Facts of now; `again` from the replica that this tick's came from."""
        return await self.servers.ask(self._gathered, again=again)

    async def _gathered(self, source: Source) -> FleetFacts:
        book = self.rulebook
        await self._unproven.look(source, self.clock.wall())
        facts = gather(
            source,
            book.rules,
            time=self.clock.wall(),
            scrape_interval=self.settings.scrape_interval,
            expected_nodes=self._expectation(),
            teams={name: user.team for name, user in book.directory.users.items()},
            rounds=self.rounds,
            held=self._held_sets,
        )
        return await with_demands(facts, book.rules, self._demands)

    def _expectation(self) -> inventories.Expectation:
        settings = self.settings.nodes
        if settings is None:
            return inventories.Expectation(number=self.settings.expected_nodes)
        names = set(settings.names)
        if self.nodes is not None:
            names.update(node.address for node in self.nodes.present())
        return inventories.Expectation(names=frozenset(names), query=settings.promql)

    # -- acting

    async def _enforce(self, facts: FleetFacts) -> None:
        """Ask the guards for every due case, longest wait first, and act where none objects."""
        situation = self._situation(facts)
        self._halted(situation)
        await self._requests.ask(facts, situation)
        free: list[tuple[StoredCase, JobFacts, str, Stage]] = []
        for stored in sorted(self._due(), key=waiting_order):
            rule, job = self.trials.rule_for(stored.case), facts.jobs.get(stored.case.job_id)
            blocks = [_NO_RULE] if rule is None else self.objections(stored, rule, facts)
            following = None if rule is None else cases.next_stage(stored.case, rule)
            if blocks or job is None or following is None:
                self._blocked(stored, blocks)
            else:
                free.append((stored, job, *following))
        company, reach_of = Company((s, key) for s, _, key, _ in free), self.reclaimer.reach
        reached = await asyncio.gather(
            *(
                reach_of(job, stage.do.value, stored, offenders=company.jobs(stored, key))
                for stored, job, key, stage in free
            )
        )
        ended: list[str] = []
        for (stored, job, key, stage), reach in zip(free, reached, strict=True):
            blocks = [reach] if isinstance(reach, Blocked) else []
            case = stored.case
            situation = self._situation(facts, ended=ended, rule_id=case.rule_id)
            blocks += guards.limit_blocks(situation, case.user, case.rule_id, job_id=job.job_id)
            if not blocks and not isinstance(reach, Blocked):
                blocks = await self._act(stored, reach, company, key=key, ended=ended)
            self._blocked(stored, blocks)
            if not blocks:
                ended.append(stored.case.rule_id)
            else:
                self._requests.skip_if_impossible(stored, key, stage, blocks[0])
        self._held()

    def _held(self) -> None:
        """Write down what held due ends back, and since when."""
        blocks = {stored.id: self.view.blocks.get(pair_of(stored), ()) for stored in self._due()}
        self._holds.seen(blocks, time=self.clock.wall())

    def _saved_at(self, job_id: str) -> float | None:
        return self.view.saved_at(job_id)

    def _due(self) -> list[StoredCase]:
        return [stored for stored in self.cases.all() if stored.case.state is CaseState.DUE]

    def _blocked(self, stored: StoredCase, blocks: list[Blocked]) -> None:
        if blocks:
            self.view.blocks[pair_of(stored)] = tuple(blocks)
            case, why = stored.case, [block.reason for block in blocks]
            log.info("not ended", rule=case.rule_id, job=case.job_id, why=why)

    async def _act(
        self, stored: StoredCase, reach: Reach, company: Company, *, key: str, ended: Sequence[str]
    ) -> list[Blocked]:
        """The last look at one case, and the act of its stage if nothing speaks against it."""
        try:
            fresh = await self._gather(again=True)
        except GpuwardenError as error:
            return [Blocked("not_confirmed", f"the last look failed: {error}")]
        # All else is read again after that, with nothing to wait for until the decision is on disk.
        self.rulebook.refresh()
        self.trials.refresh()
        stored = self.cases.get(*pair_of(stored)) or stored
        rule = self.trials.rule_for(stored.case)
        following = None if rule is None else cases.next_stage(stored.case, rule)
        if rule is None or following is None:
            return [_NO_RULE]
        if following[0] != key:
            return [Blocked("not_due", f"by now the next stage is {following[0]}")]
        blocks = self.objections(stored, rule, fresh, ended=ended)
        if not blocks and reach.claim is not None and reach.claim.also:
            against = partial(self.objections, facts=fresh, ended=ended)
            others = company.others(stored, key)
            blocks = spared(others, key, table=self.cases, trials=self.trials, objections=against)
        job = fresh.jobs.get(stored.case.job_id)
        if blocks or job is None:
            self._postpone(stored, rule, blocks)
            return blocks
        verdict, _ = self._judgements.verdict(rule, job, fresh)
        look = papers.look(
            self._judgements.rule_texts.hash_of(rule, self.rulebook.rules),
            self._situation(fresh, ended=ended, rule_id=rule.id),
            stored.case,
            key=key,
            stage=following[1],
            rule=rule,
            job=job,
            verdict=verdict,
            kept_until=self.kept_until(stored.case),
            notices=self.ledger.notices(stored.id),
            book=self.rulebook,
        )
        papers.save_look(self.ledger, stored.id, look, time=self.clock.wall())
        self._holds.lifted(stored.id)
        refused = await self.reclaimer.act(
            stored, rule, *following, job=job, verdict=verdict, reach=reach
        )
        if refused is not None:
            return [refused]
        if not self.drills.apart(rule.id):
            self.losses.decided(job)
        return []

    def _postpone(self, stored: StoredCase, rule: Rule, blocks: list[Blocked]) -> None:
        if not any(block.reason == "not_confirmed" for block in blocks):
            return
        case, events = cases.postponed(stored.case, "fresh facts do not confirm it")
        self.cases.save(
            [Change(stored.id, case, rule.mode.value, tuple(events))], time=self.clock.wall()
        )

    def objections(
        self, stored: StoredCase, rule: Rule, facts: FleetFacts, *, ended: Sequence[str] = ()
    ) -> list[Blocked]:
        """Every reason against ending a case's job now, on these facts."""
        case = stored.case
        following = cases.next_stage(case, rule)
        if following is None:
            return [_NO_RULE]
        situation = self._situation(facts, ended=ended, rule_id=rule.id)
        job = facts.jobs.get(case.job_id)
        verdict, truth = None, Truth.UNKNOWN
        try:
            if job is not None:
                verdict, truth = self._judgements.verdict(rule, job, facts)
        except Exception:
            log.exception("rule failed; it ends nothing", rule=rule.id, job=case.job_id)
            return [Blocked("rule_failed", "the rule cannot be evaluated: see the engine's log")]
        found = guards.blocks(
            situation,
            case,
            rule,
            key=following[0],
            stage=following[1],
            job=job,
            verdict=verdict,
            truth=truth,
            delivery=self._judgements.delivery(stored, rule, user="" if job is None else job.user),
            kept_until=self.kept_until(case),
        )
        return [*found, *self.trials.objections(case)]

    def kept_until(self, case: Case) -> float | None:
        """Unix time to which keeps protect a case's job, or None."""
        keeps = self.ledger.keeps(case.rule_id, case.job_id, case.run_id)
        return max((keep.until for keep in keeps), default=None)

    def _situation(
        self, facts: FleetFacts, *, ended: Sequence[str] = (), rule_id: str = ""
    ) -> Situation:
        """What holds for the cases of a rule; drills and all others count apart."""
        now, limits = self.clock.wall(), self.rulebook.rules.limits
        apart, drill = self.drills.apart(rule_id), self.drills.apart
        ends = self.ledger.ends_since(now - guards.DAY_SECONDS)
        ends = [item for item in ends if drill(item.rule_id) is apart]
        due = [stored.case for stored in self._due() if drill(stored.case.rule_id) is apart]
        ended = [name for name in ended if drill(name) is apart]
        return Situation(
            now=now,
            scrape_interval=self.settings.scrape_interval,
            limits=(self.drills.limits if apart else None if limits is None else limits.terminate),
            facts=facts,
            ends=[PastEnd(d.created_at, d.user, d.rule_id, d.job_id) for d in ends],
            ended_this_tick=len(ended),
            ended_rules=ended,
            groups=() if apart else self.rulebook.rules.groups,
            due_owners=guards.owners(due),
            due_rules=guards.owners_by_rule(due),
            killed=switched_on(self.kill_switch),
            settled_for=self._judgements.settled_for,
            settle_after=self.settings.settle_after,
            cool_down=0.0 if apart else self.settings.cool_down,
            incomplete_cards=self.unproven_cards(facts),
            notices_skew=self.teller.skew,
            bad_files=self.rulebook.problem,
            changing=self.rulebook.changing,
            paused=self.pauses.sentence,
            late=self.ticks.late,
        )

    def unproven_cards(self, facts: FleetFacts) -> set[str]:
        """Cards that a reclaim, running or unproven, may still hold."""
        return self._unproven.held(facts)

    def _halted(self, situation: Situation) -> None:
        # Without limits no rule can enforce (the rule files are checked for it): nothing is halted.
        blocks = guards.fleet_blocks(situation)
        self.view.halted = tuple(block for block in blocks if block.reason != "no_limits")
        self.view.shares = tuple(guards.share_blocks(situation))
        if not self.view.shares:
            self.view.halted_since = None
        elif self.view.halted_since is None:
            self.view.halted_since = self.clock.wall()

    # -- keeping

    def keep(
        self, stored: StoredCase, rule: Rule, *, role: str, by: str, reason: str, seconds: float
    ) -> Keep:
        """Move a case's deadline; who may, and how far, was checked by the caller."""
        now, case = self.clock.wall(), stored.case
        left = cases.remaining(case, rule) or 0.0
        keep = Keep(
            rule_id=rule.id,
            job_id=case.job_id,
            run_id=case.run_id,
            role=role,
            by=by,
            reason=reason,
            seconds=seconds,
            granted_at=now,
            until=now + left + seconds,
        )
        moved, events = cases.kept(case, rule, seconds)
        noted = [
            dataclasses.replace(event, detail={**event.detail, "by": by, "reason": reason})
            for event in events
        ]
        change = Change(stored.id, moved, rule.mode.value, tuple(noted))
        self.ledger.add_keep(keep, change, time=now)
        self.cases.replace(stored, moved)
        if role == "owner" and rule.canary is not None and rule.mode is Mode.ENFORCE:
            self.trials.appeal(
                rule, case.job_id, user=case.user, by=by, role=role, reason=reason, source="keep"
            )
        log.info("kept", rule=rule.id, job=case.job_id, by=by, role=role, seconds=seconds)
        return keep

    # -- health

    @property
    def problems(self) -> list[str]:
        """Why the engine is not ready, in words; empty if it is."""
        return health.problems(self)
