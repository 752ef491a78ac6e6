"""Whose jobs processes are: Slurm's, Kubernetes' or nobody's; what the platforms tell of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from gpuwarden.exporter.cgroups import PlatformKind, platform_of
from gpuwarden.exporter.jobs import PlatformFacts
from gpuwarden.exporter.kubernetes_pods import KubernetesPods
from gpuwarden.exporter.processes import host_mount_namespace
from gpuwarden.exporter.slurm_jobs import SlurmJobs

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from gpuwarden.clock import Clock
    from gpuwarden.exporter.allocations import Allocation
    from gpuwarden.exporter.blocking_calls import BlockingCalls
    from gpuwarden.exporter.cgroups import Platform
    from gpuwarden.exporter.devices import DeviceSnapshot
    from gpuwarden.exporter.groups import Group
    from gpuwarden.exporter.inquiries import Inquiry
    from gpuwarden.exporter.kubelets import KubeletView
    from gpuwarden.exporter.processes import Process
    from gpuwarden.exporter.recollections import NamedRecord
    from gpuwarden.exporter.slurm import SlurmView

_NO_FACTS = PlatformFacts()

MAX_CONTAINERS = 16
"""Containers of one job that are named; a pod has few."""


class Platforms:
    """The platforms of a node; used by the thread that takes snapshots."""

    def __init__(
        self,
        *,
        clock: Clock,
        calls: BlockingCalls,
        proc: Path,
        slurm: Inquiry[SlurmView] | None = None,
        kubelet: Inquiry[KubeletView] | None = None,
    ) -> None:
        """Begin knowing nobody.

        Args:
            clock: for ages.
            calls: makes calls that a job may make hang.
            proc: where procfs is mounted.
            slurm: asks Slurm's controller; None: nobody is asked.
            kubelet: asks the node's kubelet; None: nobody is asked.
        """
        self._inquiries = tuple(item for item in (slurm, kubelet) if item is not None)
        self._slurm = SlurmJobs(slurm, clock=clock, calls=calls, proc=proc)
        self._kubernetes = KubernetesPods(kubelet, clock=clock, proc=proc)
        self._proc = proc
        self._own: Counter[str] = Counter()
        self._hidden: dict[tuple[int, int], bool] = {}

    @property
    def failed(self) -> frozenset[str]:
        """Collectors whose last question had no answer."""
        failed = {"slurm": self._slurm.failed, "kubernetes": self._kubernetes.failed}
        return frozenset(name for name, bad in failed.items() if bad)

    @property
    def dropped(self) -> Counter[str]:
        """Reason -> what was dropped in this snapshot."""
        return self._slurm.dropped + self._kubernetes.dropped + self._own

    def recollect(self) -> dict[str, NamedRecord]:
        """What a later exporter must know: names that may not change."""
        return self._slurm.recollect()

    def recall(self, named: Mapping[str, NamedRecord]) -> None:
        """Take over the names that an earlier exporter gave.

        Args:
            named: what cgroups call an attempt -> its name.
        """
        self._slurm.recall(named)

    def wait(self, seconds: float) -> None:
        """Have every platform asked, and wait for the answers; for who takes one snapshot only."""
        for inquiry in self._inquiries:
            inquiry.wait(seconds)

    def update(self, processes: Mapping[int, Process], on_cards: Iterable[int]) -> None:
        """Learn who is there.

        Args:
            processes: all processes, by pid.
            on_cards: pids that the driver lists.
        """
        self._own = Counter()
        self._hidden = {key: value for key, value in self._hidden.items() if _lives(key, processes)}
        self._slurm.update(processes)
        uids = set()
        for pid in on_cards:
            process = processes.get(pid)
            if process is None:
                continue
            platform = platform_of(process.cgroup)
            if platform.kind is PlatformKind.KUBERNETES:
                uids.add(platform.id)
            elif process.cgroup in ("", "/") and self._in_container(process):
                # Its cgroup namespace hides where it is: of its container nothing is known.
                self._own["private_cgroup"] += 1
        self._kubernetes.update(uids, processes)

    def _in_container(self, process: Process) -> bool:
        """Whether a process has a mount namespace of its own; asked once for each."""
        known = self._hidden.get(process.identity)
        if known is None:
            try:
                own = (self._proc / str(process.pid) / "ns/mnt").stat().st_ino
                known = own != host_mount_namespace(self._proc)
            except OSError:
                known = False
            self._hidden[process.identity] = known
        return known

    def job_id(self, platform: Platform) -> str | None:
        """The identity of a platform's job; None while it is not known, and the job withheld."""
        if platform.kind is PlatformKind.KUBERNETES:
            return f"pod-{platform.id}"
        return self._slurm.job_id(platform.id)

    def allocations(self, devices: DeviceSnapshot | None) -> tuple[Allocation, ...]:
        """Which cards jobs hold now by their platforms' word.

        Args:
            devices: the node's cards.
        """
        return (*self._slurm.allocations(devices), *self._kubernetes.allocations(devices))

    def facts(self, group: Group) -> PlatformFacts:
        """What is known of a job beside its processes.

        Args:
            group: the job.
        """
        if group.platform.kind is PlatformKind.NONE:
            # All of such a job is in one cgroup.
            container = group.platform.container
            return PlatformFacts(containers=(container,)) if container else _NO_FACTS
        holders = group.on_cards.values() or group.tree
        containers = sorted({platform_of(item.cgroup).container for item in holders} - {""})
        facts = PlatformFacts(
            platform=group.platform.kind.value,
            number=group.platform.id,
            containers=tuple(containers[:MAX_CONTAINERS]),
        )
        if group.platform.kind is PlatformKind.KUBERNETES:
            pod = self._kubernetes.pod(group.platform.id)
            if pod is not None:
                return replace(facts, namespace=pod.namespace, name=pod.name)
        job = self._slurm.about(group.job_id)
        if job is None:
            return facts
        return replace(
            facts,
            number=str(job.job_id),
            cluster=job.cluster,
            partition=job.partition,
            account=job.account,
            submit_time=job.submit_time,
        )

    def close(self) -> None:
        """Let the threads that ask end."""
        for inquiry in self._inquiries:
            inquiry.close()


def _lives(identity: tuple[int, int], processes: Mapping[int, Process]) -> bool:
    process = processes.get(identity[0])
    return process is not None and process.identity == identity
