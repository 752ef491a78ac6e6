"""What the API and the pages tell of the engine as a whole, as documents of plain values."""

from __future__ import annotations

import datetime as dt
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpuwarden import __version__
from gpuwarden.ruleengine import explain
from gpuwarden.ruleengine.alertmanager import rfc3339
from gpuwarden.ruleengine.cases import CaseState
from gpuwarden.ruleengine.decision_steps import steps_of
from gpuwarden.ruleengine.enforcement_routes import enforcement_document
from gpuwarden.ruleengine.rule_explanations import explain_rule, explanation_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gpuwarden.ruleengine.engine import Engine
    from gpuwarden.ruleengine.model import WhitelistEntry
    from gpuwarden.ruleengine.roles import Person

RULES_SCHEMA = "gpuwarden.rules/v1"
PROTECTIONS_SCHEMA = "gpuwarden.protections/v1"
DECISIONS_SCHEMA = "gpuwarden.decisions/v1"
HEALTH_SCHEMA = "gpuwarden.health/v1"
AUDIT_SCHEMA = "gpuwarden.audit/v1"
MAX_ROWS = 500
"""Rows of the ledger in one answer; the next ones are asked for by `before`."""

PEOPLES_KINDS = (
    *("kept", "paused", "resumed", "rule_resumed", "appeal", "regret"),
    *("names_opened", "names_closed", "erased", "node_forgotten"),
)
"""Kinds of events that a person's word writes."""


@dataclass(frozen=True, slots=True)
class JobFilter:
    """Which jobs are listed; an empty string admits all.

    Attributes:
        user: a part of the owner's name.
        team: the owner's team.
        node: a part of the node's address.
        rule: a rule that a case is open for.
        broken: only jobs that a case is open for.
    """

    user: str = ""
    team: str = ""
    node: str = ""
    rule: str = ""
    broken: bool = False

    def admits(self, job: dict[str, Any]) -> bool:
        """Whether a row of the jobs' document is wanted."""
        return (
            self.user.lower() in job["user"].lower()
            and self.node.lower() in job["node"].lower()
            and (not self.team or self.team == job["team"])
            and (not self.rule or self.rule in job["cases"])
            and (not self.broken or bool(job["cases"]))
        )


def fleet_document(
    engine: Engine,
    person: Person,
    wanted: JobFilter,
    *,
    offset: int = 0,
    limit: int | None = None,
    shown: Callable[[str], str] = str,
) -> dict[str, Any]:
    """The running jobs that a person may see and asks for; those with open cases first.

    Args:
        engine: whose jobs they are.
        person: who asks.
        wanted: which of them.
        offset: how many to pass over.
        limit: how many at most, or None for all.
        shown: what the person reads in the place of a user's name. The filter and the order are
            of that: they must not tell who it is.
    """
    document = explain.jobs_document(engine, person.sees)
    listed = [{**job, "user": shown(job["user"])} for job in document["jobs"]]
    found = [job for job in listed if wanted.admits(job)]
    found.sort(key=lambda job: (-_urgency(job["cases"].values()), job["user"], job["job_id"]))
    end = None if limit is None else offset + limit
    return {**document, "total": len(found), "offset": offset, "jobs": found[offset:end]}


def _urgency(states: Sequence[str]) -> int:
    order = list(CaseState)
    return max((1 + order.index(CaseState(state)) for state in states), default=0)


