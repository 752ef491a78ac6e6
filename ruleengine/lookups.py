"""Which jobs a word means: a job_id, a run_id, or the beginning of either."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpuwarden.ruleengine.engine import Engine
    from gpuwarden.ruleengine.roles import Person

SCHEMA = "gpuwarden.matches/v1"
MAX_MATCHES = 20
"""More do not help anybody to choose."""


def matches_document(engine: Engine, person: Person, word: str) -> dict[str, Any]:
    """The jobs that a word may mean to a person, running ones first, then the newest.

    A whole job_id or run_id goes before beginnings: while one fits, no other is named. Jobs that
    are not theirs to see are as if they were not there.
    """
    facts, everybody = engine.view.facts, engine.rulebook.directory.users
    users = None
    if not person.sees_all:
        users = {name for name, user in everybody.items() if person.sees(name, user.team)}
        users.add(person.name)
    found: dict[str, str | None] = {
        job.job_id: None if job.run is None else job.run.run_id
        for job in (() if facts is None else facts.jobs.values())
        if person.sees(job.user, job.team)
    }
    running = set(found)
    for job_id, run_id in engine.ledger.jobs_like(word, MAX_MATCHES + 1, users=users):
        found.setdefault(job_id, run_id)
    whole = {job: run for job, run in found.items() if word in (job, run)}
    fitting = whole or {
        job: run
        for job, run in found.items()
        if job.startswith(word) or (run is not None and run.startswith(word))
    }
    rows = [
        {"job_id": job, "run_id": run, "running": job in running} for job, run in fitting.items()
    ]
    return {
        "schema": SCHEMA,
        "whole": bool(whole),
        "matches": rows[:MAX_MATCHES],
        "more": len(rows) > MAX_MATCHES,
    }
