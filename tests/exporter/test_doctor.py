"""`gpuwarden doctor node`: each finding is provoked on a machine that has the trouble."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.disks import small_disk
from tests.exporter.nodes import Children, ManualClock
from tests.ruleengine.worlds import OwnedClock, Sink
from tests.servers import free_port

from gpuwarden import __version__
from gpuwarden.agent_api import NodeInfo
from gpuwarden.exporter import releases
from gpuwarden.exporter.agent.keys import generate
from gpuwarden.exporter.doctor_checks import Machine, machine_checks
from gpuwarden.exporter.doctor_findings import KNOWN
from gpuwarden.exporter.doctor_places import Daemon, Places, daemon, places
from gpuwarden.exporter.doctor_services import service_checks
from gpuwarden.exporter.processes import boot_id
from gpuwarden.exporter.runs import prepare
from gpuwarden.exporter.simulated import Card, Fault, Scenario
from gpuwarden.findings import Check, Finding, Status, examine

if TYPE_CHECKING:
    from collections.abc import Iterator

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="other users' processes take root")
FAILED, WARNING, OK, NOT_CHECKED = Status.FAILED, Status.WARNING, Status.OK, Status.NOT_CHECKED


class Node:
    """A node that is well, until a test has it otherwise."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.scenario = folder / "scenario"
        Scenario([Card(0), Card(1)]).write(self.scenario)
        prepare(folder / "jobs")
        pair = generate(folder / "keys")
        pair.private.unlink()
        self.key_id = pair.key_id
        self.machine = Machine()
        self.given: dict[str, Any] = {
            "gpus": f"simulated:{self.scenario}",
            "jobs": folder / "jobs",
            "keys": folder / "keys",
            "journal": folder / "agent.journal",
            "kill_switch": folder / "halt",
            "release_file": folder / "release",
            "exporter_url": f"http://127.0.0.1:{free_port()}",
            "agent_url": f"http://127.0.0.1:{free_port()}",
        }
        self.exporter: Daemon | None = None
        self.agent: Daemon | None = None

    @property
    def places(self) -> Places:
        """Where everything is."""
        return places(self.given, exporter=self.exporter, agent=self.agent)

    def find(self, name: str) -> list[Finding]:
        """What one check finds."""
        checks: list[Check] = [
            *machine_checks(self.places, self.machine),
            *service_checks(self.places),
        ]
        found = examine([check for check in checks if check.known.id == name])
        assert found, name
        return found

    def one(self, name: str) -> tuple[Status, str]:
        """The only finding of a check."""
        (finding,) = self.find(name)
        return finding.status, f"{finding.subject}: {finding.said}"


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """A node that is well."""
    return Node(tmp_path)


AS_NOBODY = """
import difflib, os, sys
from gpuwarden import doctors
from gpuwarden.cli import main
from gpuwarden.exporter import doctor_cli
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
main(sys.argv[1:])
"""


def own(*words: str) -> Daemon:
    """A daemon that is this very process."""
    return Daemon(os.getpid(), words)


@pytest.fixture
def stranger() -> Iterator[Daemon]:
    """A process of nobody's, without any right."""
    child = subprocess.Popen(["/bin/sleep", "600"], user=65534, group=65534, extra_groups=[])
    yield Daemon(child.pid, ("gpuwarden", "exporter"))
    child.kill()
    child.wait()


def test_every_check_is_made_and_known() -> None:
    """In one list, which docs/doctor.md is made from."""
    node_places = places({}, exporter=None, agent=None)
    checks = [*machine_checks(node_places, Machine()), *service_checks(node_places)]
    assert {check.known.id for check in checks} == {known.id for known in KNOWN}


def test_a_driver_that_fails_is_told(node: Node) -> None:
    """And a lost card, and a node without any; one that is well is counted."""
    assert node.one("node.driver") == (OK, ": driver 550.54.15, 2 cards")
    lost = Fault("nvmlDeviceGetHandleByIndex_v2", 15, card=1)
    Scenario([Card(0), Card(1)], faults=[lost]).write(node.scenario)
    assert node.one("node.driver")[0] is FAILED
    Scenario([]).write(node.scenario)
    assert "no card" in node.one("node.driver")[1]
    node.given["gpus"] = "nvml"
    assert node.one("node.driver")[0] is FAILED


