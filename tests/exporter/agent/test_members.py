from __future__ import annotations

import pytest

from gpuwarden.agent_api import ProcessRef
from gpuwarden.exporter.agent.members import Scope, find, of_job, orphans
from gpuwarden.exporter.processes import Launchers, Process

LAUNCHERS = Launchers()
POD = "8f4f5a0c-0000-4000-8000-000000000001"
CGROUP = "/user.slice/user-1000.slice/session-3.scope"


def process(pid: int, ppid: int, **about) -> Process:
    """A process of a user, in a session of his."""
    fields = {
        "pid": pid,
        "ppid": ppid,
        "pgid": pid,
        "session": 10,
        "tty": 0,
        "state": "S",
        "start_ticks": pid,
        "uid": 1000,
        "comm": "python",
        "cgroup": CGROUP,
        "cpu_ticks": 0,
        "threads": 1,
        **about,
    }
    return Process(**fields)


def table(*processes: Process) -> dict[int, Process]:
    """All processes, with a shell and pid 1."""
    shell = process(10, 5, comm="bash", tty=1)
    first = process(1, 0, comm="systemd", uid=0, cgroup="/init.scope")
    return {item.pid: item for item in (first, shell, *processes)}


def members(processes: dict[int, Process], known, **about) -> list[int]:
    """Pids of a job's members."""
    root = processes.get(100) or process(100, 10)
    fields = {"dedicated": False, "launchers": LAUNCHERS}
    fields.update({key: about.pop(key) for key in tuple(about) if key in fields})
    return sorted(item.pid for item in find(processes, known, Scope.of(root, **fields), **about))


def test_the_tree_belongs_to_the_job() -> None:
    """Children and their children are members; the shell and its other jobs are not."""
    found = table(process(100, 10), process(101, 100), process(102, 101), process(200, 10))
    assert members(found, [(100, 100)]) == [100, 101, 102]


def test_what_a_launcher_below_the_job_starts_is_another_job() -> None:
    """A notebook server among the children ends with the job, its kernels do not."""
    found = table(process(100, 10), process(101, 100, comm="jupyter-lab"), process(102, 101))
    assert members(found, [(100, 100)]) == [100, 101]


def test_a_launcher_that_outlives_the_root_is_still_one() -> None:
    """When the root has left before the server below it, the server's jobs are still others."""
    found = table(process(101, 1, comm="jupyter-lab"), process(102, 101), process(103, 1, pgid=101))
    assert members(found, [(100, 100), (101, 101)]) == [101]


def test_another_owner_or_cgroup_is_another_job() -> None:
    """A child that changed its user or its cgroup is not a member."""
    found = table(process(100, 10), process(101, 100, uid=0), process(102, 100, cgroup="/x.scope"))
    assert members(found, [(100, 100)]) == [100]


def test_what_a_member_takes_along_belongs_to_the_job() -> None:
    """Where a member has gone since it became one, its children are members; others there not."""
    there = {"cgroup": "/user.slice/other.scope"}
    found = table(
        process(100, 10),
        process(101, 100, **there),
        process(102, 101, **there),
        process(103, 1, pgid=101, **there),
        process(104, 1, **there),
        process(105, 100, uid=0),
    )
    assert members(found, [(100, 100), (101, 101)]) == [100, 101, 102, 103]
    assert members(found, [(100, 100)]) == [100]
    assert members(found, [(100, 100), (101, 101)], dedicated=True) == [*range(100, 104), 105]


def test_a_group_of_a_dead_member_belongs_to_the_job() -> None:
    """An orphan in the group or session that a member led is a member."""
    found = table(
        process(100, 10),
        process(102, 1, pgid=101),
        process(103, 1, session=101),
        process(104, 1, pgid=200, session=200),
    )
    assert members(found, [(100, 100), (101, 101)]) == [100, 102, 103]


def test_a_recycled_leader_leads_nobody_of_the_job() -> None:
    """A group whose leader has the pid of a dead member, but not its start, is another's."""
    stranger = process(101, 1, start_ticks=900)
    found = table(process(100, 10), stranger, process(102, 1, pgid=101, start_ticks=901))
    assert members(found, [(100, 100), (101, 101)]) == [100]


