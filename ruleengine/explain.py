"""Why was a job ended, or why not: everything known of it, as one document."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from gpuwarden.ruleengine import cases, messages
from gpuwarden.ruleengine.alertmanager import rfc3339
from gpuwarden.ruleengine.decision_steps import steps_of
from gpuwarden.ruleengine.forecasts import counted_from, forecasts
from gpuwarden.ruleengine.guards import DATA_AGE_SCRAPES, Blocked
from gpuwarden.ruleengine.leave_documents import leave_document
from gpuwarden.ruleengine.model import Action
from gpuwarden.ruleengine.needs import SAVES
from gpuwarden.ruleengine.reclaim.drafts import evidence_record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from gpuwarden.ruleengine.case_records import Case
    from gpuwarden.ruleengine.engine import Engine
    from gpuwarden.ruleengine.losses import Loss
    from gpuwarden.ruleengine.model import Rule
    from gpuwarden.ruleengine.records import Decision, Keep, StoredCase
    from gpuwarden.ruleengine.verdicts import GpuFacts, Grade, JobFacts, Verdict

JOBS_SCHEMA = "gpuwarden.jobs/v1"
JOB_SCHEMA = "gpuwarden.job/v1"
DECISION_SCHEMA = "gpuwarden.decision/v1"
_CARDS = ("GPU-", "MIG-")
"""How the UUIDs of cards and of their instances begin; a job_id begins with its platform."""
BLIND = "no_facts"
"""Why nothing is ended while a tick cannot be completed."""


def jobs_document(
    engine: Engine, sees: Callable[[str, str], bool] = lambda _user, _team: True
) -> dict[str, Any]:
    """Every running job in one line each, as of the last completed tick.

    Args:
        engine: whose jobs they are.
        sees: whether the jobs of a user and a team are to be listed.
    """
    facts = engine.view.facts
    jobs = () if facts is None else facts.jobs.values()
    states: dict[str, dict[str, str]] = {}
    for stored in engine.cases.all():
        states.setdefault(stored.case.job_id, {})[stored.case.rule_id] = stored.case.state.value
    return {
        "schema": JOBS_SCHEMA,
        "time": None if facts is None else rfc3339(facts.time),
        "nodes": {"expected": facts.expected_nodes, "lit": facts.lit_nodes} if facts else None,
        "halted": [_block(block) for block in engine.view.halted],
        "jobs": [
            {**_job_head(job), "cases": states.get(job.job_id, {})}
            for job in jobs
            if sees(job.user, job.team)
        ],
    }


def job_document(engine: Engine, job_id: str) -> dict[str, Any] | None:
    """Everything known of a job, or None for one that was never heard of.

    Rules of `target: gpu` judge cards: of one it tells the same, by its UUID.
    """
    facts = engine.view.facts
    engine.rounds.look_at(job_id, engine.clock.wall())
    card = None if facts is None else facts.cards.get(job_id)
    job = card if facts is None or card is not None else facts.jobs.get(job_id)
    decisions = engine.ledger.job_decisions(job_id)
    events, past = engine.ledger.events(job_id), engine.ledger.past_cases(job_id)
    rules = []
    for rule in engine.rulebook.rules.rules:
        verdict = engine.view.verdicts.get((rule.id, job_id))
        stored = engine.cases.get(rule.id, job_id)
        if verdict is not None or stored is not None:
            user = stored.case.user if stored is not None else "" if job is None else job.user
            rules.append(_rule(engine, engine.trials.applied(rule, user), verdict, stored))
    rules.sort(key=lambda told: told["case"] is None)  # what is broken is what is asked about
    leaves = engine.leaves.store.of_job(job_id)
    if job is None and not (decisions or events or past or rules or leaves):
        return None
    return {
        "schema": JOB_SCHEMA,
        "job_id": job_id,
        "target": "gpu" if card is not None or job_id.startswith(_CARDS) else "job",
        "time": None if facts is None else rfc3339(facts.time),
        "running": job is not None,
        "halted": [_block(block) for block in engine.view.halted],
        "job": None if job is None else _job(engine, job),
        "rules": rules,
        "decisions": [
            decision_record(each, engine.losses.of(each.id), steps_of(engine.ledger, each.id))
            for each in decisions
        ],
        "leaves": [leave_document(engine, leave) for leave in leaves],
        "past_cases": [_with_times(case, "opened_at", "closed_at") for case in past],
        "events": [_with_times(event, "time") for event in events],
    }


def decision_record(
    decision: Decision, loss: Loss | None = None, steps: dict[str, Any] | None = None
) -> dict[str, Any]:
    """A decision and what became of it.

    Args:
        decision: as the ledger has it.
        loss: what it cost, where that was written down.
        steps: how far it has come, where it is carried out in several; see `decision_steps`.
    """
    return {
        "schema": DECISION_SCHEMA,
        "id": decision.id,
        "rule": decision.rule_id,
        "job_id": decision.job_id,
        "user": decision.user,
        "action": decision.action,
        "state": decision.state,
        "reason": decision.reason,
        "node": decision.host,
        "cards": list(decision.gpus),
        "grace": decision.grace,
        "created_at": rfc3339(decision.created_at),
        "expires": rfc3339(decision.expires),
        "finished_at": _time(decision.finished_at),
        "evidence": json.loads(decision.evidence),
        "report": None if decision.report is None else json.loads(decision.report),
        "loss": None if loss is None else loss.document(),
        "stage": decision.stage,
        "steps": steps,
    }


def _rule(
    engine: Engine, rule: Rule, verdict: Verdict | None, stored: StoredCase | None
) -> dict[str, Any]:
    return {
        "rule": rule.id,
        "description": rule.description,
        "mode": rule.mode.value,
        "verdict": None if verdict is None else verdict.truth.name,
        "protected": "" if verdict is None else verdict.protected,
        "self_report_only": verdict is not None and verdict.self_report_only,
        "evidence": [] if verdict is None else [evidence_record(item) for item in verdict.evidence],
        "grades": [] if verdict is None else [_grade(grade) for grade in verdict.grades],
        "case": None if stored is None else _case(engine, rule, stored),
        "why_not": [_block(block) for block in _why_not(engine, rule, stored)],
        "next": _next(engine, rule, stored),
    }


def _next(engine: Engine, rule: Rule, stored: StoredCase | None) -> list[dict[str, Any]]:
    if stored is None:
        return []
    now, counted = engine.clock.wall(), clocks_of(engine)
    found = forecasts(stored.case, rule, now=counted, kept_until=engine.kept_until(stored.case))
    return [item.document(counted, read_at=now) for item in found]


def clocks_of(engine: Engine) -> float:
    """Unix time as of which the clocks of an engine's cases stand; see `counted_from`."""
    facts = engine.view.facts
    return counted_from(
        engine.clock.wall(),
        looked_at=None if facts is None else facts.time,
        tick=engine.settings.tick,
    )


