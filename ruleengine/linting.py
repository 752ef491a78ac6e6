"""What follows from several values of a rule: contradictions, and ways to end the wrong job.

Codes: GW2xx are errors, GW3xx warnings. Each lint works on a rule that is well-formed in itself,
so that the lints of one rule run even if another is broken.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpuwarden import durations
from gpuwarden.diagnostics import Severity, did_you_mean
from gpuwarden.quantities import Direction, Window
from gpuwarden.ruleengine import expressions, signals
from gpuwarden.ruleengine.certainties import certain, unreachable
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
)
from gpuwarden.ruleengine.model import Action, Level, Mode, Target

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from gpuwarden.ruleengine.conditions import Condition
    from gpuwarden.ruleengine.model import Profile, Rule, Stage, WhitelistEntry
    from gpuwarden.yaml_files import Step

MIN_WINDOW_SCRAPES = 4
"""A window of time must hold this many scrapes, or one lost scrape decides."""
LONG_WINDOW_SECONDS = 86400.0
"""Each tick reads every raw sample of a window; a query that is too dear blinds the engine."""
SHORT_NOTICE_SECONDS = 300.0
SHORT_GRACE_SECONDS = 10.0
SHORT_LEAVE_SECONDS = 300.0

_UTILIZATION = frozenset({"gpu_utilization", "card_utilization", "card_memory_activity"})
_INTERPRETER = re.compile(
    r"(python|pypy|perl|ruby|lua)[0-9.]*|(ba|da|z|k|c|tc|fi)?sh|busybox|node|nodejs|java|julia|R"
)
_ACTIVITY = _UTILIZATION | {"card_power", "card_power_share"}
"""Signals whose low values say that a card is idle."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding whose place is a path into the file, not yet a line."""

    code: str
    severity: Severity
    path: tuple[Step, ...]
    message: str
    hint: str | None = None


def _error(code: str, path: Iterable[Step], message: str, hint: str | None = None) -> Finding:
    return Finding(code, Severity.ERROR, tuple(path), message, hint)


def _warning(code: str, path: Iterable[Step], message: str, hint: str | None = None) -> Finding:
    return Finding(code, Severity.WARNING, tuple(path), message, hint)


def lint_rule(rule: Rule, *, scrape_interval: float = 5.0) -> list[Finding]:
    """Lint one rule.

    Args:
        rule: well-formed in itself.
        scrape_interval: of the nodes, in seconds.

    Returns:
        Findings with paths that begin at the rule.
    """
    return [
        *_conditions(rule, scrape_interval),
        *_stages(rule),
        *(_gpu_target(rule) if rule.target is Target.GPU else ()),
        *(_taking(rule) if rule.takes else ()),
        *_strength(rule),
        *_waiting(rule),
    ]


def lint_whitelist(
    entries: Sequence[WhitelistEntry], rule_ids: Sequence[str], *, now: float
) -> Iterator[Finding]:
    """Lint the whitelist of all files; paths begin at the list."""
    for index, entry in enumerate(entries):
        for position, rule_id in enumerate(entry.rules):
            if rule_id not in rule_ids:
                yield _error(
                    "GW220",
                    (index, "rules", position),
                    f'there is no rule "{rule_id}", so that nothing is protected from it',
                    did_you_mean(rule_id, rule_ids),
                )
        if entry.expires.timestamp() <= now:
            yield _warning("GW304", (index, "expires"), "has passed: this protects no more")
        match = entry.match
        if match.run is not None and (match.user, match.job, match.cgroup) == (None, None, None):
            yield _warning(
                "GW319",
                (index, "match", "run"),
                "protects every job that says it is this run: its name is the job's own word",
                "name its user beside it",
            )
        named = (match.user, match.job, match.cgroup, match.run)
        if match.executable is not None and named == (None,) * 4:
            name = match.executable.rpartition("/")[2]
            if _INTERPRETER.fullmatch(name):
                yield _warning(
                    "GW321",
                    (index, "match", "executable"),
                    f"protects every script that {name} runs, whoever wrote it",
                    "name the service's cgroup or its user beside it",
                )


