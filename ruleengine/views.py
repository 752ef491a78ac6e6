"""What the last completed tick saw; for pages, metrics and notices."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpuwarden.ruleengine import evaluation
from gpuwarden.ruleengine.verdicts import Truth

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpuwarden.ruleengine.guards import Blocked
    from gpuwarden.ruleengine.model import Rule, RuleSet
    from gpuwarden.ruleengine.records import StoredCase
    from gpuwarden.ruleengine.verdicts import FleetFacts, Verdict

Pair = tuple[str, str]
"""(rule, job)."""


def pair_of(stored: StoredCase) -> Pair:
    """The pair that a case is about."""
    return (stored.case.rule_id, stored.case.job_id)


class Verdicts:
    """What one tick said of every pair that it judged.

    Most are NO, or UNKNOWN without a case, and are read by nobody: such a verdict is put into words
    when it is asked for, from the facts of its tick.
    """

    def __init__(self) -> None:
        self._known: dict[Pair, Verdict] = {}
        self._rules: Mapping[str, Rule] = {}
        self._book: RuleSet | None = None
        self._facts: FleetFacts | None = None

    def begin(self, facts: FleetFacts, book: RuleSet) -> None:
        """Take the facts and the rules of the tick."""
        self._facts, self._book = facts, book

    def judged(self, rule: Rule) -> None:
        """A rule was judged, for every job that it is about."""
        self._rules = {**self._rules, rule.id: rule}

    def add(self, verdict: Verdict) -> None:
        """Keep the verdict that counted, where that is more than the facts alone tell."""
        self._known[verdict.rule_id, verdict.job_id] = verdict

    def get(self, pair: Pair) -> Verdict | None:
        """The verdict on (rule, job), or None if the rule is not about it, or was not judged."""
        known = self._known.get(pair)
        rule = self._rules.get(pair[0])
        if known is not None or rule is None or self._facts is None or self._book is None:
            return known
        job = evaluation.subjects(rule, self._facts).get(pair[1])
        if job is None or evaluation.applies(rule, job) is Truth.NO:
            return None
        return evaluation.evaluate(
            rule,
            job,
            self._facts,
            profiles=self._book.profiles,
            whitelist=self._book.whitelist,
            now=self._facts.time,
        )


@dataclass(slots=True)
class View:
    """One tick's sight of the fleet.

    Attributes:
        facts: None before the first completed tick.
        verdicts: of every pair that was judged.
        protected: pairs that the whitelist protects.
        blocks: why due cases were not ended.
        halted: reasons for which no job at all may be ended.
        shares: where too many owners are due at once, over all rules or by those of one file.
        halted_since: since when that is so, or None.
    """

    facts: FleetFacts | None = None
    verdicts: Verdicts = field(default_factory=Verdicts)
    protected: set[Pair] = field(default_factory=set)
    blocks: dict[Pair, tuple[Blocked, ...]] = field(default_factory=dict)
    halted: tuple[Blocked, ...] = ()
    shares: tuple[Blocked, ...] = ()
    halted_since: float | None = None

    def saved_at(self, job_id: str) -> float | None:
        """Unix time of the newest saved state of a job, or None where that is not known."""
        job = None if self.facts is None else self.facts.jobs.get(job_id)
        run = None if job is None or not job.fresh else job.run
        return None if run is None or run.conflict else run.checkpoint_time


def waiting_order(stored: StoredCase) -> tuple[float, float, str]:
    """By which due cases are sorted: the longest wait first."""
    return (-stored.case.due_for, stored.case.opened_at, stored.case.job_id)
