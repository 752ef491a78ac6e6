"""Rounds: which values a tick asks of the whole fleet, and which only of jobs still in question.

Of `all: [A, B, C]` most jobs are NO by A, and then B and C can change nothing: Kleene's NO stays
NO whatever else becomes known. So in a large fleet the first condition that measures something is
asked of everybody and what follows only of the jobs that it leaves, by their names. The verdicts
are those of asking everything of everybody (a property test compares them); of a value that was
not asked the evidence says so. Nothing here asks Prometheus.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from gpuwarden.ruleengine import signals
from gpuwarden.ruleengine.card_expressions import by_card
from gpuwarden.ruleengine.conditions import All, NeedsMemory
from gpuwarden.ruleengine.job_expressions import separable
from gpuwarden.ruleengine.model import Target
from gpuwarden.ruleengine.needs import (
    ACTIVITY,
    CAUSE_SIGNALS,
    LATE_CAUSES,
    SAVES,
    condition_keys,
    listening,
    needed_keys,
)
from gpuwarden.ruleengine.sweeps import Sweeper

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from collections.abc import Set as AbstractSet

    from gpuwarden.ruleengine.conditions import Condition
    from gpuwarden.ruleengine.model import Rule, RuleSet
    from gpuwarden.ruleengine.profiles import Expectations
    from gpuwarden.ruleengine.verdicts import FleetFacts, SignalKey

MIN_JOBS: Final = 500
"""Of fewer jobs everything is asked of everybody: it is cheap, and people see every figure."""
MAX_SHARE: Final = 0.25
"""Of a larger share of the jobs a value is asked of the whole fleet. By name a job costs a
Prometheus twice what it costs in passing (2.42, 10,000 cards, chunks of 170 names)."""
BROAD_SECONDS: Final = 600.0
"""A value that too many jobs were in question for is asked of everybody for so long."""

LOOKED_AT_SECONDS: Final = 600.0
MAX_LOOKED_AT: Final = 200
"""Jobs that people look at; beyond, the one that was looked at longest ago is forgotten."""


@dataclass(frozen=True, slots=True)
class Questions:
    """What one tick asks.

    Attributes:
        early: asked of the whole fleet, first.
        late: asked of jobs that these rules leave in question.
        causes: asked of jobs with a case, since only those have a cause, or may be ended.
    """

    early: frozenset[SignalKey]
    late: Mapping[SignalKey, tuple[Rule, ...]] = field(default_factory=dict)
    causes: frozenset[SignalKey] = frozenset()

    @property
    def keys(self) -> set[SignalKey]:
        """All of them."""
        return {*self.early, *self.late, *self.causes}


class Rounds:
    """The rounds of one engine's ticks; remembers which values are no use to narrow.

    Args:
        expectations: what jobs should show.
        cases: gives for each rule's id the jobs that it has a case with.
        min_jobs: of fewer, everything is asked of everybody.
        max_share: of a larger share of the jobs, a value is asked of everybody.
    """

    def __init__(
        self,
        *,
        expectations: Callable[[], Expectations],
        cases: Callable[[], Mapping[str, AbstractSet[str]]],
        min_jobs: int = MIN_JOBS,
        max_share: float = MAX_SHARE,
    ) -> None:
        self._expectations, self._cases = expectations, cases
        self._min_jobs, self._max_share = min_jobs, max_share
        self._looked_at: dict[str, float] = {}
        self._broad: dict[SignalKey, float] = {}

    def questions(self, rules: RuleSet, *, jobs: int, now: float) -> Questions:
        """What to ask in a tick.

        Args:
            rules: what will be judged.
            jobs: how many there are.
            now: Unix time.
        """
        if jobs < self._min_jobs:
            return everything(rules)
        needed = needed_keys(rules)
        self._broad = {key: until for key, until in self._broad.items() if until > now}
        early: set[SignalKey] = set()
        late: dict[SignalKey, list[Rule]] = {}
        for rule in rules.rules:
            if rule.only_if_waiting is not None and rule.only_if_waiting.promql is not None:
                early.add(rule.only_if_waiting.key)
            first = first_keys(rule)
            early |= first
            for key in {k for each in rule.conditions for k in condition_keys(each)} - first:
                late.setdefault(key, []).append(rule)
        late[ACTIVITY] = listening(rules)
        early |= {key for key in late if key in self._broad}
        early |= {key for key in needed - set(late) if key.signal not in LATE_CAUSES}
        early |= {key for key in late if not _of_jobs(key)}
        asked = {signals.amount(key) or key for key in early}
        # What is asked of everybody under another name costs nothing more.
        early |= {key for key in late if (signals.amount(key) or key) in asked}
        return Questions(
            early=frozenset(early),
            late={key: tuple(found) for key, found in late.items() if key not in early},
            causes=frozenset((needed | {SAVES}) - early - set(late)),
        )

    def look_at(self, job_id: str, now: float) -> None:
        """Somebody looks at a job: the next ticks tell all its figures.

        Args:
            job_id: of the job.
            now: Unix time.
        """
        self._looked_at.pop(job_id, None)
        while len(self._looked_at) >= MAX_LOOKED_AT:
            del self._looked_at[next(iter(self._looked_at))]
        self._looked_at[job_id] = now + LOOKED_AT_SECONDS

    def in_question(
        self, questions: Questions, rules: RuleSet, facts: FleetFacts
    ) -> dict[SignalKey, frozenset[str] | None]:
        """The jobs for which late values and those of causes can count; None for the whole fleet.

        Args:
            questions: as of `questions`.
            rules: likewise.
            facts: with the early values.
        """
        sweeper = Sweeper(
            facts,
            rules.rules,
            expectations=self._expectations(),
            whitelist=rules.whitelist,
            now=facts.time,
        )
        waiting = {rule.id for found in questions.late.values() for rule in found}
        left = {rule_id: facts.jobs.keys() & jobs for rule_id, jobs in self._cases().items()}
        shown = {job for job, until in self._looked_at.items() if until > facts.time}
        shown &= facts.jobs.keys()
        # Whoever has a case is told its cause; a rule that strikes at once has none yet.
        struck = shown.union(*left.values())
        for rule in rules.rules:
            hasty = not rule.for_
            if rule.target is Target.JOB and (hasty or rule.id in waiting):
                jobs = set(sweeper.in_question(rule))
                left[rule.id] = left.get(rule.id, set()) | jobs
                struck |= jobs if hasty else set()
        found: dict[SignalKey, frozenset[str] | None] = {}
        for key, asking in questions.late.items():
            jobs = shown.union(*(left.get(rule.id, ()) for rule in asking))
            tells = key.signal in CAUSE_SIGNALS and key.agg == "avg"
            found[key] = self._narrowed(key, jobs | struck if tells else jobs, facts)
        for key in questions.causes:
            found[key] = self._narrowed(key, struck, facts)
        return found

    def _narrowed(self, key: SignalKey, jobs: set[str], facts: FleetFacts) -> frozenset[str] | None:
        if key.promql and jobs and not (separable(key.promql) or by_card(key.promql)):
            return None
        if len(jobs) <= self._max_share * len(facts.jobs):
            return frozenset(jobs)
        self._broad[key] = facts.time + BROAD_SECONDS
        return None


def everything(rules: RuleSet) -> Questions:
    """All that rules need, asked of the whole fleet.

    Args:
        rules: what will be judged.
    """
    return Questions(frozenset(needed_keys(rules) | {ACTIVITY, SAVES}))


def first_keys(rule: Rule) -> set[SignalKey]:
    """The values that a rule is asked first: of `all` those of the first part that measures.

    What a job declares is told by the inventory: what follows it is asked of those whom it means.
    Cards are looked at one by one and have no job's name: a rule about them asks everything first.
    """
    if rule.target is not Target.JOB:
        return {key for each in rule.conditions for key in condition_keys(each)}
    return _first(rule.when)


def _first(condition: Condition) -> set[SignalKey]:
    if isinstance(condition, All):
        for part in condition.all:
            keys = _first(part)
            if keys or isinstance(part, NeedsMemory):
                return keys
        return set()
    return set(condition_keys(condition))


def _of_jobs(key: SignalKey) -> bool:
    """Whether a value can be left out, or be asked of some jobs alone."""
    spec = signals.SIGNALS.get(key.signal)
    return spec is None or not spec.device