def lint_profiles(profiles: Sequence[Profile], places: Sequence[str]) -> Iterator[Finding]:
    """Lint the profiles of all files: two for the same training contradict each other.

    Args:
        profiles: of all files.
        places: where each stands, as in `rules.yaml:7`.
    """
    seen: dict[tuple[Any, ...], int] = {}
    for index, profile in enumerate(profiles):
        key = (
            profile.model,
            profile.batch,
            profile.imgsz,
            profile.hardware,
            profile.gpus,
            profile.amp,
            profile.team,
        )
        if key in seen:
            yield _error(
                "GW221",
                (index,),
                "another profile has the same model, batch, imgsz, hardware, gpus and amp, at "
                f"{places[seen[key]]}",
            )
        seen.setdefault(key, index)


# -- conditions


@dataclass(frozen=True, slots=True)
class _Placed:
    """A condition of a rule, where it stands, and whether it is turned around there."""

    path: tuple[Step, ...]
    condition: Any
    negated: bool = False

    def walk(self) -> Iterator[_Placed]:
        """Itself, and every condition below."""
        yield self
        match self.condition:
            case All():
                below = [self._below(part, "all", i) for i, part in enumerate(self.condition.all)]
            case Any_():
                below = [self._below(part, "any", i) for i, part in enumerate(self.condition.any)]
            case Not():
                below = [_Placed((*self.path, "not"), self.condition.not_, not self.negated)]
            case _:
                below = []
        for each in below:
            yield from each.walk()

    def _below(self, part: Condition, *steps: Step) -> _Placed:
        return _Placed((*self.path, *steps), part, self.negated)


def _placed(rule: Rule) -> Iterator[_Placed]:
    """Every condition of a rule, those of its stages included."""
    yield from _Placed(("when",), rule.when).walk()
    for index, stage in enumerate(rule.stages):
        if stage.when is not None:
            yield from _Placed(("stages", index, "when"), stage.when).walk()


def placed_conditions(rule: Rule) -> Iterator[tuple[tuple[Step, ...], Any]]:
    """Every condition of a rule and where it stands, those of its stages included."""
    for placed in _placed(rule):
        yield placed.path, placed.condition


def _ending(rule: Rule) -> Iterator[_Placed]:
    """The conditions that must hold where a job loses its cards."""
    for placed in _placed(rule):
        match placed.path:
            case ("stages", int(index), *_) if not rule.stages[index].do.takes:
                pass
            case _:
                yield placed


def _conditions(rule: Rule, scrape_interval: float) -> Iterator[Finding]:
    for placed in _placed(rule):
        path, condition = placed.path, placed.condition
        match condition:
            case Signal():
                yield from _signal(rule, condition, path)
                yield from _window(
                    condition.window, path, scrape_interval, rate=condition.spec.rate
                )
            case NoProgress():
                length = Window(condition.no_progress_for)
                yield from _window(length, path, scrape_interval, rate=True, key="no_progress_for")
            case ProfileCondition():
                yield from _window(condition.window, path, scrape_interval, rate=True)
            case SilentFor() if condition.silent_for < MIN_WINDOW_SCRAPES * scrape_interval:
                yield _warning(
                    "GW318",
                    (*path, "silent_for"),
                    f"shorter than {MIN_WINDOW_SCRAPES} scrapes: a job that works looks silent "
                    "between two of them",
                    f"write at least {durations.render(MIN_WINDOW_SCRAPES * scrape_interval)}",
                )
            case Promql():
                for item in expressions.check(condition.promql):
                    place = (*path, "promql")
                    yield Finding(item.code, item.severity, place, item.message, item.hint)
            case _:
                pass


