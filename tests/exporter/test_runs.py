"""The trainers' files, honest and hostile; their processes are real."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path, PosixPath
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from tests.exporter.descriptors import descriptors_left
from tests.exporter.nodes import Children, ManualClock, declare, describe, process_of

from gpuwarden import job_files
from gpuwarden.exporter.processes import Process, boot_id, boot_time, read_all
from gpuwarden.exporter.runs import LiveRun, RunDirectory, upload_lag
from gpuwarden.job_files import (
    Checkpoint,
    RunExit,
    RunStatus,
    UploadProgress,
    description_path,
    status_path,
)

if TYPE_CHECKING:
    from collections.abc import Callable

NOBODY = 65534


class Node:
    """A folder of runs and the processes as they are, at a time that the test moves."""

    def __init__(self, jobs: Path, clock: ManualClock) -> None:
        self.jobs = jobs
        self.clock = clock
        self.runs = RunDirectory(
            jobs,
            boot=boot_id(),
            pid_namespace=Path("/proc/self/ns/pid").stat().st_ino,
            user_name=lambda uid: f"user-{uid}",
        )

    def scan(self, processes: dict[int, Process] | None = None) -> tuple[LiveRun, ...]:
        """Read the folder as one snapshot does."""
        found = read_all() if processes is None else processes
        live = self.runs.scan(found, now=self.clock.wall(), booted=boot_time())
        self.runs.reap_leftovers()
        return live

    def names(self) -> list[str]:
        """What is left in the folder."""
        return sorted(path.name for path in (self.jobs / "jobs").iterdir())


@pytest.fixture
def node(jobs: Path, clock: ManualClock) -> Node:
    """A node without runs."""
    return Node(jobs, clock)


def _status(clock: ManualClock, run_id: str = "run-1", **changes: object) -> RunStatus:
    values: dict[str, Any] = {
        "run_id": run_id,
        "sequence": 1,
        "phase": "train",
        "phase_since": clock.wall() - 10,
        "heartbeat": clock.wall() - 1,
    }
    return RunStatus(**{**values, **changes})


class Greedy(PosixPath):
    """A folder for whose files no descriptor is left."""

    taken: ClassVar[list[int]] = []

    def __truediv__(self, name: str | os.PathLike[str]) -> PosixPath:
        """One of its files."""
        with suppress(OSError):
            self.taken.append(os.open("/dev/null", os.O_RDONLY))
        return PosixPath(super().__truediv__(name))


def test_a_run_that_could_not_be_read_for_want_of_descriptors(
    node: Node, children: Children
) -> None:
    """Its files are read once there are some again, though nobody writes them anew."""
    child = children.start()
    declare(node.jobs, describe(child.pid), _status(node.clock))
    processes = read_all()
    booted = boot_time()
    node.runs.follow(Greedy(node.jobs / "jobs"))
    with descriptors_left(1) as Greedy.taken:
        assert node.runs.scan(processes, now=node.clock.wall(), booted=booted) == ()
    node.runs.follow(node.jobs / "jobs")
    (live,) = node.scan(processes)
    assert live.run.status is not None


class TestHonestRuns:
    """What a trainer that keeps to the contract gets."""

    def test_a_run_and_its_status(self, node: Node, children: Children) -> None:
        """A run is found by its process, and its status follows."""
        child = children.start()
        declare(node.jobs, describe(child.pid))
        (live,) = node.scan()
        assert (live.pid, live.run.description.model, live.run.status) == (
            child.pid,
            "yolov8n",
            None,
        )
        status = _status(node.clock)
        declare(node.jobs, live.run.description, status)
        (live,) = node.scan()
        assert (live.run.status, live.run.heartbeat) == (status, status.heartbeat)
        assert node.runs.dropped == {}

    def test_no_folder(self, node: Node) -> None:
        """Where no training has ever been there is nothing to see, and nothing wrong."""
        (node.jobs / "jobs").rmdir()
        assert node.scan() == ()

    def test_times_in_the_future_are_not_known(self, node: Node, children: Children) -> None:
        """A heartbeat of tomorrow keeps nobody alive."""
        later = node.clock.wall() + 6
        status = _status(
            node.clock, heartbeat=later, phase_since=later, checkpoint=Checkpoint(later, 5)
        )
        declare(node.jobs, describe(children.start().pid), status)
        (live,) = node.scan()
        assert (live.run.heartbeat, live.run.phase_since) == (None, None)
        assert live.run.checkpoint_time is None
        assert node.runs.dropped == {"future": 2}

    def test_a_second_training_of_one_kernel(self, node: Node, children: Children) -> None:
        """A training that is over makes way for the next one of the same process."""
        child = children.start()
        over = _status(node.clock, "a", phase="done", exit=RunExit(0, "done", node.clock.wall()))
        declare(node.jobs, describe(child.pid, "a"), over)
        assert [live.run.description.run_id for live in node.scan()] == ["a"]
        declare(node.jobs, describe(child.pid, "b"), _status(node.clock, "b"))
        assert [live.run.description.run_id for live in node.scan()] == ["b"]
        assert node.runs.dropped == {}


class TestHostileFiles:
    """Whatever is in the folder, honest runs are still seen and nothing waits."""

    @pytest.mark.parametrize(
        ("make", "reason"),
        [
            (lambda path: path.symlink_to("/etc/passwd"), "job_file_open"),
            (os.mkfifo, "job_file_kind"),
            (lambda path: path.mkdir(), "job_file_kind"),
            (lambda path: path.write_bytes(b"x" * 70_000), "job_file_size"),
            (lambda path: path.write_bytes(b"{" * 60_000), "job_file_json"),
            (lambda path: path.write_bytes(b"[" * 60_000), "job_file_json"),
            (lambda path: path.write_bytes(b'{"version": 1'), "job_file_json"),
            (lambda path: path.write_bytes(b'{"version": 1e999}'), "job_file_version"),
            (lambda path: path.write_bytes(b'{"version": 2}'), "job_file_version"),
            (lambda path: path.write_bytes(b'{"version": 1}'), "job_file_field"),
            (lambda path: path.write_bytes(b'{"version": NaN}'), "job_file_json"),
            (lambda path: path.write_bytes(b"\xff\xfe"), "job_file_json"),
            (lambda path: path.write_bytes(b""), "job_file_json"),
        ],
    )
    def test_a_file_that_is_none(
        self, node: Node, children: Children, make: Callable[[Path], object], reason: str
    ) -> None:
        """A file that is none is counted once, and hides nobody else's run."""
        declare(node.jobs, describe(children.start().pid, "honest"))
        make(description_path(node.jobs, "hostile"))
        assert [live.run.description.run_id for live in node.scan()] == ["honest"]
        assert node.runs.dropped == {reason: 1}
        node.scan()
        assert node.runs.dropped == {}

    def test_a_status_that_is_none(self, node: Node, children: Children) -> None:
        """A run with a broken status is a run without one, not one with its last."""
        declare(node.jobs, describe(children.start().pid), _status(node.clock))
        node.scan()
        status_path(node.jobs, "run-1").write_text("{")
        (live,) = node.scan()
        assert live.run.status is None

    @pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give files to somebody else")
    def test_a_file_for_somebody_elses_process(self, node: Node, children: Children) -> None:
        """Nobody speaks for another user's process."""
        declare(node.jobs, describe(children.start().pid), _status(node.clock))
        os.chown(description_path(node.jobs, "run-1"), NOBODY, NOBODY)
        assert node.scan() == ()
        assert node.runs.dropped == {"job_file_owner": 1}

    @pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give files to somebody else")
    def test_a_status_by_somebody_else(self, node: Node, children: Children) -> None:
        """Nobody writes another user's status."""
        declare(node.jobs, describe(children.start().pid), _status(node.clock))
        os.chown(status_path(node.jobs, "run-1"), NOBODY, NOBODY)
        (live,) = node.scan()
        assert live.run.status is None
        assert node.runs.dropped == {"job_file_owner": 1}

    @pytest.mark.parametrize("change", [{"start_ticks": 1}, {"boot_id": "other"}, {"pid_ns": 1}])
    def test_a_process_that_is_another(
        self, node: Node, children: Children, change: dict[str, object]
    ) -> None:
        """A recycled pid, another boot and another namespace are not the run's process."""
        declare(node.jobs, describe(children.start().pid, **change))
        assert node.scan() == ()

    def test_a_file_that_speaks_of_another_run(self, node: Node, children: Children) -> None:
        """A file is its own run's."""
        description = describe(children.start().pid, "a")
        job_files.write(description_path(node.jobs, "b"), description.encode())
        assert node.scan() == ()
        assert node.runs.dropped == {"job_file_run_id": 1}

    def test_a_process_claimed_twice(self, node: Node, children: Children) -> None:
        """Of two runs that claim one process neither is believed."""
        child = children.start()
        for run_id in ("a", "b"):
            declare(node.jobs, describe(child.pid, run_id), _status(node.clock, run_id))
        assert node.scan() == ()
        assert node.runs.dropped == {"job_file_claimed_twice": 2}

    def test_names_that_are_none(self, node: Node) -> None:
        """Names that no run has are not looked at."""
        for name in ("a b.json", "é.json", f"{'x' * 65}.json", "x.txt", ".hidden.json"):
            (node.jobs / "jobs" / name).write_text("{}")
        assert node.scan() == ()
        assert node.runs.dropped == {}


