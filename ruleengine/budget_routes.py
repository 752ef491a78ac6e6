"""How budgets stand, for programs and as a page: to members of the team, and to operators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, TypeAdapter
from starlette.responses import JSONResponse
from starlette.routing import Route

from gpuwarden.ruleengine.api_models import Shape, Time
from gpuwarden.ruleengine.budget_uses import standing_line
from gpuwarden.ruleengine.operations import Operation
from gpuwarden.ruleengine.schedule_rows import budget_rows

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.requests import Request
    from starlette.responses import Response

    from gpuwarden.ruleengine.access import Access
    from gpuwarden.ruleengine.engine import Engine
    from gpuwarden.ruleengine.pages.rendering import Pages
    from gpuwarden.ruleengine.roles import Person
    from gpuwarden.ruleengine.schedules import Schedule

SCHEMA = "gpuwarden.budgets/v1"


class BudgetForecast(Shape):
    """What will be used by the period's end at the pace of late; within four times in five."""

    low: float
    expected: float
    high: float


class BudgetStanding(Shape):
    """How one budget stands."""

    team: str
    period: str
    """day, week or month."""
    kind: str
    """hard or soft."""
    unit: str
    """GPU-hours, or a currency."""
    limit: float
    begins: Time
    ends: Time
    used: float | None
    """None where it is not known."""
    share: float | None
    """Used of the limit; 1 is all of it."""
    forecast: BudgetForecast | None
    why_not: str
    """Why `used` is not known."""


class BudgetList(Shape):
    """The budgets that who asks may see, fullest first."""

    schema_: Annotated[str, Field(alias="schema")]
    budgets: list[BudgetStanding]


class BudgetRoutes:
    """Handlers over one engine.

    Args:
        engine: whose budgets they are.
        access: who may see what.
        pages: renders the page.
        schedule: what is known of the scheduler's budgets.
    """

    def __init__(
        self,
        engine: Engine,
        access: Access,
        pages: Pages,
        *,
        schedule: Callable[[], Awaitable[Schedule]],
    ) -> None:
        self._schedule = schedule
        self._engine = engine
        self._access = access
        self._pages = pages

    def operations(self) -> list[Operation]:
        """What is offered to programs."""
        return [
            Operation(
                "GET",
                "/v1/budgets",
                self.budgets,
                "How the budgets of your teams stand; of all teams to operators.",
                TypeAdapter(BudgetList),
            )
        ]

    def routes(self) -> list[Route]:
        """What is offered to browsers."""
        return [Route("/budgets", self.page)]

    async def budgets(self, request: Request) -> Response:
        """Every budget that may be seen."""
        return JSONResponse(budgets_document(self._engine, self._access.api(request)))

    async def page(self, request: Request) -> Response:
        """The same for people."""
        person = self._access.page(request)
        document = budgets_document(self._engine, person)
        rows = [{**row, "line": standing_line(row)} for row in document["budgets"]]
        found = await self._schedule()
        return self._pages.render(
            "budgets.html",
            request,
            person,
            rows=rows,
            planned=[] if found.document is None else budget_rows(found.document, person),
            problem="" if self._engine.settings.scheduler is None else found.problem,
        )


def budgets_document(engine: Engine, person: Person) -> dict[str, Any]:
    """The budgets that a person may see, fullest first; what is not known stands at the end."""
    every = person.sees_all
    standings = engine.budgets.standings()
    seen = [each for each in standings if every or each.budget.team in person.teams]
    seen.sort(key=lambda each: -1.0 if each.share is None else each.share, reverse=True)
    return {"schema": SCHEMA, "budgets": [each.document() for each in seen]}
