"""Rehearsing: an inline test's history judged tick by tick, as the live engine would have.

Facts, evaluation, cases and guards are those of the engine. Every rule is taken as if its mode
were enforce, so that a test shows what would happen before anybody switches it on. What is put in
the place of the outer world: notices arrive at once (or never), no owner keeps a job, the kill
switch is off, and a job that would be ended goes on as the history says.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpuwarden.ruleengine import cases, evaluation, guards, notices
from gpuwarden.ruleengine.cases import CaseState, Delivery
from gpuwarden.ruleengine.facts import gather
from gpuwarden.ruleengine.guards import Blocked, PastEnd, Situation
from gpuwarden.ruleengine.model import Mode
from gpuwarden.ruleengine.settings import EngineSettings
from gpuwarden.ruleengine.verdicts import Truth

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuwarden.ruleengine.cases import Case
    from gpuwarden.ruleengine.model import Rule, RuleSet
    from gpuwarden.ruleengine.prometheus import Source
    from gpuwarden.ruleengine.rule_tests import Expectation, RuleTest
    from gpuwarden.ruleengine.verdicts import Evidence, FleetFacts, JobFacts, Verdict

COOL_DOWN_SECONDS: float = EngineSettings.model_fields["cool_down"].default
"""The engine's, unless its settings say otherwise."""
_Pair = tuple[str, str]
"""(rule, job or card)."""


@dataclass(frozen=True, slots=True)
class Moment:
    """What one rule had come to about one subject at one tick.

    Attributes:
        verdict: yes, no, unknown, or none where the job is not there or not meant.
        reasons: why it is unknown, or what protects it.
        stage: key of the last stage entered, or none.
        terminated: whether the job would have been ended by then.
        blocks: what the guards say of a job that is due.
        evidence: of the verdict.
    """

    verdict: str = "none"
    reasons: tuple[str, ...] = ()
    stage: str = "none"
    terminated: bool = False
    blocks: tuple[Blocked, ...] = ()
    evidence: tuple[Evidence, ...] = ()


@dataclass(frozen=True, slots=True)
class Mismatch:
    """An expectation that was not met.

    Attributes:
        index: of the expectation in its test.
        field: which of its words.
        expected, actual: as they are written in the file.
        moment: what was found.
    """

    index: int
    field: str
    expected: str
    actual: str
    moment: Moment


def enforced(rules: RuleSet, ids: frozenset[str]) -> RuleSet:
    """The rules of these ids, as if they were switched on."""
    chosen = tuple(
        rule.model_copy(update={"mode": Mode.ENFORCE}) for rule in rules.rules if rule.id in ids
    )
    return rules.model_copy(update={"rules": chosen})


