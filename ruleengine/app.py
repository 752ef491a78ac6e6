"""The engine's HTTP side: metrics, health, the last hop of notices, jobs and their pages, keeps."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from gpuwarden.ruleengine import explain, lookups, tickets
from gpuwarden.ruleengine.access import Access, SignInNeeded
from gpuwarden.ruleengine.alertmanager import rfc3339
from gpuwarden.ruleengine.bodies import MAX_BODY_BYTES, read_object, seconds, word
from gpuwarden.ruleengine.deliveries import MalformedMessage
from gpuwarden.ruleengine.enforcement_routes import EnforcementRoutes
from gpuwarden.ruleengine.keeps import KeepDesk
from gpuwarden.ruleengine.metrics import EngineCollector, render
from gpuwarden.ruleengine.node_routes import NodeRoutes
from gpuwarden.ruleengine.refusals import Refusal, authorise, read_json, refused, signed_out
from gpuwarden.ruleengine.roles import Role
from gpuwarden.ruleengine.sign_ins import SHARED, SignIns, Token

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.requests import Request

    from gpuwarden.ruleengine.deliveries import LastHop
    from gpuwarden.ruleengine.engine import Engine
    from gpuwarden.ruleengine.roles import Person

MAX_NOTIFY_BYTES = 4 * 1024 * 1024
_SLACK_TARGET = re.compile(r"[UWCGD][A-Z0-9]{5,20}|#[a-z0-9._-]{1,80}")
_SAFE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


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
    ) -> None:
        self._engine = engine
        self._last_hop = last_hop
        self._notify_token = notify_token
        self._ticket_key = ticket_key
        self._collector = EngineCollector(engine)
        shared = () if operator_token is None else (_shared(operator_token),)
        sign_ins = SignIns(
            engine.settings.web,
            (*shared, *tokens),
            directory=lambda: engine.rulebook.directory,
            clock=engine.clock,
            external_url=engine.settings.external_url,
        )
        self._sign_ins = sign_ins
        self._access = Access(engine, sign_ins)
        self._desk = KeepDesk(engine)
        self._nodes = NodeRoutes(engine, node_token=node_token, access=self._access)
        self._enforcement = EnforcementRoutes(engine, sign_ins)

    def starlette(self) -> Starlette:
        """The ASGI application."""
        return Starlette(
            routes=[
                Route("/", self.landing),
                Route("/metrics", self.metrics),
                Route("/-/healthy", self.healthy),
                Route("/-/ready", self.ready),
                Route("/v1/notify/{channels}", self.notify, methods=["POST"]),
                Route("/v1/jobs", self.jobs),
                Route("/v1/jobs/{job_id}", self.job),
                Route("/v1/matches/{word}", self.matches),
                Route("/v1/decisions/{decision_id}", self.decision),
                Route("/v1/keeps", self.keep, methods=["POST"]),
                Route("/jobs", self.jobs_page),
                Route("/jobs/{job_id}", self.job_page),
                *self._nodes.routes(),
                *self._enforcement.routes(),
            ],
            exception_handlers={Refusal: refused, SignInNeeded: signed_out},
        )

    # -- reading

    async def landing(self, _request: Request) -> Response:
        """Where everything is."""
        return HTMLResponse(
            '<!doctype html><html lang="en"><title>gpuwarden engine</title>'
            "<h1>gpuwarden engine</h1>"
            '<ul><li><a href="/jobs">jobs</a></li><li><a href="/metrics">metrics</a></li>'
            '<li><a href="/-/ready">ready</a></li></ul></html>',
            headers=_SAFE_HEADERS,
        )

    async def metrics(self, request: Request) -> Response:
        """The catalogue's families of the engine."""
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

    async def jobs(self, request: Request) -> Response:
        """Every running job that is theirs to see."""
        person = self._access.api(request)
        return JSONResponse(explain.jobs_document(self._engine, person.sees))

    async def job(self, request: Request) -> Response:
        """Everything known of one job."""
        return JSONResponse(self._document(request, self._access.api(request)))

    async def matches(self, request: Request) -> Response:
        """The jobs that a job_id, a run_id or the beginning of either may mean."""
        person = self._access.api(request)
        found = lookups.matches_document(self._engine, request.path_params["word"])
        rows = [row for row in found["matches"] if self._access.sees_job(person, row["job_id"])]
        return JSONResponse({**found, "matches": rows})

    async def decision(self, request: Request) -> Response:
        """One decision and what became of it."""
        person = self._access.api(request)
        found = self._engine.ledger.decision(request.path_params["decision_id"])
        if found is None or not self._access.sees_decision(person, found):
            raise Refusal(404, "unknown_decision", "there is no such decision")
        return JSONResponse(explain.decision_record(found))

    async def jobs_page(self, request: Request) -> Response:
        """Every running job, for people."""
        person = self._access.page(request)
        page = explain.jobs_page(explain.jobs_document(self._engine, person.sees))
        return HTMLResponse(page, headers=_SAFE_HEADERS)

    async def job_page(self, request: Request) -> Response:
        """Why was my job ended, or why not."""
        document = self._document(request, self._access.page(request))
        return HTMLResponse(explain.job_page(document), headers=_SAFE_HEADERS)

    def _document(self, request: Request, person: Person) -> dict[str, Any]:
        self._access.check_job(person, request.path_params["job_id"])
        document = explain.job_document(self._engine, request.path_params["job_id"])
        if document is None:
            raise Refusal(404, "unknown_job", "no such job has been seen; see GET /v1/jobs")
        return document

    # -- the last hop

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
        body = await read_json(request, MAX_NOTIFY_BYTES)
        try:
            receipt = await self._last_hop.receive(
                body, list(dict.fromkeys(names)), channel_target=target
            )
        except MalformedMessage as error:
            raise Refusal(400, "malformed", str(error)) from error
        # Alertmanager tries again at once after 5xx, and with the group's next flush after 4xx.
        status = 200 if not receipt.failed else 503 if receipt.retry else 422
        return JSONResponse(
            {"delivered": receipt.delivered, "failed": list(receipt.failed)}, status_code=status
        )

    # -- keeps

    async def keep(self, request: Request) -> Response:
        """Move the deadline of a case: {job_id, rule, for, reason, by?, ticket?}."""
        body = await read_object(request, MAX_BODY_BYTES)
        job_id, rule_id = word(body, "job_id"), word(body, "rule")
        reason, length = word(body, "reason"), seconds(body, "for")
        if "ticket" in body:
            if not tickets.valid(self._ticket_key, rule_id, job_id, word(body, "ticket")):
                raise Refusal(403, "bad_ticket", "the ticket is not that of this job and rule")
            role = Role.OWNER
            stored, _ = self._desk.open_case(rule_id, job_id)
            by = stored.case.user or "owner"
        else:
            person = self._sign_ins.changer(request, Role.OWNER)
            self._access.check_job(person, job_id)
            role = person.role
            # Only of a token that several share can its bearer say who they are.
            by = word(body, "by") if person.shared and "by" in body else person.name
        granted = self._desk.grant(rule_id, job_id, role=role, by=by, reason=reason, seconds=length)
        return JSONResponse(
            {
                "job_id": job_id,
                "rule": rule_id,
                "until": rfc3339(granted.until),
                "seconds": granted.seconds,
                "role": granted.role,
            },
            status_code=201,
        )


def _shared(secret: str) -> Token:
    return Token(SHARED, Role.OPERATOR, secret, shared=True)
