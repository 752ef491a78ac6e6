"""Rounds of the driver on the fake cluster, and what its jobs do meanwhile."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.kueue_controllers import pods_of, stamp
from tests.scheduling.kueue.clusters import Scene, scene
from tests.scheduling.kueue.engines import Engine, engine
from tests.scheduling.policy_files import DIGEST
from tests.servers import until

from gpuwarden.scheduling.drivers import Context
from gpuwarden.scheduling.kueue.driver import KueueDriver
from gpuwarden.scheduling.kueue.leavings import Leaving
from gpuwarden.scheduling.kueue.names import LEAVE_ANNOTATION
from gpuwarden.scheduling.kueue.submitters import KueueSubmitter
from gpuwarden.scheduling.tasks import Task

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.kubernetes_store import Json

    from gpuwarden.schedule_api import Preemption, QueueEntry
    from gpuwarden.scheduling.policies import Policy


@dataclass
class Life:
    """A driver, its engine and its cluster.

    Attributes:
        scene: the cluster.
        engine: that is asked.
        folder: of the driver's state.
        asks: whether the driver is given the engine.
        prometheus: address that it is given, or None.
        wake: that it calls for a round.
        driver: at work, or None where it was killed.
    """

    scene: Scene
    engine: Engine
    folder: Path
    asks: bool = True
    prometheus: str | None = None
    wake: Callable[[], None] = lambda: None
    driver: KueueDriver | None = None
    drivers: list[KueueDriver] = field(default_factory=list)
    count: int = 0

    def begin(self, policy: Policy | None = None) -> KueueDriver:
        """Start a driver, beside whichever there are."""
        context = Context(
            state=self.folder,
            clock=self.scene.time,
            wake=self.wake,
            leaves=self.engine.url if self.asks else None,
            leaves_token=self.engine.token_file if self.asks else None,
            prometheus=self.prometheus,
        )
        driver = KueueDriver(policy or self.scene.policy, context)
        driver.start(self.scene.time.now)
        self.drivers.append(driver)
        return driver

    def kill(self) -> None:
        """End the driver as a crash does: nothing is released; another one has another name."""
        if self.driver is not None:
            # What a crashed one held, it holds until the Lease is over.
            self.driver.stop()
            self.driver = None

    def tick(self, times: int = 1, *, seconds: float = 1.0) -> None:
        """Rounds, each with what the cluster is then."""
        for _ in range(times):
            if self.driver is None:
                self.driver = self.begin()
            self.scene.time.pass_(seconds)
            self.scene.kick()
            self.caught_up(self.driver)
            self.driver.tick(self.scene.time.now)

    def caught_up(self, driver: KueueDriver) -> None:
        """Wait until a driver has heard of everything."""
        store = self.scene.cluster.store
        controller = driver._controller
        if controller is None:
            return
        kinds = {
            "workloads": "Workload",
            "jobs": "Job",
            "pods": "Pod",
            "queues": "ClusterQueue",
            "cohorts": "Cohort",
            "checks": "AdmissionCheck",
        }

        def same() -> bool:
            for name, kind in kinds.items():
                seen = {_version(item) for item in controller._mirrors[name].objects()}
                if seen != {_version(item) for item in store.all(kind)}:
                    return False
            nodes = {_ready(item) for item in controller._mirrors["nodes"].objects()}
            return nodes == {_ready(item) for item in store.all("Node")}

        until(same)

    # -- jobs

    def submit(self, name: str, priority: str = "low", *, team: str = "vision", **more: Any) -> str:
        """Submit a task; its id."""
        self.count += 1
        token = f"{self.count:08x}" + "0" * 8
        base: dict[str, Any] = {
            "name": name,
            "run_id": name,
            "words": ("model=yolov8n",),
            "user": "ana",
            "team": team,
            "priority": priority,
            "gpus": 1,
            "directory": "/work",
            "image": f"registry.example.com/yolo@{DIGEST}",
            "epoch_seconds": 60.0,
            "save_seconds": 5.0,
        }
        task = Task(**(base | more))
        found = KueueSubmitter(self.scene.policy).submit(task, token=token)
        self.scene.time.pass_(1.0)
        return found.id

    def run(self, name: str, priority: str = "low", **more: Any) -> str:
        """Submit a task and have its pods run."""
        found = self.submit(name, priority, **more)
        self.start_pods()
        return found

    def start_pods(self) -> None:
        """Every pod on a node begins to train."""
        store, moment = self.scene.cluster.store, stamp(self.scene.time.now)
        for pod in store.all("Pod"):
            metadata = pod["metadata"]
            if pod["status"]["phase"] == "Pending" and pod["spec"].get("nodeName"):
                store.status(
                    "Pod",
                    metadata["namespace"],
                    metadata["name"],
                    phase="Running",
                    startTime=moment,
                    containerStatuses=[{"state": {"running": {"startedAt": moment}}}],
                )

    def end(self, job: str, code: int) -> None:
        """A job's trainings end with a status."""
        store, moment = self.scene.cluster.store, stamp(self.scene.time.now)
        for pod in self.pods(job):
            metadata = pod["metadata"]
            state = {"exitCode": code, "startedAt": pod["status"].get("startTime") or moment}
            store.status(
                "Pod",
                metadata["namespace"],
                metadata["name"],
                phase="Failed" if code else "Succeeded",
                containerStatuses=[{"state": {"terminated": {**state, "finishedAt": moment}}}],
            )

    def let_go(self) -> None:
        """Pods that were told to go are gone."""
        self.scene.cluster.let_go()

    def pods(self, job: str) -> list[Json]:
        """The pods of a job that are there."""
        space, name = job.split("/")
        return pods_of(self.scene.cluster.store, self.scene.cluster.get("Job", name, space))

    def workload(self, job: str) -> Json:
        """The Workload of a job."""
        space, name = job.split("/")
        return next(
            item
            for item in self.scene.cluster.store.all("Workload")
            if item["metadata"]["namespace"] == space
            and item["metadata"]["ownerReferences"][0]["name"] == name
        )

    def active(self, job: str) -> bool:
        """Whether a job may run."""
        return bool(self.workload(job)["spec"]["active"])

    def leaving(self, job: str) -> Leaving | None:
        """What is noted on a job."""
        return Leaving.decode(
            self.workload(job)["metadata"].get("annotations", {}).get(LEAVE_ANNOTATION)
        )

    def running(self) -> set[str]:
        """Jobs that hold cards."""
        return {
            f"{pod['metadata']['namespace']}/{pod['metadata']['ownerReferences'][0]['name']}"
            for pod in self.scene.cluster.store.all("Pod")
            if pod["status"]["phase"] not in ("Succeeded", "Failed")
        }

    def entry(self, job: str) -> QueueEntry:
        """A job as the queue shows it."""
        assert self.driver is not None
        return next(each for each in self.driver.entries() if each.id == job)

    def preemption(self, victim: str) -> Preemption:
        """The newest preemption of a job."""
        assert self.driver is not None
        return [each for each in self.driver.preemptions() if each.victim == victim][-1]

    def codes(self) -> set[str]:
        """Problems by their codes."""
        assert self.driver is not None
        return {each.code for each in self.driver.problems()}


@contextlib.contextmanager
def life(folder: Path, policy: Policy, *, asks: bool = True) -> Iterator[Life]:
    """A cluster with a policy, an engine, and a driver that begins with the first round."""
    state = folder / "state"
    state.mkdir()
    with scene(folder, policy) as found, engine(folder) as asked:
        own = Life(found, asked, state, asks)
        try:
            yield own
        finally:
            for driver in own.drivers:
                with contextlib.suppress(RuntimeError):
                    driver.stop()


def _version(found: Json) -> tuple[str, str]:
    return found["metadata"]["uid"], found["metadata"]["resourceVersion"]


def _ready(found: Json) -> tuple[str, str]:
    rows = found["status"]["conditions"]
    return found["metadata"]["name"], next(row["status"] for row in rows if row["type"] == "Ready")
