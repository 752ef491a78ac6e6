"""Judging: what one rule says of one job. Pure, and three-valued after Kleene (`truths`).

UNKNOWN never acts, so everything that is missing, late, ambiguous or too early becomes UNKNOWN with
a reason that people can read.
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gpuwarden import durations, hours, quantities
from gpuwarden.ruleengine import signals, whitelists
from gpuwarden.ruleengine.conditions import (
    All,
    Any_,
    Gpus,
    GpuShare,
    NeedsMemory,
    NoProgress,
    Not,
    OverBudget,
    ProfileCondition,
    Promql,
    Signal,
    SilentFor,
    leaves,
)
from gpuwarden.ruleengine.measures import listed, rendered
from gpuwarden.ruleengine.model import Target
from gpuwarden.ruleengine.needs import ACTIVITY
from gpuwarden.ruleengine.profiles import expectation, needed_memory
from gpuwarden.ruleengine.truths import all_of, any_of, negate, of_cards
from gpuwarden.ruleengine.verdicts import MAX_SKEW_SECONDS, Evidence, Grade, Truth, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from gpuwarden.ruleengine.conditions import Comparing, Condition, Single
    from gpuwarden.ruleengine.model import Profile, Rule, WhitelistEntry
    from gpuwarden.ruleengine.profiles import Expected
    from gpuwarden.ruleengine.verdicts import FleetFacts, GpuFacts, JobFacts, SignalKey

    _Combine = Callable[[Iterable[Truth]], Truth]
    _Holds = Callable[[float], bool]
    _Found = tuple[Truth, tuple[Evidence, ...]]

__all__ = [
    "applies",
    "evaluate",
    "evaluate_both",
    "labels",
    "listens",
    "measured",
    "subjects",
]


def subjects(rule: Rule, fleet: FleetFacts) -> Mapping[str, JobFacts]:
    """What a rule judges: the jobs, or for `target: gpu` the cards, by their id."""
    return fleet.jobs if rule.target is Target.JOB else fleet.cards


def evaluate(
    rule: Rule,
    job: JobFacts,
    fleet: FleetFacts,
    *,
    profiles: Sequence[Profile],
    whitelist: Sequence[WhitelistEntry] | None,
    now: float,
    trusted: bool = True,
) -> Verdict:
    """Say whether a job violates a rule.

    Args:
        rule: the rule.
        job: one of `subjects(rule, fleet)`.
        fleet: the facts that the job belongs to.
        profiles: expectations.
        whitelist: protections, or None if they could not be read: then everything is protected.
        now: Unix time to which the facts belong.
        trusted: False once the time is used up for which a job's word may delay the rule: then
            heartbeat, log and phases are ignored.

    Returns:
        The verdict. `self_report_only` says that the answer without the job's word would be YES.
    """
    verdict, heard = _judge(rule, job, _Context(fleet, profiles, whitelist, now, trusted))
    if not heard or verdict.certain:
        return verdict
    plain, _ = _judge(rule, job, _Context(fleet, profiles, whitelist, now, trusted=False))
    return verdict.beside(plain)


def evaluate_both(
    rule: Rule,
    job: JobFacts,
    fleet: FleetFacts,
    *,
    profiles: Sequence[Profile],
    whitelist: Sequence[WhitelistEntry] | None,
    now: float,
) -> tuple[Verdict, Verdict]:
    """The verdicts of `evaluate` with and without a job's word, for who weighs its budget."""
    verdict, heard = _judge(rule, job, _Context(fleet, profiles, whitelist, now, trusted=True))
    if not heard:
        return verdict, verdict
    plain, _ = _judge(rule, job, _Context(fleet, profiles, whitelist, now, trusted=False))
    return verdict.beside(plain), plain


def listens(rule: Rule) -> bool:
    """Whether a job's word can delay the rule, or one of its stages, at all."""
    return bool(rule.ignore_phases) or any(
        channel != "cpu"
        for condition in rule.conditions
        for part in leaves(condition)
        if isinstance(part, SilentFor)
        for channel in part.signals
    )


