"""The controller: looks at mirrors of the cluster, decides, acts; one round after another.

Everything that must outlive it stands in the cluster: on each Workload how far its leave has come,
on each quota which bookings it has moved. A round that fails is repeated by the next one.
"""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import structlog

from gpuwarden.errors import GpuwardenError, RefusedAction, ServiceUnavailable, TemporaryError
from gpuwarden.kubernetes_clients import NODES, PODS
from gpuwarden.kubernetes_replies import ServerFault
from gpuwarden.periods import period_of
from gpuwarden.platforms.kubernetes import value_at
from gpuwarden.scheduling.kueue import mirrors, names
from gpuwarden.scheduling.kueue.advances import advance
from gpuwarden.scheduling.kueue.choices import choose_all, withdraw_useless
from gpuwarden.scheduling.kueue.hands import Hands
from gpuwarden.scheduling.kueue.held_jobs import orphans
from gpuwarden.scheduling.kueue.holds import Hold
from gpuwarden.scheduling.kueue.limits import limit_all, spent_of
from gpuwarden.scheduling.kueue.mirrors import Mirror
from gpuwarden.scheduling.kueue.renderings import checked_teams
from gpuwarden.scheduling.kueue.shapes import part_at, rows_at
from gpuwarden.scheduling.kueue.shifts import is_noted
from gpuwarden.scheduling.kueue.upkeep import SKEW_SECONDS, Lease, keep_check, keep_quotas
from gpuwarden.scheduling.kueue.views import (
    Ask,
    Fault,
    HoldBack,
    Open,
    Park,
    Tell,
    Unhold,
    Verdict,
    View,
)
from gpuwarden.scheduling.kueue.workloads import read_jobs

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from gpuwarden.clock import Clock
    from gpuwarden.kubernetes_clients import Kind, KubernetesClient
    from gpuwarden.platforms.kubernetes import Json
    from gpuwarden.schedule_api import Preemption
    from gpuwarden.scheduling.kueue.records import Records
    from gpuwarden.scheduling.kueue.views import Act, Progress, Spent
    from gpuwarden.scheduling.kueue.workloads import QueuedJob
    from gpuwarden.scheduling.leaves import EngineLeaves, Leave
    from gpuwarden.scheduling.policies import Policy
    from gpuwarden.scheduling.slots import Slot

SYNC_SECONDS: Final = 30.0
"""For the first list of everything."""
LOOK_SECONDS: Final = 2.0
"""The engine is asked about a leave at most this often."""
MOST_ACTS: Final = 200
"""In one round; the next one does the rest."""
STIR_SECONDS: Final = 0.5
"""Changes come in bursts, and one round serves them all."""
MOST_FAILURES: Final = 3
"""After as many changes that the server did not make a round ends: a webhook that is down fails
those of one kind, or of one namespace, and everything else goes on."""
ENDED_SECONDS: Final = 86_400.0

log = structlog.get_logger(__name__)


