"""A real one-node Slurm as processes of a test: no systemd, no real GPU, no accounting database.

Nothing here depends on pytest::

    with slurm(tmp_path / "slurm", gpus=4) as cluster:
        job = cluster.submit("sleep 600", "--gres=gpu:2")
        cluster.wait_for_state(job, "RUNNING")

One with accounts, qualities of service and a database is in `tests.slurm_accounting`. With
`GPUWARDEN_TEST_SLURM_ROOT` set to the root of another Debian (`tools/slurm_next.py` does that), its
Slurm is started instead of this machine's, through chroot.

Everything lies below one folder: the configuration, munge's key and socket, state, spool and logs.
Ports are free ones of the loopback. Daemons are stopped by their own pids, after their jobs.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import shutil
import signal
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tests.servers import ServerFailed, binary, free_port, until

from gpuwarden.slurm_commands import SlurmCommands

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

CLUSTER = "ci"
NODE = "node1"
"""Not the host's name: an adapter that takes one for the other is found out."""

FREEZER = Path("/sys/fs/cgroup/freezer")
"""Where cgroups v1 are mounted, if they are."""

_SECONDS = 60.0
_LEAVE_SECONDS = 15.0
_NEEDED = "slurmctld slurmd slurm-client munge"


@dataclass(slots=True)
class SlurmCluster:
    """A running Slurm.

    Attributes:
        folder: everything that it writes.
        gpus: how many cards the node has.
        environment: for commands that are to talk to it; only SLURM_CONF is added.
        version: (major, minor), such as (22, 5).
        devices: the stand-in device files, in the order of gres.conf.
        node: name of its only node, or of the first.
        others: names of the others, of the same make; only the first is told cards apart by tests.
        root: of the Debian whose Slurm this is, or None for this machine's.
    """

    folder: Path
    gpus: int
    environment: dict[str, str]
    version: tuple[int, int]
    devices: tuple[Path, ...]
    node: str = NODE
    others: tuple[str, ...] = ()
    root: Path | None = None
    _processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def config(self) -> Path:
        """Its slurm.conf."""
        return self.folder / "etc" / "slurm.conf"

    def program(self, name: str) -> Path:
        """Where one of Slurm's programs lies; one of another root is entered through a script."""
        if name.startswith("/"):
            return Path(name)
        return self.folder / "bin" / name if self.root else Path(binary((name,)))

    def run(self, *words: str, timeout: float = 30.0) -> str:
        """What one of Slurm's commands prints.

        Raises:
            ServerFailed: if it fails, with what it said.
        """
        done = subprocess.run(
            (self.program(words[0]), *words[1:]),
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
        )
        if done.returncode:
            raise ServerFailed(f"{' '.join(words)}: {done.stderr or done.stdout}")
        return done.stdout

    def submit(self, script: str, *options: str) -> int:
        """Submit a batch script; gives its job id (an array's own id for an array)."""
        path = self.folder / "scripts" / f"{len(list((self.folder / 'scripts').iterdir()))}.sh"
        path.write_text(f"#!/bin/sh\n{script}\n")
        out = str(self.folder / "log" / "job-%j.out")
        words = ("sbatch", "--parsable", f"--output={out}", *options, str(path))
        return int(self.run(*words).strip().partition(";")[0])

    def states(self, job: int) -> set[str]:
        """States of a job and, for an array, of its tasks; empty once it is forgotten."""
        try:
            answer = self.run("squeue", "--noheader", "--states=all", f"--jobs={job}", "-o", "%T")
        except ServerFailed:
            return set()
        return set(answer.split())

    def wait_for_state(self, job: int, state: str) -> None:
        """Wait until all of a job is in a state."""
        until(lambda: self.states(job) == {state}, _SECONDS)

    def pids(self, job: int) -> tuple[int, ...]:
        """Processes that Slurm itself counts to a job of this node, its own helpers left out."""
        try:
            answer = self.run("scontrol", "listpids", str(job), self.node)
        except ServerFailed:
            return ()
        return tuple(sorted({int(pid) for pid in re.findall(r"^ *(\d+) ", answer, re.MULTILINE)}))

    def start(self, name: str) -> None:
        """Start slurmdbd, slurmctld or slurmd (again) and wait until it serves."""
        match name:
            case "slurmdbd":
                self._spawn(name, "slurmdbd", "-D")
                self._until(
                    name, lambda: self.run("sacctmgr", "--noheader", "show", "qos") is not None
                )
            case "slurmctld":
                self._spawn(name, "slurmctld", "-D")
                self._until(name, lambda: "UP" in self.run("scontrol", "ping"))
            case "slurmd":
                for node in (self.node, *self.others):
                    known = name if node == self.node else f"{name}-{node}"
                    self._spawn(known, "slurmd", "-D", "-N", node)
                self._until(
                    name,
                    lambda: all(
                        state in ("idle", "mixed", "allocated")
                        for state in self.run("sinfo", "--noheader", "-N", "-o", "%T").split()
                    ),
                )
            case _:
                raise ValueError(name)

    def kill(self, name: str) -> None:
        """End a daemon as a crash would."""
        process = self._processes[name]
        process.kill()
        process.wait(timeout=10)

    def stop_daemon(self, name: str) -> None:
        """End a daemon in order: it writes down what it knows."""
        process = self._processes[name]
        process.terminate()
        process.wait(timeout=30)

    def serves(self, name: str) -> bool:
        """Whether a daemon runs."""
        return self._processes[name].poll() is None

    def freeze(self, name: str) -> None:
        """Make a daemon hang: it keeps its port and answers nobody until it is thawed."""
        self._processes[name].send_signal(signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        """Let a frozen daemon go on."""
        self._processes[name].send_signal(signal.SIGCONT)

    def spawn_on_host(self, name: str, *words: str) -> None:
        """Start a daemon that is not Slurm's and lies on this machine; it is stopped in turn."""
        self._spawn(name, *words)

    def wait_until_served(self, name: str, probe: Callable[[], bool]) -> None:
        """Wait until a daemon answers.

        Raises:
            ServerFailed: it ended, or does not answer in time; with the end of its log.
        """
        self._until(name, probe)

    def _spawn(self, name: str, *words: str) -> None:
        with (self.folder / "log" / f"{name}.out").open("ab") as out:
            self._processes[name] = subprocess.Popen(
                (self.program(words[0]), *words[1:]),
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def _until(self, name: str, probe: object) -> None:
        def ready() -> bool:
            if self._processes[name].poll() is not None:
                return True
            try:
                return bool(probe())  # type: ignore[operator]
            except ServerFailed:
                return False

        with contextlib.suppress(TimeoutError):
            until(ready, _SECONDS)
            if self._processes[name].poll() is None:
                return
        raise ServerFailed(f"{name} does not serve\n{self.log(name)}")

    def log(self, name: str, lines: int = 30) -> str:
        """The end of what a daemon wrote."""
        text = (self.folder / "log" / f"{name}.out").read_text(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def stop(self) -> None:
        """End all jobs, then the daemons."""
        for process in self._processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
        if "slurmctld" in self._processes and self._processes["slurmctld"].poll() is None:
            # Jobs outlive slurmd: left running, their processes would stay behind.
            with contextlib.suppress(ServerFailed, subprocess.TimeoutExpired, TimeoutError):
                self.run("scancel", "--state=PENDING", f"--user={os.geteuid()}", timeout=5)
                self.run("scancel", "--full", f"--user={os.geteuid()}", timeout=5)
                until(lambda: not self.run("squeue", "--noheader").strip(), _LEAVE_SECONDS)
        for process in reversed(self._processes.values()):
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(timeout=5)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait(timeout=5)


def commands_of(cluster: SlurmCluster, timeout: float = 20.0) -> SlurmCommands:
    """The engine's commands for a cluster."""
    names = ("squeue", "scontrol", "scancel", "sbatch", "sacct", "sacctmgr", "sinfo")
    return SlurmCommands({name: cluster.program(name) for name in names}, cluster.config, timeout)


def _enter(folder: Path, root: Path) -> None:
    """Scripts that run each program of another Debian; the folder is visible in both."""
    (folder / "bin").mkdir()
    for place in ("usr/bin", "usr/sbin"):
        for program in (root / place).iterdir():
            if not re.match(
                r"s(acct|batch|cancel|control|info|lurm|queue|run)|munge", program.name
            ):
                continue
            script = folder / "bin" / program.name
            # By its path: whoever calls it may look for programs in /usr/bin alone.
            enter = f"{binary(('chroot',))} {root} /{place}/{program.name}"
            script.write_text(f'#!/bin/sh\nexec {enter} "$@"\n')
            script.chmod(0o755)


def _root() -> Path | None:
    said = os.environ.get("GPUWARDEN_TEST_SLURM_ROOT")
    return Path(said) if said else None


def slurm_version() -> tuple[int, int]:
    """The version of the Slurm that would be started, such as (22, 5).

    Raises:
        ServerFailed: none is installed.
    """
    root = _root()
    try:
        words = ["chroot", str(root), "slurmctld"] if root else [binary(("slurmctld",))]
    except ServerFailed as error:
        raise ServerFailed(f"Slurm is not installed: apt-get install {_NEEDED}") from error
    done = subprocess.run([*words, "-V"], capture_output=True, text=True, check=True, timeout=30)
    match = re.search(r"(\d+)\.(\d+)", done.stdout)
    if match is None:
        raise ServerFailed(f"{' '.join(words)} -V: {done.stdout}")
    return int(match[1]), int(match[2])


@contextlib.contextmanager
def slurm(
    folder: Path,
    *,
    gpus: int = 4,
    minors: Sequence[int] | None = None,
    settings: Sequence[str] = (),
    node: str = NODE,
    others: Sequence[str] = (),
    cgroups: bool = False,
    before: Callable[[SlurmCluster], None] | None = None,
) -> Iterator[SlurmCluster]:
    """A Slurm of one node or several on this machine, as the user who runs the test.

    Args:
        folder: where everything goes; a short path, for it holds a socket.
        gpus: cards of the node.
        minors: number of each card's device file, in the order of gres.conf; ascending from 0
            where it is not given.
        settings: further lines of slurm.conf; one whose key the box has too takes its place.
        node: name of its node; one of its own where it makes cgroups, whose names hold it.
        others: names of further nodes, with as many cards each.
        cgroups: whether jobs get cgroups (v1, in `FREEZER`), as on a real node.
        before: starts what the controller needs, once munge serves.

    Raises:
        ServerFailed: it does not start.
    """
    for name in ("etc", "state", "spool", "log", "munge", "dev", "scripts", "cgroup"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    version, root = slurm_version(), _root()
    if root is not None:
        _enter(folder, root)
    folder.chmod(0o755)
    (folder / "munge").chmod(0o755)
    devices = _devices(folder / "dev", tuple(minors) if minors is not None else range(gpus))
    _configure(
        folder,
        devices,
        version=version,
        settings=settings,
        nodes=(node, *others),
        cgroups=cgroups,
    )
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM_", "SBATCH_", "SQUEUE_", "SRUN_"))
    } | {"SLURM_CONF": str(folder / "etc/slurm.conf")}
    cluster = SlurmCluster(
        folder,
        len(devices),
        environment,
        version,
        devices,
        node=node,
        others=tuple(others),
        root=root,
    )
    try:
        _munge(cluster)
        if before is not None:
            before(cluster)
        cluster.start("slurmctld")
        cluster.start("slurmd")
        yield cluster
    finally:
        cluster.stop()
        for left in FREEZER.parent.glob(f"*/slurm_{node}") if cgroups else ():
            with contextlib.suppress(OSError):
                left.rmdir()


def _munge(cluster: SlurmCluster) -> None:
    folder = cluster.folder / "munge"
    key = folder / "key"
    key.touch(0o600)
    key.write_bytes(os.urandom(128))
    cluster._spawn(
        "munged",
        "munged",
        "--foreground",
        f"--key-file={key}",
        f"--socket={folder / 'sock'}",
        f"--pid-file={folder / 'pid'}",
        f"--log-file={folder / 'log'}",
        f"--seed-file={folder / 'seed'}",
    )
    cluster._until("munged", lambda: cluster.run("munge", "-S", str(folder / "sock"), "-n"))


def _devices(folder: Path, minors: Sequence[int]) -> tuple[Path, ...]:
    """Stand-ins for /dev/nvidia*: character devices, or Slurm would not give them to a job."""
    paths = [folder / f"nvidia{minor}" for minor in minors]
    for path in paths:
        # Nothing can be broken through it, and nobody needs a right to make a link.
        path.symlink_to("/dev/null")
    return tuple(paths)


def _configure(
    folder: Path,
    devices: Sequence[Path],
    *,
    version: tuple[int, int],
    settings: Sequence[str],
    nodes: Sequence[str],
    cgroups: bool,
) -> None:
    user = pwd.getpwuid(os.geteuid()).pw_name
    host = os.uname().nodename.partition(".")[0]
    if cgroups:
        (folder / "etc/cgroup.conf").write_text(
            f"CgroupMountpoint={FREEZER.parent}\nCgroupPlugin=cgroup/v1\n"
        )
    elif version >= (23, 11):
        # Later versions want a cgroup file system unless they are told that there is none.
        (folder / "etc/cgroup.conf").write_text("CgroupPlugin=disabled\n")
    gres = [f"NodeName={node} Name=gpu Type=a100 File={path}" for node in nodes for path in devices]
    (folder / "etc/gres.conf").write_text("\n".join([*gres, ""]))
    controller = free_port()
    cards = f"gpu:a100:{len(devices)}"
    cores = "CPUs=8 RealMemory=1000"
    lines = [
        f"ClusterName={CLUSTER}",
        f"SlurmctldHost={host}(127.0.0.1)",
        f"SlurmctldPort={controller}",
        f"SlurmUser={user}",
        f"SlurmdUser={user}",
        "AuthType=auth/munge",
        # A requeued job waits until its credential has expired; two minutes where nothing is said.
        f"AuthInfo=socket={folder / 'munge/sock'},cred_expire=5",
        f"StateSaveLocation={folder / 'state'}",
        # %n is the node's name.
        f"SlurmdSpoolDir={folder / 'spool/%n'}",
        f"SlurmctldPidFile={folder / 'slurmctld.pid'}",
        f"SlurmdPidFile={folder / 'slurmd-%n.pid'}",
        "MailProg=/bin/true",
        f"ProctrackType=proctrack/{'cgroup' if cgroups else 'linuxproc'}",
        "TaskPlugin=task/none",
        "MpiDefault=none",
        "ReturnToService=2",
        # The test's machine may have fewer cores than the node says.
        "SlurmdParameters=config_overrides",
        "SchedulerType=sched/backfill",
        "SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core",
        "KillWait=5",
        "MinJobAge=300",
        "JobRequeue=1",
        "RequeueExit=75",
        "RequeueExitHold=76",
        "JobAcctGatherType=jobacct_gather/linux",
        "AccountingStorageType=accounting_storage/none",
        "GresTypes=gpu",
        *(
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} "
            f"{cores} Gres={cards}"
            for node in nodes
        ),
        "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP",
    ]
    said = {line.partition("=")[0] for line in settings}
    lines = [line for line in lines if line.partition("=")[0] not in said - {"NodeName"}]
    lines += settings
    (folder / "etc/slurm.conf").write_text("\n".join([*lines, ""]))
    shutil.rmtree(folder / "state", ignore_errors=True)
    (folder / "state").mkdir()