def _grade(grade: Grade) -> dict[str, Any]:
    return {
        "stage": grade.stage,
        "truth": grade.truth.name,
        "evidence": [evidence_record(item) for item in grade.evidence],
    }


def _why_not(engine: Engine, rule: Rule, stored: StoredCase | None) -> list[Blocked]:
    """What stands between a case and the end of its job, were it decided now."""
    if stored is None or not rule.takes:
        return []
    if stored.case.over or stored.case.leaving:
        return []
    facts = engine.view.facts
    blind = [block for block in engine.view.halted if block.reason == BLIND]
    if facts is None:
        return blind or [Blocked(BLIND, "no tick has been completed since the engine began")]
    age = engine.clock.wall() - facts.time
    # Before it acts a tick asks afresh: between two of them, old facts hold nothing back.
    fresh = 0 <= age <= engine.settings.tick + DATA_AGE_SCRAPES * engine.settings.scrape_interval
    asked = [
        block
        for block in engine.objections(stored, rule, facts)
        if not (fresh and block.reason == "stale_facts")
    ]
    known = [*blind, *engine.view.blocks.get((rule.id, stored.case.job_id), ())]
    return [*asked, *(block for block in known if block.reason not in {b.reason for b in asked})]


def _case(engine: Engine, rule: Rule, stored: StoredCase) -> dict[str, Any]:
    case, now = stored.case, engine.clock.wall()
    left = None if case.over else cases.remaining(case, rule)
    return {
        "state": case.state.value,
        "opened_at": rfc3339(case.opened_at),
        "detected_at": _time(case.detected_at),
        "notified_at": _time(case.notified_at),
        "for_met_for": round(case.elapsed, 3),
        "not_before": None if left is None else rfc3339(max(now, clocks_of(engine) + left)),
        "kept": case.kept,
        "decision": case.decision_id,
        "cause": {"name": case.cause, "because": case.because, "remedy": case.remedy}
        if case.cause
        else None,
        "stages": stage_records(case),
        "acts": [
            {
                "stage": act.key,
                "do": act.do,
                "decision": act.decision_id or None,
                "at": rfc3339(act.at),
                "state": act.state.value,
            }
            for act in case.acts
        ],
        "notices": [
            {
                "stage": notice.stage,
                "channel": notice.channel,
                "recipient": masked(notice.recipient),
                "state": notice.state,
                "attempts": notice.attempts,
                "proof": notice.proof,
                "error": notice.error,
                "time": rfc3339(notice.time),
            }
            for notice in engine.ledger.notices(stored.id)
        ],
        "keeps": keep_records(engine.ledger.keeps(case.rule_id, case.job_id, case.run_id)),
    }


