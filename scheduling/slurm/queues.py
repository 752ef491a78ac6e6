"""Slurm's queue in the words of `gpuwarden queue`. Pure.

Slurm decides; this only tells. Its order is its own: the partition's tier, the job's priority, then
who came first. A start that it plans is told as its plan, and only for jobs that wait for their
turn: of one that a limit keeps, the planned start means nothing.
"""

from __future__ import annotations

import datetime as dt
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, NamedTuple

from gpuwarden.platforms.slurm import ENDED, PENDING, attempt_id
from gpuwarden.platforms.slurm_limits import AllLimits
from gpuwarden.platforms.slurm_reasons import Kind, Reason, explain
from gpuwarden.schedule_api import EntryState, Interval, QueueEntry
from gpuwarden.scheduling.slurm.endings import end_words
from gpuwarden.scheduling.slurm.meanings import card_of, priority_of, team_of
from gpuwarden.scheduling.slurm.obstacles import Obstacles
from gpuwarden.scheduling.slurm.scripts import read_comment

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gpuwarden.platforms.slurm_arrays import ArrayTasks
    from gpuwarden.platforms.slurm_listings import ListedJob
    from gpuwarden.platforms.slurm_nodes import SlurmNode
    from gpuwarden.scheduling.policies import Policy

ENGINE: Final = "slurm"
FORESEEABLE_SECONDS: Final = 180 * 86_400.0
"""Beyond it Slurm's plan stands behind jobs without a time limit, and is none."""
_HELD: Final = frozenset({"REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"})
_IN_TURN: Final = frozenset({Kind.TURN})


@dataclass(frozen=True, slots=True)
class Reading:
    """What was read of a cluster at one time.

    Attributes:
        cluster: its name.
        taken: Unix time.
        jobs: every job that its controller knows.
        nodes: its nodes.
        tiers: partition -> its tier.
        limits: of accounts and QOS; empty without accounting.
        accounts_for_gpus: whether Slurm tells how many cards its jobs have.
        nodes_taken: Unix time at which nodes, tiers and limits were read.
    """

    cluster: str
    taken: float
    jobs: tuple[ListedJob, ...] = ()
    nodes: tuple[SlurmNode, ...] = ()
    tiers: Mapping[str, int] = field(default_factory=dict)
    limits: AllLimits = field(default_factory=AllLimits)
    accounts_for_gpus: bool = True
    nodes_taken: float | None = None


def entries_of(reading: Reading, policy: Policy) -> tuple[QueueEntry, ...]:
    """Every job, those that wait in Slurm's order first, then those that run, then the rest."""
    waiting = sorted(
        (job for job in reading.jobs if is_waiting(job)), key=lambda job: turn(job, reading.tiers)
    )
    places = _places(
        [job for job in waiting if reason_of(job).kind in _IN_TURN and state_of(job) is _PENDING],
        Counter(job.job.array_job_id for job in reading.jobs if job.job.holds),
    )
    obstacles = Obstacles(reading)
    found = [
        _waiting_entry(job, places.get(job.number), reading, policy=policy, obstacles=obstacles)
        for job in waiting
    ]
    known = {id(job) for job in waiting}
    others = sorted(
        (job for job in reading.jobs if id(job) not in known),
        key=lambda job: (not job.job.holds, job.job.start_time or 0.0, job.job.job_id),
    )
    return (*found, *(_entry(job, reading, policy) for job in others))


_PENDING: Final = EntryState.PENDING


def is_waiting(job: ListedJob) -> bool:
    """Whether a job has no nodes now and may get some, also after it was held."""
    states = job.job.states
    return bool(states & PENDING) and not job.job.holds


def turn(job: ListedJob, tiers: Mapping[str, int]) -> tuple[int, int, int, str]:
    """What Slurm sorts waiting jobs by: the smaller, the earlier."""
    tier = max((tiers.get(name, 0) for name in job.job.partition.split(",")), default=0)
    return (-tier, -job.priority, job.job.job_id, job.number)


