from __future__ import annotations

import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.exporter.nodes import Children, eventually, process_of

from gpuwarden.exporter import processes
from gpuwarden.exporter.boot_times import BootTime
from gpuwarden.exporter.cgroups import PlatformKind, own_cgroup, platform_of
from gpuwarden.exporter.processes import (
    Launchers,
    Process,
    boot_time,
    job_root,
    parse_proc_job_id,
    proc_job_id,
    read_again,
    read_all,
    read_process,
)

SLURM = "/slurm/uid_1000/job_31"
POD = "0b9e4f0c-1111-2222-3333-444455556666"
POD_ = POD.replace("-", "_")
CONTAINER = "ab" * 32
HEADLESS = """
import ctypes, threading
threading.Thread(target=threading.Event().wait).start()
ctypes.CDLL(None).pthread_exit(None)
"""


def _make(pid: int, ppid: int, comm: str = "python", **changes: object) -> Process:
    values: dict[str, Any] = {
        "pgid": pid,
        "session": pid,
        "tty": 0,
        "state": "S",
        "start_ticks": pid,
        "uid": 1000,
        "cgroup": "/a",
        "cpu_ticks": 0,
        "threads": 1,
    }
    return Process(pid=pid, ppid=ppid, comm=comm, **{**values, **changes})


def _tree(*members: Process) -> dict[int, Process]:
    return {member.pid: member for member in members}


def _fake_proc(folder: Path, stat: bytes, status: bytes = b"Name:\tx\nUid:\t7\t0\t0\t0\n") -> Path:
    (folder / "42").mkdir(exist_ok=True)
    (folder / "42/stat").write_bytes(stat)
    (folder / "42/status").write_bytes(status)
    (folder / "42/cgroup").write_bytes(b"0::/x\n")
    return folder


def _again(proc: Path, known: Process | None = None, *, fresh: bool = False) -> Process:
    found = read_again(f"{proc}/42", known=known, fresh=fresh)
    assert found is not None
    return found


def _stat_line(comm: bytes) -> bytes:
    rest = b"S 1 42 42 0 -1 0 0 0 0 0 3 4 5 6 20 0 2 0 777 0 9 " + b"0 " * 17 + b"11 0\n"
    return b"42 (" + comm + b") " + rest


