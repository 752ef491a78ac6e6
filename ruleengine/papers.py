"""What is kept for the audit of a reclaim and for nothing else: no decision depends on it.

The first sample that broke a rule, the rule as it then read, and what the last look before a
decision found. Each goes with its case, when that is forgotten.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpuwarden import __version__
from gpuwarden.ruleengine import guards
from gpuwarden.ruleengine.cases import terms
from gpuwarden.ruleengine.reclaim.drafts import evidence_record
from gpuwarden.ruleengine.rule_explanations import explain_rule, explanation_lines

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from gpuwarden.ruleengine.cases import Case
    from gpuwarden.ruleengine.guards import PastEnd, Situation
    from gpuwarden.ruleengine.ledger import Ledger
    from gpuwarden.ruleengine.model import Rule, RuleSet, Stage, TerminateLimits
    from gpuwarden.ruleengine.records import Notice
    from gpuwarden.ruleengine.rulebooks import RuleBook
    from gpuwarden.ruleengine.verdicts import JobFacts, Verdict

MAX_OPENINGS = 200
"""First samples put into words in one tick: more at once is a fault of the data, not a case."""


@dataclass(frozen=True, slots=True)
class Paper:
    """A document that refers to a rule as it then read.

    Attributes:
        rule_hash: names the text.
        document: JSON.
    """

    rule_hash: str
    document: str


class RuleTexts:
    """Rules as they read, each written down once.

    Args:
        ledger: where.
        scrape_interval: of the nodes, in seconds.
    """

    def __init__(self, ledger: Ledger, scrape_interval: float) -> None:
        self._ledger = ledger
        self._interval = scrape_interval
        self._known: dict[tuple[str, str], tuple[Rule, str]] = {}
        self._written: set[str] = set()

    def hash_of(self, rule: Rule, rules: RuleSet) -> str:
        """The name of a rule's text, which is on disk when this returns."""
        # A rule on trial is another one, in another mode, for some owners.
        place = (rule.id, rule.mode.value)
        known = self._known.get(place)
        if known is not None and known[0] is rule:
            return known[1]
        document = json.dumps(self._text(rule, rules), sort_keys=True, ensure_ascii=False)
        name = hashlib.sha256(document.encode()).hexdigest()[:16]
        if name not in self._written:
            row = (name, rule.id, document)
            with self._ledger.transaction() as db:
                db.execute("INSERT OR IGNORE INTO rule_texts VALUES (?, ?, ?)", row)
            self._written.add(name)
        self._known[place] = (rule, name)
        return name

    def _text(self, rule: Rule, rules: RuleSet) -> dict[str, Any]:
        """A rule in words and in data; the words are kept, for later versions may use others."""
        # Whom a rule spares is no part of it, and is not told to everybody.
        found = explain_rule(rule, rules, scrape_interval=self._interval) | {"protected": []}
        conditions = [found["when"], *(stage["when"] for stage in found["stages"])]
        queries = {
            query["promql"]: query
            for condition in conditions
            if condition is not None
            for query in _queries(condition)
        }
        return {
            "id": rule.id,
            "mode": rule.mode.value,
            "text": "\n".join(explanation_lines(found)),
            "queries": list(queries.values()),
            "rule": found,
        }


