from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.exporter.agent.nodes import cgroup_v2
from tests.servers import until

from gpuwarden.agent_api import Action, Outcome, ProcessRef
from gpuwarden.errors import RefusedAction
from gpuwarden.exporter.agent.guards import Guards
from gpuwarden.exporter.processes import boot_id, proc_job_id, read_process
from gpuwarden.exporter.simulated import Card, Fault

if TYPE_CHECKING:
    from tests.exporter.agent.nodes import Cards, Jobs, Node


def job_of(pid: int) -> str:
    """The job that a process would name as its root."""
    process = read_process(pid)
    assert process is not None
    return proc_job_id(process, boot_id())


def test_a_recycled_pid_is_refused(node: Node, jobs: Jobs, cards: Cards) -> None:
    """A process that only has the pid of the job's root is somebody else."""
    job = jobs.start("polite")
    cards.hold(job.pid)
    ticks = int(job.job_id.rpartition("-")[2])
    report = node.ask(f"{job.job_id.rpartition('-')[0]}-{ticks - 1}")
    assert (report.outcome, report.reason) == (Outcome.REFUSED, "identity")
    assert job.states()


def test_a_job_that_has_left_is_refused(node: Node, jobs: Jobs, cards: Cards) -> None:
    """Nothing is ended for a job whose root has gone and left nothing behind."""
    job = jobs.start("polite")
    cards.hold(job.pid)
    os.kill(job.pid, signal.SIGKILL)
    until(lambda: not job.states())
    report = node.ask(job.job_id)
    assert (report.outcome, report.reason) == (Outcome.REFUSED, "gone")


def test_a_job_of_another_boot_is_refused(node: Node, jobs: Jobs, cards: Cards) -> None:
    """The same pid and start ticks of another boot are another process."""
    job = jobs.start("polite")
    cards.hold(job.pid)
    _, _, rest = job.job_id.removeprefix("proc-").partition("-")
    assert node.ask(f"proc-00000000-{rest}").reason == "gone"


def test_a_job_without_a_card_is_refused(node: Node, jobs: Jobs) -> None:
    """A job that holds nothing has nothing to give back."""
    report = node.ask(jobs.start("polite").job_id)
    assert (report.outcome, report.reason) == (Outcome.REFUSED, "no_gpu")


def test_a_job_on_other_cards_is_refused(node: Node, jobs: Jobs, cards: Cards) -> None:
    """A decision about one card does not end a job that holds another one now."""
    job = jobs.start("polite")
    cards.hold(job.pid, card=1)
    assert node.ask(job.job_id, gpus=(Card(index=0).uuid,)).reason == "other_gpu"
    assert node.ask(job.job_id, gpus=(Card(index=1).uuid,)).outcome is Outcome.RECLAIMED


def test_a_child_is_not_a_job(node: Node, jobs: Jobs, cards: Cards) -> None:
    """Only a job's root names it; a request for a part of it is refused."""
    job = jobs.start("family")
    cards.hold(job.pids[1])
    assert node.ask(job_of(job.pids[1])).reason == "not_root"


def test_a_driver_that_fails_refuses(node: Node, jobs: Jobs, cards: Cards) -> None:
    """Where the driver does not say who holds what, nobody is ended."""
    job = jobs.start("polite")
    cards.hold(job.pid)
    cards.write(faults=[Fault("nvmlDeviceGetCount_v2", 999)])
    assert node.ask(job.job_id).reason == "nvml"
    assert job.states()


@pytest.mark.parametrize("job_id", ["slurm-main-211-0", "pod-8f4f5a0c-0000-4000-8000-000000000001"])
@pytest.mark.parametrize("action", [Action.TERMINATE, Action.INSPECT])
def test_a_platforms_job_is_not_the_agents(job_id: str, action: Action, node: Node) -> None:
    """Jobs of Slurm and Kubernetes are ended by them."""
    report = node.ask(job_id, action)
    assert (report.outcome, report.reason) == (Outcome.REFUSED, "not_mine")


def test_the_kill_switch_stops_everything(node: Node, jobs: Jobs, cards: Cards) -> None:
    """While the file exists nothing is signalled; the attempt is not spent."""
    job = jobs.start("polite")
    cards.hold(job.pid)
    node.kill_switch.touch()
    assert node.ask(job.job_id).reason == "kill_switch"
    assert job.states()
    node.kill_switch.unlink()
    assert node.ask(job.job_id).outcome is Outcome.RECLAIMED


def test_the_kill_switch_stops_a_ladder_under_way(node: Node, jobs: Jobs, cards: Cards) -> None:
    """A kill switch that appears during the grace spares what SIGTERM did not end."""
    job = jobs.start("stubborn")
    cards.hold(job.pid)
    request = node.engine.request(job.job_id, grace=1.0)
    node.actions.submit(request)
    node.reached(request.decision_id, "sigterm")
    node.kill_switch.touch()
    report = node.outcome(request.decision_id)
    assert (report.outcome, report.reason) == (Outcome.INCOMPLETE, "kill_switch")
    assert job.states() == {job.pid: "S"}
    assert [item.ended_by for item in report.processes] == [None]