class TestReading:
    """What /proc tells of a process."""

    def test_this_process(self) -> None:
        """A process reads itself as the system calls tell it."""
        own = process_of(os.getpid())
        assert (own.pid, own.ppid, own.session) == (os.getpid(), os.getppid(), os.getsid(0))
        assert own.uid == os.getuid()
        assert read_all()[os.getpid()].identity == own.identity

    def test_nobody(self) -> None:
        """A pid without a process is None, not an error."""
        assert read_process(2**22 - 1) is None

    def test_a_hostile_name(self, children: Children) -> None:
        """Parentheses and line feeds in a process's own name do not shift its fields."""
        child = children.script("printf 'a) S 1\\nb' > /proc/$$/comm; echo; read x")
        found = process_of(child.pid)
        assert found.comm == "a) S 1\nb"
        assert found.ppid == os.getpid()

    @given(comm=st.binary(max_size=15).filter(lambda comm: b"\0" not in comm))
    def test_any_name(self, tmp_path_factory: pytest.TempPathFactory, comm: bytes) -> None:
        """Whatever bytes a name has, the fields after it are read where they are."""
        proc = _fake_proc(tmp_path_factory.getbasetemp(), _stat_line(comm))
        found = read_process(42, proc)
        assert found is not None
        assert (found.start_ticks, found.cpu_ticks, found.children_ticks) == (777, 7, 11)
        assert (found.uid, found.threads, found.blocked_ticks) == (7, 2, 11)

    @pytest.mark.parametrize("content", [b"", b"42", b"42 (x", b"42 (x) S 1", b")("])
    def test_a_torn_file(self, tmp_path: Path, content: bytes) -> None:
        """A stat file that ends early is nobody, not a crash."""
        assert read_process(42, _fake_proc(tmp_path, content)) is None

    def test_what_seldom_changes_is_kept(self, tmp_path: Path) -> None:
        """Owner and cgroup come from the earlier answer for the same process only."""
        proc = _fake_proc(tmp_path, _stat_line(b"x"))
        before = _again(proc)
        (proc / "42/stat").write_bytes(_stat_line(b"y"))
        (proc / "42/status").write_bytes(b"Name:\ty\nUid:\t8\t0\t0\t0\n")
        assert _again(proc, before).uid == 7
        assert _again(proc, replace(before, start_ticks=778)).uid == 8
        assert _again(proc, before, fresh=True).uid == 8

    def test_who_did_nothing_is_not_read_anew(self, tmp_path: Path) -> None:
        """The same record of a process is the same answer; whoever ran is another."""
        proc = _fake_proc(tmp_path, _stat_line(b"x"))
        before = _again(proc)
        assert _again(proc, before) is before
        assert _again(proc, before, fresh=True) is before
        (proc / "42/stat").write_bytes(_stat_line(b"y"))
        assert _again(proc, before).comm == "y"

    def test_who_is_moved_is_seen_though_it_did_nothing(self, tmp_path: Path) -> None:
        """Others can put a sleeping process into another cgroup; where it matters, that is seen."""
        proc = _fake_proc(tmp_path, _stat_line(b"x"))
        before = _again(proc)
        (proc / "42/cgroup").write_bytes(b"0::/elsewhere\n")
        assert _again(proc, before) is before
        assert _again(proc, before, fresh=True).cgroup == "/elsewhere"

    def test_a_zombie_has_ended(self, children: Children) -> None:
        """A process that nobody waited for has ended, though it is still listed."""
        child = children.start()
        child.kill()
        assert eventually(lambda: process_of(child.pid), until=lambda found: found.ended)

    def test_a_process_without_its_first_thread(self, children: Children) -> None:
        """A process whose first thread is gone is where its other threads are, and has not ended.

        With cgroup v1 the kernel shows it in the root group: it would leave its job.
        """
        script = 'read x; exec "$0" -I -S -c "$1"'
        child = children.start("sh", "-c", script, sys.executable, HEADLESS)
        assert child.stdin is not None
        child.stdin.write(b"\n")
        child.stdin.flush()
        found = eventually(lambda: process_of(child.pid), until=lambda item: item.state == "Z")
        assert found.cgroup == process_of(os.getpid()).cgroup
        assert read_all()[child.pid].cgroup == found.cgroup
        assert not found.ended

    def test_the_cgroup_of_threads(self, tmp_path: Path) -> None:
        """Threads that have just ended are passed over; without any, the process's own counts."""
        proc = _fake_proc(tmp_path, _stat_line(b"x").replace(b") S", b") Z"))
        (proc / "42/cgroup").write_bytes(b"1:cpu:/\n")
        for thread in ("42", "43"):
            (proc / "42/task" / thread).mkdir(parents=True)
        (proc / "42/task/42/cgroup").write_bytes(b"1:cpu:/\n")
        found = read_process(42, proc)
        assert found is not None
        assert found.cgroup == "/"
        (proc / "42/task/43/cgroup").write_bytes(b"1:cpu:/alice\n")
        found = read_process(42, proc)
        assert found is not None
        assert found.cgroup == "/alice"

    def test_arguments_are_text(self, children: Children) -> None:
        """Bytes of a command line that are not UTF-8 are replaced."""
        child = children.start("sh", "-c", "read x", b"\xff\xfe.py")
        assert processes.arguments(child.pid)[-1] == "\N{REPLACEMENT CHARACTER}" * 2 + ".py"


