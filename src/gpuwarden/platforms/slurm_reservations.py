"""Slurm's reservations: `scontrol --oneliner show reservation`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from gpuwarden.errors import ServiceUnavailable
from gpuwarden.platforms import hostlists
from gpuwarden.platforms.slurm import decode_tres

NONE: Final = "No reservations in the system"

_FIELD = re.compile(r"(?:^|\s)(?P<key>[A-Za-z][A-Za-z/]*)=(?P<value>\S*)")
_NUMBER = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True, slots=True)
class Reservation:
    """Nodes or parts of nodes that are kept for somebody.

    Attributes:
        name: unique in the cluster.
        start: Unix time.
        end: Unix time.
        nodes: that are kept, in Slurm's choice; empty where it has none (any more).
        cards: GPUs that are kept; None where whole nodes are, or cores, and not cards.
        cores: that are kept.
        accounts: whose jobs may run there.
        users: likewise.
        flags: in Slurm's words.
        active: whether its time has come.
    """

    name: str
    start: float
    end: float
    nodes: tuple[str, ...] = ()
    cards: int | None = None
    cores: int = 0
    accounts: frozenset[str] = frozenset()
    users: frozenset[str] = frozenset()
    flags: frozenset[str] = frozenset()
    active: bool = False


def decode_reservations(text: str) -> tuple[Reservation, ...]:
    """The reservations of an answer, with times as Unix times (SLURM_TIME_FORMAT=%s).

    What an operator remarked comes last on a line and is not read; of what is named twice the first
    counts.

    Raises:
        ServiceUnavailable: it is no such answer.
    """
    found = [_reservation(line) for line in text.split("\n") if line.startswith("ReservationName=")]
    if not found and NONE not in text:
        raise ServiceUnavailable("`scontrol show reservation` answered in a form that is not known")
    return tuple(found)


def _reservation(line: str) -> Reservation:
    values: dict[str, str] = {}
    for match in _FIELD.finditer(line):
        values.setdefault(match["key"], match["value"])
    start, end = values.get("StartTime", ""), values.get("EndTime", "")
    if not _NUMBER.fullmatch(start) or not _NUMBER.fullmatch(end):
        raise ServiceUnavailable("`scontrol show reservation` answered with times that are none")
    try:
        nodes = hostlists.expand(_word(values.get("Nodes", "")))
    except ValueError as error:
        raise ServiceUnavailable(f"a reservation of nodes that are none: {error}") from error
    cards = decode_tres(values.get("TRES", "")).get("gres/gpu", "")
    cores = values.get("CoreCnt", "")
    return Reservation(
        name=values["ReservationName"],
        start=float(start),
        end=float(end),
        nodes=nodes,
        cards=int(cards) if _NUMBER.fullmatch(cards) else None,
        cores=int(cores) if _NUMBER.fullmatch(cores) else 0,
        accounts=_names(values.get("Accounts", "")),
        users=_names(values.get("Users", "")),
        flags=_names(values.get("Flags", "")),
        active=values.get("State", "") == "ACTIVE",
    )


def _names(text: str) -> frozenset[str]:
    return frozenset(name for name in _word(text).split(",") if name)


def _word(text: str) -> str:
    return "" if text in ("(null)", "N/A", "None") else text
