"""Which jobs a person may see, and what a request must show to be answered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuwarden.refusals import Refusal
from gpuwarden.ruleengine.roles import Role

if TYPE_CHECKING:
    from starlette.requests import Request

    from gpuwarden.ruleengine.engine import Engine
    from gpuwarden.ruleengine.names import Names
    from gpuwarden.ruleengine.records import Decision
    from gpuwarden.ruleengine.roles import Person
    from gpuwarden.ruleengine.sign_ins import SignIns


class SignInNeeded(Exception):
    """A page is asked for by somebody who has not signed in."""


class Access:
    """Who may read what.

    Args:
        engine: whose jobs they are.
        sign_ins: who is asking.
        names: whose names they read.
    """

    def __init__(self, engine: Engine, sign_ins: SignIns, names: Names) -> None:
        self._engine = engine
        self.sign_ins = sign_ins
        self.names = names

    def api(self, request: Request, least: Role = Role.OWNER) -> Person:
        """Who asks the API for something.

        Raises:
            Refusal: 401 for who is not known, 403 for who may not.
        """
        person = self.sign_ins.reader(request, cookies=False)
        if person is None:
            raise Refusal(401, "unauthorised", "this takes a bearer token of web.tokens")
        return self._enough(person, least)

    def page(self, request: Request, least: Role = Role.OWNER) -> Person:
        """Who asks for a page.

        Raises:
            SignInNeeded: they have to sign in first.
            Refusal: 403 for who may not see it.
        """
        person = self.sign_ins.reader(request, cookies=True)
        if person is None:
            raise SignInNeeded
        return self._enough(person, least)

    def _enough(self, person: Person, least: Role) -> Person:
        if not person.role.includes(least):
            raise Refusal(403, "role", f"{person.name} is {person.role}; this is for {least}s")
        return person

    def owner(self, job_id: str) -> tuple[str, str]:
        """User and team of a job, as far as anything is known of it; else two empty strings."""
        engine = self._engine
        job = None if engine.view.facts is None else engine.view.facts.jobs.get(job_id)
        user = "" if job is None else job.user
        if not user:
            open_cases = (s.case for s in engine.cases.all() if s.case.job_id == job_id)
            user = next((case.user for case in open_cases if case.user), "")
        if not user:
            decided = engine.ledger.job_decisions(job_id)
            user = decided[-1].user if decided else ""
        if not user:
            closed = engine.ledger.rows(
                "SELECT json_extract(body, '$.user') FROM cases WHERE job_id=? "
                "ORDER BY id DESC LIMIT 1",
                (job_id,),
            )
            user = str(closed[0][0] or "") if closed else ""
        if not user:
            left = engine.leaves.store.of_job(job_id)
            user = left[-1].user if left else ""
        return user, engine.rulebook.directory.user(user).team

    def sees_decision(self, person: Person, decision: Decision) -> bool:
        """Whether a decision is about a job that is theirs to see."""
        return person.sees(decision.user, self._engine.rulebook.directory.user(decision.user).team)

    def sees_job(self, person: Person, job_id: str) -> bool:
        """Whether a job is theirs to see."""
        return person.sees_all or person.sees(*self.owner(job_id))

    def check_job(self, person: Person, job_id: str) -> None:
        """Refuse a job that is not theirs, in the words for one that does not exist.

        Raises:
            Refusal: 404.
        """
        if not self.sees_job(person, job_id):
            raise Refusal(404, "unknown_job", "no such job has been seen; see GET /v1/jobs")
