"""The audit of one reclaim: from the sample that started it to the memory that came back. Pure.

One document, for the page, the API and the command alike. What is not known stands in `missing`,
with the reason: nothing is left out without a word.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from gpuwarden import agent_api
from gpuwarden.ruleengine import audit_checks, audit_timelines, explain
from gpuwarden.ruleengine.acts import LAST_STAGE
from gpuwarden.ruleengine.alertmanager import rfc3339

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from gpuwarden.ruleengine.dossiers import Dossier, Order, RuleText

SCHEMA = "gpuwarden.audit/v1"
OPEN = ("authorised", "acting")
"""States of a decision whose result is not known yet."""
_ENDS = ("terminate", "requeue")
_ASKS = {
    "checkpoint": "to save its state",
    "yield": "to finish its epoch, save and leave",
}
_NO_OPENING = (
    "the case was opened when none was kept: by an earlier version, while the rule could only "
    "tell, or with hundreds of others in the same tick"
)


def audit(dossier: Dossier, *, now: float) -> dict[str, Any]:
    """The document of a decision.

    Args:
        dossier: everything about it.
        now: Unix time, for what is still open.
    """
    decision, look = dossier.decision, _look(dossier)
    nodes = [_node(order) for order in dossier.orders]
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "time": rfc3339(now),
        "answer": _answer(dossier),
        "decision": {
            "id": decision.id,
            "epoch": decision.epoch,
            "action": decision.action,
            "stage": decision.stage,
            "state": decision.state,
            "reason": decision.reason,
            "grace": decision.grace,
            "created_at": rfc3339(decision.created_at),
            "expires": rfc3339(decision.expires),
            "finished_at": _time(decision.finished_at),
        },
        "job": _job(dossier),
        "rule": _rule(dossier),
        "first_sample": _first_sample(dossier),
        "deadlines": _deadlines(dossier),
        "clock_set_back": _set_back(dossier),
        "stages": explain.stage_records(dossier.case),
        "notices": _notices(dossier),
        "keeps": explain.keep_records(dossier.keeps),
        "held_back": [
            {
                "reason": hold.reason,
                "sentence": hold.sentence,
                "from": rfc3339(hold.begun_at),
                "until": _time(hold.ended_at),
            }
            for hold in dossier.holds
        ],
        "last_look": look,
        "evidence": json.loads(decision.evidence),
        "platform": _platform(dossier),
        "nodes": nodes,
        "result": _result(dossier, nodes),
        "other_decisions": [
            {
                "id": item.id,
                "action": item.action,
                "state": item.state,
                "reason": item.reason,
                "created_at": rfc3339(item.created_at),
            }
            for item in dossier.others
        ],
        "afterwards": _afterwards(dossier),
    }
    document["timeline"] = audit_timelines.timeline(dossier)
    document["missing"] = [{"what": what, "why": why} for what, why in _missing(dossier, document)]
    document["checks"] = [found.record() for found in audit_checks.checks(document)]
    return document


def _answer(dossier: Dossier) -> str:
    record = explain.decision_record(dossier.decision)
    rule, state, why = record["rule"], record["state"], record["reason"] or record["state"]
    if dossier.decision.action in _ENDS:
        said = explain.decided(record)
        return said or f"The rule {rule} did not end this job: {why}."
    asked = _ASKS.get(dossier.decision.action, "to do something")
    if state in ("done", "verified"):
        return f"The rule {rule} asked this job {asked}, and it did."
    if state in OPEN:
        return f"The rule {rule} asks this job {asked} since {record['created_at']}."
    return f"The rule {rule} asked this job {asked}, and it did not: {why.replace('_', ' ')}."


def _job(dossier: Dossier) -> dict[str, Any]:
    """Who it was, as the last look saw it; else as the case remembers it."""
    decision, case = dossier.decision, dossier.case
    seen = dossier.look.document["job"] if dossier.look is not None else {}
    known = {card["uuid"]: card for card in seen.get("cards", ())}
    return {
        "job_id": decision.job_id,
        "user": decision.user,
        "team": seen.get("team", ""),
        "run_id": case.run_id,
        "nodes": list(seen.get("instances") or [case.instance]),
        "cards": [
            {
                "uuid": uuid,
                "index": known.get(uuid, {}).get("index", ""),
                "name": known.get(uuid, {}).get("name", ""),
                "node": known.get(uuid, {}).get("node", ""),
            }
            for uuid in decision.gpus
        ],
        "started_at": _time(seen.get("started_at")),
        "saved_at": _time(seen.get("saved_at")),
        "phase": seen.get("phase"),
        "cause": {"name": case.cause, "because": case.because, "remedy": case.remedy}
        if case.cause
        else None,
    }


def _rule(dossier: Dossier) -> dict[str, Any]:
    opened = None if dossier.opening is None else dossier.opening.rule
    acted = None if dossier.look is None else dossier.look.rule
    read = acted or opened
    document: Mapping[str, Any] = {} if read is None else read.document
    look: Mapping[str, Any] = {} if dossier.look is None else dossier.look.document
    return {
        "id": dossier.decision.rule_id,
        "hash": None if read is None else read.hash,
        "mode": document.get("mode"),
        "text": document.get("text"),
        "queries": document.get("queries", []),
        "rule_set_hash": look.get("rule_set_hash"),
        "files_hash": look.get("files_hash"),
        "engine_version": look.get("engine_version"),
        "changed_since_first_sample": _changed(opened, acted),
        "text_at_first_sample": opened.document.get("text")
        if opened is not None and _changed(opened, acted)
        else None,
    }


def _changed(opened: RuleText | None, acted: RuleText | None) -> bool | None:
    return None if opened is None or acted is None else opened.hash != acted.hash


def _first_sample(dossier: Dossier) -> dict[str, Any] | None:
    if dossier.opening is None:
        return None
    document = dossier.opening.document
    return {
        "at": rfc3339(dossier.case.opened_at),
        "query_time": document["time"],
        "evidence": document["evidence"],
    }


def _deadlines(dossier: Dossier) -> dict[str, Any]:
    """What the owner was told, and how it was kept. Durations are seconds."""
    case, decision = dossier.case, dossier.decision
    told = case.promise_of(decision.stage or LAST_STAGE)
    mark = next((m for m in reversed(case.marks) if m.do == decision.action), None)
    passed = None if mark is None else mark.elapsed
    notice_age = None
    if dossier.look is not None:
        passed = dossier.look.document["case"]["elapsed"]
        notice_age = dossier.look.document["case"]["notice_age"]
    return {
        "opened_at": rfc3339(case.opened_at),
        "detected_at": _time(case.detected_at),
        "notified_at": _time(case.notified_at),
        "told_after": None if told is None else told.after,
        "told_notice_delivered_for": None if told is None else told.notice_delivered_for,
        "told_grace": None if told is None else told.grace,
        "kept": case.kept,
        "passed": None if passed is None else round(passed, 3),
        "notice_age": None if notice_age is None else round(notice_age, 3),
        "grace": decision.grace,
        "decided_at": rfc3339(decision.created_at),
    }


def _set_back(dossier: Dossier) -> list[dict[str, Any]]:
    """Where the engine's clock was set back meanwhile, by the order of what it wrote."""
    # What held a case back is written in ticks that may have no event.
    courses = ([line.time for line in dossier.events], [hold.begun_at for hold in dossier.holds])
    found = []
    for times in courses:
        before = dossier.case.opened_at
        for at in times:
            if at < before:
                found.append({"at": rfc3339(at), "by": round(before - at, 3)})
            before = at
    return found


