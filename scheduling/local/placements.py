"""Where cards are taken from: whole numbers of them in pools. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpuwarden.scheduling.local.scenes import Waiting
    from gpuwarden.scheduling.preemption_terms import Pool


def take(free: dict[Pool, int], kind: str, count: int) -> dict[Pool, int]:
    """Take free cards of a kind, from where most are free; returns how many from where."""
    taken: dict[Pool, int] = {}
    pools = sorted(
        (pool for pool in free if pool.kind == kind), key=lambda pool: (-free[pool], pool)
    )
    for pool in pools:
        number = min(count, free[pool])
        if number > 0:
            free[pool] -= number
            taken[pool] = number
            count -= number
    return taken


def add(free: dict[Pool, int], more: Mapping[Pool, int]) -> None:
    """Put cards to those that are free."""
    for pool, count in more.items():
        free[pool] = free.get(pool, 0) + count


def placed(job: Waiting, kind: str, view: Mapping[Pool, int]) -> dict[Pool, int] | None:
    """Where a job's cards would be: in the fullest host that has enough, or over several."""
    pools = sorted((count, pool) for pool, count in view.items() if pool.kind == kind and count > 0)
    for count, pool in pools:
        if count >= job.gpus:
            return {pool: job.gpus}
    if not job.spread or sum(count for count, _pool in pools) < job.gpus:
        return None
    holds, rest = {}, job.gpus
    for count, pool in reversed(pools):
        number = min(rest, count)
        if number:
            holds[pool] = number
            rest -= number
    return holds
