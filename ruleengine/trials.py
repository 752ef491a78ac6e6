"""Rules on trial (`canary`): what speaks against them, and which have fallen back to warn.

All of it is in the ledger before it counts, and outlives restarts and every change of the rule's
file: a rule that has fallen back is let loose again by an admin's word alone. What cannot be read
counts as fallen back.
"""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import structlog

from gpuwarden.ruleengine import canaries
from gpuwarden.ruleengine.alertmanager import rfc3339
from gpuwarden.ruleengine.canaries import Ended, Objected, Objection, Seen
from gpuwarden.ruleengine.ledger_handles import LedgerUnusable
from gpuwarden.ruleengine.model import Mode

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gpuwarden.clock import Clock
    from gpuwarden.ruleengine.cases import Case
    from gpuwarden.ruleengine.guards import Blocked
    from gpuwarden.ruleengine.ledger import Ledger
    from gpuwarden.ruleengine.model import Rule
    from gpuwarden.ruleengine.rulebooks import RuleBook
    from gpuwarden.ruleengine.verdicts import FleetFacts

log = structlog.get_logger(__name__)

_UNREADABLE = (
    "whether the rule has fallen back to warn cannot be read from the ledger; until it can, the "
    "rule only warns"
)


@dataclass(frozen=True, slots=True)
class Held:
    """A rule that has fallen back to warn.

    Attributes:
        rule_id: the rule.
        reason: `appeals` or `regrets`.
        why: in words.
        since: Unix time.
    """

    rule_id: str
    reason: str
    why: str
    since: float

    @property
    def sentence(self) -> str:
        """For people, with what to do next."""
        return (
            f"the rule has fallen back to warn since {rfc3339(self.since)}: {self.why}. An admin "
            f"lifts it: gpuwarden enforcement resume --rule {self.rule_id} --reason TEXT"
        )


