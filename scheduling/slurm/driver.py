"""Slurm as the daemon sees it: Slurm decides who runs, this watches, explains and keeps the books.

Everything that must go on while the daemon is down is Slurm's: limits, priorities, preemption,
reservations. What the daemon adds: budgets of a day, jobs that only come back, who holds what.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import structlog

from gpuwarden import job_files
from gpuwarden.errors import GpuwardenError, ServiceUnavailable
from gpuwarden.schedule_api import Problem
from gpuwarden.scheduling.callers import user_name
from gpuwarden.scheduling.drivers import LEAK
from gpuwarden.scheduling.slurm import caps, configs, memories
from gpuwarden.scheduling.slurm.cap_desks import CapDesk
from gpuwarden.scheduling.slurm.clusters import open_cluster
from gpuwarden.scheduling.slurm.epochs import Epochs
from gpuwarden.scheduling.slurm.gates import gates
from gpuwarden.scheduling.slurm.hold_desks import HoldDesk, Remark
from gpuwarden.scheduling.slurm.leaked_cards import lasting, leaked, words_of
from gpuwarden.scheduling.slurm.names import account_of
from gpuwarden.scheduling.slurm.notices import Answered, Notices
from gpuwarden.scheduling.slurm.observations import Reader, is_operator, read_accounts
from gpuwarden.scheduling.slurm.queues import entries_of, is_waiting
from gpuwarden.scheduling.slurm.receipts import Receipts, first_of, signs_in
from gpuwarden.scheduling.slurm.saved_states import SavedStates
from gpuwarden.scheduling.slurm.scripts import read_comment
from gpuwarden.scheduling.slurm.slot_desks import SlotDesk
from gpuwarden.scheduling.slurm.trainings import Trainings
from gpuwarden.scheduling.slurm.usages import account, ended_entries

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gpuwarden.platforms.slurm_accounting import Attempt
    from gpuwarden.schedule_api import Preemption, QueueEntry
    from gpuwarden.scheduling.drivers import Context
    from gpuwarden.scheduling.holdings import Holding
    from gpuwarden.scheduling.policies import Policy
    from gpuwarden.scheduling.predictions import Training
    from gpuwarden.scheduling.slots import Slot, SlotUse
    from gpuwarden.scheduling.slurm.askings import Asking
    from gpuwarden.scheduling.slurm.clusters import Cluster
    from gpuwarden.scheduling.slurm.loops import History
    from gpuwarden.scheduling.slurm.queues import Reading
    from gpuwarden.scheduling.slurm.receipts import SignsOf

ENGINE: Final = "slurm"
DAY: Final = 86_400.0
ACCOUNT_SECONDS: Final = 60.0
"""How often accounting is asked, which may be far away and slow."""
MOST_SEEN: Final = 50_000
KEEP_SECONDS: Final = 60.0
_SOME_DONE: Final = "No error"
"""How Slurm names the tasks of an array that did as they were told, where others did not."""
SLOT_PROBLEMS: Final = (
    "booking_whole_nodes",
    "booking_takes_node",
    "booking_conflict",
    "booking_blocked",
)

log = structlog.get_logger(__name__)


def open_driver(policy: Policy, context: Context) -> SlurmDriver:
    """The driver of a policy's Slurm."""
    return SlurmDriver(policy, context, open_cluster(policy))


def read_entries(policy: Policy, now: float) -> Sequence[QueueEntry]:
    """The queue as it is, for whoever asks while no daemon runs; nothing is changed.

    Raises:
        ServiceUnavailable: Slurm's controller does not answer.
    """
    with open_cluster(policy) as cluster:
        return entries_of(Reader(cluster).read(now), policy)


