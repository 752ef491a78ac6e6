"""Following drills in a running engine: each is in the ledger, with every step and how it ended."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import structlog

from gpuwarden.errors import RefusedAction
from gpuwarden.refusals import Refusal
from gpuwarden.ruleengine import drills
from gpuwarden.ruleengine.alertmanager import rfc3339
from gpuwarden.ruleengine.cases import GONE_AFTER_SECONDS
from gpuwarden.ruleengine.drills import Result, Step
from gpuwarden.ruleengine.model import TerminateLimits
from gpuwarden.ruleengine.reclaim.node import host_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpuwarden.clock import Clock
    from gpuwarden.ruleengine.drill_settings import DrillSettings
    from gpuwarden.ruleengine.ledger import Ledger
    from gpuwarden.ruleengine.rulebooks import RuleBook
    from gpuwarden.ruleengine.verdicts import FleetFacts, JobFacts

DRILLS_SCHEMA = "gpuwarden.drills/v1"
_STARTED_LATELY_SECONDS = 3600.0
"""A victim that started longer ago was not seen because the engine was down."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Drill:
    """One drill, as the ledger has it. Times are Unix seconds.

    Attributes:
        id: its number.
        node: host of the node.
        job_id, run_id: of the victim; empty until it is seen.
        by, reason: who asked for it and why; empty where a victim just came.
        begun_at: the victim's start, or the request.
        seen_at: the first tick that saw the victim, or None.
        finished_at, result: how it ended, or None.
        steps: of a finished drill, as they were.
    """

    id: int
    node: str
    job_id: str
    run_id: str
    by: str
    reason: str
    begun_at: float
    seen_at: float | None
    finished_at: float | None
    result: Result | None
    steps: tuple[Step, ...]