def test_a_card_that_only_the_kernel_knows(node: Node, tmp_path: Path) -> None:
    """Three in the module's list, two of NVML's, one device file."""
    assert node.one("node.cards") == (NOT_CHECKED, ": the driver is simulated")
    for number in range(3):
        (tmp_path / f"proc/driver/nvidia/gpus/0000:0{number}:00.0").mkdir(parents=True)
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    node.machine = Machine(proc=tmp_path / "proc", dev=tmp_path / "dev")
    found = [finding.said for finding in node.find("node.cards")]
    assert found == [
        "the kernel's module has 3 cards, and NVML 2",
        "1 device files in /dev, and 2 cards",
    ]


@needs_root
def test_rights_are_read_from_the_process(node: Node, stranger: Daemon) -> None:
    """Of the exporter and of the agent; without them it cannot be told."""
    assert node.one("node.processes") == (NOT_CHECKED, ": no exporter is seen to run here")
    node.exporter = node.agent = own()
    assert node.one("node.agent_rights")[0] is OK
    assert node.find("node.processes")[0].status in (OK, WARNING)  # a namespace of its own
    node.exporter = node.agent = stranger
    (said, *_) = [f for f in node.find("node.processes") if f.status is FAILED]
    assert said.said == "the exporter lacks CAP_DAC_READ_SEARCH, CAP_SYS_PTRACE"
    assert "CAP_KILL" in node.one("node.agent_rights")[1]
    node.exporter = Daemon(2**22 + 1, ())
    assert "cannot be seen" in node.find("node.processes")[-1].said


@needs_root
def test_hidden_processes_are_told(node: Node, tmp_path: Path, stranger: Daemon) -> None:
    """Unless the exporter may see them all the same."""
    proc = tmp_path / "proc"
    for pid in (os.getpid(), stranger.pid):
        (proc / str(pid)).mkdir(parents=True)
        (proc / str(pid) / "status").write_text(Path(f"/proc/{pid}/status").read_text())
    (proc / "self").mkdir()
    (proc / "self/mounts").write_text(f"proc {proc} proc rw,hidepid=invisible 0 0\n")
    node.machine = Machine(proc=proc)
    node.exporter = stranger
    assert node.one("node.hidepid")[0] is FAILED
    node.exporter = own()
    assert node.one("node.hidepid")[0] is OK


@pytest.mark.parametrize(
    ("release", "files", "expected"),
    [
        ("6.8.0-45-generic", ("pressure", "unified"), (OK, OK)),
        ("5.10.0-28-amd64", ("unified",), (WARNING, WARNING)),
        ("4.18.0-553.el8", ("pressure",), (WARNING, FAILED)),
        ("odd", ("pressure", "unified"), (NOT_CHECKED, NOT_CHECKED)),
    ],
)
def test_old_kernels_are_told(
    node: Node,
    tmp_path: Path,
    release: str,
    files: tuple[str, ...],
    expected: tuple[Status, Status],
) -> None:
    """Without cgroup.kill, pidfds or PSI."""
    proc, sys_ = tmp_path / "proc", tmp_path / "sys"
    for folder in (proc / "sys/kernel", proc / "pressure", sys_ / "fs/cgroup"):
        folder.mkdir(parents=True)
    (proc / "sys/kernel/osrelease").write_text(release + "\n")
    if "pressure" in files:
        (proc / "pressure/cpu").touch()
    if "unified" in files:
        (sys_ / "fs/cgroup/cgroup.controllers").touch()
    node.machine = Machine(proc=proc, sys=sys_)
    assert (node.one("node.cgroups")[0], node.one("node.kernel")[0]) == expected


