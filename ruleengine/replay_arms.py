"""One rule set going through history: its verdicts counted, its cases advanced, its ends decided.

Time passes as for the live engine: tick by tick, with cases, notices, limits and guards of the
live code. A tick at which the server knew nothing at all is one that the live engine would have
discarded: nothing changes, and the time it stood for is counted up to the same bound.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from gpuwarden.ruleengine import guards
from gpuwarden.ruleengine.causes import diagnose
from gpuwarden.ruleengine.dry_runs import Judged
from gpuwarden.ruleengine.replay_incidents import (
    End,
    Entered,
    Incident,
    RuleCounts,
    Stale,
    missing_metadata,
)
from gpuwarden.ruleengine.replay_people import Promises
from gpuwarden.ruleengine.replay_screens import NOT_JUDGED, TRUTHS, UNKNOWN, YES, Judge, Look
from gpuwarden.ruleengine.ticks import OUTAGE_TICKS
from gpuwarden.ruleengine.verdicts import Truth
from gpuwarden.ruleengine.whitelists import matches

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from gpuwarden.ruleengine.cases import Event, Step
    from gpuwarden.ruleengine.dry_runs import DryRun
    from gpuwarden.ruleengine.guards import Blocked
    from gpuwarden.ruleengine.model import Rule
    from gpuwarden.ruleengine.replay_frames import Frame, Group
    from gpuwarden.ruleengine.replay_screens import Situation, Track
    from gpuwarden.ruleengine.verdicts import JobFacts
    from gpuwarden.ruleengine.views import Pair

    Floats = NDArray[np.float64]
    Numbers = NDArray[np.int64]

ACTIVE_ABOVE: Final = 0.2
"""A card busier than this is at work."""
STALE_REASONS: Final = frozenset({"dark_node", "clock_skew", "no_data", "no_gpus"})
"""Reasons for which nothing is known because samples are missing or too old."""
CAP_REASONS: Final = (
    "share_of_running",
    "limit_per_tick",
    "limit_per_hour",
    "limit_per_user_per_day",
    "cool_down",
)
"""Guards that stand for limits."""


@dataclass(frozen=True, slots=True)
class _Moment:
    """What is known of a pair at a tick.

    Attributes:
        situation: of the pair, or None.
        judged: what counts, or None.
        worded: whether only the job's own word stands against a YES.
    """

    situation: Situation | None
    judged: Judged | None
    worded: bool


@dataclass
class _Course:
    """A pair on its way through a stretch.

    Attributes:
        codes: at each tick, the truth that counts, as a code of replay_screens.
        over: ticks at which the job's own word counts no more.
        yes: ticks of those that are YES.
    """

    track: Track | None
    codes: Numbers
    over: NDArray[np.bool_]
    yes: Numbers

    def next_yes(self, tick: int) -> int | None:
        """The first YES from a tick on, or None."""
        place = int(np.searchsorted(self.yes, tick))
        return int(self.yes[place]) if place < len(self.yes) else None

    @functools.cached_property
    def moments(self) -> Sequence[_Moment]:
        """What is known of the pair at each tick; equal ones are one object."""
        track = self.track
        if track is None:
            return [_Moment(None, None, worded=False)] * len(self.codes)

        @functools.cache
        def moment(place: int, code: int, over: bool, own: bool) -> _Moment:
            situation = track.situations[place]
            judged = None
            if situation is not None and code in TRUTHS:
                counts = situation.plain if over else situation.verdict
                judged = Judged(counts, TRUTHS[code])
            return _Moment(situation, judged, worded=own and not over)

        columns = (track.index, self.codes, self.over, track.self_report)
        return list(map(moment, *(column.tolist() for column in columns)))

    def held(self, tick: int) -> tuple[JobFacts | None, Judged | None]:
        """What guards look at, without another evaluation: a job that is held is so for hours.

        Of the job that is what its situation has, and when its state was last saved.
        """
        moment = self.moments[tick]
        if moment.situation is None or self.track is None or moment.judged is None:
            return None, None
        job = moment.situation.job
        if job.run is not None and not job.run.conflict:
            saved = self.track.group.saved(job.job_id, tick)
            job = dataclasses.replace(job, run=dataclasses.replace(job.run, checkpoint_time=saved))
        return job, moment.judged


@dataclass
class _Walk:
    """A stretch, and the pairs that something happens to."""

    frame: Frame
    judge: Judge
    courses: dict[Pair, _Course]

    def look(self, pair: Pair, tick: int) -> Look:
        """The live verdict on a pair at this very tick, if somebody asks for it."""
        course = self.courses[pair]
        truth = TRUTHS.get(int(course.codes[tick]))
        return Look(self.judge, course.track, tick, truth=truth, over=bool(course.over[tick]))


@dataclass
class Clock:
    """What time means at each tick of a stretch, and what is carried to the next one.

    Attributes:
        tick: seconds from one to the next.
        last: Unix time of the last completed tick, or None before the first.
    """

    tick: float
    last: float | None = None

    def deltas(self, frame: Frame) -> tuple[Floats, NDArray[np.bool_]]:
        """Seconds that count at each tick, and whether an outage was before it.

        At blind ticks both mean nothing.
        """
        longest = OUTAGE_TICKS * self.tick
        deltas = np.zeros(frame.ticks.count)
        outages = np.zeros(frame.ticks.count, dtype=bool)
        for number in np.flatnonzero(~frame.blind):
            now = frame.ticks.begin + frame.ticks.step * int(number)
            if self.last is not None:
                deltas[number] = min(now - self.last, longest)
                outages[number] = now - self.last > longest
            self.last = now
        return deltas, outages


class IdleTimes:
    """When each job was last at work, as far as the replay has seen."""

    def __init__(self) -> None:
        self._before: dict[str, float] = {}
        self._frame: Frame | None = None

    def enter(self, frame: Frame) -> None:
        """Go on to the next stretch."""
        if self._frame is not None:
            last = self._frame.ticks.count - 1
            for job in self._frame.activity:
                at = self.at(job, last)
                if at is not None:
                    self._before[job] = at
        self._frame = frame

    def at(self, job: str, tick: int) -> float | None:
        """Unix time at which a job was last at work up to a tick, or None."""
        values = None if self._frame is None else self._frame.activity.get(job)
        if self._frame is None or values is None:
            return self._before.get(job)
        busy = np.flatnonzero(values[: tick + 1] > ACTIVE_ABOVE)
        if not len(busy):
            return self._before.get(job)
        return self._frame.ticks.begin + self._frame.ticks.step * int(busy[-1])


@dataclass
class Arm:
    """One rule set.

    Attributes:
        name: what it is called in the report.
        run: its cases, as of the last tick.
        counts: by rule.
        incidents: cases that came to `for`, in the order of that.
        ended: jobs that would have been ended -> when; their history goes on without them.
        caps: (reason, time, how many cases were due) of each tick at which a limit held some.
        stale: where only the freshness of data stood between a rule and a job.
        trust: seconds for which a job's own word has protected it.
        evaluations: of the live code.
        keep_evidence: whether evidence is gathered at each stage.
        promises: what people did then, under these rules.
    """

    name: str
    run: DryRun
    counts: dict[str, RuleCounts] = field(default_factory=dict)
    incidents: list[Incident] = field(default_factory=list)
    ended: dict[str, float] = field(default_factory=dict)
    caps: list[tuple[str, float, int]] = field(default_factory=list)
    stale: list[Stale] = field(default_factory=list)
    trust: dict[Pair, float] = field(default_factory=dict)
    evaluations: int = 0
    keep_evidence: bool = True
    promises: Promises = field(default_factory=Promises)
    _open: dict[Pair, Incident] = field(default_factory=dict)
    _instances: dict[Pair, str] = field(default_factory=dict)
    _runs: dict[str, str] = field(default_factory=dict)
    """Job -> the run that it was last known by, of jobs that broke a rule."""
    _streaks: dict[Pair, float] = field(default_factory=dict)
    _idle_times: IdleTimes = field(default_factory=IdleTimes)

    def __post_init__(self) -> None:
        self._rules = {rule.id: rule for rule in self.run.rules.rules}
        self.counts = {rule_id: RuleCounts() for rule_id in self._rules}

    def pass_through(
        self,
        frame: Frame,
        groups: Sequence[Group],
        deltas: Floats,
        outages: NDArray[np.bool_],
        idle_since: IdleTimes,
    ) -> None:
        """Go through one stretch.

        Args:
            frame: the stretch.
            groups: of it.
            deltas: seconds that count at each tick.
            outages: ticks before which there was an outage.
            idle_since: when jobs were last at work.
        """
        judge = Judge(self.run.rules, frame)
        courses: dict[Pair, _Course] = {}
        for group in groups:
            for rule in self.run.rules.rules:
                for track in judge.tracks(rule, group):
                    course = self._course(track, frame, deltas)
                    pair = (rule.id, track.subject)
                    if len(course.yes) or pair in self.run.cases:
                        courses[pair] = course
        for pair in self.run.cases:
            if pair not in courses:
                # Nothing at all is known of it any more.
                gone = np.full(frame.ticks.count, NOT_JUDGED, dtype=np.int64)
                courses[pair] = _Course(None, gone, gone == YES, gone[:0])
        self._idle_times = idle_since
        self._walk(_Walk(frame, judge, courses), deltas, outages)
        self.evaluations += judge.evaluations

    def _walk(self, walk: _Walk, deltas: Floats, outages: NDArray[np.bool_]) -> None:
        """Visit, at each tick, the pairs that have a case or get one."""
        frame = walk.frame
        agenda: dict[int, list[Pair]] = defaultdict(list)
        for pair, course in sorted(walk.courses.items()):
            first = 0 if pair in self.run.cases else course.next_yes(0)
            if first is not None:
                agenda[first].append(pair)
        for tick in range(frame.ticks.count):
            pairs = agenda.pop(tick, ())
            if frame.blind[tick]:
                agenda[tick + 1] += pairs
                continue
            delta, outage = float(deltas[tick]), bool(outages[tick])
            self.run.settled_for = 0.0 if outage else self.run.settled_for + delta
            self.run.paused = self.promises.paused(frame.ticks.begin + frame.ticks.step * tick)
            for pair in sorted(pairs):
                if self._visit(walk, pair, tick, delta=delta, outage=outage):
                    agenda[tick + 1].append(pair)
                else:
                    later = walk.courses[pair].next_yes(tick + 1)
                    if later is not None:
                        agenda[later].append(pair)
            self._enforce(walk, tick)

    def _visit(self, walk: _Walk, pair: Pair, tick: int, *, delta: float, outage: bool) -> bool:
        """Move one pair by one tick; whether it has a case now."""
        rule, moment = self._rules[pair[0]], walk.courses[pair].moments[tick]
        if pair[1] in self.ended:
            return False
        time = walk.frame.ticks.begin + walk.frame.ticks.step * tick
        situation, judged = moment.situation, moment.judged
        truth = None if judged is None else judged.truth
        if situation is not None:
            self._instances[pair] = situation.job.instance
        elif not walk.frame.lit(self._instances.get(pair, ""), tick):
            truth = Truth.UNKNOWN  # of a node that is not lit nothing is known
        if self.promises:
            self._kept(rule, pair, None if situation is None else situation.job, time)
        step = self.run.advance(
            rule,
            pair,
            truth,
            grades=() if judged is None else judged.verdict.grades,
            delta=delta,
            time=time,
            user="" if situation is None else situation.job.user,
            outage=outage,
            worded=moment.worded,
        )
        if step is not None and (step.events or step.closed is not None):
            self._noted(pair, step, time, walk.look(pair, tick))
        if pair in self.run.cases:
            return True
        self._instances.pop(pair, None)
        return False

    def _kept(self, rule: Rule, pair: Pair, job: JobFacts | None, time: float) -> None:
        """What people did about a case since the last tick."""
        if job is not None and job.run is not None and not job.run.conflict:
            self._runs[pair[1]] = job.run.run_id
        for grant in self.promises.granted(pair, self._runs.get(pair[1]), time):
            own, at = grant.keep.job_id == pair[1], grant.keep.granted_at
            if own and grant.seconds and self.run.put_off(rule, pair, grant.seconds, time=at):
                grant.moved.add(pair[1])
                if pair in self._open:
                    self._open[pair].kept_by.add(grant.keep.by)
            else:
                self.run.promise(pair, grant.until)

    # -- counting

    def _course(self, track: Track, frame: Frame, deltas: Floats) -> _Course:
        pair = (track.rule.id, track.subject)
        codes, over = track.trusted, np.zeros(frame.ticks.count, dtype=bool)
        seen = ~frame.blind
        if track.self_report.any():
            # The time of a tick counts from the next one on, as in the engine.
            own = np.where(track.self_report & seen, deltas, 0.0)
            used = np.cumsum(np.concatenate(([self.trust.get(pair, 0.0)], own)))
            over = track.self_report & (used[:-1] >= track.rule.trust_for)
            codes = np.where(over, track.plain, codes)
            self.trust[pair] = float(used[-1])
        self._count(track, codes, seen)
        if track.rule.ends:
            self._count_stale(track, codes, frame)
        return _Course(track, codes, over, np.flatnonzero((codes == YES) & seen))

    def _count(self, track: Track, codes: Numbers, seen: NDArray[np.bool_]) -> None:
        counts = self.counts[track.rule.id]
        judged = seen & (codes != NOT_JUDGED)
        if not judged.any():
            return
        counts.subjects.add(track.subject)
        counts.judged += int(np.count_nonzero(judged))
        counts.yes += int(np.count_nonzero(codes[judged] == YES))
        unknown = np.bincount(
            track.index[judged & (codes == UNKNOWN)], minlength=len(track.situations)
        )
        for number, ticks in enumerate(unknown):
            situation = track.situations[number]
            if ticks and situation is not None:
                counts.unknown += int(ticks)
                for reason in situation.verdict.unknown_reasons or ("unknown",):
                    counts.reasons[reason] += int(ticks)
        for number, situation in enumerate(track.situations):
            if situation is not None and situation.verdict.protected:
                counts.protected += int(np.count_nonzero(judged & (track.index == number)))

    def _count_stale(self, track: Track, codes: Numbers, frame: Frame) -> None:
        """Find where a rule that takes the last thing it saw for now would have ended the job."""
        last = [item for item in track.rule.taking_stages if item[1].do.ends][:1]
        pair = (track.rule.id, track.subject)
        yes, streak = codes == YES, self._streaks.get(pair, 0.0)
        if not last or not (yes.any() or streak):
            self._streaks.pop(pair, None)
            return
        blind = [
            situation is not None and bool(STALE_REASONS & set(situation.verdict.unknown_reasons))
            for situation in track.situations
        ]
        stale = (codes == UNKNOWN) & np.array(blind, dtype=bool)[track.index]
        needed, step = track.rule.for_ + last[0][1].after, frame.ticks.step
        for tick in range(len(codes)):
            if yes[tick] or (stale[tick] and streak):
                streak += step
                if stale[tick] and streak - step < needed <= streak:
                    at = frame.ticks.begin + tick * step
                    self.stale.append(Stale(pair[0], pair[1], at))
            else:
                streak = 0.0
        self._streaks[pair] = streak

    # -- incidents

    def _noted(self, pair: Pair, step: Step, time: float, look: Look) -> None:
        """Write down what a tick made of a case."""
        incident = self._open.get(pair)
        for event in step.events:
            if event.kind == "detected":
                incident = self._detected(pair, step, look)
            elif incident is not None:
                self._event(incident, event, time, look)
        if step.closed is not None and pair in self._open:
            self._close(pair, step.closed.value, time)

    def _detected(self, pair: Pair, step: Step, look: Look) -> Incident:
        judged = look.judged if self.keep_evidence else None
        job = look.situation.job if look.situation is not None else None
        incident = Incident(
            rule=pair[0],
            subject=pair[1],
            user=step.case.user,
            team=job.team if job is not None else "",
            gpus=len(job.gpus) if job is not None else 0,
            instances=job.instances if job is not None else (),
            begun=step.case.opened_at,
            detected=step.case.detected_at or step.case.opened_at,
            idle_since=self._idle_times.at(pair[1], look.tick),
            metadata_missing=missing_metadata(job) if job is not None else (),
        )
        if job is not None and judged is not None:
            cause = diagnose(
                job, judged.verdict, self.run.rules.profiles, team=self._rules[pair[0]].team
            )
            incident.cause, incident.because = cause.name, cause.because
            # What stages ask beside the rule is told where they are entered.
            incident.evidence = judged.verdict.evidence
        self.incidents.append(incident)
        self._open[pair] = incident
        return incident

    def _event(self, incident: Incident, event: Event, time: float, look: Look) -> None:
        stage = event.detail.get("stage")
        if event.kind == "due":
            incident.due = incident.due or time
        if stage is None or event.kind == "due":
            return
        judged = look.judged if self.keep_evidence else None
        incident.stages.append(
            Entered(
                stage=str(stage),
                level=str(event.detail["level"]),
                do=event.kind,
                at=time,
                evidence=() if judged is None else judged.verdict.whole_evidence,
            )
        )

    def _close(self, pair: Pair, reason: str, time: float) -> None:
        """An incident is over."""
        incident = self._open.pop(pair, None)
        if incident is not None:
            incident.closed, incident.closed_because = time, reason

    # -- ends

    def _enforce(self, walk: _Walk, tick: int) -> None:
        """Ask the guards for every due case, longest wait first."""
        due = self.run.due()
        if not due:
            return
        frame = walk.frame
        fleet, owners, ended = frame.fleet(tick), self.run.owners(due), 0
        running = int(frame.running[tick])
        held: Counter[str] = Counter()
        for pair in due:
            if pair[1] in self.ended:
                continue
            rule = self._rules[pair[0]]

            def objections(
                job: JobFacts | None,
                judged: Judged | None,
                *,
                rule: Rule = rule,
                pair: Pair = pair,
                ended: int = ended,
            ) -> list[Blocked] | None:
                return self.run.objections(
                    rule,
                    pair,
                    fleet,
                    job=job,
                    judged=judged,
                    owners=owners,
                    ended=ended,
                    running=running,
                )

            blocks = objections(*walk.courses[pair].held(tick))
            look = walk.look(pair, tick)
            if blocks is not None and not blocks:
                # The last look is at this very tick.
                blocks = objections(
                    None if look.situation is None else look.situation.job, look.judged
                )
            if blocks is None:
                continue
            incident = self._open.get(pair)
            for block in blocks:
                held[block.reason] += 1
                if incident is not None:
                    incident.held.setdefault(block.reason, block.sentence)
            if not blocks:
                self._end(pair, rule, fleet.time, look, incident)
                ended += 1
            else:
                self._held_by_people(pair, blocks, fleet.time)
        self.caps += [(reason, fleet.time, held[reason]) for reason in CAP_REASONS if held[reason]]

    def _held_by_people(self, pair: Pair, blocks: Sequence[Blocked], time: float) -> None:
        """Write down whose keep or pause it is, where nothing else speaks against a case's end."""
        if not self.promises or len(blocks) != 1:
            return
        whose = self.promises.held(pair, blocks[0].reason, time)
        if pair in self._open:
            self._open[pair].kept_by.update(whose)

    def _end(
        self, pair: Pair, rule: Rule, time: float, look: Look, incident: Incident | None
    ) -> None:
        event = self.run.act(rule, pair, time=time)
        if pair not in self.run.terminated:
            if incident is not None:
                self._event(incident, event, time, look)
            return
        self.ended[pair[1]] = time
        situation = look.situation
        if incident is not None and situation is not None:
            entries = self.run.rules.whitelist
            incident.end = End(
                at=time,
                do=event.kind,
                gpus=len(situation.job.gpus),
                work_lost=guards.work_lost(situation.job, time),
                exempt=next(
                    (e.reason for e in entries if matches(e, situation.job) is Truth.YES), ""
                ),
                kept=self.promises.kept(pair[1], self._runs.get(pair[1]), time),
            )
        # The job is gone: whatever else was open about it is over.
        for other in [known for known in self.run.cases if known[1] == pair[1]]:
            self.run.forget(other)
            self._close(other, "ended", time)
