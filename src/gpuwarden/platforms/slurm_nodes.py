"""What is idle on Slurm's nodes, and whose turn comes first, by `scontrol show`.

What administrators wrote (a comment, why a node is drained) comes last on a line and is not read;
of what is named twice the first counts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_FIELD = re.compile(r"(?:^|\s)(?P<key>[A-Za-z]\w*)=(?P<value>\S*)")
_GRES = re.compile(
    r"(?P<name>[A-Za-z0-9_]+)(?::(?P<model>[A-Za-z_][A-Za-z0-9_.-]*))?:(?P<count>[0-9]{1,6})"
    r"(?:\([^)]*\))?"
)
_USABLE: Final = frozenset({"IDLE", "MIXED", "ALLOCATED", "CLOUD", "DYNAMIC_NORM", "PLANNED"})
"""States in which a job could start; with a word that is not here it is not known whether."""
_LOST: Final = frozenset({"DOWN", "NOT_RESPONDING", "NO_RESPOND"})
_SHARED_CARDS: Final = frozenset({"mps", "shard"})
_MEBI = 2**20


@dataclass(frozen=True, slots=True)
class SlurmNode:
    """A node and what is idle on it.

    Attributes:
        name: Slurm's.
        hosts: what else it is called: its host's name, its address.
        partitions, features: that it is in, that it has.
        lost: whether the controller cannot reach it, so that what it was told there is not known.
        usable: whether a job could start there now, were there room.
        idle: model of its cards (empty where they have none) -> how many are idle.
        cpus, memory: idle ones; memory in bytes.
        taken: cores that jobs have.
        cards: model -> how many it has, idle or not.
        cores: that it has.
    """

    name: str
    hosts: frozenset[str] = frozenset()
    partitions: frozenset[str] = frozenset()
    features: frozenset[str] = frozenset()
    lost: bool = False
    usable: bool = False
    idle: Mapping[str, int] = field(default_factory=dict)
    cpus: float = 0.0
    memory: float = 0.0
    taken: float = 0.0
    cards: Mapping[str, int] = field(default_factory=dict)
    cores: int = 0


def decode_nodes(text: str) -> tuple[SlurmNode, ...]:
    """The nodes of an answer; one of which too little is told is there, and not usable."""
    return tuple(_node(values) for values in _lines(text) if "NodeName" in values)


def decode_tiers(text: str) -> dict[str, int]:
    """Partition -> its tier, of `scontrol show partition --oneliner`.

    Whatever its priority, a job of a higher tier is served before all of lower ones.
    """
    return {
        values["PartitionName"]: _number(values.get("PriorityTier")) or 0
        for values in _lines(text)
        if "PartitionName" in values
    }


def _lines(text: str) -> Iterator[dict[str, str]]:
    for line in text.split("\n"):
        values: dict[str, str] = {}
        for match in _FIELD.finditer(line):
            values.setdefault(match["key"], match["value"])
        yield values


def _node(values: Mapping[str, str]) -> SlurmNode:
    have, used = _gres(values.get("Gres", "")), _gres(values.get("GresUsed", ""))
    cpus = _number(values.get("CPUEfctv") or values.get("CPUTot"))
    busy, memory, taken = (
        _number(values.get(name)) for name in ("CPUAlloc", "RealMemory", "AllocMem")
    )
    told = None not in (have, used, cpus, busy, memory, taken)
    have, used = have or {}, used or {}
    shared = any(used.get((name, model), 0) for name, model in used if name in _SHARED_CARDS)
    states = frozenset(re.findall(r"[A-Z_]+", values.get("State", "").upper()))
    return SlurmNode(
        name=values["NodeName"],
        hosts=frozenset(_words(values, "NodeHostName", "NodeAddr")),
        partitions=frozenset(_words(values, "Partitions")),
        features=frozenset(_words(values, "ActiveFeatures")),
        lost=bool(states & _LOST),
        usable=told and not shared and bool(states) and states <= _USABLE,
        idle={
            model: max(0, count - used.get(("gpu", model), 0))
            for (name, model), count in have.items()
            if name == "gpu"
        },
        cpus=float(max(0, (cpus or 0) - (busy or 0))),
        memory=float(max(0, (memory or 0) - (taken or 0)) * _MEBI),
        taken=float(busy or 0),
        cards={model: count for (name, model), count in have.items() if name == "gpu"},
        cores=cpus or 0,
    )


def _words(values: Mapping[str, str], *names: str) -> list[str]:
    words = [word for name in names for word in values.get(name, "").split(",")]
    return [word for word in words if word not in ("", "(null)", "N/A")]


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch(r"[0-9]{1,15}", text) else None


def _gres(text: str) -> dict[tuple[str, str], int] | None:
    """(name, model) -> how many, of `gpu:a100:4(S:0-1)`; None where it cannot be made out."""
    found: dict[tuple[str, str], int] = {}
    if text in ("", "(null)", "N/A"):
        return found
    at = 0
    while at < len(text):
        match = _GRES.match(text, at)
        if match is None or (match.end() < len(text) and text[match.end()] != ","):
            return None
        key = (match["name"], match["model"] or "")
        found[key] = found.get(key, 0) + int(match["count"])
        at = match.end() + 1
    return found
