"""The audit of one decision over HTTP, and what pages show of it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter
from starlette.responses import JSONResponse, Response

from gpuwarden.refusals import Refusal
from gpuwarden.ruleengine import dossiers
from gpuwarden.ruleengine.api_audit_models import ReclaimAudit
from gpuwarden.ruleengine.audits import audit
from gpuwarden.ruleengine.dossiers import LaterAttempt
from gpuwarden.ruleengine.operations import Operation

if TYPE_CHECKING:
    from starlette.requests import Request

    from gpuwarden.ruleengine.access import Access
    from gpuwarden.ruleengine.dossiers import Dossier
    from gpuwarden.ruleengine.engine import Engine
    from gpuwarden.ruleengine.roles import Person


class AuditRoutes:
    """Handlers over one engine's decisions.

    Args:
        engine: that took them.
        access: who may see which.
    """

    def __init__(self, engine: Engine, access: Access) -> None:
        self._engine = engine
        self._access = access

    def operations(self) -> list[Operation]:
        """What is offered."""
        return [
            Operation(
                "GET",
                "/v1/decisions/{decision_id}/audit",
                self.audit,
                "One reclaim, from the sample that started it to the memory that came back.",
                TypeAdapter(ReclaimAudit),
                refusals={404: "There is no such decision."},
            )
        ]

    async def audit(self, request: Request) -> Response:
        """One reclaim, whole."""
        person = self._access.api(request)
        decision_id = request.path_params["decision_id"]
        return JSONResponse(decision_audit(self._engine, self._access, person, decision_id))


def decision_audit(
    engine: Engine, access: Access, person: Person, decision_id: str
) -> dict[str, Any]:
    """The audit of a decision, for somebody who may see it.

    Raises:
        Refusal: 404, there is none, or it is not theirs to see.
    """
    decision = engine.ledger.decision(decision_id)
    if decision is None or not access.sees_decision(person, decision):
        raise Refusal(404, "unknown_decision", "there is no such decision")
    dossier = dossiers.read(engine.ledger, decision_id)
    if dossier is None:
        raise Refusal(404, "unknown_decision", "there is no such decision")
    dossier = dataclasses.replace(dossier, loss=engine.losses.of(decision_id))
    return audit(_with_running(engine, dossier), now=engine.clock.wall())


def _with_running(engine: Engine, dossier: Dossier) -> Dossier:
    """The dossier with what runs now of the same run."""
    facts, run_id = engine.view.facts, dossier.case.run_id
    if facts is None or run_id is None:
        return dossier
    later = {item.job_id: item for item in dossier.later}
    for job in facts.jobs.values():
        run = job.run
        if run is None or run.conflict or run.run_id != run_id:
            continue
        if job.job_id == dossier.decision.job_id:
            continue
        # In a large fleet how it was resumed is asked of jobs that somebody looks at.
        engine.rounds.look_at(job.job_id, engine.clock.wall())
        known = later.get(job.job_id)
        seen_at = job.start_time if known is None else known.seen_at
        later[job.job_id] = LaterAttempt(
            job.job_id, seen_at, running=True, resume_mode=run.resume_mode or ""
        )
    return dataclasses.replace(dossier, later=tuple(later.values()))
