"""Cards that a node counts as in use and no job has. Pure.

Slurm 22.05, when its controller is started anew, takes over the cards of running jobs without
knowing which they are; as such a job ends, its cards stay in use for ever, and whoever waits for
them is told `Resources`. `scontrol reconfigure` counts all cards anew, and ends nothing.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpuwarden.scheduling.slurm.queues import Reading

LASTING_SECONDS: Final = 60.0
"""How long it has to be so: nodes are read before or after jobs, which begin and end meanwhile."""


def leaked(reading: Reading) -> dict[str, int]:
    """Node -> cards that are in use there and that no job of it has.

    Nodes with jobs of which it is not known how many cards they have there are left out: those on
    several nodes need not have as many on each.
    """
    held: dict[str, float] = {}
    for job in reading.jobs:
        if not job.job.holds:
            continue
        unclear = not job.gpus_known or (job.gpus and len(job.job.nodes) > 1)
        for name in job.job.nodes:
            held[name] = math.inf if unclear else held.get(name, 0.0) + job.gpus
    found = {}
    for node in reading.nodes:
        used = sum(node.cards.values()) - sum(node.idle.values())
        surplus = used - held.get(node.name, 0.0)
        if node.usable and surplus > 0:
            found[node.name] = int(surplus)
    return found


def lasting(
    now_leaked: Mapping[str, int], before: Mapping[str, tuple[float, int]], now: float
) -> dict[str, tuple[float, int]]:
    """Node -> since when it has been so, and the fewest cards since then.

    Args:
        now_leaked: of this look.
        before: of the last one, as this gave it.
        now: Unix time.
    """
    found = {}
    for node, count in now_leaked.items():
        since, least = before.get(node, (now, count))
        found[node] = (since, min(least, count))
    return found


def words_of(known: Mapping[str, tuple[float, int]], now: float) -> str | None:
    """One sentence of the cards that nobody has had for a while, beginning with their number."""
    stuck = {node: n for node, (since, n) in sorted(known.items()) if now - since > LASTING_SECONDS}
    if not stuck:
        return None
    count = sum(stuck.values())
    where = ", ".join(f"{node}: {number}" for node, number in list(stuck.items())[:20])
    return (
        f"{count} card{'' if count == 1 else 's'} in use by no job ({where}): `scontrol "
        "reconfigure` counts them anew, and ends nothing; Slurm 22.05 loses them when its "
        "controller is started anew while jobs run"
    )
