"""Slurm's queue and nodes in the words of `demands`. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from gpuwarden.platforms.slurm import attempt_id
from gpuwarden.platforms.slurm_queue import memory_bytes, waits
from gpuwarden.ruleengine.demands import Demand, Needs, Room, Share, WaitingJob

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from gpuwarden.platforms.slurm import SlurmJob
    from gpuwarden.platforms.slurm_nodes import SlurmNode
    from gpuwarden.platforms.slurm_queue import PendingJob

NAME: Final = "Slurm"
PREFIX: Final = "slurm-"
_NAME = r"[A-Za-z0-9_.-]+"
_FEATURES = re.compile(rf"{_NAME}(?:&{_NAME})*|{_NAME}(?:\|{_NAME})*")
"""All of them, or any; a mixture is read from left to right by Slurm, and not here."""


def waiting_only(jobs: Iterable[PendingJob]) -> Demand:
    """Who waits, without what would serve them."""
    return Demand(NAME, PREFIX, waiting=_in_line(jobs, (), {}))


def demand_of(
    jobs: Iterable[PendingJob],
    nodes: Sequence[SlurmNode],
    running: Iterable[SlurmJob],
    *,
    tiers: Mapping[str, int],
    cluster: str,
) -> Demand:
    """Who waits, what is idle, and what running jobs hold.

    Args:
        jobs: that pend.
        nodes: all.
        running: jobs that have nodes.
        tiers: of all partitions.
        cluster: whose they are.
    """
    names = {node.name for node in nodes}
    hosts: dict[str, set[str]] = {}
    for node in nodes:
        for host in node.hosts:
            # Of an address the first part names nothing.
            short = host if host[:1].isdigit() or ":" in host else host.partition(".")[0]
            for word in (host, short):
                hosts.setdefault(word, set()).add(node.name)
    return Demand(
        NAME,
        PREFIX,
        waiting=_in_line(jobs, nodes, tiers),
        rooms={node.name: Room(node.idle, node.cpus, node.memory) for node in nodes if node.usable},
        holdings={attempt_id(job, cluster): _shares(job) for job in running if job.nodes},
        # A host that is several nodes is none of them.
        hosts={
            host: next(iter(found))
            for host, found in hosts.items()
            if len(found) == 1 and host not in names
        },
    )


def _shares(job: SlurmJob) -> tuple[Share, ...]:
    count = len(job.nodes)
    cpus, cards = _whole(job.tres.get("cpu", "")), _whole(job.tres.get("gres/gpu", ""))
    memory = memory_bytes(job.tres.get("mem", "")) or 0.0
    return tuple(
        Share(
            node,
            # Of several nodes the answer tells no more than the sum.
            cards=cards if count == 1 else None,
            cpus=float((cpus or 0) // count),
            memory=memory / count,
        )
        for node in job.nodes
    )


def _whole(text: str) -> int | None:
    return int(text) if re.fullmatch(r"[0-9]{1,9}", text) else None


def _in_line(
    jobs: Iterable[PendingJob], nodes: Sequence[SlurmNode], tiers: Mapping[str, int]
) -> tuple[WaitingJob, ...]:
    def turn(job: PendingJob) -> tuple[int, int]:
        return -max(tiers.get(name, 0) for name in job.partitions), -job.priority

    waiting = sorted((job for job in jobs if waits(job)), key=turn)
    # Queues are long, and ask for few different things.
    where: dict[tuple[object, ...], frozenset[str]] = {}
    found = []
    for job in waiting:
        asked = (job.partitions, job.features, job.named_nodes)
        if asked not in where:
            where[asked] = _candidates(job, nodes)
        found.append(_waiting(job, where[asked]))
    return tuple(found)


def _waiting(job: PendingJob, candidates: frozenset[str]) -> WaitingJob:
    unknown = _unknown(job)
    return WaitingJob(
        str(job.job_id),
        Needs(1) if unknown else _needs(job),
        candidates=candidates,
        places=job.partitions,
        unknown=unknown,
    )


def _candidates(job: PendingJob, nodes: Sequence[SlurmNode]) -> frozenset[str]:
    """Nodes on which it could run, were there room."""
    return frozenset(
        node.name
        for node in nodes
        if node.usable
        and job.partitions & node.partitions
        and _has(node, job.features)
        and (not job.named_nodes or node.name in job.named_nodes)
    )


def _has(node: SlurmNode, features: str) -> bool:
    """Whether a node has the features; also where it is not known whether it has."""
    if not features or _FEATURES.fullmatch(features) is None:
        return True
    words = frozenset(re.split(r"[&|]", features))
    return bool(words & node.features) if "|" in features else words <= node.features


def _unknown(job: PendingJob) -> str:
    """Why it cannot be told what would serve a job, or empty."""
    models = {*job.per_job, *job.per_node, *job.per_task}
    named = job.named_nodes
    doubts = (
        (job.unread or len(models) != 1, "what cards it asks for could not be read"),
        (
            bool(job.features) and _FEATURES.fullmatch(job.features) is None,
            f"nodes with {job.features[:80]!r} are not told apart here",
        ),
        # With fewer names than nodes it needs these and others.
        (
            named is None or (bool(named) and len(named) != job.nodes),
            "it asks for several nodes, of which it names some",
        ),
        (bool(job.reservation), "it waits in a reservation"),
        (job.het, "it is one of several components that start together"),
    )
    return next((text for holds, text in doubts if holds), "")


def _needs(job: PendingJob) -> Needs:
    (model,) = {*job.per_job, *job.per_node, *job.per_task}
    per_node, per_task = job.per_node.get(model, 0), job.per_task.get(model, 0)
    cards = max(job.per_job.get(model, 0), per_node * job.nodes, per_task * job.tasks)
    return Needs(
        cards,
        per_node=max(1, per_node, per_task),
        unit=max(1, per_task),
        nodes=job.nodes,
        max_nodes=job.max_nodes,
        model=model,
        cpus=job.cpus,
        memory=job.memory,
        whole=job.whole_nodes,
    )