class TestExecutable:
    """Which executables can be believed."""

    def test_a_system_program(self, children: Children) -> None:
        """A program that root installed is named."""
        path = shutil.which("sleep")
        assert path is not None
        assert processes.executable(children.start().pid) == os.path.realpath(path)

    def test_a_program_that_others_may_write(self, children: Children, tmp_path: Path) -> None:
        """A program that somebody else could have put there has no name."""
        copy = shutil.copy(shutil.which("sleep") or "", tmp_path / "tensorboard")
        Path(copy).chmod(0o777)
        assert processes.executable(children.start(str(copy), "600").pid) == ""

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can make root's programs")
    @pytest.mark.parametrize("how", ["removed", "replaced"])
    def test_a_program_that_was_upgraded(
        self, how: str, children: Children, tmp_path: Path
    ) -> None:
        """Root's program whose file was removed or replaced is not known; it has not none.

        A service that is protected by its executable must not lose that by an upgrade.
        """
        copy = tmp_path / "service"
        shutil.copy(shutil.which("sleep") or "", copy)
        child = children.start(str(copy), "600")
        copy.unlink()
        if how == "replaced":
            shutil.copy(shutil.which("sleep") or "", copy)
        assert processes.executable(child.pid) is None

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
    def test_a_users_program_that_was_removed(self, children: Children, tmp_path: Path) -> None:
        """A user's own program has no name, whatever he does to its file."""
        copy = tmp_path / "service"
        shutil.copy(shutil.which("sleep") or "", copy)
        os.chown(copy, 65534, 65534)
        child = children.start(str(copy), "600")
        copy.unlink()
        assert processes.executable(child.pid) == ""

    def test_nobody(self) -> None:
        """Of a process that is gone nothing can be found out."""
        assert processes.executable(2**22 - 1) is None


@pytest.mark.parametrize(
    ("cgroup", "kind", "name"),
    [
        ("/slurm/uid_1000/job_31/step_batch", PlatformKind.SLURM, "31"),
        ("/slurm_n1/uid_1000/job_31", PlatformKind.SLURM, "31"),
        (
            "/system.slice/slurmstepd.scope/job_211/step_0/user/task_0",
            PlatformKind.SLURM,
            "211",
        ),
        ("/system.slice/n1_slurmstepd.scope/job_7/step_0", PlatformKind.SLURM, "7"),
        (
            "/system.slice/slurmstepd.scope/s5K1KKYAYG5D00/step_0/user/task_0",
            PlatformKind.SLURM,
            "s5K1KKYAYG5D00",
        ),
        (f"/kubepods/besteffort/pod{POD}/{CONTAINER}", PlatformKind.KUBERNETES, POD),
        (
            (
                f"/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{POD_}.slice/"
                f"cri-containerd-{CONTAINER}.scope"
            ),
            PlatformKind.KUBERNETES,
            POD,
        ),
        (
            f"/system.slice/containerd.service/kubepods-pod{POD_}.slice:cri-containerd:{CONTAINER}",
            PlatformKind.KUBERNETES,
            POD,
        ),
        (f"/docker/{CONTAINER}", PlatformKind.NONE, ""),
        ("/system.slice/ssh.service", PlatformKind.NONE, ""),
        ("/", PlatformKind.NONE, ""),
        ("", PlatformKind.NONE, ""),
        # made by a user below the slice that systemd gave them
        (
            "/user.slice/user-1000.slice/user@1000.service/slurmstepd.scope/job_5",
            PlatformKind.NONE,
            "",
        ),
        (f"/user.slice/user-1000.slice/kubepods/pod{POD}/x", PlatformKind.NONE, ""),
        ("/a/slurm/uid_1000/job_31", PlatformKind.NONE, ""),
    ],
)
def test_platforms(cgroup: str, kind: PlatformKind, name: str) -> None:
    """A cgroup path names its platform and the platform's own id, and nothing else does."""
    found = platform_of(cgroup)
    assert (found.kind, found.id) == (kind, name)


@pytest.mark.parametrize(
    ("content", "path"),
    [
        (b"0::/user.slice/session-3.scope\n", "/user.slice/session-3.scope"),
        (b"0::/\n", "/"),
        (b"", ""),
        (b"2:cpu:/short\n1:memory:/longer/path\n0::/\n", "/longer/path"),
        (b"3:memory:/slurm/uid_1/job_9\n0::/system.slice/x.service\n", "/slurm/uid_1/job_9"),
        (b"1:name=systemd:/a:b\n", "/a:b"),
        # What a user calls a cgroup of his own may end a line for Unicode, but not for the kernel.
        *(
            (f"0::{home}/x{end}0::/slurm/uid_1000/job_31\n".encode(), f"{home}/x{end}0::{SLURM}")
            for home in ("/user.slice/user-1000.slice",)
            for end in "\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"
        ),
    ],
)
def test_own_cgroup(content: bytes, path: str) -> None:
    """The path that names a platform counts, else the v2 path, else the longest v1 path."""
    assert own_cgroup(content) == path


