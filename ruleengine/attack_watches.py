"""Watching one trick: the engine's state about its jobs, and how far each rule comes with them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpuwarden.ruleengine import cases
from gpuwarden.ruleengine.model import Target
from gpuwarden.ruleengine.rehearsals import Stage, enforced

if TYPE_CHECKING:
    from gpuwarden.ruleengine.attacks import Play
    from gpuwarden.ruleengine.model import Rule, RuleSet
    from gpuwarden.ruleengine.rule_tests import RuleTest
    from gpuwarden.ruleengine.verdicts import FleetFacts


@dataclass(frozen=True, slots=True)
class Reached:
    """How far a rule came with a job; Unix times, None where it did not.

    Attributes:
        found: `for` was met.
        told: a stage that notifies was entered.
        last: the job was ended, or, where none is, the last stage was entered.
        staged: the last stage but that which ends a job was entered.
        held_by: what kept the job while it was due.
    """

    found: float | None = None
    told: float | None = None
    last: float | None = None
    staged: float | None = None
    held_by: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Found:
    """Another rule that finds a trick.

    Attributes:
        rule_id: which.
        at: Unix time at which it told the owner or, of a card, at which it found it.
        card: whether it is about cards.
    """

    rule_id: str
    at: float
    card: bool = False


@dataclass(slots=True)
class _Seen:
    """How far a rule has come with a job so far."""

    found: float | None = None
    told: float | None = None
    last: float | None = None
    staged: float | None = None
    held_by: set[str] = field(default_factory=set)


class Watch:
    """The engine's state for one trick, and what it came to."""

    def __init__(
        self, play: Play, rules: RuleSet, *ids: str, scene: RuleTest, ending: bool
    ) -> None:
        self._play = play
        self._rules = enforced(rules, frozenset(ids))
        self._stage = Stage.of(scene, self._rules)
        self._ending = ending
        self._jobs = [job.job for job in play.jobs]
        self._names = frozenset(job.job for job in (*play.jobs, *play.bystanders))
        self._cards = sorted({uuid for job in play.jobs for uuid in job.card_names})
        self._seen: dict[tuple[str, str], _Seen] = {}
        self._keeps_left = {
            rule.id: sum(s.owner_may.times for s in rule.stages if s.owner_may is not None)
            for rule in self._rules.rules
        }

    @property
    def reached(self) -> list[Reached]:
        """How far the only rule came with each job."""
        rule_id = self._rules.rules[0].id
        return [
            Reached(seen.found, seen.told, seen.last, seen.staged, tuple(sorted(seen.held_by)))
            for job in self._jobs
            for seen in (self._seen.get((rule_id, job), _Seen()),)
        ]

    @property
    def ended(self) -> bool:
        """Whether the first job was ended."""
        return any(pair[1] == self._jobs[0] for pair in self._stage.run.terminated)

    @property
    def dealt_with(self) -> float | None:
        """Unix time at which the last stage came for as many jobs as it must, or None."""
        times = [item.last for item in self.reached]
        known = [time for time in times if time is not None]
        if not known or (self._play.every and len(known) < len(times)):
            return None
        return max(known) if self._play.every else min(known)

    def soonest(self) -> Found | None:
        """The rule that told an owner first of as many jobs as it must.

        Where none does: the one that first found a card of theirs, which its operators see.
        """
        about_jobs, about_cards = [], []
        for rule in self._rules.rules:
            seen = [self._seen.get((rule.id, name), _Seen()) for name in self._subjects(rule)]
            if rule.target is Target.GPU:
                moments = [item.found for item in seen if item.found is not None]
                about_cards += [Found(rule.id, min(moments), card=True)] if moments else []
                continue
            times = [item.told for item in seen if item.told is not None]
            if len(times) >= (len(self._jobs) if self._play.every else 1):
                at = max(times) if self._play.every else min(times)
                about_jobs.append(Found(rule.id, at))
        return min(about_jobs or about_cards, key=lambda found: found.at, default=None)

    def _subjects(self, rule: Rule) -> list[str]:
        """Names of the trick's jobs, or of their cards."""
        return self._jobs if rule.target is Target.JOB else self._cards

    @property
    def over(self) -> bool:
        """Whether nothing that is still to come can matter."""
        if len(self._rules.rules) == 1:
            return self.dealt_with is not None
        found = self.soonest()
        return found is not None and not found.card

    def tick(self, facts: FleetFacts, delta: float) -> None:
        """One round about this trick's jobs alone."""
        jobs = {name: job for name, job in facts.jobs.items() if name in self._names}
        cards = {name: card for name, card in facts.cards.items() if name in self._cards}
        self._stage.tick(dataclasses.replace(facts, jobs=jobs, cards=cards), delta)
        for rule in self._rules.rules:
            for job in self._subjects(rule):
                self._look(rule, job, facts.time)
                if self._play.keeps:
                    self._keep(rule, job)

    def _look(self, rule: Rule, job: str, now: float) -> None:
        pair = (rule.id, job)
        seen = self._seen.setdefault(pair, _Seen())
        if pair in self._stage.run.terminated:
            seen.last = seen.last if seen.last is not None else now
        case = self._stage.run.cases.get(pair)
        if case is None or case.detected_at is None:
            return
        seen.found = seen.found if seen.found is not None else case.detected_at
        marks = {mark.key: mark for mark in case.marks}
        notified = [mark.at for mark in case.marks if mark.do == "notify"]
        if notified and seen.told is None:
            seen.told = min(notified)
        seen.held_by |= {block.reason for block in self._stage.blocks.get(pair, ())}
        final = [key for key, stage in rule.keyed_stages if not stage.do.ends][-1:]
        if seen.staged is None and final and final[0] in marks:
            seen.staged = marks[final[0]].at
        if not self._ending and seen.last is None:
            seen.last = seen.staged

    def _keep(self, rule: Rule, job: str) -> None:
        """The owner keeps the job in the last moment, as often as the rule allows."""
        pair = (rule.id, job)
        case = self._stage.run.cases.get(pair)
        granted = [s.owner_may for s in rule.stages if s.owner_may is not None]
        if case is None or not granted or not self._keeps_left[rule.id] or case.notified_at is None:
            return
        left = cases.remaining(case, rule)
        if left is not None and left <= 2 * self._stage.test.interval:
            self._stage.run.cases[pair], _ = cases.kept(case, rule, granted[0].keep)
            self._keeps_left[rule.id] -= 1