def test_nothing_older_than_the_job_belongs_to_it() -> None:
    """A process that was there before the job cannot have come from it."""
    found = table(process(100, 10), process(50, 1, pgid=100), process(60, 1))
    seen = [ProcessRef(60, 60)]
    assert members(found, [(100, 100)], seen=seen) == [100]


def test_what_was_seen_must_be_an_orphan_or_below_a_member() -> None:
    """A process below somebody's shell is that shell's job, whatever the engine saw."""
    found = table(process(100, 10), process(200, 10), process(300, 1), process(301, 300))
    seen = [ProcessRef(pid, pid) for pid in (200, 300, 301)]
    assert members(found, [(100, 100)], seen=seen) == [100, 300, 301]


def test_a_dedicated_cgroup_is_the_job() -> None:
    """In a cgroup of the job's own everything belongs to it, groups below it too."""
    inside = {"cgroup": "/docker/x"}
    found = table(
        process(100, 9, **inside),
        process(150, 9, **inside, uid=0),
        process(151, 1, cgroup="/docker/x/y"),
        process(152, 1, cgroup="/docker/xy"),
    )
    assert members(found, [(100, 100)], dedicated=True) == [100, 150, 151]


def test_zombies_are_not_members() -> None:
    """A dead process cannot be ended again; one that lost its first thread can."""
    found = table(
        process(100, 10), process(101, 100, state="Z"), process(102, 100, state="Z", threads=3)
    )
    assert members(found, [(100, 100)]) == [100, 102]


def test_orphans_are_what_is_left_of_a_job() -> None:
    """Without its root, a job is what was seen of it, is not older, and belongs to nobody else."""
    found = table(process(200, 10), process(300, 1), process(301, 300), process(90, 1))
    seen = [ProcessRef(pid, pid) for pid in (90, 200, 300, 301, 999)]
    left = orphans(found, seen, launchers=LAUNCHERS, since_ticks=100, booted=0.0)
    assert [item.pid for item in left] == [300, 301]


@pytest.mark.parametrize(
    ("job_id", "pids"),
    [
        ("proc-0badcafe-100-100", [100, 101]),
        ("proc-0badcafe-100-99", []),
        ("proc-11111111-100-100", []),
        (f"pod-{POD}", [200, 201]),
        ("pod-8f4f5a0c-0000-4000-8000-000000000002", []),
        ("slurm-main-7-0", [300, 301]),
        ("slurm-main-5_7-0", [300]),
        ("slurm-7", [300]),
        ("anything", []),
    ],
)
def test_jobs_of_all_kinds_are_found(job_id: str, pids: list[int]) -> None:
    """A tree by its root, a pod by its cgroup, Slurm's by both."""
    pod, step = f"/kubepods.slice/kubepods-pod{POD.replace('-', '_')}.slice/x", "/slurm/uid_1/job_7"
    found = table(
        process(100, 10),
        process(101, 100),
        process(200, 1, cgroup=pod),
        process(201, 200, cgroup=pod),
        process(300, 1, cgroup=step),
        process(301, 1, cgroup=step),
    )
    about = {"boot": "0badcafe-x", "booted": 0.0, "launchers": LAUNCHERS}
    seen = [ProcessRef(300, 300), ProcessRef(301, 1), ProcessRef(200, 1)]
    assert [item.pid for item in of_job(found, job_id, seen=seen, **about)] == pids


def test_a_root_that_nobody_has_waited_for_does_not_hide_what_it_left() -> None:
    """One that has ended is in no cgroup of its job any more; its worker runs on, below nobody."""
    dead = process(100, 10, state="Z", cgroup="/")
    left = of_job(
        table(dead, process(101, 1)),
        "proc-0123abcd-100-100",
        boot="0123abcd-0000-4000-8000-000000000000",
        booted=0.0,
        launchers=LAUNCHERS,
        seen=[ProcessRef(100, 100), ProcessRef(101, 101)],
    )
    assert [item.pid for item in left] == [101]
