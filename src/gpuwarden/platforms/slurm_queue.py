"""Who waits for a GPU in Slurm's queue, read from `squeue` so that no user's words count.

A pending job waits for a GPU if it asks for one and nothing but room or its turn keeps it. One
that is held, depends on another, begins later or is over a limit would not start on a freed card.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from gpuwarden.errors import ServiceUnavailable
from gpuwarden.platforms import hostlists
from gpuwarden.platforms.slurm import decode_tres
from gpuwarden.platforms.slurm_texts import decode_rows, rows_format

if TYPE_CHECKING:
    from collections.abc import Mapping

QUEUE_FIELDS: Final = (
    "JobID",
    "Partition",
    "Reason",
    "tres-per-job",
    "tres-per-node",
    "tres-per-socket",
    "tres-per-task",
    "PriorityLong",
    "NumNodes",
    "MaxNodes",
    "NumTasks",
    "ReqNodes",
    "Feature",
    "OverSubscribe",
    "Reservation",
    "HetJobID",
    "tres-alloc",
)
"""What `squeue -O` is asked for: a GPU may be asked for in any of four ways. Of a pending job
`tres-alloc` is what it asks for in all."""
WAITING_REASONS: Final = frozenset({"Resources", "Priority"})
"""Why a job pends that would start if there were room for it."""

_JOB = re.compile(r"[0-9]{1,10}")
_LEADING = re.compile(r"[0-9]{1,9}")
# Such as gres:gpu:2, gres/gpu:a100=1, gres/gpu:2 or gpu:a100:1, in a list with other resources.
_GPU = re.compile(
    r"(?:^|,)(?:gres[:/])?gpu(?=[:=,]|$)"
    r"(?::(?P<model>[A-Za-z_][A-Za-z0-9_.-]{0,63}))?(?:[:=](?P<count>[0-9]{1,6}))?(?=,|$)"
)
_ANY_GPU = re.compile(r"(?:^|,)(?:gres[:/])?gpu(?=[:=,]|$)")
_MEMORY = re.compile(r"(?P<number>[0-9]{1,12}(?:\.[0-9]{1,6})?)(?P<unit>[KMGTP]?)")
_UNITS: Final = {"": 2**20, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40, "P": 2**50}


@dataclass(frozen=True, slots=True)
class PendingJob:
    """A job, or all tasks of an array that have not begun.

    Attributes:
        partitions: any of which it may start in.
        reason: why it pends, in Slurm's word.
        gpu: whether it asks for one.
        job_id: Slurm's number.
        priority: the higher, the earlier it is its turn.
        per_job, per_node, per_task: model (empty for any) -> cards that it asks for in this way.
        unread: whether it asks for cards in a way that is not read here.
        nodes: at least on so many.
        max_nodes: on at most so many, or None.
        tasks: how many it has.
        named_nodes: that it must have; None where that cannot be made out.
        features: that its nodes must have, as it wrote them.
        whole_nodes: whether it shares its nodes with nobody.
        reservation: that it asks for.
        het: whether it is a component of a heterogeneous job, all of which start together.
        cpus, memory: that it asks for in all; memory in bytes.
    """

    partitions: frozenset[str]
    reason: str
    gpu: bool
    job_id: int = 0
    priority: int = 0
    per_job: Mapping[str, int] = field(default_factory=dict)
    per_node: Mapping[str, int] = field(default_factory=dict)
    per_task: Mapping[str, int] = field(default_factory=dict)
    unread: bool = False
    nodes: int = 1
    max_nodes: int | None = None
    tasks: int = 1
    named_nodes: frozenset[str] | None = frozenset()
    features: str = ""
    whole_nodes: bool = False
    reservation: str = ""
    het: bool = False
    cpus: float = 1.0
    memory: float = 0.0


def queue_format(mark: str) -> str:
    """`slurm_texts.rows_format` of `QUEUE_FIELDS`, whose answer `decode_queue` reads."""
    return rows_format(QUEUE_FIELDS, mark)


def decode_queue(text: str, mark: str) -> tuple[PendingJob, ...]:
    """The pending jobs of an answer in `queue_format`.

    Raises:
        ServiceUnavailable: it is no such answer.
    """
    return tuple(
        _pending({name: value.strip() for name, value in row.items()})
        for row in decode_rows(text, mark, QUEUE_FIELDS)
    )


def _pending(row: Mapping[str, str]) -> PendingJob:
    if not _JOB.fullmatch(row["JobID"]):
        raise ServiceUnavailable("squeue answered with a job that has no number")
    ways = {name: row[f"tres-per-{name}"] for name in ("job", "node", "socket", "task")}
    cards = {name: asked_cards(text) for name, text in ways.items()}
    total = decode_tres(_word(row["tres-alloc"]))
    cpus = total.get("cpu", "")
    return PendingJob(
        partitions=frozenset(row["Partition"].split(",")),
        reason=row["Reason"],
        gpu=any(found is None or any(found.values()) for found in cards.values()),
        job_id=int(row["JobID"]),
        priority=_leading(row["PriorityLong"]) or 0,
        per_job=cards["job"] or {},
        per_node=cards["node"] or {},
        per_task=cards["task"] or {},
        unread=None in cards.values() or bool(cards["socket"]),
        nodes=_leading(row["NumNodes"]) or 1,
        max_nodes=_leading(row["MaxNodes"]) or None,
        tasks=_leading(row["NumTasks"]) or 1,
        named_nodes=_hosts(row["ReqNodes"]),
        features=_word(row["Feature"]),
        whole_nodes=row["OverSubscribe"] in ("NO", "EXCLUSIVE"),
        reservation=_word(row["Reservation"]),
        het=bool(_leading(row["HetJobID"])),
        cpus=float(cpus) if re.fullmatch(r"[0-9]{1,7}", cpus) else 1.0,
        memory=memory_bytes(total.get("mem", "")) or 0.0,
    )


def asked_cards(text: str) -> dict[str, int] | None:
    """Model -> number of the cards that a request names; None where it cannot be made out."""
    found: dict[str, int] = {}
    matches = list(_GPU.finditer(text))
    if len(matches) != len(_ANY_GPU.findall(text)):
        return None
    for match in matches:
        model = match["model"] or ""
        found[model] = found.get(model, 0) + int(match["count"] or 1)
    return found


def memory_bytes(text: str) -> float | None:
    """Bytes of `8G`; megabytes where there is no unit, as Slurm counts; None if it is none."""
    match = _MEMORY.fullmatch(text)
    return float(match["number"]) * _UNITS[match["unit"]] if match is not None else None


def _leading(text: str) -> int | None:
    match = _LEADING.match(text)
    return int(match[0]) if match is not None else None


def _word(text: str) -> str:
    return "" if text in ("(null)", "N/A", "None") else text


def _hosts(text: str) -> frozenset[str] | None:
    try:
        return frozenset(hostlists.expand(text))
    except ValueError:
        return None


def waits(job: PendingJob) -> bool:
    """Whether a job waits for a GPU and nothing but room or its turn keeps it."""
    return job.gpu and job.reason in WAITING_REASONS
