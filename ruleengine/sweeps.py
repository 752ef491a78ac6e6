"""Sweeps: one rule over the whole fleet, and only what is not a plain NO comes back. Pure.

`evaluation` says what a rule means, condition by condition and with words for people. Most answers
of a tick are NO and are never read. So a rule is first turned into closures that know where in a
job's numbers their value lies, ask the cheapest condition first and stop at the first that decides.
Their answers are those of `evaluation.evaluate`: truth, reasons, protection, `self_report_only`
(a property test compares them on random rules and jobs). What people read always comes from there.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from gpuwarden import hours
from gpuwarden.ruleengine import evaluation, whitelists
from gpuwarden.ruleengine.conditions import All, Any_, Not, leaves
from gpuwarden.ruleengine.leaf_programs import NO, UNKNOWN, YES, Moment, leaf_programs
from gpuwarden.ruleengine.measures import Layout, Measures
from gpuwarden.ruleengine.model import Target
from gpuwarden.ruleengine.needs import condition_keys
from gpuwarden.ruleengine.verdicts import MAX_SKEW_SECONDS, Truth

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Container, Iterator, Sequence

    from gpuwarden.ruleengine.conditions import Condition
    from gpuwarden.ruleengine.leaf_programs import LeafProgram
    from gpuwarden.ruleengine.model import Rule, WhitelistEntry
    from gpuwarden.ruleengine.profiles import Expectations
    from gpuwarden.ruleengine.verdicts import FleetFacts, JobFacts

    _Program = Callable[[JobFacts, array[float], float], int]
    _Part = tuple[int, _Program]
    """What a condition costs, and its program."""

__all__ = ["Finding", "Sweeper"]


class Finding(NamedTuple):
    """What a rule found of one job.

    Attributes:
        job: the job, or the card.
        truth: as `evaluation.evaluate` says.
        reasons: of UNKNOWN, as `Verdict.unknown_reasons`; else empty.
        self_report_only: whether it would be YES but for the job's word; of a YES, whose stages
            may have conditions of their own, only `evaluation` tells.
        protected: whether the whitelist protects it; the truth is then NO.
    """

    job: JobFacts
    truth: Truth
    reasons: tuple[str, ...] = ()
    self_report_only: bool = False
    protected: bool = False


class _Subject(NamedTuple):
    """A job, its numbers in the sweep's layout, and when its time began (inf: not known)."""

    job_id: str
    job: JobFacts
    numbers: array[float]
    begin: float


