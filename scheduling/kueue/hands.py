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
from gpuwarden.scheduling.kueue.leavings import CANNOT, ELSEWHERE, TRYING, history_text
from gpuwarden.scheduling.kueue.views import (
    Act,
    Ask,
    Close,
    Judge,
    Mend,
    Note,
    Open,
    Park,
    Return,
    Tell,
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
DEAF_SECONDS: Final = 900.0

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Hands:
    """What acts, and what it remembers of it.

    Attributes:
        client: of the API server.
        own_check: name of our admission check.
        leaves: of the engine, or None.
        checks: uid of a Workload -> all its admission checks, as the API has them.
        deaf: uid -> until when nobody asks it.
        ended: id of a decision -> when and how it ended.
    """

    client: KubernetesClient
    own_check: str
    leaves: EngineLeaves | None = None
    checks: Mapping[str, list[Json]] = field(default_factory=dict)
    deaf: dict[str, float] = field(default_factory=dict)
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
                await self._write(act.job, act.leaving, spec={"active": False})
            case Return():
                log.info("returned", job=act.job.id)
                await self._write(act.job, act.leaving, spec={"active": True})
            case Close():
                await self._close(act, now)
            case Open():
                await self._open(act)
            case Judge():
                await self._judge(act, now)
            case Mend():
                log.error("note that cannot be read", job=act.job.id)
                await self._patch(
                    act.job,
                    annotations={names.LEAVE_ANNOTATION: None},
                    labels={names.LEAVE_LABEL: None},
                    spec={"active": True},
                )

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
            if error.reason in UNKNOWN_TO_ENGINE | ASKED_BEFORE:
                word = CANNOT if error.reason in UNKNOWN_TO_ENGINE else ELSEWHERE
                words = f"{leaving.words} The engine did not ask it: {error}."
                await self._write(job, dataclasses.replace(leaving, leave=word, words=words))
                return
            log.warning("not asked", job=job.id, reason=error.reason)
            self.deaf[job.uid] = now + DEAF_SECONDS
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
        if act.deaf_seconds:
            self.deaf[act.job.uid] = now + act.deaf_seconds
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
        spec: dict[str, Any] | None = None,
        history: str | None = None,
    ) -> None:
        annotations = {names.LEAVE_ANNOTATION: None if leaving is None else leaving.encode()}
        if history is not None:
            annotations[names.HISTORY_ANNOTATION] = history
        labels = {names.LEAVE_LABEL: None if leaving is None else leaving.phase.value}
        await self._patch(job, annotations=annotations, labels=labels, spec=spec)

    async def _patch(
        self,
        job: QueuedJob,
        *,
        annotations: dict[str, str | None],
        labels: dict[str, str | None],
        spec: dict[str, Any] | None = None,
    ) -> None:
        body: dict[str, Any] = {
            "metadata": {
                "uid": job.uid,
                "resourceVersion": job.version,
                "annotations": annotations,
                "labels": labels,
            }
        }
        if spec is not None:
            body["spec"] = spec
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