@needs_root
def test_folders_of_job_files(node: Node, stranger: Daemon) -> None:
    """Missing, open to all, or of the wrong user."""
    assert node.one("node.jobs")[0] is OK
    (node.folder / "jobs/requests").chmod(0o777)
    assert node.one("node.jobs")[0] is FAILED
    (node.folder / "jobs/requests").chmod(0o755)
    (node.folder / "jobs/jobs").chmod(0o755)
    assert node.one("node.jobs")[0] is WARNING
    (node.folder / "jobs/jobs").chmod(0o1777)
    os.chown(node.folder / "jobs/jobs", 4242, 4242)
    node.exporter = stranger
    assert "belongs to uid 4242" in node.one("node.jobs")[1]
    node.exporter = None
    (node.folder / "jobs/jobs").rmdir()
    assert node.one("node.jobs")[0] is FAILED
    (node.folder / "jobs/jobs").touch()
    assert "is no folder" in node.one("node.jobs")[1]


def test_keys_that_others_can_change(node: Node) -> None:
    """Are none; nor is an empty folder."""
    assert node.one("node.keys") == (OK, f"{node.folder / 'keys'}: accepted: {node.key_id}")
    (node.folder / "keys/engine.pub").chmod(0o666)
    assert node.one("node.keys")[0] is FAILED
    node.given["keys"] = node.folder / "none"
    assert node.one("node.keys")[0] is NOT_CHECKED
    node.agent = own()
    assert node.one("node.keys")[0] is FAILED


def test_what_an_operator_has_switched_off(node: Node) -> None:
    """The kill switch, and the driver that was released."""
    assert (node.one("node.kill_switch")[0], node.one("node.release")[0]) == (OK, OK)
    (node.folder / "halt").touch()
    releases.order(node.folder / "release", 600.0, clock=ManualClock())
    assert (node.one("node.kill_switch")[0], node.one("node.release")[0]) == (WARNING, WARNING)


def page(*, version: str = __version__, age: float = 1.0, nvml: int = 1, collector: int = 1) -> str:
    """A page of an exporter."""
    return (
        f"gpuwarden_nvml_up {nvml}\n"
        f"gpuwarden_snapshot_timestamp_seconds {time.time() - age}\n"
        f'gpuwarden_exporter_build_info{{version="{version}"}} 1\n'
        f'gpuwarden_collector_success{{collector="gpus"}} {collector}\n'
        "gpuwarden_host_pids 1\nodd line\n"
    )


@contextlib.contextmanager
def answering(*bodies: bytes | str, status: int = 200) -> Iterator[str]:
    """A server that gives these bodies, one after the other, the last one for ever."""
    left = [body.encode() if isinstance(body, str) else body for body in bodies]
    with Sink(lambda *_: (status, left.pop(0) if len(left) > 1 else left[0])) as sink:
        yield sink.url


def test_an_exporter_that_is_not_well(node: Node) -> None:
    """Away, another's, without a driver, old, of another version; and one that is well."""
    assert node.one("node.exporter")[0] is FAILED
    bodies = ["up 1\n", page(nvml=0), page(age=60), page(version="0.0.1"), page()]
    found = []
    with answering(*bodies) as url:
        node.given["exporter_url"] = url
        found = [node.one("node.exporter") for _ in bodies]
    for (status, said), (expected, words) in zip(
        found,
        [
            (FAILED, "no exporter of gpuwarden"),
            (FAILED, "no driver"),
            (FAILED, "60 s old"),
            (WARNING, "version 0.0.1"),
            (OK, "0 jobs"),
        ],
        strict=True,
    ):
        assert status is expected
        assert words in said
    with answering("", status=401) as url:
        node.given["exporter_url"] = url
        assert node.one("node.exporter")[0] is NOT_CHECKED


def test_a_collector_that_fails(node: Node) -> None:
    """Is named; a page that tells of none cannot be judged."""
    with answering(page(), page(collector=0), "gpuwarden_nvml_up 1\n") as url:
        node.given["exporter_url"] = url
        found = [node.one("node.collectors") for _ in range(3)]
    assert found[0] == (OK, ": 1 collectors succeed")
    assert found[1] == (WARNING, "gpus: fails")
    assert found[2][0] is NOT_CHECKED


