"""Appeals and regrets: who may object to an end, and to which. Every way in comes through here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuwarden.refusals import Refusal
from gpuwarden.ruleengine.model import Mode

if TYPE_CHECKING:
    from gpuwarden.ruleengine.engine import Engine
    from gpuwarden.ruleengine.model import Rule
    from gpuwarden.ruleengine.roles import Role

APPEALED = "Your objection is written down, and operators read it."
"""What a page says then."""
STANDING = ("authorised", "acting", "verified", "incomplete", "failed")
"""States of a decision that stands: the job was ended, or is being ended."""


class AppealDesk:
    """Takes objections.

    Args:
        engine: whose rules they are about.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def taken(self, job_id: str) -> bool:
        """Whether the owner of a job has objected."""
        query = "SELECT 1 FROM objections WHERE kind='appeal' AND job_id=? LIMIT 1"
        return bool(self._engine.ledger.rows(query, (job_id,)))

    def subject(self, rule_id: str, job_id: str) -> tuple[Rule, str]:
        """The rule, and the owner of the job to whom it announced or did something.

        Raises:
            Refusal: it did neither.
        """
        rule = self._engine.rulebook.rule(rule_id)
        if rule is None:
            raise Refusal(404, "no_rule", f"no rule {rule_id} is in force; see GET /v1/rules")
        for decision in self._engine.ledger.job_decisions(job_id):
            if decision.rule_id == rule_id and decision.state in STANDING:
                return rule, decision.user
        stored = self._engine.cases.get(rule_id, job_id)
        if stored is None or stored.case.detected_at is None:
            raise Refusal(
                404, "no_case", f"the rule {rule_id} neither ended {job_id} nor is about to"
            )
        if self._engine.trials.applied(rule, stored.case.user).mode is not Mode.ENFORCE:
            raise Refusal(409, "not_enforced", f"the rule {rule_id} only tells; it does not end it")
        return rule, stored.case.user

    def appeal(
        self,
        rule_id: str,
        job_id: str,
        *,
        role: Role,
        by: str,
        reason: str,
        of: str | None = None,
    ) -> bool:
        """Write down that an owner objects.

        It moves no deadline: a keep does that.

        Args:
            rule_id: the rule that announced the end, or did it.
            job_id: the job; that it is theirs was checked by the caller.
            role: what lets them.
            by: who.
            reason: why.
            of: the owner whom a link was sent to, or None: it was checked otherwise.

        Returns:
            Whether it is the first of this job.

        Raises:
            Refusal: the reason is a word, the text says why not.
        """
        rule, user = self.subject(rule_id, job_id)
        if of is not None and of != user:
            raise Refusal(409, "other_owner", "this link is of another owner")
        return self._engine.trials.appeal(
            rule, job_id, user=user, by=by, role=role.value, reason=reason, source="appeal"
        )

    def regret(self, decision_id: str, *, role: Role, by: str, reason: str) -> bool:
        """Write down that an end was wrong.

        Returns:
            Whether nobody had said so before.

        Raises:
            Refusal: there is no such decision, or it ended nothing.
        """
        decision = self._engine.ledger.decision(decision_id)
        if decision is None:
            raise Refusal(404, "unknown_decision", "there is no such decision")
        if decision.state not in STANDING:
            raise Refusal(409, "not_ended", f"the decision is {decision.state}: it ended no job")
        return self._engine.trials.regret(
            decision.rule_id,
            decision.job_id,
            decision.id,
            by=by,
            role=role.value,
            reason=reason,
        )
