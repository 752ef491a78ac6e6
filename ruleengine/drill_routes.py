"""Drills over HTTP: how they stand, and asking for one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import TypeAdapter
from starlette.responses import JSONResponse, Response

from gpuwarden.refusals import Refusal
from gpuwarden.ruleengine.api_engine_models import Drill, DrillRequest, Drills
from gpuwarden.ruleengine.bodies import MAX_BODY_BYTES, read_object, word
from gpuwarden.ruleengine.operations import Operation
from gpuwarden.ruleengine.roles import Role

if TYPE_CHECKING:
    from starlette.requests import Request

    from gpuwarden.ruleengine.access import Access
    from gpuwarden.ruleengine.engine import Engine


class DrillRoutes:
    """Handlers over one engine's drills.

    Args:
        engine: that follows them.
        access: who may.
    """

    def __init__(self, engine: Engine, access: Access) -> None:
        self._engine = engine
        self._access = access

    def operations(self) -> list[Operation]:
        """What is offered."""
        return [
            Operation(
                "GET",
                "/v1/drills",
                self.drills,
                "How drills stand on every node, and which are overdue.",
                TypeAdapter(Drills),
            ),
            Operation(
                "GET",
                "/v1/drills/{drill_id}",
                self.drill,
                "One drill, step by step.",
                TypeAdapter(Drill),
                refusals={404: "There is no such drill."},
            ),
            Operation(
                "POST",
                "/v1/drills",
                self.ask,
                "Expect a drill's victim on a node from now on; the engine starts none.",
                TypeAdapter(Drill),
                status=201,
                body=TypeAdapter(DrillRequest),
                least=Role.ADMIN,
                refusals={
                    400: "The body cannot be read.",
                    404: "No such node is scraped.",
                    409: "No drill is configured, its rule is unfit, or one is going on there.",
                    413: "The body is too large.",
                },
            ),
        ]

    async def drills(self, request: Request) -> Response:
        """How drills stand."""
        self._access.api(request)
        return JSONResponse(self._engine.drills.document())

    async def drill(self, request: Request) -> Response:
        """One drill."""
        self._access.api(request)
        number = request.path_params["drill_id"]
        plain = number.isascii() and number.isdecimal() and len(number) <= 15
        found = self._engine.drills.drill(int(number)) if plain else None
        if found is None:
            raise Refusal(404, "unknown_drill", "there is no such drill; see GET /v1/drills")
        return JSONResponse(self._engine.drills.record(found))

    async def ask(self, request: Request) -> Response:
        """Expect a victim: {node, reason}."""
        person = self._access.sign_ins.changer(request, Role.ADMIN)
        body = await read_object(request, MAX_BODY_BYTES)
        desk = self._engine.drills
        found = desk.request(
            word(body, "node"),
            by=person.name,
            reason=word(body, "reason"),
            facts=self._engine.view.facts,
        )
        return JSONResponse(desk.record(found), status_code=201)