def test_an_agent_of_another_boot_or_with_other_keys(node: Node) -> None:
    """Or none at all; and one that is well."""
    assert node.one("node.agent")[0] is FAILED
    infos = [
        NodeInfo("n", "another-boot", (node.key_id,)),
        NodeInfo("n", boot_id(), ("0011223344556677",)),
        NodeInfo("n", boot_id(), (node.key_id,)),
    ]
    with answering(b"<html>", *(info.encode() for info in infos)) as url:
        node.given["agent_url"] = url
        found = [node.one("node.agent") for _ in range(4)]
    assert [status for status, _ in found] == [FAILED, FAILED, FAILED, OK]
    for (_, said), words in zip(
        found, ("is no agent", "another boot", "it accepts 0011"), strict=False
    ):
        assert words in said
    node.given |= {"agent_url": f"http://127.0.0.1:{free_port()}", "keys": node.folder / "none"}
    assert node.one("node.agent") == (NOT_CHECKED, ": no agent is set up here")


def test_an_address_that_nobody_reaches(node: Node) -> None:
    """The loopback, unless Prometheus runs on this very machine."""
    assert node.one("node.listening")[0] is NOT_CHECKED
    node.exporter = own("gpuwarden", "exporter", "--web.listen-address=:9835")
    assert node.one("node.listening") == (OK, "exporter: :9835")
    node.exporter = own("gpuwarden", "exporter", "--web.listen-address", "127.0.0.1:9835")
    status, said = node.one("node.listening")
    assert (status, "only this machine reaches it" in said) in ((WARNING, True), (OK, False))


@pytest.mark.parametrize(("skew", "status"), [(0, OK), (4, WARNING), (60, FAILED), (-60, FAILED)])
def test_a_clock_that_goes_another_way(node: Node, skew: float, status: Status) -> None:
    """By more than 2 s, or by more than 5, from the engine's."""
    with Sink(lambda *_: (200, b""), OwnedClock(wall=time.time() + skew)) as sink:
        node.given["engine_url"] = sink.url
        found = [f for f in node.find("node.clock") if "STA_UNSYNC" not in f.said]
    if found or status is not OK:
        assert [finding.status for finding in found] == [status]


def test_a_clock_that_is_not_told(node: Node) -> None:
    """An engine that is away says nothing of the time."""
    node.given["engine_url"] = f"http://127.0.0.1:{free_port()}"
    assert node.find("node.clock")[-1].status is NOT_CHECKED


def test_a_full_disk(node: Node, tmp_path: Path) -> None:
    """Of a file system of its own that is filled to the last block."""
    assert node.one("node.disk")[0] is OK
    with small_disk(tmp_path / "small") as small:
        node.given["journal"] = small / "agent.journal"
        assert node.one("node.disk")[0] is OK
        with contextlib.suppress(OSError), (small / "fill").open("wb") as file:
            file.write(b"\0" * 2**21)
        status, said = node.one("node.disk")
    assert (status, said[: len(f"{small}: 0 MiB free")]) == (FAILED, f"{small}: 0 MiB free")


def test_too_few_files(node: Node, children: Children) -> None:
    """A process that has opened nearly all that it may, and one that may open few."""
    assert node.one("node.files")[0] is NOT_CHECKED
    for limit, expected in ((3, FAILED), (256, WARNING), (2048, OK)):
        child = children.script("echo begun; read never")
        node.exporter = Daemon(child.pid, ())
        resource.prlimit(child.pid, resource.RLIMIT_NOFILE, (limit, limit))
        assert node.one("node.files") == (expected, f"exporter: 3 of {limit} open")


