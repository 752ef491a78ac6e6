"""Carrying out acts on the API server, each on the version of the object that was decided upon.

Whatever fails with a conflict was decided on something that has changed, and is decided anew.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import structlog

from gpuwarden.errors import RefusedAction, ServiceUnavailable
from gpuwarden.scheduling.kueue import leases, names
from gpuwarden.scheduling.kueue.leavings import ELSEWHERE, TRYING, Phase, history_text
from gpuwarden.scheduling.kueue.views import (
    Act,
    Ask,
    Close,
    Free,
    HoldBack,
    Judge,
    Mend,
    Note,
    Open,
    Park,
    Return,
    Silence,
    Tell,
    Unhold,
)
from gpuwarden.scheduling.leaves import MAX_REASON, LeaveOrder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpuwarden.kubernetes_clients import KubernetesClient
    from gpuwarden.platforms.kubernetes import Json
    from gpuwarden.schedule_api import Preemption
    from gpuwarden.scheduling.kueue.leavings import Leaving
    from gpuwarden.scheduling.kueue.workloads import QueuedJob
    from gpuwarden.scheduling.leaves import EngineLeaves

MAX_DEADLINE: Final = 3600.0
"""Of a request to the engine, seconds."""
UNKNOWN_TO_ENGINE: Final = frozenset({"unknown_job", "two_jobs", "no_agents", "closed"})
"""Refusals of an engine that cannot ask the job; every other one says that it may not be asked."""
ASKED_BEFORE: Final = frozenset({"already_asked"})
PROTECTED_SECONDS: Final = 900.0
UNHEARD_SECONDS: Final = 120.0
"""Whom the engine does not know it may know a little later: a job that has just begun, say."""

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Hands:
    """What acts, and what it remembers of it.

    Attributes:
        client: of the API server.
        own_check: name of our admission check.
        cohort: of the policy: written beside every note, so that it is known whose it is.
        leaves: of the engine, or None.
        checks: uid of a Workload -> all its admission checks, as the API has them.
        silent: uid -> why the engine did not ask it.
        ended: id of a decision -> when and how it ended.
    """

    client: KubernetesClient
    own_check: str
    cohort: str
    leaves: EngineLeaves | None = None
    checks: Mapping[str, list[Json]] = field(default_factory=dict)
    silent: dict[str, Silence] = field(default_factory=dict)
    ended: dict[str, tuple[float, Preemption]] = field(default_factory=dict)

    async def do(self, act: Act, now: float) -> None:
        """Carry an act out.

        Args:
            act: which.
            now: Unix time.

        Raises:
            RefusedAction: `conflict` or `gone` where the object has changed since; or it may not
                be changed.
            ServiceUnavailable: not known whether it was done.
        """
        match act:
            case Ask():
                await self._ask(act.job, act.leaving, now)
            case Tell() | Note():
                await self._write(act.job, act.leaving)
            case Park():
                log.warning("parked", job=act.job.id, cause=act.leaving.cause.value)
                await self._write(act.job, act.leaving, active=False)
            case Return():
                log.info("returned", job=act.job.id)
                await self._write(act.job, act.leaving, active=True)
            case Close():
                await self._close(act, now)
            case Open():
                await self._open(act)
            case Judge():
                await self._judge(act, now)
            case Mend() | Free() | HoldBack() | Unhold():
                await self._hold_or_free(act, now)

    async def _hold_or_free(self, act: Mend | Free | HoldBack | Unhold, now: float) -> None:
        job = act.job
        match act:
            case Mend():
                log.error("note that cannot be read", job=job.id)
                notes = dict.fromkeys((names.LEAVE_ANNOTATION, names.HOLD_ANNOTATION))
                # What is marked as running, somebody else has stopped.
                ours = job.mark not in (Phase.TOLD, Phase.RETURNED)
                await self._patch(job, annotations=notes, state=None, active=True if ours else None)
            case Free():
                log.warning("brought back", job=job.id)
                space, name = job.namespace, job.workload
                await self.client.patch(names.WORKLOADS, space, name, body=act.patch)
            case HoldBack():
                log.warning("held", job=job.id, code=act.hold.code)
                held = {names.HOLD_ANNOTATION: act.hold.encode()}
                await self._patch(job, annotations=held, state=names.HELD, active=False)
            case Unhold():
                log.info("released", job=job.id)
                freed = {names.HOLD_ANNOTATION: None, names.RELEASED_ANNOTATION: f"{now:.0f}"}
                await self._patch(job, annotations=freed, state=None, active=True)

    async def _ask(self, job: QueuedJob, leaving: Leaving, now: float) -> None:
        if self.leaves is None:
            return
        pods = [pod for pod in job.pods if pod.holds and pod.started is not None]
        order = LeaveOrder(
            key=leaving.id,
            cause=leaving.cause.value,
            reason=leaving.words[:MAX_REASON] or leaving.cause.value,
            deadline_seconds=min(MAX_DEADLINE, max(1.0, leaving.deadline - now)),
            at=leaving.at,
            job_id=f"pod-{pods[0].uid}" if len(pods) == 1 else "",
            run_id="" if len(pods) == 1 else job.run_id,
            successor=leaving.successor.replace(" ", "-")[:256],
        )
        try:
            taken = await self.leaves.ask(order)
        except RefusedAction as error:
            if error.reason in ASKED_BEFORE:
                words = f"{leaving.words} The engine did not ask it: {error}."
                noted = dataclasses.replace(leaving, leave=ELSEWHERE, words=words)
                await self._write(job, noted)
                return
            log.warning("not asked", job=job.id, reason=error.reason)
            protected = error.reason not in UNKNOWN_TO_ENGINE
            until = now + (PROTECTED_SECONDS if protected else UNHEARD_SECONDS)
            self.silent[job.uid] = Silence(until, str(error), protected)
            await self._write(job, None)
            return
        except ServiceUnavailable:
            if leaving.leave != TRYING:
                await self._write(job, dataclasses.replace(leaving, leave=TRYING))
            raise
        noted = dataclasses.replace(leaving, leave=taken.id)
        steps = {name: at for name, at in taken.steps.items() if name not in ("left", "started")}
        await self._write(job, noted.seen(**steps))

    async def _close(self, act: Close, now: float) -> None:
        if act.withdraw and self.leaves is not None:
            try:
                await self.leaves.withdraw(act.leaving.request)
            except RefusedAction as error:
                log.warning("not withdrawn", job=act.job.id, reason=error.reason)
        if act.silent_seconds:
            until = now + act.silent_seconds
            self.silent[act.job.uid] = Silence(until, act.leaving.words, protected=True)
        history = history_text(act.job.history, now) if act.counts else None
        try:
            await self._write(act.job, None, history=history)
        finally:
            told = act.leaving.told(act.job.id, act.job.run_id or None, act.outcome)
            self.ended[act.leaving.id] = (now, told)

    async def _write(
        self,
        job: QueuedJob,
        leaving: Leaving | None,
        *,
        active: bool | None = None,
        history: str | None = None,
    ) -> None:
        annotations = {names.LEAVE_ANNOTATION: None if leaving is None else leaving.encode()}
        if history is not None:
            annotations[names.HISTORY_ANNOTATION] = history
        state = None if leaving is None else leaving.phase.value
        await self._patch(job, annotations=annotations, state=state, active=active)

    async def _patch(
        self,
        job: QueuedJob,
        *,
        annotations: Mapping[str, str | None],
        state: str | None,
        active: bool | None = None,
    ) -> None:
        """Write notes on a Workload, and how it stands; None leaves `active` as it is."""
        body: dict[str, Any] = {
            "metadata": {
                "uid": job.uid,
                "resourceVersion": job.version,
                "annotations": dict(annotations),
                "labels": {
                    names.LEAVE_LABEL: state,
                    names.POLICY_LABEL: None if state is None else self.cohort,
                },
            }
        }
        if active is not None:
            body["spec"] = {"active": active}
        await self.client.patch(names.WORKLOADS, job.namespace, job.workload, body=body)

    async def _open(self, act: Open) -> None:
        """Take gates off the Job; Kueue carries that to the Workload."""
        job = act.job
        if not job.job:
            return
        annotations: dict[str, str | None] = {}
        labels: dict[str, str | None] = {}
        if job.waits:
            left = [gate for gate in job.waits if gate not in act.gates]
            annotations[names.WAITS_ANNOTATION] = ",".join(left) or None
            if not left:
                labels[names.QUEUE_LABEL] = names.QUEUE
        else:
            left = [gate for gate in job.gates if gate not in act.gates]
            annotations[names.GATES_ANNOTATION] = ",".join(left) or None
        metadata: dict[str, Any] = {"resourceVersion": job.job_version, "annotations": annotations}
        if labels:
            metadata["labels"] = labels
        await self.client.patch(names.JOBS, job.namespace, job.job, body={"metadata": metadata})

    async def _judge(self, act: Judge, now: float) -> None:
        rows = [dict(row) for row in self.checks.get(act.job.uid, ())]
        for row in rows:
            if row.get("name") == self.own_check:
                row["state"], row["message"] = act.state, act.message
                row["lastTransitionTime"] = leases.stamp(now)
                row.pop("requeueAfterSeconds", None)
                if act.retry_seconds:
                    row["requeueAfterSeconds"] = act.retry_seconds
        body = {
            "metadata": {"uid": act.job.uid, "resourceVersion": act.job.version},
            "status": {"admissionChecks": rows},
        }
        job = act.job
        await self.client.patch(names.WORKLOAD_STATUS, job.namespace, job.workload, body=body)
