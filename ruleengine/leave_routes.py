"""Leave requests over HTTP: a scheduler asks, follows and takes back; owners see their own."""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, TypeAdapter
from starlette.responses import JSONResponse, Response

from gpuwarden.job_files import RUN_ID
from gpuwarden.refusals import Refusal
from gpuwarden.ruleengine.api_models import LeaveDocument, Seconds, Shape
from gpuwarden.ruleengine.bodies import MAX_BODY_BYTES, read_object, word
from gpuwarden.ruleengine.leave_documents import leave_document, sees
from gpuwarden.ruleengine.leave_records import CAUSES, LeaveOrder
from gpuwarden.ruleengine.leave_settings import MAX_DEADLINE_SECONDS
from gpuwarden.ruleengine.operations import Operation
from gpuwarden.ruleengine.queries import whole
from gpuwarden.ruleengine.roles import Role

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.requests import Request

    from gpuwarden.ruleengine.access import Access
    from gpuwarden.ruleengine.engine import Engine
    from gpuwarden.ruleengine.leave_records import Leave
    from gpuwarden.ruleengine.roles import Person

SCHEMA = "gpuwarden.leaves/v1"
PATH = "/v1/leaves"
MAX_LISTED = 1000
_KEY = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_JOB_ID = re.compile(r"[!-~]{1,256}")
_SUCCESSOR = re.compile(r"[!-~]{0,256}")
_ALLOWED = frozenset(
    {
        *("job_id", "run_id", "at", "then", "deadline_seconds", "cause", "reason", "successor"),
        "key",
    }
)


class LeaveRequestBody(Shape):
    """Asks a running job to save and leave."""

    job_id: str = ""
    """The attempt; or give run_id, or both."""
    run_id: str = ""
    """The trainer's run."""
    at: str
    """step, or epoch."""
    then: str
    """requeue, or hold: what its exit status is to tell its platform."""
    deadline_seconds: Seconds
    """How long it has; at most an hour, and leaves.longest."""
    cause: str
    """priority, booking, window or budget."""
    reason: str
    """One line for the owner."""
    successor: str = ""
    """What is to start in its place."""
    key: str
    """Names this very request: repeated with the same key it is answered, and not made again."""


class LeaveList(Shape):
    """Leave requests that who asks may see, newest first."""

    schema_: Annotated[str, Field(alias="schema")]
    leaves: list[LeaveDocument]


class LeaveRoutes:
    """Handlers over one engine's leaves.

    Args:
        engine: that signs and follows them.
        access: who may ask, and who may see what.
    """

    def __init__(self, engine: Engine, access: Access) -> None:
        self._engine = engine
        self._access = access

    def operations(self) -> list[Operation]:
        """What is offered."""
        unknown = {404: "There is no such leave that you may see."}
        return [
            Operation(
                "GET",
                PATH,
                self.leaves,
                "Jobs that a scheduler has asked to leave, newest first.",
                TypeAdapter(LeaveList),
                parameters={"limit": ("integer", "How many; 100 by default, 1000 at most.")},
                refusals={400: "The limit is no number."},
            ),
            Operation(
                "POST",
                PATH,
                self.ask,
                "Have a running job asked to save and leave, once for each key; nobody is ended.",
                TypeAdapter(LeaveDocument),
                status=202,
                body=TypeAdapter(LeaveRequestBody),
                least=Role.SCHEDULER,
                refusals={
                    400: "The body cannot be read.",
                    404: "No such job is seen.",
                    409: "Something speaks against it: a protection, a rule's decision, an earlier "
                    "request, what is known of the fleet, a pause or the kill switch.",
                    413: "The body is too large.",
                    429: "A limit of `leaves` is reached: later.",
                    503: "Too little is known now, or an agent does not answer, or the ledger "
                    "cannot be written: nothing was done, repeat it with the same key.",
                },
            ),
            Operation(
                "GET",
                f"{PATH}/{{leave_id}}",
                self.leave,
                "One leave and every step that was seen of it.",
                TypeAdapter(LeaveDocument),
                refusals=unknown,
            ),
            Operation(
                "DELETE",
                f"{PATH}/{{leave_id}}",
                self.withdraw,
                "Take a leave back; nothing where it has its result.",
                TypeAdapter(LeaveDocument),
                least=Role.SCHEDULER,
                refusals=unknown,
            ),
        ]

    async def leaves(self, request: Request) -> Response:
        """Those that may be seen."""
        person = self._access.api(request)
        asked = whole(request.query_params.get("limit"), "limit")
        limit = 100 if asked is None else max(1, min(asked, MAX_LISTED))
        return JSONResponse(leaves_document(self._engine, person, limit=limit))

    async def ask(self, request: Request) -> Response:
        """Have a job asked to leave."""
        person = self._access.sign_ins.changer(request, Role.SCHEDULER)
        order = order_of(await read_object(request, MAX_BODY_BYTES))
        leave = await self._engine.leaves.ask(order, by=person.name)
        return JSONResponse(leave_document(self._engine, leave), status_code=202)

    async def leave(self, request: Request) -> Response:
        """One of them."""
        return JSONResponse(leave_document(self._engine, self._seen(request)))

    def _seen(self, request: Request) -> Leave:
        person = self._access.api(request)
        found = self._engine.leaves.store.get(request.path_params["leave_id"])
        if found is None or not sees(self._engine, person, found):
            raise Refusal(404, "unknown_leave", "there is no such leave; see GET /v1/leaves")
        return found

    async def withdraw(self, request: Request) -> Response:
        """Take one back; a scheduler only its own."""
        person = self._access.sign_ins.changer(request, Role.SCHEDULER)
        found = self._engine.leaves.store.get(request.path_params["leave_id"])
        if found is None or (found.by != person.name and not person.sees_all):
            raise Refusal(404, "unknown_leave", "there is no such leave; see GET /v1/leaves")
        await self._engine.leaves.withdraw(found, f"taken back by {person.name}")
        current = self._engine.leaves.store.get(found.id) or found
        return JSONResponse(leave_document(self._engine, current))