class Sweeper:
    """Rules over one tick's facts.

    Args:
        fleet: the facts.
        rules: all that will be asked for.
        expectations: what jobs should show, by the rules' profiles; may outlive the tick.
        whitelist: protections, or None if they could not be read: then everything is protected.
        now: Unix time to which the facts belong.
    """

    def __init__(
        self,
        fleet: FleetFacts,
        rules: Sequence[Rule],
        *,
        expectations: Expectations,
        whitelist: Sequence[WhitelistEntry] | None,
        now: float,
    ) -> None:
        self._fleet = fleet
        self._rules = rules
        self._expectations = expectations
        self._whitelist = whitelist
        self._now = now
        self._subjects: dict[Target, tuple[Layout, list[_Subject]]] = {}
        self._quiet: dict[str, int] = {}

    def findings(self, rule: Rule, *, watched: Container[str] = ()) -> Iterator[Finding]:
        """Judge every job that a rule is about.

        Args:
            rule: one of the rules.
            watched: jobs, or cards, of which a plain NO is told too.

        Yields:
            All others whose verdict is not a plain NO: YES, UNKNOWN, protected, or NO only by the
            job's word.
        """
        layout, subjects = self._laid_out(rule)
        within = hours.within(rule.only_during, self._now)
        quiet = 0
        judge = _Judge(rule, layout, Moment(self._fleet, self._expectations, self._now))
        plainly_no = judge.shortcut()
        matched, shielded = _matcher(rule), self._shield(rule)
        for job_id, job, numbers, begin in subjects:
            if matched is not None and matched(job) is Truth.NO:
                continue
            if not within:
                if job_id in watched:
                    yield Finding(job, Truth.NO)
                else:
                    quiet += 1
                continue
            shield = Truth.NO if shielded is None else shielded(job)
            if shield is Truth.YES:
                yield Finding(job, Truth.NO, protected=True)
            elif not job.fresh:
                yield Finding(job, Truth.UNKNOWN, (job.not_fresh_reason or "dark_node",))
            elif shield is Truth.UNKNOWN:
                yield Finding(job, Truth.UNKNOWN, ("whitelist",))
            else:
                found = None if plainly_no(job, numbers, begin) else judge(job, numbers, begin)
                if found is not None:
                    yield found
                elif job_id in watched:
                    yield Finding(job, Truth.NO)
                else:
                    quiet += 1
        self._quiet[rule.id] = quiet

    def in_question(self, rule: Rule) -> Iterator[str]:
        """The jobs for which values that are not known yet can count.

        All others are out of the rule's hours, protected, not fresh, or NO with what is known: of
        them the verdict stays as it is, and so do its reasons.

        Args:
            rule: one of the rules.
        """
        if not hours.within(rule.only_during, self._now):
            return
        layout, subjects = self._laid_out(rule)
        judge = _Judge(rule, layout, Moment(self._fleet, self._expectations, self._now))
        matched, shielded = _matcher(rule), self._shield(rule)
        for job_id, job, numbers, begin in subjects:
            if (
                job.fresh
                and (matched is None or matched(job) is not Truth.NO)
                and (shielded is None or shielded(job) is Truth.NO)
                and judge.open(job, numbers, begin)
            ):
                yield job_id

    def quiet(self, rule: Rule) -> int:
        """How many plain NOs the last sweep of a rule left out, once it has come to its end."""
        return self._quiet.get(rule.id, 0)

    def _laid_out(self, rule: Rule) -> tuple[Layout, list[_Subject]]:
        """The rule's subjects with their numbers; the same for every rule with this target."""
        target = rule.target
        if target not in self._subjects:
            jobs = evaluation.subjects(rule, self._fleet)
            gathered = (each.values for each in jobs.values())
            layout = next((v.layout for v in gathered if isinstance(v, Measures)), None)
            if layout is None:
                layout = Layout(key for each in self._rules for key in condition_keys(each.when))
            self._subjects[target] = (
                layout,
                [
                    _Subject(job_id, job, _numbers(job, layout), _begin(job, target))
                    for job_id, job in jobs.items()
                ],
            )
        return self._subjects[target]

    def _shield(self, rule: Rule) -> Callable[[JobFacts], Truth] | None:
        """What the whitelist says of a job, or None where it has nothing for this rule."""
        entries, now = self._whitelist, self._now
        if entries is not None:
            entries = [
                entry
                for entry in entries
                if rule.id in entry.rules and entry.expires.timestamp() > now
            ]
            if not entries:
                return None
        return lambda job: whitelists.protection(rule.id, job, entries, now=now)[0]


def _numbers(job: JobFacts, layout: Layout) -> array[float]:
    if isinstance(job.values, Measures) and job.values.layout is layout:
        return job.values.numbers
    return layout.packed(job.values, [gpu.uuid for gpu in job.gpus])


def _begin(job: JobFacts, target: Target) -> float:
    if target is Target.GPU:
        return -math.inf
    if job.first_gpu_use is not None:
        return job.first_gpu_use
    return math.inf if job.start_time is None else job.start_time


def _matcher(rule: Rule) -> Callable[[JobFacts], Truth] | None:
    """`evaluation.applies`, asked once for each combination of labels; None for a rule for all."""
    if not rule.team and not rule.match:
        return None
    known: dict[object, Truth] = {}

    def matched(job: JobFacts) -> Truth:
        labels = (job.fresh, job.team, *(tuple(evaluation.labels(k, job)) for k in rule.match))
        found = known.get(labels)
        if found is None:
            found = known[labels] = evaluation.applies(rule, job)
        return found

    return matched