class DrillDesk:
    """The drills of one engine.

    Args:
        settings: of engine.yaml, or None: there are none.
        ledger: where they are written.
        rulebook: the rules in force.
        clock: wall time.
        keep: seconds for which finished drills are remembered.
    """

    def __init__(
        self,
        settings: DrillSettings | None,
        ledger: Ledger,
        rulebook: RuleBook,
        *,
        clock: Clock,
        keep: float,
    ) -> None:
        self.settings = settings
        self._ledger = ledger
        self._rulebook = rulebook
        self._clock = clock
        self._keep = keep
        self._missing: dict[int, float] = {}
        if settings is not None:
            self._expect(settings)

    def _expect(self, settings: DrillSettings) -> None:
        now = self._clock.wall()
        # Drills are written down by host: a target that is named with its port is the same node.
        expected = {_host(node) for node in settings.nodes}
        with self._ledger.transaction() as db:
            known = {name for (name,) in db.execute("SELECT node FROM drill_nodes")}
            for node in known - expected:
                db.execute("DELETE FROM drill_nodes WHERE node=?", (node,))
            for node in expected - known:
                db.execute("INSERT INTO drill_nodes VALUES (?, ?)", (node, now))

    # -- what else in the engine asks

    @property
    def rule_id(self) -> str:
        """The rule whose ends are drills, and are counted as nothing else; empty without drills."""
        return "" if self.settings is None else self.settings.rule

    @property
    def problem(self) -> str:
        """Why no drill can be ended now, in words; empty if one can, or none is meant to be."""
        if self.settings is None:
            return ""
        rule = self._rulebook.rule(self.settings.rule)
        return drills.rule_problem(rule, self.settings)

    def apart(self, rule_id: str) -> bool:
        """Whether a rule's ends are limited apart from all others, since it strikes only drills."""
        return bool(rule_id) and rule_id == self.rule_id and not self.problem

    @property
    def limits(self) -> TerminateLimits:
        """How many drills may be ended."""
        if self.settings is None:
            return _limits(0, 0)
        return _limits(self.settings.per_hour, self.settings.per_day)

    # -- asking for one

    def request(self, node: str, *, by: str, reason: str, facts: FleetFacts | None) -> Drill:
        """Expect a victim on a node from now on.

        Args:
            node: host, with or without its port.
            by: who asks.
            reason: why.
            facts: of the last tick.

        Raises:
            Refusal: the reason is a word, the text says what to do.
        """
        if self.settings is None:
            raise Refusal(409, "no_drills", "engine.yaml has no drill: see docs/operations.md")
        if self.problem:
            raise Refusal(409, "drill_rule", self.problem)
        if facts is None:
            text = "the engine has not seen the fleet yet: ask again after its first tick"
            raise Refusal(409, "no_facts", text)
        host = _host(node)
        known = {*facts.expected_names, *facts.lit_names}
        if host not in {_host(name) for name in known}:
            raise Refusal(404, "unknown_node", f"no node {node} is scraped; see GET /v1/nodes")
        if any(drill.node == host for drill in self._open()):
            raise Refusal(409, "drill_runs", f"a drill on {host} is going on; see GET /v1/drills")
        now = self._clock.wall()
        with self._ledger.transaction() as db:
            cursor = db.execute(
                "INSERT INTO drills (node, by, reason, begun_at) VALUES (?, ?, ?, ?)",
                (host, by, reason, now),
            )
        log.info("drill asked for", node=host, by=by, reason=reason)
        found = self.drill(int(cursor.lastrowid or 0))
        if found is None:
            raise RuntimeError("a drill that was written is not there")
        return found

    # -- following

    def watch(self, facts: FleetFacts) -> None:
        """Take up new victims, and see how far each drill has come."""
        settings = self.settings
        if settings is None:
            return
        now = self._clock.wall()
        for job in facts.jobs.values():
            if job.fresh and drills.is_drill(job, settings):
                self._seen(job, now)
        for drill in self._open():
            self._follow(drill, settings, facts, now)

    def _seen(self, job: JobFacts, now: float) -> None:
        if self._ledger.rows("SELECT 1 FROM drills WHERE job_id=?", (job.job_id,)):
            return
        host = _host(job.instance)
        run_id = "" if job.run is None else job.run.run_id
        asked = next((d for d in self._open() if d.node == host and not d.job_id), None)
        started = job.start_time
        lately = started is not None and 0 <= now - started <= _STARTED_LATELY_SECONDS
        with self._ledger.transaction() as db:
            if asked is not None:
                db.execute(
                    "UPDATE drills SET job_id=?, run_id=?, seen_at=? WHERE id=?",
                    (job.job_id, run_id, now, asked.id),
                )
            else:
                begun = started if started is not None and lately else now
                db.execute(
                    "INSERT INTO drills (node, job_id, run_id, begun_at, seen_at) "
                    "VALUES (?, ?, ?, ?, ?)",
                    (host, job.job_id, run_id, begun, now),
                )
        log.info("drill seen", node=host, job=job.job_id, run_id=run_id)

    def _follow(self, drill: Drill, settings: DrillSettings, facts: FleetFacts, now: float) -> None:
        found = self.steps(drill)
        mine = [
            item
            for item in self._ledger.job_decisions(drill.job_id)
            if item.rule_id == settings.rule
        ]
        result = drills.outcome(
            found,
            decision=mine[-1].state if mine else None,
            there=not drill.job_id or self._there(drill, facts, now),
            asked=not drill.job_id,
            begun=drill.begun_at,
            now=now,
            budgets=settings.budgets,
        )
        if result is None:
            return
        self._missing.pop(drill.id, None)
        end = found[-1].ended if result.proven else None
        finished = now if end is None else end
        why = drills.sentence(drill.node, result, found)
        detail = {"drill": drill.id, "result": result.value, "why": why, "run_id": drill.run_id}
        with self._ledger.transaction() as db:
            db.execute(
                "UPDATE drills SET finished_at=?, result=?, steps=? WHERE id=?",
                (finished, result.value, json.dumps([_record(s) for s in found]), drill.id),
            )
            db.execute(
                "INSERT INTO events (time, rule_id, job_id, kind, mode, detail) "
                "VALUES (?, ?, ?, 'drill', '', ?)",
                (now, settings.rule, drill.job_id, json.dumps(detail, sort_keys=True)),
            )
            db.execute("DELETE FROM drills WHERE finished_at < ?", (now - self._keep,))
        tell = log.info if result is Result.PASSED else log.warning
        tell("drill", node=drill.node, result=result.value, why=why)

    def _there(self, drill: Drill, facts: FleetFacts, now: float) -> bool:
        """Whether the victim is there; of a node that is not lit nothing is known."""
        lit = {_host(name) for name in facts.lit_names}
        if drill.job_id in facts.jobs or drill.node not in lit:
            self._missing.pop(drill.id, None)
            return True
        since = self._missing.setdefault(drill.id, now)
        return now - since < GONE_AFTER_SECONDS

    def steps(self, drill: Drill) -> tuple[Step, ...]:
        """How far a drill has come."""
        if drill.finished_at is not None or self.settings is None:
            return drill.steps
        events = self._ledger.events(drill.job_id) if drill.job_id else []
        return drills.steps(
            drill.begun_at,
            drill.seen_at,
            drills.marks(events, self.settings.rule),
            budgets=self.settings.budgets,
            now=self._clock.wall(),
        )

    # -- reading

    def drill(self, number: int) -> Drill | None:
        """One drill, or None."""
        found = self._drills("SELECT * FROM drills WHERE id=?", number)
        return found[0] if found else None

    def last(self) -> list[Drill]:
        """The newest drill of each node, by name."""
        return self._drills(
            "SELECT * FROM drills WHERE id IN (SELECT max(id) FROM drills GROUP BY node) "
            "ORDER BY node"
        )

    def _open(self) -> list[Drill]:
        return self._drills("SELECT * FROM drills WHERE finished_at IS NULL ORDER BY id")

    def _drills(self, query: str, *values: int) -> list[Drill]:
        return [_drill(row) for row in self._ledger.rows(query, values)]

    def successes(self) -> dict[str, float]:
        """Node -> when a drill was last proven there (Unix time)."""
        rows = self._ledger.rows(
            "SELECT node, max(finished_at) FROM drills WHERE result IN ('passed', 'slow') "
            "GROUP BY node ORDER BY node"
        )
        return {node: float(at) for node, at in rows}

    def due(self) -> dict[str, float]:
        """Node on the schedule -> by when the next drill must have been proven (Unix time)."""
        if self.settings is None or self.settings.every is None:
            return {}
        done, every = self.successes(), self.settings.every
        rows = self._ledger.rows("SELECT node, since FROM drill_nodes ORDER BY node")
        return {node: max(float(since), done.get(node, 0.0)) + every for node, since in rows}

    def rows(self) -> Iterator[tuple[str, list[tuple[tuple[str, ...], float]]]]:
        """Families of the engine's page of metrics, and their rows."""
        settings = self.settings
        if settings is None:
            return
        yield (
            "gpuwarden_drill_last_success_timestamp_seconds",
            [((node,), at) for node, at in self.successes().items()],
        )
        yield (
            "gpuwarden_drill_due_timestamp_seconds",
            [((node,), at) for node, at in self.due().items()],
        )
        newest = self.last()
        yield (
            "gpuwarden_drill_step_seconds",
            [((d.node, step.name), step.seconds) for d in newest for step in self.steps(d)],
        )
        yield (
            "gpuwarden_drill_step_budget_seconds",
            [((name,), float(getattr(settings.budgets, name))) for name in drills.STEPS],
        )
        yield (
            "gpuwarden_drill_result",
            [((d.node, d.result.value), 1.0) for d in newest if d.result is not None],
        )

    def document(self) -> dict[str, Any]:
        """How drills stand, for pages and the API."""
        due, done = self.due(), self.successes()
        newest = {drill.node: drill for drill in self.last()}
        now = self._clock.wall()
        return {
            "schema": DRILLS_SCHEMA,
            "configured": self.settings is not None,
            "problem": self.problem,
            "every": None if self.settings is None else self.settings.every,
            "nodes": [
                {
                    "node": node,
                    "last_success": None if node not in done else rfc3339(done[node]),
                    "due": None if node not in due else rfc3339(due[node]),
                    "overdue": node in due and now > due[node],
                    "last": None if node not in newest else self.record(newest[node]),
                }
                for node in sorted({*due, *newest})
            ],
        }

    def record(self, drill: Drill) -> dict[str, Any]:
        """One drill, for pages and the API."""
        found = self.steps(drill)
        budgets = None if self.settings is None else self.settings.budgets
        return {
            "id": drill.id,
            "node": drill.node,
            "job_id": drill.job_id,
            "run_id": drill.run_id,
            "by": drill.by,
            "reason": drill.reason,
            "begun_at": rfc3339(drill.begun_at),
            "finished_at": None if drill.finished_at is None else rfc3339(drill.finished_at),
            "result": None if drill.result is None else drill.result.value,
            "sentence": ""
            if drill.result is None
            else drills.sentence(drill.node, drill.result, found),
            "longest": None if budgets is None else drills.longest(budgets),
            "steps": [
                {
                    "step": step.name,
                    "ended": step.ended is not None,
                    "seconds": round(step.seconds, 3),
                    "budget": step.budget,
                    "slow": step.slow,
                }
                for step in found
            ],
        }


def _drill(row: tuple[Any, ...]) -> Drill:
    # The record's fields are the table's columns, in their order.
    values = dict(zip((item.name for item in fields(Drill)), row, strict=True))
    values["result"] = None if values["result"] is None else Result(values["result"])
    values["steps"] = tuple(Step(**item) for item in json.loads(values["steps"]))
    return Drill(**values)


def _record(step: Step) -> dict[str, object]:
    return {
        "name": step.name,
        "begun": step.begun,
        "ended": step.ended,
        "seconds": step.seconds,
        "budget": step.budget,
    }


def _limits(per_hour: int, per_day: int) -> TerminateLimits:
    # One user runs all drills, so that a share of the owners says nothing about them.
    return TerminateLimits.model_construct(
        per_tick=1,
        per_hour=per_hour,
        per_user_per_day=per_day,
        halt_above_share_of_running=1.0,
    )


def _host(node: str) -> str:
    try:
        return host_of(node)
    except RefusedAction:
        return node
