"""Rules on trial over HTTP: how they stand, appeals, and regrets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, TypeAdapter
from starlette.responses import JSONResponse, Response

from gpuwarden.refusals import Refusal
from gpuwarden.ruleengine import tickets
from gpuwarden.ruleengine.alertmanager import rfc3339
from gpuwarden.ruleengine.api_models import Seconds, Shape, Time
from gpuwarden.ruleengine.appeals import AppealDesk
from gpuwarden.ruleengine.bodies import MAX_BODY_BYTES, read_object, word
from gpuwarden.ruleengine.canaries import Objection
from gpuwarden.ruleengine.operations import Operation
from gpuwarden.ruleengine.roles import Role

if TYPE_CHECKING:
    from starlette.requests import Request

    from gpuwarden.ruleengine.access import Access
    from gpuwarden.ruleengine.engine import Engine

TRIALS_SCHEMA = "gpuwarden.trials/v1"


class Trial(Shape):
    """A rule that enforces on trial, or that has fallen back from it."""

    rule: str
    mode: str
    """As the file says."""
    share: float | None
    """Ratio of the owners; null where the file has no canary any more."""
    within: Seconds | None
    appeals: int
    appeals_allowed: int | None
    """From so many on it falls back."""
    regrets: int
    regrets_allowed: int | None
    held_back: str
    """Why it only warns now, or an empty string."""
    held_back_since: Time | None


class Trials(Shape):
    """Every rule on trial."""

    schema_: Annotated[str, Field(alias="schema")]
    trials: list[Trial]


class AppealRequest(Shape):
    """An owner objects to an end."""

    job_id: str
    rule: str
    reason: str
    ticket: str = ""
    """The word that stands in the owner's notice, in the place of a token."""


class RegretRequest(Shape):
    """An operator says that an end was wrong."""

    decision_id: str
    reason: str


class Objected(Shape):
    """What became of an appeal or a regret."""

    kind: Literal["appeal", "regret"]
    rule: str
    job_id: str
    first: bool
    """Whether it counts; of one job an appeal, and of one decision a regret, counts once."""
    held_back: str
    """Why the rule only warns now, or an empty string."""


class TrialRoutes:
    """Handlers over one engine's trials.

    Args:
        engine: whose rules they are.
        access: who may.
        ticket_key: secret of owners' tickets, or None.
    """

    def __init__(self, engine: Engine, access: Access, *, ticket_key: bytes | None) -> None:
        self._engine = engine
        self._access = access
        self._ticket_key = ticket_key
        self._desk = AppealDesk(engine)

    def operations(self) -> list[Operation]:
        """What is offered."""
        malformed = {400: "The body cannot be read.", 413: "The body is too large."}
        return [
            Operation(
                "GET",
                "/v1/trials",
                self.trials,
                "The rules that enforce on a share of the owners, and those that fell back to "
                "warn.",
                TypeAdapter(Trials),
            ),
            Operation(
                "POST",
                "/v1/appeals",
                self.appeal,
                "Object, as an owner, to an end that a rule announced or did.",
                TypeAdapter(Objected),
                status=201,
                body=TypeAdapter(AppealRequest),
                opened_by="Takes a token of web.tokens, or the ticket of the owner's notice.",
                refusals={
                    **malformed,
                    403: "Who asks may not.",
                    404: "The rule neither ended the job nor is about to.",
                    409: "The rule only tells.",
                },
            ),
            Operation(
                "POST",
                "/v1/regrets",
                self.regret,
                "Say, as an operator, that an end was wrong.",
                TypeAdapter(Objected),
                status=201,
                body=TypeAdapter(RegretRequest),
                least=Role.OPERATOR,
                refusals={
                    **malformed,
                    404: "There is no such decision.",
                    409: "The decision ended no job.",
                },
            ),
        ]

    async def trials(self, request: Request) -> Response:
        """How every trial stands."""
        self._access.api(request)
        return JSONResponse(trials_document(self._engine))

    async def appeal(self, request: Request) -> Response:
        """Object to an end: {job_id, rule, reason, ticket?}."""
        body = await read_object(request, MAX_BODY_BYTES)
        job_id, rule_id = word(body, "job_id"), word(body, "rule")
        reason = word(body, "reason")
        if "ticket" in body:
            if not tickets.valid(self._ticket_key, rule_id, job_id, word(body, "ticket")):
                raise Refusal(403, "bad_ticket", "the ticket is not that of this job and rule")
            role, by = Role.OWNER, self._desk.subject(rule_id, job_id)[1] or "owner"
        else:
            person = self._access.sign_ins.changer(request, Role.OWNER)
            self._access.check_job(person, job_id)
            role, by = person.role, person.name
        first = self._desk.appeal(rule_id, job_id, role=role, by=by, reason=reason)
        return self._answer(Objection.APPEAL, rule_id, job_id, first=first)

    async def regret(self, request: Request) -> Response:
        """Say that an end was wrong: {decision_id, reason}."""
        person = self._access.sign_ins.changer(request, Role.OPERATOR)
        body = await read_object(request, MAX_BODY_BYTES)
        decision_id, reason = word(body, "decision_id"), word(body, "reason")
        first = self._desk.regret(decision_id, role=person.role, by=person.name, reason=reason)
        decision = self._engine.ledger.decision(decision_id)
        if decision is None:
            raise Refusal(404, "unknown_decision", "there is no such decision")
        return self._answer(Objection.REGRET, decision.rule_id, decision.job_id, first=first)

    def _answer(self, kind: Objection, rule_id: str, job_id: str, *, first: bool) -> Response:
        held = {item.rule_id: item.sentence for item in self._engine.trials.held}
        return JSONResponse(
            {
                "kind": kind.value,
                "rule": rule_id,
                "job_id": job_id,
                "first": first,
                "held_back": held.get(rule_id, ""),
            },
            status_code=201,
        )


def trials_document(engine: Engine) -> dict[str, Any]:
    """Every rule that has a canary, or has fallen back to warn."""
    held = {item.rule_id: item for item in engine.trials.held}
    found = []
    for rule in engine.rulebook.rules.rules:
        canary, back = rule.canary, held.get(rule.id)
        if canary is None and back is None:
            continue
        counts = engine.trials.counts(rule)
        terms = None if canary is None else canary.back_to_warn
        found.append(
            {
                "rule": rule.id,
                "mode": rule.mode.value,
                "share": None if canary is None else canary.share,
                "within": None if terms is None else terms.within,
                "appeals": counts.get(Objection.APPEAL, 0),
                "appeals_allowed": None if terms is None else terms.appeals,
                "regrets": counts.get(Objection.REGRET, 0),
                "regrets_allowed": None if terms is None else terms.regrets,
                "held_back": "" if back is None else back.sentence,
                "held_back_since": None if back is None else rfc3339(back.since),
            }
        )
    return {"schema": TRIALS_SCHEMA, "trials": found}
