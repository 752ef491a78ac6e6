"""Playing tricks on rules: made-up histories, judged as the live engine would.

First every offender shows itself to every rule, which says when an honest one is found, told and
ended. Then each trick is played, and what becomes of it is compared with that. Every trick has its
own engine state, so that limits by owner and hour never let one trick hide behind another.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
import signal
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import httpx

from gpuwarden import durations
from gpuwarden.ruleengine.attack_offenders import OFFENDERS, disguised, moment_for
from gpuwarden.ruleengine.attack_tricks import TRICKS, plays, rests_on_word
from gpuwarden.ruleengine.attack_watches import Reached, Watch
from gpuwarden.ruleengine.attacks import Kind, Play, Target, every_leaf
from gpuwarden.ruleengine.conditions import (
    NoProgress,
    OverBudget,
    ProfileCondition,
    Promql,
    Signal,
    SilentFor,
)
from gpuwarden.ruleengine.facts import gather
from gpuwarden.ruleengine.histories import history
from gpuwarden.ruleengine.model import Limits, TerminateLimits
from gpuwarden.ruleengine.model import Target as RuleTarget
from gpuwarden.ruleengine.range_sources import RangeSource
from gpuwarden.ruleengine.rehearsals import enforced, tick_times
from gpuwarden.ruleengine.rule_tests import Expectation, RuleTest
from gpuwarden.ruleengine.temporary_servers import temporary_prometheus

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import AsyncIterator, Callable, Iterable, Sequence

    from gpuwarden.quantities import Window
    from gpuwarden.ruleengine.attack_offenders import Forge, Offender
    from gpuwarden.ruleengine.attacks import Trick
    from gpuwarden.ruleengine.model import Rule, RuleSet
    from gpuwarden.ruleengine.prometheus import Source
    from gpuwarden.ruleengine.rule_tests import DeclaredJob

SHORTEST_INTERVAL_SECONDS = 1.0
LONGEST_INTERVAL_SECONDS = 60.0
WINDOW_SCRAPES = 5
"""At least so many scrapes in the shortest window of a rule set."""
MAX_SCRAPES = 3000
"""A longer history, of two days at most, is not played: it would take hours."""
SLACK_TICKS = 3
"""A trick that delays by no more than this many ticks delays by nothing."""
_RANGES = re.compile(r"\[([0-9a-z]+)|offset ([0-9a-z]+)")
_WIDE = Limits.model_construct(
    terminate=TerminateLimits.model_construct(
        per_tick=100, per_hour=1000, per_user_per_day=1000, halt_above_share_of_running=1.0
    )
)


class Outcome(StrEnum):
    """What becomes of a trick."""

    HELD = "held"
    """It changes nothing."""
    DELAYED = "delayed"
    """Later by at most `trust_for`."""
    TOLD = "told"
    """Every time its owner is told; only the end is escaped."""
    ELSEWHERE = "elsewhere"
    """Another rule of the set tells its owner, or finds its card."""
    GRANTED = "granted"
    """By what the operator promised."""
    OBEYS = "obeys"
    """It gives up what the rule is about."""
    ADVICE = "advice"
    """The rule rests on the job's word and ends nobody."""
    ESCAPES = "escapes"
    """For longer than `trust_for`."""


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one trick; durations are seconds.

    Attributes:
        outcome: in one word.
        later: how much later than an honest offender it was dealt with, or None: never.
        by: the rule that found it instead, or an empty string.
        after: when that rule told its owner, or found its card, since the trick began; or None.
        held_by: what kept the job while it was due.
        card: whether that rule is about cards.
    """

    trick: Trick
    outcome: Outcome
    later: float | None = None
    by: str = ""
    after: float | None = None
    held_by: tuple[str, ...] = ()
    card: bool = False


@dataclass(frozen=True, slots=True)
class Attacked:
    """One rule and all tricks; durations are seconds since the offender's begin.

    Attributes:
        rule: the rule.
        skipped: why no trick was played, or an empty string.
        offender: whom it finds without a trick.
        found, told, last: when.
        ends: whether its last stage ends the job.
        results: of the tricks, in their order.
    """

    rule: Rule
    skipped: str = ""
    offender: Offender | None = None
    found: float = 0.0
    told: float | None = None
    last: float = 0.0
    ends: bool = False
    results: tuple[Result, ...] = ()

    @property
    def escapes(self) -> tuple[Result, ...]:
        """The tricks that nothing bounds."""
        return tuple(item for item in self.results if item.outcome is Outcome.ESCAPES)


@dataclass(frozen=True, slots=True)
class _Honest:
    """The offender of a rule and when it was dealt with, in seconds since its begin."""

    offender: Offender
    job: DeclaredJob
    reached: Reached
    ended: bool


async def attack_until_told(
    rules: RuleSet, wanted: Sequence[str], *, tell: Callable[[str], None]
) -> list[Attacked]:
    """Like `attack`, in the main thread; SIGTERM ends it, and its Prometheus with it.

    Raises:
        CancelledError: on SIGTERM.
    """
    task = asyncio.current_task()
    if task is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await attack(rules, wanted, tell=tell)


async def attack(
    rules: RuleSet,
    wanted: Sequence[str],
    *,
    tell: Callable[[str], None],
    tricks: Sequence[Trick] = TRICKS,
) -> list[Attacked]:
    """Play tricks on rules.

    Args:
        rules: those that are used together.
        wanted: ids of the rules to attack; all where empty.
        tell: is told what happens, for a person who waits.
        tricks: which.

    Raises:
        ServiceUnavailable: Prometheus is not installed, or fails.
        QueryRefused: a query of ours is refused.
    """
    rules = rules.model_copy(
        update={
            "limits": rules.limits or _WIDE,
            # Somebody always waits for what an offender holds.
            "rules": tuple(
                rule.model_copy(update={"only_if_waiting": None}) for rule in rules.rules
            ),
        }
    )
    chosen = [rule for rule in rules.rules if not wanted or rule.id in wanted]
    done = []
    for number, rule in enumerate(chosen, 1):
        tell(f"{number}/{len(chosen)} {rule.id}")
        done.append(await _attack(rule, rules, tricks))
    return done


async def _attack(rule: Rule, rules: RuleSet, tricks: Sequence[Trick]) -> Attacked:
    if rule.target is RuleTarget.GPU:
        return Attacked(rule, "it judges cards, which say nothing of themselves")
    if "job_id" in rule.match:
        return Attacked(rule, "it is about single jobs by their id")
    interval = _interval(rules.rules)
    longest, needed = MAX_SCRAPES * interval, _reach(rule, interval) + rule.trust_for
    if needed > longest:
        return Attacked(
            rule,
            f"it takes {durations.render(round(needed))}, and attacks are played for at most "
            f"{durations.render(longest)}",
        )
    honest = await _honest(rule, rules, interval)
    if isinstance(honest, str):
        return Attacked(rule, honest)
    begin = moment_for(rule).timestamp()
    reached, done = honest.reached, honest.reached.last or 0.0
    target = Target(
        rule=rule,
        offender=honest.offender,
        job=honest.job,
        found=(reached.found or 0.0) - begin,
        done=done - begin,
        length=1.1 * (done - begin) + rule.trust_for + 10 * interval,
        interval=interval,
        whitelist=rules.whitelist,
    )
    played = plays(target, tricks)
    results = await _play(target, rules, played, ended=honest.ended)
    return Attacked(
        rule,
        offender=honest.offender,
        found=target.found,
        told=None if reached.told is None else reached.told - begin,
        last=target.done,
        ends=honest.ended,
        results=tuple(results),
    )


def _interval(rules: Iterable[Rule]) -> float:
    """Seconds between two scrapes, so that every window of a rule set holds some."""
    lengths = [
        length
        for rule in rules
        for leaf in every_leaf(rule)
        for length in _leaf_lengths(leaf)
        if length > 0
    ]
    fit = min(lengths, default=300.0) / WINDOW_SCRAPES
    return float(min(LONGEST_INTERVAL_SECONDS, max(SHORTEST_INTERVAL_SECONDS, fit // 1)))


def _leaf_lengths(leaf: object) -> list[float]:
    """How far back a condition looks, in seconds; samples are of the scrapes' own measure."""
    match leaf:
        case Signal():
            window: Window | None = leaf.window
        case ProfileCondition():
            window = leaf.window
        case SilentFor():
            return [leaf.silent_for]
        case NoProgress():
            return [leaf.no_progress_for]
        case Promql() | OverBudget():
            texts = [a or b for a, b in _RANGES.findall(leaf.promql)]
            return [
                durations.parse(text) for text in texts if re.fullmatch(r"([0-9]+[smhdw])+", text)
            ]
        case _:
            return []
    return [window.seconds] if window is not None and window.samples is None else []


