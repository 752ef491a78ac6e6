"""Leaf programs: one measuring condition as a small object that knows where its value lies.

Each says of a job what `evaluation` says of it in words; the order of the questions is the same,
since the first that cannot be answered is the reason. Truths are small integers here, so that
Kleene's `all` is the least and `any` the greatest. A kind of condition that has no program of its
own is asked of `evaluation` itself.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from gpuwarden.ruleengine import evaluation, signals, truths
from gpuwarden.ruleengine.conditions import (
    Gpus,
    GpuShare,
    NeedsMemory,
    NoProgress,
    OverBudget,
    ProfileCondition,
    Promql,
    Signal,
    SilentFor,
)
from gpuwarden.ruleengine.profiles import needed_memory
from gpuwarden.ruleengine.verdicts import MAX_SKEW_SECONDS, Truth

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Iterable

    from gpuwarden.ruleengine.conditions import Comparing, Leaf
    from gpuwarden.ruleengine.measures import Layout
    from gpuwarden.ruleengine.model import Rule
    from gpuwarden.ruleengine.profiles import Expectation, Expectations, Expected
    from gpuwarden.ruleengine.verdicts import FleetFacts, GpuFacts, JobFacts, SignalKey

    _Holds = Callable[[float], bool]
    _Truth = Callable[[JobFacts, array[float], float], int]

NO, UNKNOWN, YES = 0, 1, 2

_COMPARISONS = {
    "above": operator.gt,
    "at_least": operator.ge,
    "below": operator.lt,
    "at_most": operator.le,
}
_CODES = {Truth.NO: NO, Truth.UNKNOWN: UNKNOWN, Truth.YES: YES}
_TRUTHS = {code: truth for truth, code in _CODES.items()}


class LeafProgram(Protocol):
    """One condition, or one entry of a profile.

    Attributes:
        cost: what asking it takes, in comparisons of one number; cheaper ones are asked first.
    """

    cost: int

    def truth(self, job: JobFacts, numbers: array[float], warm: float) -> int:
        """NO, UNKNOWN or YES of a job with these numbers whose cold start ends at `warm`."""

    def reasons(self, job: JobFacts, numbers: array[float], warm: float) -> tuple[str, ...]:
        """Why it is UNKNOWN with the job's word; empty where it is not."""


@dataclass(frozen=True, slots=True)
class Moment:
    """What leaves need beside the job.

    Attributes:
        fleet: the facts.
        expectations: what jobs should show.
        now: Unix time of the facts.
        trusted: whether a job's word may delay the rule.
    """

    fleet: FleetFacts
    expectations: Expectations
    now: float
    trusted: bool = True

    def horizon(self, key: SignalKey) -> float:
        """How far back a key looks; of a job that was cold then, it is not known yet."""
        return self.now - signals.window_length(key, self.fleet.scrape_interval)

    def absent(self, key: SignalKey) -> str:
        """The reason for which a value of a key is not known where it was asked for."""
        return "query_failed" if key in self.fleet.failed else "no_data"


def leaf_programs(
    leaf: Leaf, rule: Rule, layout: Layout, moment: Moment
) -> tuple[LeafProgram, ...]:
    """The programs of a condition that measures; of a profile one for each entry (any suffices).

    Args:
        leaf: the condition.
        rule: to which it belongs.
        layout: of the numbers that the programs will be given.
        moment: at which they will be asked.
    """
    if isinstance(leaf, ProfileCondition) and all(key in layout for key in leaf.keys):
        names = leaf.profile.entries
        return tuple(_Deviation(leaf, name, layout, moment, team=rule.team) for name in names)
    return (_single(leaf, rule, layout, moment),)


def _single(leaf: Leaf, rule: Rule, layout: Layout, moment: Moment) -> LeafProgram:
    match leaf:
        case Signal() | Promql() | OverBudget() if leaf.key in layout.job:
            return _OfJob(leaf, layout, moment)
        case Signal() if leaf.key in layout.cards:
            return _Cards(leaf.key, leaf.gpus, _limit(leaf), layout=layout, moment=moment)
        case NoProgress() if leaf.key in layout.job:
            return _Progress(leaf, layout, moment)
        case SilentFor():
            return _Silence(leaf, moment)
        case NeedsMemory():
            return _Need(leaf)
    return _SpelledOut(leaf, rule, moment)


def _limit(condition: Comparing) -> _Holds:
    compare, limit = _COMPARISONS[condition.comparison], condition.limit.value
    return lambda value: compare(value, limit)


