"""From processes on cards to jobs and their owners.

Attribution is done here, once, and never in PromQL: which job a process belongs to, which part of
a shared card is whose, since when a job uses a card and when it last showed life. One `Attribution`
keeps what must be remembered between snapshots, keyed by identities, never by pids.
"""

from __future__ import annotations

import stat
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gpuwarden.clock import SystemClock
from gpuwarden.exporter import classification, resources
from gpuwarden.exporter.blocking_calls import BlockingCalls
from gpuwarden.exporter.boot_times import BootTime
from gpuwarden.exporter.censuses import Census
from gpuwarden.exporter.cgroups import PlatformKind, platform_of
from gpuwarden.exporter.groups import MPS_COMM, Group, Tenancies, total
from gpuwarden.exporter.instances import places
from gpuwarden.exporter.jobs import GpuProcessRow, Job, NodeSnapshot, YoloCommand
from gpuwarden.exporter.lineages import Lineages
from gpuwarden.exporter.memories import Memories
from gpuwarden.exporter.platforms import Platforms
from gpuwarden.exporter.pods import Pods
from gpuwarden.exporter.processes import (
    PROC,
    Launchers,
    Process,
    arguments,
    boot_id,
    executable,
    proc_job_id,
    start_time,
)
from gpuwarden.exporter.recollections import Recollection
from gpuwarden.exporter.runs import FUTURE_SECONDS, RunDirectory
from gpuwarden.exporter.users import UserNames

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from gpuwarden.clock import Clock
    from gpuwarden.exporter.allocations import Allocation
    from gpuwarden.exporter.cgroups import Platform
    from gpuwarden.exporter.devices import DeviceSnapshot, Gpu, GpuProcess
    from gpuwarden.exporter.inquiries import Inquiry
    from gpuwarden.exporter.kubelets import KubeletView
    from gpuwarden.exporter.memories import Memory
    from gpuwarden.exporter.runs import LiveRun
    from gpuwarden.exporter.slurm import SlurmView

ACTIVE_SHARE_OF_CORE = 0.01
"""A tree that used more of a core than this since the last snapshot shows life."""
LIBRARY_TRIES = 3


@dataclass(slots=True)
class _Facts:
    """What is found out once about a process; its name is part of the key, for it may exec."""

    executable: str | None
    kernel: bool
    command: YoloCommand | None
    library: str = ""
    library_tries: int = 0


