"""The pages that change something: signing in and out, keeping a job, pausing enforcement.

A form counts only with the value that its own page gave it, and from a page of ours. A signed link
needs neither: who holds it shows it himself, and no browser adds it to what others send.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from urllib.parse import quote, urlencode

import structlog
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from gpuwarden.refusals import Refusal
from gpuwarden.ruleengine.access import SignInNeeded
from gpuwarden.ruleengine.appeals import APPEALED, AppealDesk
from gpuwarden.ruleengine.bodies import optional_seconds, read_form, seconds, word
from gpuwarden.ruleengine.pages.rendering import HEADERS
from gpuwarden.ruleengine.roles import Role

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.requests import Request

    from gpuwarden.ruleengine.access import Access
    from gpuwarden.ruleengine.engine import Engine
    from gpuwarden.ruleengine.keeps import KeepDesk
    from gpuwarden.ruleengine.links import Claim, Links
    from gpuwarden.ruleengine.pages.readings import Readings
    from gpuwarden.ruleengine.pages.rendering import Pages
    from gpuwarden.ruleengine.roles import Person
    from gpuwarden.ruleengine.sign_ins import SignIns

_LOCAL = re.compile(r"/(?![/\\])[A-Za-z0-9._~%/?=&:+,-]*")
"""Where a sign-in may lead: a path of ours, and never another site."""
_TITLES = {
    403: "Not allowed",
    404: "Not found",
    409: "Not possible",
    410: "This link has ended",
    503: "Nothing was done",
}

_IN_WORDS = {
    "unknown_job": (
        "No job of this name is known, or it is not yours. Of jobs that are over, only those that "
        "broke a rule are remembered."
    ),
}
"""Refusals that say to programs what to ask, in words for people."""

log = structlog.get_logger(__name__)


class Forms:
    """Handlers of the pages that change something.

    Args:
        engine: that is changed.
        access: who may.
        pages: renders what is answered.
        readings: the pages that a refusal is shown on.
        desk: grants keeps.
        links: reads signed links.
    """

    def __init__(
        self,
        engine: Engine,
        access: Access,
        pages: Pages,
        *,
        readings: Readings,
        desk: KeepDesk,
        links: Links,
    ) -> None:
        self._engine = engine
        self._access = access
        self._pages = pages
        self._readings = readings
        self._desk = desk
        self._links = links
        self._appeals = AppealDesk(engine)

    @property
    def _sign_ins(self) -> SignIns:
        return self._access.sign_ins

    def routes(self) -> list[Route]:
        """What to serve."""
        return [
            Route("/sign-in", self.sign_in_page),
            Route("/sign-in", self.sign_in, methods=["POST"]),
            Route("/sign-out", self.sign_out, methods=["POST"]),
            Route("/jobs/{job_id}/keep", self.keep, methods=["POST"]),
            Route("/jobs/{job_id}/appeal", self.appeal, methods=["POST"]),
            Route("/engine/pause", self.pause, methods=["POST"]),
            Route("/engine/resume", self.resume, methods=["POST"]),
            Route("/keep/{token}", self.link_page),
            Route("/keep/{token}", self.keep_by_link, methods=["POST"]),
            Route("/keep/{token}/appeal", self.appeal_by_link, methods=["POST"]),
        ]

    # -- signing in and out

    async def sign_in_page(self, request: Request) -> Response:
        """The form."""
        return self._sign_in_page(request, request.query_params.get("next", "/"))

    def _sign_in_page(
        self, request: Request, target: str, *, status: int = 200, refusal: str = ""
    ) -> Response:
        return self._pages.render(
            "sign_in.html", request, None, status=status, next=_local(target), refusal=refusal
        )

    async def sign_in(self, request: Request) -> Response:
        """Begin a session."""
        fields = await read_form(request)
        self._sign_ins.check_origin(request)
        target = _local(fields.get("next", "/"))
        found = self._sign_ins.begin(fields.get("token", ""))
        if found is None:
            log.warning("sign-in refused", peer=request.client.host if request.client else "")
            return self._sign_in_page(
                request, target, status=401, refusal="This token is not known."
            )
        person, value = found
        log.info("signed in", name=person.name, role=person.role.value)
        answer = RedirectResponse(target, status_code=303, headers=HEADERS)
        answer.set_cookie(
            self._sign_ins.cookie,
            value,
            max_age=self._sign_ins.session_seconds,
            path=self._sign_ins.cookie_path,
            secure=self._sign_ins.secure,
            httponly=True,
            samesite="strict",
        )
        return answer

    async def sign_out(self, request: Request) -> Response:
        """End the session in this browser."""
        await self._checked(request, Role.OWNER)
        answer = RedirectResponse("/sign-in", status_code=303, headers=HEADERS)
        answer.delete_cookie(
            self._sign_ins.cookie,
            path=self._sign_ins.cookie_path,
            secure=self._sign_ins.secure,
            httponly=True,
            samesite="strict",
        )
        return answer

    async def _checked(self, request: Request, least: Role) -> tuple[Person, dict[str, str]]:
        """Who sent a form, and its fields, if it is theirs and they may.

        Raises:
            SignInNeeded: nobody who is known.
            Refusal: it is not theirs, or they may not.
        """
        person = self._sign_ins.visitor(request)
        if person is None:
            raise SignInNeeded
        fields = await read_form(request)
        self._sign_ins.check_form(request, person, fields.get("form", ""))
        if not person.role.includes(least):
            raise Refusal(403, "role", f"{person.name} is {person.role}; this takes {least}")
        return person, fields

    # -- keeping

    async def keep(self, request: Request) -> Response:
        """Keep a job, as somebody who has signed in."""
        person, fields = await self._checked(request, Role.OWNER)
        job_id = request.path_params["job_id"]
        self._access.check_job(person, job_id)
        try:
            self._grant(job_id, fields, role=person.role, by=person.name)
        except Refusal as error:
            return await self._readings.job_page(
                request, person, job_id, status=error.status, refusal=_not_kept(error)
            )
        target = f"/jobs/{quote(job_id, safe='')}?done=kept"
        return RedirectResponse(target, status_code=303, headers=HEADERS)

    def _grant(self, job_id: str, fields: dict[str, str], *, role: Role, by: str) -> None:
        self._desk.grant(
            word(fields, "rule"),
            job_id,
            role=role,
            by=by,
            reason=word(fields, "reason"),
            seconds=seconds(fields, "for"),
            repeats=True,
        )

    async def link_page(self, request: Request) -> Response:
        """What a signed link shows; it changes nothing, however often it is opened."""
        return await self._linked(request, self._claim(request))

    async def keep_by_link(self, request: Request) -> Response:
        """Keep the job of a signed link."""
        claim = self._claim(request)
        fields = await read_form(request)
        try:
            self._check_claim(claim)
            self._grant(
                claim.job_id,
                {**fields, "rule": claim.rule_id},
                role=Role.OWNER,
                by=claim.user or "owner",
            )
        except Refusal as error:
            return await self._linked(request, claim, status=error.status, refusal=_not_kept(error))
        target = f"/keep/{request.path_params['token']}?done=kept"
        return RedirectResponse(target, status_code=303, headers=_hidden(HEADERS))

    def _claim(self, request: Request) -> Claim:
        claim = self._links.read(request.path_params["token"], now=self._engine.clock.wall())
        if claim is None:
            raise Refusal(
                410,
                "link_ended",
                "This link has ended, or is not whole. Open it from the notice again, or sign in.",
            )
        return claim

    def _check_claim(self, claim: Claim) -> None:
        case = self._desk.open_case(claim.rule_id, claim.job_id)[0].case
        if case.user != claim.user or claim.run_id not in (None, case.run_id):
            raise Refusal(409, "other_run", "this link is of another run or another owner")

    async def _linked(
        self, request: Request, claim: Claim, *, status: int = 200, refusal: str = ""
    ) -> Response:
        case = self._engine.cases.get(claim.rule_id, claim.job_id)
        until = None if case is None else self._engine.kept_until(case.case)
        done = request.query_params.get("done") == "kept" and until is not None
        appealed = request.query_params.get("done") == "appealed" and self._appeals.taken(
            claim.job_id
        )
        answer = await self._readings.job_page(
            request,
            None,
            claim.job_id,
            status=status,
            refusal=refusal,
            notice="The job is kept, as you asked." if done else APPEALED if appealed else "",
            zone=self._engine.rulebook.directory.user(claim.user).timezone,
            link=(f"/keep/{request.path_params['token']}", claim.rule_id),
        )
        answer.headers.update(_hidden({}))
        return answer

    # -- objecting

    async def appeal(self, request: Request) -> Response:
        """Object to an end, as somebody who has signed in."""
        person, fields = await self._checked(request, Role.OWNER)
        job_id = request.path_params["job_id"]
        self._access.check_job(person, job_id)
        try:
            self._appeals.appeal(
                word(fields, "rule"),
                job_id,
                role=person.role,
                by=person.name,
                reason=word(fields, "reason"),
            )
        except Refusal as error:
            return await self._readings.job_page(
                request, person, job_id, status=error.status, refusal=_not_taken(error)
            )
        target = f"/jobs/{quote(job_id, safe='')}?done=appealed"
        return RedirectResponse(target, status_code=303, headers=HEADERS)

    async def appeal_by_link(self, request: Request) -> Response:
        """Object to the end that a signed link is about."""
        claim = self._claim(request)
        fields = await read_form(request)
        try:
            self._appeals.appeal(
                claim.rule_id,
                claim.job_id,
                role=Role.OWNER,
                by=claim.user or "owner",
                reason=word(fields, "reason"),
                of=claim.user,
            )
        except Refusal as error:
            return await self._linked(
                request, claim, status=error.status, refusal=_not_taken(error)
            )
        target = f"/keep/{request.path_params['token']}?done=appealed"
        return RedirectResponse(target, status_code=303, headers=_hidden(HEADERS))

    # -- enforcement

    async def pause(self, request: Request) -> Response:
        """End no job from now on."""
        person, fields = await self._checked(request, Role.ADMIN)
        try:
            self._engine.pauses.begin(
                by=person.name,
                role=person.role.value,
                reason=word(fields, "reason"),
                seconds=optional_seconds(fields, "for"),
            )
        except Refusal as error:
            return self._readings.engine_page(
                request, person, status=error.status, refusal=f"Not paused: {error}."
            )
        return RedirectResponse("/engine?done=paused", status_code=303, headers=HEADERS)

    async def resume(self, request: Request) -> Response:
        """End jobs again."""
        person, fields = await self._checked(request, Role.ADMIN)
        try:
            done = self._resume(fields, by=person.name, role=person.role.value)
        except Refusal as error:
            return self._readings.engine_page(
                request, person, status=error.status, refusal=f"Not resumed: {error}."
            )
        return RedirectResponse(f"/engine?{urlencode(done)}", status_code=303, headers=HEADERS)

    def _resume(self, fields: Mapping[str, str], *, by: str, role: str) -> dict[str, str]:
        """End the pause, or let a rule enforce again.

        Raises:
            Refusal: without a reason, or somebody else did so before.
        """
        reason = word(fields, "reason")
        if "rule" not in fields:
            if not self._engine.pauses.end(by=by, role=role, reason=reason):
                raise Refusal(409, "not_paused", "enforcement is not paused")
            return {"done": "resumed"}
        rule = fields["rule"]
        if not self._engine.trials.resume(rule, by=by, role=role, reason=reason):
            raise Refusal(409, "not_held_back", f"the rule {rule} has not fallen back")
        return {"done": "rule", "rule": rule}

    # -- when there is no page

    async def signed_out(self, request: Request, _error: Exception) -> Response:
        """Where who has to sign in first is sent."""
        here = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        if request.method == "GET" and request.headers.get("Sec-Fetch-Site") == "cross-site":
            # Whoever follows a link from elsewhere may be signed in: browsers send the cookie only
            # when a page of ours asks.
            return HTMLResponse(self._pages.bounce(here), headers=HEADERS)
        target = _local(here) if request.method == "GET" else "/"
        return RedirectResponse(
            f"/sign-in?{urlencode({'next': target})}", status_code=303, headers=HEADERS
        )

    async def refused(self, request: Request, error: Refusal) -> Response:
        """A refusal as a page."""
        try:
            person = self._sign_ins.reader(request, cookies=True)
        except Refusal:
            person = None
        return self._pages.render(
            "refusal.html",
            request,
            person,
            status=error.status,
            title=_TITLES.get(error.status, "Refused"),
            message=_IN_WORDS.get(error.error) or _sentence(str(error)),
        )


def _local(target: str) -> str:
    return target if _LOCAL.fullmatch(target) else "/"


def _hidden(headers: dict[str, str]) -> dict[str, str]:
    """Headers of an answer whose address is a secret."""
    return {**headers, "Referrer-Policy": "no-referrer"}


def _not_taken(error: Refusal) -> str:
    return f"The objection was not taken: {error}."


def _not_kept(error: Refusal) -> str:
    return f"The job was not kept: {error}."


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")
