"""Processes as /proc shows them: who they are, where they belong, which of them form a job.

A process is (pid, start ticks) on one boot; a pid alone is nobody. Everything here only reads, and
everything read may be gone or have changed a moment later: each function says what it then gives.
"""

from __future__ import annotations

import os
import re
import stat as stat_module
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from gpuwarden.exporter.cgroups import own_cgroup
from gpuwarden.exporter.shortages import is_shortage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

PROC = Path("/proc")
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

MAX_PROCESSES = 200_000
"""More processes than this are not read: the node has other troubles, and memory is finite."""
MAX_DEPTH = 4096
"""Ancestors that are followed at most; a race can show a loop."""
MAX_ARGUMENT_BYTES = 64 * 1024
MAX_FIELD_BYTES = 64 * 1024
MAX_ENVIRONMENT_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class Process:
    """A process at one moment.

    Attributes:
        pid: in the PID namespace of the /proc that was read.
        ppid: its parent, 0 where that is outside the namespace.
        pgid: its process group.
        session: its session, the pid of the session's leader.
        tty: device number of its controlling terminal, 0 for none.
        state: one letter of proc(5): R, S, D, T, t, Z, X, I.
        start_ticks: clock ticks from boot to its start; with the boot id, pid and this name it.
        uid: real user id: who is responsible, also for a set-user-id program.
        comm: name, at most 15 bytes; a process chooses its own.
        cgroup: v2 path or the most specific v1 path, an empty string where it cannot be read.
        cpu_ticks: user and system time of all its threads.
        threads: how many it has.
        children_ticks: CPU time of its children that have ended and were waited for.
        resident_bytes: resident memory.
        blocked_ticks: time blocked on block I/O; stays 0 while delay accounting is off.
        record: its stat file as it was read.
    """

    pid: int
    ppid: int
    pgid: int
    session: int
    tty: int
    state: str
    start_ticks: int
    uid: int
    comm: str
    cgroup: str
    cpu_ticks: int
    threads: int
    children_ticks: int = 0
    resident_bytes: int = 0
    blocked_ticks: int = 0
    record: bytes = field(default=b"", repr=False, compare=False)

    @property
    def identity(self) -> tuple[int, int]:
        """(pid, start ticks): unlike the pid alone, not reused within a boot."""
        return (self.pid, self.start_ticks)

    @property
    def ended(self) -> bool:
        """Whether it runs no more; a zombie with other threads has lost only its main thread."""
        return self.state in ("Z", "X", "x") and self.threads <= 1


# ---------------------------------------------------------------------------------------------
# Reading


def read_process(pid: int, proc: Path = PROC) -> Process | None:
    """Read one process.

    Its identity is checked again after everything is read, so that no value belongs to a process
    that took over the pid meanwhile.

    Returns:
        The process, or None if there is none.

    Raises:
        OSError: /proc refuses (hidepid), which is not the same as "gone".
    """
    found = read_again(f"{proc}/{pid}", known=None)
    if found is None:
        return None
    again = read_record(f"{proc}/{pid}/stat")
    if again is None or _start_ticks(again) != found.start_ticks:
        return None
    return found


def read_all(proc: Path = PROC) -> dict[int, Process]:
    """Read every process, by pid; those that end meanwhile or may not be seen are left out.

    Args:
        proc: where procfs is mounted.

    Raises:
        OSError: it cannot be read, or not all of it for want of descriptors or memory.
    """
    found: dict[int, Process] = {}
    with os.scandir(proc) as entries:
        for entry in entries:
            if not entry.name.isdecimal():
                continue
            if len(found) >= MAX_PROCESSES:
                break
            try:
                process = read_again(f"{proc}/{entry.name}", known=None)
            except OSError as error:
                if is_shortage(error):
                    raise
                continue
            if process is not None:
                found[int(entry.name)] = process
    return found


def read_again(folder: str, *, known: Process | None, fresh: bool = False) -> Process | None:
    """Read one process, of which something may be known, without checking its identity again.

    Args:
        folder: its folder in /proc.
        known: an earlier reading. What seldom changes (uid, cgroup) is taken from it for the same
            process, which saves two of three reads.
        fresh: that it is not.

    Returns:
        The process, `known` itself where it has done nothing since; None if there is none.

    Raises:
        OSError: it may not be read, or not as the kernel writes it.
    """
    try:
        return _read(folder, known, fresh=fresh)
    except (ValueError, IndexError) as error:
        # What one process makes of its files must not hide the others.
        raise OSError(f"{folder} is not understood: {error}") from error