@pytest.mark.parametrize("root", ["own", "ancestor", "child", "first"])
def test_the_agents_family_is_never_ended(root: str, node: Node, cards: Cards) -> None:
    """Neither the agent, nor who started it, nor what it started, nor pid 1."""
    with subprocess.Popen(["/bin/sleep", "60"]) as child:
        pid = {"own": os.getpid(), "ancestor": os.getppid(), "child": child.pid, "first": 1}[root]
        cards.hold(pid)
        report = node.ask(job_of(pid))
        assert report.outcome is Outcome.REFUSED
        assert report.reason in {"protected", "not_root", "gone"}
        assert child.poll() is None
        child.kill()


def test_the_protect_list_spares(node: Node, jobs: Jobs, cards: Cards) -> None:
    """A process on the node's protect list is not ended, by name or by executable."""
    job = jobs.start("polite")
    cards.hold(job.pid)
    process = read_process(job.pid)
    assert process is not None
    for protect in (process.comm, str(Path(f"/proc/{job.pid}/exe").resolve())):
        node.close()
        node.protect = frozenset({protect})
        node.open()
        assert node.ask(job.job_id).reason == "protected"
    assert job.states()


def test_a_protected_holder_refuses(node: Node, jobs: Jobs, cards: Cards) -> None:
    """A job whose card is held by a protected process cannot give it back: nothing is ended."""
    node.close()
    node.protect = frozenset({"gw-service"})
    node.open()
    job = jobs.start("service")
    cards.hold(job.pids[1])
    assert node.ask(job.job_id).reason == "protected"
    assert set(job.states()) == set(job.pids)


def test_a_job_that_carries_others_is_refused(node: Node, jobs: Jobs, cards: Cards) -> None:
    """A job that a notebook server below it would take others down with is not ended.

    An editor's server that nobody named as a launcher looks like this: ending one idle kernel
    would end every training in its terminals.
    """
    job = jobs.start("carrier")
    cards.hold(job.pid)
    before = jobs.living()
    for action in (Action.INSPECT, Action.TERMINATE):
        report = node.ask(job.job_id, action)
        assert (report.outcome, report.reason) == (Outcome.REFUSED, "carries_others")
        assert "--attribution.launcher" in report.message
    assert jobs.living() == before


def test_what_a_launcher_led_is_not_the_jobs(node: Node, jobs: Jobs, cards: Cards) -> None:
    """What a server below the job started is another job, also once the server is gone."""
    job = jobs.start("opener")
    cards.hold(job.pid)
    report = node.ask(job.job_id, grace=1.0)
    assert report.outcome is Outcome.RECLAIMED
    assert {item.pid: item.ended_by for item in report.processes} == dict.fromkeys(
        job.pids, "SIGTERM"
    )
    file = job.report.with_suffix(".opened")
    opened = read_process(int(until(lambda: file.read_text() if file.exists() else "")))
    assert opened is not None
    assert not opened.ended


def test_a_process_seen_elsewhere_is_no_member(node: Node, jobs: Jobs, cards: Cards) -> None:
    """What the engine says it saw is ended only if it can belong to the job."""
    job, other = jobs.start("polite"), jobs.start("polite")
    cards.hold(job.pid)
    report = node.ask(job.job_id, seen=other.seen)
    assert [item.pid for item in report.processes] == [job.pid]
    assert other.states()


def test_a_wrong_start_time_is_no_member(node: Node, jobs: Jobs, cards: Cards) -> None:
    """A daemon that started at another time than the one seen is not ended."""
    job = jobs.start("daemoniser")
    cards.hold(job.pid)
    wrong = (ProcessRef(job.pids[1], start_time=1000.0),)
    report = node.ask(job.job_id, grace=1.0, seen=wrong)
    assert [item.pid for item in report.processes] == [job.pid]
    assert set(job.states()) == {job.pids[1]}


@pytest.fixture
def scope(tmp_path: Path):
    """A scope of a job's own."""
    mount = cgroup_v2()
    if mount is None or os.geteuid() != 0:
        pytest.skip("needs a cgroup v2 that can be written")
    folder = mount / f"gpuwarden-{os.getpid()}-{tmp_path.name[-8:]}.scope"
    folder.mkdir()
    yield folder
    until(lambda: not (folder / "cgroup.procs").read_text())
    folder.rmdir()


@contextlib.contextmanager
def watched(file: Path):
    """Gives a function that says whether a file was written since."""
    libc = ctypes.CDLL(None, use_errno=True)
    modified = 0x2
    descriptor = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    assert libc.inotify_add_watch(descriptor, os.fsencode(file), modified) >= 0

    def written() -> bool:
        try:
            return bool(os.read(descriptor, 4096))
        except BlockingIOError:
            return False

    try:
        yield written
    finally:
        os.close(descriptor)


