"""Jobs that are held, or have to wait, for having come back: what `loops` finds, done at a Slurm.

Held as their users would hold them (`uhold`): an operator's hold only an operator could lift.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

import structlog

from gpuwarden.job_files import EXIT_HOLD
from gpuwarden.scheduling.drivers import LOOP
from gpuwarden.scheduling.slurm import loops
from gpuwarden.scheduling.slurm.queues import is_waiting
from gpuwarden.scheduling.slurm.scripts import read_comment

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from gpuwarden.platforms.slurm_accounting import Attempt
    from gpuwarden.platforms.slurm_listings import ListedJob
    from gpuwarden.scheduling.policies import Policy
    from gpuwarden.scheduling.slurm.clusters import Cluster
    from gpuwarden.scheduling.slurm.epochs import Epochs
    from gpuwarden.scheduling.slurm.queues import Reading
    from gpuwarden.scheduling.slurm.receipts import SignsOf

DRIVEN_OUT: Final = "preempted_often"
STOP_WORDS: Final = (
    "Its trainer ended with the status that means hold (76), and Slurm queued it again all the "
    "same: it is held. Look into its log, then `scontrol release` it."
)
_STOPPED: Final = "SpecialExit"

log = structlog.get_logger(__name__)


class Remark(NamedTuple):
    """What an entry of the queue says instead of Slurm's own reason.

    Attributes:
        why: a code; empty for Slurm's own.
        words: one sentence.
    """

    why: str
    words: str


class HoldDesk:
    """The jobs of one cluster that come back.

    Args:
        cluster: which.
        histories: what was remembered of its jobs.
        epochs: tells how far jobs have got, or None.
        signs: what trainers say.

    Attributes:
        histories: what is remembered now.
        remarks: number of a job -> what is to be told of it.
        problems: code -> one sentence, or None where it is not so.
        failed: number of a job that Slurm did not hold or delay -> what it said; whoever tells of
            it takes it away.
    """

    def __init__(
        self,
        cluster: Cluster,
        histories: Mapping[str, loops.History],
        *,
        epochs: Epochs | None,
        signs: SignsOf,
    ) -> None:
        self._cluster = cluster
        self._epochs = epochs
        self._signs = signs
        self._last: dict[int, ListedJob] = {}
        self.histories = histories
        self.remarks: dict[str, Remark] = {}
        self.problems: dict[str, str | None] = {}
        self.failed: dict[str, str] = {}

    def watch(
        self, reading: Reading, policy: Policy, now: float, attempts: Iterable[Attempt] = ()
    ) -> None:
        """Look at every job, and have those wait, or hold those, that have to.

        Args:
            reading: of the cluster.
            policy: how often jobs may come back.
            now: Unix time.
            attempts: what accounting has of recent attempts, if it was asked.

        Raises:
            ServiceUnavailable: the controller does not answer.
        """
        terms = policy.slurm.requeues
        epochs = {}
        if terms is not None and self._epochs is not None:
            asked = loops.returning(self.histories, reading.jobs)
            epochs = self._epochs.known(reading.cluster, asked, now)
        found = loops.guard(
            reading.jobs,
            self.histories,
            terms,
            now=now,
            epochs=epochs,
            zone=policy.zone,
            made_way=None if policy.preemption is None else policy.preemption.at_most,
        )
        jobs = {job.number: job for job in reading.jobs}
        self.remarks = {}
        for pause in found.pauses:
            self.remarks[pause.number] = Remark("", pause.words)
            if pause.due and self._update(pause.number, pause.until):
                found = loops.mark_paused(found, jobs[pause.number])
        for loop in found.loops:
            if self._hold(loop.number, loop.words):
                found = loops.mark_held(found, jobs[loop.number], now)
        self.remarks |= {number: Remark(LOOP, words) for number, words in found.held.items()}
        self.histories = dict(found.histories)
        self._obey(reading, attempts)
        self._tell(found, policy)

    def _tell(self, found: loops.Guarded, policy: Policy) -> None:
        self.problems = {LOOP: None, DRIVEN_OUT: None}
        if found.held:
            self.problems[LOOP] = (
                "jobs came back again and again without getting on, and are held: "
                f"{', '.join(sorted(found.held))}; their owners look into their logs and release "
                "them"
            )
        if found.driven_out and policy.preemption is not None:
            most = policy.preemption.at_most
            self.problems[DRIVEN_OUT] = (
                f"jobs had to leave for others more than {most.times} times (preemption.at_most): "
                f"{', '.join(found.driven_out[:20])}; Slurm goes on asking them: give them a "
                "higher priority, or a longer preemption.minimum_run"
            )

    def _obey(self, reading: Reading, attempts: Iterable[Attempt]) -> None:
        """Hold those whose trainers want it, where Slurm queued them again all the same.

        From 23.11 on Slurm takes no notice of the status of who leaves within its grace.
        """
        starts = {each.job_id: each.start for each in attempts if each.start is not None}
        for job in reading.jobs:
            if job.job.holds:
                self._last[job.job.job_id] = job
                continue
            history = self.histories.get(loops.key_of(job))
            if history is None or not job.job.restarts or not is_waiting(job):
                continue
            if history.stopped == job.job.restarts:
                if not job.priority:
                    self.remarks[job.number] = Remark(_STOPPED, STOP_WORDS)
            elif job.priority and self._wants_hold(job, starts):
                self._stop(job, history)
        there = {job.job.job_id for job in reading.jobs}
        self._last = {number: job for number, job in self._last.items() if number in there}

    def _wants_hold(self, job: ListedJob, starts: Mapping[int, float]) -> bool:
        """Whether the trainer of a job's last attempt left with 76, as far as that is certain."""
        last, comment = self._last.get(job.job.job_id), read_comment(job.job.comment)
        if last is None and (start := starts.get(job.job.job_id)) is not None:
            last = replace(job, job=replace(job.job, start_time=start))
        if last is None or last.job.start_time is None or comment is None:
            return False
        signs = self._signs(last, comment.run_id)
        return signs is not None and signs.status == EXIT_HOLD

    def _stop(self, job: ListedJob, history: loops.History) -> None:
        if self._hold(job.number, STOP_WORDS):
            stopped = replace(history, stopped=job.job.restarts)
            self.histories = {**self.histories, loops.key_of(job): stopped}
            self.remarks[job.number] = Remark(_STOPPED, STOP_WORDS)

    def _hold(self, number: str, words: str) -> bool:
        answer = self._cluster.run("scontrol", "uhold", number)
        if answer.status:
            log.warning("job_not_held", job=number, error=answer.complaint)
            self.failed[number] = answer.complaint
            return False
        log.warning("job_held", job=number, words=words)
        return True

    def _update(self, number: str, until: float) -> bool:
        """Have a job begin no earlier than at a Unix time."""
        words = (f"JobId={number}", f"StartTime=uts{int(until)}")
        answer = self._cluster.run("scontrol", "update", *words)
        if answer.status:
            log.warning("job_not_paused", job=number, error=answer.complaint)
            self.failed[number] = answer.complaint
        return not answer.status