def _read(folder: str, known: Process | None, *, fresh: bool) -> Process | None:
    content = read_record(f"{folder}/stat")
    if content is None:
        return None
    if known is not None and known.record == content and not (fresh and _left(folder, known)):
        # It has done nothing since, as most processes of a node. Others can put it into another
        # cgroup; but its owner changes by what it does itself, and that leaves a trace.
        return known
    if fresh:
        known = None
    # The name may itself hold parentheses, spaces and line feeds: the last parenthesis ends it.
    opened, closed = content.find(b"("), content.rfind(b")")
    fields = content[closed + 2 :].split()
    if opened < 0 or closed < opened or len(fields) < 22:
        return None
    start_ticks = int(fields[19])
    if known is not None and known.start_ticks == start_ticks:
        uid, cgroup = known.uid, known.cgroup
    else:
        status = read_record(f"{folder}/status")
        if status is None:
            return None
        uid = _real_uid(status)
        cgroup = own_cgroup(read_record(f"{folder}/cgroup") or b"")
        if fields[0] == b"Z" and int(fields[17]) > 1:
            # The kernel (cgroup v1) moves a thread that ends to the root group, and a process is
            # shown where its first thread is; its other threads tell where it really is.
            cgroup = _cgroup_of_threads(folder) or cgroup
    return Process(
        pid=int(content[:opened]),
        ppid=int(fields[1]),
        pgid=int(fields[2]),
        session=int(fields[3]),
        tty=int(fields[4]),
        state=fields[0].decode(),
        start_ticks=start_ticks,
        uid=uid,
        comm=content[opened + 1 : closed].decode(errors="replace"),
        cgroup=cgroup,
        cpu_ticks=max(0, int(fields[11]) + int(fields[12])),
        threads=int(fields[17]),
        children_ticks=max(0, int(fields[13]) + int(fields[14])),
        resident_bytes=max(0, int(fields[21])) * PAGE_BYTES,
        blocked_ticks=int(fields[39]) if len(fields) > 39 else 0,
        record=content,
    )


def _read_bytes(path: str, limit: int = MAX_FIELD_BYTES) -> bytes | None:
    """At most `limit` bytes of a file of /proc, or None where the process is gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            content = os.read(descriptor, limit)
            # procfs gives a page at a time for some files
            while len(content) < limit and (part := os.read(descriptor, limit - len(content))):
                content += part
            return content
        finally:
            os.close(descriptor)
    except (FileNotFoundError, ProcessLookupError):
        return None


def _left(folder: str, known: Process) -> bool:
    """Whether a process may be in another cgroup than it was."""
    content = read_record(f"{folder}/cgroup")
    return content is None or known.state == "Z" or own_cgroup(content) != known.cgroup


def read_record(path: str) -> bytes | None:
    """A file of /proc that the kernel writes as one record, so that one reading has it all.

    Returns:
        At most 64 KiB, or None where the process is gone.

    Raises:
        OSError: it may not be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(descriptor, MAX_FIELD_BYTES)
        finally:
            os.close(descriptor)
    except (FileNotFoundError, ProcessLookupError):
        return None


def _cgroup_of_threads(folder: str) -> str:
    """Cgroup of a thread other than the first, or an empty string where none is left."""
    first = folder.rpartition("/")[2]
    try:
        with os.scandir(f"{folder}/task") as threads:
            for thread in threads:
                if thread.name == first:
                    continue
                content = read_record(f"{thread.path}/cgroup")
                if content:
                    return own_cgroup(content)
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return ""


def _start_ticks(content: bytes) -> int | None:
    fields = content[content.rfind(b")") + 2 :].split()
    return int(fields[19]) if len(fields) > 19 else None


def _real_uid(status: bytes) -> int:
    # "Name:" comes first and is escaped by the kernel, so that no name can fake this line.
    at = status.find(b"\nUid:")
    return int(status[at + 5 :].split(maxsplit=1)[0]) if at >= 0 else -1


def boot_id(proc: Path = PROC) -> str:
    """Identity of this boot, a UUID in lower case."""
    return (proc / "sys/kernel/random/boot_id").read_text().strip()


def boot_time(proc: Path = PROC) -> float:
    """Unix time of boot; follows the wall clock when that is set."""
    for line in (proc / "stat").read_text().splitlines():
        if line.startswith("btime "):
            return float(line.split()[1])
    raise OSError(f"{proc}/stat has no btime line")


def start_time(process: Process, proc: Path = PROC, *, booted: float | None = None) -> float:
    """Unix time at which a process started.

    Args:
        process: the process.
        proc: where procfs is mounted.
        booted: `boot_time` where the caller has it, which saves a read per process.
    """
    return (boot_time(proc) if booted is None else booted) + process.start_ticks / CLOCK_TICKS