def _notices(dossier: Dossier) -> list[dict[str, Any]]:
    return [
        {
            "stage": item.stage,
            "channel": item.channel,
            "recipient": explain.masked(item.recipient),
            "required_at": _time(item.required_at),
            "state": item.state,
            "attempts": item.attempts,
            "refusals": [
                {"at": rfc3339(at), "error": error.replace(item.recipient, "(the recipient)")}
                for at, error in item.refusals
            ],
            "proof": item.proof.replace(item.recipient, explain.masked(item.recipient)),
            "proven_at": rfc3339(item.time) if item.state == "proven" else None,
        }
        for item in dossier.tellings
    ]


def _look(dossier: Dossier) -> dict[str, Any] | None:
    if dossier.look is None:
        return None
    found = dossier.look.document
    return {
        "at": rfc3339(dossier.look.time),
        "truth": found["truth"],
        "self_report_only": found["self_report_only"],
        "protected": found["protected"],
        "query_time": found["facts"]["time"],
        "facts_age": round(found["facts"]["age"], 3),
        "facts_allowed_age": found["facts"]["allowed_age"],
        "problems": found["facts"]["problems"],
        "expected_nodes": found["facts"]["expected_nodes"],
        "lit_nodes": found["facts"]["lit_nodes"],
        "clock_skew": round(found["facts"]["clock_skew"], 3),
        "kill_switch": found["fleet"]["kill_switch"],
        "paused": found["fleet"]["paused"],
        "bad_files": found["fleet"]["bad_files"],
        "settled_for": round(found["fleet"]["settled_for"], 3),
        "settle_after": found["fleet"]["settle_after"],
        "kept_until": _time(found["case"]["kept_until"]),
        "limits": found["limits"],
        "notices": [
            {
                "stage": notice["stage"],
                "channel": notice["channel"],
                "state": notice["state"],
                "proven_at": rfc3339(notice["time"]) if notice["state"] == "proven" else None,
            }
            for notice in found["notices"]
        ],
        "work_lost": found["job"]["work_lost"],
        "max_work_lost": found["job"]["max_work_lost"],
    }


