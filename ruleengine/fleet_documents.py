"""The fleet as people watch it: every running job in a row, worst first, a part at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from gpuwarden.ruleengine.alertmanager import rfc3339
from gpuwarden.ruleengine.case_records import CaseState
from gpuwarden.ruleengine.explain import clocks_of
from gpuwarden.ruleengine.fleet_rows import expected_fields, job_fields, verdict_fields
from gpuwarden.ruleengine.forecasts import forecasts
from gpuwarden.ruleengine.profiles import expectation
from gpuwarden.ruleengine.verdicts import Truth

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from gpuwarden.ruleengine.engine import Engine
    from gpuwarden.ruleengine.fleet_figures import Figures
    from gpuwarden.ruleengine.forecasts import Forecast
    from gpuwarden.ruleengine.records import StoredCase
    from gpuwarden.ruleengine.roles import Person
    from gpuwarden.ruleengine.verdicts import JobFacts

SCHEMA = "gpuwarden.fleet/v1"
SORTS: Final = ("verdict", "user", "team", "node", "gpus", "utilization", "memory", "time-left")
"""By what rows can be ordered; the first is the default."""
MAX_ROWS: Final = 500
"""Of one answer."""
DEFAULT_ROWS: Final = 100
_ENDS = frozenset({"yield", "requeue", "terminate"})
_ORDER = {state: 1 + number for number, state in enumerate(CaseState)}


@dataclass(frozen=True, slots=True)
class FleetFilter:
    """Which jobs are shown; an empty string admits all.

    Attributes:
        user: a part of the owner's name, as the reader sees it.
        team: the owner's team.
        node: a part of a node's address.
        rule: a rule that a case is open for.
        broken: only jobs that a case is open for.
    """

    user: str = ""
    team: str = ""
    node: str = ""
    rule: str = ""
    broken: bool = False

    def admits(self, job: JobFacts, user: str, team: str, *, rules: Iterable[str]) -> bool:
        """Whether a job is wanted; user and team are what the reader sees of them."""
        node = self.node.lower()
        return (
            self.user.lower() in user.lower()
            and (not self.team or self.team.lower() == team.lower())
            and any(node in name.lower() for name in job.instances or (job.instance,))
            and (not self.rule or self.rule in rules)
            and (not self.broken or bool(tuple(rules)))
        )


@dataclass(frozen=True, slots=True)
class FleetPart:
    """Which rows of the picture are asked for.

    Attributes:
        sort: one of `SORTS`; what is not known comes last.
        reverse: the other way round.
        offset: rows to pass over.
        limit: rows at most.
    """

    sort: str = SORTS[0]
    reverse: bool = False
    offset: int = 0
    limit: int = DEFAULT_ROWS


@dataclass(frozen=True, slots=True)
class _Row:
    """A job and what its place among the others depends on."""

    job: JobFacts
    user: str
    team: str
    cases: Sequence[StoredCase]


def watched_document(
    engine: Engine,
    person: Person,
    figures: Figures,
    *,
    wanted: FleetFilter,
    part: FleetPart,
    shown: Callable[[str], str],
    shown_team: Callable[[str, str], str],
) -> dict[str, Any]:
    """The part of the fleet that a person may see and asks for.

    Args:
        engine: whose jobs they are.
        person: who asks.
        figures: what the jobs measure.
        wanted: which jobs.
        part: which of them, in which order.
        shown: what the person reads in the place of a user's name. The filter and the order are
            of that: they must not tell who it is.
        shown_team: likewise of (user, team).
    """
    facts, now = engine.view.facts, engine.clock.wall()
    cases: dict[str, list[StoredCase]] = {}
    for stored in engine.cases.all():
        cases.setdefault(stored.case.job_id, []).append(stored)
    rows = []
    for job in () if facts is None else facts.jobs.values():
        if not person.sees(job.user, job.team):
            continue
        open_ = sorted(cases.get(job.job_id, ()), key=_urgency, reverse=True)
        user, team = shown(job.user), shown_team(job.user, job.team)
        if wanted.admits(job, user, team, rules=[item.case.rule_id for item in open_]):
            rows.append(_Row(job, user, team, open_))
    _order(rows, part, figures)
    page = rows[part.offset : part.offset + part.limit]
    held = {gpu.uuid for job in facts.jobs.values() for gpu in job.gpus} if facts else set()
    return {
        "schema": SCHEMA,
        "time": None if facts is None else rfc3339(facts.time),
        "age": None if facts is None else round(max(0.0, now - facts.time), 3),
        "tick": engine.settings.tick,
        "figures_at": None if figures.time is None else rfc3339(figures.time),
        "problem": figures.problem,
        "nodes": {"expected": facts.expected_nodes, "lit": facts.lit_nodes} if facts else None,
        "cards": 0 if facts is None else len(facts.cards),
        "held": len(held),
        "halted": [
            {"reason": block.reason, "sentence": block.sentence} for block in engine.view.halted
        ],
        "sort": part.sort,
        "total": len(rows),
        "broken": sum(1 for row in rows if row.cases),
        "offset": part.offset,
        "jobs": [_job(engine, row, figures, now) for row in page],
    }


def _urgency(stored: StoredCase) -> tuple[int, float]:
    return _ORDER[stored.case.state], stored.case.elapsed


def _order(rows: list[_Row], part: FleetPart, figures: Figures) -> None:
    """Sort in place: the worst, the fullest or the longest first; names by the alphabet."""

    def name(text: str) -> tuple[bool, str]:
        return (not text, text.lower())

    def most(value: float | None) -> tuple[bool, float]:
        return (value is None, 0.0 if value is None else -value)

    def least(value: float | None) -> tuple[bool, float]:
        return (value is None, 0.0 if value is None else value)

    key: dict[str, Callable[[_Row], object]] = {
        "verdict": lambda row: tuple(-part for part in _urgency(row.cases[0])) if row.cases else (),
        "user": lambda row: name(row.user),
        "team": lambda row: name(row.team),
        "node": lambda row: name(row.job.instance),
        "gpus": lambda row: -len(row.job.gpus),
        "utilization": lambda row: least(figures.of("utilization", row.job.job_id)),
        "memory": lambda row: most(figures.of("memory", row.job.job_id)),
        "time-left": lambda row: least(figures.of("time_left", row.job.job_id)),
    }
    chosen = key[part.sort]

    def whole(row: _Row) -> Any:
        first = chosen(row)
        if part.sort == "verdict":
            first = (not row.cases, first)
        return (first, row.user.lower(), row.job.job_id)

    rows.sort(key=whole, reverse=part.reverse)


def _job(engine: Engine, row: _Row, figures: Figures, now: float) -> dict[str, Any]:
    job, run = row.job, row.job.run
    epochs = {name: figures.of(name, job.job_id) for name in ("epoch", "epochs", "time_left")}
    return {
        **job_fields(job, user=row.user, team=row.team),
        **(dict.fromkeys(epochs) if run is None or run.conflict else epochs),
        "utilization": _figure(figures, "utilization", job),
        "memory_bytes": _figure(figures, "memory", job),
        "throughput": max(_told(job, "throughput"), default=None),
        **expected_fields(expectation(job, engine.rulebook.rules.profiles)),
        "verdict": _verdict(engine, row, now),
    }


def _figure(figures: Figures, figure: str, job: JobFacts) -> float | None:
    """A job's utilisation or memory; where nothing was measured just now, what the rules know."""
    if not figures.problem:
        return figures.of(figure, job.job_id)
    told = _told(job, f"gpu_{figure}")
    if figure == "memory" or not told:
        return max(told, default=None)
    return sum(told) / len(told)


