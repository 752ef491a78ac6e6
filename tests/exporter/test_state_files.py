"""What an exporter knows outlives it: for the same boot, and only as far as it can be believed."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from tests.exporter.nodes import (
    Children,
    ManualClock,
    declare,
    describe,
    eventually,
    own_launchers,
    process_of,
)
from tests.servers import fetch, free_port

from gpuwarden.exporter import state_files
from gpuwarden.exporter.attribution import Attribution
from gpuwarden.exporter.devices import XidErrors
from gpuwarden.exporter.processes import boot_id, proc_job_id
from gpuwarden.exporter.recollections import (
    AttemptRecord,
    CounterRecord,
    JobRecord,
    Recollection,
    UsageRecord,
)
from gpuwarden.exporter.simulated import (
    GIB,
    Card,
    Fault,
    Scenario,
    SimulatedProcess,
    SimulatedXid,
)
from gpuwarden.exporter.state_files import StateFile
from gpuwarden.job_files import Checkpoint, RunExit, RunStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from gpuwarden.exporter.jobs import Job, NodeSnapshot
    from gpuwarden.exporter.nvml import Nvml

    Driver = Callable[[Scenario], Nvml]


class Node:
    """A node whose exporter is replaced by a new one that knows what was kept, and no more."""

    def __init__(self, driver: Driver, jobs: Path, clock: ManualClock, file: Path) -> None:
        self.directory, self.clock, self.file = jobs, clock, file
        self._driver = driver
        self._nvml: Nvml | None = None
        self.attribution = self._new()

    def _new(self) -> Attribution:
        return Attribution(self.directory, launchers=own_launchers(), clock=self.clock)

    def cards(self, scenario: Scenario) -> None:
        """Begin with these cards."""
        self._nvml = self._driver(scenario)

    def observe(self, *, released: bool = False) -> NodeSnapshot:
        """Read the node; released: without its driver."""
        nvml = self._nvml
        return self.attribution.observe(None if nvml is None or released else nvml.snapshot())

    def job(self) -> Job:
        """The only job."""
        (job,) = self.observe().jobs
        return job

    def restart(self, *, away: float = 0.0) -> None:
        """Replace the exporter; between the two some time passes."""
        self.file.write_bytes(self.attribution.recollect().encode())
        self.attribution.close()
        self.clock.advance(away)
        self.attribution = self._new()
        known = state_files.load(self.file, boot_id())
        assert known is not None
        self.attribution.recall(known)


@pytest.fixture
def node(driver: Driver, jobs: Path, clock: ManualClock, tmp_path: Path) -> Iterator[Node]:
    """A node without cards, until the test gives it some."""
    made = Node(driver, jobs, clock, tmp_path / "state.json")
    yield made
    made.attribution.close()


def _status(clock: ManualClock, **changes: object) -> RunStatus:
    now = clock.wall()
    values: dict[str, Any] = {"run_id": "run-1", "sequence": 1, "phase": "train"}
    return RunStatus(**{**values, "phase_since": now, "heartbeat": now, **changes})


class TestJobs:
    """A job is as old after a restart as before."""

    def test_first_use_and_silence_go_on(self, node: Node, children: Children) -> None:
        """Neither the first use of a card nor a silence begins anew."""
        child = children.start()
        node.cards(Scenario([Card(0)], [SimulatedProcess(0, child.pid, memory=GIB)]))
        before = node.job()
        node.clock.advance(30)
        node.observe()
        node.restart(away=90)
        after = node.job()
        assert (after.job_id, after.first_gpu_use) == (before.job_id, before.first_gpu_use)
        assert after.activity == before.activity == {"cpu": before.first_gpu_use}

    def test_what_happened_in_a_long_absence_is_not_known(
        self, node: Node, children: Children
    ) -> None:
        """After more than ten minutes a job may have been at work: it counts as active again."""
        child = children.start()
        node.cards(Scenario([Card(0)], [SimulatedProcess(0, child.pid)]))
        first = node.job().first_gpu_use
        node.restart(away=601)
        job = node.job()
        assert (job.first_gpu_use, job.activity) == (first, {"cpu": node.clock.wall()})

    def test_work_while_nobody_looked_is_life(self, node: Node, children: Children) -> None:
        """A tree that used the processor between two exporters was active."""
        child = children.script("echo; while :; do :; done")
        node.cards(Scenario([Card(0)], [SimulatedProcess(0, child.pid)]))
        ticks = process_of(child.pid).cpu_ticks
        node.observe()
        eventually(lambda: process_of(child.pid).cpu_ticks, until=lambda now: now > ticks + 30)
        node.restart(away=5)
        assert node.job().activity["cpu"] == node.clock.wall()

    def test_the_driver_is_released_meanwhile(self, node: Node, children: Children) -> None:
        """A release window gives nobody a new cold start."""
        child = children.start()
        node.cards(Scenario([Card(0)], [SimulatedProcess(0, child.pid)]))
        first = node.job().first_gpu_use
        for _ in range(3):
            node.clock.advance(200)
            assert node.observe(released=True).jobs == ()
        node.restart()
        assert node.observe(released=True).jobs == ()
        assert node.job().first_gpu_use == first
        children.kill(child)
        assert node.observe().jobs == ()
        assert node.attribution.recollect().jobs == {}

    def test_a_root_that_has_ended(self, node: Node, children: Children) -> None:
        """A process whose job's root ended before the restart is still that job."""
        child = children.start("sh", "-c", "setsid sh -c 'sleep 600 & echo $!; wait' & read x")
        assert child.stdout is not None
        orphan = int(child.stdout.readline())
        job_id = proc_job_id(process_of(child.pid), boot_id())
        node.cards(Scenario([Card(0)], [SimulatedProcess(0, orphan, memory=GIB)]))
        assert node.job().job_id == job_id
        children.kill(child)
        assert node.job().job_id == job_id
        node.restart()
        assert node.job().job_id == job_id
        os.killpg(process_of(orphan).pgid, signal.SIGKILL)

    def test_counters_do_not_fall(self, node: Node, children: Children) -> None:
        """What ended members of a job used is counted on, and nothing is counted twice."""
        child = children.script(
            "(i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done; sleep 600) & echo $!; wait"
        )
        node.cards(Scenario([Card(0)], [SimulatedProcess(0, child.pid)]))

        def used() -> float:
            resources = node.job().resources
            assert resources is not None
            return resources.cpu_seconds

        before = eventually(used, until=lambda seconds: seconds > 0.1)
        node.restart()
        again = used()
        assert before <= again < before + 5
        assert used() >= again

    def test_a_card_that_is_lost_over_the_restart(self, node: Node, children: Children) -> None:
        """A job whose card does not tell goes on holding it."""
        child = children.start()
        scenario = Scenario([Card(0)], [SimulatedProcess(0, child.pid, memory=GIB)])
        node.cards(scenario)
        job_id = node.job().job_id
        node.restart()
        node.cards(replace(scenario, faults=[Fault("nvmlDeviceGetComputeRunning*", 999)]))
        job = node.job()
        assert (job.job_id, [held.uuid for held in job.holdings]) == (job_id, [Card(0).uuid])