def measured(
    condition: Condition,
    rule: Rule,
    job: JobFacts,
    fleet: FleetFacts,
    *,
    profiles: Sequence[Profile],
    now: float,
    trusted: bool,
) -> tuple[Truth, tuple[str, ...]]:
    """What one condition of a rule says of a job, before cold start, phases and whitelist.

    Args:
        condition: one of the rule's.
        rule: the rule.
        job: one of `subjects(rule, fleet)`.
        fleet: the facts that the job belongs to.
        profiles: expectations.
        now: Unix time to which the facts belong.
        trusted: whether the job's word counts.

    Returns:
        Its truth, and the reasons of whatever could not be decided in it.
    """
    context = _Context(fleet, profiles, None, now, trusted)
    truth, evidence = _Judge(rule, job, context).condition(condition)
    return truth, tuple(item.reason for item in evidence if item.reason)


def applies(rule: Rule, job: JobFacts) -> Truth:
    """Whether a job is one of those that the rule is about: its team and all of `match`.

    A label that the job lacks does not match. UNKNOWN where the node is dark and the label, which
    may have been lost with it, is missing.
    """
    missing = Truth.NO if job.fresh else Truth.UNKNOWN
    truths = [Truth.YES]
    if rule.team:
        truths.append(_matched(re.escape(rule.team), job.team, missing))
    for key, pattern in rule.match.items():
        texts = labels(key, job) or ("",)
        truths.append(all_of(_matched(pattern, text, missing) for text in texts))
    return all_of(truths)


def labels(key: str, job: JobFacts) -> Sequence[str]:
    """The texts that a `match` key is compared with; all of them must match."""
    if key == "gpu":
        return [gpu.name for gpu in job.gpus]
    if key == "node":
        return [_host(instance) for instance in job.instances or (job.instance,)]
    if key == "interactive":
        return ["true" if job.interactive else "false"]
    if key in ("model", "project", "run_id"):
        if job.run is None or job.run.conflict:
            return [""]
        return [str(getattr(job.run, key))]
    return [str(getattr(job, key))]


def _host(instance: str) -> str:
    """The host of a Prometheus target `host:port` or `[v6]:port`."""
    host, colon, port = instance.rpartition(":")
    return host.strip("[]") if colon and port.isdecimal() else instance


@functools.lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


def _matched(pattern: str, text: str, missing: Truth) -> Truth:
    if not text:
        return missing
    return Truth.YES if _compiled(pattern).fullmatch(text) else Truth.NO


@dataclass(frozen=True, slots=True)
class _Context:
    """What judging needs beside the rule and the job."""

    fleet: FleetFacts
    profiles: Sequence[Profile]
    whitelist: Sequence[WhitelistEntry] | None
    now: float
    trusted: bool


def _judge(rule: Rule, job: JobFacts, context: _Context) -> tuple[Verdict, bool]:
    """The verdict, and whether the job's word had a part in it."""
    early = _before_measuring(rule, job, context)
    if early is not None:
        return early, False
    judge = _Judge(rule, job, context)
    gate = judge.gate()
    truth, evidence = judge.condition(rule.when)
    if gate is not None:
        truth, evidence = Truth.UNKNOWN, (gate, *evidence)
    verdict = Verdict(rule.id, job.job_id, truth, evidence, grades=judge.grades(truth))
    return verdict, judge.heard


def _before_measuring(rule: Rule, job: JobFacts, context: _Context) -> Verdict | None:
    """What is said of a job whatever its figures are, or None."""

    def verdict(truth: Truth, *evidence: Evidence, protected: str = "") -> Verdict:
        return Verdict(rule.id, job.job_id, truth, evidence, protected)

    elsewhere = _elsewhere(rule, job, context.now)
    if elsewhere is not None:
        return verdict(Truth.NO, elsewhere)
    protected, why = whitelists.protection(rule.id, job, context.whitelist, now=context.now)
    if protected is Truth.YES:
        return verdict(Truth.NO, protected=why)
    if not job.fresh:
        text = "the node's snapshot is current"
        return verdict(Truth.UNKNOWN, _unknown(text, job.not_fresh_reason or "dark_node"))
    if protected is Truth.UNKNOWN:
        return verdict(Truth.UNKNOWN, _unknown("not on the whitelist", "whitelist", why))
    return None