def _signal(rule: Rule, condition: Signal, path: tuple[Step, ...]) -> Iterator[Finding]:
    spec = condition.spec
    if rule.target is Target.JOB and spec.per_gpu and condition.gpus is None:
        yield _error(
            "GW204",
            path,
            f"{condition.signal} is measured on each card: gpus must be given",
            "write gpus: all, or gpus: any",
        )
    if condition.gpus is not None and (rule.target is Target.GPU or not spec.per_gpu):
        what = "the target is one card" if rule.target is Target.GPU else "it is one for the job"
        yield _error("GW205", (*path, "gpus"), f"gpus has no meaning here: {what}")


def _window(
    window: Window | None,
    path: tuple[Step, ...],
    scrape_interval: float,
    *,
    rate: bool,
    key: str = "window",
) -> Iterator[Finding]:
    if window is None:
        return
    if window.samples is not None:
        if rate and window.samples < MIN_WINDOW_SCRAPES:
            yield _error(
                "GW212",
                (*path, key),
                f"a rate needs at least {MIN_WINDOW_SCRAPES} samples",
            )
        return
    if window.seconds > LONG_WINDOW_SECONDS:
        yield _warning(
            "GW310",
            (*path, key),
            "longer than 1d: every tick reads all samples of the fleet in it",
            "ask for a long time with `for`, which costs nothing",
        )
    if window.seconds < MIN_WINDOW_SCRAPES * scrape_interval:
        least = durations.render(MIN_WINDOW_SCRAPES * scrape_interval)
        yield _error(
            "GW212",
            (*path, key),
            f"shorter than {MIN_WINDOW_SCRAPES} scrapes: one lost scrape would decide",
            f"write at least {least}",
        )


def _waiting(rule: Rule) -> Iterator[Finding]:
    if rule.only_if_waiting is None:
        return
    if not rule.takes:
        yield _error(
            "GW203", ("only_if_waiting",), "it holds back what takes cards, and no stage here does"
        )
    waiting = rule.only_if_waiting
    if waiting.platform and waiting.holds(0.0):
        yield _warning(
            "GW314",
            ("only_if_waiting", waiting.comparison),
            f"an empty queue satisfies this as well: {waiting.platform} counts those who wait",
            "above: 0",
        )
    promql = waiting.promql
    for item in () if promql is None else expressions.check(promql, per_job=False):
        place = ("only_if_waiting", "promql")
        yield Finding(item.code, item.severity, place, item.message, item.hint)


# -- targets and stages


def _gpu_target(rule: Rule) -> Iterator[Finding]:
    for placed in _placed(rule):
        condition = placed.condition
        about_jobs = isinstance(
            condition,
            (ProfileCondition, SilentFor, NoProgress, NeedsMemory, Promql, OverBudget),
        ) or (isinstance(condition, Signal) and not condition.spec.device)
        if about_jobs:
            known = ", ".join(name for name, spec in signals.SIGNALS.items() if spec.device)
            yield _error(
                "GW206", placed.path, "this is about a job, the target is a card", f"use {known}"
            )
    for index, stage in enumerate(rule.stages):
        if stage.do.acts:
            yield _error(
                "GW206", ("stages", index, "do"), f"nothing can {stage.do.value} a card", "do: log"
            )
        if stage.owner_may is not None:
            yield _error("GW206", ("stages", index, "owner_may"), "a card has no owner")
    for key in rule.match:
        if key not in ("node", "gpu"):
            yield _error("GW206", ("match", key), "a card has only node and gpu to match")
    for name in ("ignore_phases", "team"):
        if getattr(rule, name):
            yield _error("GW206", (name,), "this is about a job, the target is a card")