class TestSweepingUp:
    """What becomes of a run whose process ended."""

    def _ended(self, node: Node, children: Children, **status: object) -> None:
        child = children.start()
        declare(node.jobs, describe(child.pid), _status(node.clock, **status))
        node.scan()
        node.runs.note_holdings("run-1", 2)
        node.clock.advance(100)
        children.kill(child)
        assert node.scan() == ()

    def test_files_go_after_ten_minutes(self, node: Node, children: Children) -> None:
        """An ended run is gone at once, its files after ten minutes."""
        self._ended(node, children)
        node.clock.advance(599)
        node.scan()
        assert node.names() == ["run-1.json", "run-1.status.json"]
        node.clock.advance(2)
        node.scan()
        assert node.names() == []

    def test_lost_work_is_counted(self, node: Node, children: Children) -> None:
        """GPU time since the last saved state is lost, on every card that the job held."""
        saved = Checkpoint(time=node.clock.wall() + 40, step=1, durable=node.clock.wall() + 50)
        self._ended(node, children, checkpoint=saved)
        node.clock.advance(601)
        node.scan()
        user = f"user-{os.getuid()}"
        assert node.runs.lost == {(user, "died"): pytest.approx(2 * 50)}

    def test_work_without_a_saved_state(self, node: Node, children: Children) -> None:
        """Without a saved state everything since the start is lost."""
        self._ended(node, children)
        node.clock.advance(601)
        node.scan()
        (lost,) = node.runs.lost.values()
        assert 2 * 99 < lost < 2 * 160

    def test_a_training_that_is_done_lost_nothing(self, node: Node, children: Children) -> None:
        """What ended well is complete, however old its last saved state."""
        exit_ = RunExit(job_files.EXIT_DONE, "done", node.clock.wall())
        self._ended(node, children, phase="done", exit=exit_)
        node.clock.advance(601)
        node.scan()
        assert list(node.runs.lost.values()) == [0.0]

    def test_a_run_that_comes_back(self, node: Node, children: Children) -> None:
        """A resumed run keeps its files, and what its first attempt lost is counted."""
        self._ended(node, children)
        again = children.start()
        declare(node.jobs, describe(again.pid), _status(node.clock))
        (live,) = node.scan()
        assert live.pid == again.pid
        assert len(node.runs.lost) == 1
        node.clock.advance(3600)
        assert len(node.scan()) == 1
        assert len(node.names()) == 2

    def test_hostile_leftovers_go_too(self, node: Node) -> None:
        """Files that were never a run are swept up, and links lead nowhere."""
        target = node.jobs / "target"
        target.write_text("x")
        description_path(node.jobs, "link").symlink_to(target)
        description_path(node.jobs, "broken").write_text("{")
        leftover = node.jobs / "jobs" / ".run-1.json.1.tmp"
        leftover.write_text("{")
        node.scan()
        assert len(node.names()) == 3
        node.clock.advance(3600)
        node.scan()
        assert node.names() == []
        assert target.exists()

    def test_a_zombie_is_dead(self, node: Node, children: Children) -> None:
        """A process that nobody waited for trains no more."""
        child = children.start()
        declare(node.jobs, describe(child.pid))
        dead = replace(process_of(child.pid), state="Z")
        assert node.scan({child.pid: dead}) == ()


def test_the_lag_of_uploads_grows_with_the_clock() -> None:
    """A training that hangs says nothing new, and its state is no less alone for that."""
    status = RunStatus("run", sequence=1, phase="train", phase_since=1.0, heartbeat=1.0)

    def lag(upload: UploadProgress | None, now: float = 100.0) -> float | None:
        return upload_lag(replace(status, upload=upload), now)

    assert lag(None) is None
    assert lag(UploadProgress(uploaded=90.0)) == 0.0
    assert [lag(UploadProgress(50.0, 60.0), now) for now in (100.0, 700.0)] == [40.0, 640.0]
    assert lag(UploadProgress(None, 102.0)) == 0.0
    assert lag(UploadProgress(None, 1e9)) is None
    assert lag(UploadProgress(None, -1.0)) is None