def test_a_slurm_that_does_not_answer(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own word is told; on other machines there is nothing to check."""
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    assert node.one("node.slurm") == (NOT_CHECKED, ": this is no node of Slurm")
    (tmp_path / "slurm.conf").touch()
    scontrol = tmp_path / "scontrol"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for status, word in ((OK, "UP"), (FAILED, "DOWN")):
        scontrol.write_text(f"#!/bin/sh\necho 'Slurmctld(primary) at head is {word}'\n")
        scontrol.chmod(0o755)
        assert node.one("node.slurm") == (status, f": Slurmctld(primary) at head is {word}")


def test_a_kubelet_that_cannot_be_asked(node: Node, tmp_path: Path) -> None:
    """Its socket is missing, or the exporter was told not to ask."""
    socket, pods = tmp_path / "kubelet.sock", tmp_path / "pods"
    node.machine = Machine(kubelet=socket, pods=pods)
    assert node.one("node.kubelet")[0] is NOT_CHECKED
    pods.mkdir()
    assert node.one("node.kubelet")[0] is FAILED
    socket.touch()
    assert node.one("node.kubelet")[0] is OK
    node.exporter = own("gpuwarden", "exporter", "--no-collector.kubernetes")
    assert node.one("node.kubelet")[0] is WARNING


@needs_root
def test_somebody_without_rights_is_told_what_cannot_be_seen(node: Node) -> None:
    """Another user, to whom the folders are closed: no trouble is made up, none is left out."""
    node.folder.chmod(0o700)
    words = [
        *("doctor", "node", "-o", "json", f"--jobs.directory={node.folder / 'jobs'}"),
        *(f"--keys={node.folder / 'keys'}", f"--kill-switch={node.folder / 'halt'}"),
        *(f"--journal={node.folder / 'journal'}", f"--exporter.url={node.given['exporter_url']}"),
        f"--agent.url={node.given['agent_url']}",
    ]
    # The interpreter itself may be closed to that user: everything is loaded before.
    done = subprocess.run(
        [sys.executable, "-c", AS_NOBODY, *words],
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert '"id": "node.jobs"' in done.stdout
    assert "Permission denied" in done.stdout
    assert "Traceback" not in done.stderr


@needs_root
@pytest.mark.parametrize(("user", "believed"), [(65534, False), (0, True)])
def test_nobody_plays_the_exporter(tmp_path: Path, user: int, believed: bool) -> None:
    """A user's process of that name does not tell root where keys and folders are."""
    words = ["/bin/sh", "-c", "echo; read line", "gpuwarden", "exporter", "--jobs.directory=/x"]
    child = subprocess.Popen(
        words, user=user, group=user, extra_groups=[], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with child:
        assert child.stdout is not None
        child.stdout.readline()  # it has begun
        (tmp_path / str(child.pid)).symlink_to(f"/proc/{child.pid}")
        found = daemon("exporter", tmp_path)
        child.kill()
    assert (found is not None) == believed
    assert found is None or found.flag("--jobs.directory") == "/x"


@pytest.mark.parametrize(
    ("words", "flag", "value"),
    [
        (("gpuwarden", "exporter", "--jobs.directory", "/x"), "--jobs.directory", "/x"),
        (("gpuwarden", "exporter", "--jobs.directory=/y"), "--jobs.directory", "/y"),
        (("gpuwarden", "exporter"), "--jobs.directory", None),
        (("gpuwarden", "exporter", "--jobs.directory"), "--jobs.directory", None),
    ],
)
def test_flags_are_read_from_command_lines(
    words: tuple[str, ...], flag: str, value: str | None
) -> None:
    """As click takes them."""
    assert Daemon(1, words).flag(flag) == value


def test_what_the_daemons_were_started_with_counts() -> None:
    """Unless a flag says otherwise; and the defaults without either."""
    exporter = Daemon(1, ("gpuwarden", "exporter", "--web.listen-address", ":9999"))
    agent = Daemon(2, ("gpuwarden", "agent", "--keys=/k", "--web.tls-cert-file=/c"))
    found = places({"journal": Path("/j")}, exporter=exporter, agent=agent)
    assert (found.exporter_url, found.agent_url) == (
        "http://127.0.0.1:9999",
        "https://127.0.0.1:9836",
    )
    assert (found.keys, found.journal) == (Path("/k"), Path("/j"))
    assert places({}, exporter=None, agent=None).jobs == Path("/run/gpuwarden")