def _stages(rule: Rule) -> Iterator[Finding]:
    told: Stage | None = None
    before: Stage | None = None
    for index, stage in enumerate(rule.stages):
        path = ("stages", index)
        if before is not None and stage.after < before.after:
            yield _error("GW208", (*path, "after"), "is earlier than that of the stage before it")
        if before is not None and stage.level.rank < before.level.rank:
            yield _error("GW208", (*path, "level"), "is lower than that of the stage before it")
        if stage.level is Level.SEVERE and told is None:
            yield _error(
                "GW207",
                path,
                "a severe stage needs an earlier stage that notifies the owner",
                "add one with do: notify before it",
            )
        if told is not None and stage.notice_delivered_for is not None:
            earliest = told.after + stage.notice_delivered_for
            if earliest > stage.after:
                yield _warning(
                    "GW306",
                    (*path, "after"),
                    f"the notice is not old enough before {durations.render(earliest)}",
                )
        if stage.do is Action.NOTIFY and told is None:
            told = stage
        before = stage


# -- rules that act


def _strength(rule: Rule) -> Iterator[Finding]:
    """From the softest to the hardest, and each that takes a card once."""
    hardest: Stage | None = None
    for index, stage in enumerate(rule.stages):
        if not stage.do.acts:
            continue
        place = ("stages", index, "do")
        if hardest is not None and stage.do.rank < hardest.do.rank:
            yield _error(
                "GW227",
                place,
                f"{stage.do.value} is softer than {hardest.do.value} of a stage before it: nothing "
                "softer follows what is harder",
                "put the stages in the order checkpoint, yield, requeue, terminate",
            )
            continue
        if hardest is not None and stage.do is hardest.do and stage.do.takes:
            yield _error(
                "GW226",
                ("stages", index),
                f"a job meets the first stage that does {stage.do.value}; this one is never "
                "reached",
                "combine what they need by `any` in one `when`, or write a second rule",
            )
        if hardest is not None and hardest.do is Action.YIELD and stage.do.ends:
            yield from _overlap(hardest, stage, index)
        hardest = stage
    if rule.mode is Mode.WARN and hardest is not None:
        text = f"in warn the stage that does {hardest.do.value} is only recorded"
        yield _warning("GW307", ("mode",), text)


def _overlap(asked: Stage, stage: Stage, index: int) -> Iterator[Finding]:
    """A stage that is due while the job still has time to leave as it was asked."""
    until = asked.after + (asked.grace or 0.0)
    if until > stage.after:
        yield _warning(
            "GW313",
            ("stages", index, "after"),
            f"the job may still be leaving until {durations.render(until)}, by the grace of yield: "
            "this one waits for that",
        )


def _taking(rule: Rule) -> Iterator[Finding]:
    for name, remark in (
        ("match", "match: {} is every job"),
        ("ignore_phases", "ignore_phases: {} ignores none"),
    ):
        if name not in rule.model_fields_set:
            yield _error(
                "GW211",
                (),
                f"a rule that takes cards has no defaults: {name} must be given",
                remark,
            )
    takes = [(i, stage) for i, stage in enumerate(rule.stages) if stage.do.takes]
    for _, stage in takes:
        yield from _grounding(rule, stage)
    for placed in _ending(rule):
        yield from _traps(placed)
    for index, stage in takes:
        yield from _haste(stage, ("stages", index))


def _traps(placed: _Placed) -> Iterator[Finding]:
    """What would end a healthy job, although each word of it is right."""
    path, condition = placed.path, placed.condition
    if _one_idle_card(placed):
        yield _error(
            "GW224",
            path,
            "some idle cards of several would make the whole job idle",
            "write gpus: all (under `not`: any), or do: notify",
        )
    if isinstance(condition, Signal) and not placed.negated:
        every = "min" if condition.upward else "max"
        if condition.agg in ("min", "max") and condition.agg != every:
            yield _warning(
                "GW308",
                (*path, "agg"),
                "a single sample of the window suffices",
                f"write agg: {every}, or a share",
            )
    if isinstance(condition, SilentFor) and "cpu" not in condition.signals:
        yield _warning(
            "GW309",
            (*path, "signals"),
            "a job that goes on reporting is never found, however long",
            "add cpu, unless the rule is about jobs that stopped reporting",
        )