def _told(job: JobFacts, signal: str) -> tuple[float, ...]:
    """A signal's means as the last tick had them, one for each card; of windows the shortest."""
    keys = [key for key in job.values if key.signal == signal and key.agg == "avg"]
    shortest = min(keys, key=lambda key: key.window_seconds, default=None)
    return () if shortest is None else tuple(job.values[shortest].values())


def _verdict(engine: Engine, row: _Row, now: float) -> dict[str, Any]:
    job, view = row.job, engine.view
    rules = {rule.id: rule for rule in engine.rulebook.rules.rules}
    protected, unknown = "", []
    for name in rules:
        verdict = view.verdicts.get((name, job.job_id))
        if verdict is None:
            continue
        protected = protected or verdict.protected
        if verdict.truth is Truth.UNKNOWN:
            unknown.append(name)
    plain = "protected" if protected else "unknown" if unknown or not job.fresh else "ok"
    others = max(0, len(row.cases) - 1)
    found = verdict_fields(plain, protected=protected, unknown=unknown, others=others)
    if not row.cases:
        return found
    case = row.cases[0].case
    found |= {"state": case.state.value, "rule": case.rule_id, "level": case.level}
    found["held"] = [
        {"reason": block.reason, "sentence": block.sentence}
        for block in view.blocks.get((case.rule_id, case.job_id), ())
    ]
    kept = engine.kept_until(case)
    if kept is not None and kept > now:
        found["kept_until"] = rfc3339(kept)
    rule = rules.get(case.rule_id)
    if rule is not None:
        rule = engine.trials.applied(rule, case.user)
        counted = clocks_of(engine)
        coming = forecasts(case, rule, now=counted, kept_until=kept)
        ending = [item for item in coming if item.kind in _ENDS]
        found |= {
            "mode": rule.mode.value,
            "next": _first(coming, counted, now),
            "end": _first(ending, counted, now),
        }
    return found


def _first(coming: Sequence[Forecast], counted: float, now: float) -> dict[str, Any] | None:
    return coming[0].document(counted, read_at=now) if coming else None
