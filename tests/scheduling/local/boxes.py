"""A lab box in a test: made-up cards, real processes, a clock that only the test moves."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.scheduling.local.policy_texts import box

from gpuwarden import job_files
from gpuwarden.errors import DriverUnavailable
from gpuwarden.scheduling.drivers import Context
from gpuwarden.scheduling.local.cards import CardSeen
from gpuwarden.scheduling.local.driver import LocalDriver
from gpuwarden.scheduling.local.processes import ProcessId, ProcessTable
from gpuwarden.scheduling.tasks import Task

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gpuwarden.schedule_api import Preemption, QueueEntry
    from gpuwarden.scheduling.local.queues import Queue
    from gpuwarden.scheduling.policies import Policy

GIB = 1024**3
PROGRAM = Path(__file__).with_name("children.py")


@dataclass
class TestClock:
    """Unix time that a test moves; it begins now, as files that jobs write carry real times.

    Attributes:
        ahead: seconds that a test lets pass.
        set: by which somebody has set the wall clock, while no time passed.
    """

    __test__ = False

    ahead: float = 0.0
    set: float = 0.0

    def wall(self) -> float:
        """Unix time in seconds."""
        return time.time() + self.ahead + self.set

    def monotonic(self) -> float:
        """Seconds since an arbitrary moment."""
        return time.monotonic() + self.ahead


@dataclass
class MadeUpCards:
    """Cards that show what a test says, besides the processes of jobs that were given them.

    Attributes:
        count: how many.
        foreign: index -> pids that a test puts on a card.
        used: index -> bytes in use.
        lost: indices of cards that have fallen off the bus.
        gone: whether the driver does not answer.
        jobs: of the driver: UUID -> pids, so that a job's own processes are on its cards.
    """

    count: int = 4
    foreign: dict[int, set[int]] = field(default_factory=dict)
    used: dict[int, int] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    gone: bool = False
    jobs: Callable[[], dict[str, set[int]]] = dict

    def read(self) -> Sequence[CardSeen]:
        """Every card."""
        if self.gone:
            raise DriverUnavailable("the driver is gone")
        own = self.jobs()
        return [
            CardSeen(
                uuid=f"GPU-{index}",
                index=index,
                model="NVIDIA A100",
                used=self.used.get(index, 10 * GIB if own.get(f"GPU-{index}") else 0),
                pids=frozenset(own.get(f"GPU-{index}", set()) | self.foreign.get(index, set())),
                lost=index in self.lost,
                problem="it does not answer" if index in self.lost else "",
            )
            for index in range(self.count)
        ]


class LabBox:
    """A driver with its folders; it may be lost and opened anew.

    Args:
        folder: for everything.
        policy: in force; its job files are put below the folder.
        cards: to show.
        engine: address of a rule engine that has jobs asked, or None.
    """

    def __init__(
        self,
        folder: Path,
        policy: Policy | None = None,
        cards: int = 4,
        engine: str | None = None,
    ) -> None:
        self.folder = folder
        self.engine = engine
        self.token = folder / "engine.token"
        self.token.write_text("a-secret-of-16-characters", "ascii")
        self.token.chmod(0o600)
        self.jobs = folder / "node"
        self.work = folder / "work"
        self.work.mkdir(exist_ok=True)
        self.state = folder / "state"
        self.state.mkdir(mode=0o700, exist_ok=True)
        self.clock = TestClock()
        self.cards = MadeUpCards(cards)
        local = {"local": {"jobs": str(self.jobs)}}
        base = policy or box()
        self.policy = base.model_copy(update={"local": box(**local).local})
        self._lost: list[Queue] = []
        self.open()

    def open(self) -> None:
        """Start the daemon's driver, as after any end of the one before."""
        token = None if self.engine is None else self.token
        context = Context(
            self.state, self.clock, lambda: None, leaves=self.engine, leaves_token=token
        )
        self.driver = LocalDriver(self.policy, context, self.cards)
        self.cards.jobs = self._pids
        self.driver.start(self.clock.wall())

    def lose(self) -> None:
        """What a SIGKILL leaves: nothing is said, nothing is written any more."""
        # The connection to its file stays as it is until the box is closed: to close it now would
        # tidy the file, and left to the garbage collector it is a fault of whatever test runs then.
        self._lost.append(self.driver._queue)
        del self.driver

    def _pids(self) -> dict[str, set[int]]:
        """UUID -> processes of the job that was given the card."""
        queue = self.driver._queue  # the cards are made up, so they must be told who is on them
        attempts = {each.id: each for each in queue.attempts("running", "ended")}
        table = ProcessTable.read()
        found: dict[str, set[int]] = {}
        for uuid, number in queue.held().items():
            attempt = attempts.get(number)
            if attempt is not None and attempt.process is not None:
                tree = table.tree([attempt.process])
                found[uuid] = {each.pid for each in tree if table.alive(each)}
        return found

    def submit(self, name: str, behaviour: str = "train", **others: Any) -> str:
        """Submit a job that behaves so; see children.py."""
        options = others.pop("options", ())
        token = others.pop("token", "")
        chosen = {"team": "vision", "priority": "low", "gpus": 1, **others}
        task = Task(
            name=name,
            run_id=name,
            user="ana",
            words=("model=yolov8n", f"behaviour={behaviour}", *options),
            directory=str(self.work),
            program=str(self.program()),
            **chosen,
        )
        return self.driver.submit(
            task, uid=os.getuid(), gid=os.getgid(), now=self.clock.wall(), token=token
        )

    def program(self) -> Path:
        """What stands in for `gpuwarden`."""
        path = self.folder / "gpuwarden"
        if not path.exists():
            path.write_text(f'#!/bin/sh\nexec {sys.executable} -I {PROGRAM} "$@"\n', "utf-8")
            path.chmod(0o755)
        return path

    def tick(self, seconds: float = 0.0) -> None:
        """Let time pass, and the driver look."""
        self.clock.ahead += seconds
        self.driver.tick(self.clock.wall())

    def until(self, what: Callable[[], Any], *, seconds: float = 30.0) -> Any:
        """Tick until something is true, and give it.

        Raises:
            AssertionError: it never was.
        """
        deadline = time.monotonic() + seconds
        while True:
            self.tick()
            if value := what():
                return value
            assert time.monotonic() < deadline, (
                "what the test waits for never came",
                self.driver.entries(),
                self.driver.preemptions(),
                self.driver.problems(),
            )
            time.sleep(0.02)

    def entry(self, entry: str) -> QueueEntry:
        """One of the queue."""
        return next(each for each in self.driver.entries() if each.id == entry)

    def state_of(self, entry: str) -> str:
        """Its state."""
        return self.entry(entry).state.value

    def notice(self, victim: str) -> Preemption:
        """The newest that a job was given."""
        return [each for each in self.driver.preemptions() if each.victim == victim][-1]

    def steps(self, victim: str) -> dict[str, float]:
        """Those of the newest notice that a job was given; none before it was given one."""
        given = [each for each in self.driver.preemptions() if each.victim == victim]
        return given[-1].steps if given else {}

    def log(self, name: str, entry: str) -> str:
        """What a job has written; nothing yet when it is only just told as running."""
        try:
            return (self.work / f"{name}-{entry}.log").read_text("utf-8")
        except FileNotFoundError:
            return ""

    def say(self, name: str, word: str) -> None:
        """Have a child do something: it looks for files in its folder."""
        (self.work / f"{name}.{word}").touch()

    def request(self, run_id: str) -> job_files.LeaveRequest | None:
        """The leave request that stands."""
        try:
            found = job_files.read(job_files.request_path(self.jobs, run_id))
        except FileNotFoundError:
            return None
        return job_files.LeaveRequest.decode(found.content)

    def pid(self, entry: str) -> ProcessId:
        """The process of a job that runs."""
        attempts = self.driver._queue.attempts("running")  # to signal it from outside
        process = next(each.process for each in attempts if str(each.job) == entry)
        assert process is not None
        return process

    def close(self) -> None:
        """End every job and the driver."""
        self.cards.gone = False
        deadline = time.monotonic() + 20
        while self.driver._queue.attempts("running"):
            for entry in self.driver.entries():
                if entry.state.value not in {"done", "failed"}:
                    self.driver.cancel(entry.id, by="the test", now=self.clock.wall())
            self.clock.ahead += 3600
            self.driver.tick(self.clock.wall())
            time.sleep(0.02)
            assert time.monotonic() < deadline, "a job of the test does not end"
        self.driver.stop()
        for queue in self._lost:
            queue.close()
