"""What the API offers, as data: routes and their description come from the same table."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.routing import Route

from gpuwarden.ruleengine.roles import Role

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from pydantic import TypeAdapter
    from starlette.requests import Request
    from starlette.responses import Response


@dataclass(frozen=True, slots=True)
class Operation:
    """One thing that the API does.

    Attributes:
        method: of HTTP.
        path: with parameters in braces.
        handler: what answers it.
        summary: what it does, in one sentence.
        answer: the shape of the answer, or None: the answer is not described in JSON.
        status: of the answer when it was done.
        body: the shape of what is sent, or None: nothing is.
        least: the role that it takes; None where the text of `opened_by` says what it takes.
        opened_by: what opens it in the place of a role: a token of its own.
        parameters: of the query: name -> (type, description).
        refusals: statuses of HTTP beside those of signing in: status -> when.
    """

    method: str
    path: str
    handler: Callable[[Request], Awaitable[Response]]
    summary: str
    answer: TypeAdapter[Any] | None
    status: int = 200
    body: TypeAdapter[Any] | None = None
    least: Role | None = Role.OWNER
    opened_by: str = ""
    parameters: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    refusals: Mapping[int, str] = field(default_factory=dict)

    def route(self) -> Route:
        """What to serve."""
        return Route(self.path, self.handler, methods=[self.method])
