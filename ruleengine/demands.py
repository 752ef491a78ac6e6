"""Who waits for cards, and whether a job's end would serve one of them.

Pure, and the same for every platform: an adapter says who waits, what is idle, and what its jobs
hold. The questions are asked in the order in which the platform serves who waits. A job behind one
that wants the same cards is not counted on them, since a platform that backfills may start it and
may not; and nobody is ended for a job that needs more than one end would free.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from gpuwarden.ruleengine.verdicts import Truth

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from gpuwarden.ruleengine.verdicts import JobFacts

UNNAMED = ""
"""The model of a card of which the platform does not tell one."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What a waiting job asks for.

    Attributes:
        cards: in all.
        per_node: at least on each of its nodes.
        unit: they are of use on a node only in multiples of this.
        nodes: at least on so many.
        max_nodes: on at most so many, or None.
        model: of its cards, by the platform's word; empty for any.
        cpus: in all; a fraction of one is no mistake.
        memory: bytes in all.
        whole: whether it shares its nodes with nobody.
    """

    cards: int
    per_node: int = 1
    unit: int = 1
    nodes: int = 1
    max_nodes: int | None = None
    model: str = UNNAMED
    cpus: float = 0.0
    memory: float = 0.0
    whole: bool = False


@dataclass(frozen=True, slots=True)
class WaitingJob:
    """A job that would start if there were room for it; one that waits for else is none.

    Attributes:
        name: as its owner calls it, in the platform's words.
        needs: what it asks for.
        candidates: nodes on which the platform would start it if there were room.
        places: queues it is in (Slurm's partitions), of which a rule may name one.
        unknown: what of its request could not be made out, in words, or empty.
    """

    name: str
    needs: Needs
    candidates: frozenset[str] = frozenset()
    places: frozenset[str] = frozenset()
    unknown: str = ""


@dataclass(frozen=True, slots=True)
class Room:
    """What is idle on one node.

    Attributes:
        cards: model -> how many are idle; with all models that the node has.
        cpus, memory: idle ones; memory in bytes.
        taken: cores that jobs have there; infinite where that is not known.
    """

    cards: Mapping[str, int]
    cpus: float = math.inf
    memory: float = math.inf
    taken: float = math.inf


@dataclass(frozen=True, slots=True)
class Share:
    """What a running job holds on one node.

    Attributes:
        node: by the platform's name.
        cards: None where the platform does not tell; then as the node's exporter counts them.
        cpus, memory: that are given back with them; 0 where it is not told.
    """

    node: str
    cards: int | None = None
    cpus: float = 0.0
    memory: float = 0.0


@dataclass(frozen=True, slots=True)
class Demand:
    """What a platform's queue and nodes are at one moment.

    Attributes:
        platform: its name for people, such as Slurm.
        prefix: how the job ids of its attempts begin.
        waiting: first in line first.
        rooms: node -> what is idle; only nodes on which a job could start.
        holdings: job_id of an attempt -> what it holds.
        hosts: host, as Prometheus' targets name it -> node, where that is another word.
    """

    platform: str
    prefix: str
    waiting: Sequence[WaitingJob] = ()
    rooms: Mapping[str, Room] = field(default_factory=lambda: MappingProxyType({}))
    holdings: Mapping[str, Sequence[Share]] = field(default_factory=lambda: MappingProxyType({}))
    hosts: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def count(self, place: str = "") -> int:
        """How many wait, in one queue or in all."""
        return sum(1 for job in self.waiting if not place or place in job.places)


@dataclass(frozen=True, slots=True)
class Freed:
    """What the end of a job would give back on one node."""

    node: str
    cards: int
    cpus: float = 0.0
    memory: float = 0.0


@dataclass(frozen=True, slots=True)
class Service:
    """Whether the end of a job would serve somebody.

    Attributes:
        truth: only YES may act.
        why: in one sentence.
        job: who would be served, or empty.
    """

    truth: Truth
    why: str
    job: str = ""


def service(demand: Demand, job: JobFacts, place: str = "") -> Service:
    """Whether a job's end would let somebody start who waits.

    Args:
        demand: of the platform that the rule asks.
        job: the job, whole on all its nodes.
        place: the queue that the rule names, or empty.
    """
    if not job.job_id.startswith(demand.prefix):
        text = f"the job is none of {demand.platform}'s, which so does not count its cards as taken"
        return Service(Truth.NO, text)
    freed = freed_by(demand, job)
    if isinstance(freed, str):
        return Service(Truth.UNKNOWN, freed)
    return serves(freed, demand.rooms, demand.waiting, place=place)


def freed_by(demand: Demand, job: JobFacts) -> tuple[Freed, ...] | str:
    """What a job's end would give back, or why that is not known."""
    shares = demand.holdings.get(job.job_id)
    if not shares:
        return f"{demand.platform} does not say what {job.job_id} holds"
    seen = Counter(_node(demand, gpu.instance) for gpu in job.gpus)
    if len(shares) == 1:
        seen = Counter({shares[0].node: len(job.gpus)})
    found = []
    for share in shares:
        cards = seen.get(share.node) if share.cards is None else share.cards
        if cards is None:
            return f"how many cards the job holds on {share.node} is not known"
        found.append(Freed(share.node, cards, share.cpus, share.memory))
    return tuple(found)


def _node(demand: Demand, instance: str) -> str:
    host = instance.rpartition(":")[0] or instance
    return demand.hosts.get(host, host)


def serves(
    freed: Sequence[Freed],
    rooms: Mapping[str, Room],
    waiting: Iterable[WaitingJob],
    *,
    place: str = "",
) -> Service:
    """Whether what is freed, with what is idle beside it, serves who is first in line for it.

    Args:
        freed: by the end of one job.
        rooms: what is idle now, by node.
        waiting: first in line first.
        place: the queue whose jobs are meant, or empty for any.
    """
    given = {item.node: item for item in freed if item.cards > 0}
    if not given:
        return Service(Truth.NO, "the job's end frees no card")
    after = {node: _with(room, given.get(node)) for node, room in rooms.items()}
    for job in waiting:
        wanted = [node for node in given if _wants(job, node, rooms)]
        if not wanted:
            continue
        if job.unknown:
            text = f"{job.name} is first in line for these cards, and {job.unknown}"
            return Service(Truth.UNKNOWN, text)
        if any(_unclear(job.needs, rooms[node]) for node in wanted):
            text = f"which of the cards on {', '.join(wanted)} become idle is not known"
            return Service(Truth.UNKNOWN, text)
        return _judged(job, rooms, after, place=place)
    return Service(Truth.NO, "nobody who waits could use the cards that the job's end frees")


def _judged(
    job: WaitingJob, rooms: Mapping[str, Room], after: Mapping[str, Room], *, place: str
) -> Service:
    """What follows for the first in line."""
    needs = job.needs
    if fits(needs, [rooms[node] for node in job.candidates & rooms.keys()]):
        text = f"{job.name}, first in line, fits on what is idle already: it needs nobody's end"
        return Service(Truth.NO, text)
    if not fits(needs, [after[node] for node in job.candidates & after.keys()]):
        asked = _asked(needs)
        text = f"{job.name}, first in line for these cards, needs {asked}: they are not enough"
        return Service(Truth.NO, text)
    if place and place not in job.places:
        text = f"{job.name}, first in line for these cards, is not in {place}"
        return Service(Truth.NO, text)
    return Service(Truth.YES, f"{job.name} waits for {_asked(needs)} and could start", job.name)


def _asked(needs: Needs) -> str:
    model = f" {needs.model}" if needs.model else ""
    nodes = f" on {needs.nodes} nodes" if needs.nodes > 1 else ""
    also = "" if needs.max_nodes is None or needs.max_nodes > 1 else " on one node"
    also = " on a node of its own" if needs.whole and needs.nodes == 1 else also
    return f"{needs.cards}{model} card{'s' if needs.cards > 1 else ''}{nodes or also}"


def _wants(job: WaitingJob, node: str, rooms: Mapping[str, Room]) -> bool:
    """Whether the job would take a node's cards."""
    room = rooms.get(node)
    if room is None or node not in job.candidates:
        return False
    return not job.needs.model or job.needs.model in room.cards


def _unclear(needs: Needs, room: Room) -> bool:
    """Whether the freed cards may be of the wrong model."""
    return bool(needs.model) and len(room.cards) > 1


def _with(room: Room, freed: Freed | None) -> Room:
    if freed is None:
        return room
    models = list(room.cards)
    # With several models which one is freed is not known; asked for by model it is not judged.
    model = models[0] if len(models) == 1 else UNNAMED
    cards = dict(room.cards)
    cards[model] = cards.get(model, 0) + freed.cards
    return Room(
        cards,
        cpus=room.cpus + freed.cpus,
        memory=room.memory + freed.memory,
        taken=max(0.0, room.taken - freed.cpus),
    )


def fits(needs: Needs, rooms: Sequence[Room]) -> bool:
    """Whether a whole request fits on what is idle on the nodes that it may use.

    Counts what must be there; a platform may still refuse for the way in which cards, cores and
    memory hang together.
    """
    most = len(rooms) if needs.max_nodes is None else min(needs.max_nodes, len(rooms))
    if not rooms or most < max(1, needs.nodes):
        return False
    # On as many nodes as it may use every part is at its smallest.
    cpus, memory = needs.cpus / most, needs.memory / most
    least = max(1, needs.per_node)

    def idle(room: Room) -> int:
        cards = room.cards.get(needs.model, 0) if needs.model else sum(room.cards.values())
        return cards - cards % needs.unit

    usable = [
        room
        for room in rooms
        if idle(room) >= least
        and room.cpus >= min(1.0, needs.cpus)
        and room.memory > 0
        and not (needs.whole and room.taken)
    ]
    if needs.max_nodes == needs.nodes:
        usable = [room for room in usable if room.cpus >= cpus and room.memory >= memory]
    chosen = sorted(usable, key=idle, reverse=True)[:most]
    return (
        len(chosen) >= needs.nodes
        and sum(map(idle, chosen)) >= needs.cards
        and sum(room.cpus for room in chosen) >= needs.cpus
        and sum(room.memory for room in chosen) >= needs.memory
    )