def rules_document(engine: Engine, person: Person) -> dict[str, Any]:
    """Every rule: what it does, in data and in words, and how many cases it has now.

    Whom else a rule spares is not told to owners.
    """
    rules, interval = engine.rulebook.rules, engine.settings.scrape_interval
    counts: dict[str, dict[str, int]] = {}
    for stored in engine.cases.all():
        states = counts.setdefault(stored.case.rule_id, {})
        states[stored.case.state.value] = states.get(stored.case.state.value, 0) + 1
    held = {item.rule_id: item.sentence for item in engine.trials.held}
    found = []
    for rule in rules.rules:
        explanation = explain_rule(rule, rules, scrape_interval=interval)
        explanation["protected"] = [
            entry
            for entry in explanation["protected"]
            if person.sees_all or entry["match"].get("user") == person.name
        ]
        found.append(
            {
                "id": rule.id,
                "description": rule.description,
                "mode": rule.mode.value,
                "canary": "" if rule.canary is None else str(rule.canary),
                "held_back": held.get(rule.id, ""),
                "target": rule.target.value,
                "team": rule.team,
                "stages": [
                    {"key": stage["key"], "level": stage["level"], "after": stage["after"]}
                    for stage in explanation["stages"]
                ],
                "cases": counts.get(rule.id, {}),
                "text": "\n".join(explanation_lines(explanation)),
            }
        )
    return {
        "schema": RULES_SCHEMA,
        "hash": engine.rulebook.hash,
        "problem": engine.rulebook.problem,
        "rules": found,
    }


def protections_document(engine: Engine, person: Person) -> dict[str, Any]:
    """The whitelist, and every keep that holds, as far as a person may see them."""
    now, directory = engine.clock.wall(), engine.rulebook.directory
    keeps = engine.ledger.rows(
        "SELECT k.rule_id, k.job_id, k.run_id, k.role, k.by, k.reason, k.granted_at, k.until, "
        "(SELECT json_extract(c.body, '$.user') FROM cases c WHERE c.job_id=k.job_id "
        "AND c.rule_id=k.rule_id ORDER BY c.id DESC LIMIT 1) "
        "FROM keeps k WHERE k.until > ? ORDER BY k.until LIMIT ?",
        (now, MAX_ROWS),
    )
    names = ("rule", "job_id", "run_id", "role", "by", "reason")
    return {
        "schema": PROTECTIONS_SCHEMA,
        "whitelist": [
            _entry(entry, now)
            for entry in engine.rulebook.rules.whitelist
            if person.sees_all or entry.match.user == person.name
        ],
        "keeps": [
            {
                **dict(zip(names, row[:6], strict=True)),
                "granted_at": rfc3339(row[6]),
                "until": rfc3339(row[7]),
                "user": row[8] or "",
            }
            for row in keeps
            if person.sees(row[8] or "", directory.user(row[8] or "").team)
        ],
    }


def _entry(entry: WhitelistEntry, now: float) -> dict[str, Any]:
    return {
        "match": entry.match.model_dump(exclude_none=True),
        "rules": list(entry.rules),
        "reason": entry.reason,
        "approved_by": entry.approved_by,
        "expires": rfc3339(entry.expires.timestamp()),
        "expired": entry.expires.timestamp() <= now,
    }


def decisions_document(
    engine: Engine, person: Person, *, before: float | None = None, limit: int = 100
) -> dict[str, Any]:
    """Decisions, newest first.

    Args:
        engine: that took them.
        person: who asks.
        before: Unix time; only older ones, or None for the newest.
        limit: how many; more where several were taken in the millisecond of the last one.
    """
    ledger = engine.ledger
    users = [user for (user,) in ledger.rows("SELECT DISTINCT user FROM decisions")]
    seen = json.dumps([user for user in users if _sees(engine, person, user)])
    query = (
        "SELECT id, created_at FROM decisions WHERE {} "
        "AND user IN (SELECT value FROM json_each(?)) ORDER BY created_at DESC, id DESC LIMIT ?"
    )
    newest = before if before is not None else float("inf")
    rows = ledger.rows(query.format("created_at < ?"), (newest, seen, limit))
    last = rows[-1] if len(rows) == limit else None
    if last is not None:
        # The next ones are asked for by a time to the millisecond: none of its may stay behind.
        at = dt.datetime.fromisoformat(rfc3339(last[1])).timestamp()
        rest = "created_at >= ? AND (created_at, id) < (?, ?)"
        rows += ledger.rows(query.format(rest), (at, last[1], last[0], seen, -1))
    found = [decision for (number, _) in rows if (decision := ledger.decision(number)) is not None]
    return {
        "schema": DECISIONS_SCHEMA,
        "decisions": [
            explain.decision_record(
                item, engine.losses.of(item.id), steps_of(engine.ledger, item.id)
            )
            for item in found
        ],
        "before": None if last is None else rfc3339(last[1]),
    }