def keep_records(keeps: Iterable[Keep]) -> list[dict[str, Any]]:
    """By how much a case's end was put off, by whom and why, for JSON."""
    return [
        {
            "role": keep.role,
            "by": keep.by,
            "reason": keep.reason,
            "seconds": keep.seconds,
            "granted_at": rfc3339(keep.granted_at),
            "until": rfc3339(keep.until),
        }
        for keep in keeps
    ]


def stage_records(case: Case) -> list[dict[str, Any]]:
    """The stages that a case has entered, for JSON."""
    return [
        {
            "stage": mark.key,
            "level": mark.level,
            "do": mark.do,
            "mode": mark.mode,
            "at": rfc3339(mark.at),
            "elapsed": round(mark.elapsed, 3),
            "would": mark.would,
        }
        for mark in case.marks
    ]


def _job_head(job: JobFacts) -> dict[str, Any]:
    return {
        "job_id": job.job_id,
        "user": job.user,
        "team": job.team,
        "node": job.instance,
        "framework": job.framework,
        "gpus": [_gpu(gpu, job.instance) for gpu in job.gpus],
        "run_id": None if job.run is None else job.run.run_id,
        "fresh": job.fresh,
    }


def _gpu(gpu: GpuFacts, node: str) -> str:
    """Its index; of a job over several nodes, with the node where that is not the job's first."""
    name = gpu.index or gpu.uuid
    return name if gpu.instance in ("", node) else f"{gpu.instance} GPU {name}"


def _job(engine: Engine, job: JobFacts) -> dict[str, Any]:
    facts = engine.view.facts
    # Of a job that nobody has looked at yet; a risk since its start would be a wrong one.
    unasked = facts is not None and facts.why_absent(SAVES, job.job_id) == "not_asked"
    risk = None if unasked or job.job_id.startswith(_CARDS) else engine.losses.risk(job)
    return {
        **_job_head(job),
        "source": job.source,
        "interactive": job.interactive,
        "started_at": _time(job.start_time),
        "first_gpu_use": _time(job.first_gpu_use),
        "not_fresh_reason": job.not_fresh_reason,
        "phase": None if job.run is None else job.run.phase,
        "checkpoint_at": None if job.run is None else _time(job.run.checkpoint_time),
        "at_risk": None if risk is None else risk.document(),
    }


def _block(block: Blocked) -> dict[str, str]:
    return {"reason": block.reason, "sentence": block.sentence}


def _time(moment: float | None) -> str | None:
    return None if moment is None else rfc3339(moment)


def _with_times(record: dict[str, object], *names: str) -> dict[str, object]:
    times = {name: record[name] for name in names if isinstance(record.get(name), float)}
    return {**record, **{name: rfc3339(float(str(value))) for name, value in times.items()}}


def masked(recipient: str) -> str:
    """An address without what would let a reader of the page write to it."""
    name, at, domain = recipient.partition("@")
    return f"{name[:1]}***@{domain}" if at else recipient


def answer(document: dict[str, Any]) -> str:
    """The page's first sentence: was the job ended, will it be, or why not."""
    # An engine of before the pages of cards does not say what it tells of.
    noun = "card" if document.get("target") == "gpu" else "job"
    ended = [decided(decision) for decision in reversed(document["decisions"])]
    for sentence in (
        *ended,
        _broken(document["rules"], noun),
        _protected(document["rules"], noun),
    ):
        if sentence:
            return sentence
    return _unbroken(document, noun)


