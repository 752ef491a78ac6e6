"""Who uses what, and opening names, for programs and the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter
from starlette.responses import JSONResponse

from gpuwarden.ruleengine import api_name_models as shapes
from gpuwarden.ruleengine.alertmanager import rfc3339
from gpuwarden.ruleengine.bodies import MAX_BODY_BYTES, optional_seconds, read_object, word
from gpuwarden.ruleengine.operations import Operation
from gpuwarden.ruleengine.roles import Role
from gpuwarden.ruleengine.shares import shares_document

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from gpuwarden.ruleengine.access import Access
    from gpuwarden.ruleengine.engine import Engine
    from gpuwarden.ruleengine.names import Names
    from gpuwarden.ruleengine.roles import Person

SCHEMA = "gpuwarden.names/v1"


class NameRoutes:
    """Handlers over one engine.

    Args:
        engine: whose users they are.
        access: who may.
        names: what is opened.
    """

    def __init__(self, engine: Engine, access: Access, names: Names) -> None:
        self._engine = engine
        self._access = access
        self._names = names

    def operations(self) -> list[Operation]:
        """What is offered."""
        malformed = {400: "The body cannot be read.", 413: "The body is too large."}
        return [
            Operation(
                "GET",
                "/v1/shares",
                self.shares,
                "Who uses what: cards and jobs by user, with pseudonyms for hidden names.",
                TypeAdapter(shapes.Shares),
            ),
            Operation(
                "GET",
                "/v1/names",
                self.names,
                "Whether names are hidden from you, and until when you have opened them.",
                TypeAdapter(shapes.NamesState),
            ),
            Operation(
                "POST",
                "/v1/names/open",
                self.open,
                "Read every name for a while; why is in the audit.",
                TypeAdapter(shapes.NamesState),
                status=201,
                body=TypeAdapter(shapes.OpenRequest),
                least=Role.OPERATOR,
                refusals={**malformed, 409: "Names are open to you already."},
            ),
            Operation(
                "POST",
                "/v1/names/close",
                self.close,
                "Hide names from you again before the time is over.",
                TypeAdapter(shapes.NamesState),
                least=Role.OPERATOR,
            ),
        ]

    async def shares(self, request: Request) -> Response:
        """Who uses what."""
        person = self._access.api(request)
        return JSONResponse(shares_document(self._engine, person, self._names))

    async def names(self, request: Request) -> Response:
        """Whether names are hidden."""
        return JSONResponse(names_document(self._names, self._access.api(request)))

    async def open(self, request: Request) -> Response:
        """Open names: {reason, for?}."""
        person = self._access.sign_ins.changer(request, Role.OPERATOR)
        body = await read_object(request, MAX_BODY_BYTES)
        reason, seconds = word(body, "reason"), optional_seconds(body, "for")
        self._names.open(person, reason=reason, seconds=seconds)
        return JSONResponse(names_document(self._names, person), status_code=201)

    async def close(self, request: Request) -> Response:
        """Hide them again."""
        person = self._access.sign_ins.changer(request, Role.OPERATOR)
        self._names.close(person)
        return JSONResponse(names_document(self._names, person))


def names_document(names: Names, person: Person) -> dict[str, Any]:
    """Whether names are hidden from a person, and until when they have opened them."""
    until = names.opened_until(person)
    return {
        "schema": SCHEMA,
        "hidden": names.veils(person),
        "can_open": names.must_open(person),
        "opened_until": None if until is None else rfc3339(until),
    }