def leaves_document(engine: Engine, person: Person, *, limit: int) -> dict[str, Any]:
    """The newest leaves that a person may see."""
    found = [
        leave_document(engine, leave)
        for leave in engine.leaves.store.newest(MAX_LISTED)
        if sees(engine, person, leave)
    ]
    return {"schema": SCHEMA, "leaves": found[:limit]}


def order_of(body: Mapping[str, Any]) -> LeaveOrder:
    """What a body asks for.

    Raises:
        Refusal: 400, naming the field.
    """
    unknown = sorted(set(body) - _ALLOWED)
    if unknown:
        raise Refusal(400, "malformed", f"unknown field {json.dumps(unknown[0])[:100]}")
    deadline = body.get("deadline_seconds")
    if (
        not isinstance(deadline, int | float)
        or isinstance(deadline, bool)
        or not 1 <= deadline <= MAX_DEADLINE_SECONDS
        or not math.isfinite(deadline)
    ):
        most = f"{MAX_DEADLINE_SECONDS:g}"
        raise Refusal(400, "malformed", f"deadline_seconds is not a number from 1 to {most}")
    job_id, run_id = _text(body, "job_id", _JOB_ID), _text(body, "run_id", RUN_ID)
    if not job_id and not run_id:
        raise Refusal(400, "malformed", "give job_id, or run_id, or both")
    return LeaveOrder(
        job_id=job_id,
        run_id=run_id,
        at=_one_of(body, "at", ("step", "epoch")),
        then=_one_of(body, "then", ("requeue", "hold")),
        deadline=float(deadline),
        cause=_one_of(body, "cause", CAUSES),
        reason=word(body, "reason"),
        successor=_text(body, "successor", _SUCCESSOR),
        key=_text(body, "key", _KEY, needed=True),
    )


def _text(
    body: Mapping[str, Any], name: str, pattern: re.Pattern[str], *, needed: bool = False
) -> str:
    value = body.get(name, "")
    if value == "" and not needed:
        return ""
    if not isinstance(value, str) or pattern.fullmatch(value) is None:
        raise Refusal(400, "malformed", f"{name} is not a text that matches {pattern.pattern}")
    return value


def _one_of(body: Mapping[str, Any], name: str, words: tuple[str, ...]) -> str:
    value = body.get(name)
    if not isinstance(value, str) or value not in words:
        raise Refusal(400, "malformed", f"{name} is none of {', '.join(words)}")
    return value
