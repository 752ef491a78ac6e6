"""What the agent never touches, whoever asks."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from gpuwarden.errors import RefusedAction
from gpuwarden.exporter.cgroups import PlatformKind, platform_of
from gpuwarden.exporter.processes import (
    PROC,
    Launchers,
    Process,
    descendants,
    executable,
    executable_link,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULT_KILL_SWITCH = Path("/run/gpuwarden/halt")

NEVER = frozenset(
    {
        # container runtimes
        "containerd",
        "containerd-shim",
        "dockerd",
        "docker-proxy",
        "podman",
        "crio",
        "conmon",
        # platforms
        "slurmd",
        "slurmctld",
        "slurmstepd",
        "kubelet",
        # the system's own
        "init",
        "sshd",
        "sshd-session",
        "dbus-daemon",
        "dbus-broker",
        # the GPUs' own
        "nvidia-persistenced",
        "nv-hostengine",
        "dcgm-exporter",
        "nv-fabricmanager",
        "nvidia-cuda-mps-control",
        "nvidia-cuda-mps-server",
        # what people sit in front of: NVML lists it too, and it idles all day
        "Xorg",
        "Xwayland",
        "gnome-shell",
        "kwin_wayland",
        "kwin_x11",
        "plasmashell",
    }
)
NEVER_PREFIXES = ("systemd", "containerd-shim", "nvidia-cuda-mps-")

_COMM_LIMIT = 15
_INITIAL_PID_NAMESPACE = 0xEFFFFFFC  # PROC_PID_INIT_INO of the kernel's include/linux/proc_ns.h
_SCOPE = re.compile(r"(?!session-)(?!init\.scope)[^/]+\.scope")


@dataclass(frozen=True, slots=True)
class Guards:
    """The node's own rules; none of them can be lifted by a request.

    Attributes:
        protect: names (as /proc shows them) or absolute paths of executables that are left alone. A
            process chooses its name, so a name protects also those that only say so; a path counts
            only under the conditions of `processes.executable`.
        kill_switch: nothing is signalled while this file exists.
        proc: where procfs is mounted.
    """

    protect: frozenset[str] = frozenset()
    kill_switch: Path = DEFAULT_KILL_SWITCH
    proc: Path = PROC

    def check_kill_switch(self) -> None:
        """Go on only while the kill switch is known to be absent.

        Raises:
            RefusedAction: `kill_switch`.
        """
        try:
            self.kill_switch.lstat()
        except FileNotFoundError:
            return
        except OSError as error:
            raise RefusedAction(
                "kill_switch", f"{self.kill_switch} cannot be looked at: {error.strerror}"
            ) from error
        raise RefusedAction("kill_switch", f"{self.kill_switch} exists: remove it to allow actions")

    def check_pid_namespace(self) -> None:
        """Go on only in the host's PID namespace, where NVML's pids mean what they say.

        Raises:
            RefusedAction: `pid_namespace`.
        """
        try:
            own = (self.proc / "self/ns/pid").stat().st_ino
        except OSError as error:
            raise RefusedAction("pid_namespace", f"the PID namespace is unknown: {error}") from None
        if own != _INITIAL_PID_NAMESPACE:
            raise RefusedAction(
                "pid_namespace",
                "the agent is not in the host's PID namespace: run it on the host, or in a "
                "container with the host's (--pid=host, hostPID: true)",
            )

    def forbids(self, process: Process) -> str | None:
        """Why a process must never be signalled, for people; None if it may be."""
        if process.pid <= 2:
            return "the kernel's first processes are never touched"
        if process.uid == 0 and _in_service(process.cgroup):
            return f"root's service {process.cgroup} is never touched"
        # Whoever is not root may call himself what he likes; that must not protect him.
        if process.uid == 0 and _is_system(process.comm):
            return f"{process.comm} (pid {process.pid}) is part of the system"
        cut = {name.encode()[:_COMM_LIMIT].decode(errors="ignore") for name in self.protect}
        if process.comm in cut:
            return f"{process.comm} (pid {process.pid}) is on this node's protect list"
        return self._forbidden_program(process)

    def _forbidden_program(self, process: Process) -> str | None:
        # Only a path that would matter is looked at: a job's own files may be on a server that
        # hangs, and its processes are stopped while this is asked.
        link = executable_link(process.pid, self.proc).removesuffix(" (deleted)")
        protected = link in self.protect
        if not protected and not _is_system(PurePath(link).name):
            return None
        path = executable(process.pid, self.proc)
        if path == "":
            return None
        if path is None:
            return f"{link} (pid {process.pid}) cannot be told from what is never touched"
        if protected:
            return f"{process.comm} (pid {process.pid}) is on this node's protect list"
        return f"{process.comm} (pid {process.pid}) is part of the system"


def _is_system(name: str) -> bool:
    cut = {item[:_COMM_LIMIT] for item in NEVER}
    return name in NEVER or name in cut or name.startswith(NEVER_PREFIXES)


def _in_service(cgroup: str) -> bool:
    return any(part.endswith(".service") for part in PurePath(cgroup).parts)


def own_family(processes: Mapping[int, Process], pid: int | None = None) -> frozenset[int]:
    """Pids of the agent, its ancestors and its descendants."""
    own = os.getpid() if pid is None else pid
    family = {own, *descendants(processes, own)}
    at = processes.get(own)
    while at is not None and at.ppid not in family:
        family.add(at.ppid)
        at = processes.get(at.ppid)
    return frozenset(family)


def is_dedicated(processes: Mapping[int, Process], root: Process, *, launchers: Launchers) -> bool:
    """Whether the root's cgroup holds its job and nothing else, so that all in it may be ended.

    That is so for a container's and for a scope of its own, if the root is the oldest process there
    and no launcher is: a session's scope, a service's or the root group is shared.
    """
    name = PurePath(root.cgroup).name
    contained = bool(platform_of(root.cgroup).container)
    if not contained and not _SCOPE.fullmatch(name):
        return False
    return all(
        process.start_ticks >= root.start_ticks and (contained or not launchers.includes(process))
        for process in processes.values()
        if in_cgroup(process, root.cgroup) and not process.ended
    )


def in_cgroup(process: Process, cgroup: str) -> bool:
    """Whether a process is in a cgroup or below it."""
    return process.cgroup == cgroup or process.cgroup.startswith(f"{cgroup}/")


def kill_file(root: Process) -> Path | None:
    """The `cgroup.kill` of a process's cgroup v2, if it has one of its own."""
    for mount in (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified")):
        folder = mount / root.cgroup.lstrip("/")
        try:
            members = (folder / "cgroup.procs").read_text().split()
        except OSError:
            continue
        if (folder / "cgroup.kill").exists() and str(root.pid) in members:
            return folder / "cgroup.kill"
    return None


def check_platform(job_id: str, cgroup: str | None) -> None:
    """Go on only for a job that is this agent's to end.

    Raises:
        RefusedAction: `not_mine`.
    """
    if not job_id.startswith("proc-"):
        raise RefusedAction(
            "not_mine", f"{job_id} belongs to its platform: scancel or the pod's controller ends it"
        )
    if cgroup is not None and platform_of(cgroup).kind is not PlatformKind.NONE:
        raise RefusedAction(
            "not_mine", f"the job's processes are in {cgroup}, which belongs to a platform"
        )