def _reach(rule: Rule, interval: float) -> float:
    """Seconds within which an honest offender is dealt with."""
    back = sum(sorted(length for leaf in every_leaf(rule) for length in _leaf_lengths(leaf))[-2:])
    stages = max((stage.after for stage in rule.stages), default=0.0)
    notice = max((stage.notice_delivered_for or 0.0 for stage in rule.stages), default=0.0)
    return rule.cold_start + back + rule.for_ + stages + notice + 20 * interval


def _scene(
    name: str, start: dt.datetime, *, length: float, interval: float, jobs: Sequence[DeclaredJob]
) -> RuleTest:
    """A history of these jobs."""
    end = Expectation.model_construct(at=length, rule="none", job="none", gpu=None)
    return RuleTest.model_construct(
        name=name,
        start=start,
        interval=interval,
        tick=interval,
        notices="delivered",
        jobs=tuple(jobs),
        series=(),
        outages=(),
        expect=(end,),
    )


# -- the honest offender


async def _honest(rule: Rule, rules: RuleSet, interval: float) -> _Honest | str:
    """The offender that a rule deals with soonest and furthest, or why there is none."""
    shown: list[tuple[Offender, DeclaredJob]] = []
    missing = ""
    for number, offender in enumerate(OFFENDERS):
        job = disguised(offender, rule)
        if isinstance(job, str):
            missing = job
        else:
            shown.append((offender, job.model_copy(update={"job": f"proc-offender-{number}"})))
    if not shown:
        return missing
    start = moment_for(rule)
    scene = _scene(
        "honest",
        start,
        length=_reach(rule, interval),
        interval=interval,
        jobs=[job for _, job in shown],
    )
    watches = [
        Watch(Play((job,)), rules, rule.id, scene=scene, ending=rule.ends) for _, job in shown
    ]
    forges = [(job, offender.forge) for offender, job in shown if offender.forge is not None]
    async with _served(scene, forges) as source:
        await _judge(scene, source, rules, {rule.id}, watches)
    pairs = list(zip(shown, watches, strict=True))
    # Where the rule ends none of them, its other stages are what a trick could escape.
    ends = any(watch.ended for _, watch in pairs)
    found = [
        _Honest(offender, job, dataclasses.replace(reached, last=last), watch.ended)
        for (offender, job), watch in pairs
        for reached in watch.reached
        if (last := reached.last if ends else reached.staged) is not None
    ]
    if not found:
        return "none of the made-up offenders breaks it"
    # One that needs no other name, and whose age alone no other rule finds, shows most.
    return min(
        found,
        key=lambda item: (
            not item.ended,
            item.offender.lasting,
            not _as_it_is(item),
            item.reached.last or 0.0,
        ),
    )


