"""Rehearsing: an inline test's history judged tick by tick, as the live engine would have.

Facts, evaluation, cases and guards are those of the engine. Every rule is taken as if its mode
were enforce, so that a test shows what would happen before anybody switches it on. What is put in
the place of the outer world: notices arrive at once (or never), owners keep jobs and the kill
switch is on only where the test says so, and a job that would be ended goes on as the history says.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from gpuwarden.ruleengine import cases, evaluation
from gpuwarden.ruleengine.dry_runs import DryRun, Judged
from gpuwarden.ruleengine.facts import gather
from gpuwarden.ruleengine.model import Mode
from gpuwarden.ruleengine.verdicts import Truth

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuwarden.ruleengine.guards import Blocked
    from gpuwarden.ruleengine.model import Rule, RuleSet
    from gpuwarden.ruleengine.prometheus import Source
    from gpuwarden.ruleengine.rule_tests import Expectation, RuleTest
    from gpuwarden.ruleengine.verdicts import Evidence, FleetFacts, JobFacts, Verdict
    from gpuwarden.ruleengine.views import Pair


@dataclass(frozen=True, slots=True)
class Moment:
    """What one rule had come to about one subject at one tick.

    Attributes:
        verdict: yes, no, unknown, or none where the job is not there or not meant.
        reasons: why it is unknown, or what protects it.
        stage: key of the last stage entered, or none.
        terminated: whether the job would have been ended by then.
        act: the hardest that would have been done to it by then, or none.
        blocks: what the guards say of a job that is due.
        evidence: of the verdict.
    """

    verdict: str = "none"
    reasons: tuple[str, ...] = ()
    stage: str = "none"
    terminated: bool = False
    act: str = "none"
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
        rule.model_copy(update={"mode": Mode.ENFORCE, "canary": None})
        for rule in rules.rules
        if rule.id in ids
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
    stage = Stage.of(test, enforced(rules, test.rules))
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
        ("reason", item.reason, _named(item.reason, moment.reasons), _listed(moment.reasons)),
        ("stage", item.stage, item.stage == moment.stage, moment.stage),
        (
            "terminate",
            None if item.terminate is None else str(item.terminate).lower(),
            item.terminate is moment.terminated,
            str(moment.terminated).lower(),
        ),
        ("act", item.act, item.act == moment.act, moment.act),
        ("held_by", item.held_by, _named(item.held_by, blocks), _listed(blocks)),
    ]
    return [
        Mismatch(index, name, expected, actual, moment)
        for name, expected, met, actual in given
        if expected is not None and not met
    ]


def _named(word: str | None, words: Sequence[str]) -> bool:
    """Whether a word is among those that were found; none, where there are none."""
    return word in words or (word == "none" and not words)


def _listed(words: Sequence[str]) -> str:
    return ", ".join(words) or "none"


@dataclass
class Stage:
    """The engine's state while a test is judged."""

    test: RuleTest
    rules: RuleSet
    run: DryRun
    trust: dict[Pair, float] = field(default_factory=dict)
    judged: dict[Pair, Judged] = field(default_factory=dict)
    keeps: int = 0
    """How many of the test's keeps were asked for."""
    blocks: dict[Pair, tuple[Blocked, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, test: RuleTest, rules: RuleSet) -> Self:
        """The state before a test's first tick."""
        run = DryRun(rules, test.interval, delivered=test.notices == "delivered")
        return cls(test, rules, run)

    def tick(self, facts: FleetFacts, delta: float) -> None:
        """One round: judge every rule, advance every case, and ask the guards."""
        self.judged, self.blocks = {}, {}
        self._people(facts.time)
        for rule in self.rules.rules:
            for job_id, job in evaluation.subjects(rule, facts).items():
                if evaluation.applies(rule, job) is not Truth.NO:
                    pair = (rule.id, job_id)
                    judged = self._judge(rule, job, facts, delta)
                    self.judged[pair] = judged
                    self.run.advance(
                        rule,
                        pair,
                        judged.truth,
                        grades=judged.verdict.grades,
                        delta=delta,
                        time=facts.time,
                        user=job.user,
                        worded=judged.verdict.self_report_only,
                    )
        gone = [pair for pair in self.run.cases if pair not in self.judged]
        for pair in gone:
            self.run.advance(self._rule(pair), pair, None, grades=(), delta=delta, time=facts.time)
        self._enforce(facts)

    def _people(self, time: float) -> None:
        """What owners and operators have done since the last tick."""
        since = time - self.test.start.timestamp()
        for keep in self.test.keeps[self.keeps :]:
            if keep.at > since:
                break
            pair = (keep.rule, keep.job)
            self.run.keep(self._rule(pair), pair, keep.for_, time=time)
            self.keeps += 1
        self.run.killed = any(halt.begin <= since < halt.until for halt in self.test.kill_switch)

    def _rule(self, pair: Pair) -> Rule:
        return next(rule for rule in self.rules.rules if rule.id == pair[0])

    def _judge(self, rule: Rule, job: JobFacts, facts: FleetFacts, delta: float) -> Judged:
        pair = (rule.id, job.job_id)
        verdict, plain = evaluation.evaluate_both(
            rule,
            job,
            facts,
            profiles=self.rules.profiles,
            whitelist=self.rules.whitelist,
            now=facts.time,
        )
        if verdict.self_report_only:
            self.trust[pair] = self.trust.get(pair, 0.0) + delta
            # The time of this tick counts from the next one on, as in the engine.
            spent = self.trust[pair] - delta
            verdict = cases.budgeted(verdict, plain, spent=spent, trust_for=rule.trust_for)
        return Judged(verdict, verdict.truth)

    def _enforce(self, facts: FleetFacts) -> None:
        due = self.run.due()
        owners = self.run.owners(due)
        ended = 0
        for pair in due:
            rule = self._rule(pair)
            blocks = self.run.objections(
                rule,
                pair,
                facts,
                job=facts.jobs.get(pair[1]),
                judged=self.judged.get(pair),
                owners=owners,
                ended=ended,
            )
            if blocks is None:
                continue
            self.blocks[pair] = tuple(blocks)
            if not blocks:
                self.run.act(rule, pair, time=facts.time)
                ended += 1

    def moment(self, rule_id: str, subject: str) -> Moment:
        """What a rule has come to about a job or a card."""
        pair = (rule_id, subject)
        judged, case = self.judged.get(pair), self.run.cases.get(pair)
        marks = () if case is None else case.marks
        newest = max(marks, key=lambda mark: (mark.elapsed, _rank(mark.level)), default=None)
        return Moment(
            verdict="none" if judged is None else judged.truth.word,
            reasons=() if judged is None else _reasons(judged.verdict),
            stage="none" if newest is None else newest.key,
            terminated=pair in self.run.terminated,
            act="none" if pair not in self.run.done else self.run.done[pair].value,
            blocks=self.blocks.get(pair, ()),
            evidence=() if judged is None else judged.verdict.whole_evidence,
        )


def _reasons(verdict: Verdict) -> tuple[str, ...]:
    return ("whitelist",) if verdict.protected else verdict.unknown_reasons


def _rank(level: str) -> int:
    return ("light", "moderate", "severe").index(level)
