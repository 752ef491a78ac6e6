"""Whatever a controller does, a process of Slurm's never changes its job's name."""

from __future__ import annotations

from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.exporter.nodes import ManualClock

from gpuwarden.exporter.blocking_calls import BlockingCalls
from gpuwarden.exporter.inquiries import Told
from gpuwarden.exporter.processes import Process
from gpuwarden.exporter.slurm import SlurmView
from gpuwarden.exporter.slurm_jobs import PATIENCE_SECONDS, SlurmJobs
from gpuwarden.platforms.slurm import UNRESOLVED, SlurmJob, parse_attempt_id

NUMBERS = (7, 8)


class Asked:
    """Questions whose answers come when the test says."""

    def __init__(self) -> None:
        self.told: Told[SlurmView] | None = None
        self.begun = 0
        self.problem: str | None = None
        self._said: SlurmView | None = None

    def current(self, _seconds: float) -> bool:
        """Whether there is an answer."""
        return self.told is not None

    def want(self) -> None:
        """Nothing is asked before the test says so."""

    def begin(self, view: SlurmView) -> None:
        """A question reaches the controller, whose answer is on its way."""
        self.begun += 1
        self._said = view

    def end(self) -> None:
        """The answer of the last question is there."""
        if self._said is not None:
            self.told = Told(self._said, 0.0, self.begun)
            self._said = None


class Node:
    """A node of Slurm, and what really is the case on it."""

    def __init__(self) -> None:
        self.clock = ManualClock(0.0)
        self.asked = Asked()
        self.jobs = SlurmJobs(
            self.asked,  # type: ignore[arg-type]
            clock=self.clock,
            calls=BlockingCalls(),
            proc=Path("/none"),
        )
        self.restarts = dict.fromkeys(NUMBERS, 0)
        self.processes: dict[int, Process] = {}
        self.truth: dict[int, tuple[int, int]] = {}
        self.names: dict[int, str] = {}
        self._pid = 100

    def step(self, what: str, number: int) -> None:
        """Something happens."""
        match what:
            case "start":
                self._pid += 1
                self.processes[self._pid] = _process(self._pid, number)
                self.truth[self._pid] = (number, self.restarts[number])
            case "end":
                for pid, (of, _) in self.truth.items():
                    if of == number:
                        self.processes.pop(pid, None)
            case "requeue":
                # Slurm starts no attempt while a process of the one before is there.
                self.step("end", number)
                self.jobs.update(self.processes)
                self.restarts[number] += 1
                self.step("start", number)
            case "question":
                self.asked.begin(self._view())
            case "answer":
                self.asked.end()
            case "patience":
                self.clock.advance(PATIENCE_SECONDS / 2)
            case "snapshot":
                self.jobs.update(self.processes)
                self._check()

    def _view(self) -> SlurmView:
        known = {
            number: SlurmJob(number, restarts=restarts, states=frozenset({"RUNNING"}))
            for number, restarts in self.restarts.items()
        }
        return SlurmView("main", ("node1",), known)

    def _check(self) -> None:
        for pid, process in self.processes.items():
            number, restarts = self.truth[pid]
            name = self.jobs.job_id(str(number))
            if name is None:
                assert process.pid not in self.names
                continue
            assert self.names.setdefault(pid, name) == name
            if not name.startswith(UNRESOLVED):
                attempt = parse_attempt_id(name)
                assert attempt is not None
                assert (attempt.number, attempt.restarts) == (str(number), restarts)


def _process(pid: int, number: int) -> Process:
    cgroup = f"/system.slice/slurmstepd.scope/job_{number}/step_0/user/task_0"
    return Process(pid, 1, pid, pid, 0, "S", pid, 1000, "python", cgroup, 0, 1)


STEPS = ("start", "end", "requeue", "question", "answer", "patience", "snapshot", "snapshot")


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.lists(st.tuples(st.sampled_from(STEPS), st.sampled_from(NUMBERS)), max_size=40))
def test_a_name_is_right_and_stays(steps: list[tuple[str, int]]) -> None:
    """A name that is resolved is the attempt's own, and no process ever gets a second one."""
    node = Node()
    for what, number in steps:
        node.step(what, number)