class _Judge:
    """One rule's conditions behind its gates."""

    def __init__(self, rule: Rule, layout: Layout, moment: Moment) -> None:
        self._now = moment.now
        self._cold, self._phases = rule.cold_start, rule.ignore_phases
        self._leaves = [
            program
            for leaf in leaves(rule.when)
            for program in leaf_programs(leaf, rule, layout, moment)
        ]
        self._truth = _tree(rule.when, rule, layout, moment)[1]
        self._listens = evaluation.listens(rule)
        # What is found without the job's word.
        self._plain = _tree(rule.when, rule, layout, replace(moment, trusted=False))[1]

    def __call__(self, job: JobFacts, numbers: array[float], begin: float) -> Finding | None:
        """What is found of a job, None for a plain NO."""
        warm = begin + self._cold
        if self._now < warm:
            return self._unknown(job, numbers, warm, gate=_cold(begin, self._now))
        gate = self._phase(job) if self._phases else ""
        code = UNKNOWN if gate else self._truth(job, numbers, warm)
        if code == YES:
            return Finding(job, Truth.YES)
        only = self._listens and self._plain(job, numbers, warm) == YES
        if code == UNKNOWN:
            return self._unknown(job, numbers, warm, gate=gate, only=only)
        return Finding(job, Truth.NO, self_report_only=True) if only else None

    def shortcut(self) -> Callable[[JobFacts, array[float], float], bool]:
        """Says at little cost of most jobs that `__call__` finds a plain NO."""
        now, cold, truth = self._now, self._cold, self._truth
        if self._listens or self._phases:
            return lambda _job, _numbers, _begin: False

        def plainly_no(job: JobFacts, numbers: array[float], begin: float) -> bool:
            warm = begin + cold
            return now >= warm and truth(job, numbers, warm) == NO

        return plainly_no

    def open(self, job: JobFacts, numbers: array[float], begin: float) -> bool:
        """Whether more numbers could make of it anything but what `__call__` says now."""
        warm = begin + self._cold
        if self._now < warm or (self._phases and self._phase(job)):
            return True  # UNKNOWN, for reasons that depend on them
        if self._truth(job, numbers, warm) != NO:
            return True
        return self._listens and self._plain(job, numbers, warm) != NO

    def _phase(self, job: JobFacts) -> str:
        """Why the job's phase keeps the rule from being judged, or an empty string."""
        run = job.run
        if run is None:
            return ""
        if run.conflict:
            return "run_conflict"
        limit = next((age for name, age in self._phases.items() if name == run.phase), None)
        if limit is None:
            return ""
        since, now = run.phase_since, self._now
        late = since is not None and since <= now + MAX_SKEW_SECONDS and now - since >= limit
        return "" if late else "phase"

    def _unknown(
        self,
        job: JobFacts,
        numbers: array[float],
        warm: float,
        *,
        gate: str = "",
        only: bool = False,
    ) -> Finding:
        found = {why for leaf in self._leaves for why in leaf.reasons(job, numbers, warm)}
        if gate:
            found.add(gate)
        return Finding(job, Truth.UNKNOWN, tuple(sorted(found)), self_report_only=only)


def _cold(begin: float, now: float) -> str:
    """Why a job is not warm."""
    if math.isinf(begin):
        return "no_start"
    return "clock_skew" if begin > now + MAX_SKEW_SECONDS else "cold_start"


def _tree(condition: Condition, rule: Rule, layout: Layout, moment: Moment) -> _Part:
    """A condition with what is below it."""
    match condition:
        case All():
            return _least([_tree(part, rule, layout, moment) for part in condition.all])
        case Any_():
            return _greatest([_tree(part, rule, layout, moment) for part in condition.any])
        case Not():
            cost, program = _tree(condition.not_, rule, layout, moment)
            return cost, lambda job, numbers, warm: YES - program(job, numbers, warm)
    return _greatest([_part(program) for program in leaf_programs(condition, rule, layout, moment)])


def _part(program: LeafProgram) -> _Part:
    return program.cost, program.truth


def _least(parts: list[_Part]) -> _Part:
    """Kleene's conjunction; the order does not matter for its answer, only for its price."""
    programs = _cheapest_first(parts)

    def program(job: JobFacts, numbers: array[float], warm: float) -> int:
        least = YES if programs else UNKNOWN
        for each in programs:
            code = each(job, numbers, warm)
            if code == NO:
                return NO
            if code == UNKNOWN:
                least = UNKNOWN
        return least

    return sum(cost for cost, _ in parts), programs[0] if len(programs) == 1 else program


def _greatest(parts: list[_Part]) -> _Part:
    """Kleene's disjunction, likewise."""
    programs = _cheapest_first(parts)

    def program(job: JobFacts, numbers: array[float], warm: float) -> int:
        greatest = NO if programs else UNKNOWN
        for each in programs:
            code = each(job, numbers, warm)
            if code == YES:
                return YES
            if code == UNKNOWN:
                greatest = UNKNOWN
        return greatest

    return sum(cost for cost, _ in parts), programs[0] if len(programs) == 1 else program


def _cheapest_first(parts: list[_Part]) -> list[_Program]:
    return [program for _, program in sorted(parts, key=lambda part: part[0])]
