"""Judging a stretch of history by its distinct situations, with the live engine's own verdicts.

For one rule and one subject every tick gets a code: all that the verdict depends on, each measure
taken only as far as the rule looks at it (which side of its limit, older or younger than so much).
Where two ticks have the same code the verdict is the same, so that one evaluation speaks for both.
A condition or a key of a rule that is not known here makes every tick a situation of its own:
slower, and never wrong.
"""

from __future__ import annotations

import bisect
import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from gpuwarden import hours
from gpuwarden.errors import PermanentError
from gpuwarden.ruleengine import evaluation, signals
from gpuwarden.ruleengine.conditions import (
    NeedsMemory,
    NoProgress,
    OverBudget,
    ProfileCondition,
    Promql,
    Signal,
    SilentFor,
    leaves,
)
from gpuwarden.ruleengine.dry_runs import Judged
from gpuwarden.ruleengine.model import Target
from gpuwarden.ruleengine.profiles import expectation
from gpuwarden.ruleengine.verdicts import MAX_SKEW_SECONDS, Truth

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from gpuwarden.quantities import Deviation
    from gpuwarden.ruleengine.conditions import Comparing
    from gpuwarden.ruleengine.model import Rule, RuleSet
    from gpuwarden.ruleengine.profiles import Expected
    from gpuwarden.ruleengine.replay_frames import Frame, Group
    from gpuwarden.ruleengine.verdicts import JobFacts, SignalKey, Verdict

    Bools = NDArray[np.bool_]
    Floats = NDArray[np.float64]
    Numbers = NDArray[np.int64]
    Holds = Callable[[Floats], Bools]

NOT_JUDGED: Final = -1
NO: Final = 0
UNKNOWN: Final = 1
YES: Final = 2
CODES: Final = {Truth.NO: NO, Truth.UNKNOWN: UNKNOWN, Truth.YES: YES}
TRUTHS: Final = {code: truth for truth, code in CODES.items()}
KNOWN_KEYS: Final = frozenset(
    {
        "id",
        "description",
        "mode",
        "target",
        "team",
        "match",
        "only_during",
        "only_if_waiting",
        "cold_start",
        "ignore_phases",
        "when",
        "for_",
        "clear_after",
        "trust_for",
        "stages",
    }
)
"""Keys of a rule whose part in a verdict is known here; any other one makes every tick distinct."""
_MOST = 2**62


@dataclass(frozen=True, slots=True)
class Situation:
    """What a rule says of a subject in one situation: with and without the job's own word."""

    verdict: Verdict
    plain: Verdict
    job: JobFacts


@dataclass(frozen=True, slots=True)
class Track:
    """What a rule says of a subject at each tick of a stretch.

    Attributes:
        rule: the rule.
        group: where the subject belongs.
        subject: job or card.
        situations: the distinct ones; None where the rule is not about it, or it is not there.
        index: at each tick, which of them.
        trusted, plain: at each tick, the truth with and without the job's own word, as a code.
        self_report: ticks at which only the job's own word makes the difference.
    """

    rule: Rule
    group: Group
    subject: str
    situations: Sequence[Situation | None]
    index: Numbers
    trusted: Numbers
    plain: Numbers
    self_report: Bools


class ScreenDisagrees(PermanentError):
    """Two ticks were taken for the same situation, and are not: a fault of gpuwarden."""