def _platform(dossier: Dossier) -> dict[str, Any] | None:
    """What the platform that owns the job was told, and what it said."""
    act = dossier.platform
    if act is None:
        return None
    return {
        "platform": act.platform,
        "claim": json.loads(act.claim or "{}"),
        "step": act.step,
        "changed_at": rfc3339(act.changed_at),
        "waited": round(act.waited, 3),
        "asked_at": _time(act.asked_at),
        "notice": act.notice,
        "ended_at": _time(act.ended_at),
        "tries": act.tries,
        "word": act.word,
        "obstacle": act.obstacle,
        "successor": act.successor,
        "detail": json.loads(act.detail or "{}"),
        "why": act.why,
    }


def _node(order: Order) -> dict[str, Any]:
    """What was asked of a node, and what its agent did and saw."""
    report = order.report
    asked = json.loads(order.body)
    proof = None if report is None else report.get("proof")
    before = {} if proof is None else proof.get("device_used_before", {})
    after = {} if proof is None else proof.get("device_used_after", {})
    return {
        "host": order.host,
        "node": asked.get("node", ""),
        "boot_id": asked.get("boot_id", ""),
        "request": {
            "decision_id": asked.get("decision_id", ""),
            "action": asked.get("action", ""),
            "sha256": hashlib.sha256(order.body).hexdigest(),
            "key_id": _key_id(order.signature),
            "epoch": asked.get("epoch"),
            "expires": _time(asked.get("expires")),
            "seen": len(asked.get("seen", ())),
        },
        "state": order.state,
        "decision": None if report is None else report.get("decision_id"),
        "outcome": None if report is None else report.get("outcome"),
        "reason": order.reason or ("" if report is None else report.get("reason", "")),
        "message": "" if report is None else report.get("message", ""),
        "steps": [
            {"step": name, "at": rfc3339(at)}
            for name, at in sorted(
                ({} if report is None else report.get("steps", {})).items(), key=lambda s: s[1]
            )
        ],
        "processes": [
            {
                "pid": process["pid"],
                "start_ticks": process["start_ticks"],
                "ended_by": process.get("ended_by"),
                "gpu_memory": process.get("gpu_memory"),
            }
            for process in (() if report is None else report.get("processes", ()))
        ],
        "cards": [
            {"uuid": uuid, "used_before": before.get(uuid), "used_after": after.get(uuid)}
            for uuid in sorted({*before, *after})
        ],
        "gone": None if proof is None else proof["gone"],
        "memory_freed": None if proof is None else proof["memory_freed"],
        "proof_seconds": None if proof is None else proof["seconds"],
    }


