"""The engine's state while nothing real is told or ended: for inline tests and for replays.

Cases and guards are those of the engine. What is put in the place of the outer world: notices
arrive at once (or never), nobody keeps a job and the kill switch is off, unless that is said.
Trainers save when they are asked to, and no job heeds a request to leave: what happened is that it
stayed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from msgspec.structs import replace

from gpuwarden.ruleengine import canaries, cases, guards, notices
from gpuwarden.ruleengine.acts import ActState
from gpuwarden.ruleengine.cases import CaseState, Delivery, Event, Step
from gpuwarden.ruleengine.guards import PastEnd, Situation
from gpuwarden.ruleengine.settings import EngineSettings
from gpuwarden.ruleengine.verdicts import Truth

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from gpuwarden.ruleengine.cases import Case
    from gpuwarden.ruleengine.guards import Blocked
    from gpuwarden.ruleengine.model import Action, Rule, RuleSet, Stage
    from gpuwarden.ruleengine.verdicts import FleetFacts, Grade, JobFacts, Verdict
    from gpuwarden.ruleengine.views import Pair

_NOT_DELIVERED = Delivery()
_NONE_HELD: Mapping[str, str] = MappingProxyType({})
"""What people say of a trial is not known here: no rule falls back to warn."""
COOL_DOWN_SECONDS: float = EngineSettings.model_fields["cool_down"].default
"""The engine's, unless its settings say otherwise."""


@dataclass(frozen=True, slots=True)
class Judged:
    """What counts of one rule and one subject at one tick: the truth after the trust budget."""

    verdict: Verdict
    truth: Truth