class Judge:
    """One rule set over one stretch.

    Args:
        rules: whose profiles and whitelist count.
        frame: the stretch.
    """

    def __init__(self, rules: RuleSet, frame: Frame) -> None:
        self._rules = rules
        self._frame = frame
        self._times = frame.ticks.times
        self.evaluations = 0

    def tracks(self, rule: Rule, group: Group) -> Iterator[Track]:
        """What a rule says of each subject of a group."""
        names = group.jobs if rule.target is Target.JOB else group.cards
        for name in names:
            codes = _Coder(rule, group, name, self._rules, self._times).codes()
            yield self._track(rule, group, name, codes)

    def evaluate(self, rule: Rule, group: Group, name: str, tick: int) -> Situation | None:
        """The live verdict at one tick, or None where the rule is not about the subject."""
        facts = group.facts(tick)
        job = evaluation.subjects(rule, facts).get(name)
        if job is None or evaluation.applies(rule, job) is Truth.NO:
            return None
        self.evaluations += 1
        verdict, plain = evaluation.evaluate_both(
            rule,
            job,
            facts,
            profiles=self._rules.profiles,
            whitelist=self._rules.whitelist,
            now=facts.time,
        )
        return Situation(verdict, plain, job)

    def _track(self, rule: Rule, group: Group, name: str, codes: Numbers) -> Track:
        distinct, ticks, index = np.unique(codes, return_index=True, return_inverse=True)
        # Any tick of a situation will do: one whose facts another rule has looked at costs less.
        known = np.array(group.known_ticks, dtype=np.int64)
        ticks[index[known]] = known
        found = [self.evaluate(rule, group, name, tick) for tick in ticks.tolist()]
        trusted = np.full(len(distinct), NOT_JUDGED, dtype=np.int64)
        plain, own = trusted.copy(), np.zeros(len(distinct), dtype=bool)
        for number, item in enumerate(found):
            if item is not None:
                trusted[number] = CODES[item.verdict.truth]
                plain[number] = CODES[item.plain.truth]
                own[number] = item.verdict.self_report_only
        return Track(
            rule=rule,
            group=group,
            subject=name,
            situations=found,
            index=index.astype(np.int64),
            trusted=trusted[index],
            plain=plain[index],
            self_report=own[index],
        )


class Look:
    """One rule and subject at one tick, judged by the live code if somebody asks.

    Args:
        judge: of the rule set.
        track: of the pair, or None where nothing is known of it in this stretch.
        tick: the tick.
        truth: what counts there, or None where nothing is judged.
        over: whether the job's own word counts no more.
    """

    def __init__(
        self, judge: Judge, track: Track | None, tick: int, *, truth: Truth | None, over: bool
    ) -> None:
        self.tick = tick
        self._judge = judge
        self._track = track
        self._truth = truth
        self._over = over

    @functools.cached_property
    def situation(self) -> Situation | None:
        """What the live code says at this very tick.

        Raises:
            ScreenDisagrees: it is not what was taken for it.
        """
        track = self._track
        if track is None:
            return None
        found = self._judge.evaluate(track.rule, track.group, track.subject, self.tick)
        code = NOT_JUDGED if found is None else CODES[found.verdict.truth]
        if code != track.trusted[self.tick]:
            raise ScreenDisagrees(
                f"{track.rule.id} about {track.subject}: the screen says "
                f"{int(track.trusted[self.tick])}, the engine {code}: please report this as a fault"
            )
        return found

    @functools.cached_property
    def judged(self) -> Judged | None:
        """The verdict that counts."""
        found, truth = self.situation, self._truth
        if found is None or truth is None:
            return None
        return Judged(found.plain if self._over else found.verdict, truth)


