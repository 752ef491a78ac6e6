"""Containers and pods by the paths of their cgroups, as each runtime writes them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.exporter.cgroups import PlatformKind, own_cgroup, platform_of

POD = "0b9e4f0c-1111-2222-3333-444455556666"
POD_ = POD.replace("-", "_")
STATIC = "0123456789abcdef0123456789abcdef"
ID, OTHER = "ab" * 32, "cd" * 32
INSIDE = "kubelet-kubepods"
KIND = f"/system.slice/docker-{OTHER}.scope/kubelet.slice/{INSIDE}.slice/{INSIDE}"
BURSTABLE = f"kubepods-burstable.slice/kubepods-burstable-pod{POD_}.slice"


@pytest.mark.parametrize(
    "cgroup",
    [
        f"/docker/{ID}",
        f"/system.slice/docker-{ID}.scope",
        f"/system.slice/docker-{ID}.scope/init",
        f"/../../docker/{ID}",
        f"/machine.slice/libpod-{ID}.scope/container",
        f"/machine.slice/libpod-{ID}.scope",
        f"/libpod_parent/libpod-{ID}",
        f"/system.slice/nerdctl-{ID}.scope",
        f"/default/{ID}",
        f"/ecs/0123456789/{ID}",
        f"/docker/{ID}/docker/{OTHER}",
        f"/../cri-containerd-{ID}.scope",
    ],
)
def test_containers_of_no_pod(cgroup: str) -> None:
    """Docker, podman, containerd, and what is started within them: the outermost counts."""
    platform = platform_of(cgroup)
    assert (platform.kind, platform.id, platform.container) == (PlatformKind.NONE, "", ID)


@pytest.mark.parametrize(
    ("cgroup", "uid"),
    [
        (f"/kubepods/burstable/pod{POD}/{ID}", POD),
        (f"/kubepods/pod{POD}/{ID}", POD),
        (f"/kubepods.slice/{BURSTABLE}/cri-containerd-{ID}.scope", POD),
        (f"/kubepods.slice/{BURSTABLE}/crio-{ID}.scope", POD),
        (f"/kubepods.slice/{BURSTABLE}/crio-{ID}.scope/container", POD),
        (f"/kubepods.slice/{BURSTABLE}/docker-{ID}.scope", POD),
        (f"/kubepods.slice/kubepods-pod{POD_}.slice/cri-containerd-{ID}.scope", POD),
        (f"/kubepods.slice/kubepods-pod{STATIC}.slice/cri-containerd-{ID}.scope", STATIC),
        (f"/../../kubepods.slice/{BURSTABLE}/cri-containerd-{ID}.scope", POD),
        (f"/../../kubepods-burstable-pod{POD_}.slice/cri-containerd-{ID}.scope", POD),
        (f"/system.slice/containerd.service/kubepods-pod{POD_}.slice:cri-containerd:{ID}", POD),
        # A node that is a container itself (kind), and a container in a pod.
        (
            f"/docker/{OTHER}/kubelet/kubepods/besteffort/pod{POD}/{ID}",
            POD,
        ),
        (
            f"{KIND}-x.slice/{INSIDE}-x-pod{POD_}.slice/cri-containerd-{ID}.scope",
            POD,
        ),
        (f"/kubepods/pod{POD}/{ID}/docker/{OTHER}", POD),
    ],
)
def test_containers_of_pods(cgroup: str, uid: str) -> None:
    """Each runtime, cgroup driver and class of service: the pod, and its own container."""
    platform = platform_of(cgroup)
    assert (platform.kind, platform.id, platform.container) == (PlatformKind.KUBERNETES, uid, ID)


@pytest.mark.parametrize(
    "cgroup",
    [
        f"/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{ID}.scope/container",
        f"/../../user.slice/user-1000.slice/user@1000.service/docker-{ID}.scope",
        f"/docker/{ID[:-1]}",
        f"/docker/{ID}0",
        "/",
        "/..",
        "",
        "/docker/not-an-id",
    ],
)
def test_what_proves_nothing(cgroup: str) -> None:
    """Cgroups that users may name as they like are no containers; neither are other words."""
    platform = platform_of(cgroup)
    assert (platform.kind, platform.container) == (PlatformKind.NONE, "")


@pytest.mark.parametrize(
    ("cgroup", "name"),
    [
        ("/../../system.slice/slurmstepd.scope/job_7/step_0", "7"),
        ("/system.slice/gpu_node_1_slurmstepd.scope/job_7/step_0", "7"),
        ("/system.slice/slurmstepd.scope/job_7", "7"),
    ],
)
def test_slurm(cgroup: str, name: str) -> None:
    """A node's name may hold what separates it from the scope's."""
    assert (platform_of(cgroup).kind, platform_of(cgroup).id) == (PlatformKind.SLURM, name)


@given(st.text(st.sampled_from("/.-_:ab0slurmkubepodjob_uid1docker\n"), max_size=200))
def test_any_path(path: str) -> None:
    """Whatever a path is, it names at most one platform, and never an empty one."""
    platform = platform_of(path)
    assert bool(platform.id) is (platform.kind is not PlatformKind.NONE)
    assert own_cgroup(f"0::{path}".encode()) is not None
