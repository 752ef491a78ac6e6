"""Telling Alertmanager: which alerts stand after a tick, and what lies ahead of each case."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

import structlog

from gpuwarden.errors import ServiceUnavailable
from gpuwarden.ruleengine import cases, deadlines, guards, notices, returns, tickets
from gpuwarden.ruleengine.cases import Case, CaseState, CloseReason
from gpuwarden.ruleengine.leave_records import LeaveStore
from gpuwarden.ruleengine.links import Links
from gpuwarden.ruleengine.losses import at_risk
from gpuwarden.ruleengine.messages import Outlook, UpcomingAct
from gpuwarden.ruleengine.model import Action
from gpuwarden.ruleengine.notices import AlertBook, Context
from gpuwarden.ruleengine.profiles import expectation
from gpuwarden.ruleengine.returns import CAME_BACK
from gpuwarden.ruleengine.unheard_news import UnheardNews
from gpuwarden.ruleengine.verdicts import MAX_SKEW_SECONDS
from gpuwarden.ruleengine.views import pair_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gpuwarden.clock import Clock
    from gpuwarden.ruleengine.alertmanager import Alert, AlertmanagerClient
    from gpuwarden.ruleengine.budget_uses import Standing
    from gpuwarden.ruleengine.directories import User
    from gpuwarden.ruleengine.enforcement import CaseTable
    from gpuwarden.ruleengine.ledger import Ledger
    from gpuwarden.ruleengine.model import Rule
    from gpuwarden.ruleengine.records import Decision, StoredCase
    from gpuwarden.ruleengine.rulebooks import RuleBook
    from gpuwarden.ruleengine.settings import EngineSettings
    from gpuwarden.ruleengine.trials import Trials
    from gpuwarden.ruleengine.views import View

LOST_POSTS = 2
"""After so many repeats that nobody took it counts that nobody could be told."""

log = structlog.get_logger(__name__)


class Teller:
    """Keeps Alertmanager's alerts like the cases.

    Args:
        settings: of engine.yaml.
        rulebook: rules and directory in force.
        ledger: notices, keeps and decisions.
        table: the open cases.
        trials: which owners a rule on trial only warns.
        alertmanager: every replica.
        clock: wall time.
        ticket_key: secret that owners' tickets are made with, or None.
    """

    def __init__(
        self,
        settings: EngineSettings,
        rulebook: RuleBook,
        ledger: Ledger,
        table: CaseTable,
        *,
        trials: Trials,
        alertmanager: AlertmanagerClient,
        clock: Clock,
        ticket_key: bytes | None,
    ) -> None:
        self._settings = settings
        self._rulebook = rulebook
        self._ledger = ledger
        self._cases = table
        self._trials = trials
        self._alertmanager = alertmanager
        self._clock = clock
        self._ticket_key = ticket_key
        self._links = Links(ticket_key, settings.external_url)
        self._book = AlertBook(settings.notices.resend)
        self._leaves = LeaveStore(ledger)
        self._news = UnheardNews(ledger, LOST_POSTS * settings.notices.resend)
        self.problem = ""
        """Why owners may not be told what stands, or an empty string."""
        self.undeliverable = 0
        """Cases that wait for ever, since their owner cannot be told."""

    @property
    def skew(self) -> float:
        """Seconds between this clock and the Alertmanager's that is furthest off, as last seen."""
        return self._alertmanager.skew

    @property
    def replicas(self) -> Mapping[str, str]:
        """Address of every Alertmanager -> why it took nothing, or an empty string."""
        return self._alertmanager.replicas

    async def tell(self, view: View, budgets: Sequence[tuple[Standing, float, float]] = ()) -> None:
        """Post what has changed or is due to be repeated; what fails is tried in the next tick."""
        now = self._clock.wall()
        alerts = [*self._alerts(view, now), *self._budget_alerts(budgets, now)]
        self._book.update(alerts, now)
        if not self._book.due(now):
            return
        try:
            await self._alertmanager.post(self._book.pending(now))
        except ServiceUnavailable as error:
            log.warning("alerts not taken; tried again in the next tick", error=str(error))
            self.problem = f"no Alertmanager takes the alerts: {error}"
            return
        self._book.posted(now)
        self.problem = ""
        skew = self._alertmanager.skew
        if skew > MAX_SKEW_SECONDS:
            # It takes alerts that are over by its own clock, and tells nobody.
            self.problem = (
                f"an Alertmanager's clock is {skew:.0f} s away from this one's: notices may be "
                "lost; set the clocks (NTP)"
            )
            log.warning("clock skew", seconds=round(skew, 1), server="alertmanager")
        else:
            self._news.taken(now)

    def _context(self, now: float) -> Context:
        rules, directory = self._rulebook.rules, self._rulebook.directory
        url, quiet = self._settings.external_url, self._news.quiet(now)
        return Context(now, rules.timezone, url, directory.languages, quiet)

    def _budget_alerts(
        self, budgets: Sequence[tuple[Standing, float, float]], now: float
    ) -> list[Alert]:
        context = self._context(now)
        return [
            alert
            for standing, share, at in budgets
            for alert in notices.budget_alerts(standing, share, at, context)
        ]

    def _alerts(self, view: View, now: float) -> list[Alert]:
        directory, context = self._rulebook.directory, self._context(now)
        found: list[Alert] = []
        waiting = 0
        for stored in self._cases.all():
            case, rule = stored.case, self._trials.rule_for(stored.case)
            if rule is None or case.detected_at is None:
                continue
            observed = notices.observed_since(case, rule)
            if observed is not None:
                found += self._withdrawn(case, observed, context, rule_gone=False)
            if not case.over and not notices.told_marks(case, rule):
                continue  # nobody is told of it, and there may be thousands
            owner = directory.user(case.user)
            verdict = view.verdicts.get((case.rule_id, case.job_id))
            found += notices.case_alerts(
                case,
                rule,
                evidence=() if verdict is None else verdict.whole_evidence,
                outlook=self.outlook(case, rule, view, now=now),
                owner=owner,
                context=context,
            )
            undeliverable = notices.undeliverable_alerts(
                case,
                rule,
                self._ledger.notices(stored.id),
                undelivered_after=self._settings.notices.undelivered_after,
                owner=owner,
                context=context,
            )
            found += self._came_back(stored, view, owner, context)
            waiting += bool(undeliverable)
            found += undeliverable
        self.undeliverable = waiting
        for body, at in self._ledger.rows(
            "SELECT body, closed_at FROM cases WHERE closed_at >= ? AND closed_because = ?",
            (context.news_since, CloseReason.RULE_GONE.value),
        ):
            case = Case.decode(body)
            if notices.announced(case):
                found += self._withdrawn(case, at, context, rule_gone=True)
        for decision in self._ledger.finished_since(context.news_since):
            owner = directory.user(decision.user)
            found += notices.decision_alerts(
                decision, freed=_freed(decision), owner=owner, context=context
            )
        for leave in self._leaves.lately_open(context.news_since):
            owner = directory.user(leave.user)
            found += notices.leave_alerts(leave, owner=owner, context=context)
        if view.halted_since is not None:
            whole = not {*view.halted}.isdisjoint(view.shares)
            found.append(notices.halted_alert(view.shares, view.halted_since, context, whole=whole))
        return found

    def _came_back(
        self, stored: StoredCase, view: View, owner: User, context: Context
    ) -> list[Alert]:
        back = None
        if any(block.reason == CAME_BACK for block in view.blocks.get(pair_of(stored), ())):
            back = returns.told(self._ledger, stored.id)
        elif stored.case.state is CaseState.REFUSED:
            decisions = self._ledger.job_decisions(stored.case.job_id)
            back = notices.back_by(decisions[-1]) if decisions else None
        if back is None:
            return []
        return notices.came_back_alerts(stored.case, back, owner=owner, context=context)

    def _withdrawn(
        self, case: Case, at: float, context: Context, *, rule_gone: bool
    ) -> list[Alert]:
        owner = self._rulebook.directory.user(case.user)
        return notices.withdrawn_alerts(case, at, rule_gone=rule_gone, owner=owner, context=context)

    def outlook(self, case: Case, rule: Rule, view: View, *, now: float) -> Outlook:
        """What lies ahead of a case, for its notice and its page."""
        facts = view.facts
        job = None if facts is None else facts.jobs.get(case.job_id)
        risk = None if job is None else at_risk(job, now, self._settings.prices)
        keeps = self._ledger.keeps(case.rule_id, case.job_id, case.run_id)
        return Outlook(
            remaining=None if case.over else cases.remaining(case, rule),
            grace=grace_of(case, rule),
            owner_may=notices.keep_allowance(rule),
            keeps_used=sum(1 for keep in keeps if keep.role == "owner"),
            ticket=tickets.issue(self._ticket_key, rule.id, case.job_id),
            link=self._links.url(case, _deadline(case, rule)),
            work_lost=None if job is None else guards.work_lost(job, now),
            saved=risk is not None and risk.saved,
            cards=() if job is None else tuple((gpu.uuid, gpu.index, gpu.name) for gpu in job.gpus),
            expected=MappingProxyType({})
            if job is None
            else expectation(job, self._rulebook.rules.profiles, team=rule.team).values,
            acts=upcoming(case, rule, now),
            cost="" if risk is None or risk.cost is None else str(risk.cost),
        )


