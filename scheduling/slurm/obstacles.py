"""Which running jobs would have to end before one that waits could start. Pure.

This is arithmetic over what Slurm tells, not its own plan: the jobs that end soonest, on the node
where room comes first, or of the account whose limit keeps the job.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gpuwarden.platforms.slurm_limits import CARDS
from gpuwarden.platforms.slurm_reasons import Kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gpuwarden.platforms.slurm_listings import ListedJob
    from gpuwarden.platforms.slurm_nodes import SlurmNode
    from gpuwarden.scheduling.slurm.queues import Reading

_MOST: Final = 64
"""Jobs that are named; where more would have to end, nobody is helped by their names."""


@dataclass(frozen=True, slots=True)
class _Limit:
    """A limit of cards that keeps a job.

    Attributes:
        account: whose.
        most: cards that may be in use.
        used: cards that are.
        name: which cards count, such as `gres/gpu:a100`.
    """

    account: str
    most: int
    used: int
    name: str


class Obstacles:
    """What stands in the way of jobs that wait.

    Args:
        reading: of the cluster.
    """

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._running = sorted(
            (job for job in reading.jobs if job.job.holds and job.gpus), key=_end
        )
        self._of_account: dict[str, Sequence[ListedJob]] = {}
        self._rooms: dict[tuple[object, ...], Sequence[ListedJob]] = {}
        self._on_node: dict[str, list[ListedJob]] = defaultdict(list)
        for job in self._running:
            for node in job.job.nodes:
                self._on_node[node].append(job)

    def of(self, job: ListedJob, kind: Kind) -> tuple[str, ...]:
        """Numbers of the jobs that would have to end first; empty where it is not known."""
        if not job.gpus or not job.gpus_known:
            return ()
        if kind is Kind.TURN:
            found = self._for_room(job)
        elif kind is Kind.LIMIT:
            found = self._for_limit(job)
        else:
            found = ()
        return tuple(each.number for each in found) if len(found) <= _MOST else ()

    def limit_words(self, job: ListedJob, kind: Kind) -> str:
        """How much of the limit that keeps a job is in use; empty where it is not known."""
        if kind is Kind.LIMIT and (limit := self._limit(job)) is not None:
            return (
                f"{limit.used} of {limit.most} cards of account {limit.account} are in use, and it "
                f"asks for {job.gpus}"
            )
        if kind is Kind.BUDGET:
            limits = self._reading.limits.accounts.get(job.job.account)
            spent = None if limits is None else limits.minutes.get(CARDS)
            if spent is not None and spent.limit is not None:
                return f"{spent.used / 60:.1f} of {spent.limit / 60:.1f} GPU-hours are used"
        return ""

    def _limit(self, job: ListedJob) -> _Limit | None:
        """The limit of cards that keeps a job: of its account, or of one that this is below.

        What is in use is counted by the jobs that run: Slurm's own counter was read earlier.
        """
        every = self._reading.limits
        names = [CARDS] if not job.gpu_type else [f"{CARDS}:{job.gpu_type}", CARDS]
        for account in every.above(job.job.account):
            limits = every.accounts.get(account)
            for name in names if limits is not None else ():
                counter = limits.resources.get(name) if limits is not None else None
                if counter is None or counter.limit is None:
                    continue
                jobs = self._below(account)
                used = sum(each.gpus for each in jobs if name == CARDS or _is_of(each, name))
                if used + job.gpus > counter.limit:
                    return _Limit(account, counter.limit, used, name)
        return None

    def _below(self, account: str) -> Sequence[ListedJob]:
        """Jobs that run for an account and those below it, those that end soonest first."""
        if account not in self._of_account:
            above = self._reading.limits.above
            self._of_account[account] = [
                job for job in self._running if account in above(job.job.account)
            ]
        return self._of_account[account]

    def _for_limit(self, job: ListedJob) -> Sequence[ListedJob]:
        """The account's own jobs, those that end soonest, until its limit has room."""
        limit = self._limit(job)
        if limit is None or job.gpus > limit.most:
            return ()
        jobs = [
            each
            for each in self._below(limit.account)
            if limit.name == CARDS or _is_of(each, limit.name)
        ]
        return _until(jobs, limit.used + job.gpus - limit.most, on_node=False)

    def _for_room(self, job: ListedJob) -> Sequence[ListedJob]:
        """On the node where enough cards come free first; Slurm's planned one if it has a plan."""
        # Of a long queue most jobs want the same, and a large cluster has many nodes.
        wish = (job.job.partition, job.gpu_type, _on_each_node(job), job.planned_nodes)
        if wish not in self._rooms:
            self._rooms[wish] = self._room(job)
        return self._rooms[wish]

    def _room(self, job: ListedJob) -> Sequence[ListedJob]:
        best: Sequence[ListedJob] | None = None
        for node in self._reading.nodes:
            if not _may_run_on(job, node):
                continue
            missing = _on_each_node(job) - _idle(node, job)
            found = _until(self._on_node.get(node.name, ()), missing, model=job.gpu_type)
            if missing > 0 and not found:
                continue
            if best is None or _last(found) < _last(best):
                best = found
        return best or ()


def _is_of(job: ListedJob, name: str) -> bool:
    return name == f"{CARDS}:{job.gpu_type}"


def _may_run_on(job: ListedJob, node: SlurmNode) -> bool:
    if not node.usable:
        return False
    if job.planned_nodes:
        return node.name in job.planned_nodes
    return bool(node.partitions & set(job.job.partition.split(",")))


def _on_each_node(job: ListedJob) -> int:
    return math.ceil(job.gpus / max(1, job.nodes))


def _idle(node: SlurmNode, job: ListedJob) -> int:
    if job.gpu_type:
        return node.idle.get(job.gpu_type, 0)
    return sum(node.idle.values())


def _until(
    jobs: Iterable[ListedJob], missing: int, *, model: str = "", on_node: bool = True
) -> Sequence[ListedJob]:
    """The first jobs that hold so many cards together; none where all of them hold fewer.

    Args:
        jobs: in the order in which they end.
        missing: cards.
        model: of which type, or empty for any.
        on_node: whether only those of one node count; else all that a job has.
    """
    found = []
    for job in jobs:
        if missing <= 0:
            break
        if model and job.gpu_type and job.gpu_type != model:
            continue
        found.append(job)
        missing -= math.ceil(job.gpus / max(1, len(job.job.nodes))) if on_node else job.gpus
    return found if missing <= 0 else ()


def _end(job: ListedJob) -> tuple[float, int]:
    """When a job ends at the latest; one without a time limit comes last."""
    limited = job.job.time_limit is not None and job.job.end_time is not None
    return (job.job.end_time or math.inf if limited else math.inf, job.job.job_id)


def _last(jobs: Sequence[ListedJob]) -> tuple[float, int]:
    return (_end(jobs[-1])[0] if jobs else 0.0, len(jobs))