def state_of(job: ListedJob) -> EntryState:
    """Where a job stands.

    One that completes still has its cards; one that came back, or was preempted, is not over.
    """
    states = job.job.states
    if job.job.holds:
        if "SUSPENDED" in states:
            return EntryState.SUSPENDED
        if "COMPLETING" in states or job.preempted is not None:
            return EntryState.LEAVING
        return EntryState.RUNNING
    if states & PENDING:
        held = bool(states & _HELD) or reason_of(job).kind in (Kind.PERSON, Kind.BUDGET)
        return EntryState.HELD if held else EntryState.PENDING
    if "COMPLETED" in states:
        return EntryState.DONE
    # Preempted and not queued again, or in a state that is not known here: it may come back.
    return EntryState.FAILED if states & ENDED else EntryState.HELD


def reason_of(job: ListedJob) -> Reason:
    """Why a job waits; of one that Slurm holds after its end, why that is."""
    if "SPECIAL_EXIT" in job.job.states:
        words = (
            "it ended with the status that means hold (76): look into its log, then `scontrol "
            "release` it"
        )
        return Reason("SpecialExit", words, Kind.PERSON)
    if "REQUEUE_HOLD" in job.job.states and not job.job.reason.startswith("JobHeld"):
        return Reason("JobHeldUser", explain("JobHeldUser").words, Kind.PERSON)
    reason = explain(job.job.reason)
    if reason.code == "BeginTime" and job.job.restarts:
        words = (
            "it may not begin yet: Slurm starts what came back after cred_expire of AuthInfo "
            "(120 s unless that was set), or at the time that it was given"
        )
        return replace(reason, words=words)
    return reason


def _entry(job: ListedJob, reading: Reading, policy: Policy) -> QueueEntry:
    own = job.job
    comment = read_comment(own.comment)
    state = state_of(job)
    why, words = _said_of_running(job, state)
    return QueueEntry(
        engine=ENGINE,
        id=job.number,
        name=own.name,
        user=own.user_name,
        state=state,
        gpus=job.gpus,
        submitted=own.submit_time or 0.0,
        run_id=None if comment is None else comment.run_id,
        team=team_of(policy, own.account, own.user_name),
        priority=priority_of(policy, own.qos, own.partition.partition(",")[0]),
        gpu_type=card_of(policy, job.gpu_type) if job.gpus else "",
        started=own.start_time if not is_waiting(job) else None,
        why=why,
        words=words,
        requeues=own.restarts,
        job_id=attempt_id(own, reading.cluster) if own.holds else None,
        finish=_finish(job, reading.taken) if own.holds else None,
        tasks=1 if job.tasks is None else max(1, job.tasks.count or 1),
    )


def _finish(job: ListedJob, now: float) -> Interval | None:
    """Its end at the latest: its time limit, before which it may end at any time."""
    end = job.job.end_time
    if end is None or job.job.time_limit is None or end < now:
        return None
    return Interval(now, end, 0)


def _said_of_running(job: ListedJob, state: EntryState) -> tuple[str, str]:
    """A code and a sentence for a job that does not wait; both empty where there is nothing."""
    why, words = "", ""
    if state is EntryState.LEAVING and "COMPLETING" not in job.job.states:
        why, words = "preempted", "it was told to leave for another job, and still has its cards"
    elif state is EntryState.LEAVING:
        why, words = "completing", "it has ended; its cards come back once Slurm has cleaned up"
    elif state is EntryState.SUSPENDED:
        why, words = "suspended", "it is suspended, and keeps its cards"
    elif state is EntryState.HELD:
        why = "preempted"
        words = (
            "it was preempted and Slurm did not queue it again: `scontrol requeue` starts it anew, "
            "where it was submitted with --requeue"
        )
    elif state is EntryState.FAILED:
        ended = next(iter(sorted(job.job.states & ENDED)), "FAILED")
        why, words = ended.lower(), end_words(ended, job.status)
    elif not job.gpus_known:
        why = "cards_unknown"
        words = "Slurm does not say how many cards it has: gres/gpu is not in AccountingStorageTRES"
    return why, _as_sentence(words)


def _as_sentence(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}." if words else ""