def upcoming(case: Case, rule: Rule, now: float) -> tuple[UpcomingAct, ...]:
    """What is going to be done, soonest first; none where the end is all that follows."""
    found = tuple(
        UpcomingAct(stage.do.value, now + wait, cases.terms(case, key, stage).grace)
        for key, stage, wait in deadlines.upcoming(case, rule, now=now)
        if case.run_id is not None or stage.do.ends
    )
    if [act.do for act in found] == [Action.TERMINATE.value]:
        return ()
    return tuple(found)


def grace_of(case: Case, rule: Rule) -> float:
    """Seconds that the job has for leaving, by the act in flight, else by the one that follows."""
    keys = {act.key for act in case.acts if act.decision_id == case.decision_id}
    own = [item for item in rule.taking_stages if item[0] in keys]
    following = own[0] if own else cases.next_stage(case, rule)
    return 0.0 if following is None else cases.terms(case, *following).grace


def _deadline(case: Case, rule: Rule) -> float:
    """Seconds from the detection of a case to the last act that its owner is told of."""
    stages = rule.taking_stages[-1:]
    return max((cases.terms(case, *item).after for item in stages), default=0.0)


def _freed(decision: Decision) -> float | None:
    report = decision.decoded_report
    return None if report is None or report.proof is None else float(report.proof.memory_freed)
