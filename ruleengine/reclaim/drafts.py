"""A decision before it is written: who is asked what, signed, and how its platform is told.

Nothing here is sent. What is drafted is written down whole, in one transaction with its case, and
only then does anybody hear of it.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuwarden.agent_api import Action, ActionRequest
from gpuwarden.ruleengine.model import Action as Do
from gpuwarden.ruleengine.reclaim.ladders import END_SECONDS, PROOF_SECONDS
from gpuwarden.ruleengine.reclaim.node import LIFETIME_SECONDS
from gpuwarden.ruleengine.reclaim.questions import MAX_CARDS, run_of, seen
from gpuwarden.ruleengine.records import Decision, Part, PlatformAct
from gpuwarden.ruleengine.revocations import Kept

if TYPE_CHECKING:
    from gpuwarden.ruleengine.model import Rule
    from gpuwarden.ruleengine.reclaim.node import Signer
    from gpuwarden.ruleengine.reclaim.questions import Questions
    from gpuwarden.ruleengine.reclaim.reaches import Reach
    from gpuwarden.ruleengine.records import StoredCase
    from gpuwarden.ruleengine.verdicts import Evidence, JobFacts, Verdict

MAX_REASON = 500


@dataclass(frozen=True, slots=True)
class Draft:
    """What will be written down.

    Attributes:
        decision: the decision.
        parts: what the agents of all nodes will be asked; none where one agent does all of it.
        act: how far it has come; None where one agent does all of it.
    """

    decision: Decision
    parts: tuple[Part, ...] = ()
    act: PlatformAct | None = None


@dataclass(frozen=True, slots=True)
class Desk:
    """Drafts decisions.

    Attributes:
        signer: the engine's key.
        questions: the agents' side of what takes several steps.
        epoch: of this life of the engine.
    """

    signer: Signer
    questions: Questions
    epoch: int

    def draft(
        self,
        stored: StoredCase,
        rule: Rule,
        key: str,
        *,
        do: Do,
        grace: float,
        job: JobFacts,
        verdict: Verdict,
        reach: Reach,
        now: float,
    ) -> Draft:
        """What an act on a job needs.

        Args:
            stored: the case.
            rule: as it now reads.
            key: the stage's, within its rule.
            do: what is done.
            grace: seconds that the job has, as its owner was told.
            job: by facts that were gathered for this decision.
            verdict: on the same facts.
            reach: who acts.
            now: Unix time.
        """
        # The case's owner, as the limits were asked: labels may be missing for a scrape.
        user = stored.case.user or job.user
        reason = f"rule {rule.id}: {rule.description or 'see the notice'}"[:MAX_REASON]
        name = f"{self.epoch}-{stored.id}-{secrets.token_hex(8)}"
        decision = Decision(
            id=name,
            epoch=self.epoch,
            case_id=stored.id,
            rule_id=rule.id,
            job_id=job.job_id,
            user=user,
            action=do.value,
            state="authorised",
            host=reach.nodes[0].host,
            body=b"",
            signature="",
            gpus=tuple(gpu.uuid for gpu in job.gpus)[:MAX_CARDS],
            evidence=json.dumps([evidence_record(item) for item in verdict.whole_evidence]),
            grace=grace,
            expires=now + LIFETIME_SECONDS,
            created_at=now,
            stage=key,
        )
        if do is Do.TERMINATE and reach.claim is None:
            return self._for_one_agent(decision, job, reach, reason)
        kept = Kept.about(job, () if reach.claim is None else reach.claim.company)
        return self._in_steps(decision, do, job, reach, reason=reason, kept=kept)

    def _for_one_agent(self, decision: Decision, job: JobFacts, reach: Reach, reason: str) -> Draft:
        info = reach.nodes[0].info
        request = ActionRequest(
            decision_id=decision.id,
            epoch=self.epoch,
            node=info.node,
            boot_id=info.boot_id,
            job_id=job.job_id,
            run_id=run_of(job),
            action=Action.TERMINATE,
            grace=decision.grace,
            expires=decision.expires,
            then="hold",
            reason=reason,
            seen=seen(job),
            gpus=decision.gpus,
        )
        signed = self.signer.sign(request)
        return Draft(_with(decision, signed.body, signed.signature))

    def _in_steps(
        self,
        decision: Decision,
        do: Do,
        job: JobFacts,
        reach: Reach,
        *,
        reason: str,
        kept: Kept,
    ) -> Draft:
        claim, grace = reach.claim, decision.grace
        platform = grace if claim is None or claim.grace is None else claim.grace
        asked = Action.REQUEST_CHECKPOINT if do is Do.CHECKPOINT else Action.REQUEST_LEAVE
        parts: list[Part] = []
        for node in reach.nodes:
            if do.takes:
                watched = grace + (0.0 if claim is None else platform + END_SECONDS + PROOF_SECONDS)
                parts.append(
                    self.questions.part(
                        decision.id, node, job, action=Action.WATCH, grace=watched, reason=reason
                    )
                )
            if run_of(job) is not None:
                parts.append(
                    self.questions.part(
                        decision.id,
                        node,
                        job,
                        action=asked,
                        grace=grace,
                        then="hold" if do is Do.TERMINATE else "requeue",
                        at="epoch" if do is Do.YIELD else "step",
                        reason=reason,
                    )
                )
        recognised = (
            {}
            if claim is None
            else {
                "identity": dict(claim.identity),
                "nodes": list(claim.nodes),
                "grace": claim.grace,
                "also": claim.also,
                "returns": claim.returns,
            }
        )
        act = PlatformAct(
            decision_id=decision.id,
            platform="" if claim is None else claim.platform,
            claim=json.dumps(recognised, sort_keys=True),
            step="watching" if do.takes else "asking",
            changed_at=decision.created_at,
            asked_at=None if do.takes else decision.created_at,
        )
        record = {"reason": reason, "claim": recognised, "kept": kept.record()}
        order = json.dumps(record, sort_keys=True)
        return Draft(_with(decision, order.encode(), ""), tuple(parts), act)


def _with(decision: Decision, body: bytes, signature: str) -> Decision:
    return dataclasses.replace(decision, body=body, signature=signature)


def evidence_record(item: Evidence) -> dict[str, object]:
    """A condition and what was found, as it is kept and shown."""
    return {
        "condition": item.condition,
        "truth": item.truth.name,
        "measured": item.measured,
        "reason": item.reason,
        "values": dict(item.values),
        "expected": item.expected,
        "estimated": item.estimated,
    }
