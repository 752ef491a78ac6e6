"""Judgements: every rule over the facts of a tick, and what becomes of its cases; on disk."""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import structlog

from gpuwarden.ruleengine import cases, evaluation, notices, papers
from gpuwarden.ruleengine.cases import CloseReason, Delivery, Event
from gpuwarden.ruleengine.causes import IDLE, diagnose, recognised
from gpuwarden.ruleengine.ledger import Ledger, LedgerUnusable
from gpuwarden.ruleengine.profiles import Expectations
from gpuwarden.ruleengine.records import Change
from gpuwarden.ruleengine.rounds import Rounds
from gpuwarden.ruleengine.sweeps import Sweeper
from gpuwarden.ruleengine.ticks import OUTAGE_TICKS
from gpuwarden.ruleengine.verdicts import Truth
from gpuwarden.ruleengine.views import Pair, View, pair_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpuwarden.clock import Clock
    from gpuwarden.ruleengine.enforcement import CaseTable
    from gpuwarden.ruleengine.model import Rule
    from gpuwarden.ruleengine.records import StoredCase
    from gpuwarden.ruleengine.rulebooks import RuleBook
    from gpuwarden.ruleengine.settings import EngineSettings
    from gpuwarden.ruleengine.ticks import TickCounts
    from gpuwarden.ruleengine.trials import Trials
    from gpuwarden.ruleengine.verdicts import Cause, FleetFacts, Grade, JobFacts, Verdict

log = structlog.get_logger(__name__)


class _Answer(NamedTuple):
    """What counts of a verdict: after the budget for what the job says of itself."""

    truth: Truth
    grades: tuple[Grade, ...] = ()
    self_report_only: bool = False