def _as_it_is(item: _Honest) -> bool:
    """Whether a rule finds an offender without calling it otherwise."""
    return item.job.model_copy(update={"job": item.offender.job.job}) == item.offender.job


# -- tricks


async def _play(
    target: Target, rules: RuleSet, played: Sequence[tuple[Trick, Play]], *, ended: bool
) -> list[Result]:
    """What becomes of each trick, in their order."""
    found: dict[str, Result] = {}
    short = [(trick, play) for trick, play in played if not play.keeps]
    keeps = ended and target.length + _kept(target.rule) <= MAX_SCRAPES * target.interval
    long = [(trick, play) for trick, play in played if play.keeps and keeps]
    for group, length in ((short, target.length), (long, target.length + _kept(target.rule))):
        if group:
            results = await _play_group(target, rules, group, length=length, ended=ended)
            found |= {item.trick.name: item for item in results}
    return [found[trick.name] for trick, _ in played if trick.name in found]


def _kept(rule: Rule) -> float:
    """Seconds by which its owner may keep a job in all."""
    return sum(s.owner_may.keep * s.owner_may.times for s in rule.stages if s.owner_may is not None)


async def _play_group(
    target: Target,
    rules: RuleSet,
    played: Sequence[tuple[Trick, Play]],
    *,
    length: float,
    ended: bool,
) -> list[Result]:
    jobs = [job for _, play in played for job in (*play.jobs, *play.bystanders)]
    start = moment_for(target.rule)
    scene = _scene("tricks", start, length=length, interval=target.interval, jobs=jobs)
    forges: list[tuple[DeclaredJob, Forge]] = []
    for _, play in played:
        for forge in (target.offender.forge, play.forge):
            forges += [(job, forge) for job in play.jobs if forge is not None]
    watches = [Watch(play, rules, target.rule.id, scene=scene, ending=ended) for _, play in played]
    # Of a job its owner must be told; what is found about a card, its operators see.
    others = {
        rule.id
        for rule in rules.rules
        if rule.target is RuleTarget.GPU or any(stage.do != "log" for stage in rule.stages)
    } - {target.rule.id}
    async with _served(scene, forges) as source:
        await _judge(scene, source, rules, {target.rule.id}, watches)
        judged = [
            _judged(target, trick, watch, begin=start.timestamp(), ended=ended)
            for (trick, _), watch in zip(played, watches, strict=True)
        ]
        escaped = [
            (number, Watch(played[number][1], rules, *sorted(others), scene=scene, ending=False))
            for number, item in enumerate(judged)
            if item.outcome in (Outcome.ESCAPES, Outcome.ADVICE, Outcome.OBEYS)
        ]
        if escaped and others:
            await _judge(scene, source, rules, others, [watch for _, watch in escaped])
    for number, watch in escaped if others else ():
        found = watch.soonest()
        if found is not None:
            judged[number] = dataclasses.replace(
                judged[number],
                outcome=Outcome.ELSEWHERE,
                by=found.rule_id,
                after=found.at - start.timestamp(),
                card=found.card,
            )
    return judged