def _key_id(signature: str) -> str | None:
    try:
        return agent_api.parse_signature(signature)[0]
    except agent_api.ApiError:
        return None


def _result(dossier: Dossier, nodes: list[dict[str, Any]]) -> dict[str, Any]:
    decision, case = dossier.decision, dossier.case
    freed = [node["memory_freed"] for node in nodes if node["memory_freed"] is not None]
    acting = [node for node in nodes if node["request"]["action"] in ("terminate", "watch")]
    processes = [process for node in acting for process in node["processes"]]
    seen = dossier.look.document["job"] if dossier.look is not None else {}
    return {
        "state": decision.state,
        "reason": decision.reason,
        "memory_freed": sum(freed) if freed else None,
        "processes": len(processes),
        "survivors": sum(1 for process in processes if process["ended_by"] is None),
        "work_at_risk": seen.get("work_lost"),
        "loss": None if dossier.loss is None else dossier.loss.document(),
        "seconds": {
            "first_sample_to_detected": _between(case.opened_at, case.detected_at),
            "detected_to_told": _between(case.detected_at, case.notified_at),
            "told_to_decided": _between(case.notified_at, decision.created_at),
            "decided_to_finished": _between(decision.created_at, decision.finished_at),
            "in_all": _between(case.opened_at, decision.finished_at),
        },
    }


def _afterwards(dossier: Dossier) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if dossier.closed_at is not None:
        why = (dossier.closed_because or "").replace("_", " ")
        found.append(
            {
                "at": rfc3339(dossier.closed_at),
                "what": f"the case was closed: {why}",
                "job_id": None,
            }
        )
    for item in dossier.later:
        how = f", resumed ({item.resume_mode})" if item.resume_mode else ""
        what = f"the run {dossier.case.run_id} has another attempt{how}"
        if item.running:
            what += ", which runs now"
        at = _time(item.seen_at)
        found.append({"at": at, "what": what, "job_id": item.job_id})
    return found


def _missing(dossier: Dossier, document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What a whole audit has and this one has not, and why."""
    earlier = "the decision was taken by an earlier version"
    if dossier.opening is None:
        yield "the first sample", _NO_OPENING
    if dossier.look is None:
        yield "the last look", f"{earlier}, which kept none"
    if document["rule"]["text"] is None:
        yield "the rule as it read", earlier
    if not dossier.tellings:
        yield "notices", "no recipient was ever required for this case"
    if any(item.required_at is None for item in dossier.tellings):
        yield "when a notice was first tried", "it was given by an earlier version"
    if dossier.case.run_id is None:
        yield "the run", "no trainer is known in the job: what comes after cannot be told to be it"
    if dossier.look is not None and document["result"]["work_at_risk"] is None:
        yield "the work that was at risk", "neither a saved state nor the job's start was known"
    if dossier.loss is not None and dossier.loss.gpu_seconds is None:
        why = dossier.loss.why_not or "the node counts it ten minutes after the job's end"
        yield "the work that was lost, as the node counts it", why
    yield from _missing_of_nodes(dossier, document["nodes"])


def _missing_of_nodes(dossier: Dossier, nodes: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    state, reason = dossier.decision.state, dossier.decision.reason
    for node in nodes:
        if node["outcome"] is None:
            yield f"the report of {node['host']}", _no_report(state, reason)
        elif node["gone"] is None and node["request"]["action"] in ("terminate", "watch"):
            why = node["message"] or node["reason"] or "nothing could be proven gone"
            yield f"the proof of {node['host']}", why


def _no_report(state: str, reason: str) -> str:
    if state in OPEN:
        return "the agent has not finished, or has not been reached since"
    return f"the decision is {state}: {reason or 'the agent gave none'}"


def _time(moment: float | None) -> str | None:
    return None if moment is None else rfc3339(moment)


def _between(first: float | None, last: float | None) -> float | None:
    return None if first is None or last is None else round(last - first, 3)
