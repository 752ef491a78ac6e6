"""What became of a decision that several hands carried out: one result out of all of theirs. Pure.

Reclaimed means that the platform says the attempt is over, and that every node of the job has
proven by NVML that its processes have let go. Whatever is less is `incomplete`, and says where.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from gpuwarden.agent_api import Action, ActionReport, ActionState, ApiError, Outcome, Proof
from gpuwarden.ruleengine.reclaim.ports import Deed, Standing

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gpuwarden.ruleengine.reclaim.ports import State
    from gpuwarden.ruleengine.records import Decision, Part, PlatformAct

_ACTIONS = {"checkpoint": Action.REQUEST_CHECKPOINT, "yield": Action.REQUEST_LEAVE}

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Result:
    """How a decision ended.

    Attributes:
        state: verified, done, incomplete, refused, lapsed, unheeded, undeliverable or withdrawn.
        reason: why, in words that begin with one that stays the same.
        report: of all nodes together, as an agent would give it, or None.
    """

    state: str
    reason: str = ""
    report: str | None = None


def proven(
    decision: Decision, act: PlatformAct, state: State | None, deed: Deed, parts: Sequence[Part]
) -> Result:
    """The result once everybody has been asked for the last time.

    Args:
        decision: what was decided.
        act: how far it came.
        state: the platform's last word, or None where it gave none.
        deed: what it was told.
        parts: of all nodes.
    """
    problems = [*_of_platform(act, state, deed), *_of_nodes(parts)]
    if problems:
        reason = "; ".join(problems)
        report = merged(decision, act, parts, outcome=Outcome.INCOMPLETE, reason=reason)
        return Result("incomplete", reason, report)
    how = "" if act.ended_at is not None else "left: it was over before its platform had to end it"
    return Result("verified", how, merged(decision, act, parts, outcome=Outcome.RECLAIMED))


def _of_platform(act: PlatformAct, state: State | None, deed: Deed) -> list[str]:
    name = act.platform
    if state is None:
        why = f" ({act.why})" if act.why else ""
        return [f"platform_silent: {name} does not say what became of it{why}"]
    said = f"{name} says {state.word or state.standing.value}"
    if state.standing in (Standing.RUNNING, Standing.ENDING):
        word = state.obstacle or f"still_{state.standing.value}"
        return [f"{word}: {said}" + (f"; {act.why}" if act.why else "")]
    if deed is Deed.TERMINATE and state.standing is Standing.RETURNED:
        successor = f" as {state.successor}" if state.successor else ""
        return [f"returned: {said}, and it has come back{successor}"]
    if deed is Deed.REQUEUE and state.standing is Standing.ENDED:
        return [f"not_returned: {said}, and does not start it again"]
    return []


def _of_nodes(parts: Sequence[Part]) -> list[str]:
    return [
        f"{part.host}: {part.reason or f'its watch is {part.state}'}"
        for part in parts
        if part.action == Action.WATCH and part.state != "reclaimed"
    ] + [
        f"{part.host}: {lacks}"
        for part in parts
        if part.action == Action.WATCH and part.state == "reclaimed"
        for report in reports([part])
        if (lacks := lacking_proof(report))
    ]


def lacking_proof(report: ActionReport) -> str:
    """What is missing from a report of an end that an agent calls a success, or an empty string.

    Reclaimed is what NVML shows, and not what an agent says of it.
    """
    if report.outcome is not Outcome.RECLAIMED:
        return "unproven: its agent does not say that the memory came back"
    if report.proof is None or not report.proof.gone:
        return "unproven: its agent shows no proof that the processes have let go"
    return ""


def merged(
    decision: Decision,
    act: PlatformAct,
    parts: Iterable[Part],
    *,
    outcome: Outcome,
    reason: str = "",
) -> str:
    """One report of all nodes, as an agent would give it for a job of its own.

    Its steps are the latest of all nodes; memory is summed up. What no node knows has none.
    """
    found = list(parts)
    watches = reports(part for part in found if part.action == Action.WATCH)
    steps: dict[str, float] = {}
    for report in (*watches, *reports(p for p in found if p.state == "done")):
        for step, moment in report.steps.items():
            steps[step] = max(steps.get(step, moment), moment)
    if act.asked_at is not None and act.notice == "sent":
        steps["platform_notice"] = act.asked_at
    if act.ended_at is not None:
        steps["platform_end"] = act.ended_at
    proofs = [report.proof for report in watches if report.proof is not None]
    for late in ("exited", "proven"):
        # Of one node only, it is not the job's.
        if len([report for report in watches if late in report.steps]) < len(watches):
            steps.pop(late, None)
    report = ActionReport(
        decision_id=decision.id,
        job_id=decision.job_id,
        action=_ACTIONS.get(decision.action, Action.TERMINATE),
        state=ActionState.FINISHED,
        outcome=outcome,
        reason=reason.partition(":")[0][:256],
        message=reason[:4096],
        steps=steps,
        processes=tuple(process for report in watches for process in report.processes),
        proof=_summed(proofs, whole=len(proofs) == len(watches)) if proofs else None,
    )
    return report.encode().decode()


def _summed(proofs: Sequence[Proof], *, whole: bool) -> Proof:
    before: dict[str, int] = {}
    after: dict[str, int] = {}
    for proof in proofs:
        before |= proof.device_used_before
        after |= proof.device_used_after
    return Proof(
        gone=whole and all(proof.gone for proof in proofs),
        memory_freed=sum(proof.memory_freed for proof in proofs),
        device_used_before=before,
        device_used_after=after,
        seconds=max(proof.seconds for proof in proofs),
    )


def reports(parts: Iterable[Part]) -> list[ActionReport]:
    """The reports of parts that have one, as far as they can be read."""
    found = []
    for part in parts:
        try:
            report = part.decoded_report
        except ApiError as error:  # of an agent that was newer than this engine
            log.warning("a report cannot be read", part=part.agent_id, error=str(error))
            continue
        if report is not None:
            found.append(report)
    return found