def _elsewhere(rule: Rule, job: JobFacts, now: float) -> Evidence | None:
    """Why the rule is not about this job at this time of the week, or None."""
    if applies(rule, job) is Truth.NO:
        return Evidence("the rule's match", Truth.NO)
    if not hours.within(rule.only_during, now):
        clocks = hours.local_times(rule.only_during, now)
        return Evidence("within the rule's hours", Truth.NO, measured=clocks)
    return None


def _unknown(condition: str, reason: str, measured: str = "") -> Evidence:
    return Evidence(condition, Truth.UNKNOWN, measured=measured, reason=reason)


def _which(gpus: Gpus | GpuShare) -> str:
    if isinstance(gpus, GpuShare):
        return f"at least {quantities.render(gpus.share, quantities.Unit.RATIO)} of the GPUs"
    return "all GPUs" if gpus is Gpus.ALL else "any GPU"


class _Judge:
    """One rule, one job, one moment.

    Attributes:
        heard: whether what the job says of itself had a part in what was found so far.
    """

    def __init__(self, rule: Rule, job: JobFacts, context: _Context) -> None:
        self._rule = rule
        self._job = job
        self._context = context
        self._now = context.now
        self._scrape = context.fleet.scrape_interval
        # A card has no cold start: it was there before anybody used it.
        begin = job.first_gpu_use if job.first_gpu_use is not None else job.start_time
        if rule.target is Target.GPU:
            begin = -math.inf
        self._begin = begin
        self._warm = begin + rule.cold_start if begin is not None else None
        self.heard = False

    # -- before the conditions

    def gate(self) -> Evidence | None:
        """Why the rule is not judged yet, or None."""
        cold = self._cold()
        if cold is not None:
            return cold
        phase = self._phase()
        self.heard = self.heard or phase is not None
        return phase

    def _cold(self) -> Evidence | None:
        text = f"cold start of {durations.render(self._rule.cold_start)} is over"
        if self._warm is None or self._begin is None:
            return _unknown(text, "no_start", "neither its start nor its first GPU use is known")
        if self._begin > self._now + MAX_SKEW_SECONDS:
            return _unknown(text, "clock_skew", "its start lies in the future")
        if self._now < self._warm:
            since = durations.render(round(max(0.0, self._now - self._begin)))
            return _unknown(text, "cold_start", f"{since} since the first GPU use")
        return None

    def _phase(self) -> Evidence | None:
        run = self._job.run
        if not self._rule.ignore_phases or run is None or not self._context.trusted:
            return None
        text = "not in a phase that the rule ignores"
        if run.conflict:
            return _unknown(text, "run_conflict", f"the run {run.run_id} is claimed twice")
        limit = next((v for k, v in self._rule.ignore_phases.items() if k == run.phase), None)
        if limit is None:
            return None
        if run.phase_since is None or run.phase_since > self._now + MAX_SKEW_SECONDS:
            return _unknown(text, "phase", f"in {run.phase}, since when is not known")
        age = self._now - run.phase_since
        if age >= limit:
            return None
        measured = f"in {run.phase} for {durations.render(round(max(0.0, age)))}"
        return _unknown(text, "phase", f"{measured}, ignored for {durations.render(limit)}")

    # -- conditions

    def grades(self, truth: Truth) -> tuple[Grade, ...]:
        """How far it has come for each stage that has a condition, given the rule's own truth."""
        if all(stage.when is None for stage in self._rule.stages):
            return ()
        found = []
        for key, stage in self._rule.keyed_stages:
            if stage.when is not None:
                further, evidence = self.condition(stage.when)
                found.append(Grade(key, all_of((truth, further)), evidence))
        return tuple(found)

    def condition(self, condition: Condition) -> _Found:
        """The truth of a condition, and one piece of evidence for each one that measures."""
        match condition:
            case All():
                return self._combine(condition.all, all_of)
            case Any_():
                return self._combine(condition.any, any_of)
            case Not():
                truth, evidence = self.condition(condition.not_)
                return negate(truth), evidence
            case ProfileCondition():
                found = [self._deviation(condition, name) for name in condition.profile.entries]
                return any_of(item.truth for item in found), tuple(found)
        single = self._leaf(condition)
        return single.truth, (single,)

    def _leaf(self, condition: Single) -> Evidence:
        match condition:
            case Signal():
                return self._signal(condition)
            case SilentFor():
                return self._silence(condition)
            case NoProgress():
                return self._progress(condition)
            case NeedsMemory():
                return self._need(condition)
            case Promql() | OverBudget():
                return self._expression(condition)

    def _combine(self, parts: Sequence[Condition], how: _Combine) -> _Found:
        found = [self.condition(part) for part in parts]
        return how(truth for truth, _ in found), tuple(e for _, each in found for e in each)

    def _early(self, key: SignalKey) -> bool:
        """Whether the window reaches back into the cold start."""
        if self._warm is None:
            return True
        return self._now - signals.window_length(key, self._scrape) < self._warm

    def _gap(self, key: SignalKey, value: float | None) -> str:
        absent = self._context.fleet.why_absent(key, self._job.job_id)
        return absent if value is None else "cold_start"

    def _signal(self, condition: Signal) -> Evidence:
        spec, key = condition.spec, condition.key
        if condition.share is not None:
            share = quantities.render(condition.share, quantities.Unit.RATIO)
            how = f"{condition.comparison_text} in {share} of {condition.window}"
        else:
            over = f" over {condition.window}" if condition.window is not None else ""
            how = f"{condition.agg or 'mean'}{over} {condition.comparison_text}"
        text = f"{condition.signal} {how}"
        if not spec.per_gpu:
            return self._job_value(text, condition, key)
        wanted = condition.gpus or Gpus.ALL
        return self._cards(
            f"{text}, {_which(wanted)}" if self._rule.target is Target.JOB else text,
            key,
            wanted,
            holds=condition.holds,
        )

    def _job_value(self, text: str, condition: Comparing, key: SignalKey) -> Evidence:
        found = self._context.fleet.failed.get(key)
        if found is not None:
            return _unknown(text, "query_failed", found)
        value = self._job.values.get(key, {}).get("")
        if value is None or self._early(key):
            return _unknown(text, self._gap(key, value))
        return Evidence(
            text,
            Truth.YES if condition.holds(value) else Truth.NO,
            measured=quantities.render(value, condition.limit.unit),
            values={"": value},
        )

    def _cards(
        self,
        text: str,
        key: SignalKey,
        gpus: Gpus | GpuShare,
        *,
        holds: _Holds,
        expected: Expected | None = None,
    ) -> Evidence:
        """A comparison on each card that the job holds."""
        found = [(gpu, *self._card(gpu, key, holds)) for gpu in self._job.gpus]
        truths = [truth for _, truth, _ in found]
        truth = of_cards(truths, gpus)
        reason = ""
        if truth is Truth.UNKNOWN:
            reason = next((why for _, _, why in found if why), "no_gpus")
        values = self._job.values.get(key, {})
        known = {gpu.uuid: values[gpu.uuid] for gpu in self._job.gpus if gpu.uuid in values}
        return Evidence(
            text,
            truth,
            measured=listed(self._job.gpus, key, known),
            reason=reason,
            values=known,
            expected="" if expected is None else str(expected),
            estimated=expected is not None and expected.estimated,
        )

    def _card(self, gpu: GpuFacts, key: SignalKey, holds: _Holds) -> tuple[Truth, str]:
        if signals.SIGNALS[key.signal].device and gpu.tenants > 1:
            return Truth.UNKNOWN, "shared_card"
        value = self._job.values.get(key, {}).get(gpu.uuid)
        if value is None or self._early(key):
            return Truth.UNKNOWN, self._gap(key, value)
        return (Truth.YES if holds(value) else Truth.NO), ""

    def _deviation(self, condition: ProfileCondition, name: str) -> Evidence:
        deviation, key = condition.profile.entries[name], condition.key(name)
        text = f"{name} over {condition.window} is {deviation} of the expectation"
        found = expectation(self._job, self._context.profiles, team=self._rule.team)
        target = found.values.get(name)
        if target is None:
            return _unknown(text, found.reason, found.missing)
        if name != "gpu_memory" and any(gpu.tenants > 1 for gpu in self._job.gpus):
            return _unknown(text, "shared_card")

        def holds(value: float) -> bool:
            return target.exceeded(value, deviation)

        if signals.SIGNALS[name].per_gpu:
            return self._cards(text, key, condition.gpus, holds=holds, expected=target)
        value = self._job.values.get(key, {}).get("")
        if value is None or self._early(key):
            found_none = _unknown(text, self._gap(key, value))
            return replace(found_none, expected=str(target), estimated=target.estimated)
        return Evidence(
            text,
            Truth.YES if holds(value) else Truth.NO,
            measured=rendered(key, value),
            values={"": value},
            expected=str(target),
            estimated=target.estimated,
        )

    def _progress(self, condition: NoProgress) -> Evidence:
        text = f"no step in {durations.render(condition.no_progress_for)} of training"
        run, key = self._job.run, condition.key
        if run is None or run.conflict:
            return _unknown(text, "no_run" if run is None else "run_conflict")
        steps = self._job.values.get(key, {}).get("")
        if steps is None or self._early(key):
            return _unknown(text, self._gap(key, steps))
        return Evidence(
            text,
            Truth.NO if steps > 0 else Truth.YES,
            measured=f"about {steps:.0f} steps" if steps > 0 else "no step",
            values={"": steps},
        )

    def _need(self, condition: NeedsMemory) -> Evidence:
        """YES if even the least that the estimate allows for is too much, NO if the most is not."""
        share = quantities.render(condition.needs_memory, quantities.Unit.RATIO)
        text = f"what it declares needs over {share} of a card's memory"
        found = needed_memory(self._job)
        if isinstance(found, str):
            return _unknown(text, "no_estimate", found)
        sizes = [gpu.memory_total_bytes for gpu in self._job.gpus]
        known = [size for size in sizes if size]
        if len(known) < len(sizes):
            return _unknown(text, "no_data", "the size of a card is not known")
        limit = condition.needs_memory * min(known)
        low, high, size = (
            quantities.render(value, quantities.Unit.BYTES)
            for value in (found.low, found.high, min(known))
        )
        unsure = found.low <= limit < found.high
        truth = Truth.UNKNOWN if unsure else Truth.YES if found.low > limit else Truth.NO
        return Evidence(
            text,
            truth,
            measured=f"an estimated {low} to {high} of {size}",
            reason="estimate_too_wide" if unsure else "",
            values={"low": found.low, "high": found.high, "of": min(known)},
            estimated=True,
        )

    def _expression(self, condition: Promql | OverBudget) -> Evidence:
        text = f"{condition.title} {condition.comparison_text}"
        return self._job_value(text, condition, condition.key)

    def _silence(self, condition: SilentFor) -> Evidence:
        """A channel that the job never had is silent as long as its CPU use is known."""
        needed = condition.silent_for
        channels: list[str] = [
            channel for channel in condition.signals if channel == "cpu" or self._context.trusted
        ]
        self.heard = self.heard or channels not in ([], ["cpu"])
        text = f"silent for {durations.render(needed)} on {', '.join(channels) or 'nothing'}"
        activity = self._job.activity
        if self._context.fleet.why_absent(ACTIVITY, self._job.job_id) == "not_asked":
            return _unknown(text, "not_asked")
        found = [self._channel(channel, needed) for channel in channels]
        truth = all_of(found)
        ages = {name: self._now - activity[name] for name in channels if name in activity}
        parts = [
            f"{name} {durations.render(round(max(0.0, ages[name])))} ago"
            if name in ages
            else f"{name} never"
            for name in channels
        ]
        reason = ""
        if truth is Truth.UNKNOWN:
            skewed = any(age < -MAX_SKEW_SECONDS for age in ages.values())
            reason = "clock_skew" if skewed else "no_data"
            if "cpu" in activity and not skewed:
                reason = "cold_start" if channels else "self_report"
        return Evidence(text, truth, measured=", ".join(parts), reason=reason, values=ages)

    def _channel(self, channel: str, needed: float) -> Truth:
        last = self._job.activity.get(channel)
        if last is None:
            known = "cpu" in self._job.activity and self._warm is not None
            if not known or self._warm is None:
                return Truth.UNKNOWN
            return Truth.YES if self._now - self._warm >= needed else Truth.UNKNOWN
        age = self._now - last
        if age < -MAX_SKEW_SECONDS:
            return Truth.UNKNOWN
        if age < needed:
            return Truth.NO
        # Silence during the cold start does not count.
        if self._warm is None or self._now - self._warm < needed:
            return Truth.UNKNOWN
        return Truth.YES
