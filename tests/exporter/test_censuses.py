"""Who is there, read again only where something may have changed: what must be seen, and when."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.exporter.descriptors import descriptors_left
from tests.exporter.nodes import Children, process_of

from gpuwarden.exporter.censuses import FRESH_CENSUSES, REFRESH_CENSUSES, Census
from gpuwarden.exporter.processes import read_all

if TYPE_CHECKING:
    from collections.abc import Callable

LAST_PID = Path("/proc/sys/kernel/ns_last_pid")


class Node:
    """A folder that looks like /proc."""

    def __init__(self, proc: Path) -> None:
        self.proc = proc

    def put(
        self,
        pid: int,
        *,
        ppid: int = 1,
        comm: str = "x",
        uid: int = 7,
        cgroup: str = "/a",
        start: int = 777,
    ) -> None:
        """Let a process be as it is told; one that is there goes on."""
        folder = self.proc / str(pid)
        folder.mkdir(exist_ok=True)
        rest = f"S {ppid} 1 1 0 -1 0 0 0 0 0 3 4 5 6 20 0 1 0 {start} 0 9 " + "0 " * 17 + "11 0\n"
        (folder / "stat").write_text(f"{pid} ({comm}) {rest}")
        (folder / "status").write_text(f"Name:\t{comm}\nUid:\t{uid}\t0\t0\t0\n")
        (folder / "cgroup").write_text(f"0::{cgroup}\n")

    def replace(self, pid: int, **values: str | int) -> None:
        """Let another process take over a pid."""
        folder = self.proc / str(pid)
        folder.rename(folder.with_name("old"))
        self.put(pid, **values)  # type: ignore[arg-type]
        shutil.rmtree(folder.with_name("old"))


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """A node on which nobody is."""
    return Node(tmp_path)


def test_who_matters_to_nobody_is_not_read(node: Node) -> None:
    """What a process in no job does is not looked at, until everybody is read anew."""
    node.put(42)
    census = Census(node.proc)
    first = census.take(())[42]
    node.put(42, comm="y", uid=8)
    for _ in range(REFRESH_CENSUSES - 2):
        assert census.take(())[42] is first
    found = census.take(())[42]
    assert (found.comm, found.uid) == ("y", 8)


def test_members_of_jobs_are_read_each_time(node: Node) -> None:
    """What a member of a job does is seen with each census; doing nothing is the same answer."""
    node.put(42)
    census = Census(node.proc)
    before = census.take(())[42]
    assert not census.watch([42])
    assert census.take(())[42] is before
    node.put(42, comm="y")
    assert census.take(())[42].comm == "y"


def test_who_becomes_a_member_is_read_at_once(node: Node) -> None:
    """A job that has just been found is not judged by what its members did long ago."""
    node.put(42)
    node.put(43)
    census = Census(node.proc)
    census.take(())
    node.put(42, comm="y")
    shutil.rmtree(node.proc / "43")
    node.put(43)
    found = census.take(())
    assert found[42].comm == "x"
    assert census.watch([42])
    assert found[42].comm == "y"
    assert not census.watch([42])


def test_a_member_that_ends_meanwhile_is_as_it_was(node: Node) -> None:
    """Who was there when the census was taken is not taken away by what is read afterwards."""
    node.put(42)
    census = Census(node.proc)
    census.take(())
    found = census.take(())
    shutil.rmtree(node.proc / "42")
    census.watch([42])
    assert found[42].comm == "x"
    assert 42 not in census.take(())


def test_the_pid_of_another(node: Node) -> None:
    """A process that takes over a pid is another one, though nobody reads what it does."""
    node.put(42, uid=7)
    census = Census(node.proc)
    census.take(())
    node.replace(42, uid=8, comm="other")
    found = census.take(())[42]
    assert (found.comm, found.uid) == ("other", 8)


def test_the_pid_of_another_between_listing_and_reading(node: Node) -> None:
    """Whoever takes over a member's pid after it was listed is a stranger like any other."""
    node.put(41, comm="sshd", uid=0)
    node.put(42)
    census = Census(node.proc)
    census.take(())
    census.watch([42])
    node.put(41, comm="bash", uid=8)
    node.put(42, ppid=41, uid=8, start=778)
    found = census.take(())
    assert (found[42].start_ticks, found[42].uid) == (778, 8)
    assert (found[41].comm, found[41].uid) == ("bash", 8)


def test_the_pid_of_another_is_no_member(node: Node) -> None:
    """Whoever takes over the pid of a new member is not read in its place."""
    node.put(42)
    census = Census(node.proc)
    census.take(())
    found = census.take(())
    node.put(42, comm="other", start=778)
    census.watch([42])
    assert found[42].comm == "x"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can say which pid comes next")
def test_the_pid_of_another_on_this_kernel(children: Children) -> None:
    """The kernel gives whoever takes over a pid a folder of its own."""
    census = Census()
    first = children.start()
    assert census.take(())[first.pid].identity == process_of(first.pid).identity
    children.kill(first)
    for _ in range(1000):
        LAST_PID.write_text(str(first.pid - 1))
        with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE) as second:
            if second.pid == first.pid:
                found = census.take(())[second.pid]
                expected = process_of(second.pid)
                second.kill()
                break
            second.kill()
    else:
        pytest.fail("the pid was never given again")
    assert (found.comm, found.identity) == ("cat", expected.identity)