def _unbroken(document: dict[str, Any], noun: str) -> str:
    """Of what breaks no rule: that, or that it is gone, or that nothing is known of it now."""
    blind = [b["sentence"] for b in document["halted"] if b["reason"] == BLIND]
    if document["time"] is None:
        why = "; ".join(blind) or "no tick has been completed since the engine began"
        return f"Nothing is known of this {noun} now, and so it is left alone: {why}."
    # What was known then says nothing of now.
    then, now = (f"At {document['time']} this", f"; {'; '.join(blind)}") if blind else ("This", "")
    if not document["running"]:
        by_us = "" if noun == "card" else "; gpuwarden did not end it"
        return f"{then} {noun} {'was' if blind else 'is'} not seen any more{by_us}{now}."
    if not document["job"]["fresh"]:
        why = document["job"]["not_fresh_reason"] or "its node is dark"
        return f"Nothing can be said of this {noun} now, and so it is left alone: {why}."
    return f"{then} {noun} {'broke' if blind else 'breaks'} no rule{now}."


def decided(decision: dict[str, Any]) -> str:
    """What became of a decision that stands, in one sentence; empty for one that does not."""
    rule, at = decision["rule"], decision["finished_at"] or decision["created_at"]
    why = decision["reason"] or decision["state"]
    if decision["action"] == Action.CHECKPOINT:
        return ""  # it was only asked to save
    if decision["action"] == Action.YIELD:
        asked = f"This job is asked by the rule {rule} to leave after its epoch, since {at}."
        left = f"This job left at {at}, as the rule {rule} asked it to; it is queued again."
        return {"verified": left, "authorised": asked, "acting": asked}.get(decision["state"], "")
    return {
        "verified": f"This job was ended by the rule {rule} at {at}; it has left the GPU.",
        "authorised": f"This job is being ended by the rule {rule} since {at}.",
        "acting": f"This job is being ended by the rule {rule} since {at}.",
        "incomplete": f"The rule {rule} ended this job at {at}, but that is not proven: {why}.",
        "failed": f"The rule {rule} ended this job at {at}, but that is not proven: {why}.",
    }.get(decision["state"], "")


def _broken(rules: list[dict[str, Any]], noun: str) -> str:
    broken = [rule for rule in rules if rule["case"] and rule["case"]["detected_at"]]
    if not broken:
        return ""
    said = f"This {noun} breaks the rule{'s' if len(broken) > 1 else ''} {_named(broken)}"
    # What may end it comes before what is only noted.
    ending = [rule for rule in broken if rule["case"]["not_before"]]
    near = [rule for rule in ending if not rule["why_not"]]
    if near:
        return (
            f"{said}. Nothing holds its end by {_named(near)} back: one of the next ticks ends it."
        )
    held = ending or [rule for rule in broken if rule["why_not"]]
    if not held:
        return (
            f"{said}, and rules on cards only tell."
            if noun == "card"
            else (f"{said}, and no rule that it breaks ends jobs.")
        )
    return f"{said}. It is not ended now: {'; '.join(_reasons(held))}."


def _named(rules: list[dict[str, Any]]) -> str:
    *others, last = (rule["rule"] for rule in rules)
    return f"{', '.join(others)} and {last}" if others else str(last)


def _reasons(held: list[dict[str, Any]]) -> list[str]:
    """Why no rule ends a job now: what all have in common, then what each has of its own."""
    found: list[tuple[str, list[str]]] = []
    for rule in held:
        # How far the case has come follows from the others, where there are any.
        blocks = [b for b in rule["why_not"] if b["reason"] != "not_due"] or rule["why_not"]
        found.append((rule["rule"], [block["sentence"] for block in blocks]))
    first = found[0][1]
    common = [text for text in first if all(text in texts for _, texts in found)]
    own = [(name, [text for text in texts if text not in common]) for name, texts in found]
    return common + [f"{name}: {', '.join(texts)}" for name, texts in own if texts]


def _protected(rules: list[dict[str, Any]], noun: str) -> str:
    why = "; ".join(f"{rule['rule']}: {rule['protected']}" for rule in rules if rule["protected"])
    return f"This {noun} is protected. {why}." if why else ""


def cause_lines(cause: dict[str, str]) -> list[str]:
    """Why the job does as it does, and what helps, each in a line of its own."""
    because = f": {cause['because']}" if cause["because"] else ""
    lines = [f"Probable cause: {cause['name']}{because}"]
    return lines + ([f"What helps: {cause['remedy']}"] if cause["remedy"] else [])


def proof_line(proof: dict[str, Any]) -> str:
    """What NVML showed after the act."""
    gone = "gone from" if proof["gone"] else "still in"
    return (
        f"NVML: the processes are {gone} its lists; {_gib(proof['memory_freed'])} freed, "
        f"{messages.about(proof['seconds'])} after the last exit."
    )


def _gib(value: int | None) -> str:
    return "" if value is None else f"{value / 2**30:.1f} GiB"