def _judged(target: Target, trick: Trick, watch: Watch, *, begin: float, ended: bool) -> Result:
    """What a rule made of a trick, without a look at the others."""
    rule, reached = target.rule, watch.reached
    slack = SLACK_TICKS * target.interval
    last = watch.dealt_with
    later = None if last is None else max(0.0, last - begin - target.done)
    held_by = tuple(sorted({why for item in reached for why in item.held_by}))
    if later is not None and later <= slack:
        return Result(trick, Outcome.HELD, 0.0, held_by=held_by)
    if trick.kind is Kind.GRANT:
        granted = later is not None and later <= _kept(rule) + slack
        return Result(trick, Outcome.GRANTED if granted else Outcome.ESCAPES, later)
    if later is not None and later <= rule.trust_for + slack:
        return Result(trick, Outcome.DELAYED, later, held_by=held_by)
    told = bool(reached) and any(item.told is not None for item in reached)
    if ended and told and "work_lost" in held_by:
        return Result(trick, Outcome.GRANTED, later, held_by=held_by)
    if told and trick.kind is Kind.ATTEMPT:
        return Result(trick, Outcome.TOLD, later, held_by=held_by)
    outcome = Outcome.ESCAPES
    if trick.name == "just-under" or (target.offender.lasting and trick.kind is Kind.ATTEMPT):
        outcome = Outcome.OBEYS
    elif not rule.ends and (rests_on_word(rule.when) or trick.kind is Kind.ATTEMPT):
        outcome = Outcome.ADVICE
    return Result(trick, outcome, later, held_by=held_by)


@contextlib.asynccontextmanager
async def _served(
    scene: RuleTest, forges: Sequence[tuple[DeclaredJob, Forge]]
) -> AsyncIterator[Source]:
    """A Prometheus that holds a history, with the series that its jobs forge."""
    made = history(scene)
    for job, forge in forges:
        forge(made, job)
    async with (
        temporary_prometheus(made) as url,
        httpx.AsyncClient(timeout=60.0, trust_env=False) as client,
    ):
        yield RangeSource(url, client, times=tick_times(scene))


async def _judge(
    scene: RuleTest,
    source: Source,
    rules: RuleSet,
    ids: set[str],
    watches: Sequence[Watch],
) -> None:
    """Judge a history tick by tick."""
    needed = enforced(rules, frozenset(ids))
    teams = {job.user: job.team for job in scene.jobs if job.team}
    for number, time in enumerate(tick_times(scene)):
        if all(watch.over for watch in watches):
            return
        facts = await gather(source, needed, time=time, scrape_interval=scene.interval, teams=teams)
        for watch in watches:
            if not watch.over:
                watch.tick(facts, scene.tick if number else 0.0)