class TestRuns:
    """GPU time that was lost is not forgotten, nor what is about to be."""

    def _began(self, node: Node, children: Children, **status: object) -> subprocess.Popen[bytes]:
        child = children.start()
        declare(node.directory, describe(child.pid), _status(node.clock, **status))
        node.cards(Scenario([Card(0)], [SimulatedProcess(0, child.pid)]))
        node.observe()
        return child

    def _lost(self, node: Node) -> dict[str, float]:
        return {reason: lost for (_, reason), lost in node.observe().lost_gpu_seconds.items()}

    def test_a_run_that_ends_while_nobody_looks(self, node: Node, children: Children) -> None:
        """Its end is put at its last writing, and what it lost is counted once."""
        saved = node.clock.wall() + 10
        checkpoint = Checkpoint(time=saved, step=1, durable=saved)
        child = self._began(node, children, checkpoint=checkpoint)
        node.clock.advance(50)
        node.restart(away=5)
        children.kill(child)
        assert self._lost(node) == {}
        node.restart(away=601)
        assert self._lost(node) == {"died": pytest.approx(40, abs=1)}
        node.restart(away=601)
        assert self._lost(node) == {"died": pytest.approx(40, abs=1)}

    def test_a_run_whose_files_are_gone_by_then(self, node: Node, children: Children) -> None:
        """Whoever removes the files of a run that ended does not hide what it lost."""
        child = self._began(node, children)
        started = process_of(child.pid)
        node.clock.advance(50)
        node.restart()
        children.kill(child)
        for path in (node.directory / "jobs").iterdir():
            path.unlink()
        (lost,) = self._lost(node).values()
        assert lost >= 50
        assert started.pid == child.pid

    def test_a_run_that_came_back_meanwhile(self, node: Node, children: Children) -> None:
        """A run that was resumed while no exporter ran has lost its first attempt's work."""
        child = self._began(node, children)
        node.clock.advance(20)
        node.restart(away=1000)
        children.kill(child)
        again = children.start()
        declare(node.directory, describe(again.pid), _status(node.clock))
        (lost,) = self._lost(node).values()
        assert 20 <= lost < 200

    def test_words_of_a_trainer_do_not_spoil_the_file(self, node: Node, children: Children) -> None:
        """A training's own times and statuses may be any number: what is kept stays readable."""
        exit_ = RunExit(code=2**80, reason="x", time=-1e300)
        checkpoint = Checkpoint(time=-5.0, step=0, durable=None)
        self._began(node, children, checkpoint=checkpoint, exit=exit_)
        node.restart()
        node.observe()


