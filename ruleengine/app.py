"""The engine's HTTP side: metrics, health, the last hop of notices, jobs and their pages, keeps."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from gpuwarden import durations
from gpuwarden.ruleengine import cases, explain, lookups, notices, tickets
from gpuwarden.ruleengine.alertmanager import rfc3339
from gpuwarden.ruleengine.deliveries import MalformedMessage
from gpuwarden.ruleengine.metrics import EngineCollector, render
from gpuwarden.ruleengine.node_routes import NodeRoutes
from gpuwarden.ruleengine.refusals import Refusal, authorise, read_json, refused

if TYPE_CHECKING:
    from starlette.requests import Request

    from gpuwarden.ruleengine.deliveries import LastHop
    from gpuwarden.ruleengine.engine import Engine
    from gpuwarden.ruleengine.model import Rule
    from gpuwarden.ruleengine.records import StoredCase

MAX_NOTIFY_BYTES = 4 * 1024 * 1024
MAX_KEEP_BYTES = 16 * 1024
MAX_KEEP_SECONDS = 30 * 86400.0
"""Longest keep of an operator; what must stay longer belongs on the whitelist, with its reason."""
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
        engine: read by pages, changed only by keeps.
        last_hop: what Alertmanager's messages go to.
        notify_token: Alertmanager's, or None: the last hop is closed.
        operator_token: operators', or None: operators cannot keep jobs.
        ticket_key: secret of owners' tickets, or None.
        node_token: the nodes', or None: no node can register.
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
    ) -> None:
        self._engine = engine
        self._last_hop = last_hop
        self._notify_token = notify_token
        self._operator_token = operator_token
        self._ticket_key = ticket_key
        self._collector = EngineCollector(engine)
        self._nodes = NodeRoutes(engine, node_token=node_token, operator_token=operator_token)

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
            ],
            exception_handlers={Refusal: refused},
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

    async def jobs(self, _request: Request) -> Response:
        """Every running job."""
        return JSONResponse(explain.jobs_document(self._engine))

    async def job(self, request: Request) -> Response:
        """Everything known of one job."""
        return JSONResponse(self._document(request))

    async def matches(self, request: Request) -> Response:
        """The jobs that a job_id, a run_id or the beginning of either may mean."""
        return JSONResponse(lookups.matches_document(self._engine, request.path_params["word"]))

    async def decision(self, request: Request) -> Response:
        """One decision and what became of it."""
        found = self._engine.ledger.decision(request.path_params["decision_id"])
        if found is None:
            raise Refusal(404, "unknown_decision", "there is no such decision")
        return JSONResponse(explain.decision_record(found))

    async def jobs_page(self, _request: Request) -> Response:
        """Every running job, for people."""
        page = explain.jobs_page(explain.jobs_document(self._engine))
        return HTMLResponse(page, headers=_SAFE_HEADERS)

    async def job_page(self, request: Request) -> Response:
        """Why was my job ended, or why not."""
        return HTMLResponse(explain.job_page(self._document(request)), headers=_SAFE_HEADERS)

    def _document(self, request: Request) -> dict[str, Any]:
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
        body = await read_json(request, MAX_KEEP_BYTES)
        if not isinstance(body, dict):
            raise Refusal(400, "malformed", "the body is not a JSON object")
        job_id, rule_id = _word(body, "job_id"), _word(body, "rule")
        reason, seconds = _word(body, "reason"), _seconds(body)
        if "ticket" in body:
            if not tickets.valid(self._ticket_key, rule_id, job_id, _word(body, "ticket")):
                raise Refusal(403, "bad_ticket", "the ticket is not that of this job and rule")
            role = "owner"
        else:
            authorise(request, self._operator_token, "web.operator_token_file")
            role = "operator"
        stored, rule = self._open(rule_id, job_id)
        if role == "owner":
            by = stored.case.user or "owner"
            self._owner_may(stored, rule, seconds)
        else:
            by = _word(body, "by") if "by" in body else "operator"
            if seconds > MAX_KEEP_SECONDS:
                raise Refusal(
                    403,
                    "too_long",
                    f"at most {durations.render(MAX_KEEP_SECONDS)}; put what must "
                    "stay longer on the whitelist",
                )
        keep = self._engine.keep(stored, rule, role=role, by=by, reason=reason, seconds=seconds)
        return JSONResponse(
            {
                "job_id": job_id,
                "rule": rule_id,
                "until": rfc3339(keep.until),
                "seconds": seconds,
                "role": role,
            },
            status_code=201,
        )

    def _open(self, rule_id: str, job_id: str) -> tuple[StoredCase, Rule]:
        stored = self._engine.cases.get(rule_id, job_id)
        rule = self._engine.rulebook.rule(rule_id)
        if stored is None or rule is None or stored.case.detected_at is None:
            raise Refusal(404, "no_case", f"{job_id} does not break the rule {rule_id} now")
        if cases.final_stage(rule) is None:
            raise Refusal(409, "no_deadline", f"the rule {rule_id} ends no job")
        if stored.case.decision_id is not None:
            raise Refusal(409, "too_late", f"{job_id} is already being ended")
        return stored, rule

    def _owner_may(self, stored: StoredCase, rule: Rule, seconds: float) -> None:
        may = notices.keep_allowance(rule)
        if may is None:
            raise Refusal(403, "not_allowed", f"the rule {rule.id} cannot be put off by owners")
        if seconds > may.keep:
            raise Refusal(403, "too_long", f"at most {durations.render(may.keep)} at a time")
        case = stored.case
        keeps = self._engine.ledger.keeps(rule.id, case.job_id, case.run_id)
        used = sum(1 for keep in keeps if keep.role == "owner")
        if used >= may.times:
            raise Refusal(
                403, "used_up", f"kept {used} times already; the rule {rule.id} allows {may.times}"
            )


def _word(body: dict[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str) or not value.strip() or len(value) > 300:
        raise Refusal(400, "malformed", f"{name} is not a text of 1 to 300 characters")
    return " ".join(value.split())


def _seconds(body: dict[str, Any]) -> float:
    try:
        seconds = durations.parse(_word(body, "for"))
    except ValueError as error:
        raise Refusal(400, "malformed", f"for: {error}") from error
    if seconds <= 0:
        raise Refusal(400, "malformed", "for: must be more than 0s")
    return seconds