def executable(pid: int, proc: Path = PROC) -> str | None:
    """What a process runs, if that can be believed.

    A name counts only if it means on the host what it says and no user could have put it there:
    the process is in the host's mount namespace, and the file belongs to root and only root may
    write it. A script's executable is its interpreter.

    Looking at the file asks its file system, which may hang; see `executable_link`.

    Returns:
        The path; an empty string where it does not count; None where it cannot be found out, as
        when the file was replaced by an upgrade while the program runs.
    """
    folder = proc / str(pid)
    try:
        if (folder / "ns/mnt").stat().st_ino != host_mount_namespace(proc):
            return ""
        path = (folder / "exe").readlink()
        about = (folder / "exe").stat()
    except OSError:
        return None
    writable = about.st_mode & (stat_module.S_IWGRP | stat_module.S_IWOTH)
    if about.st_uid != 0 or writable or not stat_module.S_ISREG(about.st_mode):
        return ""
    if not path.is_absolute() or not str(path).isprintable():
        return ""
    try:
        # As the host sees it: the reader may be in a container.
        named = (_host_root(proc) / path.relative_to("/")).stat()
    except OSError:
        return None
    same = (named.st_dev, named.st_ino) == (about.st_dev, about.st_ino)
    return str(path) if same else None


def executable_link(pid: int, proc: Path = PROC) -> str:
    """Where the exe link of a process points, believed or not; asks no file system.

    Returns:
        The path, or an empty string where it cannot be read.
    """
    try:
        return str((proc / str(pid) / "exe").readlink())
    except OSError:
        return ""


def _host_root(proc: Path) -> Path:
    root = proc / "1/root"
    try:
        root.stat()
    except OSError:
        return proc / "self/root"
    return root


def host_mount_namespace(proc: Path) -> int:
    """The mount namespace whose names mean on the host what they say.

    Raises:
        OSError: it cannot be found out.
    """
    try:
        return (proc / "1/ns/mnt").stat().st_ino
    except OSError:
        # Without the right to look at pid 1, our own namespace stands for the host's.
        return (proc / "self/ns/mnt").stat().st_ino


def arguments(pid: int, proc: Path = PROC) -> tuple[str, ...]:
    """Command line of a process, for classification only: it may hold names and secrets.

    At most 64 KiB are read; bytes that are not UTF-8 are replaced. Empty where it cannot be read.
    """
    return split_arguments(read_arguments(pid, proc))


def read_arguments(pid: int, proc: Path = PROC) -> bytes:
    """The first 64 KiB of a process's command line; empty where it cannot be read."""
    try:
        return _read_bytes(f"{proc}/{pid}/cmdline", MAX_ARGUMENT_BYTES) or b""
    except OSError:
        return b""


def split_arguments(content: bytes) -> tuple[str, ...]:
    """The arguments of a command line as /proc gives it; bytes that are not UTF-8 are replaced."""
    if not content:
        return ()
    return tuple(item.decode(errors="replace") for item in content.rstrip(b"\0").split(b"\0"))


def environment(pid: int, name: str, proc: Path = PROC) -> str | None:
    """A variable of a process's environment as it was started, which is its owner's word.

    It lies in the process's own memory: the call may hang, and the process may have overwritten it.

    Args:
        pid: the process.
        name: of the variable.
        proc: where procfs is mounted.

    Returns:
        Its value, or None where it is not set, or cannot be read.
    """
    try:
        content = _read_bytes(f"{proc}/{pid}/environ", MAX_ENVIRONMENT_BYTES)
    except OSError:
        return None
    wanted = f"{name}=".encode()
    for item in (content or b"").split(b"\0"):
        if item.startswith(wanted):
            return item[len(wanted) :].decode(errors="replace")
    return None


# ---------------------------------------------------------------------------------------------
# Jobs of no platform: a tree below a launcher

_SHELLS = frozenset({"ash", "bash", "csh", "dash", "fish", "ksh", "sh", "tcsh", "zsh"})

