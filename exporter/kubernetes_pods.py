"""Names of pods, and the cards that the kubelet gave them.

A pod is its uid: that is in its cgroup, and is its job's name. Its namespace and name are for
people, and the kubelet's list of devices knows only them.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

import structlog

from gpuwarden.exporter.allocations import Allocation, DeviceFiles, known_uuids
from gpuwarden.exporter.cgroups import Platform, PlatformKind, platform_of
from gpuwarden.exporter.processes import PROC

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping
    from pathlib import Path

    from gpuwarden.clock import Clock
    from gpuwarden.exporter.devices import DeviceSnapshot
    from gpuwarden.exporter.inquiries import Inquiry
    from gpuwarden.exporter.kubelets import KubeletView
    from gpuwarden.exporter.processes import Process
    from gpuwarden.platforms.kubelet import Pod, PodDevices

FRESH_SECONDS = 60.0
"""An answer that is older does not tell who has a card now."""

_logger = structlog.get_logger(__name__)

_GPU_RESOURCE = re.compile(
    r"(?:nvidia\.com/(?:gpu|mig-)|gpu\.nvidia\.com$|compute-domain).*", re.IGNORECASE
)
_REPLICA = re.compile(r"(?P<uuid>(?:GPU|MIG)-[0-9A-Za-z/-]+)(?:::[0-9]+)?")
_MINOR = re.compile(r"(?:nvidia|gpu-)(?P<minor>[0-9]{1,4})")
_INDEX = re.compile(r"[0-9]{1,4}")


class KubernetesPods:
    """Names and cards of this node's pods; used by the thread that takes snapshots."""

    def __init__(
        self, inquiry: Inquiry[KubeletView] | None, *, clock: Clock, proc: Path = PROC
    ) -> None:
        """Begin knowing nobody.

        Args:
            inquiry: asks the node; None: nobody is asked, and pods have no names.
            clock: for the age of answers.
            proc: where procfs is mounted.
        """
        self._inquiry = inquiry
        self._clock = clock
        self._files = DeviceFiles(proc)
        self._said: str | None = None
        self._running: frozenset[str] | None = None
        self.dropped: Counter[str] = Counter()

    @property
    def failed(self) -> bool:
        """Whether the node or its kubelet does not answer, or has not yet."""
        if self._inquiry is None:
            return False
        return self._problem is not None or not self._inquiry.current(FRESH_SECONDS)

    @property
    def _problem(self) -> str | None:
        if self._inquiry is None or self._inquiry.problem is not None:
            return None if self._inquiry is None else self._inquiry.problem
        told = self._inquiry.told
        return None if told is None else told.value.problem

    def update(self, uids: Iterable[str], processes: Mapping[int, Process]) -> None:
        """Have the node asked where a pod has no name yet.

        Args:
            uids: of pods that use a card.
            processes: all processes, by pid.
        """
        self.dropped = Counter()
        if self._inquiry is None:
            return
        self._running = None
        if self._inquiry.told is not None and self._inquiry.told.value.alive is None:
            # An exporter in a pod sees no cgroups but its own: there a pod lives by its processes.
            self._running = _running(processes)
        if self._problem != self._said:
            self._said = self._problem
            if self._said is not None:
                _logger.warning("the kubelet does not tell of devices", error=self._said)
        told = self._inquiry.told
        if told is None or any(uid not in told.value.pods for uid in uids):
            self._inquiry.want()

    def pod(self, uid: str) -> Pod | None:
        """A pod's name; None while it is not known."""
        told = self._inquiry.told if self._inquiry is not None else None
        return told.value.pods.get(uid) if told is not None else None

    def allocations(self, devices: DeviceSnapshot | None) -> tuple[Allocation, ...]:
        """Which cards pods hold now by the kubelet's word.

        Args:
            devices: the node's cards.
        """
        if self._inquiry is None or self._inquiry.told is None:
            return ()
        told = self._inquiry.told
        if self._clock.monotonic() - told.asked_at > FRESH_SECONDS:
            return ()
        alive = told.value.alive if told.value.alive is not None else self._running
        if alive is None:
            # The answer came after these processes were read.
            return ()
        uids = _uids(told.value, alive)
        given: dict[str, set[str]] = {}
        for item in told.value.devices:
            if not _GPU_RESOURCE.match(item.resource):
                continue
            candidates = uids.get(item.pod, ())
            if len(candidates) != 1:
                # Its folder is not there yet, or pods of one name follow one another.
                self.dropped["kubernetes_pod"] += 1
                continue
            given.setdefault(candidates[0], set()).update(self._uuids(item, devices))
        return tuple(
            Allocation(
                job_id=f"pod-{uid}",
                platform=Platform(PlatformKind.KUBERNETES, uid),
                uuids=frozenset(uuids),
            )
            for uid, uuids in given.items()
            if uuids
        )

    def _uuids(self, item: PodDevices, devices: DeviceSnapshot | None) -> set[str]:
        """Cards by what their plugin calls them: UUIDs, numbers of device files, or indexes."""
        known, minors = known_uuids(devices), self._files.uuids(devices)
        indexes = {gpu.index: gpu.uuid for gpu in devices.gpus} if devices is not None else {}
        found = set()
        for name in item.ids:
            uuid = None
            if match := _REPLICA.fullmatch(name):
                uuid = match["uuid"]
            elif match := _MINOR.fullmatch(name):
                uuid = minors.get(int(match["minor"]))
            elif _INDEX.fullmatch(name):
                uuid = indexes.get(int(name))
            if uuid in known:
                found.add(uuid)
            else:
                self.dropped["kubernetes_device"] += 1
        return found


def _running(processes: Mapping[int, Process]) -> frozenset[str]:
    """Uids of the pods that have a process; each has one for as long as it lives."""
    found = set()
    for process in processes.values():
        platform = platform_of(process.cgroup)
        if platform.kind is PlatformKind.KUBERNETES and not process.ended:
            found.add(platform.id)
    return frozenset(found)


def _uids(view: KubeletView, alive: Collection[str]) -> Mapping[Pod, list[str]]:
    """Name -> uids of the pods that bear it now."""
    found: dict[Pod, list[str]] = {}
    for uid, pod in view.pods.items():
        if uid in alive:
            found.setdefault(pod, []).append(uid)
    return found