class _Coder:
    """One rule, one subject: the code of each tick."""

    def __init__(self, rule: Rule, group: Group, name: str, rules: RuleSet, times: Floats) -> None:
        self._rule = rule
        self._group = group
        self._frame = group.frame
        self._name = name
        self._rules = rules
        self._times = times
        self._job = rule.target is Target.JOB
        self._sum = group.epochs.copy()
        self._size = int(self._sum.max(initial=0)) + 1

    def codes(self) -> Numbers:
        """A number for each tick; equal numbers mean the same verdict."""
        if any(
            name not in KNOWN_KEYS
            and getattr(self._rule, name) != type(self._rule).model_fields[name].default
            for name in type(self._rule).model_fields
        ):
            return np.arange(len(self._times), dtype=np.int64)
        self._clocks()
        if self._job:
            self._cold()
            self._phases()
        found = [leaf for condition in self._rule.conditions for leaf in leaves(condition)]
        for leaf in found:
            if not self._leaf(leaf):
                return np.arange(len(self._times), dtype=np.int64)
        return self._sum

    def _add(self, codes: NDArray[np.integer] | Bools, size: int) -> None:
        """Tell ticks apart by these codes as well; each is below `size`."""
        if self._size * size > _MOST:
            distinct, index = np.unique(self._sum, return_inverse=True)
            self._sum, self._size = index.astype(np.int64), len(distinct)
        self._sum = self._sum * size + codes
        self._size *= size

    # -- time

    def _clocks(self) -> None:
        """The hours of the rule, and the ends of the whitelist's entries."""
        if self._rule.only_during:
            self._add(_within(self._rule.only_during, tuple(self._times)), 2)
        ends = sorted(
            entry.expires.timestamp()
            for entry in self._rules.whitelist
            if self._rule.id in entry.rules
        )
        if ends:
            self._add(np.searchsorted(ends, self._times, side="right"), len(ends) + 1)

    @functools.cached_property
    def _begin(self) -> Floats:
        """At each tick: the first use of a card, else the start; NaN where neither is known."""
        if not self._job:
            return np.full(len(self._times), -np.inf)
        first = self._latest("gpu_job_first_gpu_use_timestamp_seconds")
        start = self._latest("gpu_job_start_time_seconds")
        return np.where(np.isnan(first), start, first)

    def _latest(self, name: str) -> Floats:
        found = np.full(len(self._times), np.nan)
        for number in self._group.rows_of(name, "job_id", self._name):
            found = np.fmax(found, _finite(self._frame.rows[name].values[number]))
        return found

    @functools.cached_property
    def _warm(self) -> Floats:
        return self._begin + self._rule.cold_start

    def _cold(self) -> None:
        self._add(self._times < self._warm, 2)
        self._add(self._begin > self._times + MAX_SKEW_SECONDS, 2)

    def _phases(self) -> None:
        limits = sorted(set(self._rule.ignore_phases.values()))
        if not limits:
            return
        name = "yolo_phase_start_timestamp_seconds"
        for number in self._group.rows_of(name, "job_id", self._name):
            since = _finite(self._frame.rows[name].values[number])
            age = self._times - since
            self._add(since > self._times + MAX_SKEW_SECONDS, 2)
            for limit in limits:
                self._add(age >= limit, 2)

    def _key(self, key: SignalKey) -> None:
        """Whether it is too early for a key's window, and whether the server refused it."""
        self._failures(key)
        if self._job:
            length = signals.window_length(key, self._frame.scrape_interval)
            self._add(self._times - length < self._warm, 2)

    # -- conditions

    def _leaf(self, leaf: object) -> bool:
        """Tell ticks apart as far as a condition does; False if the condition is not known."""
        match leaf:
            case Signal():
                self._key(leaf.key)
                if leaf.spec.per_gpu:
                    self._cards(leaf.key, _comparing(leaf))
                else:
                    self._total(leaf.key, _comparing(leaf))
            case Promql() | OverBudget():
                self._key(leaf.key)
                self._total(leaf.key, _comparing(leaf))
            case NoProgress():
                self._key(leaf.key)
                self._total(leaf.key, lambda values: values > 0)
            case SilentFor():
                self._silence(leaf)
            case ProfileCondition():
                for name, deviation in leaf.profile.entries.items():
                    self._key(leaf.key(name))
                    self._deviation(leaf.key(name), name, deviation)
            case NeedsMemory():
                pass  # what is declared, and the sizes of cards, are in the epochs
            case _:
                return False
        return True

    def _rows(self, key: SignalKey) -> list[Floats]:
        """The values of a signal that are this subject's."""
        columns = self._frame.answers[key]
        spec = signals.SIGNALS.get(key.signal)
        if spec is not None and spec.device:
            # Of whichever cards the job holds at a tick: those of its group are told apart.
            wanted = {self._name} if not self._job else set(self._group.cards)
            label = "uuid"
        else:
            wanted, label = {self._name}, "job_id"
        return [
            columns.values[number]
            for number in self._group.answers[key]
            if columns.labels[number].get(label) in wanted
        ]

    def _cards(self, key: SignalKey, holds: Holds) -> None:
        for own in self._rows(key):
            self._add(np.where(np.isfinite(own), 1 + holds(own), 0), 3)

    def _total(self, key: SignalKey, holds: Holds) -> None:
        total = np.zeros(len(self._times))
        count = np.zeros(len(self._times), dtype=np.int64)
        rows = self._rows(key)
        for own in rows:
            known = np.isfinite(own)
            total = np.where(known, total + own, total)
            count += known
        self._add(count, len(rows) + 1)
        self._add(holds(total), 2)

    def _failures(self, key: SignalKey) -> None:
        failures = self._frame.answers[key].failures
        if not failures:
            return
        codes = np.zeros(len(self._times), dtype=np.int64)
        for begin, end, _ in failures:
            codes[begin:end] = 1
        self._add(codes, 2)

    def _silence(self, leaf: SilentFor) -> None:
        self._add(self._times - self._warm >= leaf.silent_for, 2)
        name = "gpu_job_activity_timestamp_seconds"
        by_channel: dict[str, Floats] = {}
        for number in self._group.rows_of(name, "job_id", self._name):
            channel = self._frame.rows[name].labels[number].get("signal", "")
            own = _finite(self._frame.rows[name].values[number])
            by_channel[channel] = np.fmax(by_channel.get(channel, own), own)
        for channel in {*leaf.signals, "cpu"}:
            if channel in by_channel:
                age = self._times - by_channel[channel]
                self._add(age < -MAX_SKEW_SECONDS, 2)
                self._add(age < leaf.silent_for, 2)

    def _deviation(self, key: SignalKey, name: str, deviation: Deviation) -> None:
        """Whether each value is out of what is expected, which the epoch decides."""
        rows = self._rows(key)
        if not rows:
            return
        epochs = self._group.epochs
        outside = [np.zeros(len(self._times), dtype=np.int64) for _ in rows]
        for epoch in np.unique(epochs):
            ticks = np.flatnonzero(epochs == epoch)
            job = self._group.facts(int(ticks[0])).jobs.get(self._name)
            target = None if job is None else self._expected(job, name)
            if target is None:
                continue
            for own, codes in zip(rows, outside, strict=True):
                codes[ticks] = exceeded(own[ticks], target, deviation)
        for own, codes in zip(rows, outside, strict=True):
            self._add(np.where(np.isfinite(own), 1 + codes, 0), 3)

    def _expected(self, job: JobFacts, name: str) -> Expected | None:
        return expectation(job, self._rules.profiles, team=self._rule.team).values.get(name)


