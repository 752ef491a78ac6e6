"""Who uses what: the cards that each user's jobs hold, for everybody who shares them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpuwarden.ruleengine.alertmanager import rfc3339

if TYPE_CHECKING:
    from gpuwarden.ruleengine.engine import Engine
    from gpuwarden.ruleengine.names import Names
    from gpuwarden.ruleengine.roles import Person
    from gpuwarden.ruleengine.verdicts import JobFacts

SCHEMA = "gpuwarden.shares/v1"


def shares_document(engine: Engine, person: Person, names: Names) -> dict[str, Any]:
    """Each user's cards and jobs, most cards first; names only where this person may read them.

    A card that several jobs hold counts for each of its users. Which jobs these are, and whether
    they break a rule, is their owners' affair.

    Args:
        engine: whose facts they are.
        person: who asks.
        names: tells whose names they read.
    """
    facts = engine.view.facts
    held: dict[str, list[JobFacts]] = {}
    for job in () if facts is None else facts.jobs.values():
        held.setdefault(job.user, []).append(job)
    rows = [_row(person, names, user, jobs) for user, jobs in held.items()]
    rows.sort(key=lambda row: (-row["cards"], row["user"]))
    cards = () if facts is None else facts.cards.values()
    taken = {gpu.uuid for jobs in held.values() for job in jobs for gpu in job.gpus}
    return {
        "schema": SCHEMA,
        "time": None if facts is None else rfc3339(facts.time),
        "cards": len(cards),
        "free": sum(1 for card in cards if card.fresh and card.job_id not in taken),
        "users": rows,
    }


def _row(person: Person, names: Names, user: str, jobs: list[JobFacts]) -> dict[str, Any]:
    cards = {gpu.uuid: gpu.name for job in jobs for gpu in job.gpus}
    models: dict[str, int] = {}
    for name in cards.values():
        models[name or "not known"] = models.get(name or "not known", 0) + 1
    team = next((job.team for job in jobs if job.team), "")
    return {
        "user": names.shown(person, user) if user else "",
        "team": names.shown_team(person, user, team),
        "yours": bool(user) and user == person.name,
        "jobs": len(jobs),
        "cards": len(cards),
        "models": dict(sorted(models.items())),
    }