DEFAULT_LAUNCHERS = frozenset(
    {
        # sessions and managers of services
        "systemd",
        "(sd-pam)",
        "init",
        "sshd",
        "sshd-session",
        "login",
        "su",
        "sudo",
        "cron",
        "crond",
        "atd",
        "supervisord",
        # terminals that outlive a connection
        "tmux",
        "tmux: server",
        "screen",
        "SCREEN",
        "mosh-server",
        "zellij",
        # notebook servers and remote editors: each of their kernels or terminals is a job. The
        # kernel cuts names to 15 bytes.
        "jupyter-lab",
        "jupyter-noteboo",
        "jupyter-server",
        "jupyter-kernelg",
        "jupyterhub",
        "jupyterhub-sing",
        "jupyter-labhub",
        "batchspawner-si",
        "code-server",
        "openvscode-serv",
        "code-tunnel",
        "cursor-server",
        "rserver",
        "spyder",
        # JetBrains' own starters; its java is known by its command line
        "pycharm",
        "idea",
        "dataspell",
        "remote-dev-serv",
        # the servers of VS Code and its relatives, whatever Node calls its main thread by now
        "node",
        "MainThread",
        "node-MainThread",
        # platforms and containers
        "slurmd",
        "slurmstepd",
        "containerd-shim",
        "docker-init",
        "tini",
        "dumb-init",
        "conmon",
        "runc",
        "crun",
        "kubelet",
    }
)
"""Names of processes that start jobs but are part of none."""


@dataclass(frozen=True, slots=True)
class Launchers:
    """Which processes start jobs without being part of them.

    Attributes:
        comms: names as /proc shows them, at most 15 bytes.
        by_command: tells of a process of another name whether it is one; asks /proc.
    """

    comms: frozenset[str] = DEFAULT_LAUNCHERS
    by_command: Callable[[Process], bool] | None = None

    @classmethod
    def with_extra(
        cls, comms: Iterable[str], by_command: Callable[[Process], bool] | None = None
    ) -> Launchers:
        """The usual launchers and those of a node's settings; names are cut as the kernel does."""
        cut = (comm.encode()[:15].decode(errors="ignore") for comm in comms)
        return cls(DEFAULT_LAUNCHERS.union(comm for comm in cut if comm), by_command)

    def includes(self, process: Process) -> bool:
        """Whether a process is a launcher."""
        if process.pid <= 2 or process.comm in self.comms or is_interactive_shell(process):
            return True
        return self.by_command is not None and self.by_command(process)


def is_interactive_shell(process: Process) -> bool:
    """Whether a process is a shell that leads the session of its own terminal."""
    return process.comm in _SHELLS and process.tty != 0 and process.session == process.pid


def job_root(processes: Mapping[int, Process], pid: int, *, launchers: Launchers) -> Process:
    """Find the process that names a job.

    It is the highest ancestor of the same uid and cgroup below a launcher.

    Args:
        processes: all processes, by pid.
        pid: a process of the job, in `processes`.
        launchers: what starts jobs on this node.

    Raises:
        KeyError: `pid` is not in `processes`.
    """
    process = root = processes[pid]
    for _ in range(MAX_DEPTH):
        parent = processes.get(root.ppid)
        if (
            parent is None
            or parent.uid != process.uid
            or parent.cgroup != process.cgroup
            # A child is never older than its parent: this "parent" took over the pid.
            or parent.start_ticks > root.start_ticks
            or launchers.includes(parent)
        ):
            return root
        root = parent
    return root


def descendants(processes: Mapping[int, Process], root_pid: int) -> tuple[int, ...]:
    """Pids below a process, parents before their children; without the process itself."""
    return tuple(descendants_of(children_by_parent(processes), root_pid))


def children_by_parent(processes: Mapping[int, Process]) -> dict[int, list[int]]:
    """Parent's pid -> pids of its children."""
    children: dict[int, list[int]] = {}
    for process in processes.values():
        children.setdefault(process.ppid, []).append(process.pid)
    return children


def descendants_of(children: Mapping[int, list[int]], root_pid: int) -> list[int]:
    """`descendants` for callers that ask more than once: with `children_by_parent` at hand."""
    found: list[int] = []
    seen = {root_pid}
    waiting = [root_pid]
    while waiting:
        for pid in children.get(waiting.pop(), ()):
            if pid not in seen:
                seen.add(pid)
                found.append(pid)
                waiting.append(pid)
    return found


# ---------------------------------------------------------------------------------------------
# Names of jobs

_PROC_JOB = re.compile(r"proc-([0-9a-f]{8})-([1-9][0-9]{0,9})-([0-9]{1,19})")


def proc_job_id(root: Process, boot: str) -> str:
    """Name of a job of no platform: its root on this boot.

    Args:
        root: the job's root.
        boot: `boot_id`.
    """
    return f"proc-{boot[:8]}-{root.pid}-{root.start_ticks}"


def parse_proc_job_id(job_id: str) -> tuple[str, int, int] | None:
    """(first 8 digits of the boot id, pid, start ticks) of a `proc_job_id`, or None."""
    match = _PROC_JOB.fullmatch(job_id)
    return (match[1], int(match[2]), int(match[3])) if match is not None else None
