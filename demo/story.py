"""The course of the demo: starts the jobs, watches what becomes of them, resumes the one that left.

It decides nothing about any job: that is the engine's work. It only does what people and the world
would do: start trainings, put them on their cards when they begin to train, and bring the one back
that was asked to leave.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from demo.jobs import Cards, Job, Starter, cast, run_status
from gpuwarden.exporter.processes import descendants, read_all
from gpuwarden.exporter.scenarios import GIB

if TYPE_CHECKING:
    from collections.abc import Callable

    from demo.sinks import Received
    from demo.stack import Stack
    from gpuwarden.job_files import RunStatus

DEADLINE_SECONDS = 225.0
"""The demo ends by then whatever has happened; what is missing shows in the outcomes."""
PAUSE_SECONDS = 0.25
NOTEBOOK_PROCESSES = 3


@dataclass(frozen=True, slots=True)
class Moment:
    """Something that happened: seconds since the start, to which job, what, and details."""

    at: float
    job: str
    what: str
    detail: str = ""


@dataclass(slots=True)
class Record:
    """What the story saw, for the outcomes to be checked against Prometheus and the ledger.

    Attributes:
        jobs: by name.
        started: Unix time of the start.
        moments: everything that was narrated.
        hog_left_at: the hog's status when it left.
        hog_ended: the hog's status at the end of its second attempt.
        notebook_tree: pids of the notebook's process tree while it ran.
    """

    jobs: dict[str, Job]
    started: float
    moments: list[Moment] = field(default_factory=list)
    hog_left_at: RunStatus | None = None
    hog_ended: RunStatus | None = None
    notebook_tree: set[int] = field(default_factory=set)


class Story:
    """One run of the demo on a running stack."""

    def __init__(self, stack: Stack, narrate: Callable[[Moment], None]) -> None:
        self._stack = stack
        self._narrate = narrate
        self._starter = Starter(stack)
        self._cards = Cards(stack)
        self.record = Record(jobs=cast(), started=time.time())
        self._last_event = 0
        self._heard = 0

    @property
    def jobs(self) -> dict[str, Job]:
        """The jobs by name."""
        return self.record.jobs

    def say(self, job: str, what: str, detail: str = "") -> None:
        """Narrate something."""
        moment = Moment(time.time() - self.record.started, job, what, detail)
        self.record.moments.append(moment)
        self._narrate(moment)

    def run(self, *, within: float = DEADLINE_SECONDS) -> Record:
        """Play the story to its end.

        Args:
            within: seconds after which it stops wherever it stands.
        """
        deadline = time.monotonic() + within
        for name in ("notebook", "tensorboard", "hog", "fitting", "starved", "waiting"):
            self._start(name)
        while not self._finished() and time.monotonic() < deadline:
            self._go_on()
        self._hear()
        return self.record

    def watch(self) -> NoReturn:
        """Start what a rule of one's own is tried on, and narrate it until interrupted."""
        for name in ("notebook", "fitting", "starved"):
            self._start(name)
        while True:
            self._go_on()

    def _go_on(self) -> None:
        self._put_on_cards()
        self._hear()
        self._watch_processes()
        time.sleep(PAUSE_SECONDS)

    def stop(self) -> None:
        """End what still runs, as its owners would, and make sure that nothing is left."""
        jobs = [job for job in self.jobs.values() if job.process is not None]
        for job in jobs:
            if job.process is not None and not job.ended:
                job.process.terminate()
        for job in jobs:
            if job.process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    job.process.wait(timeout=0.1 if job.name == "notebook" else 15)
        everything = read_all()
        mine = {job.pid for job in jobs if not job.ended}
        for pid in mine | {child for root in mine for child in descendants(everything, root)}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for job in jobs:
            if job.process is not None:
                job.process.wait(timeout=15)

    def _start(self, name: str) -> None:
        job = self.jobs[name]
        getattr(self._starter, name)(job)
        self.say(name, "started", f"{job.title}; pid {job.pid}")

    def _put_on_cards(self) -> None:
        for job in self.jobs.values():
            if job.on_card or job.ended or job.process is None:
                continue
            if job.training:
                status = run_status(self._stack, job)
                # The file may still be that of an earlier attempt.
                fresh = status is not None and status.exit is None and status.phase == "train"
                if not fresh or status is None or status.heartbeat < self._started_at(job):
                    continue
            after = self.jobs[job.after].pid if job.after else None
            self._cards.put(job, after=after)
            size = f"{job.memory / GIB:.0f} GiB, {job.busy} % busy"
            if after is None:
                self.say(job.name, "on the card", f"GPU {job.card}: {size}")

    def _started_at(self, job: Job) -> float:
        started = [m.at for m in self.record.moments if m.job == job.name and m.what == "started"]
        return self.record.started + started[-1]

    def _hear(self) -> None:
        names = {
            job_id: job.name for job in self.jobs.values() for job_id in (job.job_id, *job.earlier)
        }
        if self._stack.ledger.exists():
            with self._stack.open_ledger() as ledger:
                rows = ledger.execute(
                    "SELECT * FROM events WHERE id > ? ORDER BY id", (self._last_event,)
                ).fetchall()
            for row in rows:
                self._last_event = row["id"]
                name = names.get(row["job_id"], row["job_id"])
                text = words(row["kind"], row["rule_id"], json.loads(row["detail"]))
                self.say(name, row["kind"], text)
        for message in self._stack.sinks.received[self._heard :]:
            self._heard += 1
            self.say("", f"{message.channel} arrived", arrival(message))
            if message.channel == "email" and (keep := keep_command(message)):
                self.say("", "to keep it", keep)

    def _watch_processes(self) -> None:
        notebook = self.jobs["notebook"]
        if not notebook.ended and len(self.record.notebook_tree) < NOTEBOOK_PROCESSES:
            self.record.notebook_tree |= {notebook.pid, *descendants(read_all(), notebook.pid)}
        for job in self.jobs.values():
            if job.ended and not job.reported:
                job.reported = True
                self.say(job.name, "process ended", f"exit status {job.status}")
                if job.name == "hog":
                    self._hog_ended(job)

    def _hog_ended(self, job: Job) -> None:
        status = run_status(self._stack, job)
        if job.earlier:
            self.record.hog_ended = status
            return
        self.record.hog_left_at = status
        # Its owner has understood the notice: a batch that needs what the profile says, at speed.
        job.memory, job.busy = 6 * GIB, 70
        self._starter.hog(job, step_seconds=0.0)
        at = f"step {status.step}" if status is not None else "an unknown step"
        self.say(job.name, "started", f"resumed by its owner from {at}; pid {job.pid}")

    def _finished(self) -> bool:
        hog, fitting = self.jobs["hog"], self.jobs["fitting"]
        settled = {"verified", "incomplete", "refused", "failed"}
        ends = {m.job for m in self.record.moments if m.what in settled}
        told = any(m.job == "starved" and m.what == "notified" for m in self.record.moments)
        return (
            fitting.reported
            and bool(hog.earlier)
            and hog.reported  # not only ended: what it said last is part of the record
            and {"hog", "notebook"} <= ends
            and told
        )


def words(kind: str, rule: str, detail: dict[str, Any]) -> str:
    """A line of the audit for people."""
    match kind:
        case "detected":
            return f"{rule} has held for {detail['for']:.0f} s"
        case "log" | "notify":
            return f"{rule}, level {detail['level']}"
        case "notified":
            return f"{rule}: the ledger has every recipient's proof"
        case "due":
            return f"{rule}: told {detail['notice_age']:.0f} s ago, and it still holds"
        case "authorised":
            return f"{rule}: at most {detail['work_lost']:.0f} s of work would be lost"
        case _:
            return f"{rule} {detail.get('reason') or ''}".rstrip()


def arrival(message: Received) -> str:
    """A notice as it arrived, in one line: to whom, and its first line."""
    first = (message.subject or message.text.partition("\n")[0]).strip()
    return f"to {message.to}: {first}"


def keep_command(message: Received) -> str:
    """What the owner may type to keep the job, as the notice says it, or an empty string."""
    _, command, rest = message.text.partition("gpuwarden keep ")
    return command + rest.partition("\n")[0].strip()
