"""A fake kubelet: the pods of the fake cluster are real local processes.

Each container is a process, in cgroups as a node's container runtime makes them where this machine
lets us make any, so that exporter and agent see the job `pod-<uid>`. A pod that is told to go gets
SIGTERM (its container's first process only, as in a cluster), after its grace all of its processes
get SIGKILL, and its object goes when the last of them is gone::

    with node(folder) as kubelet:
        pod = kubelet.start_pod("lab", "train", [sys.executable, "train.py"], gpus=1, grace=30)
        pod.job_id, pod.pids()
        platform = Kubernetes.from_settings(kubelet.cluster.settings(), folder)
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests import kubernetes_manifests as manifests
from tests.kubernetes_servers import Cluster, kubernetes
from tests.servers import until

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tests.kubernetes_store import Json

NODE = "node1"
_MOUNTS = ("", "unified", "freezer", "systemd")
_LOOK_SECONDS = 0.05
# A shell enters the cgroup before it becomes the container's process: none of its children escape.
_ENTER = 'echo $$ > "$0" && exec "$@"'


def cgroup_mount() -> Path | None:
    """Where cgroups can be made, if anywhere: v2, or a hierarchy of v1."""
    for name in _MOUNTS:
        mount = Path("/sys/fs/cgroup") / name
        if (mount / "cgroup.procs").exists() and os.access(mount, os.W_OK):
            return mount
    return None


@dataclass
class RunningPod:
    """A pod as a test sees it."""

    namespace: str
    name: str
    uid: str
    process: subprocess.Popen[bytes]
    cgroup: Path | None
    grace: float
    log: Path
    told_at: float | None = None
    killed: bool = False

    @property
    def job_id(self) -> str:
        """As the exporter names it."""
        return f"pod-{self.uid}"

    @property
    def pid(self) -> int:
        """Of the container's first process."""
        return self.process.pid

    def pids(self) -> tuple[int, ...]:
        """All processes of it that there are; without cgroups, the first one's group."""
        if self.cgroup is None:
            return (self.pid,) if self.process.poll() is None else ()
        with contextlib.suppress(OSError):
            return tuple(sorted(map(int, (self.cgroup / "cgroup.procs").read_text().split())))
        return ()

    def kill(self) -> None:
        """What a runtime does when the grace is over, or the first process has ended."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@dataclass
class Kubelet:
    """A node of the fake cluster, whose pods are processes.

    Attributes:
        cluster: the API server.
        folder: for logs.
        environment: of all containers, beside their own.
        pods: by uid, also those that have ended.
    """

    cluster: Cluster
    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    pods: dict[str, RunningPod] = field(default_factory=dict)
    _stop: threading.Event = field(default_factory=threading.Event)
    _frozen: threading.Event = field(default_factory=threading.Event)
    _root: Path | None = None

    def start_pod(
        self,
        namespace: str,
        name: str,
        argv: Sequence[str],
        *,
        gpus: int = 1,
        grace: int = 30,
        env: Mapping[str, str] | None = None,
    ) -> RunningPod:
        """Run a pod that nothing manages."""
        body = manifests.pod(name, *argv, gpus=gpus, grace=grace, **_environment(env))
        made = self.cluster.create("Pod", namespace, body)
        return self.running(made["metadata"]["uid"])

    def start_job(
        self,
        namespace: str,
        name: str,
        argv: Sequence[str],
        *,
        gpus: int = 1,
        grace: int = 30,
        env: Mapping[str, str] | None = None,
    ) -> RunningPod:
        """Run a Job of one pod."""
        body = manifests.job(name, *argv, gpus=gpus, grace=grace, **_environment(env))
        return self.pods_of(self.cluster.create("Job", namespace, body))[0]

    def pods_of(self, owner: Json) -> list[RunningPod]:
        """The pods that an object manages itself, once they run."""
        uid = owner["metadata"]["uid"]

        def found() -> list[RunningPod]:
            own = [
                pod["metadata"]["uid"]
                for pod in self.cluster.pods(owner["metadata"]["namespace"])
                if uid in {ref["uid"] for ref in pod["metadata"].get("ownerReferences", ())}
                and "deletionTimestamp" not in pod["metadata"]
            ]
            return [self.running(one) for one in own]

        return until(found)

    def running(self, uid: str) -> RunningPod:
        """A pod, once it runs."""
        return until(lambda: self.pods.get(uid))

    def freeze(self) -> None:
        """Stop looking: told pods go on, as on a node whose kubelet is down."""
        self._frozen.set()

    def thaw(self) -> None:
        """Go on."""
        self._frozen.clear()

    # -----------------------------------------------------------------------------------------

    def begin(self) -> threading.Thread:
        """Look after pods until `end`."""
        mount = cgroup_mount()
        if mount is not None:
            self._root = mount / f"gwtest-{secrets.token_hex(4)}"
        thread = threading.Thread(target=self._run, name="fake kubelet")
        thread.start()
        return thread

    def end(self, thread: threading.Thread) -> None:
        """End every process."""
        self._stop.set()
        thread.join(30)
        for pod in self.pods.values():
            pod.kill()
            pod.process.wait(10)
            self._clean(pod)
        if self._root is not None:
            for left in (self._root / "kubepods.slice", self._root):
                with contextlib.suppress(OSError):
                    left.rmdir()

    def _run(self) -> None:
        while not self._stop.wait(_LOOK_SECONDS):
            if not self._frozen.is_set():
                self._look()

    def _look(self) -> None:
        seen = set()
        for pod in self.cluster.store.all("Pod"):
            metadata, uid = pod["metadata"], pod["metadata"]["uid"]
            if pod["spec"].get("nodeName") != NODE:
                continue
            seen.add(uid)
            if uid not in self.pods and "deletionTimestamp" not in metadata:
                self._start(pod)
            elif uid not in self.pods:
                self.cluster.store.remove("Pod", metadata["namespace"], metadata["name"], uid)
            elif pod["status"]["phase"] not in ("Succeeded", "Failed") or (
                "deletionTimestamp" in metadata
            ):
                self._tend(self.pods[uid], metadata)
        for uid, gone in self.pods.items():
            # An object that was removed by force: a kubelet ends what it no longer knows.
            if uid not in seen and gone.pids():
                gone.killed = True
                gone.kill()

    def _start(self, pod: Json) -> None:
        metadata, spec = pod["metadata"], pod["spec"]
        container, uid = spec["containers"][0], metadata["uid"]
        argv = [*container["command"], *container.get("args", ())]
        cgroup = None
        if self._root is not None:
            slice_ = f"kubepods-pod{uid.replace('-', '_')}.slice"
            cgroup = self._root / "kubepods.slice" / slice_ / (
                f"cri-containerd-{secrets.token_hex(32)}.scope"
            )  # fmt: skip
            cgroup.mkdir(parents=True)
            argv = ["sh", "-c", _ENTER, str(cgroup / "cgroup.procs"), *argv]
        own = {item["name"]: item["value"] for item in container.get("env", ())}
        log = self.folder / f"{metadata['namespace']}_{metadata['name']}_{uid}.log"
        with log.open("ab") as out:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**os.environ, **self.environment, **own},
                start_new_session=True,
            )
        grace = float(spec["terminationGracePeriodSeconds"])
        running = RunningPod(
            metadata["namespace"], metadata["name"], uid, process, cgroup, grace, log
        )
        if cgroup is not None:
            # Only once it is the container's own process does anybody see it.
            until(lambda: running.pid in running.pids() or process.poll() is not None, 30)
        self.pods[uid] = running
        self.cluster.store.status("Pod", running.namespace, running.name, phase="Running")

    def _tend(self, pod: RunningPod, metadata: Json) -> None:
        told = "deletionTimestamp" in metadata
        status = pod.process.poll()
        if told and pod.told_at is None and status is None:
            pod.told_at = time.monotonic()
            pod.grace = float(metadata["deletionGracePeriodSeconds"])
            pod.process.send_signal(signal.SIGTERM)
        if pod.told_at is not None and status is None:
            pod.grace = min(pod.grace, float(metadata.get("deletionGracePeriodSeconds", pod.grace)))
            if time.monotonic() - pod.told_at < pod.grace:
                return
        elif status is None:
            return
        if status is None or pod.pids():
            # The rest of a container ends with its first process.
            pod.killed = True
            pod.kill()
            return
        phase = "Succeeded" if status == 0 else "Failed"
        self.cluster.store.status("Pod", pod.namespace, pod.name, phase=phase)
        if told:
            self.cluster.store.remove("Pod", pod.namespace, pod.name, pod.uid)
        self._clean(pod)

    def _clean(self, pod: RunningPod) -> None:
        if pod.cgroup is None:
            return
        with contextlib.suppress(TimeoutError):
            until(lambda: not pod.pids(), 10)
        for left in (pod.cgroup, pod.cgroup.parent):
            with contextlib.suppress(OSError):
                left.rmdir()


def _environment(env: Mapping[str, str] | None) -> dict[str, Any]:
    return {"env": [{"name": name, "value": value} for name, value in (env or {}).items()]}


@contextlib.contextmanager
def node(folder: Path, *, gpus: int = 8) -> Iterator[Kubelet]:
    """A fake cluster of one node, whose pods are processes.

    Args:
        folder: for the kubeconfig and logs.
        gpus: cards of the node.
    """
    with kubernetes(folder) as cluster:
        cluster.node(NODE, gpus=gpus)
        kubelet = Kubelet(cluster, folder)
        thread = kubelet.begin()
        try:
            yield kubelet
        finally:
            kubelet.end(thread)
