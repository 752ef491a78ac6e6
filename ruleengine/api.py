"""The JSON API, version 1: everything that the pages show, and every change that they can make.

A change takes the header Authorization, never a cookie: no other site can make a browser send it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter
from starlette.responses import JSONResponse, Response

from gpuwarden.refusals import Refusal
from gpuwarden.ruleengine import api_engine_models as engine_shapes
from gpuwarden.ruleengine import api_fleet_models as fleet_shapes
from gpuwarden.ruleengine import api_models as shapes
from gpuwarden.ruleengine import documents, explain, lookups, tickets
from gpuwarden.ruleengine.alertmanager import rfc3339
from gpuwarden.ruleengine.bodies import MAX_BODY_BYTES, read_object, seconds, word
from gpuwarden.ruleengine.cards import CardFilter, cards_document
from gpuwarden.ruleengine.decision_steps import steps_of
from gpuwarden.ruleengine.documents import JobFilter
from gpuwarden.ruleengine.fleet_documents import (
    DEFAULT_ROWS,
    SORTS,
    FleetFilter,
    FleetPart,
    watched_document,
)
from gpuwarden.ruleengine.fleet_documents import MAX_ROWS as MAX_FLEET_ROWS
from gpuwarden.ruleengine.job_histories import history_document
from gpuwarden.ruleengine.operations import Operation
from gpuwarden.ruleengine.queries import moment, whole
from gpuwarden.ruleengine.roles import Role

if TYPE_CHECKING:
    from starlette.requests import Request

    from gpuwarden.ruleengine.access import Access
    from gpuwarden.ruleengine.engine import Engine
    from gpuwarden.ruleengine.fleet_figures import FleetFigures
    from gpuwarden.ruleengine.job_histories import JobHistories
    from gpuwarden.ruleengine.keeps import KeepDesk
    from gpuwarden.ruleengine.roles import Person

_NO_JOB = {404: "No such job has been seen."}
_NO_NUMBER = {400: "A parameter is not a number."}
_PART = {
    "offset": ("integer", "How many to pass over."),
    "limit": ("integer", "How many at most; all by default."),
}
_LIMIT = ("integer", "How many at most.")


class Api:
    """Handlers over one engine.

    Args:
        engine: read, and changed by keeps.
        access: who may.
        desk: grants keeps.
        ticket_key: secret of owners' tickets, or None.
        histories: of jobs.
        figures: of the fleet.
    """

    def __init__(
        self,
        engine: Engine,
        access: Access,
        *,
        desk: KeepDesk,
        ticket_key: bytes | None,
        histories: JobHistories,
        figures: FleetFigures,
    ) -> None:
        self._engine = engine
        self._access = access
        self._desk = desk
        self._ticket_key = ticket_key
        self._histories = histories
        self._figures = figures

    def operations(self) -> list[Operation]:
        """What is offered."""
        return [
            Operation(
                "GET",
                "/v1/jobs",
                self.jobs,
                "The running jobs, those with open cases first.",
                TypeAdapter(shapes.Jobs),
                parameters={
                    "user": ("string", "A part of the owner's name."),
                    "team": ("string", "The owner's team."),
                    "node": ("string", "A part of the node's address."),
                    "rule": ("string", "A rule that a case is open for."),
                    "broken": ("boolean", "Only jobs that a case is open for."),
                    **_PART,
                },
                refusals=_NO_NUMBER,
            ),
            Operation(
                "GET",
                "/v1/fleet",
                self.fleet,
                "The running jobs as people watch them: what each does, beside what it should do.",
                TypeAdapter(fleet_shapes.Fleet),
                parameters={
                    "user": ("string", "A part of the owner's name."),
                    "team": ("string", "The owner's team."),
                    "node": ("string", "A part of a node's address."),
                    "rule": ("string", "A rule that a case is open for."),
                    "broken": ("boolean", "Only jobs that a case is open for."),
                    "sort": ("string", f"One of {', '.join(SORTS)}; the first by default."),
                    "reverse": ("boolean", "The other way round."),
                    "offset": ("integer", "How many to pass over."),
                    "limit": ("integer", f"How many: {DEFAULT_ROWS}; {MAX_FLEET_ROWS} at most."),
                },
                refusals={400: "A parameter cannot be read."},
            ),
            Operation(
                "GET",
                "/v1/jobs/{job_id}",
                self.job,
                "Everything known of a job: why it was ended, or why not.",
                TypeAdapter(shapes.JobDocument),
                refusals=_NO_JOB,
            ),
            Operation(
                "GET",
                "/v1/jobs/{job_id}/history",
                self.history,
                "What a job did over the last hours, beside what it should do.",
                TypeAdapter(shapes.History),
                refusals=_NO_JOB,
            ),
            Operation(
                "GET",
                "/v1/cards",
                self.cards,
                "Every card, and who holds it.",
                TypeAdapter(shapes.Cards),
                parameters={
                    "node": ("string", "A part of the node's address."),
                    "model": ("string", "A part of the product's name."),
                    "free": ("boolean", "Only cards that no job holds."),
                    **_PART,
                },
                refusals=_NO_NUMBER,
            ),
            Operation(
                "GET",
                "/v1/matches/{word}",
                self.matches,
                "The jobs that a job_id, a run_id or the beginning of either may mean.",
                TypeAdapter(shapes.Matches),
            ),
            Operation(
                "GET",
                "/v1/decisions",
                self.decisions,
                "Decisions to end jobs, newest first.",
                TypeAdapter(shapes.Decisions),
                parameters={"before": ("string", "Only older ones, in RFC 3339."), "limit": _LIMIT},
                refusals={400: "A parameter cannot be read."},
            ),
            Operation(
                "GET",
                "/v1/decisions/{decision_id}",
                self.decision,
                "A decision, on which evidence, and what became of it.",
                TypeAdapter(shapes.Decision),
                refusals={404: "There is no such decision."},
            ),
            Operation(
                "GET",
                "/v1/rules",
                self.rules,
                "The rules in force, in data and in words, with their cases.",
                TypeAdapter(shapes.Rules),
            ),
            Operation(
                "GET",
                "/v1/protections",
                self.protections,
                "The whitelist, and every keep that is in force.",
                TypeAdapter(shapes.Protections),
            ),
            Operation(
                "GET",
                "/v1/health",
                self.health,
                "How the engine does, and what it talks to.",
                TypeAdapter(engine_shapes.Health),
            ),
            Operation(
                "GET",
                "/v1/audit",
                self.audit,
                "What happened to cases, and who changed what and why; newest first.",
                TypeAdapter(engine_shapes.Audit),
                least=Role.OPERATOR,
                parameters={
                    "before": ("integer", "Only events before this one."),
                    "limit": _LIMIT,
                    "people": ("boolean", "Only what somebody changed."),
                },
                refusals=_NO_NUMBER,
            ),
            Operation(
                "POST",
                "/v1/keeps",
                self.keep,
                "Put the end of a job off.",
                TypeAdapter(engine_shapes.Granted),
                status=201,
                body=TypeAdapter(engine_shapes.KeepRequest),
                opened_by="Takes a token of web.tokens, or the ticket of the owner's notice.",
                refusals={
                    400: "The body cannot be read.",
                    403: "Who asks may not, or not for so long, or not again.",
                    404: "The job does not break the rule now.",
                    409: "The rule ends no job, or the job is already being ended.",
                    413: "The body is too large.",
                },
            ),
        ]

    async def jobs(self, request: Request) -> Response:
        """Every running job that is theirs to see."""
        person, query = self._access.api(request), request.query_params
        wanted = JobFilter(
            user=query.get("user", ""),
            team=query.get("team", ""),
            node=query.get("node", ""),
            rule=query.get("rule", ""),
            broken=_yes(query.get("broken")),
        )
        document = documents.fleet_document(
            self._engine,
            person,
            wanted,
            offset=whole(query.get("offset"), "offset") or 0,
            limit=whole(query.get("limit"), "limit"),
            shown=lambda user: self._access.names.shown(person, user),
        )
        return JSONResponse(document)

    async def fleet(self, request: Request) -> Response:
        """The running jobs that are theirs to see, as people watch them."""
        person, query = self._access.api(request), request.query_params
        sort = query.get("sort") or SORTS[0]
        if sort not in SORTS:
            raise Refusal(400, "malformed", f"sort is none of {', '.join(SORTS)}")
        limit = whole(query.get("limit"), "limit")
        document = watched_document(
            self._engine,
            person,
            await self._figures.now(),
            wanted=FleetFilter(
                user=query.get("user", ""),
                team=query.get("team", ""),
                node=query.get("node", ""),
                rule=query.get("rule", ""),
                broken=_yes(query.get("broken")),
            ),
            part=FleetPart(
                sort=sort,
                reverse=_yes(query.get("reverse")),
                offset=whole(query.get("offset"), "offset") or 0,
                limit=DEFAULT_ROWS if limit is None else min(limit, MAX_FLEET_ROWS),
            ),
            shown=lambda user: self._access.names.shown(person, user),
            shown_team=lambda user, team: self._access.names.shown_team(person, user, team),
        )
        return JSONResponse(document)

    async def cards(self, request: Request) -> Response:
        """Every card, and who holds it."""
        person, query = self._access.api(request), request.query_params
        wanted = CardFilter(
            node=query.get("node", ""),
            model=query.get("model", ""),
            free=_yes(query.get("free")),
        )
        document = cards_document(
            self._engine,
            person,
            wanted,
            offset=whole(query.get("offset"), "offset") or 0,
            limit=whole(query.get("limit"), "limit"),
        )
        return JSONResponse(document)

    async def job(self, request: Request) -> Response:
        """Everything known of one job."""
        return JSONResponse(self._document(request, self._access.api(request)))

    def _document(self, request: Request, person: Person) -> dict[str, Any]:
        job_id = request.path_params["job_id"]
        self._access.check_job(person, job_id)
        document = explain.job_document(self._engine, job_id)
        if document is None:
            raise Refusal(404, "unknown_job", "no such job has been seen; see GET /v1/jobs")
        return document

    async def history(self, request: Request) -> Response:
        """What a job did over the last hours."""
        self._document(request, self._access.api(request))
        job_id, facts = request.path_params["job_id"], self._engine.view.facts
        found = await self._histories.history(
            job_id,
            None if facts is None else facts.jobs.get(job_id),
            self._engine.rulebook.rules.profiles,
        )
        return JSONResponse(history_document(job_id, found))

    async def matches(self, request: Request) -> Response:
        """The jobs that a job_id, a run_id or the beginning of either may mean."""
        person = self._access.api(request)
        word = request.path_params["word"]
        return JSONResponse(lookups.matches_document(self._engine, person, word))

    async def decisions(self, request: Request) -> Response:
        """Decisions, newest first."""
        person, query = self._access.api(request), request.query_params
        document = documents.decisions_document(
            self._engine, person, before=moment(query.get("before")), limit=_limit(request)
        )
        return JSONResponse(document)

    async def decision(self, request: Request) -> Response:
        """One decision and what became of it."""
        person = self._access.api(request)
        found = self._engine.ledger.decision(request.path_params["decision_id"])
        if found is None or not self._access.sees_decision(person, found):
            raise Refusal(404, "unknown_decision", "there is no such decision")
        engine = self._engine
        steps = steps_of(engine.ledger, found.id)
        return JSONResponse(explain.decision_record(found, engine.losses.of(found.id), steps))

    async def rules(self, request: Request) -> Response:
        """The rules in force."""
        person = self._access.api(request)
        return JSONResponse(documents.rules_document(self._engine, person))

    async def protections(self, request: Request) -> Response:
        """The whitelist and the keeps."""
        person = self._access.api(request)
        return JSONResponse(documents.protections_document(self._engine, person))

    async def health(self, request: Request) -> Response:
        """How the engine does."""
        self._access.api(request)
        return JSONResponse(documents.health_document(self._engine))

    async def audit(self, request: Request) -> Response:
        """What happened, and who changed what."""
        self._access.api(request, Role.OPERATOR)
        query = request.query_params
        document = documents.audit_document(
            self._engine,
            before=whole(query.get("before"), "before"),
            limit=_limit(request),
            people=_yes(query.get("people")),
        )
        return JSONResponse(document)

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
            person = self._access.sign_ins.changer(request, Role.OWNER)
            self._access.check_job(person, job_id)
            role = person.role
            # Only of a token that several share can its bearer say who they are.
            by = word(body, "by") if person.shared and "by" in body else person.name
        granted = self._desk.grant(rule_id, job_id, role=role, by=by, reason=reason, seconds=length)
        document = {
            "job_id": job_id,
            "rule": rule_id,
            "until": rfc3339(granted.until),
            "seconds": granted.seconds,
            "role": granted.role,
        }
        return JSONResponse(document, status_code=201)


def _limit(request: Request) -> int:
    asked = whole(request.query_params.get("limit"), "limit")
    return min(100 if asked is None else max(1, asked), documents.MAX_ROWS)


def _yes(text: str | None) -> bool:
    return text in ("1", "true")
