"""The driver of a lab box: one tick looks, decides by `plans.plan`, and acts.

Whatever is decided is on disk before it takes effect, and every tick begins with what is there, not
with what was remembered: a daemon that was killed at any point goes on where it was. Jobs are not
its children and outlive it.
"""

from __future__ import annotations

import dataclasses
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from gpuwarden.errors import DriverUnavailable, RefusedAction, TemporaryError
from gpuwarden.schedule_api import Problem
from gpuwarden.scheduling.drivers import SlotsRefused
from gpuwarden.scheduling.local import endings, readings, views
from gpuwarden.scheduling.local.card_uses import CardUses, Holder, uses_of
from gpuwarden.scheduling.local.cards import NvmlCards
from gpuwarden.scheduling.local.clock_changes import ClockChanges, move_request
from gpuwarden.scheduling.local.commands import Commands
from gpuwarden.scheduling.local.engine_requests import EngineRequests
from gpuwarden.scheduling.local.forecasts import expected_starts
from gpuwarden.scheduling.local.launches import Launcher
from gpuwarden.scheduling.local.notices import Notices
from gpuwarden.scheduling.local.orders import Orders, hold_id
from gpuwarden.scheduling.local.plans import plan
from gpuwarden.scheduling.local.processes import ProcessTable, boot_id, send_all
from gpuwarden.scheduling.local.progress import RunFiles, prepared
from gpuwarden.scheduling.local.queues import KEPT_SECONDS, Note, Queue
from gpuwarden.scheduling.local.readings import FREE_SECONDS, KILL_SECONDS
from gpuwarden.scheduling.local.scenes import PROMISED_SECONDS, Plan, Scene
from gpuwarden.scheduling.local.spending import longest_period_begin, spending
from gpuwarden.scheduling.local.starts import Starts
from gpuwarden.scheduling.preemption_terms import Pool, terms_of
from gpuwarden.scheduling.tasks import Task

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gpuwarden.job_files import RunStatus
    from gpuwarden.schedule_api import Interval, Preemption, QueueEntry
    from gpuwarden.scheduling.drivers import Context
    from gpuwarden.scheduling.holdings import Holding
    from gpuwarden.scheduling.local.cards import Cards
    from gpuwarden.scheduling.local.queues import Attempt, Job
    from gpuwarden.scheduling.local.scenes import Notice
    from gpuwarden.scheduling.policies import Policy
    from gpuwarden.scheduling.predictions import Training
    from gpuwarden.scheduling.slots import Slot, SlotUse

log = structlog.get_logger("gpuwarden.scheduling.local")

SHOWN_SECONDS = 86400.0
"""Jobs and notices that are over are shown so long."""
_FORGET_EVERY = 3600.0