class TestJobRoot:
    """Which process names a job."""

    launchers = Launchers()

    def _root(self, pid: int, *members: Process) -> int:
        return job_root(_tree(*members), pid, launchers=self.launchers).pid

    def test_below_a_launcher(self) -> None:
        """The root is the highest ancestor below the launcher."""
        members = [_make(10, 1, "tmux: server"), _make(11, 10), _make(12, 11), _make(13, 12)]
        assert self._root(13, *members) == 11

    def test_an_interactive_shell_is_a_launcher(self) -> None:
        """Two commands of one terminal are two jobs."""
        shell = _make(20, 10, "bash", tty=34816, session=20)
        members = [
            _make(10, 1, "sshd"),
            shell,
            _make(21, 20, session=20),
            _make(22, 20, session=20),
        ]
        assert (self._root(21, *members), self._root(22, *members)) == (21, 22)

    @pytest.mark.parametrize("name", ["node", "MainThread", "node-MainThread"])
    def test_a_remote_editor(self, name: str) -> None:
        """A notebook's kernel and a terminal's training in VS Code are two jobs, not the editor."""
        members = [
            _make(10, 1, "sshd"),
            _make(20, 1, "sh"),
            _make(21, 20, name),
            _make(22, 21, name),
            _make(30, 22),
            _make(40, 21, name),
            _make(41, 40, "bash", tty=34816),
            _make(42, 41, tty=34816, session=41),
        ]
        assert (self._root(30, *members), self._root(42, *members)) == (30, 42)

    def test_a_shell_script_is_part_of_the_job(self) -> None:
        """A shell without a terminal of its own starts no jobs: it is the job."""
        members = [_make(10, 1, "cron"), _make(20, 10, "bash"), _make(21, 20)]
        assert self._root(21, *members) == 20

    @pytest.mark.parametrize("change", [{"uid": 0}, {"cgroup": "/b"}])
    def test_another_owner_or_cgroup(self, change: dict[str, object]) -> None:
        """A job ends where owner or cgroup change."""
        assert self._root(12, _make(10, 1), _make(11, 10, **change), _make(12, 11)) == 12

    def test_children_of_init(self) -> None:
        """Pid 1 and 2 are never part of a job, whatever their name and owner."""
        assert self._root(10, _make(1, 0), _make(10, 1)) == 10

    def test_a_parent_that_is_younger(self) -> None:
        """A parent younger than its child took over the pid of the one that is gone."""
        assert self._root(5, _make(9, 1), _make(5, 9)) == 5

    def test_a_loop(self) -> None:
        """A loop, as a race may show it, ends."""
        members = [_make(10, 11, start_ticks=1), _make(11, 10, start_ticks=1)]
        assert self._root(10, *members) in (10, 11)

    def test_settings_add_launchers(self) -> None:
        """A node's setting adds a launcher; its name is cut as the kernel cuts it."""
        launchers = Launchers.with_extra(["a-very-long-launcher"])
        members = _tree(_make(10, 1, "a-very-long-lau"), _make(11, 10), _make(12, 11))
        assert job_root(members, 12, launchers=launchers).pid == 11


def test_descendants_in_other_sessions(children: Children) -> None:
    """A tree includes what moved to a session of its own."""
    child = children.script("setsid sleep 600 & echo; sleep 600")

    def sessions() -> set[int]:
        everybody = read_all()
        below = processes.descendants(everybody, child.pid)
        return {everybody[pid].session for pid in below}

    found = eventually(sessions, until=lambda found: len(found) == 2)
    for session in found - {child.pid}:
        os.killpg(session, 9)


def test_job_ids() -> None:
    """A job's name is read back as it was made; other names are not taken for one."""
    name = proc_job_id(_make(31337, 1, start_ticks=99), "84cb9834-d59c-48cb-b2b5-e4bc8e01493a")
    assert name == "proc-84cb9834-31337-99"
    assert parse_proc_job_id(name) == ("84cb9834", 31337, 99)
    for other in ("proc-84cb9834-0-1", "proc-84CB9834-1-1", "slurm-1-2", f"{name}\n", ""):
        assert parse_proc_job_id(other) is None


def test_the_time_of_boot_for_who_asks_often() -> None:
    """It is the same as what /proc/stat says, also the second time."""
    often = BootTime()
    assert abs(often.read() - boot_time()) <= 1
    assert often.read() == often.read()
