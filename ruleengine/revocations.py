"""What has come to speak against a decision since it was made; asked before each step of it.

A decision that a platform carries out waits for the job's grace, and that may be hours: meanwhile
somebody may keep the job, put it on the whitelist, take the rule back or pause everything. What is
asked here is read afresh each time, rule files included; those are not put in force by it, since a
tick may be on its way.

Two strengths: `revoked` is what somebody has said, and takes a decision back at once; `withheld` is
that, or anything that cannot be told now, and holds back whatever cannot be undone.
"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from gpuwarden.ruleengine import cases, evaluation, guards, whitelists
from gpuwarden.ruleengine.pauses import switched_on
from gpuwarden.ruleengine.verdicts import JobFacts, RunFacts, Truth

if TYPE_CHECKING:
    from collections.abc import Collection

    from gpuwarden.ruleengine.cases import Case
    from gpuwarden.ruleengine.engine import Engine
    from gpuwarden.ruleengine.model import RuleSet
    from gpuwarden.ruleengine.records import Decision

MAX_EXECUTABLES = 64
"""Of one job, kept with a decision; of more it cannot be told whether the whitelist means them."""


class Revocations:
    """What speaks against decisions now.

    Args:
        engine: whose decisions they are.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def standing(self) -> str:
        """Why nothing may be ended at this very moment, whatever was decided, or ""."""
        killed = switched_on(self._engine.kill_switch)
        blocks = guards.standing_blocks(
            killed=killed, paused=self._engine.pauses.sentence, bad_files=""
        )
        return "; ".join(block.sentence for block in blocks)

    def revoked(self, decision: Decision) -> str:
        """Why a decision is to be taken back now, or an empty string."""
        rules = self._engine.rulebook.on_disk()
        return "" if rules is None else self._against(decision, rules, sure=True)

    def withheld(self, decision: Decision) -> str:
        """Why nothing may be done for a decision that cannot be undone now, or an empty string."""
        why = self.standing()
        if why:
            return why
        rules = self._engine.rulebook.on_disk()
        if rules is None:
            return "the rule files on disk are not usable: whom they spare is not known"
        return self._against(decision, rules, sure=False)

    def _against(self, decision: Decision, rules: RuleSet, *, sure: bool) -> str:
        engine, facts, kept = self._engine, self._engine.view.facts, Kept.of(decision)
        stored = engine.cases.get(decision.rule_id, decision.job_id)
        case = stored.case if stored is not None and stored.id == decision.case_id else None
        seen = None if facts is None else facts.jobs.get(decision.job_id)
        why = self._of_case(case, decision.rule_id, rules)
        if not why:
            job = _known(decision, case, seen, kept)
            why = self._of_job(decision.rule_id, job, rules, sure=sure)
        if not why and not sure and decision.user and job.user != decision.user:
            # A label may go to and fro; what cannot be undone waits until the new owner was told.
            why = "its owner is another one than the one who was told"
        if why or facts is None:
            return why
        # What ends together with it has no decision of its own, and may have gone meanwhile.
        known = [facts.jobs[name] for name in kept.company if name in facts.jobs]
        # A launcher without a card breaks no rule, and goes with what it has launched.
        for beside in [job for job in known if job.gpus]:
            other = engine.cases.get(decision.rule_id, beside.job_id)
            why = self._of_case(None if other is None else other.case, decision.rule_id, rules)
            why = why or self._of_job(decision.rule_id, beside, rules, sure=sure)
            if why:
                return f"{beside.job_id} may end together with it, and must not: {why}"
        return ""

    def _of_case(self, case: Case | None, rule_id: str, rules: RuleSet) -> str:
        """What the rule as it reads on disk, its trial or a keep say.

        Not what the job does meanwhile: to save and to leave is work, and who could end a grace by
        it would never be ended.
        """
        rule = next((rule for rule in rules.rules if rule.id == rule_id), None)
        if rule is not None:
            rule = self._engine.trials.applied(rule, "" if case is None else case.user)
        until = None if case is None else self._engine.kept_until(case)
        kept = until is not None and until > self._engine.clock.wall()
        return cases.overruled(case, rule, kept=kept)

    def _of_job(self, rule_id: str, job: JobFacts, rules: RuleSet, *, sure: bool) -> str:
        """What the whitelist says; and whether the rule is about the job, where labels tell."""
        now = self._engine.clock.wall()
        truth, why = whitelists.protection(rule_id, job, rules.whitelist, now=now)
        if truth is Truth.YES or (truth is Truth.UNKNOWN and not sure):
            return why
        rule = next((rule for rule in rules.rules if rule.id == rule_id), None)
        # Labels come and go for a scrape, and say little of a job whose processes have gone.
        parted = rule is not None and job.gpus and evaluation.applies(rule, job) is Truth.NO
        return "the rule is not about this job any more" if parted and not sure else ""


@dataclasses.dataclass(frozen=True, slots=True)
class Kept:
    """What is written into a decision of several steps, so that it can be asked about again.

    Attributes:
        executables: executable and cgroup of each process that held a GPU; none where they were
            too many.
        company: jobs that were due as well, and may end together with it.
    """

    executables: tuple[tuple[str, str], ...] = ()
    company: tuple[str, ...] = ()

    @classmethod
    def about(cls, job: JobFacts, company: Collection[str]) -> Kept:
        """What is kept of a job and of those that may end with it."""
        few = len(job.executables) <= MAX_EXECUTABLES
        return cls(job.executables if few else (), tuple(sorted(company)))

    @classmethod
    def of(cls, decision: Decision) -> Kept:
        """What a decision has; one of an earlier version has nothing."""
        data: dict[str, Any] = json.loads(decision.body).get("kept", {})
        pairs = [(str(path), str(cgroup)) for path, cgroup in data.get("executables", ())]
        return cls(tuple(pairs), tuple(str(name) for name in data.get("company", ())))

    def record(self) -> dict[str, object]:
        """As JSON can hold it."""
        return {
            "executables": [list(pair) for pair in self.executables],
            "company": list(self.company),
        }


def _known(decision: Decision, case: Case | None, seen: JobFacts | None, kept: Kept) -> JobFacts:
    """Who a job is: as the last tick saw it, or else as it was when it was decided."""
    job = seen
    if job is None:
        run = None if case is None or case.run_id is None else RunFacts(case.run_id)
        instance = "" if case is None else case.instance
        job = JobFacts(decision.job_id, instance, user=decision.user, run=run)
    if not job.executables:
        job = dataclasses.replace(job, executables=kept.executables)
    return job if job.user else dataclasses.replace(job, user=decision.user)
