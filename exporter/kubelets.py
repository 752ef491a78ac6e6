"""This node's kubelet: which pods there are, and which devices it gave them.

Names come from the folders of /var/log/pods, which need no right in the cluster and no server; the
devices from the kubelet's own socket. That speaks gRPC, one call of which is little more than one
request of HTTP/2: gpuwarden[kubelet] brings h2 for it, and no gRPC runtime with its threads.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from gpuwarden.errors import ServiceUnavailable
from gpuwarden.exporter.cgroups import PlatformKind, platform_of
from gpuwarden.platforms import kubelet

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from gpuwarden.platforms.kubelet import Pod, PodDevices

SOCKET = Path("/var/lib/kubelet/pod-resources/kubelet.sock")
LOGS = Path("/var/log/pods")
CGROUPS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup/pids"))
MAX_FOLDERS = 20_000
_CGROUP = re.compile(r"(?:kubelet(?:\.slice)?|.*kubepods.*|pod[0-9a-f_-]{32,36})")


@dataclass(frozen=True, slots=True)
class KubeletView:
    """What a node tells of its pods.

    Attributes:
        pods: uid -> name, of all whose logs are kept: some of them have ended.
        alive: uids of pods that have a cgroup; None where none can be seen.
        devices: what containers were given; empty where the kubelet does not tell.
    """

    pods: Mapping[str, Pod] = field(default_factory=dict)
    alive: frozenset[str] | None = None
    devices: tuple[PodDevices, ...] = ()


def detect() -> bool:
    """Whether this host is a node of Kubernetes."""
    return SOCKET.exists() or LOGS.is_dir()


@dataclass(frozen=True, slots=True)
class KubeletQuestions:
    """Asks the node; used by one thread.

    Attributes:
        socket: of the pod-resources API; where there is none, only names are told.
        logs: where the kubelet keeps its pods' logs.
        cgroups: where cgroups are mounted; the first that has any of Kubernetes counts.
    """

    socket: Path = SOCKET
    logs: Path = LOGS
    cgroups: tuple[Path, ...] = CGROUPS

    def ask(self) -> KubeletView:
        """What the node tells now.

        Raises:
            ServiceUnavailable: the kubelet does not answer, or not usefully.
            OSError: the pods' logs may not be listed.
        """
        pods = self._names()
        devices: tuple[PodDevices, ...] = ()
        if self.socket.exists():
            devices = kubelet.decode_list(_list_devices(self.socket))
        return KubeletView(pods=pods, alive=self._alive(), devices=devices)

    def _names(self) -> dict[str, Pod]:
        found: dict[str, Pod] = {}
        try:
            with os.scandir(self.logs) as entries:
                for number, entry in enumerate(entries):
                    told = kubelet.decode_log_folder(entry.name)
                    if told is not None:
                        found[told[0]] = told[1]
                    if number >= MAX_FOLDERS:
                        break
        except FileNotFoundError:
            return {}
        return found

    def _alive(self) -> frozenset[str] | None:
        for root in self.cgroups:
            found = frozenset(_pods_below(root, depth=5))
            if found:
                return found
        return None


def _list_devices(path: Path) -> bytes:
    try:
        from gpuwarden.exporter import grpc_calls  # noqa: PLC0415 (an extra of its own)
    except ModuleNotFoundError as error:
        raise ServiceUnavailable(
            "the kubelet's socket needs the module h2: pip install 'gpuwarden[kubelet]', or "
            "--no-collector.kubernetes"
        ) from error
    return grpc_calls.call(path, kubelet.LIST_METHOD)


def _pods_below(folder: Path, *, depth: int, path: str = "") -> Iterator[str]:
    """Uids of the pods that have a cgroup below a folder."""
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return
    for name in names:
        if not _CGROUP.fullmatch(name):
            continue
        inside = f"{path}/{name}"
        platform = platform_of(inside)
        if platform.kind is PlatformKind.KUBERNETES:
            yield platform.id
        elif depth > 1:
            yield from _pods_below(folder / name, depth=depth - 1, path=inside)