def _waiting_entry(
    job: ListedJob,
    place: int | None,
    reading: Reading,
    *,
    policy: Policy,
    obstacles: Obstacles,
) -> QueueEntry:
    reason = reason_of(job)
    return replace(
        _entry(job, reading, policy),
        why=reason.code,
        words=_sentence(job, reason, reading, policy=policy, obstacles=obstacles),
        position=place,
        start=None if place is None else _plan(job, reading.taken),
        must_end=obstacles.of(job, reason.kind),
    )


def _places(line: Sequence[ListedJob], running: Mapping[int | None, int]) -> dict[str, int]:
    """Place of each job among those that wait for the same cards.

    Jobs that want the same are counted together: a long queue has few kinds of wishes.

    Args:
        line: who waits, in order.
        running: array -> how many of its tasks run.
    """
    counts: Counter[_Wish] = Counter()
    found = {}
    for job in line:
        wish = _Wish(frozenset(job.job.partition.split(",")), job.gpu_type, bool(job.gpus))
        found[job.number] = 1 + sum(
            count for other, count in counts.items() if _compete(wish, other)
        )
        counts[wish] += _turns(job.tasks, running.get(job.job.job_id, 0))
    return found


def _turns(tasks: ArrayTasks | None, running: int) -> int:
    """How many starts stand in the line for a job: of an array as many as may run besides."""
    if tasks is None:
        return 1
    count = tasks.count or 1
    return count if tasks.limit is None else max(1, min(count, tasks.limit - running))


class _Wish(NamedTuple):
    """What a job wants: in which partitions, which cards, and whether any at all."""

    partitions: frozenset[str]
    gpu_type: str
    cards: bool


def _compete(one: _Wish, other: _Wish) -> bool:
    same = not one.gpu_type or not other.gpu_type or one.gpu_type == other.gpu_type
    # Who asks for no card waits for none.
    return same and one.cards == other.cards and not one.partitions.isdisjoint(other.partitions)


def _plan(job: ListedJob, now: float) -> Interval | None:
    planned = job.job.start_time
    if planned is None or planned - now > FORESEEABLE_SECONDS:
        return None
    # A plan that has passed is due: Slurm looks at it in its next round.
    planned = max(planned, now)
    return Interval(planned, planned, 0)


def _sentence(
    job: ListedJob, reason: Reason, reading: Reading, *, policy: Policy, obstacles: Obstacles
) -> str:
    own = job.job
    words = reason.words.format_map(
        {
            "account": own.account or "(none)",
            "qos": own.qos or "(none)",
            "partition": own.partition or "(none)",
            "user": own.user_name or "(unknown)",
        }
    )
    if reason.code == "BeginTime" and job.eligible is not None and job.eligible > reading.taken:
        moment = _local(policy, job.eligible)
        comment = read_comment(own.comment)
        if comment is not None and comment.window is not None:
            words = f"it waits for the window {comment.window}, which opens {moment}"
        elif own.restarts:
            words = f"it came back, and Slurm lets it start from {moment} on"
        else:
            words = f"it was submitted to start from {moment} on"
    elif reason.code == "Dependency" and job.waits_for:
        words = f"it waits for {' and '.join(_after(*each) for each in job.waits_for)}"
    elif more := obstacles.limit_words(job, reason.kind):
        words = f"{words}: {more}"
    if job.tasks is not None:
        words = f"{_array(job.tasks)}: {words}"
    return _as_sentence(words)


def _array(tasks: ArrayTasks) -> str:
    many = "tasks" if tasks.count is None else f"{tasks.count} task{'s' * (tasks.count != 1)}"
    some = "" if tasks.limit is None else f", {tasks.limit} at a time"
    return f"{many} of an array ({tasks.shown.partition('%')[0]}{some})"


def _after(kind: str, number: str) -> str:
    how = {
        "after": "to begin",
        "afterany": "to end",
        "afterok": "to succeed",
        "afternotok": "to fail",
        "aftercorr": "'s task of the same number to succeed",
        "singleton": "to end",
    }.get(kind, kind)
    return f"job {number}{how}" if how.startswith("'") else f"job {number} {how}"


def _local(policy: Policy, moment: float) -> str:
    return f"{dt.datetime.fromtimestamp(moment, policy.zone):%a %Y-%m-%d %H:%M}"
