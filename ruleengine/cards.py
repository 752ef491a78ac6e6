"""Every card of the fleet, who holds it, and what is wrong with it, as one document."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpuwarden.ruleengine.alertmanager import rfc3339
from gpuwarden.ruleengine.roles import Role

if TYPE_CHECKING:
    from gpuwarden.ruleengine.engine import Engine
    from gpuwarden.ruleengine.roles import Person
    from gpuwarden.ruleengine.verdicts import JobFacts

SCHEMA = "gpuwarden.cards/v1"
_MIG = " MIG "
"""In the name of every instance, as NVML has it."""


@dataclass(frozen=True, slots=True)
class CardFilter:
    """Which cards are listed; an empty string admits all.

    Attributes:
        node: a part of the node's address.
        model: a part of the product's name.
        free: only cards that no job holds and whose node is seen.
    """

    node: str = ""
    model: str = ""
    free: bool = False

    def admits(self, card: dict[str, Any]) -> bool:
        """Whether a row of the document is wanted."""
        return (
            self.node.lower() in card["node"].lower()
            and self.model.lower() in card["name"].lower()
            and (not self.free or (card["fresh"] and not card["holders"]))
        )


def cards_document(
    engine: Engine, person: Person, wanted: CardFilter, *, offset: int = 0, limit: int | None = None
) -> dict[str, Any]:
    """The cards that are asked for, by node and index.

    An owner sees which cards are held, and the jobs on them only where they are theirs.

    Args:
        engine: whose facts they are.
        person: who asks.
        wanted: which of them.
        offset: how many to pass over.
        limit: how many at most, or None for all.
    """
    facts = engine.view.facts
    holders: dict[str, list[JobFacts]] = {}
    for job in () if facts is None else facts.jobs.values():
        for gpu in job.gpus:
            holders.setdefault(gpu.uuid, []).append(job)
    states: dict[str, dict[str, str]] = {}
    if person.role.includes(Role.OPERATOR):
        for stored in engine.cases.all():
            states.setdefault(stored.case.job_id, {})[stored.case.rule_id] = stored.case.state.value
    cards = {} if facts is None else facts.cards
    parts = {_place(card) for card in cards.values() if _MIG in _name(card)}
    rows = [
        _card(card, holders.get(uuid, []), states.get(uuid, {}), person)
        for uuid, card in cards.items()
        # A card that is cut into instances has no jobs of its own, and is not free.
        if _MIG in _name(card) or _place(card) not in parts
    ]
    found = [row for row in rows if wanted.admits(row)]
    found.sort(key=lambda row: (row["node"], row["index"].zfill(4), row["uuid"]))
    end = None if limit is None else offset + limit
    return {
        "schema": SCHEMA,
        "time": None if facts is None else rfc3339(facts.time),
        "all": len(rows),
        "free": sum(1 for row in rows if row["fresh"] and not row["holders"]),
        "total": len(found),
        "offset": offset,
        "cards": found[offset:end],
    }


def _name(card: JobFacts) -> str:
    return card.gpus[0].name if card.gpus else ""


def _place(card: JobFacts) -> tuple[str, str]:
    """Node and index, which a card and its instances have in common."""
    return card.instance, card.gpus[0].index if card.gpus else card.job_id


def _card(
    card: JobFacts, holders: list[JobFacts], cases: dict[str, str], person: Person
) -> dict[str, Any]:
    (gpu,) = card.gpus[:1] or (None,)
    return {
        "uuid": card.job_id,
        "node": card.instance,
        "index": "" if gpu is None else gpu.index,
        "name": "" if gpu is None else gpu.name,
        "memory_total_bytes": None if gpu is None else gpu.memory_total_bytes,
        "throttle": [] if gpu is None else list(gpu.throttle),
        "fresh": card.fresh,
        "holders": len(holders),
        "jobs": [
            {"job_id": job.job_id, "user": job.user, "team": job.team}
            for job in sorted(holders, key=lambda job: job.job_id)
            if person.sees(job.user, job.team)
        ],
        "cases": cases,
    }