class _OfJob:
    """A comparison of the one value of a job."""

    cost = 1

    def __init__(self, leaf: Signal | Promql | OverBudget, layout: Layout, moment: Moment) -> None:
        self._at, self._horizon = layout.job[leaf.key], moment.horizon(leaf.key)
        self._failed, self._absent = leaf.key in moment.fleet.failed, moment.absent(leaf.key)
        self.truth = self._truth(_COMPARISONS[leaf.comparison], leaf.limit.value)

    def _truth(self, compare: Callable[[float, float], bool], limit: float) -> _Truth:
        at, horizon, failed, unknown = self._at, self._horizon, self._failed, math.isnan

        def truth(_: JobFacts, numbers: array[float], warm: float) -> int:
            value = numbers[at]
            if unknown(value) or horizon < warm or failed:
                return UNKNOWN
            return YES if compare(value, limit) else NO

        return truth

    def reasons(self, _: JobFacts, numbers: array[float], warm: float) -> tuple[str, ...]:
        if self._failed:
            return (self._absent,)
        return _missing_or_early(numbers[self._at], self._horizon, warm, self._absent)


def _missing_or_early(value: float, horizon: float, warm: float, absent: str) -> tuple[str, ...]:
    if math.isnan(value):
        return (absent,)
    return ("cold_start",) if horizon < warm else ()


def _combined(wanted: Gpus | GpuShare | None) -> Callable[[Iterable[int]], int]:
    """How the answers of a job's cards become that of the job."""
    if not isinstance(wanted, GpuShare):
        return max if wanted is Gpus.ANY else min
    share = wanted.share
    return lambda codes: _CODES[truths.share_of((_TRUTHS[code] for code in codes), share)]


class _Cards:
    """A comparison on each card that the job holds."""

    cost = 2

    def __init__(
        self,
        key: SignalKey,
        wanted: Gpus | GpuShare | None,
        holds: _Holds,
        *,
        layout: Layout,
        moment: Moment,
    ) -> None:
        self._key, self._layout, self._holds = key, layout, holds
        self._only, self._horizon = layout.first(key, 1), moment.horizon(key)
        self._device = signals.SIGNALS[key.signal].device
        self._combine, self._absent = _combined(wanted), moment.absent(key)

    def truth(self, job: JobFacts, numbers: array[float], warm: float) -> int:
        gpus = job.gpus
        if len(gpus) == 1:  # as nearly all have; a call less is felt at 10,000 cards
            value = numbers[self._only]
            if math.isnan(value) or self._horizon < warm or (self._device and gpus[0].tenants > 1):
                return UNKNOWN
            return YES if self._holds(value) else NO
        if not gpus:
            return UNKNOWN
        values = numbers[self._first(job) :]
        return self._combine(
            self._card(gpu, value, warm) for gpu, value in zip(gpus, values, strict=False)
        )

    def _first(self, job: JobFacts) -> int:
        return self._layout.first(self._key, len(job.gpus))

    def _card(self, gpu: GpuFacts, value: float, warm: float) -> int:
        if math.isnan(value) or self._horizon < warm or (self._device and gpu.tenants > 1):
            return UNKNOWN
        return YES if self._holds(value) else NO

    def reasons(self, job: JobFacts, numbers: array[float], warm: float) -> tuple[str, ...]:
        if self.truth(job, numbers, warm) != UNKNOWN:
            return ()
        for at, gpu in enumerate(job.gpus, start=self._first(job)):
            if self._device and gpu.tenants > 1:
                return ("shared_card",)
            found = _missing_or_early(numbers[at], self._horizon, warm, self._absent)
            if found:
                return found
        return ("no_gpus",)


class _Progress:
    """No step, although the trainer says that it trains."""

    cost = 2

    def __init__(self, leaf: NoProgress, layout: Layout, moment: Moment) -> None:
        self._at, self._horizon = layout.job[leaf.key], moment.horizon(leaf.key)
        self._absent = moment.absent(leaf.key)

    def truth(self, job: JobFacts, numbers: array[float], warm: float) -> int:
        run, steps = job.run, numbers[self._at]
        if run is None or run.conflict or math.isnan(steps) or self._horizon < warm:
            return UNKNOWN
        return NO if steps > 0 else YES

    def reasons(self, job: JobFacts, numbers: array[float], warm: float) -> tuple[str, ...]:
        if job.run is None:
            return ("no_run",)
        if job.run.conflict:
            return ("run_conflict",)
        return _missing_or_early(numbers[self._at], self._horizon, warm, self._absent)