@dataclass
class DryRun:
    """Cases of one rule set, and what would have been ended.

    Attributes:
        rules: what is judged.
        scrape_interval: of the nodes, in seconds.
        delivered: whether notices arrive; at once, if they do.
        cool_down: seconds between two ends of one owner's jobs.
        settle_after: seconds of unbroken ticks that must follow an outage.
        settled_for: such seconds so far; a dry run begins long after its engine's start.
        cases: open cases.
        ends: what would have been taken, in order of time; not a request that was not heeded.
        terminated: pairs whose job would have been ended: by terminate, or by requeue.
        done: pair -> the hardest that was done to its job.
        killed: whether the kill switch is on now.
        paused: who has paused enforcement now, until when and why, in words, or an empty string.
    """

    rules: RuleSet
    scrape_interval: float
    delivered: bool = True
    cool_down: float = COOL_DOWN_SECONDS
    settle_after: float = 0.0
    settled_for: float = float("inf")
    cases: dict[Pair, Case] = field(default_factory=dict)
    ends: list[PastEnd] = field(default_factory=list)
    terminated: set[Pair] = field(default_factory=set)
    done: dict[Pair, Action] = field(default_factory=dict)
    killed: bool = False
    paused: str = ""
    _kept_until: dict[Pair, float] = field(default_factory=dict)
    _keeps_used: dict[Pair, int] = field(default_factory=dict)
    _proven: dict[Pair, dict[tuple[str, str], float]] = field(default_factory=dict)
    _found: list[tuple[str, str, float]] = field(default_factory=list)
    _leaving: dict[Pair, tuple[PastEnd, float]] = field(default_factory=dict)
    """Pair -> the request to leave that stands, and until when."""

    def advance(
        self,
        rule: Rule,
        pair: Pair,
        truth: Truth | None,
        *,
        grades: Sequence[Grade],
        delta: float,
        time: float,
        user: str = "",
        outage: bool = False,
        worded: bool = False,
    ) -> Step | None:
        """Move a case by one tick, or open one.

        Args:
            rule: the rule.
            pair: the rule's id and the subject.
            truth: what counts, or None where nothing was judged.
            grades: of the verdict that counts.
            delta: seconds since the last completed tick.
            time: Unix time.
            user: the job's, if it is known.
            outage: whether ticks were missed before this one.
            worded: whether it would be YES but for what the job says of itself.

        Returns:
            What the tick made of the case, or None where there is none.
        """
        case = self.cases.get(pair)
        before: list[Event] = []
        if case is None:
            if truth is not Truth.YES:
                return None
            case, delta = cases.opened(rule, pair[1], wall=time), 0.0
        if user and user != case.user:
            case = replace(case, user=user)
        rule = canaries.applied(rule, case.user, _NONE_HELD)
        case = self._answered(rule, pair, case, time)
        if outage:
            case, before = cases.postponed(case, "after an outage everything is judged afresh")
        step = cases.advance(
            case,
            rule,
            truth=truth,
            grades=grades,
            delta=delta,
            wall=time,
            delivery=self.delivery(pair, case, rule),
            worded=worded,
        )
        if before:
            step = Step(step.case, (*before, *step.events), step.closed)
        if any(event.kind == "detected" for event in step.events):
            self._found.append((rule.id, pair[1], time))
        if step.closed is not None:
            self.forget(pair)
            return step
        self.cases[pair] = step.case
        asked = self._saved(rule, pair, time)
        if asked:
            step = Step(self.cases[pair], (*step.events, *asked))
        self._prove(pair, step.case, rule, time)
        return step

    def _prove(self, pair: Pair, case: Case, rule: Rule, time: float) -> None:
        """Notices that arrive do so in the tick that gives them."""
        if not self.delivered or not case.marks:
            return
        known = self._proven.setdefault(pair, {})
        for mark in notices.told_marks(case, rule):
            known.setdefault((case.user, notices.notice_stage(mark)), time)

    def keep(self, rule: Rule, pair: Pair, seconds: float, *, time: float) -> bool:
        """An owner puts the end of a job off, as far as the rule allows.

        Args:
            rule: the rule that announced it.
            pair: its case.
            seconds: by how much.
            time: Unix time.

        Returns:
            Whether it was granted.
        """
        may, used = notices.keep_allowance(rule), self._keeps_used.get(pair, 0)
        if may is None or seconds > may.keep or used >= may.times:
            return False
        if not self.put_off(rule, pair, seconds, time=time):
            return False
        self._keeps_used[pair] = used + 1
        return True

    def put_off(self, rule: Rule, pair: Pair, seconds: float, *, time: float) -> bool:
        """Move the deadline of a case by a keep that is granted.

        Args:
            rule: the rule that announced the end.
            pair: its case, as the last tick left it.
            seconds: by how much.
            time: Unix time of the grant.

        Returns:
            Whether there was a deadline to move.
        """
        case = self.cases.get(pair)
        if case is None or case.detected_at is None or case.over:
            return False
        rule = canaries.applied(rule, case.user, _NONE_HELD)
        if not rule.takes:
            return False
        left = cases.remaining(case, rule) or 0.0
        case, _ = cases.kept(case, rule, seconds)
        self.cases[pair] = self._stayed(pair, case, ActState.WITHDRAWN)
        self.promise(pair, time + left + seconds)
        return True

    def promise(self, pair: Pair, until: float) -> None:
        """A keep protects a job from a rule until a Unix time, whether it has a case now or not."""
        self._kept_until[pair] = max(until, self._kept_until.get(pair, 0.0))

    def forget(self, pair: Pair) -> None:
        """Drop a case that is over."""
        self._leaving.pop(pair, None)
        self.cases.pop(pair, None)
        self._proven.pop(pair, None)

    def delivery(self, pair: Pair, case: Case, rule: Rule) -> Delivery:
        """What is known of a case's notices."""
        if not case.marks:
            return _NOT_DELIVERED
        marks = notices.told_marks(case, rule)
        stages = [(case.user, notices.notice_stage(mark)) for mark in marks]
        known = self._proven.get(pair, {})
        if not stages or any(stage not in known for stage in stages):
            return _NOT_DELIVERED
        return Delivery(complete=True, proven_at=max(known[stage] for stage in stages))

    def due(self) -> list[Pair]:
        """Cases that are due, the longest wait first."""
        due = [pair for pair, case in self.cases.items() if case.state is CaseState.DUE]
        return sorted(
            due, key=lambda pair: (-self.cases[pair].due_for, self.cases[pair].opened_at, pair[1])
        )

    def owners(self, due: Collection[Pair]) -> set[str]:
        """One entry for each distinct owner of these cases."""
        return {guards.owner_key(self.cases[pair].user, pair[1]) for pair in due}

    def objections(
        self,
        rule: Rule,
        pair: Pair,
        facts: FleetFacts,
        *,
        job: JobFacts | None,
        judged: Judged | None,
        owners: Collection[str],
        ended: int,
        running: int | None = None,
    ) -> list[Blocked] | None:
        """Every reason against ending a case's job now; None where the rule ends no job.

        Args:
            rule: the rule.
            pair: of a case that is due.
            facts: of the fleet, at this tick.
            job: the job's, or None where it is gone.
            judged: what the rule says of it, or None.
            owners: of all cases that are due.
            ended: how many were ended in this tick.
            running: jobs that run, where `facts` holds only some of them.
        """
        case = self.cases[pair]
        rule = canaries.applied(rule, case.user, _NONE_HELD)
        following = cases.next_stage(case, rule)
        if following is None:
            return None
        key, stage = following
        limits = self.rules.limits
        situation = Situation(
            now=facts.time,
            scrape_interval=self.scrape_interval,
            limits=None if limits is None else limits.terminate,
            facts=facts,
            ends=self.ends,
            ended_this_tick=ended,
            ended_rules=[end.rule_id for end in self.ends if end.time == facts.time],
            groups=self.rules.groups,
            due_owners=owners,
            due_rules=guards.owners_by_rule(self.cases[each] for each in self.due()),
            killed=self.killed,
            paused=self.paused,
            settled_for=self.settled_for,
            settle_after=self.settle_after,
            cool_down=self.cool_down,
            running=running,
        )
        found = guards.blocks(
            situation,
            case,
            rule,
            key=key,
            stage=stage,
            job=job,
            verdict=None if judged is None else judged.verdict,
            truth=Truth.UNKNOWN if judged is None else judged.truth,
            delivery=self.delivery(pair, case, rule),
            kept_until=self._kept_until.get(pair),
        )
        on_trial = canaries.blocks(rule, case.user, _NONE_HELD)
        return [*found, *(on_trial or self._share(rule, pair[1], facts.time))]

    def _share(self, rule: Rule, job_id: str, time: float) -> list[Blocked]:
        """Whether one more end would be above what a rule on trial may do."""
        if rule.canary is None:
            return []
        since = time - rule.canary.back_to_warn.within
        found = {job for name, job, at in self._found if name == rule.id and at >= since}
        ended = sum(1 for end in self.ends if end.rule_id == rule.id and end.time >= since)
        return canaries.share_blocks(rule, found=len(found | {job_id}), ended=ended)

    def act(self, rule: Rule, pair: Pair, *, time: float) -> Event:
        """Do to a due case's job what its stage says, and what becomes of it.

        Args:
            rule: the rule; the case is due, and nothing speaks against it.
            pair: of the case.
            time: Unix time.
        """
        following = cases.next_stage(self.cases[pair], rule)
        if following is None:
            raise ValueError(f"rule {rule.id} has nothing to do to {pair[1]} now")
        key, stage = following
        case = self._decided(rule, pair, key, stage, time=time)
        past = PastEnd(time, case.user, rule.id, pair[1])
        self.ends.append(past)
        if stage.do.ends:
            self.cases[pair] = cases.settled(case, key, ActState.VERIFIED)
            self.terminated.add(pair)
        else:
            self._leaving[pair] = (past, time + cases.terms(case, key, stage).grace)
        return _done(key, stage, case)

    def _decided(self, rule: Rule, pair: Pair, key: str, stage: Stage, *, time: float) -> Case:
        case = cases.authorised(self.cases[pair], rule, key, key=key, wall=time)
        self.cases[pair] = case
        earlier = self.done.get(pair, stage.do)
        self.done[pair] = max(earlier, stage.do, key=lambda do: do.rank)
        return case

    def _saved(self, rule: Rule, pair: Pair, time: float) -> list[Event]:
        """Ask for a saved state where a stage says so; it is saved at once."""
        found: list[Event] = []
        stopped = self.killed or self.paused or self._kept_until.get(pair, 0.0) > time
        for key, stage in () if stopped else cases.asking_stages(self.cases[pair], rule):
            case = self._decided(rule, pair, key, stage, time=time)
            self.cases[pair] = cases.settled(case, key, ActState.DONE)
            found.append(_done(key, stage, case))
        return found

    def _answered(self, rule: Rule, pair: Pair, case: Case, time: float) -> Case:
        """What becomes of a request to leave with time: it is taken back, or was not heeded."""
        asked = self._leaving.get(pair)
        if asked is None:
            return case
        if cases.withdrawal(case, rule, kept=self._kept_until.get(pair, 0.0) > time):
            return self._stayed(pair, case, ActState.WITHDRAWN)
        return self._stayed(pair, case, ActState.UNHEEDED) if time >= asked[1] else case

    def _stayed(self, pair: Pair, case: Case, state: ActState) -> Case:
        """The case once its job has stayed, if it was asked to leave."""
        asked = self._leaving.pop(pair, None)
        if asked is None:
            return case
        self.ends.remove(asked[0])
        return cases.settled(case, case.decision_id or "", state)


def _done(key: str, stage: Stage, case: Case) -> Event:
    detail = {"stage": key, "level": stage.level, "elapsed": case.elapsed}
    return Event(stage.do.value, detail)