def _sees(engine: Engine, person: Person, user: str) -> bool:
    return person.sees(user, engine.rulebook.directory.user(user).team)


def audit_document(
    engine: Engine, *, before: int | None = None, limit: int = 100, people: bool = False
) -> dict[str, Any]:
    """The audit, newest first.

    Args:
        engine: whose it is.
        before: number of an event; only older ones, or None for the newest.
        limit: how many.
        people: only what somebody changed, with who and why.
    """
    rows = engine.ledger.rows(
        "SELECT id, time, rule_id, job_id, kind, mode, detail FROM events "
        # A run that is back on a card is the engine's own regret.
        "WHERE id < ? AND (? = 0 OR kind IN (SELECT value FROM json_each(?)) "
        "AND json_extract(detail, '$.role') IS NOT 'engine') ORDER BY id DESC LIMIT ?",
        (before if before is not None else 2**62, int(people), json.dumps(PEOPLES_KINDS), limit),
    )
    found = []
    for number, time, rule, job_id, kind, mode, text in rows:
        detail = json.loads(text)
        found.append(
            {
                "id": number,
                "time": rfc3339(time),
                "kind": kind,
                "rule": rule,
                "job_id": job_id,
                "mode": mode,
                "by": str(detail.pop("by", "")),
                "reason": str(detail.pop("reason", "")),
                "detail": detail,
            }
        )
    return {
        "schema": AUDIT_SCHEMA,
        "events": found,
        "before": found[-1]["id"] if len(found) == limit else None,
    }


def health_document(engine: Engine) -> dict[str, Any]:
    """How the engine does: its ticks, what it talks to, and what it does not know."""
    facts, ticks, settings = engine.view.facts, engine.ticks, engine.settings
    last, now = ticks.last_completed, engine.clock.wall()
    unknown: dict[str, int] = {}
    for (_, reason), count in ticks.unknown.items():
        unknown[reason] = unknown.get(reason, 0) + count
    return {
        "schema": HEALTH_SCHEMA,
        "version": __version__,
        "time": rfc3339(now),
        "problems": engine.problems,
        "enforcement": enforcement_document(engine),
        "ticks": {
            "every": settings.tick,
            "last_completed": None if last is None else rfc3339(last),
            "age": None if last is None else round(max(0.0, now - last), 3),
            "seconds": round(ticks.last_seconds, 3),
            "outcomes": dict(ticks.outcomes),
        },
        "unknown": unknown,
        "nodes": {
            "expected": None if facts is None else facts.expected_nodes,
            "lit": None if facts is None else facts.lit_nodes,
        },
        "jobs": None if facts is None else len(facts.jobs),
        "clock_skew": None if facts is None else round(facts.clock_skew_seconds, 3),
        "prometheus": {
            "urls": [url for shard in settings.prometheus.groups for url in shard],
            "problem": ticks.last_error,
            "facts": [] if facts is None else list(facts.problems),
        },
        "alertmanager": {
            "urls": list(settings.alertmanagers),
            "problem": engine.teller.problem,
        },
        "agents": {
            "url": None if settings.agents is None else settings.agents.url,
            "problems": sorted(
                {
                    block.sentence
                    for blocks in engine.view.blocks.values()
                    for block in blocks
                    if block.reason in ("agent_unreachable", "agent_key", "no_agents")
                }
            ),
            "open_decisions": len(engine.ledger.open_decisions()),
            "unproven_decisions": len(engine.ledger.incomplete_decisions()),
        },
        "drills": engine.drills.document(),
        "ledger": {
            "bytes": engine.ledger.path.stat().st_size if engine.ledger.path.exists() else 0,
            "epoch": engine.epoch,
            "open_cases": len(engine.cases),
        },
        "rules": {
            "hash": engine.rulebook.hash,
            "count": len(engine.rulebook.rules.rules),
            "problem": engine.rulebook.problem,
        },
    }
