"""Jobs that come back again and again without getting on: a loop that nobody else ends. Pure.

RequeueExit brings a job back for ever: one whose data are gone, and that leaves with status 75 as
soon as it begins, starts some ten times a minute. What counts is coming back by itself; a job that
was told to leave for another is no loop, and neither is one that got a new epoch done in between.
Each time it has to wait twice as long, and in the end it is held.

Who is told to leave for others again and again is counted as well, and only told of.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from gpuwarden.durations import render
from gpuwarden.scheduling.drivers import LOOP

if TYPE_CHECKING:
    from collections.abc import Mapping
    from zoneinfo import ZoneInfo

    from gpuwarden.platforms.slurm_listings import ListedJob
    from gpuwarden.scheduling.engine_terms import AtMost

MOST_TIMES: Final = 200
"""Of one job that are remembered: more than any policy asks for."""
FIRST_PAUSE_SECONDS: Final = 60.0
"""How long a job waits that came back once."""


@dataclass(frozen=True, slots=True)
class History:
    """What is remembered of one job.

    Attributes:
        restarts: how often it had come back by Slurm's count, when it was last seen.
        times: Unix times at which it came back by itself since it last got on.
        made_way: Unix times at which it came back after it was told to leave.
        epoch: the last one that is known of it, or None.
        told: whether it was told to leave since it last came back.
        got_on: whether it was seen to have done a new epoch since then.
        held: Unix time at which it was held for this, or None.
        paused: `restarts` as it was when its last pause was set; what a person changes of that
            pause stays changed.
        stopped: `restarts` as it was when it was held because its trainer wants that, or None.
    """

    restarts: int = 0
    times: tuple[float, ...] = ()
    made_way: tuple[float, ...] = ()
    epoch: int | None = None
    told: bool = False
    got_on: bool = False
    held: float | None = None
    paused: int | None = None
    stopped: int | None = None


@dataclass(frozen=True, slots=True)
class Loop:
    """A job that has to be held.

    Attributes:
        number: Slurm's number of it.
        words: why, as one sentence for its owner.
        code: of the same.
    """

    number: str
    words: str
    code: str = LOOP


@dataclass(frozen=True, slots=True)
class Pause:
    """A job that may not start again at once.

    Attributes:
        number: Slurm's number of it.
        until: Unix time.
        words: why, as one sentence for its owner.
        due: whether Slurm has yet to be told.
    """

    number: str
    until: float
    words: str
    due: bool


@dataclass(frozen=True, slots=True)
class Guarded:
    """What is remembered after a look, and what is to be done.

    Attributes:
        histories: key of a job -> what is remembered; only of jobs that are still there.
        loops: jobs that have to be held now.
        pauses: jobs that have to wait.
        held: number of a job that is held for this -> why.
        driven_out: numbers of the jobs that had to leave for others more often than they may.
    """

    histories: Mapping[str, History] = field(default_factory=dict)
    loops: tuple[Loop, ...] = ()
    pauses: tuple[Pause, ...] = ()
    held: Mapping[str, str] = field(default_factory=dict)
    driven_out: tuple[str, ...] = ()


def pause_seconds(times: int, terms: AtMost) -> float:
    """How long a job waits that came back so often; all its pauses fit into half of `terms.per`.

    Else those who wait would never have come back often enough to be held.
    """
    doubled = 2.0 ** (times - 1)
    return min(FIRST_PAUSE_SECONDS, terms.per / 2 / (2.0**terms.times - 1)) * doubled


def key_of(job: ListedJob) -> str:
    """What stays the same of a job while it comes back: a number alone may be given anew."""
    return f"{job.job.job_id}/{job.job.user_id}/{job.job.name}"[:200]


def guard(
    jobs: tuple[ListedJob, ...],
    histories: Mapping[str, History],
    terms: AtMost | None,
    *,
    now: float,
    epochs: Mapping[str, int],
    zone: ZoneInfo,
    made_way: AtMost | None = None,
) -> Guarded:
    """Look at every job once.

    Args:
        jobs: all that the controller knows.
        histories: of the last look.
        terms: how often a job may come back; None holds nobody.
        now: Unix time.
        epochs: number of a job -> the last epoch that is known of its run.
        zone: in whose time moments are told.
        made_way: how often a job may have to leave for others, or None.
    """
    kept: dict[str, History] = {}
    loops: list[Loop] = []
    pauses: list[Pause] = []
    held: dict[str, str] = {}
    driven_out: list[str] = []
    for job in jobs:
        if job.job.ended or job.tasks:
            continue
        history = _seen(job, histories.get(key_of(job)), now, epochs.get(job.number))
        waiting = not job.job.holds
        if history.held is not None and waiting and job.priority:
            # Somebody released it: it begins anew. What Slurm tells of a held job that came back
            # is why it waits besides; its priority is 0 as long as it is held.
            history = replace(history, held=None, times=())
        if terms is not None:
            recent = tuple(time for time in history.times if now - time <= terms.per)
            if history.held is not None:
                held[job.number] = _words(len(history.times), terms)
            elif len(recent) > terms.times and waiting:
                loops.append(Loop(job.number, _words(len(recent), terms)))
            elif recent and waiting and job.priority:
                pauses += _pause(job, history, recent, terms=terms, now=now, zone=zone)
        if made_way is not None and _count(history.made_way, made_way, now) > made_way.times:
            driven_out.append(job.number)
        kept[key_of(job)] = history
    return Guarded(kept, tuple(loops), tuple(pauses), held, tuple(driven_out))


def _count(times: tuple[float, ...], terms: AtMost, now: float) -> int:
    return sum(now - time <= terms.per for time in times)


def _pause(
    job: ListedJob,
    history: History,
    recent: tuple[float, ...],
    *,
    terms: AtMost,
    now: float,
    zone: ZoneInfo,
) -> list[Pause]:
    """What a job has still to wait for having come back; nothing where that is over."""
    until = recent[-1] + pause_seconds(len(recent), terms)
    if until <= now:
        return []
    due = history.paused != history.restarts
    if not due and (job.eligible or 0.0) <= now:
        return []  # a person let it go on
    moment = f"{dt.datetime.fromtimestamp(max(until, job.eligible or 0.0), zone):%a %H:%M:%S}"
    times = "once" if len(recent) == 1 else f"{len(recent)} times"
    words = (
        f"It came back {times} within {render(terms.per)} without a new epoch, so it waits until "
        f"{moment} (after {terms.times} it is held): look into its log."
    )
    # What makes it wait longer anyway is left as it is.
    return [Pause(job.number, until, words, due and (job.eligible or 0.0) < until - 1.0)]


def mark_paused(guarded: Guarded, job: ListedJob) -> Guarded:
    """The same, after Slurm was told that a job has to wait."""
    key = key_of(job)
    history = replace(guarded.histories[key], paused=guarded.histories[key].restarts)
    return replace(guarded, histories={**guarded.histories, key: history})


def returning(histories: Mapping[str, History], jobs: tuple[ListedJob, ...]) -> tuple[str, ...]:
    """Numbers of the jobs that came back by themselves: of them it matters whether they get on."""
    return tuple(
        job.number
        for job in jobs
        if (known := histories.get(key_of(job))) is not None and known.times and not job.tasks
    )


def mark_held(guarded: Guarded, job: ListedJob, now: float) -> Guarded:
    """The same, after a job was held."""
    key = key_of(job)
    history = replace(guarded.histories[key], held=now)
    words = next(loop.words for loop in guarded.loops if loop.number == job.number)
    return replace(
        guarded,
        histories={**guarded.histories, key: history},
        held={**guarded.held, job.number: words},
    )


def _seen(job: ListedJob, history: History | None, now: float, epoch: int | None) -> History:
    restarts = job.job.restarts
    if history is None or restarts < history.restarts:
        # What happened before it was first seen is not known: nothing is held for it. One that has
        # come back less often than it had is another that was given the same number and name.
        return History(restarts, epoch=epoch, told=job.preempted is not None)
    if epoch is not None and history.epoch is None:
        # The first that is known of it says where it stands, and not that it got on.
        history = replace(history, epoch=epoch)
    elif epoch is not None and history.epoch is not None and epoch > history.epoch:
        history = replace(history, times=(), epoch=epoch, got_on=True)
    if restarts > history.restarts:
        count = restarts - history.restarts - history.got_on
        came_back = () if history.told else (now,) * count
        times = (*history.times, *came_back)[-MOST_TIMES:]
        made_way = (*history.made_way, *((now,) if history.told else ()))[-MOST_TIMES:]
        history = replace(
            history, restarts=restarts, times=times, made_way=made_way, told=False, got_on=False
        )
    if job.preempted is not None and job.job.holds:
        history = replace(history, told=True)
    return history


def _words(times: int, terms: AtMost) -> str:
    return (
        f"It came back {times} times within {render(terms.per)} without a new epoch, and is held: "
        "look into its log, then `scontrol release` it."
    )