class Attribution:
    """Turns snapshots of the cards into snapshots of the node."""

    def __init__(
        self,
        jobs: Path,
        *,
        launchers: Launchers | None = None,
        clock: Clock | None = None,
        proc: Path = PROC,
        slurm: Inquiry[SlurmView] | None = None,
        kubelet: Inquiry[KubeletView] | None = None,
    ) -> None:
        """Begin knowing nobody.

        Args:
            jobs: the folder that holds `jobs/`.
            launchers: what starts jobs on this node.
            clock: for activity and ages.
            proc: where procfs is mounted.
            slurm: asks Slurm's controller; None: Slurm's jobs stay unresolved.
            kubelet: asks the node's kubelet; None: pods have no names.
        """
        self._clock: Clock = clock if clock is not None else SystemClock()
        self._proc = proc
        self._boot = boot_id(proc)
        self._boot_time = BootTime(proc)
        self._lineages = Lineages(launchers if launchers is not None else Launchers())
        self._calls = BlockingCalls()
        self._users = UserNames(self._calls, self._clock)
        self._platforms = Platforms(
            clock=self._clock, calls=self._calls, proc=proc, slurm=slurm, kubelet=kubelet
        )
        self._runs = RunDirectory(
            jobs,
            boot=self._boot,
            pid_namespace=(proc / "self/ns/pid").stat().st_ino,
            user_name=self._users.name,
        )
        self._pods = Pods(
            jobs, boot=self._boot, calls=self._calls, user_name=self._users.name, proc=proc
        )
        self._census = Census(proc)
        self._facts: dict[tuple[int, int, str], _Facts] = {}
        self._memories = Memories()
        self._dropped: Counter[str] = Counter()

    def observe(self, devices: DeviceSnapshot | None) -> NodeSnapshot:
        """Attribute what the cards show; reads /proc and the job files.

        Args:
            devices: the cards, or None without a driver: then only declared trainings are seen.

        Raises:
            OSError: /proc cannot be read.
        """
        now = self._clock.wall()
        booted = self._boot_time.read()
        self._dropped = Counter()
        on_cards = {item.pid for gpu in places(devices) for item in gpu.processes or ()}
        processes = self._census.take(on_cards)
        self._lineages.update(processes)
        # What the driver itself lists: who is in a container is found out once.
        cards = devices.gpus if devices is not None else ()
        listed = {item.pid for gpu in cards for item in gpu.processes or ()}
        self._pods.update(processes, listed)
        self._platforms.update(processes, listed)
        foreign = self._pods.by_namespace(processes)
        live = self._runs.scan(processes, now=now, booted=booted, others=foreign)
        live += self._pods.scan(processes, now=now, booted=booted)
        self._runs.reap_leftovers()
        given = self._platforms.allocations(devices)
        groups = self._groups(devices, processes, live=live, given=given)
        if self._census.watch(item.pid for group in groups.values() for item in group.tree):
            # Whoever has just become a member was not read before.
            groups = self._groups(devices, processes, live=live, given=given)
        tenancies = Tenancies(devices, processes, groups)
        jobs = self._jobs(groups, tenancies, now=now, booted=booted)
        rows, unattributed = self._rows(devices, processes, groups, booted=booted)
        self._forget(jobs, processes)
        return NodeSnapshot(
            taken_at=devices.taken_at if devices is not None else now,
            devices=devices,
            jobs=jobs,
            processes=rows,
            unattributed=unattributed,
            node_pressure=resources.pressure(self._proc / "pressure"),
            lost_gpu_seconds=self._pods.with_lost(self._runs.lost),
            dropped=dict(
                self._dropped + self._runs.dropped + self._pods.dropped + self._platforms.dropped
            ),
            impaired=self._platforms.failed,
        )

    def recollect(self) -> Recollection:
        """What an exporter that follows this one must know; called between two observations."""
        return Recollection(
            boot_id=self._boot,
            written_at=self._clock.wall(),
            roots=self._lineages.recollect(),
            jobs=self._memories.recollect(),
            attempts=(*self._runs.recollect(), *self._pods.recollect()),
            lost=self._pods.with_lost(self._runs.lost),
            named=self._platforms.recollect(),
        )

    def recall(self, known: Recollection) -> None:
        """Take over what an earlier exporter of this boot knew; called before any observation.

        Args:
            known: its recollection.
        """
        now = self._clock.wall()
        own = [attempt for attempt in known.attempts if attempt.folder is None]
        self._lineages.recall(known.roots)
        self._memories.recall(known.jobs, now=now)
        self._runs.recall(own, seen_at=known.written_at)
        self._pods.recall(known.attempts, seen_at=known.written_at, now=now)
        self._runs.lost.update(known.lost)
        self._platforms.recall(known.named)

    def wait(self, seconds: float) -> None:
        """Have the node's platforms asked, and wait for their answers.

        Args:
            seconds: for each of them.
        """
        self._platforms.wait(seconds)

    def close(self) -> None:
        """Let the threads for what may hang end."""
        self._platforms.close()
        self._calls.close()

    # -----------------------------------------------------------------------------------------
    # Who belongs together

    def _groups(
        self,
        devices: DeviceSnapshot | None,
        processes: Mapping[int, Process],
        *,
        live: Iterable[LiveRun],
        given: Iterable[Allocation],
    ) -> dict[str, Group]:
        """Jobs that use a card or declare a training, with all their processes."""
        groups: dict[str, Group] = {}
        for gpu in places(devices):
            for process in self._holders(gpu, processes):
                group = self._group(groups, process, processes)
                if group is not None:
                    group.on_cards[process.pid] = process
        for run in live:
            group = self._group(groups, processes[run.pid], processes)
            if group is not None:
                group.runs.append(run)
        for allocation in given:
            of_platform = Group(allocation.job_id, allocation.platform, None)
            groups.setdefault(allocation.job_id, of_platform).allocation = allocation
        for process in processes.values() if groups else ():
            group = groups.get(self._job_id(process, processes)[0])
            if group is not None:
                group.tree.append(process)
        for group in groups.values():
            group.settle()
        return groups

    def _holders(self, gpu: Gpu, processes: Mapping[int, Process]) -> list[Process]:
        """Live processes of jobs on a card.

        One that is lost or cannot be read is still held by who held it, while they live.
        """
        if gpu.processes is None:
            return [
                processes[pid]
                for pid, ticks in self._memories.holders(gpu.uuid)
                if pid in processes
                and processes[pid].start_ticks == ticks
                and not processes[pid].ended
            ]
        listed = (processes.get(item.pid) for item in gpu.processes)
        return [
            process
            for process in listed
            if process is not None and not process.ended and not process.comm.startswith(MPS_COMM)
        ]

    def _group(
        self, groups: dict[str, Group], process: Process, processes: Mapping[int, Process]
    ) -> Group | None:
        """The group of a process; None while its job's identity is not known."""
        job_id, platform, root = self._job_id(process, processes)
        if not job_id:
            return None
        group = groups.get(job_id)
        if group is None:
            # Its values now, or as they were where it ended before its descendants.
            now = processes.get(root.pid)
            if now is not None and now.identity == root.identity:
                group = Group(job_id, platform, now)
            else:
                group = Group(job_id, platform, root, root_lives=False)
            groups[job_id] = group
        return group

    def _job_id(
        self, process: Process, processes: Mapping[int, Process]
    ) -> tuple[str, Platform, Process]:
        """A process's job, or an empty string while it is not known; and what names it."""
        platform = platform_of(process.cgroup)
        if platform.kind is not PlatformKind.NONE:
            return self._platforms.job_id(platform) or "", platform, process
        root = self._lineages.root(process, processes)
        return proc_job_id(root, self._boot), platform, root

    # -----------------------------------------------------------------------------------------
    # Jobs

    def _jobs(
        self,
        groups: Mapping[str, Group],
        tenancies: Tenancies,
        *,
        now: float,
        booted: float,
    ) -> tuple[Job, ...]:
        pressures = resources.cgroup_pressures(
            group.root.cgroup for group in groups.values() if group.root is not None
        )
        jobs = []
        for job_id in sorted(groups):
            group = groups[job_id]
            memory = self._memories.of(job_id)
            holdings = tenancies.holdings(group, memory)
            if group.on_cards and memory.first_gpu_use is None:
                memory.first_gpu_use = now
            for run in group.runs:
                self._runs.note_holdings(run.run.description.run_id, len(holdings))
                self._pods.note_holdings(run.run.description.run_id, len(holdings))
            usage, share = resources.measure(
                memory.usage,
                group.tree,
                holders={*group.on_cards, *(run.pid for run in group.runs)},
                now=self._clock.monotonic(),
                proc=self._proc,
            )
            if group.root is not None:
                usage.pressure.update(pressures.get(group.root.cgroup, {}))
            if share is None or share > ACTIVE_SHARE_OF_CORE:
                memory.cpu_active_at = now
            facts = {pid: self._facts_of(process) for pid, process in group.on_cards.items()}
            seen = list(facts.values())
            if group.root is not None and group.root_lives:
                seen.append(self._facts_of(group.root))
            command = next((item.command for item in seen if item.command is not None), None)
            jobs.append(
                Job(
                    job_id=job_id,
                    user=self._user(group),
                    source=_source(group, command),
                    framework=self._framework(group, facts, seen),
                    interactive=any(item.kernel for item in seen)
                    or any(
                        item is not None and item.tty
                        for item in (group.root, *group.on_cards.values())
                    ),
                    root=group.root,
                    executables=self._executables(group, facts),
                    holdings=holdings,
                    start_time=_start_time(group, booted=booted),
                    first_gpu_use=memory.first_gpu_use,
                    activity=self._activity(group, memory, now),
                    resources=usage,
                    runs=tuple(run.run for run in group.runs),
                    command=None if group.runs else command,
                    platform=self._platforms.facts(group),
                )
            )
        return tuple(jobs)

    def _user(self, group: Group) -> str:
        """Name of a job's owner; empty where nobody tells."""
        if group.root is not None:
            return self._users.name(group.root.uid)
        given = group.allocation.uid if group.allocation is not None else None
        return "" if given is None else self._users.name(given)

    def _executables(
        self, group: Group, facts: Mapping[int, _Facts]
    ) -> tuple[tuple[str, str], ...]:
        """(executable, cgroup) of the holders, without those whose executable is not known.

        Said to be empty, it would match no entry of a whitelist; absent, it leaves that open.
        """
        found = set()
        for pid, process in group.on_cards.items():
            path = facts[pid].executable
            if path is None:
                self._dropped["executable"] += 1
            else:
                found.add((path, process.cgroup))
        return tuple(sorted(found))

    def _facts_of(self, process: Process) -> _Facts:
        key = (*process.identity, process.comm)
        facts = self._facts.get(key)
        if facts is None:
            found = self._calls.make(_owner(process), lambda: self._look_at(process))
            if found is None:
                self._dropped["hanging"] += 1
                return _Facts(executable=None, kernel=False, command=None)
            if found.executable is None:
                # Not to be found out now; what is kept would be so for as long as it runs.
                return found
            facts = self._facts[key] = found
            if facts.command is not None:
                self._dropped["command_value"] += facts.command.refused
        return facts

    def _look_at(self, process: Process) -> _Facts:
        words = arguments(process.pid, self._proc)
        return _Facts(
            executable=executable(process.pid, self._proc),
            kernel=classification.is_kernel(words),
            command=classification.yolo_command(words),
        )

    def _framework(self, group: Group, facts: Mapping[int, _Facts], seen: Iterable[_Facts]) -> str:
        if group.runs:
            return "ultralytics"
        if any(item.kernel for item in seen):
            return "jupyter"
        for item in seen:
            if item.command is not None:
                return item.command.framework
        for pid, item in facts.items():
            # Libraries are loaded before a card is used, but simulations may be bound earlier.
            if not item.library and item.library_tries < LIBRARY_TRIES:
                item.library_tries += 1
                item.library = self._library(group.on_cards[pid])
            if item.library:
                return item.library
        return ""

    def _library(self, process: Process) -> str:
        found = self._calls.make(
            _owner(process), lambda: classification.loaded_framework(process.pid, self._proc)
        )
        return found or ""

    def _activity(self, group: Group, memory: Memory, now: float) -> dict[str, float]:
        """Signal -> last sign of life; signals that the job never had are absent."""
        found: dict[str, float] = {}
        heartbeats = []
        for live in group.runs:
            if live.run.heartbeat is not None:
                heartbeats.append(live.run.heartbeat)
            written = self._log_written(live, now)
            if written is not None:
                memory.log_written_at = min(now, written)
        if memory.log_written_at is not None:
            # While a file system hangs, the last known writing stays what it was.
            found["log"] = memory.log_written_at
        if heartbeats:
            found["heartbeat"] = min(now, max(heartbeats))
        if memory.cpu_active_at is not None:
            found["cpu"] = memory.cpu_active_at
        return found

    def _log_written(self, live: LiveRun, now: float) -> float | None:
        """When the log that a run names was last written; it must be a file of the run's owner."""
        log = live.run.description.log
        if log is None or not log.startswith("/"):
            return None
        try:
            about = self._calls.make(live.uid, lambda: Path(log).stat(follow_symlinks=False))
        except (OSError, ValueError):
            # ValueError: a path that no file can have, such as with a NUL or half a character.
            return None
        if about is None:
            self._dropped["hanging"] += 1
            return None
        if not stat.S_ISREG(about.st_mode) or about.st_uid != live.uid:
            self._dropped["log_owner"] += 1
            return None
        if about.st_mtime > now + FUTURE_SECONDS:
            self._dropped["future"] += 1
            return None
        return about.st_mtime

    # -----------------------------------------------------------------------------------------
    # Processes on cards

    def _rows(
        self,
        devices: DeviceSnapshot | None,
        processes: Mapping[int, Process],
        groups: Mapping[str, Group],
        *,
        booted: float,
    ) -> tuple[tuple[GpuProcessRow, ...], dict[str, int]]:
        owner = {pid: group.job_id for group in groups.values() for pid in group.on_cards}
        rows: list[GpuProcessRow] = []
        unattributed: dict[str, int] = {}
        for gpu in places(devices):
            if gpu.processes is None:
                continue
            known: list[GpuProcess] = []
            for item in gpu.processes:
                process = processes.get(item.pid)
                if process is None or process.ended:
                    self._dropped["no_process"] += 1
                    continue
                known.append(item)
                rows.append(
                    GpuProcessRow(
                        index=gpu.index,
                        uuid=gpu.uuid,
                        pid=item.pid,
                        user=self._users.name(process.uid),
                        job_id=owner.get(item.pid, ""),
                        start_time=start_time(process, booted=booted),
                        memory_bytes=item.memory_bytes,
                        utilization_ratio=item.utilization_ratio,
                    )
                )
            accounted = total(item.memory_bytes for item in known)
            if gpu.memory_used_bytes is not None and accounted is not None:
                # The driver's lists and sums are taken one after another.
                unattributed[gpu.uuid] = max(0, gpu.memory_used_bytes - accounted)
        return tuple(rows), unattributed

    def _forget(self, jobs: Iterable[Job], processes: Mapping[int, Process]) -> None:
        self._users.forget()
        self._memories.forget({job.job_id for job in jobs}, processes)
        self._facts = {
            key: value
            for key, value in self._facts.items()
            # By its name of now only: a process may call itself something else every moment.
            if (process := processes.get(key[0])) is not None
            and (process.start_ticks, process.comm) == key[1:]
        }


def _start_time(group: Group, *, booted: float) -> float | None:
    if group.root is not None:
        return start_time(group.root, booted=booted)
    return group.allocation.start_time if group.allocation is not None else None


def _source(group: Group, command: YoloCommand | None) -> str:
    if group.platform.kind is PlatformKind.SLURM:
        return "slurm"
    if group.platform.kind is PlatformKind.KUBERNETES:
        return "pod"
    if group.runs:
        return "trainer"
    return "cmdline" if command is not None else "process"


def _owner(process: Process) -> tuple[int, str, str]:
    """Whoever may make looking at a process hang: a user, or one of his containers or jobs."""
    platform = platform_of(process.cgroup)
    return process.uid, platform.id, platform.container