def _queries(condition: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every query behind a condition."""
    yield from condition.get("queries", ())
    for part in condition.get("conditions", ()):
        yield from _queries(part)


def acts(rule: Rule) -> bool:
    """Whether a rule does more to a job than to tell of it, in whatever mode it is now."""
    return any(stage.do not in ("log", "notify") for stage in rule.stages)


def opening(rule_hash: str, verdict: Verdict, time: float) -> Paper:
    """The first sample that broke a rule.

    Args:
        rule_hash: of the rule as it reads.
        verdict: that is YES for the first time.
        time: Unix time of every query behind it (`time=`).
    """
    document = {
        "time": time,
        "evidence": [evidence_record(item) for item in verdict.evidence],
    }
    return Paper(rule_hash, json.dumps(document))


def look(
    rule_hash: str,
    situation: Situation,
    case: Case,
    *,
    key: str,
    stage: Stage,
    rule: Rule,
    job: JobFacts,
    verdict: Verdict,
    kept_until: float | None,
    notices: Sequence[Notice],
    book: RuleBook,
) -> Paper:
    """What the last look before a decision found; every guard has been asked, and none objected.

    Args:
        rule_hash: of the rule as it reads.
        situation: of the fleet, as the guards had it.
        case: as the guards had it.
        key: name of the stage that acts.
        stage: that acts.
        rule: the rule.
        job: its fresh facts.
        verdict: the fresh verdict.
        kept_until: Unix time to which keeps protect it, or None.
        notices: of the case, as they stand now.
        book: rules and directory in force.
    """
    facts, told = situation.facts, terms(case, key, stage)
    document = {
        "time": situation.now,
        "stage": key,
        "engine_version": __version__,
        "rule_set_hash": book.hash,
        "files_hash": book.files_hash,
        "truth": verdict.truth.name,
        "self_report_only": verdict.self_report_only,
        "protected": verdict.protected,
        "evidence": [evidence_record(item) for item in verdict.whole_evidence],
        "facts": {
            "time": facts.time,
            "age": situation.now - facts.time,
            "allowed_age": guards.DATA_AGE_SCRAPES * situation.scrape_interval,
            "problems": list(facts.problems),
            "expected_nodes": facts.expected_nodes,
            "lit_nodes": facts.lit_nodes,
            "clock_skew": max(facts.clock_skew_seconds, situation.notices_skew),
        },
        "fleet": {
            "kill_switch": situation.killed,
            "paused": situation.paused,
            "bad_files": situation.bad_files,
            "late": situation.late,
            "settled_for": situation.settled_for,
            "settle_after": situation.settle_after,
        },
        "limits": _limits(situation, case.user, rule.id),
        "case": {
            "elapsed": case.elapsed,
            "after": told.after,
            "notice_age": case.notice_age,
            "notice_delivered_for": told.notice_delivered_for,
            "grace": told.grace,
            "kept_until": kept_until,
        },
        # What comes later may change both: a refused decision is followed by another one.
        "body": json.loads(case.encode()),
        "notices": [
            {
                "stage": notice.stage,
                "channel": notice.channel,
                "state": notice.state,
                "time": notice.time,
            }
            for notice in notices
        ],
        "job": {
            "user": job.user,
            "team": job.team,
            "instances": list(job.instances) or [job.instance],
            "run_id": None if job.run is None or job.run.conflict else job.run.run_id,
            "phase": None if job.run is None else job.run.phase,
            "started_at": job.start_time,
            "saved_at": None if job.run is None else job.run.checkpoint_time,
            "work_lost": guards.work_lost(job, situation.now),
            "max_work_lost": stage.max_work_lost,
            "cards": [
                {"uuid": gpu.uuid, "index": gpu.index, "name": gpu.name, "node": gpu.instance}
                for gpu in job.gpus
            ],
            "processes": len(job.processes),
        },
    }
    return Paper(rule_hash, json.dumps(document))


def _limits(situation: Situation, user: str, rule_id: str) -> list[dict[str, Any]]:
    """How much of each limit was used before this decision."""
    if situation.limits is None:
        return []
    found = _used(situation.limits, situation.ends, situation.ended_this_tick, user, situation.now)
    for group in situation.groups:
        if rule_id in group.rules:
            ends = [end for end in situation.ends if end.rule_id in group.rules]
            in_tick = sum(1 for ended in situation.ended_rules if ended in group.rules)
            found += _used(group.limits, ends, in_tick, user, situation.now, of=group.name)
    return found


def _used(
    limits: TerminateLimits,
    ends: Iterable[PastEnd],
    in_tick: int,
    user: str,
    now: float,
    *,
    of: str = "",
) -> list[dict[str, Any]]:
    ends = list(ends)
    hour = sum(1 for end in ends if end.time > now - guards.HOUR_SECONDS)
    day = sum(1 for end in ends if end.user == user and end.time > now - guards.DAY_SECONDS)
    rows = (
        ("per_tick", in_tick, limits.per_tick),
        ("per_hour", hour, limits.per_hour),
        ("per_user_per_day", day, limits.per_user_per_day),
    )
    return [{"limit": name, "of": of, "used": used, "allowed": most} for name, used, most in rows]


def save_look(ledger: Ledger, case_id: int, paper: Paper, *, time: float) -> None:
    """Write a last look down, before the decision that follows it: nothing holds it back now."""
    with ledger.transaction() as db:
        db.execute(
            "UPDATE holds SET ended_at=? WHERE case_id=? AND ended_at IS NULL", (time, case_id)
        )
        db.execute(
            "INSERT INTO looks (case_id, time, rule_hash, document) VALUES (?, ?, ?, ?)",
            (case_id, time, paper.rule_hash, paper.document),
        )
