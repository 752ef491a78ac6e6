"""This node's kubelet: which pods there are, and which devices it gave them.

Names come from the folders of /var/log/pods, which need no right in the cluster and no server; the
devices from the kubelet's own socket. That speaks gRPC, one call of which is little more than one
request of HTTP/2: gpuwarden[kubelet] brings h2 for it, and no gRPC runtime with its threads.
"""

from __future__ import annotations

import importlib.util
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

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
_logger = structlog.get_logger(__name__)

_CGROUP = re.compile(r"(?:kubelet(?:\.slice)?|.*kubepods.*|pod[0-9a-f_-]{32,36})")


@dataclass(frozen=True, slots=True)
class KubeletView:
    """What a node tells of its pods.

    Attributes:
        pods: uid -> name, of all whose logs are kept: some of them have ended.
        alive: uids of pods that have a cgroup; None where none can be seen, as from within a pod.
        devices: what containers were given; empty where the kubelet does not tell.
        problem: why the kubelet does not tell, or None.
    """

    pods: Mapping[str, Pod] = field(default_factory=dict)
    alive: frozenset[str] | None = None
    devices: tuple[PodDevices, ...] = ()
    problem: str | None = None


def detect() -> bool:
    """Whether this host is a node of Kubernetes."""
    return SOCKET.exists() or LOGS.is_dir()


@dataclass(frozen=True, slots=True)
class KubeletQuestions:
    """Asks the node; used by one thread.

    Attributes:
        socket: of the pod-resources API; without one only names are told.
        logs: where the kubelet keeps its pods' logs.
        cgroups: where cgroups are mounted; the first that has any of Kubernetes counts.
    """

    socket: Path | None = SOCKET
    logs: Path = LOGS
    cgroups: tuple[Path, ...] = CGROUPS

    def ask(self) -> KubeletView:
        """What the node tells now; names also where the kubelet does not answer.

        Raises:
            OSError: the pods' logs may not be listed.
        """
        pods, alive = self._names(), self._alive()
        try:
            if self.socket is None or not self.socket.exists():
                return KubeletView(pods, alive)
            return KubeletView(pods, alive, kubelet.decode_list(_list_devices(self.socket)))
        except PermissionError:
            problem = f"{self.socket} is root's; run as root, or --no-collector.kubernetes"
        except ServiceUnavailable as error:
            problem = str(error)
        return KubeletView(pods, alive, problem=problem)

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


def questions() -> KubeletQuestions:
    """What this installation can ask: of devices only with the extra for it."""
    if importlib.util.find_spec("h2") is not None:
        return KubeletQuestions()
    if SOCKET.exists():
        _logger.warning(
            "cards of pods without a process are not seen: pip install 'gpuwarden[kubelet]'"
        )
    return KubeletQuestions(socket=None)


def _list_devices(path: Path) -> bytes:
    from gpuwarden.exporter import grpc_calls  # noqa: PLC0415 (an extra of its own)

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