class TestCounters:
    """The driver's counters go on where they were, whoever counts them."""

    def test_traffic_goes_on(self, driver: Driver, scenario_file: Path) -> None:
        """What went over the bus while no exporter ran is counted, and nothing twice."""
        first = driver(Scenario([Card(0, pcie_receive=1000)]))
        first.snapshot()
        Scenario([Card(0, pcie_receive=1500)]).write(scenario_file)
        received = "pcie_receive"
        eventually(lambda: first.snapshot().gpus[0].traffic_bytes[received] == 500)
        kept = first.recollect()
        first.close()
        second = driver(Scenario([Card(0, pcie_receive=1700)]))
        second.recall(kept)
        assert second.snapshot().gpus[0].traffic_bytes[received] == 700

    def test_errors_of_a_card_go_on(self, driver: Driver, scenario_file: Path) -> None:
        """An error that was heard stays on the page, and the next one is one more."""
        quiet = Scenario([Card(0)])
        nvml = driver(quiet)
        heard = XidErrors(0, Card(0).uuid, 79, count=3, last_seen=5.0)
        nvml.recall(CounterRecord(xids=(heard,)))
        nvml.watch_xids()
        assert nvml.snapshot().xids == (heard,)
        happened = itertools.count(1)

        def again() -> int:
            replace(quiet, xids=[SimulatedXid(0, 79, next(happened))]).write(scenario_file)
            (errors,) = nvml.snapshot().xids
            assert errors.count >= 3
            return errors.count

        eventually(again, until=lambda count: count > 3)
        (errors,) = nvml.recollect().xids
        assert errors.last_seen > 5.0


FIRST = Recollection(
    boot_id=boot_id(),
    written_at=1000.0,
    roots={},
    jobs={"proc-0-1-1": JobRecord(UsageRecord(), first_gpu_use=5.0)},
    attempts=(AttemptRecord("r", (1, 2), 1000, 3.0, folder=(4, 5)),),
    lost={("ann", "died"): 7.5},
    counters=CounterRecord(
        {("GPU-1", "pcie_receive"): (9, 8)},
        (XidErrors(0, "GPU-1", 79, count=2, last_seen=4.0),),
        {"future": 3},
    ),
)


def _linked(path: Path) -> None:
    target = path.with_name("target")
    target.write_bytes(FIRST.encode())
    path.symlink_to(target)


def _writable(path: Path) -> None:
    path.write_bytes(FIRST.encode())
    path.chmod(0o666)


def _changed(**changes: object) -> Callable[[Path], None]:
    document = {**json.loads(FIRST.encode()), **changes}
    return lambda path: path.write_text(json.dumps(document))


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(state_files.MAX_BYTES + 1)


class TestFile:
    """The file is this exporter's own, or it is nothing."""

    @pytest.mark.parametrize(
        "make",
        [
            lambda path: path.write_bytes(b""),
            lambda path: path.write_bytes(b"{"),
            lambda path: path.write_bytes(b"[]"),
            lambda path: path.write_bytes(b"[" * 100_000),
            lambda path: path.write_bytes(FIRST.encode()[:-20]),
            lambda path: path.write_bytes(b"\xff\xfe\x00"),
            _changed(version=2),
            _changed(version=True),
            _changed(jobs=[]),
            _changed(jobs={"a": {"first_gpu_use": "yesterday"}}),
            _changed(members=[[1, 2, 3]]),
            _changed(lost=[["ann", "died", float("nan")]]),
            _changed(roots=[[1, 2, 3, 4, 5, 6, 7, "/"]]),
            _linked,
            _writable,
            _sparse,
            os.mkfifo,
            lambda path: path.mkdir(),
        ],
    )
    def test_what_cannot_be_believed_is_put_aside(
        self, tmp_path: Path, make: Callable[[Path], object]
    ) -> None:
        """Nothing is taken from such a file; it is kept for whoever wants to know, and said."""
        file = tmp_path / "state.json"
        make(file)
        with structlog.testing.capture_logs() as said:
            assert state_files.load(file, boot_id()) is None
        assert [line["log_level"] for line in said] == ["warning"]
        assert sorted(path.name for path in tmp_path.iterdir() if path.name != "target") == [
            "state.json.bad"
        ]

    def test_another_boot(self, tmp_path: Path) -> None:
        """Processes of another boot are other processes."""
        file = tmp_path / "state.json"
        file.write_bytes(FIRST.encode())
        assert state_files.load(file, "another") is None
        assert state_files.load(file, boot_id()) == FIRST

    def test_no_file(self, tmp_path: Path) -> None:
        """The first start is no fault."""
        with structlog.testing.capture_logs() as said:
            assert state_files.load(tmp_path / "none", boot_id()) is None
        assert said == []

    @given(st.data())
    @settings(max_examples=200, deadline=None)
    def test_any_change_is_read_or_refused(self, data: st.DataObject) -> None:
        """Whatever is changed in a file, reading it gives a recollection or says why not."""
        content = bytearray(FIRST.encode())
        for _ in range(data.draw(st.integers(1, 4))):
            at = data.draw(st.integers(0, len(content) - 1))
            content[at] = data.draw(st.integers(0, 255))
        try:
            found = Recollection.decode(bytes(content))
        except ValueError:
            return
        assert Recollection.decode(found.encode()) == found