class _Silence:
    """No sign of life on any channel."""

    cost = 4

    def __init__(self, leaf: SilentFor, moment: Moment) -> None:
        self._needed, self._now = leaf.silent_for, moment.now
        self._channels = [name for name in leaf.signals if name == "cpu" or moment.trusted]

    def truth(self, job: JobFacts, _: array[float], warm: float) -> int:
        activity, least = job.activity, YES if self._channels else UNKNOWN
        quiet = self._now - warm >= self._needed
        for name in self._channels:
            last = activity.get(name)
            if last is None:
                known = quiet and "cpu" in activity
            else:
                age = self._now - last
                if -MAX_SKEW_SECONDS <= age < self._needed:
                    return NO
                known = quiet and age >= self._needed
            if not known:
                least = UNKNOWN
        return least

    def reasons(self, job: JobFacts, numbers: array[float], warm: float) -> tuple[str, ...]:
        if self.truth(job, numbers, warm) != UNKNOWN:
            return ()
        known = [job.activity[name] for name in self._channels if name in job.activity]
        if any(self._now - last < -MAX_SKEW_SECONDS for last in known):
            return ("clock_skew",)
        return ("cold_start",) if "cpu" in job.activity else ("no_data",)


class _Need:
    """What the job declares needs too much of its cards."""

    cost = 8

    def __init__(self, leaf: NeedsMemory) -> None:
        self._share = leaf.needs_memory

    def truth(self, job: JobFacts, _: array[float], __: float) -> int:
        return self._found(job)[0]

    def reasons(self, job: JobFacts, _: array[float], __: float) -> tuple[str, ...]:
        return self._found(job)[1]

    def _found(self, job: JobFacts) -> tuple[int, tuple[str, ...]]:
        found = needed_memory(job)
        if isinstance(found, str):
            return UNKNOWN, ("no_estimate",)
        sizes = [gpu.memory_total_bytes or 0.0 for gpu in job.gpus]
        if not all(sizes):
            return UNKNOWN, ("no_data",)
        limit = self._share * min(sizes)
        if found.low <= limit < found.high:
            return UNKNOWN, ("estimate_too_wide",)
        return (YES if found.low > limit else NO), ()


class _Deviation:
    """One entry of a profile."""

    cost = 16

    def __init__(
        self, leaf: ProfileCondition, name: str, layout: Layout, moment: Moment, *, team: str
    ) -> None:
        self._team = team
        self._leaf, self._name, self._layout, self._moment = leaf, name, layout, moment
        self._deviation, self._key = leaf.profile.entries[name], leaf.key(name)
        self._per_card = self._key in layout.cards
        self._at = -1 if self._per_card else layout.job[self._key]
        self._horizon, self._alone = moment.horizon(self._key), name != "gpu_memory"

    def truth(self, job: JobFacts, numbers: array[float], warm: float) -> int:
        target = self._found(job).values.get(self._name)
        if target is None or self._shared(job):
            return UNKNOWN
        if self._per_card:
            return self._cards(target).truth(job, numbers, warm)
        value = numbers[self._at]
        if math.isnan(value) or self._horizon < warm:
            return UNKNOWN
        return YES if target.exceeded(value, self._deviation) else NO

    def reasons(self, job: JobFacts, numbers: array[float], warm: float) -> tuple[str, ...]:
        found = self._found(job)
        target = found.values.get(self._name)
        if target is None:
            return (found.reason,)
        if self._shared(job):
            return ("shared_card",)
        if self._per_card:
            return self._cards(target).reasons(job, numbers, warm)
        absent = self._moment.absent(self._key)
        return _missing_or_early(numbers[self._at], self._horizon, warm, absent)

    def _found(self, job: JobFacts) -> Expectation:
        return self._moment.expectations.of(job, self._team)

    def _shared(self, job: JobFacts) -> bool:
        return self._alone and any(gpu.tenants > 1 for gpu in job.gpus)

    def _cards(self, target: Expected) -> _Cards:
        def beyond(value: float) -> bool:
            return target.exceeded(value, self._deviation)

        return _Cards(self._key, self._leaf.gpus, beyond, layout=self._layout, moment=self._moment)


class _SpelledOut:
    """What `evaluation` finds, for conditions without a program."""

    cost = 64

    def __init__(self, leaf: Leaf, rule: Rule, moment: Moment) -> None:
        self._leaf, self._rule, self._moment = leaf, rule, moment

    def truth(self, job: JobFacts, _: array[float], __: float) -> int:
        return _CODES[self._found(job)[0]]

    def reasons(self, job: JobFacts, _: array[float], __: float) -> tuple[str, ...]:
        return self._found(job)[1]

    def _found(self, job: JobFacts) -> tuple[Truth, tuple[str, ...]]:
        moment = self._moment
        return evaluation.measured(
            self._leaf,
            self._rule,
            job,
            moment.fleet,
            profiles=moment.expectations.profiles,
            now=moment.now,
            trusted=moment.trusted,
        )