def test_the_kernel_ends_a_cgroup_of_the_jobs_own(
    scope: Path, node: Node, jobs: Jobs, cards: Cards
) -> None:
    """After the grace what is left in the job's own cgroup goes by cgroup.kill, all at once."""
    job = jobs.start("stubborn")
    (scope / "cgroup.procs").write_text(str(job.pid))
    cards.hold(job.pid)
    with watched(scope / "cgroup.kill") as written:
        assert node.ask(job.job_id, Action.INSPECT).outcome is Outcome.DONE
        assert not written()
        assert node.ask(job.job_id, grace=1.0).outcome is Outcome.RECLAIMED
        assert written()


def test_the_kernel_ends_no_cgroup_in_which_somebody_is_spared(
    scope: Path, node: Node, jobs: Jobs, cards: Cards
) -> None:
    """A protected process in the job's own cgroup lives: cgroup.kill would end it as well."""
    node.close()
    node.protect = frozenset({"gw-service"})
    node.open()
    job = jobs.start("service")
    for pid in job.pids:
        (scope / "cgroup.procs").write_text(str(pid))
    cards.hold(job.pids[2])
    with watched(scope / "cgroup.kill") as written:
        assert node.ask(job.job_id, grace=1.0).outcome is Outcome.RECLAIMED
        assert not written()
    assert set(job.states()) == {job.pids[1]}
    os.kill(job.pids[1], signal.SIGKILL)


def test_a_shared_cgroup_is_not_a_job(scope: Path, node: Node, jobs: Jobs, cards: Cards) -> None:
    """A scope in which something older runs is not the job's own."""
    older, job = jobs.start("polite"), jobs.start("polite")
    for pid in (older.pid, job.pid):
        (scope / "cgroup.procs").write_text(str(pid))
    cards.hold(job.pid)
    assert node.ask(job.job_id).outcome is Outcome.RECLAIMED
    assert older.states()


SHELLS = read_process(os.getpid())


@pytest.mark.parametrize(
    ("uid", "comm", "cgroup", "forbidden"),
    [
        (0, "python", "/system.slice/tensorboard.service", True),
        (0, "python", "/user.slice/user-0.slice/session-3.scope", False),
        (1000, "python", "/system.slice/tensorboard.service", False),
        (0, "containerd-shim", "/", True),
        (0, "slurmstepd", "/", True),
        (0, "nvidia-cuda-mps", "/", True),
        (0, "nvidia-persiste", "/", True),
        (0, "systemd-journal", "/", True),
        (0, "kubelet", "/", True),
        (0, "dcgm-exporter", "/", True),
        (0, "Xorg", "/", True),
        # A name that anybody can take protects nobody.
        (1000, "containerd-shim", "/", False),
        (1000, "sshd", "/", False),
    ],
)
def test_the_system_is_never_touched(
    uid: int, comm: str, cgroup: str, forbidden: bool, tmp_path: Path
) -> None:
    """Root's services and the node's own daemons are left alone, users' processes are not."""
    assert SHELLS is not None
    process = dataclasses.replace(SHELLS, pid=4_000_000, uid=uid, comm=comm, cgroup=cgroup)
    assert (Guards(proc=tmp_path).forbids(process) is not None) is forbidden


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make an executable of root's")
def test_an_executable_of_the_system_is_known(tmp_path: Path) -> None:
    """A process of any user counts as the system's if root's own executable says so."""
    runtime = Path(shutil.copy("/bin/sleep", tmp_path / "containerd"))
    with subprocess.Popen([runtime, "60"], executable=runtime) as started:
        process = read_process(started.pid)
        assert process is not None
        disguised = dataclasses.replace(process, uid=1000, comm="python")
        found = Guards().forbids(disguised)
        runtime.chmod(0o777)
        unbelieved = Guards().forbids(disguised)
        started.kill()
    assert found is not None
    assert unbelieved is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make an executable of root's")
def test_an_upgraded_executable_is_not_taken_for_a_users(tmp_path: Path) -> None:
    """What may be the system's or protected, and cannot be looked at any more, is left alone."""
    for name in ("containerd", "gnome-shell", "tensorboard"):
        runtime = Path(shutil.copy("/bin/sleep", tmp_path / name))
        with subprocess.Popen([runtime, "60"], executable=runtime) as started:
            process = read_process(started.pid)
            assert process is not None
            runtime.unlink()
            disguised = dataclasses.replace(process, uid=1000, comm="python")
            found = Guards(protect=frozenset({str(tmp_path / "tensorboard")})).forbids(disguised)
            started.kill()
        assert found is not None


def test_another_pid_namespace_is_noticed(tmp_path: Path) -> None:
    """Where NVML's pids are not ours, nothing may be signalled."""
    (tmp_path / "self/ns").mkdir(parents=True)
    (tmp_path / "self/ns/pid").touch()
    with pytest.raises(RefusedAction) as refused:
        Guards(proc=tmp_path).check_pid_namespace()
    assert refused.value.reason == "pid_namespace"