@pytest.mark.parametrize("change", [{"cgroup": "/b"}, {"comm": "y", "uid": 8}])
def test_who_is_new_on_a_card_is_read_whole(node: Node, change: dict[str, str | int]) -> None:
    """Owner and cgroup of a process that begins to use a card are those that it has then."""
    node.put(42)
    census = Census(node.proc)
    census.take(())
    node.put(42, **change)  # type: ignore[arg-type]
    found = census.take({42})[42]
    assert {key: getattr(found, key) for key in change} == change


def test_who_is_moved_is_seen_though_it_did_nothing(node: Node) -> None:
    """Others can put a sleeping process on a card into another cgroup; soon that is seen."""
    node.put(42)
    census = Census(node.proc)
    before = census.take({42})[42]
    assert census.take({42})[42] is before
    node.put(42, cgroup="/elsewhere")
    seen = [census.take({42})[42].cgroup for _ in range(FRESH_CENSUSES)]
    assert seen[-1] == "/elsewhere"


def test_who_runs_another_program_on_a_card_is_read_whole(node: Node) -> None:
    """A process on a card that execs may have another owner by now."""
    node.put(42)
    census = Census(node.proc)
    census.take({42})
    node.put(42, comm="y", uid=8)
    assert census.take({42})[42].uid == 8


def test_a_job_moves_as_a_whole(node: Node) -> None:
    """Where one that matters has moved, everybody is read anew: its root has moved with it."""
    node.put(41)
    node.put(42, ppid=41)
    census = Census(node.proc)
    census.take({42})
    census.watch([41, 42])
    for pid in (41, 42):
        node.put(pid, cgroup="/b", ppid=1 if pid == 41 else 41)
    moved = [
        {pid: process.cgroup for pid, process in census.take({42}).items()}
        for _ in range(FRESH_CENSUSES)
    ]
    assert moved[-1] == {41: "/b", 42: "/b"}
    assert all(len(set(one.values())) == 1 for one in moved)


@pytest.mark.parametrize("child", [44, 40])
def test_ancestors_of_strangers_are_read_anew(node: Node, child: int) -> None:
    """A new process belongs to what its ancestors are now, whatever they were when last read."""
    for pid, ppid in ((41, 1), (42, 41), (43, 42)):
        node.put(pid, ppid=ppid, comm="sshd", uid=0)
    census = Census(node.proc)
    census.take(())
    node.put(42, ppid=41, comm="bash", uid=1000, cgroup="/session")
    node.put(41, ppid=1, comm="sshd-session", uid=1000)
    node.put(child, ppid=43, uid=1000)
    found = census.take(())
    assert (found[42].comm, found[42].uid, found[42].cgroup) == ("bash", 1000, "/session")
    assert found[41].comm == "sshd-session"


def test_ancestors_that_go_round_in_a_circle(node: Node) -> None:
    """A loop, as a race may show it, ends."""
    node.put(41, ppid=42)
    node.put(42, ppid=41)
    census = Census(node.proc)
    census.take(())
    node.put(43, ppid=42)
    assert set(census.take(())) == {41, 42, 43}


def test_who_may_not_be_seen_is_left_out(node: Node, children: Children) -> None:
    """Whatever else lies in /proc, and whoever cannot be read, is nobody."""
    node.put(42)
    (node.proc / "43").mkdir()
    (node.proc / "meminfo").touch()
    (node.proc / "44").mkdir()
    (node.proc / "44" / "stat").write_text("44 (x")
    census = Census(node.proc)
    assert set(census.take({43, 44})) == {42}
    child = children.start()
    assert Census().take(())[child.pid].identity == process_of(child.pid).identity


@pytest.mark.parametrize("look", [lambda proc: Census(proc).take(()), read_all])
def test_who_cannot_be_read_for_want_of_descriptors_is_not_gone(
    node: Node, look: Callable[[Path], object]
) -> None:
    """Nobody is left out because this process has no descriptor left: nothing is known then."""
    node.put(42)
    # Its first thread has ended: where it is, another one tells, for which two files are open.
    stat = node.proc / "42/stat"
    stat.write_text(stat.read_text().replace(" S ", " Z ").replace(" 20 0 1 0 ", " 20 0 2 0 "))
    (node.proc / "42/task/43").mkdir(parents=True)
    (node.proc / "42/task/43/cgroup").write_text("0::/a\n")
    assert look(node.proc)
    others = 1 if look is read_all else 0
    with descriptors_left(1 + others), pytest.raises(OSError, match="Too many open files"):
        look(node.proc)


def test_everybody_is_there(children: Children) -> None:
    """Of real processes the same is known after many censuses as at first sight."""
    census = Census()
    for number in range(2 * REFRESH_CENSUSES):
        child = children.start()
        found = census.take({child.pid} if number % 2 else ())
        assert found[child.pid].identity == process_of(child.pid).identity
        assert found[os.getpid()].identity == process_of(os.getpid()).identity
        children.kill(child)
        assert child.pid not in census.take(())


def _reads(call: Callable[[], object]) -> int:
    """How many times a call reads anything from the kernel."""

    def count() -> int:
        content = Path("/proc/thread-self/io").read_text()
        return int(content.split("syscr:")[1].split()[0])

    before = count()
    call()
    return count() - before


def test_bystanders_are_not_read(children: Children) -> None:
    """A process that uses no card costs no reading."""
    census = Census()
    census.take(())
    # Other processes of the machine come and go: the least that was seen is what it takes.
    few = min(_reads(lambda: census.take(())) for _ in range(REFRESH_CENSUSES - 2))
    for _ in range(20):
        children.start()
    census = Census()
    census.take(())
    many = min(_reads(lambda: census.take(())) for _ in range(REFRESH_CENSUSES - 2))
    assert many == few