class SlurmDriver:
    """One cluster.

    Args:
        policy: by whose words its jobs are told of.
        context: what the daemon gives.
        cluster: which; closed at the end.
    """

    engine = ENGINE

    def __init__(self, policy: Policy, context: Context, cluster: Cluster) -> None:
        self.cluster = ""
        self._policy = policy
        self._context = context
        self._asked = cluster
        self._reader = Reader(cluster)
        self._trainings = Trainings(cluster)
        self._reading: Reading | None = None
        self._memory = memories.Memory()
        # The trainer's own words are there to read on a lab box, where this is its node too; of
        # other nodes Prometheus knows what was saved.
        self._own_words = signs_in(job_files.DEFAULT_DIRECTORY)
        sources: list[SignsOf] = [self._own_words]
        self._epochs = None if context.prometheus is None else Epochs(context.prometheus)
        if context.prometheus is not None:
            sources.append(SavedStates(context.prometheus, lambda: self.cluster))
        self._signs = first_of(*sources)
        self._notices = self._notices_of({})
        self._slots = SlotDesk(cluster, self._notices, {})
        self._holds = self._hold_desk({})
        self._caps = CapDesk(cluster)
        self._spent: frozenset[str] = frozenset()
        self._receipts = Receipts(policy, signs=self._signs)
        self._attempts: tuple[Attempt, ...] = ()
        self._remarks: dict[str, Remark] = {}
        self._leaks: dict[str, tuple[float, int]] = {}
        self._saved_at = 0.0
        self._entries: tuple[QueueEntry, ...] = ()
        self._ended: tuple[QueueEntry, ...] = ()
        self._seen: dict[tuple[int, float], float] = {}
        self._runs: dict[str, str] = {}
        self._problems: dict[str, Problem] = {}
        self._accounts_at: float | None = None

    # -- life

    def start(self, now: float) -> None:
        """Learn which cluster it is, and take up what was left."""
        self._memory = memories.load(self._context.state)
        self._notices = self._notices_of(self._memory.asked)
        self._slots = SlotDesk(self._asked, self._notices, self._memory.slots)
        self._holds = self._hold_desk(self._memory.histories)
        self.cluster = self._asked.config.name
        log.info("slurm_found", cluster=self.cluster, version=self._asked.version, at=now)

    def _notices_of(self, asked: Mapping[str, Asking]) -> Notices:
        return Notices(self._asked, asked, keep=self._write, signs=self._signs)

    def _hold_desk(self, histories: Mapping[str, History]) -> HoldDesk:
        # Prometheus knows no status, and would be asked in vain for each job at each look.
        return HoldDesk(self._asked, histories, epochs=self._epochs, signs=self._own_words)

    def stop(self) -> None:
        """Nothing is asked any more; jobs go on."""
        self._asked.close()

    def adopt(self, policy: Policy) -> None:
        """Go by another policy; another cluster takes a new start.

        Raises:
            GpuwardenError: it names another Slurm.
        """
        if policy.slurm != self._policy.slurm:
            changed = policy.slurm.model_copy(update={"requeues": self._policy.slurm.requeues})
            if changed != self._policy.slurm:
                raise GpuwardenError(
                    "slurm of the policy has changed: start the scheduler anew to go by it"
                )
        self._policy = policy
        self._receipts.adopt(policy)
        self._accounts_at = None

    # -- each tick

    def tick(self, now: float) -> None:
        """Read the queue, hold what only comes back, set limits of budgets, and keep the books.

        Raises:
            ServiceUnavailable: the controller does not answer; what was known stays.
        """
        reading = self._reader.read(now)
        self._reading = reading
        self._remember(reading)
        self._say_settings(reading, now)
        self._look_for_leaks(reading, now)
        self._holds.watch(reading, self._policy, now, self._attempts)
        for code, words in self._holds.problems.items():
            self._problem(code, words, now)
        self._watch_slots(reading, now)
        self._keep_gates(reading, now)
        self._notices.observe(reading.jobs, now)
        self._say_failures(now)
        self._keep(now)
        if self._accounts_at is None or not 0 <= now - self._accounts_at < ACCOUNT_SECONDS:
            self._keep_books(reading, now)
        self._receipts.observe(reading.jobs, now, self._attempts)
        remarks = self._remarks | self._holds.remarks
        self._entries = tuple(_told(entry, remarks) for entry in entries_of(reading, self._policy))
        self._trainings.look(reading.jobs)

    def entries(self) -> Sequence[QueueEntry]:
        """Every job as of the last tick, and those that ended within a day."""
        known = {entry.id for entry in self._entries}
        return (*self._entries, *(entry for entry in self._ended if entry.id not in known))

    def trainings(self) -> Mapping[str, Training]:
        """What jobs train, of those where it is known."""
        return self._trainings.known(self.entries())

    def preemptions(self) -> Sequence[Preemption]:
        """What was seen of jobs that had to leave."""
        now = self._context.clock.wall()
        return (*self._receipts.preemptions(), *self._notices.preemptions(now))

    def problems(self) -> Sequence[Problem]:
        """What an operator should know of."""
        return tuple(self._problems[code] for code in sorted(self._problems))

    def _remember(self, reading: Reading) -> None:
        running = {
            (job.job.job_id, job.job.start_time)
            for job in reading.jobs
            if job.job.holds and job.job.start_time is not None
        }
        for number, start in running:
            self._seen[number, start] = reading.taken
        while len(self._seen) > MOST_SEEN:
            del self._seen[next(iter(self._seen))]
        for job in reading.jobs:
            comment = read_comment(job.job.comment)
            if comment is not None and comment.run_id is not None:
                self._runs[job.number] = comment.run_id
        while len(self._runs) > MOST_SEEN:
            del self._runs[next(iter(self._runs))]

    def _say_settings(self, reading: Reading, now: float) -> None:
        self._problem("no_return", configs.no_return(self._asked.settings), now)
        self._problem(
            "cards_not_accounted",
            None
            if reading.accounts_for_gpus
            else "Slurm does not account for cards, so budgets and use cannot be told: add "
            "gres/gpu to AccountingStorageTRES in slurm.conf and restart slurmctld",
            now,
        )

    def _say_failures(self, now: float) -> None:
        """What Slurm did not do of what it was told in this look."""
        failed = self._holds.failed | self._notices.failed
        self._holds.failed, self._notices.failed = {}, {}
        words = None
        if failed:
            # Complaints may be long, and what follows them is what to do.
            some = [f"{number} ({said[:120]})" for number, said in list(failed.items())[:5]]
            more = f" and {len(failed) - 5} more" if len(failed) > 5 else ""
            words = (
                "Slurm did not hold, delay or signal jobs as it was told: "
                f"{'; '.join(some)}{more}; if that is a matter of rights: `sacctmgr modify user "
                f"{user_name(os.geteuid())} set adminlevel=Operator`"
            )
        self._problem("commands_refused", words, now)

    def _say_hidden(self, now: float) -> None:
        """Whoever is no operator may not see it all, and Slurm does not say what it keeps back."""
        kept = configs.hidden(self._asked.settings)
        user = user_name(os.geteuid())
        words = None
        try:
            if (
                kept
                and not configs.is_slurms_own(self._asked.settings, user)
                and not is_operator(self._asked, user)
            ):
                words = (
                    f"Slurm tells of others' {', '.join(kept)} to its operators only (PrivateData "
                    f"of slurm.conf), and {user} is none, so that neither queue nor accounts are "
                    f"whole: `sacctmgr modify user {user} set adminlevel=Operator`"
                )
        except ServiceUnavailable:
            return  # what reads accounting next says so
        self._problem("queue_hidden", words, now)

    def _look_for_leaks(self, reading: Reading, now: float) -> None:
        if reading.nodes_taken == now:  # else jobs have begun and ended since
            self._leaks = lasting(leaked(reading), self._leaks, now)
            self._problem(LEAK, words_of(self._leaks, now), now)

    def _problem(self, code: str, words: str | None, now: float) -> None:
        """Something is so, or is not so (any more)."""
        if words is None:
            self._problems.pop(code, None)
        elif code not in self._problems or self._problems[code].words != words:
            since = self._problems[code].since if code in self._problems else now
            self._problems[code] = Problem(code, words, since)

    def _watch_slots(self, reading: Reading, now: float) -> None:
        self._slots.watch(reading, self._policy, now)
        for code in SLOT_PROBLEMS:
            self._problem(code, self._slots.problems.get(code), now)

    def _keep(self, now: float) -> None:
        """Write down what must outlive this process; what merely grows, once a minute."""
        memory = self._to_keep()
        urgent = memories.essence(memory) != memories.essence(self._memory)
        if urgent or (memory != self._memory and not 0 <= now - self._saved_at < KEEP_SECONDS):
            self._write()

    def _to_keep(self) -> memories.Memory:
        return memories.Memory(
            self._holds.histories, dict(self._slots.known), dict(self._notices.asked)
        )

    def _write(self) -> bool:
        """Write down everything at once; says whether it is on disk."""
        now, memory = self._context.clock.wall(), self._to_keep()
        self._saved_at = now
        try:
            memories.save(self._context.state, memory)
        except OSError as error:
            # A full disk stops no job: what is not kept is counted anew after a restart, and
            # nobody is asked to leave meanwhile.
            words = (
                f"{self._context.state} cannot be written: {error.strerror or error}; nobody is "
                "asked to leave meanwhile"
            )
            self._problem("state_not_kept", words, now)
            return False
        self._memory = memory
        self._problem("state_not_kept", None, now)
        return True

    def _keep_gates(self, reading: Reading, now: float) -> None:
        """Keep jobs in their windows, and have those leave whose window or budget is over."""
        found = gates(
            reading.jobs,
            self._policy,
            spent=self._spent,
            now=now,
            slots=self._slots.returns(reading, now),
        )
        for number, begin in found.begins:
            told = (f"JobId={number}", f"StartTime=uts{int(begin)}")
            answer = self._asked.run("scontrol", "update", *told)
            # Of an array too long to be named its running tasks are told as well, and refuse.
            if answer.status and _SOME_DONE not in answer.complaint:
                log.warning("window_not_kept", job=number, error=answer.complaint)
                self._holds.failed[number] = answer.complaint
        self._remarks = {number: Remark("", words) for number, words in found.words.items()}
        answers = self._notices.ask(found.leaves, self._policy, now)
        deaf = [
            f"{job.number} ({why.cause})"
            for (job, why), answer in zip(found.leaves, answers, strict=True)
            if answer is Answered.DEAF
        ]
        words = None
        if deaf:
            words = (
                "jobs have to leave and asked for no signal, so they cannot be told: "
                f"{', '.join(deaf[:20])}; their owners or an operator end them"
            )
        self._problem("jobs_cannot_be_asked", words, now)

    # -- books

    def _keep_books(self, reading: Reading, now: float) -> None:
        """What accounting tells of the last day, and the limits of budgets by it."""
        self._accounts_at = now
        self._say_hidden(now)
        begin = caps.begin_of(self._policy, now)
        since = now - DAY if begin is None else min(begin, now - DAY)
        try:
            attempts = self._attempts = read_accounts(self._asked, since, now)
            self._set_caps(reading, attempts, now)
        except ServiceUnavailable as error:
            self._problem("accounting_unseen", f"Slurm's accounting cannot be read: {error}", now)
            return
        self._problem("accounting_unseen", None, now)
        waiting = {job.number for job in reading.jobs if is_waiting(job) or job.job.holds}
        recent = [each for each in attempts if each.end is not None and each.end >= now - DAY]
        self._ended = ended_entries(recent, self._policy, self._runs, now=now, queued=waiting)

    def _account(
        self, attempts: Sequence[Attempt], begin: float, end: float, now: float
    ) -> Sequence[Holding]:
        found = account(
            attempts,
            self._policy,
            begin=begin,
            end=end,
            now=now,
            running=None if self._reading is None else self._reading.jobs,
            seen=self._seen,
            runs=self._runs,
        )
        words = None
        if found.lost:
            words = (
                f"accounting knows no end of jobs that are gone: {', '.join(found.lost[:20])}; "
                "`sacctmgr show runawayjobs` mends it, and until then they are not counted"
            )
        self._problem("runaway_jobs", words, now)
        return found.holdings

    def _set_caps(self, reading: Reading, attempts: Sequence[Attempt], now: float) -> None:
        begin = caps.begin_of(self._policy, now)
        if begin is None:
            self._spent = frozenset()
            self._problem("budget_not_enforced", None, now)
            return
        holdings = self._account(attempts, begin, now, now)
        teams = caps.spent_teams(self._policy, holdings, now)
        self._spent = frozenset(account_of(self._policy, team) for team in teams)
        words = self._caps.keep(reading.limits, holdings, self._policy, now)
        self._problem("budget_not_enforced", words, now)

    # -- bookings and use

    def book(self, slots: Sequence[Slot], now: float) -> None:
        """Have Slurm keep cards for these slots, and for no others of ours.

        Raises:
            SlotsRefused: Slurm refuses some of them; the others are kept.
            ServiceUnavailable: it does not answer.
        """
        if self._reading is None:
            self._reading = self._reader.read(now)
        self._slots.book(slots, self._policy, self._reading.nodes, now)

    def remarks(self) -> Mapping[str, str]:
        """Slot -> what its team should know of how it is kept."""
        return {} if self._reading is None else self._slots.remarks(self._reading.nodes)

    def slot_uses(self) -> Sequence[SlotUse]:
        """What becomes of the slots that are active."""
        return self._slots.uses(self._reading, self._policy, self._context.clock.wall())

    def usage(self, begin: float, end: float) -> Sequence[Holding]:
        """Every attempt that held cards in a stretch of time.

        Raises:
            ServiceUnavailable: accounting cannot be read.
        """
        now = self._context.clock.wall()
        return self._account(read_accounts(self._asked, begin, end), begin, end, now)


def _told(entry: QueueEntry, remarks: Mapping[str, Remark]) -> QueueEntry:
    """An entry with what the daemon has to say of it."""
    remark = remarks.get(entry.id)
    return (
        entry if remark is None else replace(entry, why=remark.why or entry.why, words=remark.words)
    )