class Controller:
    """One policy's controller.

    Args:
        policy: in force.
        client: of the API server.
        clock: time.
        wake: asks for a round at once.
        holder: who we are.
        records: what was held.
        leaves: of the engine; None where there is none to ask.
        progress: what is known of trainings from elsewhere, or None.

    Attributes:
        view: of the last round, or None before the first.
        verdict: likewise.
        faults: of the last round.
        slots: bookings, ahead and active.
    """

    def __init__(
        self,
        policy: Policy,
        client: KubernetesClient,
        *,
        clock: Clock,
        wake: Callable[[], None],
        holder: str,
        records: Records,
        leaves: EngineLeaves | None = None,
        progress: Callable[[float], Awaitable[Mapping[str, Progress]]] | None = None,
    ) -> None:
        self.policy = policy
        self._client = client
        self._clock = clock
        self._wake = wake
        self._records = records
        self._leaves = leaves
        self._progress = progress
        self._lease = Lease(client, policy, holder)
        self._hands = Hands(client, names.check_name(policy), policy.kueue.cohort, leaves)
        self._receipts: dict[str, tuple[float, Leave]] = {}
        self._engine_problem = ""
        self._failing: frozenset[str] = frozenset()
        self._tasks: list[asyncio.Task[None]] = []
        self._stirred: asyncio.TimerHandle | None = None
        self._mirrors = {
            "workloads": self._mirror(names.WORKLOADS, mirrors.trim_workload),
            "jobs": self._mirror(names.JOBS, mirrors.trim_job),
            "pods": self._mirror(PODS, mirrors.trim_pod),
            "nodes": self._mirror(NODES, mirrors.trim_node),
            "queues": self._mirror(names.CLUSTER_QUEUES, mirrors.whole),
            "cohorts": self._mirror(names.COHORTS, mirrors.whole),
            "checks": self._mirror(names.ADMISSION_CHECKS, mirrors.whole),
        }
        self.view: View | None = None
        self.verdict = Verdict()
        self.faults: tuple[Fault, ...] = ()
        self.slots: tuple[Slot, ...] = ()

    def _mirror(self, kind: Kind, trim: Callable[[Json], Json | None]) -> Mirror:
        return Mirror(self._client, kind, clock=self._clock, changed=self._stir, trim=trim)

    def _stir(self) -> None:
        """Ask for a round soon."""
        if self._stirred is None:
            loop = asyncio.get_running_loop()
            self._stirred = loop.call_later(STIR_SECONDS, self._rouse)

    def _rouse(self) -> None:
        self._stirred = None
        self._wake()

    @property
    def ended(self) -> Mapping[str, Preemption]:
        """Leaves that have ended, by their ids."""
        return {name: told for name, (_at, told) in self._hands.ended.items()}

    async def start(self) -> None:
        """Begin to follow the cluster.

        Raises:
            ServiceUnavailable: it could not be listed in time.
        """
        self._tasks = [asyncio.create_task(mirror.run()) for mirror in self._mirrors.values()]
        end = self._clock.monotonic() + SYNC_SECONDS
        while late := [each for each in self._mirrors.values() if not each.current()]:
            failed = all(mirror.problem for mirror in late)
            ended = any(task.done() for task in self._tasks)
            if failed or ended or self._clock.monotonic() >= end:
                raise ServiceUnavailable(self._unseen())
            await asyncio.sleep(0.02)

    async def stop(self) -> None:
        """Let go of everything; what is under way stands in the cluster."""
        for task in self._tasks:
            task.cancel()
        if self._stirred is not None:
            self._stirred.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with suppress(GpuwardenError):
            await self._lease.release()
        if self._leaves is not None:
            await self._leaves.aclose()
        await self._client.aclose()

    def _unseen(self) -> str:
        late = [
            f"{name}: {mirror.problem or 'nothing was heard of it'}"
            for name, mirror in self._mirrors.items()
            if not mirror.current()
        ]
        return f"the cluster cannot be seen now ({'; '.join(late) or 'a mirror has ended'})"

    # -- a round

    async def step(self, now: float) -> None:
        """Look, decide, act.

        Args:
            now: Unix time.

        Raises:
            TemporaryError: the cluster cannot be seen, or answers no more: nothing that was not
                done is lost.
        """
        if not all(mirror.current() for mirror in self._mirrors.values()):
            raise ServiceUnavailable(self._unseen())
        held = await self._lease.keep(now)
        jobs = self._read()
        self._records.observe(jobs, now)
        await self._follow(jobs, now)
        progress = await self._progress(now) if self._progress is not None else {}
        view = self._look(jobs, now, progress)
        own_parts = [withdraw_useless(view), advance(view), limit_all(view), choose_all(view)]
        verdict = Verdict.of([self._orphans(), *own_parts])
        self.view, self.verdict = view, verdict
        own = [*self._lease.faults(), *self._own_faults()]
        self.faults = (*verdict.faults, *own)
        if held:
            own += await self._keep(now)
            self.faults = (*verdict.faults, *own)
            await self._act(verdict, now)
        self._forget(now)

    def _read(self) -> tuple[QueuedJob, ...]:
        objects = {name: mirror.objects() for name, mirror in self._mirrors.items()}
        self._hands.checks = {
            str(value_at(item, "metadata.uid")): rows_at(item, "status.admissionChecks")
            for item in objects["workloads"]
        }
        return tuple(
            read_jobs(
                self.policy,
                workloads=objects["workloads"],
                jobs=objects["jobs"],
                pods=objects["pods"],
                nodes=objects["nodes"],
            )
        )

    def _orphans(self) -> Verdict:
        objects = [*self._mirrors["queues"].objects(), *self._mirrors["cohorts"].objects()]
        return orphans(self.policy, self._mirrors["workloads"].objects(), objects)

    def _look(
        self, jobs: tuple[QueuedJob, ...], now: float, progress: Mapping[str, Progress]
    ) -> View:
        return View(
            policy=self.policy,
            now=now,
            jobs=jobs,
            receipts={name: found for name, (_at, found) in self._receipts.items()},
            asks=self._leaves is not None,
            silent=dict(self._hands.silent),
            progress=progress,
            spent=self._spent(now),
            slots=self.slots,
        )

    def _spent(self, now: float) -> dict[str, Spent]:
        hard = [budget for budget in self.policy.budgets if budget.kind == "hard"]
        if not hard:
            return {}
        zone = self.policy.timezone
        begin = min(period_of(budget.per, zone, now).begin for budget in hard)
        return spent_of(self.policy, self._records.holdings(begin, now), now)

    async def _follow(self, jobs: tuple[QueuedJob, ...], now: float) -> None:
        """Ask the engine how far leaves have come; what it does not say now is not known now."""
        self._engine_problem = ""
        open_ids = set()
        for job in jobs:
            leaving = job.leaving
            if leaving is None or not leaving.request or self._leaves is None:
                continue
            open_ids.add(leaving.id)
            asked, known = self._receipts.get(leaving.id, (None, None))
            if known is not None and asked is not None and 0 <= now - asked < LOOK_SECONDS:
                continue
            try:
                found = await self._leaves.look(leaving.request)
            except RefusedAction as error:
                log.warning("leave is not known", job=job.id, reason=error.reason)
            except TemporaryError as error:
                self._engine_problem = str(error)
                break
            else:
                self._receipts[leaving.id] = (now, found)
        self._receipts = {k: v for k, v in self._receipts.items() if k in open_ids}

    def _own_faults(self) -> list[Fault]:
        if not self._engine_problem:
            return []
        words = (
            f"the engine cannot be asked about leaves ({self._engine_problem}): whoever must leave "
            "is ended at its deadline, with the grace of its pods"
        )
        return [Fault("engine_unreachable", "engine", words)]

    async def _keep(self, now: float) -> list[Fault]:
        """Our check and the quotas of bookings."""
        try:
            check = next(
                (
                    item
                    for item in self._mirrors["checks"].objects()
                    if value_at(item, "metadata.name") == names.check_name(self.policy)
                ),
                None,
            )
            await keep_check(self._client, check if checked_teams(self.policy) else None, now)
            queues, cohorts = self._mirrors["queues"].objects(), self._mirrors["cohorts"].objects()
            slots = [slot for slot in self.slots if slot.start <= now < slot.end]
            if self.policy.bookings is None:
                # What those of an older policy have moved goes back all the same.
                own = (each for each in (*queues, *cohorts) if self._is_ours(each))
                if not any(is_noted(each) for each in own):
                    return []
                slots = []
            return await keep_quotas(
                self._client, self.policy, slots, queues=queues, cohorts=cohorts
            )
        except RefusedAction as error:
            if error.reason in ("conflict", "gone"):
                return []  # seen again, in the next round
            return [Fault("refused", "upkeep", str(error))]

    async def _act(self, verdict: Verdict, now: float) -> None:
        written: set[str] = set()
        failed: dict[str, TemporaryError] = {}
        # What failed in the last round goes last: it holds up nothing else.
        acts = sorted(verdict.acts, key=lambda act: act.job.uid in self._failing)
        for act in acts[:MOST_ACTS]:
            # One change of each object in a round: what was seen holds for one.
            key = f"{'job' if isinstance(act, Open) else 'workload'} {act.job.uid}"
            if key in written or self._is_put_off(act):
                continue
            written.add(key)
            error = await self._attempt(act, now)
            if error is None:
                continue
            failed[act.job.uid] = error
            if len(failed) == MOST_FAILURES or not isinstance(error, ServerFault):
                break
        self._failing = frozenset(failed)
        if written:
            self._stir()
        for error in failed.values():
            if not isinstance(error, ServerFault) or len(failed) == len(written):
                raise error

    def _is_put_off(self, act: Act) -> bool:
        """Whether an act is not for this round."""
        skew = self._lease.skew
        if (
            skew is not None
            and abs(skew) > SKEW_SECONDS
            and isinstance(act, Tell | Park | HoldBack)
        ):
            return True  # a clock that has leapt makes deadlines pass that have not
        # An engine that does not answer is waited for once in a round.
        return bool(self._engine_problem) and isinstance(act, Ask)

    async def _attempt(self, act: Act, now: float) -> TemporaryError | None:
        """Do an act; what a server failed at, or None."""
        try:
            await self._hands.do(act, now)
        except RefusedAction as error:
            if error.reason not in ("conflict", "gone"):
                self._refused(act, error)
        except TemporaryError as error:
            if not isinstance(act, Ask) or isinstance(error, ServerFault):
                self._refused(act, error)
                return error
            self._unreachable(act, error)
        return None

    def _refused(self, act: Act, error: GpuwardenError) -> None:
        log.error("refused", act=type(act).__name__, job=act.job.id, problem=str(error))
        self.faults = (*self.faults, Fault("refused", act.job.id, f"{act.job.id}: {error}"))

    def _unreachable(self, act: Ask, error: TemporaryError) -> None:
        """An engine that does not answer holds up no other act, and is asked again."""
        self._engine_problem = str(error)
        self.faults = (*self.faults, *self._own_faults())
        log.warning("engine", job=act.job.id, problem=str(error))

    def _forget(self, now: float) -> None:
        hands = self._hands
        hands.silent = {uid: each for uid, each in hands.silent.items() if now < each.until}
        hands.ended = {
            name: (at, told) for name, (at, told) in hands.ended.items() if now - at < ENDED_SECONDS
        }

    # -- commands of people

    async def hold(self, entry: str, *, by: str, now: float) -> None:
        """Have a job that waits wait until it is released.

        Raises:
            RefusedAction: it runs, leaves, is over or held already; or the API server forbids it.
            ServiceUnavailable: not known whether it was done.
        """
        job = self._commanded(entry)
        if job.finished:
            raise RefusedAction("over", f"job {entry} is over")
        if job.here or job.leaving is not None:
            raise RefusedAction(
                "runs",
                f"job {entry} has begun, and only what waits is held: kubectl -n "
                f"{job.namespace} delete job {job.job} ends it",
            )
        if not (job.active and job.workload):
            raise RefusedAction("held", f"job {entry} is out of its queue already")
        words = f"{by} holds it: gpuwarden queue release {entry} lets it go on."
        await self._hands.do(HoldBack(job, Hold(now, "", words)), now)
        self._stir()

    async def release(self, entry: str, *, now: float) -> None:
        """Let a held job wait for its turn again.

        Raises:
            RefusedAction: it is not held by us; or the API server forbids it.
            ServiceUnavailable: not known whether it was done.
        """
        job = self._commanded(entry)
        if job.hold is None:
            remedy = ""
            if not job.active and job.leaving is None:
                remedy = (
                    ": somebody has set its Workload to inactive, and `spec.active: true` on "
                    f"{job.namespace}/{job.workload} brings it back"
                )
            raise RefusedAction("not_held", f"job {entry} is not held{remedy}")
        await self._hands.do(Unhold(job), now)
        self._stir()

    def _commanded(self, entry: str) -> QueuedJob:
        """A job as it is now, not as it was in the last round."""
        job = next((job for job in self._read() if job.id == entry), None)
        if job is None:
            raise RefusedAction("unknown", f"there is no job {entry}: see gpuwarden queue")
        return job

    def held_slots(self) -> frozenset[str]:
        """Bookings whose cards the quotas of all queues have moved."""
        marks = [
            _booked(item)
            for item in (*self._mirrors["queues"].objects(), *self._mirrors["cohorts"].objects())
            if self._is_ours(item)
        ]
        return frozenset.intersection(*marks) if marks else frozenset()

    def _is_ours(self, found: Json) -> bool:
        return _policy_of(found) == self.policy.kueue.cohort

    def adopt(self, policy: Policy) -> None:
        """Go by another policy of the same cluster from the next round on."""
        self.policy = policy
        self._hands = dataclasses.replace(self._hands, own_check=names.check_name(policy))


def _booked(found: Json) -> frozenset[str]:
    annotations = part_at(found, "metadata.annotations")
    return frozenset(filter(None, annotations.get(names.BOOKINGS_ANNOTATION, "").split(",")))


def _policy_of(found: Json) -> str:
    labels = part_at(found, "metadata.labels")
    return str(labels.get(names.POLICY_LABEL, ""))
