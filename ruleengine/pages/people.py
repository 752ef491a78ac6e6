"""The pages about people: who uses what, and opening names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.responses import RedirectResponse
from starlette.routing import Route

from gpuwarden.refusals import Refusal
from gpuwarden.ruleengine.access import SignInNeeded
from gpuwarden.ruleengine.bodies import optional_seconds, read_form, word
from gpuwarden.ruleengine.name_routes import names_document
from gpuwarden.ruleengine.pages.rendering import HEADERS
from gpuwarden.ruleengine.roles import Role
from gpuwarden.ruleengine.shares import shares_document

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from gpuwarden.ruleengine.access import Access
    from gpuwarden.ruleengine.engine import Engine
    from gpuwarden.ruleengine.pages.rendering import Pages
    from gpuwarden.ruleengine.roles import Person


class People:
    """Handlers of these pages.

    Args:
        engine: whose users they are.
        access: who may see what.
        pages: renders them.
    """

    def __init__(self, engine: Engine, access: Access, pages: Pages) -> None:
        self._engine = engine
        self._access = access
        self._pages = pages

    def routes(self) -> list[Route]:
        """What to serve."""
        return [
            Route("/shares", self.shares),
            Route("/names", self.names),
            Route("/names/open", self.open, methods=["POST"]),
            Route("/names/close", self.close, methods=["POST"]),
        ]

    async def shares(self, request: Request) -> Response:
        """Who uses what."""
        person = self._access.page(request)
        document = shares_document(self._engine, person, self._access.names)
        return self._pages.render("shares.html", request, person, document=document)

    async def names(self, request: Request) -> Response:
        """Whether names are hidden, and the form that opens them."""
        return self._names_page(request, self._access.page(request, Role.OPERATOR))

    def _names_page(
        self, request: Request, person: Person, *, status: int = 200, refusal: str = ""
    ) -> Response:
        return self._pages.render(
            "names.html",
            request,
            person,
            status=status,
            refusal=refusal,
            document=names_document(self._access.names, person),
        )

    async def open(self, request: Request) -> Response:
        """Open names in this session."""
        person, fields = await self._checked(request)
        try:
            self._access.names.open(
                person, reason=word(fields, "reason"), seconds=optional_seconds(fields, "for")
            )
        except Refusal as error:
            text = f"Names were not opened: {error}."
            return self._names_page(request, person, status=error.status, refusal=text)
        return RedirectResponse("/names", status_code=303, headers=HEADERS)

    async def close(self, request: Request) -> Response:
        """Hide them again."""
        person, _ = await self._checked(request)
        self._access.names.close(person)
        return RedirectResponse("/names", status_code=303, headers=HEADERS)

    async def _checked(self, request: Request) -> tuple[Person, dict[str, str]]:
        """Who sent a form, and its fields, if it is theirs and they are an operator.

        Raises:
            SignInNeeded: nobody who is known.
            Refusal: it is not theirs, or they may not.
        """
        sign_ins = self._access.sign_ins
        person = sign_ins.visitor(request)
        if person is None:
            raise SignInNeeded
        fields = await read_form(request)
        sign_ins.check_form(request, person, fields.get("form", ""))
        if not person.role.includes(Role.OPERATOR):
            raise Refusal(403, "role", f"{person.name} is {person.role}; this is for operators")
        return person, fields