class LocalDriver:
    """The queue of this host.

    Args:
        policy: in force.
        context: of the daemon.
        cards: whoever sees them; NVML by default.
    """

    engine = "local"

    def __init__(self, policy: Policy, context: Context, cards: Cards | None = None) -> None:
        self.cluster = socket.gethostname()
        self._policy = policy
        self._root = Path(policy.local.jobs)
        self._context = context
        self._cards = cards or NvmlCards()
        self._queue = Queue(context.state / "queue.db")
        self._launcher = Launcher(context.state / "attempts", self._root)
        self._start = Starts(self._queue, self._launcher)
        self._commands = Commands(self._queue, context.wake)
        self._orders = Orders(self._queue, self._files)
        engine = EngineRequests.of(context)
        self._notices = Notices(self._queue, self._files, engine, views.job_id)
        self._boot = boot_id()
        self._slots: tuple[Slot, ...] = ()
        self._plan = Plan()
        self._starts: Mapping[str, Interval] = {}
        self._statuses: dict[int, RunStatus] = {}
        self._since: dict[tuple[str, str], float] = {}
        self._problems: list[Problem] = []
        self._files_problem = ""
        self._forgot = 0.0
        self._clock = ClockChanges(context.clock)

    # -- the daemon's calls

    def start(self, now: float) -> None:
        """Take up what was left: launches that were under way are settled first."""
        self._files_problem = prepared(self._root)
        self._start.settle(now)

    def stop(self) -> None:
        """Let go of the queue's file; jobs go on."""
        self._queue.close()
        if isinstance(self._cards, NvmlCards):
            self._cards.close()

    def adopt(self, policy: Policy) -> None:
        """Go by another policy from the next tick on.

        Raises:
            RefusedAction: it names another folder for job files, which running jobs do not know.
        """
        if policy.local.jobs != self._policy.local.jobs:
            raise RefusedAction(
                "jobs_folder", "local.jobs cannot change while the daemon runs: restart it"
            )
        self._policy = policy

    def tick(self, now: float) -> None:
        """Look, decide, act.

        Raises:
            TemporaryError: the cards cannot be seen: nothing starts and nothing is freed.
        """
        problems: list[tuple[str, str]] = []
        self._start.settle(now)
        self._follow_clock()
        if self._files_problem:
            self._files_problem = prepared(self._root)
        if self._files_problem:
            problems.append(("job_files", self._files_problem))
        table = ProcessTable.read()
        for attempt in self._queue.attempts("running"):
            self._look_at(attempt, table, now)
            problems += self._disown(attempt)
        for attempt in self._orders.cut_off(deadline=self._patience(now)):
            self._end(attempt, now)
        self._escalate(now)
        try:
            uses = self._look_at_cards(table, now)
        except DriverUnavailable as error:
            problems.append(("cards_unseen", str(error)))
            self._tell_problems(problems, now)
            raise TemporaryError(str(error)) from error
        problems += views.card_problems(uses)
        scene, jobs = self._scene(uses, now)
        self._plan = plan(scene, self._policy, now)
        self._starts = expected_starts(scene, self._policy, now)
        self._act(self._plan, jobs, uses, now)
        problems += self._queue_problems(now) + self._notices.problems()
        if unfit := self._start.unfit(now):
            problems.append(("launches", f"Nothing is started for a minute: {unfit}"))
        self._tell_problems(problems, now)
        self._forget(now)

    def entries(self) -> Sequence[QueueEntry]:
        """Every job as of the last tick."""
        now = self._context.clock.wall()
        return views.entries(
            self._queue.jobs(ended_since=now - SHOWN_SECONDS),
            {each.job: each for each in self._queue.attempts("reserved", "running")},
            [note for note in self._queue.notes(closed_since=now) if note.closed is None],
            self._plan,
            self._starts,
        )

    def preemptions(self) -> Sequence[Preemption]:
        """Notices that stand, and those of the last day."""
        now = self._context.clock.wall()
        runs = {job.id: job.run_id for job in self._queue.jobs(ended_since=now - KEPT_SECONDS)}
        return [
            views.preemption(note, runs.get(note.job), now)
            for note in self._queue.notes(closed_since=now - SHOWN_SECONDS)
        ]

    def problems(self) -> Sequence[Problem]:
        """What an operator should know of as of the last tick."""
        return self._problems

    def book(self, slots: Sequence[Slot], now: float) -> None:
        """Keep cards for these slots.

        Raises:
            SlotsRefused: some are of cards that the policy does not have; the others are kept.
        """
        known = [slot for slot in slots if self._policy.card(slot.card) is not None]
        self._slots = tuple(slot for slot in known if slot.end > now)
        unknown = {
            slot.id: f"there are no cards {slot.card}" for slot in slots if slot not in known
        }
        if unknown:
            raise SlotsRefused(unknown)

    def slot_uses(self) -> Sequence[SlotUse]:
        """What becomes of the slots that are active."""
        now = self._context.clock.wall()
        active = [slot for slot in self._slots if slot.start <= now < slot.end]
        begin = min((slot.start for slot in active), default=now)
        holdings = self.usage(begin, now) if active else []
        return [views.slot_use(slot, holdings, self._plan, now) for slot in active]

    def usage(self, begin: float, end: float) -> Sequence[Holding]:
        """Every attempt that held cards in a stretch of time."""
        attempts = self._queue.attempts_between(begin, end)
        return views.holdings(attempts, self._queue)

    def trainings(self) -> Mapping[str, Training]:
        """What every job trains, on the kind of cards that it holds, held last or asks for."""
        return views.trainings(self._queue, self._context.clock.wall() - SHOWN_SECONDS)

    # -- commands

    def submit(self, task: object, *, uid: int, gid: int, now: float, token: str = "") -> str:
        """Take a job on; see `Commands.submit`."""
        if isinstance(task, Task) and RunFiles(self._root, task.run_id, uid).others():
            raise RefusedAction(
                "run_taken", f"run {task.run_id} is of another user here: say another --name"
            )
        return self._commands.submit(
            task, self._policy, uid=uid, gid=gid, token=token, now=now, slots=self._slots
        )

    def cancel(self, entry: str, *, by: str, now: float) -> None:
        """Take a job out of the queue, or have it save and leave for good."""
        attempt = self._commands.cancel(entry, by=by, now=now)
        if attempt is not None:
            self._end(attempt, now)

    def hold(self, entry: str, *, by: str, now: float) -> None:
        """Have a job wait, or save, leave and wait, until it is released."""
        attempt = self._commands.hold(entry, by=by, now=now)
        job = self._queue.job(entry)
        if attempt is None or job is None:
            return
        self._orders.hold(attempt, job, deadline=self._patience(now))

    def _patience(self, now: float) -> float:
        """Until when a job has time that somebody holds."""
        terms = terms_of(self._policy)
        return now + (3600.0 if terms is None else terms.deadline)

    def release(self, entry: str, *, by: str, now: float) -> None:
        """Let a held job go on waiting for its turn."""
        job = self._commands.release(entry, by=by, now=now)
        for attempt in self._queue.attempts("running"):
            if attempt.job == job.id:
                self._files(job).withdraw(hold_id(attempt))

    def log_path(self, entry: str) -> Path:
        """Where a job's output goes."""
        return self._commands.log_path(entry)

    # -- looking

    def _files(self, job: Job) -> RunFiles:
        return RunFiles(self._root, job.run_id, job.uid)

    def _look_at(self, attempt: Attempt, table: ProcessTable, now: float) -> None:
        """Follow one attempt: its progress, its notice, its end."""
        job = self._queue.job(str(attempt.job))
        if job is None or attempt.stub is None or attempt.process is None:
            return
        rebooted = attempt.boot != self._boot
        roots = () if rebooted else (attempt.stub, attempt.process)
        record = self._launcher.record(attempt.id)
        over = record is not None or not any(table.alive(root) for root in roots)
        pids = frozenset(each.pid for each in table.tree(roots))
        status = self._files(job).status(
            pids=frozenset() if over else pids, boot=attempt.boot or "", since=attempt.created
        )
        if status is not None:
            self._statuses[attempt.id] = status
            changes = views.progress(attempt, status, now)
            seconds = changes.pop("epoch_seconds", None)
            if changes:
                self._queue.change_attempt(attempt.id, **changes)
            if seconds is not None:
                self._queue.change_job(job.id, epoch_seconds=seconds)
        note = self._notices.open_one(attempt)
        if note is not None and status is not None:
            self._notices.follow(note, status, now)
        if over:
            found = endings.seen(record, status, rebooted=rebooted, now=now)
            self._settle_end(attempt, found)

    def _disown(self, attempt: Attempt) -> list[tuple[str, str]]:
        """Take back what a job was asked under a name that is somebody else's by now."""
        job = self._queue.job(str(attempt.job))
        if job is None or not self._files(job).others():
            return []
        for request in self._requests(attempt):
            self._files(job).withdraw(request)
        return [views.run_of_others(job)]

    def _requests(self, attempt: Attempt) -> set[str]:
        """Ids of the requests by which an attempt may have been asked."""
        note = self._notices.open_one(attempt)
        return {hold_id(attempt), *(() if note is None else (note.id,))}

    def _follow_clock(self) -> None:
        """Where the wall clock was set, nobody gains or loses time."""
        moved = self._clock.moved()
        if not moved:
            return
        log.warning("the clock was set", seconds=moved)
        self._queue.move(moved)
        for attempt in self._queue.attempts("running"):
            if (job := self._queue.job(str(attempt.job))) is not None:
                move_request(self._files(job), self._requests(attempt), moved)

    def _settle_end(self, attempt: Attempt, found: endings.Ended) -> None:
        current = next(each for each in self._queue.attempts("running") if each.id == attempt.id)
        job = self._queue.job(str(attempt.job))
        note = self._notices.open_one(attempt)
        if job is None:
            return
        if found.failed:
            found = dataclasses.replace(found, broken=self._broken_card(attempt))
        least = 0.0 if self._policy.preemption is None else self._policy.preemption.minimum_run
        end = endings.ending(
            job, current, found, note=note, terms=self._policy.local, minimum_run=least
        )
        self._queue.end(
            current,
            ended=end.attempt,
            job=end.job,
            note=None if note is None else (note.id, end.note),
        )
        if note is not None:
            self._files(job).withdraw(note.id)
        self._files(job).withdraw(hold_id(attempt))
        log.info("job ended", entry=job.entry, exit=found.code, state=end.job["state"])

    def _broken_card(self, attempt: Attempt) -> str:
        """What is wrong with a card of an attempt that failed a moment ago, or empty."""
        held = self._queue.held()
        try:
            seen = self._cards.read()
        except DriverUnavailable:
            return ""
        mine = (card for card in seen if held.get(card.uuid) == attempt.id and card.lost)
        return next((f"{card.uuid}: {card.problem}" for card in mine), "")

    def _look_at_cards(self, table: ProcessTable, now: float) -> CardUses:
        """See the cards, and take back those that are free again."""
        seen = self._cards.read()
        attempts = {each.id: each for each in self._queue.attempts("reserved", "running", "ended")}
        held = self._queue.held()
        holders: dict[str, Holder] = {}
        for uuid, number in held.items():
            attempt = attempts[number]
            same = attempt.boot == self._boot
            roots = [each for each in (attempt.stub, attempt.process) if each is not None and same]
            pids = frozenset(each.pid for each in table.tree(roots))
            holders[uuid] = Holder(str(attempt.job), pids, attempt.state == "ended")
        kinds = {uuid: attempts[number].kind for uuid, number in held.items()}
        uses = uses_of(seen, holders, self._policy, kinds=kinds)
        there = {card.uuid for card in seen if not card.lost}
        freed = False
        for attempt in attempts.values():
            mine = {uuid for uuid, number in held.items() if number == attempt.id}
            if attempt.state == "ended" and mine & there <= uses.released:
                self._freed(attempt, now)
                freed = True
        if not freed:
            return uses
        left = self._queue.held()
        return uses_of(
            seen,
            {uuid: holder for uuid, holder in holders.items() if uuid in left},
            self._policy,
            kinds={uuid: kind for uuid, kind in kinds.items() if uuid in left},
        )

    def _freed(self, attempt: Attempt, now: float) -> None:
        """An attempt's memory is back: its notice is closed, its cards are anybody's."""
        note = self._notices.open_one(attempt)
        # A tick has one time, and a job may have ended after it had begun.
        freed = now if attempt.ended is None else max(now, attempt.ended)
        notes = {} if note is None else {note.id: {"freed": freed, "closed": freed}}
        self._queue.free(attempt.id, notes=notes, now=freed)
        self._statuses.pop(attempt.id, None)

    # -- deciding

    def _scene(self, uses: CardUses, now: float) -> tuple[Scene, dict[str, Job]]:
        jobs = {job.entry: job for job in self._queue.jobs(ended_since=now)}
        notes = {note.attempt: note for note in self._queue.notes(closed_since=float("inf"))}
        working = []
        for attempt in self._queue.attempts("running", "ended"):
            job = self._queue.job(str(attempt.job))
            if job is not None:
                status = self._statuses.get(attempt.id)
                asked = self._files(job).request()
                found = readings.working(job, attempt, notes.get(attempt.id), status, asked=asked)
                if self._files_problem or attempt.id in self._notices.silent:
                    found = dataclasses.replace(found, deaf=True)
                working.append(found)
        busy = {each.id for each in working if not each.id.endswith(views.LEFT)}
        waiting = [
            readings.waiting(
                job,
                self._queue.states_of(job.task.after),
                stranger=self._start.stranger(job, now),
            )
            for job in jobs.values()
            if job.state == "waiting"
        ]
        since = now - (
            0.0 if self._policy.preemption is None else self._policy.preemption.at_most.per
        )
        begin = longest_period_begin(self._policy, now)
        budget = spending(self._policy, self.usage(begin, now), now)
        scene = Scene(
            total=uses.total,
            free={Pool(kind): len(uuids) for kind, uuids in uses.free.items()},
            waiting=[each for each in waiting if each.id not in busy],
            working=working,
            slots=self._slots,
            history=self._queue.left_for_others(since),
            spent=budget.spent,
            leaving=budget.leaving,
            promised=self._queue.promised(now - PROMISED_SECONDS),
        )
        return scene, jobs

    # -- acting

    def _act(self, decided: Plan, jobs: dict[str, Job], uses: CardUses, now: float) -> None:
        running = {str(each.job): each for each in self._queue.attempts("running")}
        for entry in decided.withdrawn:
            if entry in running:
                self._notices.withdraw(running[entry], now)
        for notice in decided.notices:
            if notice.victim in running:
                self._tell(notice, running[notice.victim], now)
        self._give_notices(now)
        free = {kind: list(uuids) for kind, uuids in uses.free.items()}
        for start in decided.starts:
            if self._start.unfit(now):
                break
            (pool, count), *_others = start.holds.items()
            cards = [free[pool.kind].pop(0) for _ in range(count)]
            self._launch(jobs[start.id], pool.kind, cards, now)

    def _tell(self, notice: Notice, attempt: Attempt, now: float) -> None:
        """Write a notice down; `_give_notices` delivers it."""
        self._queue.tell(Note.of(notice, attempt, now))

    def _give_notices(self, now: float) -> None:
        self._notices.give(now)
        if self._notices.failed:
            self._files_problem = f"{self._root / 'requests'}: {self._notices.failed}"
            self._notices.failed = ""

    def _escalate(self, now: float) -> None:
        """End what is past its deadline: asked once more by signal, then for good."""
        notes = {note.attempt: note for note in self._queue.notes(closed_since=float("inf"))}
        for attempt in self._queue.attempts("running"):
            note = notes.get(attempt.id)
            job = self._queue.job(str(attempt.job))
            told = note is not None and (
                note.notified is not None or (job is not None and self._files(job).others())
            )
            late = note is not None and told and now >= note.deadline
            if attempt.term_at is None and late:
                self._end(attempt, now)
            elif attempt.kill_at is not None and now >= attempt.kill_at:
                self._signal(attempt, signal.SIGKILL)

    def _end(self, attempt: Attempt, now: float) -> None:
        """Have a job save at its next step and leave; what is left of it later is killed."""
        if attempt.term_at is None:
            self._queue.change_attempt(attempt.id, term_at=now, kill_at=now + KILL_SECONDS)
        self._signal(attempt, signal.SIGTERM)
        # One that its owner has stopped cannot save.
        self._signal(attempt, signal.SIGCONT)

    def _signal(self, attempt: Attempt, number: signal.Signals) -> None:
        if attempt.boot != self._boot or attempt.stub is None or attempt.process is None:
            return
        reached = send_all((attempt.process, attempt.stub), number, spare=attempt.stub.pid)
        log.warning("signalled", entry=attempt.job, signal=number.name, processes=reached)

    def _launch(self, job: Job, kind: str, cards: list[str], now: float) -> None:
        self._orders.forget(job)
        if self._start.start(job, kind, cards, now):
            self._note_successor(job, now)

    def _note_successor(self, job: Job, now: float) -> None:
        """The last step of notices: who they were for has started."""
        slots = {slot.id for slot in self._slots if slot.admits(job.task.team, job.user, now)}
        for note in self._queue.notes(closed_since=now - SHOWN_SECONDS):
            for_it = (
                note.successor == job.entry
                if note.cause == "priority"
                else (note.cause == "booking" and note.successor in slots)
            )
            if for_it and note.left is not None and note.started is None:
                known = note.left if note.freed is None else note.freed
                self._queue.change_note(note.id, started=max(now, known))

    # -- telling

    def _queue_problems(self, now: float) -> list[tuple[str, str]]:
        notes = self._queue.notes(closed_since=float("inf"))
        jobs = self._queue.jobs(ended_since=now)
        return views.queue_problems(notes, jobs, now, patience=FREE_SECONDS)

    def _tell_problems(self, found: list[tuple[str, str]], now: float) -> None:
        self._since = {each: self._since.get(each, now) for each in found}
        self._problems = [
            Problem(code, words, self._since[code, words]) for code, words in dict.fromkeys(found)
        ]

    def _forget(self, now: float) -> None:
        if now - self._forgot < _FORGET_EVERY:
            return
        self._forgot = now
        for attempt in self._queue.forget(now - KEPT_SECONDS):
            self._launcher.forget(attempt)


def open_driver(policy: Policy, context: Context) -> LocalDriver:
    """The driver of this host.

    Raises:
        MissingExtra: NVML's bindings are not installed.
        StoreUnusable: the queue's file is damaged, or of a newer gpuwarden.
    """
    return LocalDriver(policy, context)
