"""Cgroup paths, and what platforms make of them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache


class PlatformKind(StrEnum):
    """Who started a process."""

    NONE = "none"
    SLURM = "slurm"
    KUBERNETES = "kubernetes"


@dataclass(frozen=True, slots=True)
class Platform:
    """What a cgroup path tells of its process.

    Attributes:
        kind: the platform.
        id: Slurm's raw job id or SLUID, or the pod's uid with dashes; empty for no platform. Slurm
            reuses an id for another cluster and another attempt: it does not name a job alone.
        container: id of the container, or an empty string.
    """

    kind: PlatformKind = PlatformKind.NONE
    id: str = ""
    container: str = ""


# Anchored at the top: a user may create cgroups of any name, but only below a slice of their own.
_SLURM = re.compile(
    r"/slurm(?:_[A-Za-z0-9._-]+)?/uid_[0-9]+/job_(?P<v1>[0-9]{1,12})(?:/|$)"
    r"|(?:/system\.slice)?/(?:[A-Za-z0-9._-]+_)?slurmstepd\.scope"
    r"/(?:job_(?P<v2>[0-9]{1,12})|(?P<sluid>s[0-9A-HJKMNP-TV-Z]{13}))(?:/|$)"
)
_POD = re.compile(
    r"(?:^|[/:-])kubepods[^:]*?[/-]pod"
    r"(?P<uid>[0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12}"
    r"|[0-9a-f]{32})(?:\.slice)?(?=[/:]|$)"
)
_ABOVE = re.compile(r"^(?:/\.\.)+(?=/|$)")
_CONTAINER = re.compile(r"[/:-](?P<id>[0-9a-f]{64})(?:\.scope)?(?:/|$)")


@lru_cache(maxsize=4096)
def platform_of(cgroup: str) -> Platform:
    """Platform of a process, by its cgroup; NONE where the path names none."""
    # Seen from within a cgroup namespace, what is outside begins at the namespace's root.
    cgroup = _ABOVE.sub("", cgroup)
    # What is below a user's slice was named by that user (delegation, rootless containers).
    if cgroup.startswith("/user.slice"):
        return Platform()
    slurm = _SLURM.match(cgroup)
    if slurm is not None:
        return Platform(PlatformKind.SLURM, slurm["v1"] or slurm["v2"] or slurm["sluid"])
    pod = _POD.search(cgroup)
    # The outermost that the platform itself made: what lies below it may be its user's own.
    container = _CONTAINER.search(cgroup, pod.end() if pod is not None else 0)
    inside = container["id"] if container is not None else ""
    if pod is not None:
        return Platform(PlatformKind.KUBERNETES, pod["uid"].replace("_", "-"), inside)
    return Platform(container=inside)


@lru_cache(maxsize=2048)
def own_cgroup(content: bytes) -> str:
    """The path that says most of `/proc/<pid>/cgroup`.

    A path that names a platform, else the v2 path, else (v1) the longest; a path of the root group
    is `/`, and no line at all gives an empty string.
    """
    unified, others = "", []
    # Only what ends a line for the kernel: a cgroup's name may hold whatever else Unicode ends one
    # with, and what follows would be read as the path of another cgroup.
    for line in content.decode(errors="replace").split("\n"):
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0" and not controllers:
            unified = path
        elif path:
            others.append(path)
    paths = [unified, *sorted(others, key=len, reverse=True)]
    for path in paths:
        if platform_of(path).kind is not PlatformKind.NONE:
            return path
    if unified and unified != "/":
        return unified
    return max(paths, key=len)