class Trials:
    """The state of every rule's trial.

    Args:
        ledger: where everything is written before it counts.
        rulebook: the rules in force.
        clock: wall time.
    """

    def __init__(self, ledger: Ledger, rulebook: RuleBook, clock: Clock) -> None:
        self._ledger = ledger
        self._rulebook = rulebook
        self._clock = clock
        self._held: Mapping[str, Held] = {}
        self._unreadable = False
        self.refresh()

    @property
    def problem(self) -> str:
        """Why every rule on trial only warns, in words; empty while its state can be read."""
        return _UNREADABLE if self._unreadable else ""

    # -- what holds

    def refresh(self, facts: FleetFacts | None = None) -> None:
        """Read again which rules have fallen back, and see whether another one has to.

        Args:
            facts: of the tick, or None; ends whose run is back on a card are noted by them.
        """
        try:
            if facts is not None:
                self._watch(facts)
            self._read()
            self._review()
        except sqlite3.ProgrammingError:
            raise  # our own mistake, not the file's
        except (sqlite3.DatabaseError, LedgerUnusable) as error:
            self._unreadable = True
            log.exception("trials cannot be read; every rule on trial only warns", error=str(error))

    @property
    def held(self) -> tuple[Held, ...]:
        """Rules that have fallen back, by id."""
        return tuple(self._held[name] for name in sorted(self._held))

    def applied(self, rule: Rule, user: str) -> Rule:
        """The rule as it is for one owner: itself, or the same in `warn`."""
        return canaries.applied(rule, user, self._why(rule))

    def rule_for(self, case: Case) -> Rule | None:
        """The rule of a case as it is for its owner, or None where it is not in force."""
        rule = self._rulebook.rule(case.rule_id)
        return None if rule is None else self.applied(rule, case.user)

    def objections(self, case: Case) -> list[Blocked]:
        """What the trial of a case's rule has against ending its job now."""
        rule = self._rulebook.rule(case.rule_id)
        if rule is None:
            return []
        found = canaries.blocks(rule, case.user, self._why(rule))
        if not found and rule.canary is not None and rule.mode is Mode.ENFORCE:
            found += canaries.share_blocks(rule, **self._counts(rule, case.job_id))
        return found

    def _why(self, rule: Rule) -> Mapping[str, str]:
        if self._unreadable and rule.canary is not None:
            return MappingProxyType({rule.id: _UNREADABLE})
        held = self._held.get(rule.id)
        return MappingProxyType({} if held is None else {rule.id: held.sentence})

    def _counts(self, rule: Rule, job_id: str) -> dict[str, int]:
        """How many jobs a rule has found of late, this one included, and ended of those."""
        if rule.canary is None:
            return {"found": 0, "ended": 0}
        since = self._clock.wall() - rule.canary.back_to_warn.within
        found = self._ledger.rows(
            "SELECT count(*) FROM (SELECT job_id FROM events WHERE rule_id=? AND "
            "kind='detected' AND time >= ? UNION SELECT ?)",
            (rule.id, since, job_id),
        )
        ended = [item for item in self._ledger.ends_since(since) if item.rule_id == rule.id]
        return {"found": int(found[0][0]), "ended": len(ended)}

    # -- what speaks against a rule

    def appeal(
        self, rule: Rule, job_id: str, *, user: str, by: str, role: str, reason: str, source: str
    ) -> bool:
        """An owner objects to what a rule announced or did to a job; once for each job.

        Args:
            rule: that did.
            job_id: the job.
            user: its owner, who is counted once.
            by: who says so.
            role: what lets them.
            reason: why.
            source: `appeal`, or `keep` for an owner who put the end off.

        Returns:
            False where this job's owner has objected already.

        Raises:
            LedgerUnusable: it cannot be written, and so does not count.
        """
        return self._object(
            Objection.APPEAL,
            rule.id,
            job_id,
            subject=user or job_id,
            decision_id=None,
            by=by,
            role=role,
            reason=reason,
            source=source,
        )

    def regret(
        self, rule_id: str, job_id: str, decision_id: str, *, by: str, role: str, reason: str
    ) -> bool:
        """An end was wrong; once for each decision.

        Args:
            rule_id: the rule that ended it.
            job_id: the job.
            decision_id: the decision.
            by: who says so; the engine where the run came back.
            role: what lets them.
            reason: why.

        Returns:
            False where it is regretted already.

        Raises:
            LedgerUnusable: it cannot be written, and so does not count.
        """
        return self._object(
            Objection.REGRET,
            rule_id,
            job_id,
            subject=decision_id,
            decision_id=decision_id,
            by=by,
            role=role,
            reason=reason,
            source="engine" if role == "engine" else "operator",
        )

    def _object(
        self,
        kind: Objection,
        rule_id: str,
        job_id: str,
        *,
        subject: str,
        decision_id: str | None,
        by: str,
        role: str,
        reason: str,
        source: str,
    ) -> bool:
        now = self._clock.wall()
        with self._ledger.transaction() as db:
            cursor = db.execute(
                "INSERT INTO objections (rule_id, kind, job_id, subject, source, by, role, reason, "
                "at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
                (rule_id, kind.value, job_id, subject, source, by, role, reason, now),
            )
            if not cursor.rowcount:
                return False
            detail = {"by": by, "role": role, "reason": reason, "source": source}
            if decision_id is not None:
                detail["decision"] = decision_id
            _note(db, kind.value, rule_id, job_id, time=now, **detail)
        log.warning("objection", kind=kind.value, rule=rule_id, job=job_id, by=by, reason=reason)
        self.refresh()
        return True

    def _watch(self, facts: FleetFacts) -> None:
        """Note every end whose run is back on a card."""
        rules = {r.id for r in self._rulebook.rules.rules if r.canary is not None}
        if not rules:
            return
        now = self._clock.wall()
        rows = self._ledger.rows(
            "SELECT d.id, d.rule_id, d.job_id, d.user, json_extract(c.body, '$.run_id'), "
            "d.finished_at FROM decisions d JOIN cases c ON c.id = d.case_id "
            "WHERE d.finished_at >= ? AND d.state = 'verified' AND d.action = 'terminate' "
            "AND NOT EXISTS (SELECT 1 FROM objections o WHERE o.kind = 'regret' "
            "AND o.subject = d.id)",
            (now - canaries.REGRET_SECONDS,),
        )
        ends = [Ended(*row) for row in rows if row[1] in rules]
        if not ends:
            return
        jobs = [
            Seen(job.job_id, job.user, job.run.run_id)
            for job in facts.jobs.values()
            if job.fresh and job.gpus and job.run is not None and not job.run.conflict
        ]
        for end, successor in canaries.regretted(ends, jobs, now=now):
            self.regret(
                end.rule_id,
                end.job_id,
                end.decision_id,
                by="gpuwarden",
                role="engine",
                reason=f"the run {end.run_id} is back on a card as {successor}",
            )

    # -- falling back, and the admin's word

    def resume(self, rule_id: str, *, by: str, role: str, reason: str) -> bool:
        """Let a rule enforce again; what was objected until now counts no more.

        Returns:
            False where it had not fallen back.

        Raises:
            LedgerUnusable: it cannot be written, and so the rule goes on to warn.
        """
        now = self._clock.wall()
        with self._ledger.transaction() as db:
            cursor = db.execute(
                "UPDATE canary_holds SET lifted_at=?, lifted_by=?, lifted_reason=? "
                "WHERE rule_id=? AND lifted_at IS NULL",
                (now, by, reason, rule_id),
            )
            if not cursor.rowcount:
                return False
            _note(db, "rule_resumed", rule_id, "", time=now, by=by, role=role, reason=reason)
        log.warning("rule enforces again", rule=rule_id, by=by, role=role, reason=reason)
        self.refresh()
        return True

    def _read(self) -> None:
        rows = self._ledger.rows(
            "SELECT rule_id, reason, why, begun_at FROM canary_holds WHERE lifted_at IS NULL"
        )
        self._held = {row[0]: Held(*row) for row in rows}
        self._unreadable = False

    def _review(self) -> None:
        now = self._clock.wall()
        for rule in self._rulebook.rules.rules:
            if rule.canary is None or rule.id in self._held:
                continue
            back = canaries.fallen_back(
                rule, self._objected(rule), now=now, since=self._resumed_at(rule.id)
            )
            if back is None:
                continue
            kind, why = back
            reason = f"{kind.value}s"
            with self._ledger.transaction() as db:
                db.execute(
                    "INSERT INTO canary_holds (rule_id, reason, why, begun_at) VALUES (?, ?, ?, ?)",
                    (rule.id, reason, why, now),
                )
                _note(db, "rule_held_back", rule.id, "", time=now, reason=reason, why=why)
            log.warning("rule falls back to warn", rule=rule.id, reason=reason, why=why)
            self._held = {**self._held, rule.id: Held(rule.id, reason, why, now)}

    def counts(self, rule: Rule) -> Mapping[Objection, int]:
        """How many objections of each kind count against a rule on trial now."""
        if rule.canary is None:
            return {}
        return canaries.tally(
            rule.id,
            rule.canary,
            self._objected(rule),
            now=self._clock.wall(),
            since=self._resumed_at(rule.id),
        )

    def _objected(self, rule: Rule) -> Sequence[Objected]:
        within = 0.0 if rule.canary is None else rule.canary.back_to_warn.within
        rows = self._ledger.rows(
            "SELECT rule_id, kind, subject, at FROM objections WHERE rule_id=? AND at >= ?",
            (rule.id, self._clock.wall() - within),
        )
        return [Objected(name, Objection(kind), who, at) for name, kind, who, at in rows]

    def _resumed_at(self, rule_id: str) -> float:
        rows = self._ledger.rows(
            "SELECT max(lifted_at) FROM canary_holds WHERE rule_id=?", (rule_id,)
        )
        return float(rows[0][0] or 0.0)


def _note(
    db: sqlite3.Connection, kind: str, rule_id: str, job_id: str, *, time: float, **detail: object
) -> None:
    """Write a line of the audit about a rule."""
    db.execute(
        "INSERT INTO events (time, rule_id, job_id, kind, mode, detail) VALUES (?, ?, ?, ?, '', ?)",
        (time, rule_id, job_id, kind, json.dumps(detail, sort_keys=True)),
    )
