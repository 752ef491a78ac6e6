"""Keeping a job: who may put its end off, how far, how often. Every way in comes through here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuwarden import durations
from gpuwarden.refusals import Refusal
from gpuwarden.ruleengine import notices
from gpuwarden.ruleengine.roles import Role

if TYPE_CHECKING:
    from gpuwarden.ruleengine.engine import Engine
    from gpuwarden.ruleengine.model import OwnerMay, Rule
    from gpuwarden.ruleengine.records import Keep, StoredCase

MAX_KEEP_SECONDS = 30 * 86400.0
"""Longest keep of an operator; what must stay longer belongs on the whitelist, with its reason."""
REPEAT_SECONDS = 60.0
"""A form that is sent again within this long is the same keep: browsers and people press twice."""


class KeepDesk:
    """Grants keeps.

    Args:
        engine: whose cases they are.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def open_case(self, rule_id: str, job_id: str) -> tuple[StoredCase, Rule]:
        """The case that can be put off.

        Raises:
            Refusal: there is none, it has no deadline, or its job is already being ended.
        """
        stored = self._engine.cases.get(rule_id, job_id)
        rule = None if stored is None else self._engine.trials.rule_for(stored.case)
        if stored is None or rule is None or stored.case.detected_at is None:
            raise Refusal(404, "no_case", f"{job_id} does not break the rule {rule_id} now")
        if not rule.takes:
            raise Refusal(409, "no_deadline", f"the rule {rule_id} takes no job's cards")
        if stored.case.over and not self._engine.reclaimer.stoppable(stored.case.decision_id):
            raise Refusal(409, "too_late", f"{job_id} is already being ended")
        return stored, rule

    def allowance(self, stored: StoredCase, rule: Rule) -> tuple[OwnerMay, int] | None:
        """What the rule lets owners do, and how often they can still do it; None: nothing."""
        may = notices.keep_allowance(rule)
        return None if may is None else (may, max(0, may.times - self._used(stored)))

    def grant(
        self,
        rule_id: str,
        job_id: str,
        *,
        role: Role,
        by: str,
        reason: str,
        seconds: float,
        repeats: bool = False,
    ) -> Keep:
        """Put the end of a job off.

        Args:
            rule_id: the rule that announced it.
            job_id: the job.
            role: what lets them; that the job is theirs was checked by the caller.
            by: who.
            reason: why, for the audit.
            seconds: by how much.
            repeats: whether the same again within a minute is the same keep.

        Raises:
            Refusal: the reason is a word, the text says what is allowed.
        """
        stored, rule = self.open_case(rule_id, job_id)
        if repeats:
            earlier = self._earlier(stored, by=by, reason=reason, seconds=seconds)
            if earlier is not None:
                return earlier
        if not role.includes(Role.OPERATOR):
            self._owner_may(stored, rule, seconds)
        elif seconds > MAX_KEEP_SECONDS:
            raise Refusal(
                403,
                "too_long",
                f"at most {durations.render(MAX_KEEP_SECONDS)}; put what must "
                "stay longer on the whitelist",
            )
        kind = Role.OPERATOR if role.includes(Role.OPERATOR) else Role.OWNER
        return self._engine.keep(
            stored, rule, role=kind.value, by=by, reason=reason, seconds=seconds
        )

    def _owner_may(self, stored: StoredCase, rule: Rule, seconds: float) -> None:
        allowance = self.allowance(stored, rule)
        if allowance is None:
            raise Refusal(403, "not_allowed", f"the rule {rule.id} cannot be put off by owners")
        may, left = allowance
        if seconds > may.keep:
            raise Refusal(403, "too_long", f"at most {durations.render(may.keep)} at a time")
        if left == 0:
            raise Refusal(
                403,
                "used_up",
                f"kept {self._used(stored)} times already; the rule {rule.id} allows {may.times}",
            )

    def _used(self, stored: StoredCase) -> int:
        return sum(1 for keep in self._keeps(stored) if keep.role == "owner")

    def _keeps(self, stored: StoredCase) -> list[Keep]:
        case = stored.case
        return self._engine.ledger.keeps(case.rule_id, case.job_id, case.run_id)

    def _earlier(self, stored: StoredCase, *, by: str, reason: str, seconds: float) -> Keep | None:
        since = self._engine.clock.wall() - REPEAT_SECONDS
        return next(
            (
                keep
                for keep in self._keeps(stored)
                if keep.granted_at > since
                and (keep.by, keep.reason, keep.seconds) == (by, reason, seconds)
            ),
            None,
        )
