"""Enforcement as a whole over HTTP: whether anything can be ended now, and the global pause."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter
from starlette.responses import JSONResponse, Response

from gpuwarden.refusals import Refusal
from gpuwarden.ruleengine.alertmanager import rfc3339
from gpuwarden.ruleengine.api_engine_models import Enforcement, PauseRequest, ResumeRequest
from gpuwarden.ruleengine.bodies import MAX_BODY_BYTES, optional_seconds, read_object, word
from gpuwarden.ruleengine.operations import Operation
from gpuwarden.ruleengine.pauses import switched_on
from gpuwarden.ruleengine.roles import Role

if TYPE_CHECKING:
    from starlette.requests import Request

    from gpuwarden.ruleengine.engine import Engine
    from gpuwarden.ruleengine.records import Pause
    from gpuwarden.ruleengine.sign_ins import SignIns

ENFORCEMENT_SCHEMA = "gpuwarden.enforcement/v1"
PATH = "/v1/enforcement"


class EnforcementRoutes:
    """Handlers over one engine's enforcement.

    Args:
        engine: that ends jobs, or does not.
        sign_ins: who may pause it.
    """

    def __init__(self, engine: Engine, sign_ins: SignIns) -> None:
        self._engine = engine
        self._sign_ins = sign_ins

    def operations(self) -> list[Operation]:
        """What is offered."""
        malformed = {400: "The body cannot be read.", 413: "The body is too large."}
        return [
            Operation(
                "GET",
                PATH,
                self.enforcement,
                "Whether jobs are ended now, and what holds it back.",
                TypeAdapter(Enforcement),
            ),
            Operation(
                "POST",
                f"{PATH}/pause",
                self.pause,
                "End no job until somebody resumes, or for a while.",
                TypeAdapter(Enforcement),
                status=201,
                body=TypeAdapter(PauseRequest),
                least=Role.ADMIN,
                refusals=malformed,
            ),
            Operation(
                "POST",
                f"{PATH}/resume",
                self.resume,
                "End jobs again, within the limits, from the next tick on: after a pause, or by a "
                "rule that has fallen back to warn.",
                TypeAdapter(Enforcement),
                body=TypeAdapter(ResumeRequest),
                least=Role.ADMIN,
                refusals={**malformed, 409: "It is not paused, or the rule has not fallen back."},
            ),
        ]

    async def enforcement(self, request: Request) -> Response:
        """Whether jobs are ended now, and what holds it back."""
        if self._sign_ins.reader(request, cookies=False) is None:
            raise Refusal(401, "unauthorised", "this takes a bearer token of web.tokens")
        return JSONResponse(enforcement_document(self._engine))

    async def pause(self, request: Request) -> Response:
        """End no job until somebody resumes: {reason, for?}."""
        person = self._sign_ins.changer(request, Role.ADMIN)
        body = await read_object(request, MAX_BODY_BYTES)
        self._engine.pauses.begin(
            by=person.name,
            role=person.role.value,
            reason=word(body, "reason"),
            seconds=optional_seconds(body, "for"),
        )
        return JSONResponse(enforcement_document(self._engine), status_code=201)

    async def resume(self, request: Request) -> Response:
        """End the pause, or let a rule enforce again: {reason, rule?}."""
        person = self._sign_ins.changer(request, Role.ADMIN)
        body = await read_object(request, MAX_BODY_BYTES)
        reason = word(body, "reason")
        if "rule" in body:
            rule_id = word(body, "rule")
            resumed = self._engine.trials.resume(
                rule_id, by=person.name, role=person.role.value, reason=reason
            )
            if not resumed:
                raise Refusal(409, "not_held_back", f"the rule {rule_id} has not fallen back")
            return JSONResponse(enforcement_document(self._engine))
        if not self._engine.pauses.end(by=person.name, role=person.role.value, reason=reason):
            raise Refusal(409, "not_paused", "enforcement is not paused")
        return JSONResponse(enforcement_document(self._engine))


def enforcement_document(engine: Engine) -> dict[str, Any]:
    """Whether the engine ends jobs now: the pause, the kill switch, and what else halts it."""
    view = engine.view
    return {
        "schema": ENFORCEMENT_SCHEMA,
        "time": None if view.facts is None else rfc3339(view.facts.time),
        "paused": pause_record(engine.pauses.current()),
        "kill_switch": switched_on(engine.kill_switch),
        "held_back": [
            {
                "rule": item.rule_id,
                "reason": item.reason,
                "sentence": item.sentence,
                "since": rfc3339(item.since),
            }
            for item in engine.trials.held
        ],
        "halted": [{"reason": block.reason, "sentence": block.sentence} for block in view.halted],
    }


def pause_record(pause: Pause | None) -> dict[str, Any] | None:
    """A pause as it is shown."""
    if pause is None:
        return None
    return {
        "by": pause.by,
        "reason": pause.reason,
        "since": rfc3339(pause.begun_at),
        "until": None if pause.until is None else rfc3339(pause.until),
    }