def _finite(values: Floats) -> Floats:
    return np.where(np.isfinite(values), values, np.nan)


def _comparing(leaf: Comparing) -> Holds:
    limit = leaf.limit.value
    compare = {
        "above": np.greater,
        "at_least": np.greater_equal,
        "below": np.less,
        "at_most": np.less_equal,
    }[leaf.comparison]
    return lambda values: compare(values, limit)


def exceeded(values: Floats, target: Expected, deviation: Deviation) -> Numbers:
    """What `Expected.exceeded` says of each value; it is asked for as few as tell all.

    What is further out than a value that is out, is out as well: a bisection on either side.

    Args:
        values: any shape; of one that is not finite the answer means nothing.
        target: what is expected.
        deviation: how much of a difference counts.
    """
    distinct = np.unique(values[np.isfinite(values)]).tolist()
    middle = bisect.bisect_left(distinct, target.value)
    low, high = distinct[:middle], distinct[middle:]
    inside = bisect.bisect_left(
        low, x=True, key=lambda value: not target.exceeded(value, deviation)
    )
    outside = bisect.bisect_left(high, x=True, key=lambda value: target.exceeded(value, deviation))
    least = low[inside] if inside < len(low) else target.value
    most = high[outside] if outside < len(high) else math.inf
    return np.where((values < least) | (values >= most), 1, 0)


@functools.lru_cache(maxsize=64)
def _within(when: Sequence[hours.Hours], times: tuple[float, ...]) -> Bools:
    return np.array([hours.within(when, time) for time in times])