class Judgements:
    """The judging half of an engine.

    Args:
        settings: of engine.yaml.
        rulebook: rules in force.
        ledger: what is certain.
        table: the open cases.
        ticks: where it is counted what could not be judged.
        clock: wall and monotonic time.
        trials: which owners a rule on trial only warns.
    """

    def __init__(
        self,
        settings: EngineSettings,
        rulebook: RuleBook,
        *,
        ledger: Ledger,
        table: CaseTable,
        ticks: TickCounts,
        clock: Clock,
        trials: Trials,
    ) -> None:
        self.settled_for = 0.0
        """Seconds that count since the last outage."""
        self._settings = settings
        self._rulebook = rulebook
        self._ledger = ledger
        self._cases = table
        self._ticks = ticks
        self._clock = clock
        self._trials = trials
        self._trust = ledger.trust_spent()
        self._completed_at: float | None = None
        self._remembered = Expectations(rulebook.rules.profiles)
        self.rounds = Rounds(expectations=self._expectations, cases=table.by_rule)
        self.rule_texts = papers.RuleTexts(ledger, settings.scrape_interval)
        self._openings = 0

    def forget(self, pair: Pair) -> None:
        """A job is gone for good: so is what its word has used up."""
        self._trust.pop(pair, None)

    def _elapsed(self) -> tuple[float, bool]:
        """Seconds that count since the last completed tick, and whether there was an outage."""
        now, last = self._clock.monotonic(), self._completed_at
        self._completed_at = now
        longest = OUTAGE_TICKS * self._settings.tick
        if last is None:
            return 0.0, True
        return min(now - last, longest), now - last > longest

    def judge(self, facts: FleetFacts) -> View:
        """Judge every job by every rule, advance the cases and write what changed.

        Returns:
            What was seen; nobody has been told, and nothing ended.
        """
        delta, outage = self._elapsed()
        self.settled_for = 0.0 if outage else self.settled_for + delta
        now = self._clock.wall()
        self._openings = 0
        view = View(facts=facts)
        rules = self._rulebook.rules
        view.verdicts.begin(facts, rules)
        sweeper = Sweeper(
            facts,
            rules.rules,
            expectations=self._expectations(),
            whitelist=rules.whitelist,
            now=facts.time,
        )
        changes: list[Change] = []
        judged: set[Pair] = set()
        broken: set[str] = set()
        spent: dict[Pair, float] = {}
        for rule in rules.rules:
            try:
                for job, answer in self._striking(rule, facts, sweeper, view=view):
                    pair = (rule.id, job.job_id)
                    judged.add(pair)
                    if answer.self_report_only and delta > 0:
                        spent[pair] = self._trust.get(pair, 0.0) + delta
                    change = self._advance(
                        rule, job, facts, answer=answer, delta=delta, now=now, outage=outage
                    )
                    if change is not None:
                        changes.append(change)
                view.verdicts.judged(rule)
                quiet = sweeper.quiet(rule)
                self._ticks.count_verdicts(rule.id, Truth.NO, times=quiet)
            except (sqlite3.DatabaseError, LedgerUnusable):
                raise  # not the rule is broken
            except Exception:
                # One broken rule must not stop the others, nor lose what it had.
                log.exception("rule failed; its cases stay as they are", rule=rule.id)
                broken.add(rule.id)
                self._ticks.count("failed_rule")
        left = [s for s in self._cases.all() if pair_of(s) not in judged]
        changes += [c for s in left if (c := self._absent(s, facts, delta, now)) is not None]
        # What a broken rule said before it broke is half a picture.
        whole = [change for change in changes if change.case.rule_id not in broken]
        self._cases.save(whole, time=now)
        if spent:
            self._ledger.save_trust(spent, time=now)
            self._trust.update(spent)
        return view

    def _striking(
        self, rule: Rule, facts: FleetFacts, sweeper: Sweeper, *, view: View
    ) -> Iterator[tuple[JobFacts, _Answer]]:
        """Jobs that a rule strikes, or has a case with; what it finds of the others is noted.

        A verdict is put into words only where a sweep does not tell all that counts.
        """
        watched = self._cases.jobs_of(rule.id)
        graded = any(stage.when is not None for stage in rule.stages)
        for found in sweeper.findings(rule, watched=watched):
            job, answer = found.job, _Answer(found.truth)
            pair = (rule.id, job.job_id)
            known = job.job_id in watched
            truth, reasons, protected = found.truth, found.reasons, found.protected
            if found.self_report_only or (graded and (known or truth is Truth.YES)):
                verdict, counts = self.verdict(rule, job, facts)
                view.verdicts.add(verdict)
                answer = _Answer(counts, verdict.grades, verdict.self_report_only)
                truth, reasons = verdict.truth, verdict.unknown_reasons
                protected, known = bool(verdict.protected), True
            self._ticks.count_verdicts(rule.id, truth, reasons)
            if protected:
                view.protected.add(pair)
            if known or truth is Truth.YES:
                yield job, answer

    def _expectations(self) -> Expectations:
        """What jobs should show, remembered for as long as the rules stay."""
        profiles = self._rulebook.rules.profiles
        if self._remembered.profiles is not profiles:
            self._remembered = Expectations(profiles)
        return self._remembered

    def verdict(self, rule: Rule, job: JobFacts, facts: FleetFacts) -> tuple[Verdict, Truth]:
        """The verdict that counts, after the budget for what the job says of itself."""
        rules = self._rulebook.rules
        verdict, plain = evaluation.evaluate_both(
            rule, job, facts, profiles=rules.profiles, whitelist=rules.whitelist, now=facts.time
        )
        if not verdict.self_report_only:
            return verdict, verdict.truth
        used = self._trust.get((rule.id, job.job_id), 0.0)
        counts = cases.budgeted(verdict, plain, spent=used, trust_for=rule.trust_for)
        return counts, counts.truth

    def _advance(
        self,
        rule: Rule,
        job: JobFacts,
        facts: FleetFacts,
        *,
        answer: _Answer,
        delta: float,
        now: float,
        outage: bool,
    ) -> Change | None:
        stored, truth = self._cases.get(rule.id, job.job_id), answer.truth
        opening = None
        if stored is None:
            if truth is not Truth.YES:
                return None
            case, delta = cases.opened(rule, job.job_id, wall=now), 0.0
            opening = self._opening(rule, job, facts)
        else:
            case = stored.case
        run_id = job.run.run_id if job.run is not None and not job.run.conflict else case.run_id
        case = msgspec.structs.replace(
            case, user=job.user or case.user, run_id=run_id, instance=job.instance or case.instance
        )
        rule = self._trials.applied(rule, case.user)
        before: list[Event] = []
        if outage:
            case, before = cases.postponed(case, "after an outage everything is judged afresh")
        delivery = self.delivery(stored, rule, user=case.user)
        step = cases.advance(
            case,
            rule,
            truth=truth,
            grades=answer.grades,
            delta=delta,
            wall=now,
            delivery=delivery,
            worded=answer.self_report_only,
        )
        case, events = step.case, [*before, *step.events]
        if truth is Truth.YES and case.detected_at is not None:
            cause = self._cause(rule, job, facts)
            case = msgspec.structs.replace(
                case,
                cause=cause.name,
                because=cause.because,
                remedy=cause.remedy,
                figures=cause.figures,
            )
            if any(event.kind == "detected" for event in step.events) and cause.name == IDLE:
                events.append(Event("idle_detected"))
        for event in events:
            log.info("case", rule=rule.id, job=job.job_id, kind=event.kind, **event.detail)
        closed = None if step.closed is None else step.closed.value
        number = None if stored is None else stored.id
        return Change(number, case, rule.mode.value, tuple(events), closed, opening)

    def _opening(self, rule: Rule, job: JobFacts, facts: FleetFacts) -> papers.Paper | None:
        """The first sample that broke a rule, where more may come of it than a notice."""
        if not papers.acts(rule) or self._openings >= papers.MAX_OPENINGS:
            return None
        self._openings += 1
        verdict, _ = self.verdict(rule, job, facts)
        text = self.rule_texts.hash_of(rule, self._rulebook.rules)
        return papers.opening(text, verdict, facts.time)

    def _cause(self, rule: Rule, job: JobFacts, facts: FleetFacts) -> Cause:
        expected = self._expectations().of(job, rule.team).values
        found = recognised(job, expected)
        if found is not None:
            return found
        verdict, _ = self.verdict(rule, job, facts)
        return diagnose(job, verdict, self._rulebook.rules.profiles, team=rule.team)

    def _absent(
        self, stored: StoredCase, facts: FleetFacts, delta: float, now: float
    ) -> Change | None:
        """A case that nothing was judged for: its rule or its job is gone, or they parted."""
        case, rule = stored.case, self._trials.rule_for(stored.case)
        if case.state in cases.OPEN_DECISION:
            return None  # the agent's answer comes first
        if rule is None:
            events = (Event("closed", {"reason": CloseReason.RULE_GONE.value}),)
            known = events if case.detected_at is not None else ()
            return Change(stored.id, case, "", known, CloseReason.RULE_GONE.value)
        # Missing, or no longer what the rule is about: labels come and go for a scrape or two, so
        # both count only after a while. Of a node that is not lit nothing is known: a Prometheus
        # that has lost its data does not know that the job has ended.
        step = cases.advance(
            case,
            rule,
            truth=None if case.instance in facts.lit_names else Truth.UNKNOWN,
            grades=(),
            delta=delta,
            wall=now,
            delivery=self.delivery(stored, rule),
        )
        closed = None if step.closed is None else step.closed.value
        return Change(stored.id, step.case, rule.mode.value, step.events, closed)

    def delivery(self, stored: StoredCase | None, rule: Rule, *, user: str = "") -> Delivery:
        """What is known of the notices of a case.

        Args:
            stored: the case, or None where it is new.
            rule: as it now reads.
            user: whose job it is by now, where that is known; its case may name a former owner.
        """
        if stored is None:
            return Delivery()
        marks = notices.told_marks(stored.case, rule)
        stages = [notices.notice_stage(mark) for mark in marks]
        return self._ledger.delivery(stored.id, stages, user or stored.case.user)