def tick_times(test: RuleTest) -> list[float]:
    """Unix times of the evaluations."""
    start = test.start.timestamp()
    return [start + step * test.tick for step in range(int(test.length // test.tick) + 1)]


async def rehearse(test: RuleTest, rules: RuleSet, source: Source) -> list[Mismatch]:
    """Judge a test's history.

    Args:
        test: the test.
        rules: the merged set that the test belongs to.
        source: answers from the test's history.

    Returns:
        Every expectation that was not met, in their order.

    Raises:
        ServiceUnavailable: Prometheus fails.
        QueryRefused: a query of our own is refused, say because its series are ambiguous.
    """
    stage = _Stage(test, enforced(rules, test.rules))
    times = tick_times(test)
    begin = times[0]
    teams = {job.user: job.team for job in test.jobs if job.team}
    found: list[Mismatch] = []
    for number, time in enumerate(times):
        facts = await gather(
            source, stage.rules, time=time, scrape_interval=test.interval, teams=teams
        )
        stage.tick(facts, test.tick if number else 0.0)
        until = times[number + 1] - begin if number + 1 < len(times) else float("inf")
        for index, item in enumerate(test.expect):
            if time - begin <= item.at < until:
                moment = stage.moment(item.rule, item.subject)
                found += compare(index, item, moment)
    return sorted(found, key=lambda item: item.index)


def compare(index: int, item: Expectation, moment: Moment) -> list[Mismatch]:
    """What of an expectation a moment does not meet."""
    blocks = tuple(block.reason for block in moment.blocks)
    given: list[tuple[str, str | None, bool, str]] = [
        ("verdict", item.verdict, item.verdict == moment.verdict, moment.verdict),
        ("reason", item.reason, item.reason in moment.reasons, _listed(moment.reasons)),
        ("stage", item.stage, item.stage == moment.stage, moment.stage),
        (
            "terminate",
            None if item.terminate is None else str(item.terminate).lower(),
            item.terminate is moment.terminated,
            str(moment.terminated).lower(),
        ),
        ("held_by", item.held_by, item.held_by in blocks, _listed(blocks)),
    ]
    return [
        Mismatch(index, name, expected, actual, moment)
        for name, expected, met, actual in given
        if expected is not None and not met
    ]


def _listed(words: Sequence[str]) -> str:
    return ", ".join(words) or "none"


@dataclass
class _Stage:
    """The engine's state while a test is judged."""

    test: RuleTest
    rules: RuleSet
    cases: dict[_Pair, Case] = field(default_factory=dict)
    trust: dict[_Pair, float] = field(default_factory=dict)
    verdicts: dict[_Pair, Verdict] = field(default_factory=dict)
    truths: dict[_Pair, Truth] = field(default_factory=dict)
    blocks: dict[_Pair, tuple[Blocked, ...]] = field(default_factory=dict)
    proven: dict[_Pair, dict[str, float]] = field(default_factory=dict)
    ends: list[PastEnd] = field(default_factory=list)
    terminated: set[_Pair] = field(default_factory=set)

    def tick(self, facts: FleetFacts, delta: float) -> None:
        """One round: judge every rule, advance every case, and ask the guards."""
        self.verdicts, self.truths, self.blocks = {}, {}, {}
        for rule in self.rules.rules:
            for job_id, job in evaluation.subjects(rule, facts).items():
                if evaluation.applies(rule, job) is not Truth.NO:
                    self._judge(rule, job, facts, delta)
                    self._advance(rule, (rule.id, job_id), delta, facts, job)
        gone = [pair for pair in self.cases if pair not in self.verdicts]
        for pair in gone:
            rule = next(rule for rule in self.rules.rules if rule.id == pair[0])
            self._advance(rule, pair, delta, facts, None)
        self._enforce(facts)

    def _judge(self, rule: Rule, job: JobFacts, facts: FleetFacts, delta: float) -> None:
        pair = (rule.id, job.job_id)
        verdict, plain = (
            evaluation.evaluate(
                rule,
                job,
                facts,
                profiles=self.rules.profiles,
                whitelist=self.rules.whitelist,
                now=facts.time,
                trusted=trusted,
            )
            for trusted in (True, False)
        )
        truth = verdict.truth
        if verdict.self_report_only:
            self.trust[pair] = self.trust.get(pair, 0.0) + delta
            # The time of this tick counts from the next one on, as in the engine.
            spent = self.trust[pair] - delta
            truth = cases.budgeted(
                verdict.truth, plain.truth, spent=spent, trust_for=rule.trust_for
            )
            verdict = plain if truth is plain.truth else verdict
        self.verdicts[pair], self.truths[pair] = verdict, truth

    def _advance(
        self, rule: Rule, pair: _Pair, delta: float, facts: FleetFacts, job: JobFacts | None
    ) -> None:
        truth = self.truths.get(pair)
        case = self.cases.get(pair)
        if case is None:
            if truth is not Truth.YES:
                return
            case, delta = cases.opened(rule, pair[1], wall=facts.time), 0.0
        if job is not None:
            case = dataclasses.replace(case, user=job.user or case.user)
        delivery = self._delivery(pair, case, rule)
        step = cases.advance(
            case, rule, truth=truth, delta=delta, wall=facts.time, delivery=delivery
        )
        if step.closed is not None:
            self.cases.pop(pair, None)
            self.proven.pop(pair, None)
            return
        self.cases[pair] = step.case
        if self.test.notices == "delivered":
            known = self.proven.setdefault(pair, {})
            for mark in notices.told_marks(step.case, rule):
                known.setdefault(notices.notice_stage(mark), facts.time)

    def _delivery(self, pair: _Pair, case: Case, rule: Rule) -> Delivery:
        stages = [notices.notice_stage(mark) for mark in notices.told_marks(case, rule)]
        known = self.proven.get(pair, {})
        if not stages or any(stage not in known for stage in stages):
            return Delivery()
        return Delivery(complete=True, proven_at=max(known[stage] for stage in stages))

    def _enforce(self, facts: FleetFacts) -> None:
        due = [pair for pair, case in self.cases.items() if case.state is CaseState.DUE]
        due.sort(key=lambda pair: (-self.cases[pair].due_for, self.cases[pair].opened_at, pair[1]))
        owners = {guards.owner_key(self.cases[pair].user, pair[1]) for pair in due}
        ended = 0
        for pair in due:
            case = self.cases[pair]
            rule = next(rule for rule in self.rules.rules if rule.id == pair[0])
            final = cases.final_stage(rule)
            if final is None:
                continue
            situation = self._situation(facts, owners, ended)
            blocks = [
                *guards.fleet_blocks(situation),
                *guards.limit_blocks(situation, case.user),
                *guards.case_blocks(
                    situation,
                    case,
                    rule,
                    final[1],
                    job=facts.jobs.get(pair[1]),
                    verdict=self.verdicts.get(pair),
                    truth=self.truths.get(pair, Truth.UNKNOWN),
                    delivery=self._delivery(pair, case, rule),
                    kept_until=None,
                ),
            ]
            self.blocks[pair] = tuple(blocks)
            if not blocks:
                done = cases.authorised(case, rule, "test", wall=facts.time)
                self.cases[pair] = cases.settled(done, CaseState.VERIFIED)
                self.terminated.add(pair)
                self.ends.append(PastEnd(facts.time, case.user))
                ended += 1

    def _situation(self, facts: FleetFacts, owners: set[str], ended: int) -> Situation:
        limits = self.rules.limits
        return Situation(
            now=facts.time,
            scrape_interval=self.test.interval,
            limits=None if limits is None else limits.terminate,
            facts=facts,
            ends=self.ends,
            ended_this_tick=ended,
            due_owners=owners,
            killed=False,
            settled_for=0.0,
            settle_after=0.0,
            cool_down=COOL_DOWN_SECONDS,
        )

    def moment(self, rule_id: str, subject: str) -> Moment:
        """What a rule has come to about a job or a card."""
        pair = (rule_id, subject)
        verdict, case = self.verdicts.get(pair), self.cases.get(pair)
        marks = () if case is None else case.marks
        newest = max(marks, key=lambda mark: (mark.elapsed, _rank(mark.level)), default=None)
        return Moment(
            verdict="none" if verdict is None else self.truths[pair].name.lower(),
            reasons=() if verdict is None else _reasons(verdict),
            stage="none" if newest is None else newest.key,
            terminated=pair in self.terminated,
            blocks=self.blocks.get(pair, ()),
            evidence=() if verdict is None else verdict.evidence,
        )


def _reasons(verdict: Verdict) -> tuple[str, ...]:
    return ("whitelist",) if verdict.protected else verdict.unknown_reasons


def _rank(level: str) -> int:
    return ("light", "moderate", "severe").index(level)
