"""The engine's HTTP side put together: metrics, health, the last hop of notices, API and pages."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING

import structlog
from pydantic import TypeAdapter
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from gpuwarden.refusals import Refusal, authorise, read_json, refused
from gpuwarden.ruleengine import openapi
from gpuwarden.ruleengine.access import Access, SignInNeeded
from gpuwarden.ruleengine.answer_headers import AnswerHeaders
from gpuwarden.ruleengine.api import Api
from gpuwarden.ruleengine.api_engine_models import Delivered
from gpuwarden.ruleengine.audit_routes import AuditRoutes
from gpuwarden.ruleengine.base_paths import BasePath, base_of
from gpuwarden.ruleengine.budget_routes import BudgetRoutes
from gpuwarden.ruleengine.deliveries import MalformedMessage
from gpuwarden.ruleengine.drill_routes import DrillRoutes
from gpuwarden.ruleengine.enforcement_routes import EnforcementRoutes
from gpuwarden.ruleengine.fleet_figures import FleetFigures
from gpuwarden.ruleengine.job_histories import JobHistories
from gpuwarden.ruleengine.keeps import KeepDesk
from gpuwarden.ruleengine.leave_routes import LeaveRoutes
from gpuwarden.ruleengine.ledger_handles import LedgerUnusable
from gpuwarden.ruleengine.links import Links
from gpuwarden.ruleengine.metrics import EngineCollector, render
from gpuwarden.ruleengine.name_routes import NameRoutes
from gpuwarden.ruleengine.names import Names
from gpuwarden.ruleengine.node_routes import NodeRoutes
from gpuwarden.ruleengine.operations import Operation
from gpuwarden.ruleengine.pages.forms import Forms
from gpuwarden.ruleengine.pages.people import People
from gpuwarden.ruleengine.pages.readings import Readings
from gpuwarden.ruleengine.pages.rendering import Pages
from gpuwarden.ruleengine.pages.schedules import SchedulePages
from gpuwarden.ruleengine.roles import Role
from gpuwarden.ruleengine.sign_ins import SHARED, SignIns, Token
from gpuwarden.ruleengine.texts.speeches import LANGUAGES
from gpuwarden.ruleengine.trial_routes import TrialRoutes

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from starlette.requests import Request

    from gpuwarden.ruleengine.deliveries import LastHop
    from gpuwarden.ruleengine.engine import Engine
    from gpuwarden.ruleengine.fleet_figures import FigureSource
    from gpuwarden.ruleengine.job_histories import SeriesSource
    from gpuwarden.ruleengine.schedules import Schedules

MAX_NOTIFY_BYTES = 4 * 1024 * 1024
log = structlog.get_logger(__name__)
_SLACK_TARGET = re.compile(r"[UWCGD][A-Z0-9]{5,20}|#[a-z0-9._-]{1,80}")


class EngineApp:
    """Handlers over one engine.

    Args:
        engine: read by pages, changed only by keeps and pauses.
        last_hop: what Alertmanager's messages go to.
        notify_token: Alertmanager's, or None: the last hop is closed.
        operator_token: one that operators share, or None.
        ticket_key: secret of owners' tickets and signed links, or None.
        node_token: the nodes', or None: no node can register.
        tokens: of those who have one of their own.
        series: for the charts of jobs, or None: there are none.
        session_key: that sessions are signed with; by default one that only this process has.
        metrics_token: that Prometheus shows, or None: anybody reads /metrics.
        names: whose names who reads; by default made from ticket_key.
        figures: what jobs measure, for who watches the fleet, or None: only what rules know.
        schedules: what the scheduler tells, or None: engine.yaml names none.
    """

    def __init__(
        self,
        engine: Engine,
        last_hop: LastHop,
        *,
        notify_token: str | None,
        operator_token: str | None,
        ticket_key: bytes | None,
        node_token: str | None = None,
        tokens: Sequence[Token] = (),
        series: SeriesSource | None = None,
        session_key: bytes | None = None,
        metrics_token: str | None = None,
        names: Names | None = None,
        figures: FigureSource | None = None,
        schedules: Schedules | None = None,
    ) -> None:
        self._engine = engine
        self._last_hop = last_hop
        self._notify_token = notify_token
        self._collector = EngineCollector(engine)
        shared = () if operator_token is None else (_shared(operator_token),)
        sign_ins = SignIns(
            engine.settings.web,
            (*shared, *tokens),
            directory=lambda: engine.rulebook.directory,
            clock=engine.clock,
            external_url=engine.settings.external_url,
            key=session_key,
        )
        self._sign_ins = sign_ins
        self._metrics_token = metrics_token
        self._names = names or Names(
            engine,
            ticket_key,
            identified=sign_ins.possible or engine.settings.web.proxy is not None,
        )
        access, desk = Access(engine, sign_ins, self._names), KeepDesk(engine)
        histories = JobHistories(series, engine.clock)
        pages = Pages(engine, sign_ins, self._names)
        self._people = People(engine, access, pages)
        self._schedules = SchedulePages(engine, access, pages, schedules=schedules, key=ticket_key)
        self._budgets = BudgetRoutes(engine, access, pages, schedule=self._schedules.schedule)
        self._readings = Readings(engine, access, pages, desk=desk, histories=histories)
        self._forms = Forms(
            engine,
            access,
            pages,
            readings=self._readings,
            desk=desk,
            links=Links(ticket_key, engine.settings.external_url),
        )
        api = Api(
            engine,
            access,
            desk=desk,
            ticket_key=ticket_key,
            histories=histories,
            figures=FleetFigures(
                figures, engine.clock, scrape_interval=engine.settings.scrape_interval
            ),
        )
        nodes = NodeRoutes(engine, node_token=node_token, access=access)
        enforcement = EnforcementRoutes(engine, sign_ins)
        self.operations: tuple[Operation, ...] = (
            *api.operations(),
            *AuditRoutes(engine, access).operations(),
            *enforcement.operations(),
            *DrillRoutes(engine, access).operations(),
            *LeaveRoutes(engine, access).operations(),
            *self._budgets.operations(),
            *TrialRoutes(engine, access, ticket_key=ticket_key).operations(),
            *nodes.operations(),
            *NameRoutes(engine, access, self._names).operations(),
            self._notifying(),
            Operation(
                "GET",
                openapi.PATH,
                self.description,
                "This description.",
                None,
                least=None,
            ),
        )
        """Everything that the API offers."""

    def starlette(self) -> Starlette:
        """The ASGI application."""
        base = base_of(self._engine.settings.external_url)
        return Starlette(
            routes=[
                Route("/metrics", self.metrics),
                Route("/-/healthy", self.healthy),
                Route("/-/ready", self.ready),
                *(
                    (
                        operation
                        if operation.least is None
                        else replace(operation, handler=self._veiled(operation.handler))
                    ).route()
                    for operation in self.operations
                ),
                *self._readings.routes(),
                *self._people.routes(),
                *self._budgets.routes(),
                *self._schedules.routes(),
                *self._forms.routes(),
            ],
            exception_handlers={
                Refusal: self._refused,
                SignInNeeded: self._forms.signed_out,
                LedgerUnusable: self._unusable,
                HTTPException: self._unserved,
            },
            middleware=[
                Middleware(AnswerHeaders),
                *([Middleware(BasePath, base=base)] if base else []),
            ],
        )

    def _veiled(
        self, handler: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """A handler of the API whose answers name nobody whose name its reader may not read."""

        async def answered(request: Request) -> Response:
            answer = await handler(request)
            if not isinstance(answer, JSONResponse):
                return answer
            try:
                person = self._sign_ins.reader(request, cookies=False)
            except Refusal:
                person = None  # a node's or a ticket's own answer
            if person is None or not self._names.veils(person):
                return answer
            body = self._names.veil(person, json.loads(bytes(answer.body)))
            return JSONResponse(body, status_code=answer.status_code)

        return answered

    async def _refused(self, request: Request, error: Exception) -> Response:
        if isinstance(error, Refusal) and not request.url.path.startswith("/v1/"):
            return await self._forms.refused(request, error)
        return await refused(request, error)

    async def _unserved(self, request: Request, error: Exception) -> Response:
        # The router's own: a path that is not there, or not for this method.
        status = error.status_code if isinstance(error, HTTPException) else 500
        name, text = {
            404: ("not_found", "there is nothing at this address"),
            405: ("method", f"{request.method} is not for this address"),
        }.get(status, ("refused", "this cannot be answered"))
        answer = await self._refused(request, Refusal(status, name, text))
        answer.headers.update(getattr(error, "headers", None) or {})
        return answer

    async def _unusable(self, request: Request, error: Exception) -> Response:
        # What could not be written was not done: whoever asked for it must not believe that it was.
        log.error("a change could not be written", error=str(error))
        return await self._refused(request, Refusal(503, "ledger", str(error)))

    async def description(self, _request: Request) -> Response:
        """The API in OpenAPI 3.1."""
        return JSONResponse(openapi.describe(self.operations))

    # -- for Prometheus and supervisors

    async def metrics(self, request: Request) -> Response:
        """The catalogue's families of the engine."""
        if self._metrics_token is not None:
            authorise(request, self._metrics_token, "web.metrics_token_file")
        body, content_type = render(self._collector, request.headers.get("Accept", ""))
        return Response(body, media_type=None, headers={"Content-Type": content_type})

    async def healthy(self, _request: Request) -> Response:
        """200 while the process answers."""
        return PlainTextResponse("gpuwarden engine is healthy\n")

    async def ready(self, _request: Request) -> Response:
        """200 while ticks complete on the files on disk; else 503 and why not."""
        problems = self._engine.problems
        if problems:
            return PlainTextResponse("".join(f"{text}\n" for text in problems), status_code=503)
        return PlainTextResponse("gpuwarden engine is ready\n")

    # -- the last hop

    def _notifying(self) -> Operation:
        return Operation(
            "POST",
            "/v1/notify/{channels}",
            self.notify,
            "Deliver Alertmanager's message; 200 only if a server took every part of it.",
            TypeAdapter(Delivered),
            body=TypeAdapter(dict[str, object]),
            least=None,
            opened_by="Takes the token of web.token_file.",
            parameters={
                "channel": ("string", "A Slack channel in the place of the owner."),
                "language": ("string", "What that channel reads, en or zh."),
            },
            refusals={
                400: "The body is not Alertmanager's, the channel is none of Slack, or the "
                "language is not known.",
                404: "A channel is not configured.",
                413: "The body is too large.",
                422: "No server took a part of it, and none will.",
                503: "No server took a part of it; to be tried again.",
            },
        )

    async def notify(self, request: Request) -> Response:
        """Deliver Alertmanager's message; 200 only if a server took every part of it."""
        authorise(request, self._notify_token, "web.token_file")
        names = request.path_params["channels"].split("+")
        unknown = sorted(set(names) - set(self._last_hop.channel_names))
        if unknown:
            raise Refusal(
                404,
                "unknown_channel",
                f"{', '.join(unknown)}: not configured in engine.yaml; there is "
                f"{', '.join(self._last_hop.channel_names) or 'nothing'}",
            )
        target = request.query_params.get("channel")
        if target is not None and _SLACK_TARGET.fullmatch(target) is None:
            raise Refusal(400, "bad_channel", "channel is neither a Slack id nor #name")
        language = request.query_params.get("language")
        if language is not None and language not in LANGUAGES:
            raise Refusal(400, "bad_language", f"language is none of {', '.join(LANGUAGES)}")
        body = await read_json(request, MAX_NOTIFY_BYTES)
        try:
            receipt = await self._last_hop.receive(
                body,
                list(dict.fromkeys(names)),
                channel_target=target,
                language=next((known for known in LANGUAGES if known == language), None),
            )
        except MalformedMessage as error:
            raise Refusal(400, "malformed", str(error)) from error
        # Alertmanager tries again at once after 5xx, and with the group's next flush after 4xx.
        status = 200 if not receipt.failed else 503 if receipt.retry else 422
        return JSONResponse(
            {"delivered": receipt.delivered, "failed": list(receipt.failed)}, status_code=status
        )


def _shared(secret: str) -> Token:
    return Token(SHARED, Role.OPERATOR, secret, shared=True)