class TestWriting:
    """The file follows what is known, at a price that does not matter."""

    def test_what_is_new_is_written_at_once(
        self, node: Node, children: Children, tmp_path: Path
    ) -> None:
        """A new job is on disk with the snapshot that found it; what moves on waits."""
        state = StateFile(tmp_path / "kept.json", clock=node.clock)
        state.start()
        processes = [SimulatedProcess(0, children.start().pid)]
        node.cards(Scenario([Card(0)], processes))

        def written() -> tuple[float, int]:
            known = state_files.load(tmp_path / "kept.json", boot_id())
            return (known.written_at, len(known.jobs)) if known is not None else (0.0, 0)

        began = node.clock.wall()
        state.offer(node.attribution, node.observe())
        eventually(written, until=lambda seen: seen == (began, 1))
        node.clock.advance(5)
        state.offer(node.attribution, node.observe())
        node.clock.advance(6)
        later = node.clock.wall()
        state.offer(node.attribution, node.observe())
        # The one of five seconds ago would have been written before this one.
        assert eventually(written, until=lambda seen: seen[0] > began)[0] == later
        node.cards(Scenario([Card(0)], [*processes, SimulatedProcess(0, children.start().pid)]))
        node.clock.advance(1)
        state.offer(node.attribution, node.observe())
        eventually(written, until=lambda seen: seen == (later + 1, 2))
        assert (tmp_path / "kept.json").stat().st_mode & 0o777 == 0o600
        state.stop()

    def test_a_folder_that_is_not_there(self, node: Node, tmp_path: Path) -> None:
        """Where nothing can be written the exporter goes on, and says so once."""
        state = StateFile(tmp_path / "none" / "state.json", clock=node.clock)
        with structlog.testing.capture_logs() as said:
            state.start()
            for _ in range(3):
                state.offer(node.attribution)
                eventually(lambda: said)
            state.stop()
        assert [line["error"] for line in said] == ["No such file or directory"]


class TestProcess:
    """The whole program, ended well and ended badly."""

    @pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
    def test_a_restart(
        self, children: Children, scenario_file: Path, tmp_path: Path, end: signal.Signals
    ) -> None:
        """However it ended, the next one shows the same first use of a card."""
        child = children.start()
        Scenario([Card(0)], [SimulatedProcess(0, child.pid)]).write(scenario_file)
        state = tmp_path / "state.json"
        port = free_port()
        command = [sys.executable, "-m", "gpuwarden", "exporter", f"--state.path={state}"]
        command += [f"--web.listen-address=127.0.0.1:{port}", f"--jobs.directory={tmp_path}"]
        command += [f"--gpus=simulated:{scenario_file}", "--collect.interval=100ms"]

        def first_use() -> float | None:
            page = fetch(f"http://127.0.0.1:{port}/metrics").decode()
            for family in text_string_to_metric_families(page):
                if family.name == "gpu_job_first_gpu_use_timestamp_seconds":
                    return family.samples[0].value
            return None

        def shown() -> float | None:
            try:
                return first_use()
            except OSError:
                return None

        seen = set()
        for _ in range(3):
            with subprocess.Popen(command, stderr=subprocess.DEVNULL) as program:
                try:
                    seen.add(eventually(shown))
                    eventually(state.exists)
                finally:
                    program.send_signal(end)
                    program.wait(timeout=20)
        assert len(seen) == 1
