"""Who held cards in Slurm from when to when: one holding for each attempt. Pure.

A job that came back ran several times, and each counts once: by its number and its start, for a
number alone is given anew after a crash of the controller. A suspended job keeps its cards, so that
time counts. What ends in accounting when it does not in fact (a node that died with its daemon, an
hour without slurmdbd) is told as what it is.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gpuwarden.platforms.slurm import ENDED
from gpuwarden.schedule_api import EntryState, QueueEntry
from gpuwarden.scheduling.holdings import Holding
from gpuwarden.scheduling.slurm.endings import AGAIN, end_words
from gpuwarden.scheduling.slurm.meanings import card_of, priority_of, team_of
from gpuwarden.scheduling.slurm.scripts import read_comment

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from gpuwarden.platforms.slurm_accounting import Attempt
    from gpuwarden.platforms.slurm_listings import ListedJob
    from gpuwarden.scheduling.policies import Policy

ENGINE: Final = "slurm"
_AGAIN: Final = frozenset({"PREEMPTED", "REQUEUED"})
"""After one of these a job comes back, unless its cluster or its user does not want that."""
LATE_SECONDS: Final = 300.0
"""How long after its end a job may be running still by accounting, which is written later."""


@dataclass(frozen=True, slots=True)
class Account:
    """What accounting tells of a stretch of time.

    Attributes:
        holdings: attempts that held cards in it, in the order of their starts.
        lost: numbers of the jobs that run by accounting alone: nobody saw them end.
    """

    holdings: tuple[Holding, ...]
    lost: tuple[str, ...] = ()


def account(
    attempts: Iterable[Attempt],
    policy: Policy,
    *,
    begin: float,
    end: float,
    now: float,
    running: Iterable[ListedJob] | None = None,
    seen: Mapping[tuple[int, float], float] | None = None,
    runs: Mapping[str, str] | None = None,
) -> Account:
    """The holdings of a stretch of time, whole.

    Args:
        attempts: of accounting, in any order, any of them twice.
        policy: whose teams and cards they are.
        begin: Unix time.
        end: Unix time.
        now: Unix time.
        running: jobs that the controller knows, or None where it is not known which.
        seen: (job's number, start) -> Unix time at which it was last seen running.
        runs: number of a job -> the trainer's run.
    """
    live = None if running is None else {job.job.job_id for job in running if job.job.holds}
    found: dict[tuple[str, str, str, float], Holding] = {}
    lost: list[str] = []
    for each in sorted(attempts, key=lambda each: (each.start or 0.0, each.job_id)):
        if each.start is None or not each.gpus or each.start >= end:
            continue
        ended = each.end
        if ended is None and live is not None and each.job_id not in live:
            last = (seen or {}).get((each.job_id, each.start))
            if last is None or now - last > LATE_SECONDS:
                lost.append(each.number)
                ended = max(each.start, last if last is not None else each.start)
        if ended is not None and ended <= begin:
            continue
        holding = Holding(
            engine=ENGINE,
            entry=each.number,
            user=each.user,
            team=team_of(policy, each.account, each.user),
            gpus=each.gpus,
            start=each.start,
            end=ended,
            card=card_of(policy, each.gpu_type),
            run_id=_run(each, runs or {}),
        )
        found[holding.key] = holding
    return Account(tuple(found.values()), tuple(lost))


def _run(attempt: Attempt, runs: Mapping[str, str]) -> str | None:
    comment = read_comment(attempt.comment)
    return runs.get(attempt.number) if comment is None else comment.run_id


def ended_entries(
    attempts: Iterable[Attempt],
    policy: Policy,
    runs: Mapping[str, str],
    *,
    now: float,
    queued: Collection[str] = (),
) -> tuple[QueueEntry, ...]:
    """Jobs that are over by accounting, the last to end first.

    The newest record of a job is what became of it: PREEMPTED, REQUEUED and NODE_FAIL may have come
    back, and then there is a later one, or the job is in the queue. One that is not there a while
    later has not come back, and nobody else would say so.

    Args:
        attempts: of accounting.
        policy: in whose words they are told of.
        runs: number of a job -> the trainer's run.
        now: Unix time.
        queued: numbers of the jobs that wait or run: they are not over.
    """
    newest: dict[str, Attempt] = {}
    times: Counter[str] = Counter()
    for each in attempts:
        times[each.number] += 1
        known = newest.get(each.number)
        if known is None or (each.submit, each.start or 0.0) > (known.submit, known.start or 0.0):
            newest[each.number] = each
    over = [
        each
        for each in newest.values()
        if each.number not in queued
        and each.end is not None
        and (each.state in ENDED or (each.state in _AGAIN and now - each.end > LATE_SECONDS))
    ]
    return tuple(
        QueueEntry(
            engine=ENGINE,
            id=each.number,
            name=each.name,
            user=each.user,
            state=EntryState.DONE if each.state == "COMPLETED" else EntryState.FAILED,
            gpus=each.gpus,
            submitted=each.submit,
            run_id=_run(each, runs),
            team=team_of(policy, each.account, each.user),
            priority=priority_of(policy, each.qos, each.partition),
            gpu_type=card_of(policy, each.gpu_type) if each.gpus else "",
            started=each.start,
            why="" if each.state == "COMPLETED" else each.state.lower(),
            words=_end_words(each),
            requeues=times[each.number] - 1,
        )
        for each in sorted(over, key=lambda each: (-(each.end or 0.0), each.number))
    )


def _end_words(attempt: Attempt) -> str:
    if attempt.state == "COMPLETED":
        return ""
    if attempt.state in _AGAIN:
        return f"It was {attempt.state.lower()}, and Slurm has not queued it again: {AGAIN}."
    words = end_words(attempt.state, attempt.status)
    return f"{words[0].upper()}{words[1:]}."
