"""A cluster whose jobs a platform owns: the platform, and agents that answer for its nodes.

Nothing of the engine is replaced: the platform stands behind the port that Slurm and Kubernetes
stand behind, and the agents are asked over HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from tests.ruleengine.engines import running
from tests.ruleengine.worlds import GIB, NODE, Job

from gpuwarden.agent_api import (
    Action,
    ActionReport,
    ActionRequest,
    ActionState,
    Outcome,
    Proof,
    SignalledProcess,
)
from gpuwarden.errors import RefusedAction, ServiceUnavailable
from gpuwarden.ruleengine.reclaim.ports import Claim, Standing, State

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection

    from tests.ruleengine.engines import World
    from tests.ruleengine.worlds import Answer

    from gpuwarden.ruleengine.guards import Blocked
    from gpuwarden.ruleengine.reclaim.ports import Deed, Order
    from gpuwarden.ruleengine.verdicts import JobFacts

JOB = "slurm-c1-4711-0"
HURRY = 30.0
"""Two ticks in one, until anything is decided: no outage yet, and half the time."""
RUN = {"run_id": "run-1"}
IDLE = {"cpu": 1_799_990_000.0}
OTHER_NODE = "localhost:9835"
"""A second node: another name of the loopback, at which the same server answers for it."""


class Killed(BaseException):
    """The engine is killed here: nothing after this point happens any more."""


@dataclass
class Fuse:
    """Kills the engine at its n-th step to the outside, or to its disk."""

    left: int | None = None
    dead: bool = False
    at: str = ""

    def step(self, name: str) -> None:
        """One step; raises where the engine dies."""
        if self.dead:
            raise Killed(name)
        if self.left is None:
            return
        self.left -= 1
        if self.left <= 0:
            self.dead, self.at = True, name
            raise Killed(name)


@dataclass
class Scheduler:
    """A platform by the port; what it was told takes effect as a test wants.

    Attributes:
        found: what `find` says in the place of a claim.
        answers: errors that `end` raises, one after the other, before it acts.
        acts_before_error: whether it acts although it raises.
        standing: of the attempt.
        ends_at_once: whether an end takes effect when it is told.
        notices: whether the job asked for a notice, which `ask` then gives.
        calls: what it was told, in order.
    """

    fuse: Fuse
    name: str = "slurm"
    prefix: str = "slurm-"
    grace: float | None = 30.0
    found: Blocked | None = None
    answers: list[Exception] = field(default_factory=list)
    acts_before_error: bool = False
    standing: Standing = Standing.RUNNING
    successor: str = ""
    successor_runs: bool = False
    obstacle: str = ""
    silent: bool = False
    ends_at_once: bool = True
    notices: bool = True
    becomes: Standing = Standing.ENDED
    offenders: frozenset[str] = frozenset()
    on_ask: Callable[[], None] | None = None
    on_end: Callable[[], None] | None = None
    order: Order | None = None
    calls: list[str] = field(default_factory=list)

    async def find(
        self, job: JobFacts, deed: Deed, *, offenders: Collection[str] = ()
    ) -> Claim | Blocked:
        """Recognise the attempt."""
        self.offenders = frozenset(offenders)
        if self.found is not None:
            return self.found
        return Claim("slurm", {"job_id": job.job_id, "deed": deed.value}, grace=self.grace)

    async def ask(self, order: Order) -> bool:
        """Give the job the notice that it asked for."""
        if not self.notices:
            return False
        self.fuse.step("ask, not yet given")
        self.calls.append("ask")
        self.order = order
        if self.on_ask is not None:
            self.on_ask()
        self.fuse.step("ask, given")
        return True

    async def end(self, order: Order) -> None:
        """End the attempt."""
        self.fuse.step("end, not yet done")
        error = self.answers.pop(0) if self.answers else None
        # Whoever refuses has done nothing; an answer that is lost may have been about a deed.
        if error is not None and not (
            self.acts_before_error and isinstance(error, ServiceUnavailable)
        ):
            raise error
        if self.on_end is not None:
            self.on_end()
        self.calls.append(f"end {order.deed.value}")
        back = self.standing is Standing.RETURNED
        if back and self.successor_runs:
            raise target_changed()
        self.standing = Standing.ENDED if back else Standing.ENDING
        if self.ends_at_once and not back:
            self.standing = self.becomes
        self.fuse.step("end, done")
        if error is not None:
            raise error

    async def state(self, order: Order) -> State:
        """What has become of it."""
        if self.silent:
            raise ServiceUnavailable(f"slurmctld says nothing of {order.decision_id}")
        return State(
            self.standing, self.standing.value.upper(), self.obstacle, successor=self.successor
        )

    async def aclose(self) -> None:
        """Nothing is open."""


@dataclass
class Nodes:
    """The agents of all nodes: watches that end as a test says, and trainers that can be asked.

    Attributes:
        holds: host -> whether its processes are still there.
        refuses: host -> why its agent does not watch.
        unproven: host -> why its watch ends without proof.
        silent: hosts whose agent tells its name and takes nothing on.
        slow: hosts whose agent does not come to it.
        expired: hosts whose watches have run out.
        delivers: whether trainers can be asked.
        undelivered: hosts on which none can.
    """

    scheduler: Scheduler
    fuse: Fuse
    follows_platform: bool = True
    holds: dict[str, bool] = field(default_factory=dict)
    refuses: dict[str, str] = field(default_factory=dict)
    unproven: dict[str, str] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)
    slow: set[str] = field(default_factory=set)
    expired: set[str] = field(default_factory=set)
    delivers: bool = True
    undelivered: set[str] = field(default_factory=set)
    on_request: Callable[[], None] | None = None
    taken: dict[tuple[str, str], ActionRequest] = field(default_factory=dict)
    epochs: dict[str, int] = field(default_factory=dict)

    def answer(self, host: str, what: ActionRequest | str) -> Answer:
        """Answer one action, or one question for a report."""
        if host in self.silent:
            return 503, b"{}"
        if isinstance(what, str):
            known = self.taken.get((host, what))
            return (404, b"{}") if known is None else (200, self._report(host, known).encode())
        epoch = self.epochs.get(host, 0)
        if what.epoch < epoch and (host, what.decision_id) not in self.taken:
            return 403, b'{"error": "stale_epoch", "message": "an engine of later has spoken"}'
        self.epochs[host] = max(epoch, what.epoch)
        first = self.taken.setdefault((host, what.decision_id), what)
        if self.on_request is not None and what.action is Action.REQUEST_LEAVE:
            self.on_request()
        return 202, self._report(host, first).encode()

    def asked(self, action: Action) -> list[ActionRequest]:
        """What agents took on of one kind."""
        return [request for request in self.taken.values() if request.action is action]

    def _gone(self, host: str) -> bool:
        over = self.scheduler.standing in (Standing.ENDED, Standing.RETURNED)
        return not self.holds.get(host, not (self.follows_platform and over))

    def _report(self, host: str, request: ActionRequest) -> ActionReport:
        about = (request.decision_id, request.job_id, request.action)
        if request.action is not Action.WATCH:
            delivers = self.delivers and host not in self.undelivered
            outcome = Outcome.DONE if delivers else Outcome.UNDELIVERABLE
            reason = "" if delivers else "not_mounted"
            steps = {"leave_requested": 1_800_000_001.0} if delivers else {}
            return ActionReport(
                *about, ActionState.FINISHED, outcome=outcome, reason=reason, steps=steps
            )
        if host in self.refuses:
            return ActionReport(
                *about, ActionState.FINISHED, outcome=Outcome.REFUSED, reason=self.refuses[host]
            )
        if host in self.slow:
            return ActionReport(*about, ActionState.ACCEPTED)
        if host in self.expired:
            outcome, why = Outcome.INCOMPLETE, "survivors"
            return ActionReport(*about, ActionState.FINISHED, outcome=outcome, reason=why)
        process = SignalledProcess(4711, 99, gpu_memory=int(30 * GIB))
        if not self._gone(host):
            return ActionReport(*about, ActionState.ACTING, processes=(process,))
        why = self.unproven.get(host, "")
        return ActionReport(
            *about,
            ActionState.FINISHED,
            outcome=Outcome.INCOMPLETE if why else Outcome.RECLAIMED,
            reason=why,
            steps={"exited": 1_800_000_009.0} | ({} if why else {"proven": 1_800_000_010.0}),
            processes=(SignalledProcess(4711, 99, "gone", int(30 * GIB)),),
            proof=Proof(gone=not why, memory_freed=0 if why else int(30 * GIB)),
        )


@dataclass
class Scene:
    """One job of a platform that is due, and everybody around it."""

    world: World
    scheduler: Scheduler
    nodes: Nodes
    fuse: Fuse

    @classmethod
    def of(cls, world: World, *instances: str) -> Scene:
        """Give a world's job to a platform, on nodes of its own."""
        fuse = Fuse()
        scheduler = Scheduler(fuse)
        nodes = Nodes(scheduler, fuse)
        world.platforms = (scheduler,)
        world.agent.steps = nodes.answer
        world.fleet.jobs = [
            Job(
                JOB,
                uuid=f"GPU-{n}",
                instance=instance,
                activity=dict(IDLE),
                run={"run_id": "run-1"},
            )
            for n, instance in enumerate(instances or (NODE,), start=1)
        ]
        world.fleet.nodes = dict.fromkeys([*world.fleet.nodes, *instances], True)
        return cls(world, scheduler, nodes, fuse)

    def decided(self) -> str:
        """Id of the newest decision about the job."""
        return self.world.engine.ledger.job_decisions(JOB)[-1].id


def target_changed() -> RefusedAction:
    """A platform that finds another attempt than the one claimed."""
    return RefusedAction("target_changed", "job 4711 is of another submission by now")


@contextlib.asynccontextmanager
async def decided(scene: Scene) -> AsyncIterator[World]:
    """The engine, once it has decided to end the job."""
    async with running(scene.world) as world:
        for _ in range(80):
            if world.engine.ledger.job_decisions(JOB):
                break
            await world.tick(seconds=HURRY)
        else:
            pytest.fail(f"nothing decided: {world.why(JOB)}")
        yield world


async def until_step(world: World, step: str, job_id: str = JOB) -> None:
    """Wait until the newest decision has come to a step."""
    name = world.engine.ledger.job_decisions(job_id)[-1].id
    for _ in range(500):
        act = world.engine.ledger.platform_act(name)
        if act is not None and act.step == step:
            return
        world.engine.reclaimer.follow()
        await asyncio.sleep(0.01)
    pytest.fail(f"not at {step}: {act}")