def _one_idle_card(placed: _Placed) -> bool:
    """Whether low activity of one card suffices; a negation turns `all` into `any`."""
    condition, negated = placed.condition, placed.negated
    match condition:
        case Signal() if condition.signal in _ACTIVITY:
            low = condition.upward == negated
        case ProfileCondition() if condition.profile.gpu_utilization is not None:
            innocent = Direction.BELOW if negated else Direction.ABOVE
            low = condition.profile.gpu_utilization.direction is not innocent
        case _:
            return False
    # As many as all of them, in either word.
    gpus = Gpus.ALL if condition.gpus == GpuShare(1.0) else condition.gpus
    return low and gpus not in (Gpus.ANY if negated else Gpus.ALL, None)


def _grounding(rule: Rule, stage: Stage) -> Iterator[Finding]:
    paths = _paths(rule.when, negated=False)
    if stage.when is not None:
        further = _paths(stage.when, negated=False)
        paths = {first | second for first in paths for second in further}
    if any(path == {"utilization"} for path in paths):
        yield _error(
            "GW210",
            ("when",),
            "utilization alone never ends a job: a training that loads data looks the same",
            "add a condition on memory held, CPU time or silent_for with cpu",
        )
    if any(not path & {"utilization", "measured"} for path in paths):
        yield _error(
            "GW209",
            ("when",),
            "it can become true by what the job or an expression says alone",
            "in each branch, add a condition that NVML or /proc measures",
        )


def _haste(stage: Stage, place: tuple[Step, ...]) -> Iterator[Finding]:
    if (stage.notice_delivered_for or 0.0) < SHORT_NOTICE_SECONDS:
        yield _warning(
            "GW305", (*place, "notice_delivered_for"), "the owner has less than 5m to react"
        )
    if stage.do is Action.YIELD and (stage.grace or 0.0) < SHORT_LEAVE_SECONDS:
        yield _warning("GW305", (*place, "grace"), "an epoch is hardly over in less than 5m")
    elif (stage.grace or 0.0) < SHORT_GRACE_SECONDS:
        yield _warning("GW305", (*place, "grace"), "a checkpoint is hardly saved in less than 10s")


def _paths(condition: Condition, *, negated: bool) -> set[frozenset[str]]:
    """Every way in which a condition can become true, as the set of what it then rests on.

    There are three things to rest on (utilization, measured, said), so that there are at most
    eight sets, whatever the depth. An expression may repeat what the other conditions say, and
    the silence of a channel that a job never had says nothing: they are nothing to rest on. Neither
    is a limit that every value is within; and by one that none is beyond nothing becomes true.
    """
    match condition:
        case Not():
            return _paths(condition.not_, negated=not negated)
        case All() | Any_():
            parts = condition.all if isinstance(condition, All) else condition.any
            below = [_paths(part, negated=negated) for part in parts]
            together = isinstance(condition, All) != negated
        case ProfileCondition():
            below = [
                _ways(False if unreachable(deviation) else None, name, negated=negated)
                for name, deviation in condition.profile.entries.items()
            ]
            together = negated
        case Signal() | NoProgress():
            known = certain(condition) if isinstance(condition, Signal) else None
            return _ways(known, condition.key.signal, negated=negated)
        case SilentFor() if "cpu" in condition.signals:
            return {frozenset({"measured"})}
        case _:  # an expression, a word of the job's own, or what it declares
            return {frozenset()}
    if not together:
        return set().union(*below)
    product = {frozenset[str]()}
    for each in below:
        product = {left | right for left in product for right in each}
    return product


def _ways(known: bool | None, signal: str, *, negated: bool) -> set[frozenset[str]]:
    """The ways in which one measured value makes its condition true."""
    if known is None:
        return {frozenset({_kind(signal)})}
    return {frozenset()} if known is not negated else set()


def _kind(signal: str) -> str:
    if signal in _UTILIZATION:
        return "utilization"
    spec = signals.SIGNALS.get(signal)  # what is no signal of its own is the trainer's progress
    return "said" if spec is None or spec.self_report else "measured"
